//! Replays traces against a simulated fleet of workers, behind the real index and the real policies, and captures of
//! live engines against the index.
//!
//! * [`worker`]: a worker: continuous batching with chunked prefill, a pool of blocks with least-recently-used
//!   eviction, step times from a linear model.
//! * [`simulate()`]: arrivals, decisions, what the index and the learner get to know and when.
//! * [`report`]: tables and a picture.
//! * [`inspect`]: captures of engines: KV events as they are understood, and predicted against reported cached tokens.
//!
//! Equal seed, equal run. The simulation leaves out the network (events and loads are known the moment that they happen),
//! the time of decisions, failures, and the blocks of answers (a trace does not say which blocks of the next prompt they
//! are), so hit rates are those of prompts alone. A worker reserves room for an answer of the length that it will have.

#![forbid(unsafe_code)]

pub mod inspect;
mod pool;
pub mod report;
pub mod simulate;
pub mod worker;

pub use simulate::{Outcome, Setup, simulate};
