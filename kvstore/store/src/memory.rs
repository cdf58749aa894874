//! The bytes of the host tier: a slab of page-aligned slots, all of them in the catalog's hands.
//!
//! The catalog says which slot holds which block and who reads it. This module copies bytes in and out and proves them:
//! what is copied out is checked after the copy, so that neither the source, nor the copy, nor the slot that it went to
//! is trusted.

use std::sync::Arc;

use dataplane_memory::{MemoryError, PageSize, Slab, SlabLayout, SlotPool, SlotRef};
use kvstore_catalog::Lease;
use xxhash_rust::xxh3::{Xxh3, xxh3_64};

const CHUNK_BYTES: usize = 16 << 10;
/// Slots are whole pages, so that any disk can read into them and write from them.
pub(crate) const SLOT_ALIGNMENT: usize = 4096;

#[derive(Debug)]
pub(crate) struct HostMemory {
    slab: Arc<Slab>,
    /// A reference to each slot, by number; they are never given back.
    slots: Vec<SlotRef>,
}

impl HostMemory {
    /// Memory for `slot_count` blocks of at most `block_bytes`.
    pub(crate) fn new(block_bytes: usize, slot_count: u32, pages: PageSize) -> Result<Self, MemoryError> {
        let layout = SlabLayout { slot_bytes: block_bytes.next_multiple_of(SLOT_ALIGNMENT), slot_count };
        let slab = Arc::new(Slab::create("kvasir-host-tier", layout, pages)?);
        let pool = SlotPool::new(Arc::clone(&slab));
        let mut slots: Vec<SlotRef> = std::iter::from_fn(|| pool.acquire()).collect();
        slots.sort_unstable_by_key(SlotRef::slot);
        Ok(Self { slab, slots })
    }

    pub(crate) fn slab(&self) -> &Arc<Slab> {
        &self.slab
    }

    /// Another reference to a slot, for a read or write that is under way.
    pub(crate) fn slot(&self, slot: u32) -> &SlotRef {
        &self.slots[slot as usize]
    }

    /// Copies a block of `bytes` bytes in; returns its checksum, taken from what arrived.
    pub(crate) fn copy_in(&self, slot: u32, source: &SlotRef, bytes: usize) -> u64 {
        self.slab.copy_from(source.slab(), (source.slot(), 0), (slot, 0), bytes);
        checksum(&self.slab, slot, bytes)
    }

    /// The same from the heap.
    pub(crate) fn write(&self, slot: u32, pieces: &[bytes::Bytes]) -> u64 {
        let mut at = 0;
        for piece in pieces {
            self.slab.write(slot, at, piece);
            at += piece.len();
        }
        checksum(&self.slab, slot, at)
    }

    /// Copies a block out; false when what arrived is not what had been stored.
    pub(crate) fn copy_out(&self, lease: &Lease, target: &SlotRef) -> bool {
        let bytes = lease.bytes() as usize;
        target.slab().copy_from(&self.slab, (lease.slot(), 0), (target.slot(), 0), bytes);
        checksum(target.slab(), target.slot(), bytes) == lease.checksum()
    }

    pub(crate) fn checksum(&self, slot: u32, bytes: usize) -> u64 {
        checksum(&self.slab, slot, bytes)
    }
}

/// xxh3-64 of a slot's bytes, through a buffer that stays in the L1 cache: the slot may be written meanwhile by a peer
/// that misbehaves, so no reference to its bytes is made.
fn checksum(slab: &Slab, slot: u32, bytes: usize) -> u64 {
    let mut hasher = Xxh3::new();
    let mut chunk = [0; CHUNK_BYTES];
    let mut at = 0;
    while at < bytes {
        let len = CHUNK_BYTES.min(bytes - at);
        slab.read(slot, at, &mut chunk[..len]);
        hasher.update(&chunk[..len]);
        at += len;
    }
    hasher.digest()
}

/// A block that is held in host memory for a reader.
#[derive(Debug)]
pub struct HostBlock {
    pub(crate) lease: Lease,
    pub(crate) memory: Arc<HostMemory>,
}

impl HostBlock {
    /// Its length.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lease.bytes() as usize
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its bytes, or `None` when they are not what had been stored.
    #[must_use]
    pub fn to_bytes(&self) -> Option<Vec<u8>> {
        let mut bytes = vec![0; self.len()];
        self.memory.slab.read(self.lease.slot(), 0, &mut bytes);
        (xxh3_64(&bytes) == self.lease.checksum()).then_some(bytes)
    }
}
