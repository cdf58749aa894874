//! xxh3-64 of a block's bytes, seeded with the low 64 bits of its identity: the right bytes under the wrong name are
//! as wrong as wrong bytes.
//!
//! Peers can write to the slab while we read, so bytes are copied into a private buffer first; the copy stays in
//! the L1 cache. A [`Verifier`] does a bounded piece of a block at a time, so that one block of several MiB does
//! not hold up the thread that also answers.

use dataplane_memory::SlotRef;
use kvstore_block::BlockIdentity;
use xxhash_rust::xxh3::Xxh3;

const CHUNK_BYTES: usize = 8 << 10;

/// The checksum of the first `bytes` bytes of `slot`, as the block `identity`. Panics when the slot is smaller.
#[must_use]
pub fn checksum(identity: &BlockIdentity, slot: &SlotRef, bytes: usize) -> u64 {
    let mut verifier = Verifier::default();
    let mut budget = usize::MAX;
    loop {
        if let Some(sum) = verifier.advance(identity, slot, bytes, &mut budget) {
            return sum;
        }
    }
}

/// The checksum of a block whose bytes are handed over in pieces, in their order.
pub struct BlockHasher(Xxh3);

impl BlockHasher {
    /// The checksum of a block of which nothing was handed over yet.
    #[must_use]
    pub fn new(identity: &BlockIdentity) -> Self {
        Self(Xxh3::with_seed(identity.short()))
    }

    /// Adds the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The checksum of what was handed over.
    #[must_use]
    pub fn finish(&self) -> u64 {
        self.0.digest()
    }
}

/// A checksum in the making, of one block at a time.
#[derive(Default)]
pub(crate) struct Verifier {
    hasher: Option<BlockHasher>,
    at: usize,
}

impl Verifier {
    /// Forgets the block it was at.
    pub(crate) fn reset(&mut self) {
        self.hasher = None;
    }

    /// Goes on with the block; takes what it reads off the budget. The sum, once the block is done.
    pub(crate) fn advance(
        &mut self,
        identity: &BlockIdentity,
        slot: &SlotRef,
        bytes: usize,
        budget: &mut usize,
    ) -> Option<u64> {
        if self.hasher.is_none() {
            self.at = 0;
        }
        let hasher = self.hasher.get_or_insert_with(|| BlockHasher::new(identity));
        let mut chunk = [0; CHUNK_BYTES];
        while self.at < bytes && *budget > 0 {
            let len = CHUNK_BYTES.min(bytes - self.at);
            slot.slab().read(slot.slot(), self.at, &mut chunk[..len]);
            hasher.update(&chunk[..len]);
            self.at += len;
            *budget = budget.saturating_sub(len);
        }
        if self.at < bytes {
            return None;
        }
        let sum = hasher.finish();
        self.hasher = None;
        Some(sum)
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
        let expected = xxhash_rust::xxh3::xxh3_64_with_seed(&bytes, one.short());
        assert_eq!(checksum(&one, &slot, 100_000), expected);
        assert_ne!(checksum(&other, &slot, 100_000), expected);
        assert_ne!(checksum(&one, &slot, 99_999), expected);
        let (mut verifier, mut steps) = (Verifier::default(), 0);
        let sum = loop {
            steps += 1;
            if let Some(sum) = verifier.advance(&one, &slot, 100_000, &mut 10_000) {
                break sum;
            }
        };
        assert_eq!(sum, expected);
        assert_eq!(steps, 7, "two chunks of 8 KiB a step");
    }
}
