//! One entry of a send queue.

use std::ptr::NonNull;
use std::sync::Arc;

use dataplane_fabric::INLINE_BYTES_MAX;
use dataplane_memory::{Slab, SlotRef};

use crate::extent::{COPIED_RUN_BYTES_MAX, Extent};
use crate::lane::FrameCompletion;
use crate::wire::Header;

/// Largest response that is copied before it is sent, so that its generation is checked before the send. A
/// larger one is checked after it, which costs the peer a further frame.
pub(crate) const COPIED_RESPONSE_BYTES_MAX: u32 = 16 << 10;

pub(crate) struct Frame {
    pub(crate) header: Header,
    pub(crate) payload: Payload,
    pub(crate) finish: FrameCompletion,
    /// Whether the peer is to acknowledge that the frame has landed.
    pub(crate) is_signalled: bool,
    /// Sequence number of the last zero-copy send that took bytes of this frame.
    pub(crate) zero_copy: Option<u32>,
}

pub(crate) enum Payload {
    Nothing,
    Message(Box<[u8]>),
    Inline {
        bytes: [u8; INLINE_BYTES_MAX],
        len: u8,
    },
    /// Bytes of a local slot, which the frame keeps.
    Slot {
        slot: SlotRef,
        extent: Extent,
    },
    /// Bytes of a peer's read, from byte `at` of the read. The frame does not keep the slot; the generation
    /// shows a reuse.
    Served {
        extent: Extent,
        at: u32,
        len: u32,
        generation: u32,
        number: u32,
    },
}

/// The next part of a payload.
pub(crate) enum PayloadChunk {
    /// Bytes that stay in place until they are sent.
    InPlace(NonNull<u8>, u32),
    /// Bytes to copy; at most this many at a time.
    ToCopy(u32),
    /// Bytes to copy all at once or not at all.
    ToCopyWhole(u32),
}

impl Payload {
    pub(crate) fn len(&self) -> u32 {
        match self {
            Self::Nothing => 0,
            Self::Message(bytes) => bytes.len() as u32,
            Self::Inline { len, .. } => u32::from(*len),
            Self::Slot { extent, .. } => extent.len,
            Self::Served { len, .. } => *len,
        }
    }

    /// Returns the part that begins at byte `at`, which is below the length.
    pub(crate) fn run(&self, slab: &Slab, at: u32) -> PayloadChunk {
        let left = self.len() - at;
        match self {
            Self::Nothing | Self::Inline { .. } => PayloadChunk::ToCopy(left),
            Self::Message(bytes) if left < COPIED_RUN_BYTES_MAX || bytes.is_empty() => {
                PayloadChunk::ToCopy(left)
            }
            Self::Message(bytes) => PayloadChunk::InPlace(NonNull::from_ref(&bytes[at as usize]), left),
            Self::Served { len, .. } if *len <= COPIED_RESPONSE_BYTES_MAX => PayloadChunk::ToCopyWhole(left),
            Self::Slot { extent, .. } | Self::Served { extent, .. } if extent.has_short_runs() => {
                PayloadChunk::ToCopy(left)
            }
            Self::Slot { slot, extent } => {
                let (start, len) = extent.run_at(slot.slab(), at);
                PayloadChunk::InPlace(start, len)
            }
            Self::Served { extent, at: first, .. } => {
                let (start, len) = extent.run_at(slab, first + at);
                PayloadChunk::InPlace(start, len.min(left))
            }
        }
    }

    /// Copies the bytes from byte `at` on.
    pub(crate) fn copy_out(&self, slab: &Slab, at: u32, target: &mut [u8]) {
        let range = at as usize..at as usize + target.len();
        match self {
            Self::Nothing => {}
            Self::Message(bytes) => target.copy_from_slice(&bytes[range]),
            Self::Inline { bytes, .. } => target.copy_from_slice(&bytes[range]),
            Self::Slot { slot, extent } => extent.copy_out(slot.slab(), at, target),
            Self::Served { extent, at: first, .. } => extent.copy_out(slab, first + at, target),
        }
    }

    /// Whether the kernel may take the bytes from byte `at` on without a copy, given that they are at least
    /// `from`.
    pub(crate) fn suits_zero_copy(&self, slab: &Arc<Slab>, at: u32, from: usize) -> bool {
        match self {
            Self::Slot { slot, extent } => {
                !extent.has_short_runs()
                    && (extent.len - at) as usize >= from
                    && Arc::ptr_eq(slot.slab(), slab)
            }
            _ => false,
        }
    }
}
