use std::io;

/// What can go wrong. Each names the verb or operation, the device, the object or peer, and the errno.
#[derive(Debug, thiserror::Error)]
pub enum VerbsError {
    /// The library is not installed, or not usable.
    #[error("no RDMA here: {library} cannot be loaded: {reason}")]
    Library {
        /// Its file name.
        library: &'static str,
        /// The loader's words.
        reason: String,
    },
    /// The library is there but too old.
    #[error("no RDMA here: {library} has no {symbol}: {reason}")]
    Symbol {
        /// Its file name.
        library: &'static str,
        /// What is missing.
        symbol: &'static str,
        /// The loader's words.
        reason: String,
    },
    /// The library is there; no device is.
    #[error("no RDMA here: {0}")]
    NoDevice(String),
    /// No device of the configured name.
    #[error("no RDMA device '{name}'; present: {present}")]
    UnknownDevice {
        /// The name asked for.
        name: String,
        /// Those that exist.
        present: String,
    },
    /// No usable port or GID.
    #[error("RDMA device {device} port {port}: {reason}")]
    Port {
        /// The device.
        device: String,
        /// The port.
        port: u8,
        /// What is wrong.
        reason: String,
    },
    /// A verb failed.
    #[error("{verb} on {device}{object}: {error}")]
    Verb {
        /// Its C name, with the step in parentheses where it has several.
        verb: &'static str,
        /// The device.
        device: String,
        /// What it was applied to, with a leading space or " to "; may be empty.
        object: String,
        /// Its errno.
        error: io::Error,
    },
    /// The card cannot reach an accelerator's memory in any way.
    #[error(
        "{device} cannot reach {length} bytes of device memory at {address:#x}: through its bus window: \
         {through_bar}; as a dma-buf: {dma_buf}; \
         as peer memory: {peer_memory}"
    )]
    DeviceMemory {
        /// The card.
        device: String,
        /// First address.
        address: u64,
        /// How many bytes.
        length: usize,
        /// Why not as a dma-buf that is mapped through its window on the bus.
        through_bar: String,
        /// Why not as a dma-buf that is mapped as its driver likes.
        dma_buf: String,
        /// Why not by its address.
        peer_memory: String,
    },
    /// Work requests were refused; those before were accepted.
    #[error("ibv_post_send on {device}: {accepted} of {posted} work requests accepted, then {error}")]
    Post {
        /// The device.
        device: String,
        /// Leading requests that the device took.
        accepted: usize,
        /// Requests of the batch.
        posted: usize,
        /// Its errno.
        error: io::Error,
    },
    /// A connection ended before its queue pairs were made.
    #[error("the connection ended before its queue pairs were made")]
    Abandoned,
    /// A system call outside of verbs failed.
    #[error("{operation}: {error}")]
    System {
        /// What was tried, on what.
        operation: String,
        /// Its errno.
        error: io::Error,
    },
    /// Memory for buffers could not be had.
    #[error(transparent)]
    Memory(#[from] dataplane_memory::MemoryError),
    /// A setting is out of its range.
    #[error("rdma.{key} = {value}: {expected}")]
    Setting {
        /// The setting.
        key: &'static str,
        /// Its value.
        value: String,
        /// The range.
        expected: &'static str,
    },
    /// A table of fixed size is full.
    #[error("{what} on {device}: {limit} exist, which is the limit")]
    TooMany {
        /// Of what.
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

/// An error with the name of its errno, as people search for it.
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
