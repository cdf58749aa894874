//! The bytes of the host tier: a slab of page-aligned slots, all of them in the catalog's hands.
//!
//! The catalog says which slot holds which block and who reads it. This module copies bytes in and out and proves them: the checksum is
//! that of the bytes that were copied, taken on the way.

use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dataplane_checksum::{LANE_BYTES, Stores, Sum};
use dataplane_memory::{MemoryError, PageSize, Slab, SlabLayout, SlotPool, SlotRef};
use kvstore_block::BlockIdentity;
use kvstore_catalog::{Filling, Lease};
use xxhash_rust::xxh3::Xxh3;

use crate::fault_injection::{Planted, is_planted};
use crate::pages_ahead::PagesAhead;
use crate::shared::MAPPED;

/// Bytes that are copied to a buffer and hashed at a time, where two checksums are taken.
const CHUNK_BYTES: usize = 8 << 10;
/// Blocks from this length on are copied past the caches: some of them are more than caches hold.
const STREAMED_BYTES: usize = 64 << 10;
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
    /// Places of the blocks of [`MAPPED`], by their slots in that tier.
    mapped: Vec<Mutex<Option<Arc<MappedSlot>>>>,
    pages_ahead: Option<PagesAhead>,
}

/// Blocks of pools on this host that may be known at a time.
pub(crate) const MAPPED_SLOTS: u32 = 16 << 10;

/// A block in the memory of a pool on this host. Its bytes may change: every reader compares them with the
/// checksum.
#[derive(Debug)]
pub(crate) struct MappedSlot {
    pub(crate) slab: Arc<Slab>,
    pub(crate) slot: u32,
    /// Generation of the slot while it holds the block.
    pub(crate) generation: u32,
    /// Position of the block in its chain.
    pub(crate) position: u32,
    /// First bytes of the caller's data kept with the block.
    pub(crate) word: u64,
    made: Instant,
    /// When it was read last, in ms since `made` and one; 0: never. Relaxed: nothing else depends on it.
    read_at_ms: AtomicU64,
    /// Number of complete reads. Relaxed as well.
    reads: AtomicU32,
}

impl MappedSlot {
    pub(crate) fn new(slab: Arc<Slab>, slot: u32, generation: u32, position: u32, word: u64) -> Self {
        let (made, read_at_ms, reads) = (Instant::now(), AtomicU64::new(0), AtomicU32::new(0));
        Self { slab, slot, generation, position, word, made, read_at_ms, reads }
    }

    fn was_read(&self) {
        self.read_at_ms.store(self.made.elapsed().as_millis() as u64 + 1, Ordering::Relaxed);
        self.reads.fetch_add(1, Ordering::Relaxed);
    }

    /// Number of reads of the block to its end.
    pub(crate) fn reads(&self) -> u32 {
        self.reads.load(Ordering::Relaxed)
    }

    /// Whether the block was read, and not within so much time before `now`.
    pub(crate) fn was_read_before(&self, now: Instant, within: Duration) -> bool {
        match self.read_at_ms.load(Ordering::Relaxed) {
            0 => false,
            ms => self.made + Duration::from_millis(ms) + within <= now,
        }
    }

    /// Whether the pool has given the slot to another block since.
    pub(crate) fn is_gone(&self) -> bool {
        // The bytes are read before the generation, as by the reader of a seqlock.
        fence(Ordering::Acquire);
        self.slab.try_generation(self.slot) != Some(self.generation)
    }
}

#[derive(Debug, Default)]
struct Note {
    /// Position of the block in its chain.
    position: AtomicU32,
    /// First bytes of the caller's data kept with the block.
    word: AtomicU64,
}

impl HostMemory {
    /// Memory for `slot_count` blocks of at most `block_bytes`, of a NUMA node as far as it has some.
    pub(crate) fn new(
        block_bytes: usize,
        slot_count: u32,
        pages: PageSize,
        numa_node: Option<u32>,
    ) -> Result<Self, MemoryError> {
        let layout = SlabLayout { slot_bytes: block_bytes.next_multiple_of(SLOT_ALIGNMENT), slot_count };
        let slab = Arc::new(Slab::create("kvasir-host-tier", layout, pages)?);
        if let Some(node) = numa_node
            && let Err(error) = slab.prefer_numa_node(node)
        {
            // A container may not be allowed to ask; pages are then where they are first touched.
            tracing::info!("host memory is not taken from NUMA node {node}: {error}");
        }
        let pool = SlotPool::new(Arc::clone(&slab));
        let mut slots: Vec<SlotRef> = std::iter::from_fn(|| pool.acquire()).collect();
        slots.sort_unstable_by_key(SlotRef::slot);
        let notes = slots.iter().map(|_| Note::default()).collect();
        let mapped = (0..MAPPED_SLOTS).map(|_| Mutex::new(None)).collect();
        let pages_ahead = PagesAhead::start(&slab);
        Ok(Self { slab, slots, notes, mapped, pages_ahead })
    }

    pub(crate) fn slot_count(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn slab(&self) -> &Arc<Slab> {
        &self.slab
    }

    /// Records position and caller's data of the block that is going to be registered in a slot.
    pub(crate) fn note(&self, slot: u32, position: u32, meta: &[u8]) {
        let note = &self.notes[slot as usize];
        let word = meta.first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
        note.position.store(position, Ordering::Relaxed);
        note.word.store(word, Ordering::Relaxed);
    }

    /// Returns the place of the block in a slot of [`MAPPED`]; `None`: the block is not known any more.
    pub(crate) fn mapped(&self, slot: u32) -> Option<Arc<MappedSlot>> {
        // Nothing panics while it is held.
        self.mapped[slot as usize].lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set_mapped(&self, slot: u32, place: Option<Arc<MappedSlot>>) {
        *self.mapped[slot as usize].lock().unwrap_or_else(PoisonError::into_inner) = place;
    }

    /// Returns the block for a reader; `None`: the block was in a pool's memory and is not known any more.
    pub(crate) fn held(self: &Arc<Self>, lease: Lease) -> Option<HostBlock> {
        let mapped = match lease.tier() {
            MAPPED => Some(self.mapped(lease.slot())?),
            _ => None,
        };
        Some(HostBlock { lease, memory: Arc::clone(self), mapped })
    }

    /// Another reference to a slot, for a read or write that is under way.
    pub(crate) fn slot(&self, slot: u32) -> &SlotRef {
        self.note_use(slot);
        &self.slots[slot as usize]
    }

    /// Reports that the slot is about to be used: pages are allocated ahead of it.
    fn note_use(&self, slot: u32) {
        if let Some(pages_ahead) = &self.pages_ahead {
            pages_ahead.note_use(slot);
        }
    }

    /// Copies a block in; returns its length and its checksum, taken from what arrived. `None`: it is larger than a slot.
    pub(crate) fn copy_in(&self, slot: u32, source: &SlotRef) -> Option<(usize, u64)> {
        let bytes = source.slab().layout().slot_bytes;
        if bytes > self.slab.layout().slot_bytes {
            return None;
        }
        let mut sum = Sum::default();
        self.slab.copy_summed(source.slab(), source.slot(), slot, bytes, &mut sum, stores(bytes));
        Some((bytes, sum.seal(bytes as u64)))
    }

    /// Copies a block from the heap into a slot; returns its checksum.
    pub(crate) fn write(&self, slot: u32, pieces: &[bytes::Bytes]) -> u64 {
        let mut writer = SlotWriter::default();
        pieces.iter().for_each(|piece| writer.append(&self.slab, slot, piece));
        writer.finish().1
    }

    /// Whether the block has the length of the blocks of the target's pool.
    pub(crate) fn fits(&self, lease: &Lease, target: &SlotRef) -> bool {
        lease.bytes() as usize == target.slab().layout().slot_bytes
    }

    /// Copies a block out; false when the copied bytes do not match its checksum.
    pub(crate) fn copy_out(&self, lease: &Lease, target: &SlotRef) -> bool {
        let bytes = lease.bytes() as usize;
        let mapped = if lease.tier() == MAPPED { self.mapped(lease.slot()) } else { None };
        let (slab, slot) = match &mapped {
            Some(place) => (&place.slab, place.slot),
            None if lease.tier() == MAPPED => return false,
            None => (&self.slab, lease.slot()),
        };
        let mut sum = Sum::default();
        target.slab().copy_summed(slab, slot, target.slot(), bytes, &mut sum, stores(bytes));
        if let Some(place) = &mapped {
            place.was_read();
        }
        let is_intact =
            sum.seal(bytes as u64) == lease.checksum() && mapped.is_none_or(|place| !place.is_gone());
        is_intact || is_planted(Planted::DamageServed)
    }

    /// Whether a block in host memory matches its checksum.
    pub(crate) fn is_intact(&self, lease: &Lease) -> bool {
        checksum(&self.slab, lease.slot(), lease.bytes() as usize) == lease.checksum()
    }

    pub(crate) fn checksum(&self, slot: u32, bytes: usize) -> u64 {
        checksum(&self.slab, slot, bytes)
    }

    /// The checksum of a slot's bytes if their xxh3-64 is the `expected` one, else `None`. Peers may write the slot meanwhile: both are taken
    /// of a copy.
    pub(crate) fn checksum_if(&self, slot: u32, bytes: usize, expected: u64) -> Option<u64> {
        let (mut own, mut other, mut chunk) = (Sum::default(), Xxh3::new(), [0; CHUNK_BYTES]);
        for at in (0..bytes).step_by(CHUNK_BYTES) {
            let piece = &mut chunk[..CHUNK_BYTES.min(bytes - at)];
            self.slab.read(slot, at, piece);
            own.add((at / LANE_BYTES) as u64, piece);
            other.update(piece);
        }
        (other.digest() == expected).then(|| own.seal(bytes as u64))
    }
}

/// The checksum of a slot's bytes (`dataplane-checksum`, which a GPU takes too).
fn checksum(slab: &Slab, slot: u32, bytes: usize) -> u64 {
    let mut sum = Sum::default();
    slab.add_to_sum(slot, 0, bytes, &mut sum);
    sum.seal(bytes as u64)
}

fn stores(block_bytes: usize) -> Stores {
    if block_bytes < STREAMED_BYTES { Stores::Cached } else { Stores::Streaming }
}

/// Bytes that go into a slot one after the other, and their checksum.
#[derive(Debug, Default)]
struct SlotWriter {
    at: usize,
    sum: Sum,
    /// The bytes of the last lane so far, if it is not whole.
    lane: [u8; LANE_BYTES],
}

impl SlotWriter {
    fn append(&mut self, slab: &Slab, slot: u32, mut bytes: &[u8]) {
        let open = self.at % LANE_BYTES;
        if open > 0 {
            let now;
            (now, bytes) = bytes.split_at(bytes.len().min(LANE_BYTES - open));
            self.begin_lane(slab, slot, now);
            if !self.at.is_multiple_of(LANE_BYTES) {
                return;
            }
            self.sum.add((self.at / LANE_BYTES - 1) as u64, &self.lane);
        }
        let (lanes, rest) = bytes.split_at(bytes.len() - bytes.len() % LANE_BYTES);
        slab.write_summed(slot, self.at, lanes, &mut self.sum, stores(slab.layout().slot_bytes));
        self.at += lanes.len();
        self.begin_lane(slab, slot, rest);
    }

    /// Writes bytes of a lane that is summed later.
    fn begin_lane(&mut self, slab: &Slab, slot: u32, bytes: &[u8]) {
        let open = self.at % LANE_BYTES;
        self.lane[open..open + bytes.len()].copy_from_slice(bytes);
        slab.write(slot, self.at, bytes);
        self.at += bytes.len();
    }

    /// Returns the number of bytes written, and their checksum.
    fn finish(mut self) -> (usize, u64) {
        let open = self.at % LANE_BYTES;
        self.sum.add((self.at / LANE_BYTES) as u64, &self.lane[..open]);
        (self.at, self.sum.seal(self.at as u64))
    }
}

/// A free slot of host memory that the caller fills itself ([`crate::Store::reserve`]): one copy and one checksum, on the caller's
/// thread. Dropped, it is free again.
#[derive(Debug)]
pub struct NewSlot {
    filling: Filling,
    memory: Arc<HostMemory>,
    writer: SlotWriter,
}

impl NewSlot {
    pub(crate) fn new(filling: Filling, memory: Arc<HostMemory>) -> Self {
        memory.note_use(filling.slot());
        Self { filling, memory, writer: SlotWriter::default() }
    }

    /// Bytes that the slot has room for.
    #[must_use]
    pub fn room(&self) -> usize {
        self.memory.slab.layout().slot_bytes
    }

    /// Writes a block's bytes, which are all of these pieces, and takes their checksum on the way: damage of the copy shows when the
    /// block is read. False, and the slot is of no use, when there is no room for all of them. To be called once.
    #[must_use]
    pub fn fill<'a>(&mut self, pieces: impl Iterator<Item = &'a [u8]>) -> bool {
        for piece in pieces {
            if self.writer.at + piece.len() > self.room() {
                return false;
            }
            self.writer.append(&self.memory.slab, self.filling.slot(), piece);
        }
        true
    }

    /// The slot itself, for a caller that writes it without [`NewSlot::fill`].
    pub(crate) fn slot(&self) -> &SlotRef {
        self.memory.slot(self.filling.slot())
    }

    /// Returns the slot, for a caller that knows its contents.
    pub(crate) fn into_filling(self) -> Filling {
        self.filling
    }

    /// The slot, its bytes and their checksum.
    pub(crate) fn into_parts(self) -> (Filling, usize, u64) {
        let (bytes, checksum) = self.writer.finish();
        (self.filling, bytes, checksum)
    }
}

/// A block that is held in host memory for a reader, or lies in the memory of a pool on this host.
#[derive(Debug)]
pub struct HostBlock {
    lease: Lease,
    memory: Arc<HostMemory>,
    /// The block's place in a pool's memory, if it lies there.
    mapped: Option<Arc<MappedSlot>>,
}

impl HostBlock {
    /// Length of the block in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lease.bytes() as usize
    }

    /// Whether the block has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether both are one block of one slot. While one is held, its slot goes to no other block.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        let places = (self.lease.tier(), self.lease.slot());
        Arc::ptr_eq(&self.memory, &other.memory) && places == (other.lease.tier(), other.lease.slot())
    }

    /// The block's slot in this node's own memory.
    pub(crate) fn slot(&self) -> &SlotRef {
        assert!(self.mapped.is_none(), "blocks of pools have no slot here");
        self.memory.slot(self.lease.slot())
    }

    /// Whether the block lies in the memory of a pool on this host.
    pub(crate) fn is_mapped(&self) -> bool {
        self.mapped.is_some()
    }

    /// Slab and slot with the block's bytes.
    fn location(&self) -> (&Slab, u32) {
        match &self.mapped {
            Some(place) => (&place.slab, place.slot),
            None => (&self.memory.slab, self.lease.slot()),
        }
    }

    /// Whether a pool has used the memory for another block: bytes that were read are useless, but nothing is
    /// damaged.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.mapped.as_ref().is_some_and(|place| place.is_gone())
    }

    /// The block before it in its chain, if there was one when it was registered.
    pub(crate) fn parent(&self) -> Option<BlockIdentity> {
        self.lease.parent()
    }

    /// Position of the block in its chain.
    pub(crate) fn position(&self) -> u32 {
        match &self.mapped {
            Some(place) => place.position,
            None => self.memory.notes[self.lease.slot() as usize].position.load(Ordering::Relaxed),
        }
    }

    /// The first eight bytes of the caller's data kept with the block; zero when there are fewer.
    pub(crate) fn word(&self) -> u64 {
        match &self.mapped {
            Some(place) => place.word,
            None => self.memory.notes[self.lease.slot() as usize].word.load(Ordering::Relaxed),
        }
    }

    /// Checksum of the block's bytes, by [`dataplane_checksum::checksum`].
    #[must_use]
    pub fn checksum(&self) -> u64 {
        self.lease.checksum()
    }

    /// Whether the block begins with these bytes. Its checksum is not compared.
    #[must_use]
    pub fn begins_with<const BYTES: usize>(&self, bytes: &[u8; BYTES]) -> bool {
        let mut start = [0; BYTES];
        if BYTES > self.len() {
            return false;
        }
        let (slab, slot) = self.location();
        slab.read(slot, 0, &mut start);
        start == *bytes
    }

    /// Starts a read from the block's first byte that also takes the checksum.
    #[must_use]
    pub fn read(&self) -> BlockRead<'_> {
        let (slab, slot) = self.location();
        BlockRead { block: self, slab, slot, at: 0, sum: Sum::default(), lane: [0; LANE_BYTES] }
    }

    /// Returns the block's bytes, or `None` when they do not match the checksum or the pool has reused the
    /// memory.
    #[must_use]
    pub fn to_bytes(&self) -> Option<Vec<u8>> {
        let mut bytes = vec![0; self.len()];
        let (slab, slot) = self.location();
        slab.read(slot, 0, &mut bytes);
        let is_intact = dataplane_checksum::checksum(&bytes) == self.lease.checksum() && !self.is_gone();
        is_intact.then_some(bytes)
    }
}

/// A read of a held block from its start. The bytes that were given out are those that are verified at the
/// end. Allocates nothing.
#[derive(Debug)]
pub struct BlockRead<'a> {
    block: &'a HostBlock,
    slab: &'a Slab,
    slot: u32,
    at: usize,
    sum: Sum,
    /// The bytes of the last lane so far, if it is not whole.
    lane: [u8; LANE_BYTES],
}

impl BlockRead<'_> {
    /// The next `BYTES` bytes; `None`, and nothing is read, when fewer are left or the position is no multiple of 8.
    #[must_use]
    pub fn read_lanes<const BYTES: usize>(&mut self) -> Option<[u8; BYTES]> {
        const { assert!(BYTES.is_multiple_of(LANE_BYTES)) };
        if self.left() < BYTES || !self.at.is_multiple_of(LANE_BYTES) {
            return None;
        }
        let mut bytes = [0; BYTES];
        self.slab.read_summed_into(self.slot, self.at, &mut bytes, &mut self.sum);
        self.at += BYTES;
        Some(bytes)
    }

    /// Copies the next bytes; false, and nothing is copied, when fewer are left.
    #[must_use]
    pub fn copy(&mut self, target: &mut [MaybeUninit<u8>]) -> bool {
        if self.left() < target.len() {
            return false;
        }
        let open = self.at % LANE_BYTES;
        let rest_of_lane = if open == 0 { 0 } else { (LANE_BYTES - open).min(target.len()) };
        let (first, target) = target.split_at_mut(rest_of_lane);
        self.copy_part(first);
        let (lanes, last) = target.split_at_mut(target.len() - target.len() % LANE_BYTES);
        if !lanes.is_empty() {
            let stores = stores(self.block.len());
            self.slab.read_summed(self.slot, self.at, lanes, &mut self.sum, stores);
            self.at += lanes.len();
        }
        self.copy_part(last);
        true
    }

    /// Copies a part of a lane, which is summed when it is whole.
    fn copy_part(&mut self, target: &mut [MaybeUninit<u8>]) {
        let open = self.at % LANE_BYTES;
        let part = &mut self.lane[open..open + target.len()];
        self.slab.read(self.slot, self.at, part);
        for (target, byte) in target.iter_mut().zip(part) {
            target.write(*byte);
        }
        self.at += target.len();
        if !target.is_empty() && self.at.is_multiple_of(LANE_BYTES) {
            self.sum.add((self.at / LANE_BYTES - 1) as u64, &self.lane);
        }
    }

    fn left(&self) -> usize {
        self.block.len() - self.at
    }

    /// Whether the bytes match the block's checksum; reads those that are left.
    #[must_use]
    pub fn is_intact(mut self) -> bool {
        let open = self.at % LANE_BYTES;
        if open > 0 {
            let mut rest = [MaybeUninit::uninit(); LANE_BYTES];
            let rest_of_lane = (LANE_BYTES - open).min(self.left());
            self.copy_part(&mut rest[..rest_of_lane]);
        }
        let open = self.at % LANE_BYTES;
        if open > 0 {
            // The block ends within this lane.
            self.sum.add((self.at / LANE_BYTES) as u64, &self.lane[..open]);
        } else {
            self.slab.add_to_sum(self.slot, self.at, self.left(), &mut self.sum);
        }
        if let Some(place) = &self.block.mapped {
            place.was_read();
        }
        self.sum.seal(self.block.len() as u64) == self.block.lease.checksum() && !self.block.is_gone()
    }
}
