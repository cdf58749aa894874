//! Anthropic's Messages API (`POST /v1/messages`, `POST /v1/messages/count_tokens`) over a chat completion.
//!
//! Source: <https://docs.anthropic.com/en/api/messages>, <https://docs.anthropic.com/en/api/messages-streaming>,
//! <https://docs.anthropic.com/en/api/messages-count-tokens>, <https://docs.anthropic.com/en/api/errors>.

mod answer;
mod cache_control;
mod error;
mod messages;
mod request;
mod stream;
mod tools;

pub use answer::{Facts, count_answer, from_chat};
pub use error::error_body;
pub use request::{to_chat, to_chat_for_count};
pub use stream::Stream;
