use dataplane_memory::MemoryError;
use rustix::io::Errno;

/// What can go wrong while a node or a connection is set up.
#[derive(Debug, thiserror::Error)]
pub enum ShmError {
    /// A system call failed.
    #[error("shared-memory fabric: {operation} at '{address}': {errno}")]
    System {
        /// The call.
        operation: &'static str,
        /// The socket's address, if the call has to do with one.
        address: String,
        /// The system's reason.
        errno: Errno,
    },
    /// The address is neither a path nor `@` and a name, or too long for a socket.
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
    /// The peer's first message is not what a peer sends.
    #[error("shared-memory handshake: {0}")]
    Handshake(&'static str),
    /// The sockets of connections cannot be made or looked at.
    #[error("shared-memory fabric: {0}")]
    Socket(std::io::Error),
    /// The hello could not be sent.
    #[error("shared-memory handshake: the hello could not be sent: {0}")]
    Hello(String),
    /// The peer belongs to another user.
    #[error("shared-memory handshake: process {pid} is of user {uid}, and only our own user may connect")]
    OtherUser {
        /// Its process id, 0 when it is not visible from here.
        pid: i32,
        /// Its effective user id.
        uid: u32,
    },
    /// The peer's slab or ring cannot be attached.
    #[error("shared-memory handshake: {0}")]
    Memory(#[from] MemoryError),
}

impl ShmError {
    /// For calls that have to do with no address.
    pub(crate) fn system(operation: &'static str) -> impl FnOnce(Errno) -> Self {
        move |errno| Self::System { operation, address: String::new(), errno }
    }
}
