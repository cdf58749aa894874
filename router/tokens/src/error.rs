use std::path::{Path, PathBuf};

/// What can go wrong with a model's text files, or with a request's text.
#[derive(Debug, thiserror::Error)]
pub enum TokensError {
    /// A file of the model folder cannot be used.
    #[error("{}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
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
