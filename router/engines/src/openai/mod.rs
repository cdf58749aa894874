//! OpenAI requests and answers, with the extensions that vLLM adds.

mod error;
mod fields;
mod json_schema;
mod render;
mod request;
mod sampling;
mod schema_size;
mod structured;
mod tool_choice;

pub use error::ApiError;
pub use fields::Fields;
pub use render::{Answer, Finish, Kind, TokenLogprob, TokenLogprobs, Usage, model_list};
pub use request::{ChatRequest, CompletionRequest, KNOWN_FIELDS, Prompt};
pub use sampling::Sampling;
pub use structured::{STRUCTURED_OUTPUTS, StructuredOutput};
pub use tool_choice::ToolChoice;
