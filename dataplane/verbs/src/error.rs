//! Errors of verbs.

use std::io;

/// Errors of this crate. Each names the verb or operation, the device, the object or peer, and the errno.
#[derive(Debug, thiserror::Error)]
pub enum VerbsError {
    /// The library is not installed, or cannot be loaded.
    #[error("no RDMA here: {library} cannot be loaded: {reason}")]
    Library {
        /// File name of the library.
        library: &'static str,
        /// Error text of the dynamic loader.
        reason: String,
    },
    /// The library is installed but lacks an entry point: it is too old.
    #[error("no RDMA here: {library} has no {symbol}: {reason}")]
    Symbol {
        /// File name of the library.
        library: &'static str,
        /// Name of the missing entry point.
        symbol: &'static str,
        /// Error text of the dynamic loader.
        reason: String,
    },
    /// The library is installed, but the host has no RDMA device.
    #[error("no RDMA here: {0}")]
    NoDevice(String),
    /// No device has the configured name.
    #[error("no RDMA device '{name}'; present: {present}")]
    UnknownDevice {
        /// The configured name.
        name: String,
        /// Names of the devices that exist.
        present: String,
    },
    /// No usable port or GID.
    #[error("RDMA device {device} port {port}: {reason}")]
    Port {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// Reason that the port cannot be used.
        reason: String,
    },
    /// A verb failed.
    #[error("{verb} on {device}{object}: {error}")]
    Verb {
        /// C name of the verb, with the step in parentheses where it has several.
        verb: &'static str,
        /// The device.
        device: String,
        /// The object of the call, for the message: starts with a space; empty if there is none.
        object: String,
        /// The errno that the verb returned.
        error: io::Error,
    },
    /// The card can reach an accelerator's memory neither as a dma-buf nor by its address.
    #[error(
        "{device} cannot reach {length} bytes of device memory at {address:#x}: through its bus window: \
         {through_bar}; as a dma-buf: {dma_buf}; \
         as peer memory: {peer_memory}"
    )]
    DeviceMemory {
        /// The card.
        device: String,
        /// Address of the first byte.
        address: u64,
        /// Number of bytes.
        length: usize,
        /// Error of the registration as a dma-buf that is mapped through the memory's window on the bus.
        through_bar: String,
        /// Error of the registration as a dma-buf that the driver maps by its own choice.
        dma_buf: String,
        /// Error of the registration by address.
        peer_memory: String,
    },
    /// `ibv_post_send` refused work requests of a batch; the ones before them were accepted.
    #[error("ibv_post_send on {device}: {accepted} of {posted} work requests accepted, then {error}")]
    Post {
        /// The device.
        device: String,
        /// Number of leading requests that the device accepted.
        accepted: usize,
        /// Number of requests in the batch.
        posted: usize,
        /// The errno that the verb returned.
        error: io::Error,
    },
    /// A connection ended before its queue pairs were made.
    #[error("the connection ended before its queue pairs were made")]
    Abandoned,
    /// A system call outside of verbs failed.
    #[error("{operation}: {error}")]
    System {
        /// The system call and its object.
        operation: String,
        /// The errno that the system call returned.
        error: io::Error,
    },
    /// Memory for buffers could not be allocated.
    #[error(transparent)]
    Memory(#[from] dataplane_memory::MemoryError),
    /// A setting is out of its range.
    #[error("rdma.{key} = {value}: {expected}")]
    Setting {
        /// The setting.
        key: &'static str,
        /// The configured value.
        value: String,
        /// The permitted range.
        expected: &'static str,
    },
    /// A table of fixed size is full.
    #[error("{what} on {device}: {limit} exist, which is the limit")]
    TooMany {
        /// The kind of object that the table holds.
        what: &'static str,
        /// The device.
        device: String,
        /// The limit.
        limit: usize,
    },
}

/// The error of a verb that returned `code`: the number itself, or minus one with errno set.
pub(crate) fn from_code(code: i32) -> io::Error {
    if code > 0 { io::Error::from_raw_os_error(code) } else { io::Error::last_os_error() }
}

/// Error text preceded by the symbolic name of the errno, such as `EFAULT`.
pub(crate) fn named(error: &io::Error) -> String {
    use rustix::io::Errno;
    const NAMES: [(Errno, &str); 11] = [
        (Errno::OPNOTSUPP, "EOPNOTSUPP"),
        (Errno::FAULT, "EFAULT"),
        (Errno::INVAL, "EINVAL"),
        (Errno::NOMEM, "ENOMEM"),
        (Errno::PERM, "EPERM"),
        (Errno::ACCESS, "EACCES"),
        (Errno::NOSYS, "ENOSYS"),
        (Errno::BADF, "EBADF"),
        (Errno::NODEV, "ENODEV"),
        (Errno::BUSY, "EBUSY"),
        (Errno::IO, "EIO"),
    ];
    let name = Errno::from_io_error(error)
        .and_then(|errno| NAMES.iter().find(|(known, _)| *known == errno))
        .map(|(_, name)| *name);
    name.map_or_else(|| error.to_string(), |name| format!("{name}: {error}"))
}
