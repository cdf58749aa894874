//! OpenAI's Responses API (`POST /v1/responses`) over a chat completion.
//!
//! Translations are pure. Whoever serves them stores responses and conversations, if at all ([`StoredFields`]); without that a
//! request must bring its whole conversation. Only functions of the client are tools.
//!
//! Source: <https://platform.openai.com/docs/api-reference/responses>,
//! <https://platform.openai.com/docs/api-reference/responses-streaming>.

mod answer;
mod facts;
mod input;
mod items;
mod open;
mod request;
mod stored;
mod stream;
mod tools;

pub use answer::from_chat;
pub use facts::Facts;
pub use request::to_chat;
pub use stored::{StoredFields, input_items, item};
pub use stream::Stream;
