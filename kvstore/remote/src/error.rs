/// What can go wrong while a pool or its client is set up. Afterwards everything is an outcome.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// Values outside of their range, all of them.
    #[error("remote tier: {}", problems.join("; "))]
    Config {
        /// One sentence for each.
        problems: Vec<String>,
    },
    /// More nodes than allowed.
    #[error("remote tier: {count} nodes are configured, at most {limit} are allowed")]
    TooManyNodes {
        /// How many were given.
        count: usize,
        /// The limit.
        limit: usize,
    },
    /// Two nodes have one name, and so would have one share.
    #[error("remote tier: two nodes are named '{name}'")]
    DuplicateNode {
        /// The name.
        name: String,
    },
    /// A system call failed while the thread was made.
    #[error("pool service: {operation}: {error}")]
    System {
        /// What was tried.
        operation: &'static str,
        /// Why it failed.
        error: std::io::Error,
    },
}
