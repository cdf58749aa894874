//! What can go wrong in this crate.

use std::io;

/// A server that did not start, or a configuration that it refuses.
#[derive(Debug, thiserror::Error)]
pub enum RespError {
    /// The configuration contradicts itself or leaves its range.
    #[error("resp: {0}")]
    Configuration(String),
    /// A place to listen that is not there, not ours or taken.
    #[error("resp: listen on {place}: {source}")]
    Listen {
        /// Address or path.
        place: String,
        /// What the system said.
        source: io::Error,
    },
}
