//! Other surfaces over a chat completion: Anthropic's Messages API and the stateless part of OpenAI's Responses API.
//!
//! Both are pure translations. A request becomes the body of a `/v1/chat/completions` request, and the answer to that,
//! whole or piece by piece, becomes the answer that the client of the other surface expects. Whatever serves chat
//! completions serves these too; nothing here knows engines, HTTP or time.

#![forbid(unsafe_code)]

pub mod anthropic;
mod chat;
mod fields;
mod problem;
pub mod responses;
mod sse;

pub use problem::Problem;
