//! Errors of this crate.

use std::io;

/// Errors of starting the server and of checking its configuration.
#[derive(Debug, thiserror::Error)]
pub enum RespError {
    /// The configuration contradicts itself or is out of range.
    #[error("resp: {0}")]
    Configuration(String),
    /// An address cannot be listened on: it does not exist, is not allowed, or is in use.
    #[error("resp: listen on {place}: {source}")]
    Listen {
        /// Address or path.
        place: String,
        /// Error of the system call.
        source: io::Error,
    },
}
