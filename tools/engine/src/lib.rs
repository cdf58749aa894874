//! The reference engine: a decoder-only transformer on the CPU that behaves like a real engine.
//!
//! With this engine the whole appliance can be run, measured and tested without a GPU, with true attention over true KV blocks.
//! Correctness comes first: log-probabilities agree with vLLM and `transformers` on the same weights, and the output does not
//! depend on how requests were batched, chunked, cached, moved or resumed, bit for bit. All comparisons rest on the last
//! property, which holds because: each output row of every matrix product is summed in one fixed order whatever the batch,
//! attention is computed per row over exactly the row's own prefix, and keys and values are rounded to the cache's element
//! type before they are read.
//!
//! Reading order: [`model`] (weights and the forward pass), `kv` (paged slots), `sampler`, `sequence`,
//! `blocks`, `scheduler` and `engine` (continuous batching on one thread), `events`, [`server`] (vLLM's HTTP surface).

mod blocks;
mod config;
mod engine;
mod error;
mod events;
mod kv;
pub mod model;
mod sampler;
mod scheduler;
mod sequence;
pub mod server;
mod stats;

pub use config::EngineConfig;
pub use engine::{Engine, EngineHandle, EngineInbox, Output, OutputStream, Request, Services, SubmitError};
pub use error::EngineError;
pub use events::{EventPublisher, EventSink, PublisherAddresses};
pub use kv::KvPool;
pub use sampler::{Choice, choose};
pub use stats::EngineStats;
