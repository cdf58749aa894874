//! The OpenAI service in front of the workers.
//!
//! A request is templated, tokenised and hashed once; the index tells which worker holds how much of it; the policy
//! chooses. Then there are two ways to an answer. `relay`: the engine gets the client's request as it came, and its bytes
//! go back as they come. `collect`: the engine is asked for token ids, and text, stop strings, tool calls and answers are
//! made here; that is how the reference engine is served.
//!
//! Reading order: `worker` and `fleet` (who is there), `watch` (how they are), `report` (what they say of their load),
//! `capacity` (what they can take), `model` (what they serve), `load` (what they do), `routing` (who gets it), `routed`
//! (what goes where no events come from), `caller` and `access` (who asks), `requests` (HTTP), `memory`, `compute` and `body` (what a request may take, where
//! large ones are worked on, how they are read), `prompt` (tokens), `relay`, `collect` with `choice` (one output, from legs to migration) and
//! `said` (tool calls and reasoning), `service` (state and small routes), `status` (what is shown of it), `decisions`,
//! `page`, `grpc`, `metrics`, `timing`, `traced` (OpenTelemetry), `breaker`, `peers` (other gateways), `warm` (snapshots).
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
