//! Errors of the shared-memory transport.

use dataplane_memory::MemoryError;
use rustix::io::Errno;

/// Errors while a node or a connection is set up.
#[derive(Debug, thiserror::Error)]
pub enum ShmError {
    /// A system call failed.
    #[error("shared-memory fabric: {operation} at '{address}': {errno}")]
    System {
        /// Name of the system call.
        operation: &'static str,
        /// Address of the socket; empty if the call has none.
        address: String,
        /// The errno of the call.
        errno: Errno,
    },
    /// The address is neither a path nor `@` followed by a name, or is too long for a socket.
    #[error("shared-memory fabric: '{0}' is not a socket path or @name")]
    Address(String),
    /// A value is out of its range.
    #[error("shared-memory fabric: {0}")]
    Config(&'static str),
    /// The slots lie in a device's memory, which this fabric's copies cannot reach.
    #[error(
        "shared-memory fabric: the slots lie in a device's memory: stage them through a slab in host memory"
    )]
    DeviceMemory,
    /// The peer's first message is invalid.
    #[error("shared-memory handshake: {0}")]
    Handshake(&'static str),
    /// The sockets of connections cannot be created or polled.
    #[error("shared-memory fabric: {0}")]
    Socket(std::io::Error),
    /// The hello could not be sent.
    #[error("shared-memory handshake: the hello could not be sent: {0}")]
    Hello(String),
    /// The peer belongs to another user.
    #[error("shared-memory handshake: process {pid} is of user {uid}, and only our own user may connect")]
    OtherUser {
        /// Process id of the peer; 0 when it is not visible from here.
        pid: i32,
        /// Effective user id of the peer.
        uid: u32,
    },
    /// The peer's slab or ring cannot be attached.
    #[error("shared-memory handshake: {0}")]
    Memory(#[from] MemoryError),
}

impl ShmError {
    /// Makes the error of a call without an address.
    pub(crate) fn system(operation: &'static str) -> impl FnOnce(Errno) -> Self {
        move |errno| Self::System { operation, address: String::new(), errno }
    }
}
