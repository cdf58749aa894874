//! The contract between gateway and engines.
//!
//! * [`openai`]: requests parsed and answers rendered in the OpenAI shapes, with vLLM's extensions. The gateway
//!   and the reference engine share this code, so they cannot disagree about a field.
//! * [`client`]: streams completions from a worker that speaks vLLM's HTTP surface, and asks it who it is.
//! * [`handoff`]: the `kv_transfer_params` of the native prefill→decode hand-off.

#![forbid(unsafe_code)]

pub mod client;
pub mod handoff;
pub mod openai;
