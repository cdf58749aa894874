//! Errors of the start. Later failures are counted and logged, since no request may fail because of them.

use std::io;

/// Reason for which traces cannot be exported.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// A value of the configuration cannot be used.
    #[error("the configuration of traces is bad: {what}: {reason}")]
    Config {
        /// Name of the value.
        what: &'static str,
        /// Reason, in words. Never contains a header's value, which may be a secret.
        reason: String,
    },
    /// The exporter's thread or its runtime could not be started.
    #[error("starting the exporter of traces: {0}")]
    Start(#[from] io::Error),
}
