//! Plain data that crosses the seam.

use dataplane_memory::SlotRef;

/// A connection of one fabric. Ids are not reused while the process lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerId(pub u64);

/// Largest two-sided message, in bytes. It bounds receive buffers.
pub const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// Largest inline write, in bytes.
pub const INLINE_BYTES_MAX: usize = 16;

/// Bytes to write at the peer.
#[derive(Debug, Clone)]
pub enum Source {
    /// A range of a local slot. The reference keeps the slot in place until completion.
    Slot {
        /// The slot, kept alive.
        slot: SlotRef,
        /// First byte within the slot.
        offset: u32,
        /// Number of bytes.
        len: u32,
    },
    /// A few bytes carried in the request itself.
    Inline {
        /// The bytes; the first `len` count.
        bytes: [u8; INLINE_BYTES_MAX],
        /// How many of them.
        len: u8,
    },
}

impl Source {
    /// Number of bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Slot { len, .. } => *len as usize,
            Self::Inline { len, .. } => usize::from(*len),
        }
    }

    /// Whether there is nothing to write.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Where at the peer: a slot of the slab that it registered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// Slot index at the peer.
    pub slot: u32,
    /// The generation that the peer announced; a write to another one is refused.
    pub generation: u32,
    /// First byte within the slot.
    pub offset: u32,
}

/// What to do.
#[derive(Debug, Clone)]
pub enum Operation {
    /// One-sided write; with an immediate, the peer sees `Event::Immediate` once the bytes have landed.
    Write {
        /// What to write.
        source: Source,
        /// Where to.
        target: Target,
        /// 32 bits for the peer, delivered after the bytes.
        immediate: Option<u32>,
    },
    /// A message of at most [`MESSAGE_BYTES_MAX`] bytes.
    Send {
        /// The message.
        message: Box<[u8]>,
    },
}

/// One operation towards one peer.
#[derive(Debug, Clone)]
pub struct WorkRequest {
    /// Comes back with the completion. Zero: no completion is wanted (unsignalled).
    pub id: u64,
    /// The connection to use.
    pub peer: PeerId,
    /// What to do.
    pub operation: Operation,
}

/// The queue to that peer is full, or the peer is gone; the request comes back.
#[derive(Debug)]
pub struct Full(pub WorkRequest);

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completion {
    /// Done; the source may be reused.
    Done,
    /// The connection ended first. Whether the peer has the bytes is unknown.
    PeerDown,
}

/// What a fabric reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A connection that we asked for is ready.
    Connected {
        /// Its id, as returned by `connect`.
        peer: PeerId,
    },
    /// A peer connected to us.
    Accepted {
        /// Its new id.
        peer: PeerId,
    },
    /// A signalled request ended.
    Completed {
        /// The request's id.
        id: u64,
        /// How.
        completion: Completion,
    },
    /// A write with immediate has landed in our slab.
    Immediate {
        /// From whom.
        peer: PeerId,
        /// The 32 bits.
        value: u32,
    },
    /// A message.
    Message {
        /// From whom.
        peer: PeerId,
        /// Its bytes.
        message: Box<[u8]>,
    },
    /// A connection ended, or could not be made. The last event of that peer.
    PeerDown {
        /// Which.
        peer: PeerId,
        /// Why, for people.
        reason: String,
    },
}

/// A connection could not even be started.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The address is not in this transport's notation.
    #[error("'{address}' is not an address of {fabric}: {reason}")]
    Address {
        /// The transport.
        fabric: &'static str,
        /// What was given.
        address: String,
        /// What is wrong.
        reason: String,
    },
    /// No more connections: the named limit is reached.
    #[error("{fabric}: {limit} connections are open, which is the limit")]
    TooMany {
        /// The transport.
        fabric: &'static str,
        /// The limit.
        limit: usize,
    },
    /// The operating system refused.
    #[error("{fabric} connect to '{address}': {error}")]
    System {
        /// The transport.
        fabric: &'static str,
        /// The address.
        address: String,
        /// Its reason.
        error: std::io::Error,
    },
}
