//! KServe v2 (the Open Inference Protocol) over gRPC with Triton's streaming, as a translation over OpenAI's
//! completions.
//!
//! A request's tensors and parameters become the JSON body of `POST /v1/completions`; the answer, whole or as
//! server-sent events, becomes tensors again. In the order in which a request meets them:
//!
//! * [`serve`] makes a router of its methods; `intake` bounds what clients may send.
//! * `codec` counts a message before it is decoded.
//! * `wire` reads and writes tensors, raw or typed; `fields` and `flags` know the names that clients of Triton's vLLM
//!   and TensorRT-LLM backends and of Dynamo use; `request` makes the body of them.
//! * A [`Backend`] answers: the gateway, or whatever speaks OpenAI. This crate knows nothing of it.
//! * `answer` and `stream` make responses of what it said, and `error` a gRPC status of what it refused.
//!
//! A client that cancels, a `grpc-timeout` that passes and a connection that breaks all drop the future or the body
//! of the backend; no request has a task of its own that would run on.
//!
//! Names of tensors: `text_input` in, `text_output` and `finish_reason` out. By default the prompt is not part of
//! the output (as with OpenAI and Dynamo; Triton's vLLM backend puts it there unless told not to), and
//! `exclude_input_in_output = false` asks for it. Outputs come in the form of the request: raw if its inputs
//! were raw, typed otherwise.
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
pub use headers::PASSED_ON;
pub use serve::serve;
