//! Errors of mock engines.

/// Error of starting a mock or of arming a fault.
#[derive(Debug, thiserror::Error)]
pub enum MockError {
    /// The configuration is invalid.
    #[error("mock engine: {0}")]
    Config(String),
    /// Listening on an address failed.
    #[error("mock engine: listen on {address}: {reason}")]
    Listen {
        /// The address.
        address: String,
        /// Cause of the failure.
        reason: String,
    },
    /// The KV events cannot be published.
    #[error("mock engine: {0}")]
    Events(String),
    /// More faults were given than can be armed.
    #[error("mock engine: more than {0} faults are armed")]
    Faults(usize),
}
