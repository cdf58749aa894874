//! The checksum sent with a block: `dataplane-checksum` of its bytes, XORed with a word derived from its identity, so that right bytes
//! under a wrong identity fail. Either checksum follows from the other without reading the block.
//!
//! Peers can write to the slab while we read, so bytes are copied into a private buffer first; the copy stays in
//! the L1 cache. A [`Verifier`] does a bounded piece of a block at a time, so that one block of several MiB does
//! not hold up the thread that also answers.

use dataplane_checksum::{LANE_BYTES, Sum};
use dataplane_memory::SlotRef;
use kvstore_block::BlockIdentity;

const CHUNK_BYTES: usize = 8 << 10;

/// The checksum of a block's bytes with its identity in it, from the one without. Its own inverse.
#[must_use]
pub fn with_identity(checksum: u64, identity: &BlockIdentity) -> u64 {
    // A bijection of a word (SplitMix64's finish): identities that differ in these 64 bits give different words.
    let mixed = identity.short().wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    checksum ^ mixed ^ mixed >> 31
}

/// The checksum of the first `bytes` bytes of `slot`, as the block `identity`. Panics when the slot is smaller.
#[must_use]
pub fn checksum(identity: &BlockIdentity, slot: &SlotRef, bytes: usize) -> u64 {
    let (mut verifier, mut budget) = (Verifier::default(), usize::MAX);
    loop {
        if let Some(sum) = verifier.advance(identity, slot, bytes, &mut budget) {
            return sum;
        }
    }
}

/// A checksum in the making, of one block at a time.
#[derive(Default)]
pub(crate) struct Verifier {
    sum: Sum,
    at: usize,
}

impl Verifier {
    /// Forgets the block it was at.
    pub(crate) fn reset(&mut self) {
        *self = Self::default();
    }

    /// Goes on with the block; takes what it reads off the budget. The sum, once the block is done.
    pub(crate) fn advance(
        &mut self,
        identity: &BlockIdentity,
        slot: &SlotRef,
        bytes: usize,
        budget: &mut usize,
    ) -> Option<u64> {
        let mut chunk = [0; CHUNK_BYTES];
        while self.at < bytes && *budget > 0 {
            let len = CHUNK_BYTES.min(bytes - self.at);
            slot.slab().read(slot.slot(), self.at, &mut chunk[..len]);
            self.sum.add((self.at / LANE_BYTES) as u64, &chunk[..len]);
            self.at += len;
            *budget = budget.saturating_sub(len);
        }
        if self.at < bytes {
            return None;
        }
        let sum = self.sum.seal(bytes as u64);
        self.reset();
        Some(with_identity(sum, identity))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool};

    use super::*;

    #[test]
    fn pieces_give_the_sum_of_the_whole_and_the_name_counts() {
        let layout = SlabLayout { slot_bytes: 100_000, slot_count: 1 };
        let pool = SlotPool::new(Arc::new(Slab::create("sum", layout, PageSize::Standard).expect("slab")));
        let slot = pool.acquire().expect("slot");
        let bytes: Vec<u8> = (0..100_000_u32).map(|at| (at * 31 + at / 251) as u8).collect();
        slot.slab().write(slot.slot(), 0, &bytes);
        let (one, other) = (BlockIdentity([1; 16]), BlockIdentity([2; 16]));
        let expected = with_identity(dataplane_checksum::checksum(&bytes), &one);
        assert_eq!(checksum(&one, &slot, 100_000), expected);
        assert_ne!(checksum(&other, &slot, 100_000), expected);
        assert_ne!(checksum(&one, &slot, 99_999), expected);
        assert_eq!(with_identity(expected, &one), dataplane_checksum::checksum(&bytes));
        let (mut verifier, mut steps) = (Verifier::default(), 0);
        let sum = loop {
            steps += 1;
            if let Some(sum) = verifier.advance(&one, &slot, 100_000, &mut 10_000) {
                break sum;
            }
        };
        assert_eq!(sum, expected);
        assert_eq!(steps, 7, "two chunks of 8 KiB a step");
        // A flipped bit is found wherever it is.
        for at in [0, 7, 8191, 8192, 50_001, 99_999] {
            slot.slab().write(slot.slot(), at, &[bytes[at] ^ 0x80]);
            assert_ne!(checksum(&one, &slot, 100_000), expected, "byte {at}");
            slot.slab().write(slot.slot(), at, &bytes[at..=at]);
        }
    }
}
