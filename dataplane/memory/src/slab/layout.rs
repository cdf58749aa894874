//! The layout of a slab, and the header that describes it to a process that attaches the slab.

use std::sync::atomic::AtomicU32;

use crate::MemoryError;

/// `b"KVSRSLAB"`, little-endian.
const MAGIC: u64 = u64::from_le_bytes(*b"KVSRSLAB");
const VERSION: u32 = 1;
pub(super) const HEADER_BYTES: usize = 64;
/// Offset in the header of the byte that holds the place of the slots.
const PLACE: usize = 24;
pub(super) const PAGE_BYTES: usize = 4096;
/// Slots start on a cache line, for DMA engines and vector loads.
const SLOT_ALIGNMENT: usize = 64;

/// Page size behind a slab.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageSize {
    /// 4 KiB pages.
    Standard,
    /// 2 MiB pages if the kernel has enough of them reserved, else 4 KiB.
    HugeIfAvailable,
}

/// The shape of a slab.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlabLayout {
    /// Usable bytes of one slot.
    pub slot_bytes: usize,
    /// Number of slots.
    pub slot_count: u32,
}

impl SlabLayout {
    /// Returns the bytes from the start of one slot to the start of the next.
    #[must_use]
    pub fn stride(&self) -> usize {
        self.slot_bytes.next_multiple_of(SLOT_ALIGNMENT)
    }

    /// Returns the bytes from the start of the mapping to the start of the first slot.
    #[must_use]
    pub fn slots_offset(&self) -> usize {
        (HEADER_BYTES + self.slot_count as usize * size_of::<AtomicU32>()).next_multiple_of(PAGE_BYTES)
    }

    /// Returns the bytes of all slots, from the start of the first; for a usable layout
    /// ([`SlabLayout::mapped_bytes`]).
    #[must_use]
    pub fn slots_bytes(&self) -> usize {
        self.stride() * self.slot_count as usize
    }

    /// Returns the bytes of the whole mapping with 4 KiB pages; `None` when the layout is unusable.
    #[must_use]
    pub fn mapped_bytes(&self) -> Option<usize> {
        if self.slot_bytes == 0 || self.slot_count == 0 || self.slot_bytes > isize::MAX as usize / 2 {
            return None;
        }
        let slots = self.stride().checked_mul(self.slot_count as usize)?;
        let bytes = self.slots_offset().checked_add(slots)?.checked_next_multiple_of(PAGE_BYTES)?;
        (bytes <= isize::MAX as usize).then_some(bytes)
    }
}

/// Place of a slab's slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SlotMemory {
    Mapping = 0,
    Device = 1,
}

/// Encodes the header: magic, version, slot count, slot bytes, place of the slots.
pub(super) fn header(layout: SlabLayout, place: SlotMemory) -> [u8; HEADER_BYTES] {
    let mut header = [0_u8; HEADER_BYTES];
    header[0..8].copy_from_slice(&MAGIC.to_le_bytes());
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[12..16].copy_from_slice(&layout.slot_count.to_le_bytes());
    header[16..24].copy_from_slice(&(layout.slot_bytes as u64).to_le_bytes());
    header[PLACE] = place as u8;
    header
}

/// Decodes the layout in another process's header, and checks that its slots fit into a mapping of
/// `mapped_bytes`.
pub(super) fn layout_of(header: &[u8; HEADER_BYTES], mapped_bytes: usize) -> Result<SlabLayout, MemoryError> {
    let word = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
    if long(0) != MAGIC {
        return Err(MemoryError::NotASlab("wrong magic"));
    }
    if word(8) != VERSION {
        return Err(MemoryError::NotASlab("other version"));
    }
    match header[PLACE] {
        place if place == SlotMemory::Mapping as u8 => {}
        place if place == SlotMemory::Device as u8 => {
            return Err(MemoryError::NotASlab("its slots lie in a device's memory"));
        }
        _ => return Err(MemoryError::NotASlab("its slots lie in memory of an unknown kind")),
    }
    let slot_bytes = usize::try_from(long(16)).map_err(|_| MemoryError::NotASlab("slot size"))?;
    let layout = SlabLayout { slot_bytes, slot_count: word(12) };
    match layout.mapped_bytes() {
        Some(needed) if needed <= mapped_bytes => Ok(layout),
        _ => Err(MemoryError::NotASlab("its slots do not fit into it")),
    }
}
