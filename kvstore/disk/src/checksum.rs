//! The checksum of a payload that was read: `dataplane-checksum`, as whoever made the block took it.
//!
//! Slots are shared memory, so bytes are copied out through a small buffer first, in pieces that stay in the first-level cache.
//! Nothing allocates.

use dataplane_checksum::{LANE_BYTES, Sum};
use dataplane_memory::SlotRef;

/// Whole lanes that are copied and summed at a time.
pub(crate) const SCRATCH_BYTES: usize = 16 << 10;

/// A checksum that is computed piece by piece.
#[derive(Default)]
pub(crate) struct Checksum {
    sum: Sum,
    at: usize,
}

impl Checksum {
    /// Sums at most about `budget` further bytes of a payload of `bytes`; the checksum when that was the rest.
    /// Takes what it used off the budget.
    pub(crate) fn advance(
        &mut self,
        slot: &SlotRef,
        bytes: usize,
        budget: &mut usize,
        scratch: &mut [u8; SCRATCH_BYTES],
    ) -> Option<u64> {
        while self.at < bytes {
            if *budget == 0 {
                return None;
            }
            let piece = &mut scratch[..(bytes - self.at).min(SCRATCH_BYTES)];
            slot.slab().read(slot.slot(), self.at, piece);
            self.sum.add((self.at / LANE_BYTES) as u64, piece);
            self.at += piece.len();
            *budget = budget.saturating_sub(piece.len());
        }
        Some(self.sum.seal(bytes as u64))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool};

    use super::*;

    #[test]
    fn pieces_give_the_checksum_of_the_whole() {
        let layout = SlabLayout { slot_bytes: 256 << 10, slot_count: 1 };
        let pool = SlotPool::new(Arc::new(Slab::create("sum", layout, PageSize::Standard).expect("slab")));
        let slot = pool.acquire().expect("a slot");
        let bytes: Vec<u8> = (0..256_u32 << 10).map(|at| (at * 31 + at / 253) as u8).collect();
        slot.slab().write(slot.slot(), 0, &bytes);
        let mut scratch = [0; SCRATCH_BYTES];
        for len in [1, 240, 241, 4096, SCRATCH_BYTES, SCRATCH_BYTES + 1, 100_000, 256 << 10] {
            let mut checksum = Checksum::default();
            let mut turns = 0;
            let sum = loop {
                turns += 1;
                let mut budget = 32 << 10;
                if let Some(sum) = checksum.advance(&slot, len, &mut budget, &mut scratch) {
                    break sum;
                }
            };
            assert_eq!(sum, dataplane_checksum::checksum(&bytes[..len]), "{len} bytes");
            assert_eq!(turns, len.div_ceil(32 << 10).max(1), "{len} bytes");
        }
    }
}
