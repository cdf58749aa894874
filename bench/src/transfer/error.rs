//! The error that callers distinguish from all others.

/// A required device, program or GPU is missing. No measurement was made, and none failed; a program ends with
/// [`super::EXIT_UNAVAILABLE`].
#[derive(Debug, thiserror::Error)]
#[error("SKIPPED: {0}")]
pub struct Unavailable(pub String);
