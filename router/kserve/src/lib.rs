//! KServe v2 (the Open Inference Protocol) over gRPC with Triton's streaming, as a translation over OpenAI's
//! completions.
//!
//! A request's tensors and parameters are converted to the JSON body of `POST /v1/completions`; the answer,
//! whole or as server-sent events, is converted back to tensors. In the order in which a request uses them:
//!
//! * [`serve`] makes a router of the methods; `intake` bounds what clients may send.
//! * `codec` counts a message before it is decoded.
//! * `wire` reads and writes tensors, raw or typed; `fields` and `flags` have the names that clients of
//!   Triton's vLLM and TensorRT-LLM backends and of Dynamo use; `request` makes the body from them.
//! * A [`Backend`] answers: the gateway, or any server of OpenAI's API. This crate does not depend on it.
//! * `answer` and `stream` convert its answers to responses, and `error` its errors to gRPC statuses.
//!
//! A client that cancels, a `grpc-timeout` that passes and a connection that breaks all drop the future or
//! the body of the backend; no request has a task of its own that would continue.
//!
//! Names of tensors: `text_input` in, `text_output` and `finish_reason` out. By default the prompt is not
//! part of the output (as with OpenAI and Dynamo; Triton's vLLM backend includes it unless told not to),
//! and `exclude_input_in_output = false` includes it. Outputs have the form of the request: raw if its
//! inputs were raw, typed otherwise.
//!
//! Sources: the Open Inference Protocol's gRPC definition, Triton's guide to decoupled models, the documentation of
//! its vLLM and TensorRT-LLM backends, and of Dynamo's KServe frontend.

#![forbid(unsafe_code)]

mod answer;
mod backend;
mod codec;
mod config;
mod error;
mod fields;
mod flags;
mod headers;
mod health;
mod infer;
mod intake;
mod models;
pub mod proto;
mod request;
mod serve;
mod service;
mod sse;
mod stream;
mod wire;

pub use backend::{Answer, Backend, Call};
pub use config::Config;
pub use headers::FORWARDED_METADATA;
pub use serve::serve;
