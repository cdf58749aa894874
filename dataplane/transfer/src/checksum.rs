//! Checksums of pieces of slots, computed by the processor: over the rows of a piece one after the other.
//!
//! xxh3-64 is the faster one here. The sum over lanes (`dataplane-checksum`) is the one that a GPU can
//! compute too: nodes whose blocks may stay in a device's memory use it for all connections, and so do
//! their peers ([`crate::terms`]). It reaches 20 GB/s on one core.
//!
//! Peers can write to the slab during the reads, so the bytes are copied into a private buffer first: a
//! slice into shared memory would be a data race under Rust's rules. The copy stays in the L1 cache.

use std::ops::Range;

use dataplane_checksum::{LANE_BYTES, Sum};
use dataplane_memory::Slab;
use xxhash_rust::xxh3::Xxh3;

use crate::budget::Budget;

const CHUNK_BYTES: usize = 8 << 10;
const _: () = assert!(CHUNK_BYTES.is_multiple_of(LANE_BYTES), "only the last chunk may end within a lane");

/// Checksum of the pieces of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Checksum {
    /// xxh3-64.
    Xxh3,
    /// The sum over lanes.
    Lanes,
}

/// Bytes of a slot, in rows that lie a stride apart.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SlotRows<'a> {
    pub(crate) slab: &'a Slab,
    pub(crate) slot: u32,
    /// Offset of the first byte in the slot.
    pub(crate) offset: usize,
    /// Bytes of all rows.
    pub(crate) len: usize,
    /// Bytes of a row, and the stride from the start of one row to the start of the next.
    pub(crate) row: (usize, usize),
}

/// Computes checksums of pieces, one after the other, in steps of a bounded number of bytes.
#[derive(Default)]
pub(crate) struct RunningChecksum {
    xxh3: Xxh3,
    lanes: Sum,
    /// Bytes of the present piece that are checksummed: a multiple of a chunk.
    done: usize,
}

impl std::fmt::Debug for RunningChecksum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RunningChecksum").field("done", &self.done).finish_non_exhaustive()
    }
}

impl RunningChecksum {
    /// Adds bytes until the budget is spent, rounded up to a chunk. Returns the checksum after the last
    /// byte; the next call starts a new piece.
    pub(crate) fn advance(
        &mut self,
        kind: Checksum,
        piece: &SlotRows<'_>,
        budget: &mut Budget,
    ) -> Option<u64> {
        let rest = piece.len - self.done;
        let bytes = rest.min(budget.left().min(rest).next_multiple_of(CHUNK_BYTES));
        let mut lane = (self.done / LANE_BYTES) as u64;
        gather(piece, self.done..self.done + bytes, |chunk| match kind {
            Checksum::Xxh3 => self.xxh3.update(chunk),
            Checksum::Lanes => {
                self.lanes.add(lane, chunk);
                lane += (chunk.len() / LANE_BYTES) as u64;
            }
        });
        budget.spend(bytes);
        self.done += bytes;
        (self.done == piece.len).then(|| self.take(kind, piece.len))
    }

    fn take(&mut self, kind: Checksum, len: usize) -> u64 {
        self.done = 0;
        match kind {
            Checksum::Xxh3 => {
                let sum = self.xxh3.digest();
                self.xxh3.reset();
                sum
            }
            Checksum::Lanes => std::mem::take(&mut self.lanes).seal(len as u64),
        }
    }

    /// Discards the progress on the present piece.
    pub(crate) fn reset(&mut self) {
        *self = Self::default();
    }
}

/// Copies a range of a piece chunk by chunk, each full but the last: checksums are faster on long inputs,
/// so small rows share a chunk.
fn gather(piece: &SlotRows<'_>, range: Range<usize>, mut each: impl FnMut(&[u8])) {
    // Rows without gaps are one row.
    let (row_bytes, stride) = if piece.row.0 == piece.row.1 { (piece.len.max(1), 0) } else { piece.row };
    let mut chunk = [0; CHUNK_BYTES];
    let (mut at, mut filled) = (range.start, 0);
    while at < range.end {
        let (row, within) = (at / row_bytes, at % row_bytes);
        let bytes = (CHUNK_BYTES - filled).min(row_bytes - within).min(range.end - at);
        let from = piece.offset + row * stride + within;
        piece.slab.read(piece.slot, from, &mut chunk[filled..filled + bytes]);
        (at, filled) = (at + bytes, filled + bytes);
        if filled == CHUNK_BYTES {
            each(&chunk);
            filled = 0;
        }
    }
    if filled > 0 {
        each(&chunk[..filled]);
    }
}

#[cfg(test)]
mod tests {
    use dataplane_memory::{PageSize, SlabLayout};

    use super::*;

    #[test]
    fn rows_have_the_sum_of_their_bytes_in_order() {
        let layout = SlabLayout { slot_bytes: 100_000, slot_count: 1 };
        let slab = Slab::create("sum", layout, PageSize::Standard).expect("slab");
        let bytes: Vec<u8> = (0..100_000_usize).map(|at| (at * 7 + at / 99) as u8).collect();
        slab.write(0, 0, &bytes);
        for (row, stride, count) in [
            (100, 300, 300),
            (9000, 10_000, 9),
            (64, 64, 1000),
            (8192, 9000, 5),
            (1, 2, 20_000),
            (8191, 8191, 3),
            (8192, 8192, 2),
            (5, 5, 1),
            (77, 100, 0),
        ] {
            let gathered: Vec<u8> =
                (0..count).flat_map(|number| bytes[10 + number * stride..][..row].to_vec()).collect();
            let piece = SlotRows { slab: &slab, slot: 0, offset: 10, len: row * count, row: (row, stride) };
            for budget in [1, CHUNK_BYTES, 3 * CHUNK_BYTES + 1, 1 << 20] {
                let mut pieces = RunningChecksum::default();
                let mut sum = |kind: Checksum| {
                    let steps_max = piece.len / CHUNK_BYTES + 1;
                    let mut steps =
                        (0..steps_max).map(|_| pieces.advance(kind, &piece, &mut Budget::new(budget)));
                    steps.find_map(|sum| sum).expect("a sum after a step for each chunk")
                };
                assert_eq!(sum(Checksum::Xxh3), xxhash_rust::xxh3::xxh3_64(&gathered), "rows of {row}");
                assert_eq!(sum(Checksum::Lanes), dataplane_checksum::checksum(&gathered), "rows of {row}");
                assert_eq!(sum(Checksum::Xxh3), xxhash_rust::xxh3::xxh3_64(&gathered), "a second piece");
            }
        }
    }

    #[test]
    fn a_step_goes_no_further_than_its_budget() {
        let layout = SlabLayout { slot_bytes: 100_000, slot_count: 1 };
        let slab = Slab::create("sum", layout, PageSize::Standard).expect("slab");
        let piece = SlotRows { slab: &slab, slot: 0, offset: 0, len: 100_000, row: (100_000, 100_000) };
        let mut pieces = RunningChecksum::default();
        let mut budget = Budget::new(50_000);
        assert_eq!(pieces.advance(Checksum::Xxh3, &piece, &mut budget), None);
        assert!(budget.is_spent() && pieces.done == 56 << 10, "the chunk that was begun is summed");
        pieces.reset();
        let whole = pieces.advance(Checksum::Xxh3, &piece, &mut Budget::new(100_000));
        assert_eq!(whole, Some(xxhash_rust::xxh3::xxh3_64(&[0; 100_000])));
    }
}
