use dataplane_memory::MemoryError;

/// What can go wrong while a node or a connection is set up.
#[derive(Debug, thiserror::Error)]
pub enum ShmError {
    /// A system call failed.
    #[error("shared-memory fabric: {operation} at '{path}': {error}")]
    System {
        /// The call.
        operation: &'static str,
        /// The socket's path.
        path: String,
        /// The system's reason.
        error: std::io::Error,
    },
    /// The peer's first message is not what this version sends.
    #[error("shared-memory handshake: {0}")]
    Handshake(&'static str),
    /// The peer's slab or ring cannot be attached.
    #[error("shared-memory handshake: {0}")]
    Memory(#[from] MemoryError),
}
