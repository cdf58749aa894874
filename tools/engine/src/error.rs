//! Errors of the reference engine.

use std::path::{Path, PathBuf};

/// Errors of an engine's start.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A file of the model folder cannot be used.
    #[error("{}: {reason}", path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Description of the error.
        reason: String,
    },
    /// A tensor is missing or has another shape.
    #[error("model weights: {0}")]
    Weights(String),
    /// The block layout that follows from the model cannot be used.
    #[error("{0}")]
    Layout(#[from] kvstore_block::LayoutError),
    /// The KV pool cannot be allocated.
    #[error("KV pool: {0}")]
    Memory(#[from] dataplane_memory::MemoryError),
    /// A thread could not be started.
    #[error("engine thread: {0}")]
    Thread(std::io::Error),
}

impl EngineError {
    pub(crate) fn file(path: &Path, reason: impl ToString) -> Self {
        Self::File { path: path.to_owned(), reason: reason.to_string() }
    }
}
