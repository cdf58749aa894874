//! Recently evicted blocks: S3-FIFO's ghost queue as a table of fingerprints, as in the authors' own code.
//!
//! Sets of eight entries, one cache line; an entry is (fingerprint, number of the eviction), and is valid for as
//! many evictions as the queue would be long. A set that is full loses its oldest entry (about 2 % at this
//! load), which costs a block its second chance and nothing else.

use crate::index::hash_halves;

const WAYS: usize = 8;
/// Twice as many places as valid entries.
pub(crate) const BYTES_PER_ENTRY: usize = 16;

#[derive(Debug)]
pub(crate) struct Ghost {
    sets: Box<[[u64; WAYS]]>,
    /// Evictions so far; starts at 1, so that a word of 0 is an empty place.
    now: u32,
    length: u32,
}

impl Ghost {
    pub(crate) fn new(length: u32) -> Self {
        let sets = (length as usize * BYTES_PER_ENTRY).div_ceil(WAYS * size_of::<u64>()).max(1);
        // Written, not only reserved: a page fault per set would come later, under the lock.
        let mut sets = vec![[1; WAYS]; sets].into_boxed_slice();
        sets.fill([0; WAYS]);
        Self { sets, now: 1, length }
    }

    fn locate(&self, identity: [u64; 2]) -> (usize, u64) {
        let hash = hash_halves(identity);
        let set = ((u128::from(hash) * self.sets.len() as u128) >> 64) as usize;
        (set, hash & u64::from(u32::MAX))
    }

    fn age(&self, entry: u64) -> u32 {
        if entry == 0 { u32::MAX } else { self.now.wrapping_sub(entry as u32) }
    }

    pub(crate) fn insert(&mut self, identity: [u64; 2]) {
        let (set, fingerprint) = self.locate(identity);
        let oldest = (0..WAYS).max_by_key(|&way| self.age(self.sets[set][way])).unwrap_or(0);
        self.sets[set][oldest] = fingerprint << 32 | u64::from(self.now);
        self.now = self.now.wrapping_add(1);
    }

    /// Forgets the block; `true` if it was remembered.
    pub(crate) fn take(&mut self, identity: [u64; 2]) -> bool {
        let (set, fingerprint) = self.locate(identity);
        let valid = |&way: &usize| {
            let entry = self.sets[set][way];
            entry >> 32 == fingerprint && self.age(entry) <= self.length
        };
        let found = (0..WAYS).find(valid);
        found.into_iter().for_each(|way| self.sets[set][way] = 0);
        found.is_some()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn the_last_evictions_are_remembered_once() {
        let mut ghost = Ghost::new(1000);
        (0..3000).for_each(|block| ghost.insert([block, 0]));
        let forgotten = (0..1999).filter(|&block| ghost.take([block, 0])).count();
        assert_eq!(forgotten, 0, "older ones are not");
        let remembered = (2000..3000).filter(|&block| ghost.take([block, 0])).count();
        assert!(remembered > 950, "{remembered} of 1000");
        assert!(!ghost.take([2999, 0]), "what came back is forgotten");
    }
}
