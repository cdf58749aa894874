//! Looks into captures of engines.
//!
//! * [`events`]: each line of a capture of KV events, as it is understood.
//! * [`predictions`]: events and requests of live engines replayed in time order: the cached tokens that the index would
//!   have predicted, against those that the engine reported.
//!
//! Captures are lines of JSON, plain or compressed with gzip.

mod capture;
pub mod events;
pub mod predictions;
