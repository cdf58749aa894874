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
}
