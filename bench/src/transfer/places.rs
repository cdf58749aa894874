//! Places of a test's pieces in a slab, and their byte patterns.
//!
//! Small pieces share a slot, large ones have one each, so one slab serves all sizes. Both ends compute the
//! same places from a [`Shape`], so places are not sent.

use anyhow::{Result, bail, ensure};
use dataplane_memory::{Slab, SlabLayout, SlotRef};
use serde::{Deserialize, Serialize};

use super::memory;
use super::sizes::RowShape;

const PIECE_ALIGNMENT: u32 = 64;
/// Smallest slot: pings and their echoes have one each.
const SLOT_BYTES_MIN: u64 = 4096;
/// Two slots as sources, which the peer reads or which are copied from, and two as targets.
const SLOTS_MIN: u64 = 4;
/// The names of this many slots fit into one message.
const SLOTS_MAX: u64 = 2048;

/// Size of a piece, and its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Shape {
    /// Bytes of a piece, without the gaps between rows.
    pub(super) bytes: u32,
    /// The rows of a piece; `None`: the piece is contiguous.
    pub(super) rows: Option<RowShape>,
}

/// Index of a slot among those in use, and an offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SlotOffset {
    pub(super) slot: usize,
    pub(super) offset: u32,
}

impl Shape {
    pub(super) fn new(bytes: u32, rows: Option<RowShape>) -> Result<Self> {
        if let Some(shape) = rows {
            ensure!(
                shape.rows().is_valid(bytes),
                "pieces of {bytes} bytes are not whole rows of {}",
                shape.bytes
            );
        }
        let shape = Self { bytes, rows };
        ensure!(
            shape.checked_pitch().is_some(),
            "a piece of {bytes} bytes: empty, or its rows reach too far"
        );
        Ok(shape)
    }

    /// Bytes from the first to the last byte of a piece at the given stride.
    fn span(self, stride: impl Fn(RowShape) -> u32) -> Option<u32> {
        match self.rows {
            None => Some(self.bytes),
            Some(shape) => shape.rows().span(self.bytes, stride(shape)),
        }
    }

    fn checked_pitch(self) -> Option<u32> {
        if self.bytes == 0 || self.rows.is_some_and(|shape| !shape.rows().is_valid(self.bytes)) {
            return None;
        }
        let local = self.span(|shape| shape.local_stride)?;
        let remote = self.span(|shape| shape.remote_stride)?;
        local.max(remote).checked_next_multiple_of(PIECE_ALIGNMENT)
    }

    /// Distance in bytes from piece to piece. Saturates for an invalid shape of a peer, which then fits nowhere.
    pub(super) fn pitch(self) -> u32 {
        self.checked_pitch().unwrap_or(u32::MAX)
    }

    /// Returns the place of piece `index`.
    pub(super) fn place(self, slot_bytes: usize, index: u32) -> SlotOffset {
        let per_slot = (slot_bytes / self.pitch() as usize).max(1) as u32;
        SlotOffset { slot: (index / per_slot) as usize, offset: index % per_slot * self.pitch() }
    }

    /// Returns the number of pieces that fit.
    pub(super) fn capacity(self, slot_bytes: usize, slots: usize) -> u32 {
        (slot_bytes / self.pitch() as usize * slots).min(u32::MAX as usize) as u32
    }

    /// Returns the row length and the stride of the given side, for loops over rows.
    fn walk(self, local: bool) -> (usize, usize) {
        match self.rows {
            None => (self.bytes as usize, self.bytes as usize),
            Some(rows) => {
                (rows.bytes as usize, if local { rows.local_stride } else { rows.remote_stride } as usize)
            }
        }
    }

    /// Fills a piece with the pattern of `seed` and `index`.
    pub(super) fn fill(
        self,
        slab: &Slab,
        slot: u32,
        offset: u32,
        local: bool,
        seed: u64,
        index: u32,
    ) -> Result<()> {
        let (row, stride) = self.walk(local);
        for (number, chunk) in pattern(seed, index, self.bytes).chunks(row).enumerate() {
            memory::write(slab, slot, offset as usize + number * stride, chunk)?;
        }
        Ok(())
    }

    /// Returns the number of bytes of a piece that differ from the pattern of `seed` and `index`.
    pub(super) fn wrong(
        self,
        slab: &Slab,
        slot: u32,
        offset: u32,
        local: bool,
        seed: u64,
        index: u32,
    ) -> Result<u64> {
        let (row, stride) = self.walk(local);
        let mut found = vec![0; row];
        let mut wrong = 0;
        for (number, chunk) in pattern(seed, index, self.bytes).chunks(row).enumerate() {
            let found = &mut found[..chunk.len()];
            memory::read(slab, slot, offset as usize + number * stride, found)?;
            wrong += found.iter().zip(chunk).filter(|(one, other)| one != other).count() as u64;
        }
        Ok(wrong)
    }
}

/// Returns the bytes of piece `index` under this seed.
pub(super) fn pattern(seed: u64, index: u32, bytes: u32) -> Vec<u8> {
    let mut out = vec![0; bytes as usize];
    fastrand::Rng::with_seed(seed ^ u64::from(index) << 32).fill(&mut out);
    out
}

/// Returns the target's piece for piece `index` of `count`, using a step that shares no factor with the count.
pub(super) fn shuffled(index: u32, count: u32) -> u32 {
    let mut step = (f64::from(count) * 0.618) as u32 | 1;
    while gcd(step, count) != 1 {
        step += 2;
    }
    (u64::from(index) * u64::from(step) % u64::from(count.max(1))) as u32
}

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Returns the layout of a slab with room for at least two pieces of the largest shape within the budget.
pub(super) fn layout(shapes: &[Shape], memory_bytes: u64) -> Result<SlabLayout> {
    let largest = shapes.iter().map(|shape| u64::from(shape.pitch())).max().unwrap_or(0);
    let slot_bytes = largest.max(SLOT_BYTES_MIN).next_multiple_of(SLOT_BYTES_MIN);
    let slots = memory_bytes / slot_bytes;
    if slots < SLOTS_MIN {
        let needed = SLOTS_MIN * slot_bytes;
        bail!("pieces of {largest} bytes need --memory-bytes {needed}, {memory_bytes} were given");
    }
    ensure!(slot_bytes < 1 << 32, "pieces of {largest} bytes, gaps included, are more than 4 GiB");
    Ok(SlabLayout { slot_bytes: slot_bytes as usize, slot_count: slots.min(SLOTS_MAX) as u32 })
}

/// Returns the slot references in order, as names for the peer.
pub(super) fn names(slots: &[SlotRef]) -> Vec<(u32, u32)> {
    slots.iter().map(|slot| (slot.slot(), slot.generation())).collect()
}

#[cfg(test)]
mod tests {
    use dataplane_memory::PageSize;

    use super::*;

    #[test]
    fn the_shuffle_meets_every_piece_once() {
        for count in [1, 2, 3, 64, 100, 127, 128, 4096] {
            let mut met: Vec<u32> = (0..count).map(|index| shuffled(index, count)).collect();
            met.sort_unstable();
            assert_eq!(met, (0..count).collect::<Vec<_>>(), "{count}");
        }
        let neighbours = (0..63).filter(|&index| shuffled(index + 1, 64) == shuffled(index, 64) + 1).count();
        assert_eq!(neighbours, 0, "no neighbours stay neighbours");
    }

    #[test]
    fn places_do_not_overlap_and_one_flipped_bit_is_found() {
        for rows in [None, Some(RowShape { bytes: 25, local_stride: 30, remote_stride: 70 })] {
            let shape = Shape::new(100, rows).expect("whole rows");
            let layout = SlabLayout { slot_bytes: 4096, slot_count: 3 };
            let slab = Slab::create("places", layout, PageSize::Standard).expect("slab");
            let count = shape.capacity(layout.slot_bytes, 3);
            let at = |index| shape.place(layout.slot_bytes, index);
            for local in [true, false] {
                for i in 0..count {
                    shape.fill(&slab, at(i).slot as u32, at(i).offset, local, 5, i).expect("filled");
                }
                let wrong = |seed, i: u32| {
                    shape.wrong(&slab, at(i).slot as u32, at(i).offset, local, seed, i).expect("read")
                };
                assert!((0..count).all(|i| wrong(5, i) == 0));
                assert!(wrong(6, 0) > 50, "another seed is another pattern");
                let place = at(count - 1);
                let mut byte = [0];
                slab.read(place.slot as u32, place.offset as usize + 7, &mut byte);
                slab.write(place.slot as u32, place.offset as usize + 7, &[byte[0] ^ 4]);
                assert_eq!(wrong(5, count - 1), 1);
            }
        }
    }

    #[test]
    fn layouts_follow_the_budget() {
        let shapes = [Shape::new(64, None).expect("shape"), Shape::new(1 << 20, None).expect("shape")];
        let layout = layout(&shapes, 16 << 20).expect("fits");
        assert_eq!((layout.slot_bytes, layout.slot_count), (1 << 20, 16));
        assert!(super::layout(&shapes, 3 << 20).is_err());
        assert!(Shape::new(100, Some(RowShape { bytes: 64, local_stride: 64, remote_stride: 64 })).is_err());
        assert!(Shape::new(0, None).is_err());
        // Invalid shapes that a peer could send.
        for (bytes, row) in [(0, 1), (64, 0), (64, 63), (u32::MAX, u32::MAX)] {
            let rows = Some(RowShape { bytes: row, local_stride: row, remote_stride: row });
            assert_eq!(Shape { bytes, rows }.capacity(1 << 20, 16), 0, "{bytes} in rows of {row}");
        }
        let far = Some(RowShape { bytes: 1, local_stride: 1 << 30, remote_stride: 1 });
        assert!(Shape::new(100, far).is_err());
    }
}
