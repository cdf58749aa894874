/// Why a mock did not start, or did not take an order.
#[derive(Debug, thiserror::Error)]
pub enum MockError {
    /// The configuration cannot work.
    #[error("mock engine: {0}")]
    Config(String),
    /// An address cannot be listened on.
    #[error("mock engine: listen on {address}: {reason}")]
    Listen {
        /// The address.
        address: String,
        /// What is wrong with it.
        reason: String,
    },
    /// The KV events cannot be published.
    #[error("mock engine: {0}")]
    Events(String),
    /// More faults than can be armed.
    #[error("mock engine: more than {0} faults are armed")]
    Faults(usize),
}
