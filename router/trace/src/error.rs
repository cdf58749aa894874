//! What can fail: only the start. Later failures are counted and warned of, as no request may suffer from them.

use std::io;

/// Why traces cannot be exported.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// A value of the configuration cannot be used.
    #[error("the configuration of traces is bad: {what}: {reason}")]
    Config {
        /// Which value.
        what: &'static str,
        /// Why. It never contains a header's value, which may be a secret.
        reason: String,
    },
    /// The exporter's thread or its runtime could not be started.
    #[error("starting the exporter of traces: {0}")]
    Start(#[from] io::Error),
}
