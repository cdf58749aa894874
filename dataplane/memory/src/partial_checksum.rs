//! Checksum of a slot, computed in bounded pieces, so that a block of several MiB does not block a thread
//! that also answers requests.

use dataplane_checksum::Sum;

use crate::SlotRef;

/// Bytes that are checksummed between two checks of the budget: whole lanes.
const PIECE_BYTES: usize = 16 << 10;

/// A checksum in progress, of one slot at a time. Another process may write the slot meanwhile: each byte
/// is read once.
#[derive(Debug, Default)]
pub struct PartialChecksum {
    sum: Sum,
    at: usize,
}

impl PartialChecksum {
    /// Continues with the first `bytes` bytes of a slot; subtracts the bytes read from the budget, which it
    /// exceeds by less than 16 KiB. Returns [`dataplane_checksum::checksum`] of them once all were read,
    /// `None` when the budget is used up. One slot at a time: call [`Self::reset`] before another one is
    /// begun. Panics when the slot is smaller.
    pub fn advance(&mut self, slot: &SlotRef, bytes: usize, budget: &mut usize) -> Option<u64> {
        while self.at < bytes {
            if *budget == 0 {
                return None;
            }
            let left = bytes - self.at;
            let piece = left.min(*budget).next_multiple_of(PIECE_BYTES).min(left);
            slot.slab().add_to_sum(slot.slot(), self.at, piece, &mut self.sum);
            self.at += piece;
            *budget = budget.saturating_sub(piece);
        }
        self.at = 0;
        Some(std::mem::take(&mut self.sum).seal(bytes as u64))
    }

    /// Discards the progress on the present slot.
    pub fn reset(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{PageSize, Slab, SlabLayout, SlotPool};

    #[test]
    fn pieces_give_the_checksum_of_the_whole() {
        let layout = SlabLayout { slot_bytes: 256 << 10, slot_count: 1 };
        let pool = SlotPool::new(Arc::new(Slab::create("sum", layout, PageSize::Standard).expect("slab")));
        let slot = pool.acquire().expect("a slot");
        let bytes: Vec<u8> = (0..256_u32 << 10).map(|at| (at * 31 + at / 253) as u8).collect();
        slot.slab().write(slot.slot(), 0, &bytes);
        let mut checksum = PartialChecksum::default();
        for len in [0, 1, 240, 241, 4096, PIECE_BYTES, PIECE_BYTES + 1, 100_000, 256 << 10] {
            let mut turns = 0;
            let sum = loop {
                turns += 1;
                let mut budget = 2 * PIECE_BYTES - 5;
                if let Some(sum) = checksum.advance(&slot, len, &mut budget) {
                    break sum;
                }
            };
            assert_eq!(sum, dataplane_checksum::checksum(&bytes[..len]), "{len} bytes");
            assert_eq!(turns, len.div_ceil(2 * PIECE_BYTES).max(1), "{len} bytes");
        }
        assert_eq!(checksum.advance(&slot, 100_000, &mut 1), None);
        checksum.reset();
        assert_eq!(checksum.advance(&slot, 9, &mut 9), Some(dataplane_checksum::checksum(&bytes[..9])));
    }
}
