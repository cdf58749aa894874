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
    /// The slots lie in a device's memory, which sockets cannot reach.
    #[error("TCP fabric: the slots lie in a device's memory: stage them through a slab in host memory")]
    DeviceMemory,
    /// Values of the configuration are out of their ranges.
    #[error("TCP fabric: {}", problems.join("; "))]
    Config {
        /// One sentence for each.
        problems: Vec<String>,
    },
}
