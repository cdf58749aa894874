/// What can go wrong while a node is set up.
#[derive(Debug, thiserror::Error)]
pub enum TcpError {
    /// A system call failed.
    #[error("TCP fabric: {operation}: {error}")]
    System {
        /// The call, with its address where it has one.
        operation: String,
        /// The system's reason.
        error: std::io::Error,
    },
    /// Values of the configuration are out of their ranges.
    #[error("TCP fabric: {}", problems.join("; "))]
    Config {
        /// One sentence for each.
        problems: Vec<String>,
    },
}
