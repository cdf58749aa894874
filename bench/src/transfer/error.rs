//! The one failure that callers tell from all others.

/// What was asked for needs something that is not here: a device, a program, a GPU. Nothing was measured, and nothing
/// failed; a program ends with [`super::EXIT_UNAVAILABLE`].
#[derive(Debug, thiserror::Error)]
#[error("SKIPPED: {0}")]
pub struct Unavailable(pub String);
