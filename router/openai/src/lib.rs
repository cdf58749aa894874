//! The API: requests, answers and errors of OpenAI's surfaces, with the extensions that vLLM adds, and of Anthropic's
//! messages.
//!
//! * [`Surface`]: what a client may ask for. [`ApiError`]: how it is told that something is wrong.
//! * [`RawBody`]: a request's JSON as it came, for what passes through; [`JsonCounts`]: how large it would be as a tree.
//! * [`ChatRequest`], [`CompletionRequest`], [`Sampling`], [`StructuredOutput`]: requests read field by field. The gateway and
//!   the reference engine share them, so they cannot disagree about a field.
//! * [`Answer`]: answers of token ids, whole and in pieces. [`sse`]: the events of streams.
//! * [`anthropic`] and [`responses`]: pure translations to chats and from their answers. Whatever serves chats serves these.

#![forbid(unsafe_code)]

mod answer;
pub mod anthropic;
mod body;
mod chat;
mod entries;
mod error;
mod fields;
mod form;
mod json_counts;
mod json_schema;
mod nested_fields;
mod request;
pub mod responses;
mod retention;
mod sampling;
mod schema_size;
pub mod sse;
mod structured;
mod surface;
mod texts;
mod tool_choice;
mod usage;

pub use answer::{Answer, Finish, TokenLogprob, TokenLogprobs, model_list};
pub use body::RawBody;
pub use entries::{Entries, Entry};
pub use error::ApiError;
pub use fields::Fields;
pub use form::{FORM_USAGE, FormFile};
pub use json_counts::{JsonCounts, JsonLimits};
pub use request::{ChatRequest, CompletionRequest, KNOWN_FIELDS, Prompt};
pub use retention::take_prompt_cache_retention;
pub use sampling::Sampling;
pub use structured::{STRUCTURED_OUTPUTS, StructuredOutput};
pub use surface::{Kind, Surface};
pub use texts::{
    TEXT_FIELDS, TextOfAnswer, each_text, each_text_of_field, has_token_ids, media, replace_texts_of_answer,
    texts_of_answer,
};
pub use tool_choice::ToolChoice;
pub use usage::Usage;
