//! A mock engine: no model, simulated time, the contract of a real engine.
//!
//! Thousands of workers run in one process, each behind its own port. The output of a worker is a function of
//! the preceding tokens, equal on all workers; its timing is simulated by a continuous batch over a KV pool
//! with vLLM's rules; faults are armed by kind and drawn by seed. Tests and benchmarks start it in-process.
//!
//! * [`MockConfig`]: the configuration of a worker.
//! * `output_generator`: outputs. `pool`: KV blocks and their events. `scheduler`: time.
//! * `worker`: the state of one worker, and the life of a request in it. `output_progress`: the progress that its client waits on.
//! * `lease`, `rendezvous`: hand-offs between workers of this process.
//! * `events`, `sglang_events`: KV events on ZMQ.
//! * `fault`: faults on demand.
//! * `server`: vLLM's and SGLang's HTTP surfaces.
//! * [`Mock`], [`fleet`]: starting and stopping.

#![forbid(unsafe_code)]

mod config;
mod error;
mod events;
mod fault;
mod lease;
mod mock;
mod output_generator;
mod output_progress;
mod pool;
mod rendezvous;
mod scheduler;
mod server;
mod sglang_events;
mod stats;
mod worker;

pub use config::{Dialect, LoadFailure, MockConfig, Role};
pub use error::MockError;
pub use fault::{Fault, FaultKind};
pub use mock::{FLEET_MAX, Mock, fleet};
pub use stats::MockStats;
