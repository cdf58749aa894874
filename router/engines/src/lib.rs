//! The contract between gateway and engines.
//!
//! * [`openai`]: requests parsed and answers rendered in the OpenAI shapes, with vLLM's extensions. The gateway
//!   and the reference engine share this code, so they cannot disagree about a field.
//! * [`body`]: a request's JSON as it came, for what passes through.
//! * [`shape`]: how large a JSON text is as a tree, before one is built.
//! * [`upstream`]: connections to one engine, driven by the requests that use them.
//! * [`dialect`]: what each make of engine says of itself, and how its prefill and decode legs are asked.
//! * [`client`]: streams completions of token ids from a worker, and asks workers about themselves.
//! * [`intake`]: request bodies on their way into an engine's own HTTP server.
//! * [`exposition`]: metrics in Prometheus' text forms.
//! * [`handoff`]: the `kv_transfer_params` of the native prefill→decode hand-off.
//! * [`key`]: the key that an engine asks its callers for.

#![forbid(unsafe_code)]

pub mod body;
pub mod client;
pub mod dialect;
pub mod exposition;
pub mod handoff;
pub mod intake;
pub mod key;
pub mod openai;
pub mod shape;
pub mod upstream;
