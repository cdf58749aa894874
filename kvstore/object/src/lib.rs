//! The object tier: KV blocks in an S3-compatible store, or in a directory, that several clusters share.
//!
//! Blocks travel in *runs*: `run_blocks` consecutive blocks of a chain, from a multiple of `run_blocks` on, are
//! one object. Its key is made of the identity of the run's last block. An identity is a chained hash, so that
//! key identifies the whole prefix, and a look-up requests keys that it computes: it never lists.
//!
//! Invariants: a block is returned only after its checksum and its place in the chain were verified; a slow,
//! dead or misbehaving server costs at most the caller's deadline and then a miss; no secret reaches a log line
//! or an error text, because no text from the server, the HTTP library or the credentials file goes into one.
//!
//! Reading order: [`ObjectConfig`], `key`, `format` (the bytes of an object, fuzzed), `backend` (which store),
//! `request` (deadline, budget of retries, breaker: every request goes through it), `read`, `write`, `sweep`.
//! Not a hot path: a request costs milliseconds, and allocations are not counted. Runs on a tokio runtime that
//! the store keeps for it; nothing here blocks a thread except the directory backend, on tokio's blocking pool.
//!
//! The crate `object_store` implements S3 (signatures, listing, multipart) and the directory layout. Its own
//! retries are switched off, for they have neither a budget nor the caller's deadline.

#![forbid(unsafe_code)]

mod backend;
mod breaker;
mod budget;
mod config;
mod credentials;
mod error;
pub mod format;
mod key;
mod metrics;
mod presence;
mod read;
mod request;
mod sweep;
mod tier;
mod write;

pub use config::{Location, ObjectConfig, S3Config};
pub use credentials::{Credentials, Secret};
pub use error::{ConfigError, FailureCause, ObjectError, Operation};
pub use format::Block;
pub use key::object_key;
pub use metrics::ObjectCounters;
pub use sweep::SweepReport;
pub use tier::{Clock, ObjectTier, Outcome, SystemClock, VerifiedBlock};
