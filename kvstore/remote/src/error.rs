//! Errors of the remote tier.

/// Errors of setting up a pool or its client. Later failures are outcomes.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// Settings are out of range.
    #[error("remote tier: {}", problems.join("; "))]
    Config {
        /// One sentence for each setting that is out of range.
        problems: Vec<String>,
    },
    /// More nodes than allowed.
    #[error("remote tier: {count} nodes are configured, at most {limit} are allowed")]
    TooManyNodes {
        /// Number of nodes that were given.
        count: usize,
        /// The limit.
        limit: usize,
    },
    /// Two nodes have the same name, and so would have the same share.
    #[error("remote tier: two nodes are named '{name}'")]
    DuplicateNode {
        /// The name.
        name: String,
    },
    /// A system call failed while the thread was started.
    #[error("pool service: {operation}: {error}")]
    System {
        /// The operation.
        operation: &'static str,
        /// Error of the operation.
        error: std::io::Error,
    },
}
