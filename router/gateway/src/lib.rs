//! The OpenAI service in front of the workers.
//!
//! A request is parsed, templated, tokenised and hashed once; the index tells which worker holds how much of
//! it; the policy chooses; the workers are asked for a streamed completion of token ids. Text, stop strings
//! and answers are made here from those ids. That is what allows a request to go on elsewhere when its worker
//! dies: what has been generated so far is known exactly, so the next worker gets prompt + tokens so far.
//!
//! Reading order: `fleet` (who is there), `load` (what they do), `routing` (who gets it), `choice` (one output,
//! from legs to migration), `service` (HTTP), `peers` (other gateways), `warm` (snapshots), `metrics`.
//!
//! A client that goes away drops its response, which drops the choices, which drop their connections to the
//! workers: cancellation needs no bookkeeping. Nothing on the way from a token to its byte waits for a timer.

#![forbid(unsafe_code)]

mod breaker;
mod choice;
mod collect;
mod config;
mod fleet;
mod load;
mod metrics;
mod peers;
mod prompt;
mod relay;
mod requests;
mod routing;
mod service;
mod warm;
mod watch;
mod worker;

pub use config::{GatewayConfig, WorkerConfig};
pub use fleet::Fleet;
pub use service::{Gateway, router};
