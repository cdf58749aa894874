//! From identity to (tier, slot), for all tiers at once, read and changed without a lock.
//!
//! Open addressing in buckets of one cache line: seven entries and a count of the entries that found the bucket
//! full and went on to a later one (as in Folly's F14 tables). An entry is one word (30 bits of tag, tier, slot)
//! and never moves. Hence the theorem: an entry that is there during the whole of a look-up is found by it,
//! because its own word and its own share in the counts on its way stay; a look-up ends at the first bucket whose
//! count is 0. There are no tombstones and nothing is ever rehashed.
//!
//! The index is a hint: whether the slot really holds the block is decided by its record.
//!
//! Hot path: one line per look-up at the load that `new` sizes for (at most 5 entries in 7 places).

use std::ops::ControlFlow;

use kvstore_block::BlockIdentity;

use crate::record::halves;
use crate::sync::{AtomicU64, Ordering};

const ENTRIES: usize = 7;
const ENTRIES_PLANNED: usize = 5;
const TAG_SHIFT: u32 = 34;
const TIER_SHIFT: u32 = 32;

/// Spreads an identity over 64 bits. Identities of the product are uniform already (keyed BLAKE3); folding a
/// product of 128 bits costs a nanosecond and makes the structures safe for those that are not.
pub(crate) fn hash(identity: &BlockIdentity) -> u64 {
    hash_halves(halves(identity))
}

pub(crate) fn hash_halves([low, high]: [u64; 2]) -> u64 {
    let product = u128::from(low ^ 0x9E37_79B9_7F4A_7C15) * u128::from(high ^ 0xD1B5_4A32_D192_ED03);
    (product as u64) ^ ((product >> 64) as u64)
}

#[derive(Debug)]
#[repr(align(64))]
struct Bucket {
    /// Entries that found no place here.
    passed: AtomicU64,
    entries: [AtomicU64; ENTRIES],
}

impl Default for Bucket {
    fn default() -> Self {
        Self { passed: AtomicU64::new(0), entries: std::array::from_fn(|_| AtomicU64::new(0)) }
    }
}

/// The map.
#[derive(Debug)]
pub struct Index {
    buckets: Box<[Bucket]>,
}

impl Index {
    /// A map for `entries_max` entries.
    #[must_use]
    pub fn new(entries_max: u64) -> Self {
        let buckets = entries_max / ENTRIES_PLANNED as u64 + 1;
        Self { buckets: (0..buckets).map(|_| Bucket::default()).collect() }
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        size_of_val(&*self.buckets)
    }

    fn home(&self, hash: u64) -> usize {
        ((u128::from(hash) * self.buckets.len() as u128) >> 64) as usize
    }

    fn after(&self, at: usize) -> usize {
        if at + 1 == self.buckets.len() { 0 } else { at + 1 }
    }

    /// The multiplication of `home` uses the hash's high bits, so the tag takes the low ones. Its top bit is
    /// always set: a word of 0 is an empty place.
    fn tag(hash: u64) -> u64 {
        (hash << TAG_SHIFT | 1 << 63) >> TAG_SHIFT
    }

    fn word(hash: u64, tier: u8, slot: u32) -> u64 {
        Self::tag(hash) << TAG_SHIFT | u64::from(tier) << TIER_SHIFT | u64::from(slot)
    }

    /// Loads the home's line, to have it when `visit` comes: a batch of these overlaps its cache misses.
    pub(crate) fn warm(&self, hash: u64) {
        self.buckets[self.home(hash)].passed.load(Ordering::Relaxed);
    }

    /// Shows every (tier, slot) that may hold the block until `visit` breaks.
    pub fn visit<T>(&self, hash: u64, mut visit: impl FnMut(u8, u32) -> ControlFlow<T>) -> Option<T> {
        let tag = Self::tag(hash);
        let mut at = self.home(hash);
        for _ in 0..self.buckets.len() {
            let bucket = &self.buckets[at];
            for entry in &bucket.entries {
                // Acquire pairs with the Release of `insert`: the record behind the entry is published.
                let word = entry.load(Ordering::Acquire);
                if word >> TAG_SHIFT == tag
                    && let ControlFlow::Break(result) = visit((word >> TIER_SHIFT) as u8 & 0b11, word as u32)
                {
                    return Some(result);
                }
            }
            // Relaxed: for an entry whose insertion happened before this look-up, its count did so too.
            if bucket.passed.load(Ordering::Relaxed) == 0 {
                return None;
            }
            at = self.after(at);
        }
        None
    }

    /// Adds an entry. `false`: there are more than `entries_max`.
    #[must_use]
    pub fn insert(&self, hash: u64, tier: u8, slot: u32) -> bool {
        let word = Self::word(hash, tier, slot);
        let mut at = self.home(hash);
        for _ in 0..self.buckets.len() {
            let bucket = &self.buckets[at];
            for entry in &bucket.entries {
                // Release pairs with the Acquire of `visit`.
                if entry.load(Ordering::Relaxed) == 0
                    && entry.compare_exchange(0, word, Ordering::Release, Ordering::Relaxed).is_ok()
                {
                    return true;
                }
            }
            bucket.passed.fetch_add(1, Ordering::Relaxed);
            at = self.after(at);
        }
        self.buckets.iter().for_each(|bucket| {
            bucket.passed.fetch_sub(1, Ordering::Relaxed);
        });
        false
    }

    /// Takes an entry out. `false`: it was not there.
    pub fn remove(&self, hash: u64, tier: u8, slot: u32) -> bool {
        let word = Self::word(hash, tier, slot);
        let home = self.home(hash);
        let mut at = home;
        for _ in 0..self.buckets.len() {
            let bucket = &self.buckets[at];
            if let Some(entry) = bucket.entries.iter().find(|entry| entry.load(Ordering::Relaxed) == word) {
                entry.store(0, Ordering::Relaxed);
                let mut passed = home;
                while passed != at {
                    self.buckets[passed].passed.fetch_sub(1, Ordering::Relaxed);
                    passed = self.after(passed);
                }
                return true;
            }
            at = self.after(at);
        }
        false
    }

    #[cfg(all(test, not(loom)))]
    fn passed(&self) -> u64 {
        self.buckets.iter().map(|bucket| bucket.passed.load(Ordering::Relaxed)).sum()
    }

    pub(crate) fn entry_count(&self) -> usize {
        let places = self.buckets.iter().flat_map(|bucket| &bucket.entries);
        places.filter(|entry| entry.load(Ordering::Relaxed) != 0).count()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// Full to the last place, in few homes: overflow is the rule here, and counts go back to nothing.
    #[test]
    fn entries_are_found_wherever_they_had_to_go() {
        let index = Index::new(40);
        let mut there: HashSet<(u64, u32)> = HashSet::new();
        let mut random = 7_u64;
        for step in 0..200_000_u32 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // Three homes only.
            let hash = (((random >> 33) % 3) << 61) | ((random >> 40) % 16);
            // A slot has one entry at a time: its number tells the hash.
            let slot = ((hash >> 61) * 128 + hash % 16 * 8 + (random >> 50) % 8) as u32;
            if there.remove(&(hash, slot)) {
                assert!(index.remove(hash, 1, slot), "step {step}");
            } else if there.len() < 9 * ENTRIES {
                assert!(index.insert(hash, 1, slot), "step {step}");
                there.insert((hash, slot));
            } else {
                assert!(!index.insert(hash, 1, slot), "step {step}: full");
            }
            let mut seen = HashSet::new();
            index.visit::<()>(hash, |tier, slot| {
                assert_eq!(tier, 1);
                seen.insert(slot);
                ControlFlow::Continue(())
            });
            // Further entries with the same tag may be seen as well: the record decides.
            let mut expected = there.iter().filter(|entry| entry.0 == hash);
            assert!(expected.all(|entry| seen.contains(&entry.1)), "step {step}");
            assert!(seen.iter().all(|slot| there.iter().any(|entry| entry.1 == *slot)), "step {step}");
        }
        there.iter().for_each(|&(hash, slot)| assert!(index.remove(hash, 1, slot)));
        assert_eq!((index.entry_count(), index.passed()), (0, 0));
    }
}
