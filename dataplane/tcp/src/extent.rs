//! Position of one operation's bytes in a slot: contiguous or in rows. Bytes are numbered from 0 without
//! the gaps. A run is the contiguous part from a given byte on.

use std::ptr::NonNull;

use dataplane_memory::Slab;

use crate::wire::RowShape;

/// Runs shorter than this are copied through a staging buffer: one entry of a vector costs about as much as
/// copying this many bytes.
pub(crate) const COPIED_RUN_BYTES_MAX: u32 = 512;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) slot: u32,
    pub(crate) offset: u32,
    pub(crate) len: u32,
    row_bytes: u32,
    stride: u32,
}

impl Extent {
    /// Creates the extent; `None` when the rows do not divide `len` or overlap. Rows without gaps become one
    /// run.
    pub(crate) fn new(slot: u32, offset: u32, len: u32, rows: Option<RowShape>) -> Option<Self> {
        let whole = Self { slot, offset, len, row_bytes: len, stride: len };
        match rows {
            None => Some(whole),
            Some(rows) if rows.bytes == 0 || !len.is_multiple_of(rows.bytes) || rows.stride < rows.bytes => {
                None
            }
            Some(rows) if rows.stride == rows.bytes || len <= rows.bytes => Some(whole),
            Some(rows) => Some(Self { row_bytes: rows.bytes, stride: rows.stride, ..whole }),
        }
    }

    /// Whether every byte lies inside a slot of `slab`.
    pub(crate) fn is_inside(&self, slab: &Slab) -> bool {
        let rows = u64::from(self.len.checked_div(self.row_bytes).unwrap_or(0));
        let span = match rows {
            0 => 0,
            // Product and sum fit into 64 bits, since each factor has 32.
            rows => (rows - 1) * u64::from(self.stride) + u64::from(self.row_bytes),
        };
        usize::try_from(span).is_ok_and(|span| slab.contains(self.slot, self.offset as usize, span))
    }

    /// Whether the runs are too short for vectors.
    pub(crate) fn has_short_runs(&self) -> bool {
        self.row_bytes < COPIED_RUN_BYTES_MAX
    }

    /// Returns the run that begins at byte `at`: its offset in the slot and its length.
    pub(crate) fn run(&self, at: u32) -> (u32, u32) {
        debug_assert!(at < self.len);
        if self.row_bytes == self.len {
            return (self.offset + at, self.len - at);
        }
        let within = at % self.row_bytes;
        (self.offset + at / self.row_bytes * self.stride + within, self.row_bytes - within)
    }

    /// Returns the run that begins at byte `at`: its address and its length.
    pub(crate) fn run_at(&self, slab: &Slab, at: u32) -> (NonNull<u8>, u32) {
        let (offset, len) = self.run(at);
        (slab.address(self.slot, offset as usize, len as usize), len)
    }

    /// Copies the bytes from byte `at` on out of the slot.
    pub(crate) fn copy_out(&self, slab: &Slab, mut at: u32, mut bytes: &mut [u8]) {
        while !bytes.is_empty() {
            let (offset, len) = self.run(at);
            let len = bytes.len().min(len as usize);
            let (now, later) = bytes.split_at_mut(len);
            slab.read(self.slot, offset as usize, now);
            bytes = later;
            at += len as u32;
        }
    }

    /// Copies bytes into the slot, from byte `at` on.
    pub(crate) fn copy_in(&self, slab: &Slab, mut at: u32, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (offset, len) = self.run(at);
            let (now, later) = bytes.split_at(bytes.len().min(len as usize));
            slab.write(self.slot, offset as usize, now);
            bytes = later;
            at += now.len() as u32;
        }
    }
}

#[cfg(test)]
mod tests {
    use dataplane_memory::{PageSize, SlabLayout};

    use super::*;

    #[test]
    fn spans_are_checked_with_room_to_spare() {
        let layout = SlabLayout { slot_bytes: 1000, slot_count: 2 };
        let slab = Slab::create("extent", layout, PageSize::Standard).expect("slab");
        let rows = |bytes, stride| Some(RowShape { bytes, stride });
        for (slot, offset, len, rows, expected) in [
            (0, 0, 1000, None, true),
            (0, 1, 1000, None, false),
            (2, 0, 1, None, false),
            (1, 0, 100, rows(10, 110), true),
            (1, 1, 100, rows(10, 110), false),
            (1, 0, 100, rows(10, 111), false),
            (0, 0, 8, rows(1, u32::MAX), false),
            (0, 0, u32::MAX, rows(1, u32::MAX), false),
            (0, u32::MAX, u32::MAX, None, false),
            (0, 1000, 0, None, true),
            (0, 1001, 0, rows(5, 9), false),
        ] {
            let extent = Extent::new(slot, offset, len, rows).expect("rows that cut");
            assert_eq!(extent.is_inside(&slab), expected, "{extent:?}");
        }
        assert_eq!(Extent::new(0, 0, 9, rows(2, 4)), None);
        assert_eq!(Extent::new(0, 0, 8, rows(4, 3)), None);
        assert_eq!(Extent::new(0, 0, 8, rows(0, 3)), None);
    }

    #[test]
    fn copies_follow_the_rows() {
        let layout = SlabLayout { slot_bytes: 64, slot_count: 1 };
        let slab = Slab::create("extent", layout, PageSize::Standard).expect("slab");
        let extent = Extent::new(0, 3, 12, Some(RowShape { bytes: 4, stride: 10 })).expect("rows");
        for at in 0..12_u8 {
            extent.copy_in(&slab, at.into(), &[at + 1]);
        }
        let mut all = [0; 12];
        extent.copy_out(&slab, 0, &mut all);
        assert_eq!(all, std::array::from_fn(|at| at as u8 + 1));
        let mut raw = [0; 30];
        slab.read(0, 0, &mut raw);
        assert_eq!(raw[3..7], [1, 2, 3, 4]);
        assert_eq!(raw[7..13], [0; 6]);
        assert_eq!(raw[13..17], [5, 6, 7, 8]);
    }
}
