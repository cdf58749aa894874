//! Plain data that crosses the seam.

use std::sync::Arc;

use dataplane_memory::{Slab, SlabKind, SlotRef};

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

/// A range of a local slot that a read fills. The reference keeps the slot in place until completion.
#[derive(Debug, Clone)]
pub struct SlotRange {
    /// The slot, kept alive.
    pub slot: SlotRef,
    /// First byte within the slot.
    pub offset: u32,
    /// Number of bytes, gaps between rows not counted.
    pub len: u32,
}

/// Bytes that lie in rows: `len / bytes` of them, each `bytes` long, their starts a stride apart on either
/// side. The head range that two differently sharded workers share is such a thing: one descriptor for a block,
/// not one for each token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    /// Bytes of one row; divides the length of the whole.
    pub bytes: u32,
    /// From the start of one row to the start of the next, at this node.
    pub local_stride: u32,
    /// The same at the peer.
    pub remote_stride: u32,
}

impl Rows {
    /// How many rows `len` bytes are.
    #[must_use]
    pub fn count(&self, len: u32) -> u32 {
        len.checked_div(self.bytes).unwrap_or(0)
    }

    /// From the first byte of the first row to the last byte of the last, with starts `stride` apart; `None`
    /// when that does not fit into 32 bits.
    #[must_use]
    pub fn span(&self, len: u32, stride: u32) -> Option<u32> {
        match self.count(len) {
            0 => Some(0),
            count => (count - 1).checked_mul(stride)?.checked_add(self.bytes),
        }
    }

    /// Whether this cuts `len` bytes into whole rows that do not overlap on either side.
    #[must_use]
    pub fn is_valid(&self, len: u32) -> bool {
        self.bytes > 0
            && len.is_multiple_of(self.bytes)
            && self.local_stride >= self.bytes
            && self.remote_stride >= self.bytes
    }
}

/// Which of two lanes to a peer carries a request. Requests of one lane keep their order; between lanes there
/// is none, so that what a decode step waits for never queues behind an offload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum Priority {
    /// Somebody waits for it.
    #[default]
    Urgent,
    /// Nobody waits: offload, prefetch, replication.
    Background,
}

impl Priority {
    /// All of them, most urgent first.
    pub const ALL: [Self; 2] = [Self::Urgent, Self::Background];

    /// Position in a table with one entry per lane.
    #[must_use]
    pub fn index(self) -> usize {
        self as usize
    }
}

/// Where at the peer: a slot of a slab that it shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// The kind of the slab.
    pub slab: SlabKind,
    /// Slot index at the peer.
    pub slot: u32,
    /// The generation that the peer announced; a write to another one is refused.
    pub generation: u32,
    /// First byte within the slot.
    pub offset: u32,
}

impl Target {
    /// The bytes from `offset` on of a slot, as its owner names it.
    #[must_use]
    pub fn of(slot: &SlotRef, offset: u32) -> Self {
        Self { slab: slot.slab().kind(), slot: slot.slot(), generation: slot.generation(), offset }
    }
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
        /// How the bytes lie; `None`: one after the other on both sides. Only for slot sources.
        rows: Option<Rows>,
        /// 32 bits for the peer, delivered after the bytes.
        immediate: Option<u32>,
    },
    /// One-sided read of the peer's slots into one of ours. Its completion says that the bytes are here.
    Read {
        /// Where to, here.
        into: SlotRange,
        /// Where from, at the peer.
        from: Target,
        /// How the bytes lie; `None`: one after the other on both sides.
        rows: Option<Rows>,
    },
    /// A message of at most [`MESSAGE_BYTES_MAX`] bytes.
    Send {
        /// The message.
        message: Box<[u8]>,
    },
}

impl Operation {
    /// Where at the peer the operation writes or reads; `None` for a message.
    #[must_use]
    pub fn target(&self) -> Option<&Target> {
        match self {
            Self::Write { target, .. } => Some(target),
            Self::Read { from, .. } => Some(from),
            Self::Send { .. } => None,
        }
    }

    /// The slab of this node that the operation moves bytes from or into; `None` when they are in the request itself.
    #[must_use]
    pub fn local_slab(&self) -> Option<&Arc<Slab>> {
        match self {
            Self::Write { source: Source::Slot { slot, .. }, .. } => Some(slot.slab()),
            Self::Read { into, .. } => Some(into.slot.slab()),
            Self::Write { source: Source::Inline { .. }, .. } | Self::Send { .. } => None,
        }
    }

    /// Whether the bytes that the operation moves lie in host memory on both sides.
    #[must_use]
    pub fn is_between_hosts(&self) -> bool {
        self.target().is_none_or(|target| target.slab == SlabKind::Host)
            && self.local_slab().is_none_or(|slab| slab.kind() == SlabKind::Host)
    }
}

/// Why a fabric that moves host memory only ends a connection over which it was to move other memory.
pub const HOST_MEMORY_ONLY: &str =
    "refused at the sender: memory of a device, which this transport does not move";

/// One operation towards one peer.
#[derive(Debug, Clone)]
pub struct WorkRequest {
    /// Comes back with the completion. Zero: no completion is wanted (unsignalled).
    pub id: u64,
    /// The connection to use.
    pub peer: PeerId,
    /// The lane.
    pub priority: Priority,
    /// What to do.
    pub operation: Operation,
}

impl WorkRequest {
    /// An unsignalled message on the urgent lane.
    #[must_use]
    pub fn message(peer: PeerId, message: Box<[u8]>) -> Self {
        Self { id: 0, peer, priority: Priority::Urgent, operation: Operation::Send { message } }
    }
}

/// The request comes back: the queue to that peer is full, the peer is gone, or the fabric copies no more before the next `poll`.
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
