//! Requests, completions and events: the plain data between a fabric and its user.

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
        /// Number of valid bytes in `bytes`.
        len: u8,
    },
}

impl Source {
    /// Returns the number of bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Slot { len, .. } => *len as usize,
            Self::Inline { len, .. } => usize::from(*len),
        }
    }

    /// Whether the source is empty.
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

/// Layout of bytes in rows: `len / bytes` rows of `bytes` bytes each, whose starts are a stride apart on
/// either side. One descriptor then covers the head range of a block that two differently sharded workers
/// share, instead of one descriptor per token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rows {
    /// Bytes of one row; divides the length of the whole.
    pub bytes: u32,
    /// Distance from the start of one row to the start of the next at this node, in bytes.
    pub local_stride: u32,
    /// Distance from the start of one row to the start of the next at the peer, in bytes.
    pub remote_stride: u32,
}

impl Rows {
    /// Returns the number of rows in `len` bytes; 0 when `bytes` is 0.
    #[must_use]
    pub fn count(&self, len: u32) -> u32 {
        len.checked_div(self.bytes).unwrap_or(0)
    }

    /// Returns the distance in bytes from the first byte of the first row to the end of the last row, with
    /// row starts `stride` apart; `None` when it does not fit into 32 bits.
    #[must_use]
    pub fn span(&self, len: u32, stride: u32) -> Option<u32> {
        match self.count(len) {
            0 => Some(0),
            count => (count - 1).checked_mul(stride)?.checked_add(self.bytes),
        }
    }

    /// Whether the rows divide `len` bytes without remainder and do not overlap on either side.
    #[must_use]
    pub fn is_valid(&self, len: u32) -> bool {
        self.bytes > 0
            && len.is_multiple_of(self.bytes)
            && self.local_stride >= self.bytes
            && self.remote_stride >= self.bytes
    }
}

/// The lane to a peer that carries a request. Requests of one lane keep their order. The lanes are not
/// ordered against each other, so that a transfer that a decode step waits for never queues behind an
/// offload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum Priority {
    /// Transfers that a request waits for.
    #[default]
    Urgent,
    /// Transfers that no request waits for: offload, prefetch, replication.
    Background,
}

impl Priority {
    /// All priorities, the most urgent first.
    pub const ALL: [Self; 2] = [Self::Urgent, Self::Background];

    /// Returns the position in a table with one entry per lane.
    #[must_use]
    pub fn index(self) -> usize {
        self as usize
    }
}

/// A position in the peer's memory: a byte of a slot of a slab that the peer shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// The kind of the slab.
    pub slab: SlabKind,
    /// Slot index at the peer.
    pub slot: u32,
    /// Generation of the slot that the peer announced. A write to another generation is refused.
    pub generation: u32,
    /// First byte within the slot.
    pub offset: u32,
}

impl Target {
    /// Returns the target for the bytes of `slot` from `offset` on, at the node that owns the slot.
    #[must_use]
    pub fn of(slot: &SlotRef, offset: u32) -> Self {
        Self { slab: slot.slab().kind(), slot: slot.slot(), generation: slot.generation(), offset }
    }
}

/// The operation of a work request.
#[derive(Debug, Clone)]
pub enum Operation {
    /// One-sided write. With an immediate, the peer gets `Event::Immediate` once the bytes have landed.
    Write {
        /// Bytes to write.
        source: Source,
        /// Position at the peer that the bytes are written to.
        target: Target,
        /// Row layout; `None`: contiguous on both sides. Only for slot sources.
        rows: Option<Rows>,
        /// A 32-bit value for the peer, delivered after the bytes.
        immediate: Option<u32>,
    },
    /// One-sided read of a slot of the peer into a local slot. Its completion says that the bytes have
    /// arrived.
    Read {
        /// Local slot range that the bytes are written to.
        into: SlotRange,
        /// Position at the peer that the bytes are read from.
        from: Target,
        /// Row layout; `None`: contiguous on both sides.
        rows: Option<Rows>,
    },
    /// A message of at most [`MESSAGE_BYTES_MAX`] bytes.
    Send {
        /// Bytes of the message.
        message: Box<[u8]>,
    },
}

impl Operation {
    /// Returns the position at the peer that the operation writes or reads; `None` for a message.
    #[must_use]
    pub fn target(&self) -> Option<&Target> {
        match self {
            Self::Write { target, .. } => Some(target),
            Self::Read { from, .. } => Some(from),
            Self::Send { .. } => None,
        }
    }

    /// Returns the local slab that the operation reads from or writes to; `None` when the request carries the
    /// bytes.
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

/// Reason of the disconnect when a fabric that moves host memory only is asked to move other memory.
pub const HOST_MEMORY_ONLY: &str =
    "refused at the sender: memory of a device, which this transport does not move";

/// One operation towards one peer.
#[derive(Debug, Clone)]
pub struct WorkRequest {
    /// Identifies the request in its completion. 0: unsignalled, there is no completion.
    pub id: u64,
    /// The connection to use.
    pub peer: PeerId,
    /// The lane that carries the request.
    pub priority: Priority,
    /// The operation.
    pub operation: Operation,
}

impl WorkRequest {
    /// Returns an unsignalled message on the urgent lane.
    #[must_use]
    pub fn message(peer: PeerId, message: Box<[u8]>) -> Self {
        Self { id: 0, peer, priority: Priority::Urgent, operation: Operation::Send { message } }
    }
}

/// The request that was not accepted: the queue to the peer is full, the peer is disconnected, or the fabric
/// copies no more bytes before the next `poll`.
#[derive(Debug)]
pub struct Full(pub WorkRequest);

/// Result of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completion {
    /// The operation is complete; the source may be reused.
    Done,
    /// The connection ended before the operation completed. It is unknown whether the peer has the bytes.
    PeerDown,
}

/// An event that a fabric reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A connection that this node started is ready.
    Connected {
        /// Id that `connect` returned.
        peer: PeerId,
    },
    /// A peer connected to this node.
    Accepted {
        /// Id of the new connection.
        peer: PeerId,
    },
    /// A signalled request ended.
    Completed {
        /// The request's id.
        id: u64,
        /// Result of the request.
        completion: Completion,
    },
    /// A write with immediate has landed in a slab of this node.
    Immediate {
        /// The peer that wrote.
        peer: PeerId,
        /// The immediate value.
        value: u32,
    },
    /// A message arrived.
    Message {
        /// The peer that sent the message.
        peer: PeerId,
        /// Bytes of the message.
        message: Box<[u8]>,
    },
    /// A connection ended or could not be made. This is the last event of that peer.
    PeerDown {
        /// Id of the connection.
        peer: PeerId,
        /// Cause, as text for an operator.
        reason: String,
    },
}

/// A failure to start a connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The address is not in this transport's notation.
    #[error("'{address}' is not an address of {fabric}: {reason}")]
    Address {
        /// Name of the transport.
        fabric: &'static str,
        /// The address that was passed in.
        address: String,
        /// The part of the notation that is wrong.
        reason: String,
    },
    /// No more connections: the named limit is reached.
    #[error("{fabric}: {limit} connections are open, which is the limit")]
    TooMany {
        /// Name of the transport.
        fabric: &'static str,
        /// Largest number of connections.
        limit: usize,
    },
    /// The operating system refused.
    #[error("{fabric} connect to '{address}': {error}")]
    System {
        /// Name of the transport.
        fabric: &'static str,
        /// The address that was passed in.
        address: String,
        /// Error of the system call.
        error: std::io::Error,
    },
}
