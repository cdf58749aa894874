//! The stateless part of OpenAI's Responses API (`POST /v1/responses`) over a chat completion.
//!
//! Nothing is stored, so a request must bring its whole conversation, and only functions of the client are tools.
//!
//! Source: <https://platform.openai.com/docs/api-reference/responses>,
//! <https://platform.openai.com/docs/api-reference/responses-streaming>.

mod answer;
mod facts;
mod input;
mod items;
mod open;
mod request;
mod stream;
mod tools;

pub use answer::from_chat;
pub use facts::Facts;
pub use request::to_chat;
pub use stream::Stream;
