//! The OpenAI service in front of the workers.
//!
//! A request is templated, tokenised and hashed once; the index tells which worker holds how much of it; the policy
//! chooses. Engines are asked in attempts, and what they answer becomes the client's answer in one of two forms: the engine's
//! own bytes, as they come, or token ids of which text, stop strings and tool calls are made here; that is how the reference
//! engine is served.
//!
//! Reading order: `service` (state and routes), `caller` and `access` (who asks), `request` (one request, stage by stage),
//! `memory` and `compute` (bounds and threads for large bodies), `models` (the model that a request names), `guardrail` (a service that checks contents), `gate` (waiting for
//! a place), `upstream` (attempts and what comes of them), `answer` (what the client gets), `stored` (what clients leave here); then `status`, `roster` (workers,
//! for administrators), `history`, `page`, `grpc`, `picker` (requests that a proxy sends), `metrics`, `requests_by`, `timing`, `traced` (OpenTelemetry). Workers, their
//! health and loads, and the choice among them are `router-fleet`.
//!
//! A client that goes away drops its response, which drops the connections to the workers: cancellation needs no bookkeeping.
//! Nothing on the way from a token to its byte waits for a timer.

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
mod kernel;
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

pub use access::{AccessConfig, Explain, JwksFrom, TokenConfig};
pub use answer::output_parser::Formats;
pub use config::{GatewayConfig, TextBy, Tuning};
pub use grpc::serve_grpc;
pub use guardrail::GuardrailConfig;
pub use models::{ModelConfig, Split};
pub use picker::{serve_picker, serve_picker_health};
pub use router_access::random_number;
/// The table of the gateway's metrics, in Markdown.
pub const METRICS: &str = include_str!("../METRICS.md");

pub use service::{Gateway, MoreMetrics, admin_router, api_router, router, status_router};
