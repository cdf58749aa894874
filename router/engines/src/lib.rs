//! The contract between gateway and engines.
//!
//! * [`upstream`]: connections to one engine, driven by the requests that use them.
//! * [`dialect`]: what each make of engine says of itself, and how its prefill and decode legs are asked.
//! * [`tokens`]: streamed completions of token ids.
//! * [`client`]: questions to workers about themselves.
//! * [`intake`]: request bodies on their way into an engine's own HTTP server.
//! * [`exposition`]: metrics in Prometheus' text forms.
//! * [`connector_params`]: what `kv_transfer_params` say beside a hand-off.
//! * [`handoff`]: the `kv_transfer_params` of Kvasir's own prefill→decode hand-off.
//! * [`proxy_dispatch`]: requests that a proxy sends in the gateway's place.
//! * [`key`]: the key that an engine asks its callers for.

#![forbid(unsafe_code)]

pub mod client;
pub mod connector_params;
pub mod dialect;
pub mod exposition;
pub mod handoff;
mod http1;
pub mod intake;
pub mod key;
pub mod proxy_dispatch;
pub mod tokens;
pub mod upstream;
