//! Turns a model's output text into reasoning, content and tool calls, while it streams.
//!
//! The input is raw text with special tokens spelled out, in pieces of any size; the output is a list of
//! [`Output`]. [`Parser`] serves one output in one of the formats of [`ToolFormat`] and
//! [`ReasoningFormat`].
//!
//! - The division of the text into pieces does not change the result.
//! - Text that may become a marker is held back, and so is a call until the first byte of its arguments
//!   proves it; everything else comes out at once. What is held is bounded ([`HEADER_BYTES_MAX`] and its
//!   neighbours), and the work is linear in the text.
//! - JSON arguments are the model's own text, verbatim. The XML-like and pythonic formats are turned into
//!   JSON as they come.
//! - Nothing the model said is lost. A malformed call that has not started comes out as content exactly as
//!   written. One that has started keeps the arguments it has, ends with `complete: false`, and the text
//!   from the first byte that cannot belong to it is content. A slip inside JSON that leaves its brackets
//!   intact stays in the arguments, verbatim, and `complete` is `false` too.
//! - White space is kept in reasoning and in content, and dropped after a call. Tags, and keys of a call's
//!   object other than name and arguments, are dropped.
//!
//! The end-of-turn token (`<|im_end|>`, `<|eot_id|>`) is expected to be cut off by the engine; only
//! harmony's are known here.
//!
//! The crate knows nothing of HTTP, tokens or engines.

#![forbid(unsafe_code)]

mod arguments;
mod call;
mod forced;
mod format;
mod glm;
mod harmony;
mod hermes;
mod ids;
mod json;
mod limits;
mod list;
mod llama;
mod machine;
mod mistral;
mod output;
mod parser;
mod python;
mod pythonic;
mod qwen_coder;
mod reasoning;
mod section;
mod tool;
mod value;

pub use format::{ReasoningFormat, ToolFormat};
pub use ids::CallIds;
pub use limits::{ARGUMENTS_HELD_BYTES_MAX, HEADER_BYTES_MAX, NESTING_MAX, VALUE_HELD_BYTES_MAX};
pub use output::Output;
pub use parser::Parser;
pub use tool::Tool;
