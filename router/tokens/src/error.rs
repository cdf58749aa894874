//! Errors of tokenizers and chat templates.

use std::path::{Path, PathBuf};

/// Errors in a model's text files, or in a request's text.
#[derive(Debug, thiserror::Error)]
pub enum TokensError {
    /// A file of the model folder cannot be used.
    #[error("{}: {reason}", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Description of the error.
        reason: String,
    },
    /// The tokenizer refused a text.
    #[error("tokenizer: {0}")]
    Encode(String),
    /// The chat template refused the messages, often on purpose (`raise_exception`).
    #[error("chat template: {0}")]
    Template(String),
}

impl TokensError {
    pub(crate) fn file(path: &Path, reason: impl ToString) -> Self {
        Self::File { path: path.to_owned(), reason: reason.to_string() }
    }
}
