//! The checksum of a payload: xxh3-64, seeded with everything that says whose payload it is and where it lies.
//!
//! A payload that was written elsewhere, earlier, for another block or before the store was formatted has another
//! seed, so it does not verify even where its bytes are those of a good block.
//!
//! Slots are shared memory, so bytes are copied out through a small buffer first; up to [`SCRATCH_BYTES`] in one
//! piece, longer ones in pieces that stay in the first-level cache. Nothing allocates.

use dataplane_memory::SlotRef;
use kvstore_block::BlockIdentity;
use xxhash_rust::xxh3::{Xxh3, xxh3_64, xxh3_64_with_seed};

/// The longest payload that is hashed in one call.
pub(crate) const SCRATCH_BYTES: usize = 16 << 10;

/// The seed of one payload; `slot` is the number of its place (`Tables::place`).
pub(crate) fn seed(store_id: u64, identity: BlockIdentity, generation: u64, slot: u32) -> u64 {
    let mut words = [0; 36];
    words[..16].copy_from_slice(&identity.0);
    words[16..24].copy_from_slice(&generation.to_le_bytes());
    words[24..32].copy_from_slice(&store_id.to_le_bytes());
    words[32..].copy_from_slice(&slot.to_le_bytes());
    xxh3_64(&words)
}

/// A checksum that is computed piece by piece.
pub(crate) struct Checksum {
    state: Xxh3,
    seed: u64,
    at: usize,
}

impl Checksum {
    pub(crate) fn new() -> Self {
        Self { state: Xxh3::new(), seed: 0, at: 0 }
    }

    /// Starts over.
    pub(crate) fn restart(&mut self, seed: u64) {
        (self.seed, self.at) = (seed, 0);
    }

    /// Hashes at most about `budget` further bytes of a payload of `bytes`; the checksum when that was the rest.
    /// Takes what it used off the budget.
    pub(crate) fn advance(
        &mut self,
        slot: &SlotRef,
        bytes: usize,
        budget: &mut usize,
        scratch: &mut [u8; SCRATCH_BYTES],
    ) -> Option<u64> {
        if bytes <= SCRATCH_BYTES {
            slot.slab().read(slot.slot(), 0, &mut scratch[..bytes]);
            *budget = budget.saturating_sub(bytes);
            return Some(xxh3_64_with_seed(&scratch[..bytes], self.seed));
        }
        if self.at == 0 {
            self.state = Xxh3::with_seed(self.seed);
        }
        while self.at < bytes {
            if *budget == 0 {
                return None;
            }
            let piece = &mut scratch[..(bytes - self.at).min(SCRATCH_BYTES)];
            slot.slab().read(slot.slot(), self.at, piece);
            self.state.update(piece);
            self.at += piece.len();
            *budget = budget.saturating_sub(piece.len());
        }
        Some(self.state.digest())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool};

    use super::*;

    #[test]
    fn pieces_and_whole_agree_with_the_reference() {
        let layout = SlabLayout { slot_bytes: 256 << 10, slot_count: 1 };
        let pool = SlotPool::new(Arc::new(Slab::create("sum", layout, PageSize::Standard).expect("slab")));
        let slot = pool.acquire().expect("a slot");
        let bytes: Vec<u8> = (0..256_u32 << 10).map(|at| (at * 31 + at / 253) as u8).collect();
        slot.slab().write(slot.slot(), 0, &bytes);
        let mut scratch = [0; SCRATCH_BYTES];
        for len in [1, 240, 241, 4096, SCRATCH_BYTES, SCRATCH_BYTES + 1, 100_000, 256 << 10] {
            let mut checksum = Checksum::new();
            checksum.restart(77);
            let mut turns = 0;
            let sum = loop {
                turns += 1;
                let mut budget = 32 << 10;
                if let Some(sum) = checksum.advance(&slot, len, &mut budget, &mut scratch) {
                    break sum;
                }
            };
            assert_eq!(sum, xxh3_64_with_seed(&bytes[..len], 77), "{len} bytes");
            assert_eq!(turns, len.div_ceil(32 << 10).max(1), "{len} bytes");
        }
    }

    #[test]
    fn each_part_of_the_seed_counts() {
        let base = seed(1, BlockIdentity([2; 16]), 3, 4);
        assert_ne!(base, seed(9, BlockIdentity([2; 16]), 3, 4));
        assert_ne!(base, seed(1, BlockIdentity([9; 16]), 3, 4));
        assert_ne!(base, seed(1, BlockIdentity([2; 16]), 9, 4));
        assert_ne!(base, seed(1, BlockIdentity([2; 16]), 3, 9));
    }

    /// Prints what a checksum costs beside a copy of the same bytes, in turn in one run.
    #[test]
    #[ignore = "a measurement, for a release build"]
    fn cost_beside_a_copy() {
        use std::time::{Duration, Instant};
        let layout = SlabLayout { slot_bytes: 5 << 20, slot_count: 8 };
        let pool = SlotPool::new(Arc::new(Slab::create("sum", layout, PageSize::Standard).expect("slab")));
        let slots: Vec<SlotRef> = std::iter::from_fn(|| pool.acquire()).collect();
        slots.iter().for_each(|slot| slot.slab().write(slot.slot(), 0, &vec![7; 5 << 20]));
        let (mut scratch, mut target) = ([0; SCRATCH_BYTES], vec![0; 5 << 20]);
        for bytes in [4 << 10, 128 << 10, 1 << 20, 5 << 20] {
            let turns = (256 << 20) / bytes;
            let mut ratios = Vec::new();
            let mut rate = 0.0;
            for _ in 0..7 {
                let timed = |act: &mut dyn FnMut(&SlotRef)| {
                    let started = Instant::now();
                    (0..turns).for_each(|turn| act(&slots[turn % slots.len()]));
                    started.elapsed()
                };
                let copy = timed(&mut |slot| slot.slab().read(slot.slot(), 0, &mut target[..bytes]));
                let mut checksum = Checksum::new();
                let sum: Duration = timed(&mut |slot| {
                    checksum.restart(1);
                    let mut budget = usize::MAX;
                    let sum = checksum.advance(slot, bytes, &mut budget, &mut scratch);
                    assert!(sum.is_some());
                });
                ratios.push(sum.as_secs_f64() / copy.as_secs_f64());
                rate = (turns * bytes) as f64 / sum.as_secs_f64() / 1e9;
            }
            ratios.sort_by(f64::total_cmp);
            println!(
                "{} KiB: checksum / copy = {:.2} (median of 7), last {rate:.1} GB/s",
                bytes >> 10,
                ratios[3]
            );
        }
    }
}
