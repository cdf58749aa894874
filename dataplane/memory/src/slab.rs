//! One shared mapping of slots of a fixed size.
//!
//! Layout of the mapping: a header (magic, version, slot count, slot bytes), the generation of every slot,
//! padding to a page, then the slots, each on a cache line (`layout`). The generations lie in the mapping
//! itself so that a process that attaches the slab can check them without asking its owner.
//!
//! The memory is a sealed memfd: it cannot shrink, so an attached peer cannot cause a fault in this
//! process. Other processes may write to it at any time; therefore no function returns a reference to slot
//! bytes without `unsafe`, and the safe functions copy through raw pointers.
//!
//! Made and attached at start-up only; reads and writes cost a bounds check and a copy.
//!
//! The slots may lie in the memory of a device instead ([`Slab::on_device`]). The mapping then ends behind
//! the generations, and no function here returns an address of slot bytes or accesses them: the infallible
//! ones panic, the others report that there is no such range. The host path has no extra cost: a slot's
//! number is checked against the number of slots that the CPU can reach, which is all of them or none.

mod bytes;
mod generations;
mod layout;
mod mapping;
#[cfg(test)]
mod tests;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::DeviceMemory;
use generations::Generations;
use layout::HEADER_BYTES;
pub use layout::{PageSize, SlabLayout};

/// The memory that the slots of a slab lie in. A process shows its peers at most one slab of each kind, so
/// peers name a slab by its kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SlabKind {
    /// Host memory: the mapping, which processors reach.
    Host = 0,
    /// A device's memory.
    Device = 1,
}

impl SlabKind {
    /// Number of kinds.
    pub const COUNT: usize = 2;
    /// Every kind, in the order of [`SlabKind::index`].
    pub const ALL: [Self; Self::COUNT] = [Self::Host, Self::Device];

    /// Returns the index in a table with one entry for each kind; also the number of the kind in messages
    /// of peers.
    #[must_use]
    pub fn index(self) -> usize {
        self as usize
    }

    /// Returns the kind with this number in messages.
    #[must_use]
    pub fn from_index(index: u8) -> Option<Self> {
        Self::ALL.get(usize::from(index)).copied()
    }
}

/// A mapping of slots of a fixed size, shared with every process that holds its descriptor.
#[derive(Debug)]
pub struct Slab {
    base: NonNull<u8>,
    mapped_bytes: usize,
    layout: SlabLayout,
    /// [`SlabLayout::slots_offset`] and [`SlabLayout::stride`], kept because every copy needs them.
    slots_offset: usize,
    stride: usize,
    /// Slots whose bytes the CPU can reach: all of them, or none when they lie in a device's memory.
    reachable_count: u32,
    memory: OwnedFd,
    huge_pages: bool,
    device: Option<Arc<dyn DeviceMemory>>,
    generations: Generations,
    /// By slot: number of peers' writes in progress; empty in a slab that was attached.
    writes_in_progress: Box<[AtomicU32]>,
}

// SAFETY: the mapping belongs to this value until it is dropped, and every access goes through atomics or
// raw copies that assume other threads and processes write concurrently.
unsafe impl Send for Slab {}
// SAFETY: as above.
unsafe impl Sync for Slab {}

impl Slab {
    /// Returns the layout of the slab.
    #[must_use]
    #[inline]
    pub fn layout(&self) -> SlabLayout {
        self.layout
    }

    /// Returns the device's memory that the slots lie in; `None` when they lie in the mapping.
    #[must_use]
    pub fn device(&self) -> Option<&Arc<dyn DeviceMemory>> {
        self.device.as_ref()
    }

    /// Returns the kind of memory that the slots lie in.
    #[must_use]
    pub fn kind(&self) -> SlabKind {
        if self.device.is_some() { SlabKind::Device } else { SlabKind::Host }
    }

    /// Returns the device's address of `len` bytes at `offset` of `slot`; `None` when they are not inside
    /// the slot, or the slots are not in a device's memory.
    #[must_use]
    pub fn device_address(&self, slot: u32, offset: usize, len: usize) -> Option<u64> {
        let device = self.device.as_ref().filter(|_| self.contains(slot, offset, len))?;
        Some(device.address() + (slot as usize * self.stride + offset) as u64)
    }

    /// Returns the bytes of address space in use. Excludes the slots when they lie in a device's memory.
    #[must_use]
    pub fn mapped_bytes(&self) -> usize {
        self.mapped_bytes
    }

    /// Whether 2 MiB pages back the slab.
    #[must_use]
    pub fn has_huge_pages(&self) -> bool {
        self.huge_pages
    }

    /// Returns the start of the mapping, which a device registers as a whole, once. The mapping ends before
    /// the slots when these lie in a device's memory: see [`Slab::device_address`].
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Returns the descriptor by which another process attaches this slab. Unusable for that when the slots
    /// lie in a device's memory.
    #[must_use]
    pub fn memory(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    #[inline]
    fn generation_cell(&self, slot: u32) -> &AtomicU32 {
        assert!(slot < self.layout.slot_count, "slot {slot} of {}", self.layout.slot_count);
        let offset = HEADER_BYTES + slot as usize * size_of::<AtomicU32>();
        // SAFETY: `slot` is in range, so the cell lies between header and slots, inside the mapping.
        let cell = unsafe { self.base.add(offset) }.cast::<AtomicU32>();
        // SAFETY: the mapping lives as long as `self`; it is page-aligned and the offset a multiple of 4; and
        // every process accesses the cell atomically.
        unsafe { cell.as_ref() }
    }

    /// Returns the slot's present generation; `None` when there is no such slot. Pairs as
    /// [`Self::generation`] does.
    #[must_use]
    #[inline]
    pub fn try_generation(&self, slot: u32) -> Option<u32> {
        (slot < self.layout.slot_count).then(|| self.generation_cell(slot).load(Ordering::Acquire))
    }

    /// Returns the slot's present generation. Pairs with the release in `change_generation`.
    #[must_use]
    #[inline]
    pub fn generation(&self, slot: u32) -> u32 {
        self.generation_cell(slot).load(Ordering::Acquire)
    }

    /// Makes every earlier name of the slot stale. Pairs with the acquire in `generation`. Called by the
    /// owner of the slab only, and for each slot by one thread at a time.
    pub(crate) fn change_generation(&self, slot: u32) {
        let cell = self.generation_cell(slot);
        let (old, drawn) = (cell.load(Ordering::Relaxed), self.generations.draw());
        cell.store(if drawn == old { drawn.wrapping_add(1) } else { drawn }, Ordering::Release);
    }

    /// Counts a write in progress: a fabric has taken the header of a peer's write, and from now on the
    /// kernel may write its bytes to the slot, even after the slot's name has become stale.
    pub fn begin_write(&self, slot: u32) {
        if let Some(writes_in_progress) = self.writes_in_progress.get(slot as usize) {
            writes_in_progress.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Ends a write in progress: it has landed, or its connection is over.
    pub fn end_write(&self, slot: u32) {
        if let Some(writes_in_progress) = self.writes_in_progress.get(slot as usize) {
            // Release: the write's bytes come before the new count.
            writes_in_progress.fetch_sub(1, Ordering::Release);
        }
    }

    /// Returns the number of writes in progress into the slot.
    #[must_use]
    pub fn writes_in_progress(&self, slot: u32) -> u32 {
        self.writes_in_progress
            .get(slot as usize)
            .map_or(0, |writes_in_progress| writes_in_progress.load(Ordering::Acquire))
    }

    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn set_generation(&self, slot: u32, generation: u32) {
        self.generation_cell(slot).store(generation, Ordering::Release);
    }

    /// Returns the address of `len` bytes at `offset` of `slot`; panics when they are not inside the slot,
    /// or lie in a device's memory. The other infallible functions below panic in the same cases.
    #[must_use]
    #[inline]
    pub fn address(&self, slot: u32, offset: usize, len: usize) -> NonNull<u8> {
        match self.try_address(slot, offset, len) {
            Some(address) => address,
            None => self.outside(slot, offset, len),
        }
    }

    #[cold]
    fn outside(&self, slot: u32, offset: usize, len: usize) -> ! {
        let SlabLayout { slot_bytes, slot_count } = self.layout;
        assert!(slot < slot_count, "slot {slot} of {slot_count}");
        assert!(self.device.is_none(), "the CPU cannot reach slot {slot}: it lies in a device's memory");
        panic!("bytes {offset}+{len} of a slot of {slot_bytes} bytes");
    }

    /// Returns the address of `len` bytes at `offset` of `slot`; `None` when they are not inside the slot
    /// or lie in a device's memory. A single check, for names that come from a peer.
    #[must_use]
    #[inline]
    pub fn try_address(&self, slot: u32, offset: usize, len: usize) -> Option<NonNull<u8>> {
        if slot >= self.reachable_count || !self.is_in_slot(offset, len) {
            return None;
        }
        let start = self.slots_offset + slot as usize * self.stride + offset;
        // SAFETY: slot and range were just checked, and the reachable slots fit into the mapping (`create` sized
        // the mapping for them, `read_header` compared them with the mapping, `on_device` has none).
        Some(unsafe { self.base.add(start) })
    }

    /// Whether `len` bytes at `offset` of `slot` exist, in host or device memory. Ranges from a peer are
    /// checked with this first.
    #[must_use]
    #[inline]
    pub fn contains(&self, slot: u32, offset: usize, len: usize) -> bool {
        slot < self.layout.slot_count && self.is_in_slot(offset, len)
    }

    #[inline]
    fn is_in_slot(&self, offset: usize, len: usize) -> bool {
        offset.checked_add(len).is_some_and(|end| end <= self.layout.slot_bytes)
    }
}
