//! Errors of the TCP transport.

/// An error while a node is set up.
#[derive(Debug, thiserror::Error)]
pub enum TcpError {
    /// A system call failed.
    #[error("TCP fabric: {operation}: {error}")]
    System {
        /// The system call, with its address where it has one.
        operation: String,
        /// Error of the system call.
        error: std::io::Error,
    },
    /// The slots lie in device memory, which sockets cannot access.
    #[error("TCP fabric: the slots lie in a device's memory: stage them through a slab in host memory")]
    DeviceMemory,
    /// Values of the configuration are out of their ranges.
    #[error("TCP fabric: {}", problems.join("; "))]
    Config {
        /// One sentence for each value.
        problems: Vec<String>,
    },
}
