//! The OpenAI service in front of the workers.
//!
//! A request is templated, tokenised and hashed once; the index tells how much of it each worker holds; the
//! policy chooses. Engines are asked in attempts, and their output becomes the client's answer in one of
//! two forms: the engine's own bytes, relayed, or token ids of which the gateway makes text, stop strings
//! and tool calls; the reference engine is served in the second form.
//!
//! Reading order: `service` (state and routes), `caller` and `access` (identity and rights of callers),
//! `request` (one request, stage by stage), `memory` and `compute` (bounds and threads for large bodies),
//! `models` (the model that a request names), `guardrail` (a service that checks contents), `gate`
//! (admission), `upstream` (attempts and their events), `answer` (answers to clients), `stored` (objects
//! that clients store here); then `status`, `roster` (workers, for administrators), `history`, `page`,
//! `grpc`, `picker` (requests that a proxy sends), `metrics`, `requests_by`, `timing`, `traced`
//! (OpenTelemetry). Workers, their health and loads, and the choice among them are `router-fleet`.
//!
//! A client that disconnects drops its response, which drops the connections to the workers: cancellation
//! needs no bookkeeping. No step between an engine's token and the client's bytes waits for a timer.

#![forbid(unsafe_code)]

mod access;
mod answer;
mod caller;
mod compute;
mod config;
mod gate;
mod grpc;
mod guardrail;
mod history;
mod host_latencies;
mod lengths;
mod memory;
mod metrics;
mod models;
mod page;
mod picker;
mod plan;
mod request;
mod requests_by;
mod roster;
mod service;
mod status;
mod stored;
mod timing;
mod traced;
mod upstream;

pub use access::{AccessConfig, Explain, JwksSource, TokenConfig};
pub use answer::output_parser::Formats;
pub use config::{GatewayConfig, TextSource, Tuning};
pub use grpc::serve_grpc;
pub use guardrail::GuardrailConfig;
pub use models::{ModelConfig, Split};
pub use picker::{serve_picker, serve_picker_health};
pub use router_access::random_number;
/// The table of the gateway's metrics, in Markdown.
pub const METRICS: &str = include_str!("../METRICS.md");

pub use service::{Gateway, MetricsSource, admin_router, api_router, router, status_router};
