//! The OpenAI service in front of the workers.
//!
//! A request is templated, tokenised and hashed once; the index tells which worker holds how much of it; the policy
//! chooses. Then there are two ways to an answer. `relay`: the engine gets the client's request as it came, and its bytes
//! go back as they come. `collect`: the engine is asked for token ids, and text, stop strings, tool calls and answers are
//! made here; that is how the reference engine is served.
//!
//! Reading order: `service` (state and routes), `caller` and `access` (who asks), `requests` (one HTTP request), `memory`,
//! `compute` and `body` (bounds, threads and parsing of bodies), `models` (the model that a request names), `prompt` (tokens),
//! `stay` and `gate` (accounts, waiting for a place), `relay`, `collect` with `choice` and `said` (the two ways to an answer),
//! `translate` (other surfaces), `deadline`, `status`, `roster` (workers, for administrators), `history`, `page`, `grpc`,
//! `metrics`, `requests_by`, `timing`, `traced` (OpenTelemetry). Workers, their health and loads, and the choice among them are
//! `router-fleet`.
//!
//! A client that goes away drops its response, which drops the choices, which drop their connections to the
//! workers: cancellation needs no bookkeeping. Nothing on the way from a token to its byte waits for a timer.

#![forbid(unsafe_code)]

mod access;
mod body;
mod caller;
mod choice;
mod collect;
mod compute;
mod config;
mod deadline;
mod gate;
mod grpc;
mod history;
mod memory;
mod metrics;
mod models;
mod page;
mod prompt;
mod relay;
mod requests;
mod requests_by;
mod roster;
mod said;
mod service;
mod status;
mod stay;
mod timing;
mod traced;
mod translate;

pub use access::{AccessConfig, Explain, JwksFrom, TokenConfig};
pub use config::{GatewayConfig, TextBy, Tuning};
pub use grpc::serve_grpc;
pub use models::{ModelConfig, Split};
pub use router_access::random_number;
pub use router_kserve::Unread;
pub use said::Formats;
pub use service::{Gateway, MoreMetrics, admin_router, api_router, router, status_router};
