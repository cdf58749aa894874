//! The text side of a model: tokenizer, incremental detokenizer, chat template, special tokens.
//!
//! [`ModelText`] loads them from a Hugging Face folder, or gives those of the built-in tiny model. Gateway and
//! reference engine use the same code, so both see the same token ids.
//!
//! Tokenisation is `tokenizers` 1.0 (pinned release candidate: 50 to 90 times faster than 0.23 with the same
//! ids); templates are `minijinja` set up like `transformers` sets up Jinja2. Encoding a long prompt takes
//! milliseconds: call it off the async threads.

#![forbid(unsafe_code)]

mod bytes_tokenizer;
mod conversation;
mod detokenize;
mod error;
mod huggingface;
mod json_filter;
mod model_text;
mod pieces;
mod stop;
mod template;
mod tokenizer;

pub use detokenize::Detokenizer;
pub use error::TokensError;
pub use model_text::{EncodedChat, ModelText, TINY_SPECIALS, TINY_VOCABULARY};
pub use stop::StopStrings;
pub use template::ChatTemplate;
pub use tokenizer::Tokenizer;
