//! vLLM's HTTP surface over an engine.
//!
//! `/v1/completions`, `/v1/chat/completions`, `/tokenize`, `/v1/models`, `/health`, `/ping`, `/version`, `/metrics`,
//! `/kv_event_sources`, `/reset_prefix_cache`, and `/kvasir/worker`, by which a gateway learns what this worker
//! is. A client that goes away drops its body, which drops the [`OutputStream`](crate::OutputStream), which cancels
//! the request: no timer is involved.
//!
//! With [`WorkerState::key`] every path but `/health` and `/ping` asks for it.

mod answer;
mod metrics;
mod routes;

pub use routes::{WorkerState, router};
