//! The bytes of the host tier: a slab of page-aligned slots, all of them in the catalog's hands.
//!
//! The catalog says which slot holds which block and who reads it. This module copies bytes in and out and proves them:
//! what is copied out is checked after the copy, so that neither the source, nor the copy, nor the slot that it went to
//! is trusted.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use dataplane_checksum::{LANE_BYTES, Sum};
use dataplane_memory::{MemoryError, PageSize, Slab, SlabLayout, SlotPool, SlotRef};
use kvstore_block::BlockIdentity;
use kvstore_catalog::{Filling, Lease};
use xxhash_rust::xxh3::Xxh3;

use crate::planted::{Planted, is_planted};

/// Whole lanes of the checksum.
const CHUNK_BYTES: usize = 16 << 10;
/// Slots are whole pages, so that any disk can read into them and write from them.
pub(crate) const SLOT_ALIGNMENT: usize = 4096;

#[derive(Debug)]
pub(crate) struct HostMemory {
    slab: Arc<Slab>,
    /// A reference to each slot, by number; they are never given back.
    slots: Vec<SlotRef>,
    /// The part of each block's description that readers on other threads need. Relaxed throughout: notes are written before the
    /// block is registered, and read by holders of a lease.
    notes: Vec<Note>,
}

#[derive(Debug, Default)]
struct Note {
    /// The block's place in its chain.
    position: AtomicU32,
    /// The first bytes of what its owner keeps with it.
    word: AtomicU64,
}

impl HostMemory {
    /// Memory for `slot_count` blocks of at most `block_bytes`.
    pub(crate) fn new(block_bytes: usize, slot_count: u32, pages: PageSize) -> Result<Self, MemoryError> {
        let layout = SlabLayout { slot_bytes: block_bytes.next_multiple_of(SLOT_ALIGNMENT), slot_count };
        let slab = Arc::new(Slab::create("kvasir-host-tier", layout, pages)?);
        let pool = SlotPool::new(Arc::clone(&slab));
        let mut slots: Vec<SlotRef> = std::iter::from_fn(|| pool.acquire()).collect();
        slots.sort_unstable_by_key(SlotRef::slot);
        let notes = slots.iter().map(|_| Note::default()).collect();
        Ok(Self { slab, slots, notes })
    }

    pub(crate) fn slot_count(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn slab(&self) -> &Arc<Slab> {
        &self.slab
    }

    /// Notes what the block is that is going to be registered in a slot.
    pub(crate) fn note(&self, slot: u32, position: u32, meta: &[u8]) {
        let note = &self.notes[slot as usize];
        let word = meta.first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
        note.position.store(position, Ordering::Relaxed);
        note.word.store(word, Ordering::Relaxed);
    }

    /// Another reference to a slot, for a read or write that is under way.
    pub(crate) fn slot(&self, slot: u32) -> &SlotRef {
        &self.slots[slot as usize]
    }

    /// Copies a block in; returns its length and its checksum, taken from what arrived. `None`: it is larger than a slot.
    pub(crate) fn copy_in(&self, slot: u32, source: &SlotRef) -> Option<(usize, u64)> {
        let bytes = source.slab().layout().slot_bytes;
        if bytes > self.slab.layout().slot_bytes {
            return None;
        }
        self.slab.copy_from(source.slab(), (source.slot(), 0), (slot, 0), bytes);
        Some((bytes, checksum(&self.slab, slot, bytes)))
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

    /// Whether the block is one of those that the target's pool holds.
    pub(crate) fn fits(&self, lease: &Lease, target: &SlotRef) -> bool {
        lease.bytes() as usize == target.slab().layout().slot_bytes
    }

    /// Copies a block out; false when what arrived is not what had been stored.
    pub(crate) fn copy_out(&self, lease: &Lease, target: &SlotRef) -> bool {
        let bytes = lease.bytes() as usize;
        target.slab().copy_from(&self.slab, (lease.slot(), 0), (target.slot(), 0), bytes);
        checksum(target.slab(), target.slot(), bytes) == lease.checksum() || is_planted(Planted::DamageServed)
    }

    /// Whether a block in host memory is what had been stored.
    pub(crate) fn is_intact(&self, lease: &Lease) -> bool {
        checksum(&self.slab, lease.slot(), lease.bytes() as usize) == lease.checksum()
    }

    pub(crate) fn checksum(&self, slot: u32, bytes: usize) -> u64 {
        checksum(&self.slab, slot, bytes)
    }

    /// The checksum of a slot's bytes if their xxh3-64 is the `expected` one, else `None`.
    pub(crate) fn checksum_if(&self, slot: u32, bytes: usize, expected: u64) -> Option<u64> {
        let mut other = Xxh3::new();
        let own = checksum_of_pieces(&self.slab, slot, bytes, |piece| other.update(piece));
        (other.digest() == expected).then_some(own)
    }
}

/// The checksum of a slot's bytes (`dataplane-checksum`, which a GPU takes too), through a buffer that stays in the L1 cache: the
/// slot may be written meanwhile by a peer that misbehaves, so no reference to its bytes is made.
fn checksum(slab: &Slab, slot: u32, bytes: usize) -> u64 {
    checksum_of_pieces(slab, slot, bytes, |_| {})
}

/// The same, with a look at each piece of the bytes that it is taken from.
fn checksum_of_pieces(slab: &Slab, slot: u32, bytes: usize, mut look: impl FnMut(&[u8])) -> u64 {
    let mut sum = Sum::default();
    let mut chunk = [0; CHUNK_BYTES];
    let mut at = 0;
    while at < bytes {
        let len = CHUNK_BYTES.min(bytes - at);
        slab.read(slot, at, &mut chunk[..len]);
        sum.add((at / LANE_BYTES) as u64, &chunk[..len]);
        look(&chunk[..len]);
        at += len;
    }
    sum.seal(bytes as u64)
}

/// A check of a held block that goes on by a bounded piece at a time.
#[derive(Default)]
pub(crate) struct BlockCheck {
    sum: Sum,
    at: usize,
}

impl BlockCheck {
    /// Goes on with the block; takes what it reads off the budget. Whether the block is what had been stored, once all of it
    /// was read.
    pub(crate) fn advance(&mut self, block: &HostBlock, budget: &mut usize) -> Option<bool> {
        let mut chunk = [0; CHUNK_BYTES];
        while self.at < block.len() {
            if *budget == 0 {
                return None;
            }
            let len = CHUNK_BYTES.min(block.len() - self.at);
            block.memory.slab.read(block.lease.slot(), self.at, &mut chunk[..len]);
            self.sum.add((self.at / LANE_BYTES) as u64, &chunk[..len]);
            self.at += len;
            *budget = budget.saturating_sub(len);
        }
        Some(self.sum.seal(block.len() as u64) == block.lease.checksum())
    }
}

/// A free slot of host memory that the caller fills itself ([`crate::Store::reserve`]): one copy and one checksum, on the caller's
/// thread. Dropped, it is free again.
#[derive(Debug)]
pub struct NewSlot {
    filling: Filling,
    memory: Arc<HostMemory>,
    bytes: usize,
    sum: Sum,
}

impl NewSlot {
    pub(crate) fn new(filling: Filling, memory: Arc<HostMemory>) -> Self {
        Self { filling, memory, bytes: 0, sum: Sum::default() }
    }

    /// Bytes that it has room for.
    #[must_use]
    pub fn room(&self) -> usize {
        self.memory.slab.layout().slot_bytes
    }

    /// Writes a block's bytes, which are all of these pieces, and takes their checksum on the way: damage of the copy shows when the
    /// block is read. False, and the slot is of no use, when there is no room for all of them. To be called once.
    #[must_use]
    pub fn fill<'a>(&mut self, pieces: impl Iterator<Item = &'a [u8]>) -> bool {
        let (mut chunk, mut len) = ([0; CHUNK_BYTES], 0);
        for mut piece in pieces {
            if self.bytes + len + piece.len() > self.room() {
                return false;
            }
            while !piece.is_empty() {
                if len == 0 && piece.len() >= CHUNK_BYTES {
                    let (now, later) = piece.split_at(CHUNK_BYTES);
                    self.append(now);
                    piece = later;
                    continue;
                }
                let (now, later) = piece.split_at(piece.len().min(CHUNK_BYTES - len));
                chunk[len..len + now.len()].copy_from_slice(now);
                len += now.len();
                piece = later;
                if len == CHUNK_BYTES {
                    self.append(&chunk);
                    len = 0;
                }
            }
        }
        self.append(&chunk[..len]);
        true
    }

    /// Appends bytes; all but the last ones are whole chunks.
    fn append(&mut self, bytes: &[u8]) {
        self.sum.add((self.bytes / LANE_BYTES) as u64, bytes);
        self.memory.slab.write(self.filling.slot(), self.bytes, bytes);
        self.bytes += bytes.len();
    }

    /// The slot itself, for whoever writes it without [`NewSlot::fill`].
    pub(crate) fn slot(&self) -> &SlotRef {
        self.memory.slot(self.filling.slot())
    }

    /// The slot, for a caller who knows what was written there.
    pub(crate) fn into_filling(self) -> Filling {
        self.filling
    }

    /// The slot, its bytes and their checksum.
    pub(crate) fn into_parts(self) -> (Filling, usize, u64) {
        (self.filling, self.bytes, self.sum.seal(self.bytes as u64))
    }
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

    /// Whether both are one block of one slot. While one is held, its slot goes to no other block.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.memory, &other.memory) && self.lease.slot() == other.lease.slot()
    }

    /// Where it lies.
    pub(crate) fn slot(&self) -> &SlotRef {
        self.memory.slot(self.lease.slot())
    }

    /// The block before it in its chain, if there was one when it was registered.
    pub(crate) fn parent(&self) -> Option<BlockIdentity> {
        self.lease.parent()
    }

    /// Its place in its chain.
    pub(crate) fn position(&self) -> u32 {
        self.memory.notes[self.lease.slot() as usize].position.load(Ordering::Relaxed)
    }

    /// The first eight bytes of what its owner keeps with it; zero when there are fewer.
    pub(crate) fn word(&self) -> u64 {
        self.memory.notes[self.lease.slot() as usize].word.load(Ordering::Relaxed)
    }

    /// What [`dataplane_checksum::checksum`] of its bytes must be.
    #[must_use]
    pub fn checksum(&self) -> u64 {
        self.lease.checksum()
    }

    /// Whether it begins with these bytes. Whether it is intact is not looked at.
    #[must_use]
    pub fn begins_with<const BYTES: usize>(&self, bytes: &[u8; BYTES]) -> bool {
        let mut start = [0; BYTES];
        if BYTES > self.len() {
            return false;
        }
        self.memory.slab.read(self.lease.slot(), 0, &mut start);
        start == *bytes
    }

    /// Hands its bytes to `take` in pieces of 16 KiB and a last one; false when they are not what had been stored, and what
    /// was handed over is of no use. What is verified is the copy that `take` sees. Allocates nothing.
    #[must_use]
    pub fn read_verified(&self, take: impl FnMut(&[u8])) -> bool {
        checksum_of_pieces(&self.memory.slab, self.lease.slot(), self.len(), take) == self.lease.checksum()
    }

    /// Its bytes, or `None` when they are not what had been stored.
    #[must_use]
    pub fn to_bytes(&self) -> Option<Vec<u8>> {
        let mut bytes = vec![0; self.len()];
        self.memory.slab.read(self.lease.slot(), 0, &mut bytes);
        (dataplane_checksum::checksum(&bytes) == self.lease.checksum()).then_some(bytes)
    }
}
