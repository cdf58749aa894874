//! Blocks in stores that several workers share (`kvasir store`).
//!
//! A store reports the identities of its blocks and not their tokens. An identity ends with the hash that the workers' engines
//! use for the block in their own events, so any worker that has published the hash gives its meaning. A hash that no worker
//! has published yet is unresolved until one does; so is one for which the index has no room.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use router_radix::{EngineHash, Held, Index, IndexWriter, Member, Tier};

use crate::snapshot;

/// Largest number of unresolved hashes; further ones are dropped, and are misses.
const UNRESOLVED_MAX: usize = 1 << 22;
/// Hashes that are looked up at once, while the index's writer is locked.
const HASHES_AT_ONCE: usize = 512;

/// Copies of a remembered block, in a tier that stores do not use, so that it does not mix with blocks that they hold.
const REMEMBERED_COPIES: [u32; 4] = [1, 0, 0, 0];
const REMEMBERED_TIER: Tier = Tier::Device;

/// Blocks that workers with the same stores find there: a member of the index, whose blocks are all in [`Tier::Remote`], except
/// blocks that are remembered before the member is visible to look-ups.
#[derive(Debug)]
pub struct SharedBlocks {
    member: Member,
    /// Number of copies by unresolved hash. Locked after the index's writer.
    unresolved: Mutex<HashMap<EngineHash, u32>>,
}

impl SharedBlocks {
    /// Returns an empty set for this member of the index.
    #[must_use]
    pub fn new(member: Member) -> Self {
        Self { member, unresolved: Mutex::default() }
    }

    /// Member of the index for these blocks.
    #[must_use]
    pub fn member(&self) -> Member {
        self.member
    }

    /// Number of hashes that no worker has published yet.
    #[must_use]
    pub fn unresolved(&self) -> usize {
        self.lock().len()
    }

    /// Loads blocks whose meaning an earlier gateway knew, as if stores held them, until the stores have reported the blocks that
    /// they hold ([`Self::stored`], then [`Self::forget_remembered`]). The member must not be visible to look-ups meanwhile.
    pub fn remember(&self, index: &Index, held: &[Held]) {
        for held in held.chunks(HASHES_AT_ONCE) {
            let one_copy = |held: &Held| Held { copies: REMEMBERED_COPIES, ..*held };
            let held: Vec<Held> = held.iter().map(one_copy).collect();
            snapshot::restore_blocks(self.member, &held, &mut index.write());
        }
    }

    /// Removes the copies that [`Self::remember`] added.
    pub fn forget_remembered(&self, index: &Index, held: &[Held]) {
        for held in held.chunks(HASHES_AT_ONCE) {
            let keys: Vec<EngineHash> = held.iter().map(|held| held.key).collect();
            index.write().removed(self.member, REMEMBERED_TIER, &keys);
        }
    }

    /// Adds one copy of each of these blocks, which a store has gained.
    pub fn stored(&self, index: &Index, workers: &[Member], hashes: &[EngineHash]) {
        for hashes in hashes.chunks(HASHES_AT_ONCE) {
            let mut index = index.write();
            let mut unplaced = hashes.to_vec();
            // Blocks with a copy in another store are known to this member.
            for source in std::iter::once(&self.member).chain(workers) {
                if unplaced.is_empty() {
                    break;
                }
                let hashes = std::mem::take(&mut unplaced);
                index.stored_as(self.member, Tier::Remote, *source, &hashes, &mut unplaced);
            }
            self.keep(&mut self.lock(), unplaced);
        }
    }

    /// Removes one copy of each of these blocks, which a store has lost.
    pub fn removed(&self, index: &Index, hashes: &[EngineHash]) {
        for hashes in hashes.chunks(HASHES_AT_ONCE) {
            let mut index = index.write();
            let mut unresolved = self.lock();
            let is_placed = |hash: &EngineHash| match unresolved.get_mut(hash) {
                None => true,
                Some(1) => {
                    unresolved.remove(hash);
                    false
                }
                Some(copies) => {
                    *copies -= 1;
                    false
                }
            };
            let placed: Vec<EngineHash> = hashes.iter().copied().filter(is_placed).collect();
            index.removed(self.member, Tier::Remote, &placed);
        }
    }

    /// Resolves hashes that a worker has published.
    pub fn resolve(&self, index: &mut IndexWriter<'_>, worker: Member, hashes: &[EngineHash]) {
        let mut unresolved = self.lock();
        if unresolved.is_empty() {
            return;
        }
        for (hash, copies) in
            hashes.iter().filter_map(|hash| unresolved.remove_entry(hash)).collect::<Vec<_>>()
        {
            let mut unplaced = Vec::new();
            for _ in 0..copies {
                index.stored_as(self.member, Tier::Remote, worker, &[hash], &mut unplaced);
            }
            self.keep(&mut unresolved, unplaced);
        }
    }

    /// Looks up unresolved hashes among the blocks of a worker that has joined.
    pub fn joined(&self, index: &Index, worker: Member) {
        let hashes: Vec<EngineHash> = self.lock().keys().copied().collect();
        for hashes in hashes.chunks(HASHES_AT_ONCE) {
            self.resolve(&mut index.write(), worker, hashes);
        }
    }

    fn keep(&self, unresolved: &mut HashMap<EngineHash, u32>, hashes: Vec<EngineHash>) {
        for hash in hashes {
            if unresolved.len() < UNRESOLVED_MAX || unresolved.contains_key(&hash) {
                *unresolved.entry(hash).or_default() += 1;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<EngineHash, u32>> {
        self.unresolved.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use router_radix::IndexConfig;

    struct Rig {
        index: Index,
        workers: [Member; 2],
        shared: SharedBlocks,
    }

    impl Rig {
        fn new() -> Self {
            let index = Index::new(IndexConfig::default());
            let [first, second, shared] = [0; 3].map(|_| index.write().join().expect("room"));
            Self { index, workers: [first, second], shared: SharedBlocks::new(shared) }
        }

        /// The first worker computes a chain of blocks 100, 101, … with the hashes 1, 2, …
        fn compute(&self, blocks: u64) {
            let keys: Vec<u64> = (1..=blocks).collect();
            let hashes: Vec<u64> = keys.iter().map(|key| 99 + key).collect();
            let mut index = self.index.write();
            index.stored(self.workers[0], Tier::Device, None, &keys, &hashes);
            self.shared.resolve(&mut index, self.workers[0], &keys);
        }

        fn store(&self, hashes: &[u64]) {
            self.shared.stored(&self.index, &self.workers, hashes);
        }

        fn remove(&self, hashes: &[u64]) {
            self.shared.removed(&self.index, hashes);
        }

        /// Leading blocks of the chain that the stores hold, and unresolved hashes.
        fn held(&self) -> (u32, usize) {
            let prompt: Vec<u64> = (100..120).collect();
            let mut reader = self.index.reader().expect("a reader");
            (reader.overlaps(&prompt).any(self.shared.member()), self.shared.unresolved())
        }
    }

    #[test]
    fn blocks_outlive_the_worker_that_told_of_them() {
        let rig = Rig::new();
        rig.compute(5);
        rig.store(&[1, 2, 3]);
        assert_eq!(rig.held(), (3, 0));
        rig.index.write().removed(rig.workers[0], Tier::Device, &[1, 2, 3, 4, 5]);
        assert_eq!(rig.held(), (3, 0));
        // A second store holds a block that no worker knows any more.
        rig.store(&[2, 3, 4]);
        assert_eq!(rig.held(), (3, 1), "4 was never stored before it was forgotten");
        rig.remove(&[2]);
        assert_eq!(rig.held(), (3, 1), "one copy of two");
        rig.remove(&[2, 4]);
        assert_eq!(rig.held(), (1, 0));
    }

    #[test]
    fn hashes_are_unresolved_until_a_worker_tells_of_them() {
        let rig = Rig::new();
        rig.store(&[1, 2, 9]);
        rig.store(&[2]);
        assert_eq!(rig.held(), (0, 3));
        rig.remove(&[2]);
        rig.compute(3);
        assert_eq!(rig.held(), (2, 1));
        rig.remove(&[2]);
        assert_eq!(rig.held(), (1, 1), "it had one copy left");
        rig.remove(&[9, 9, 77]);
        assert_eq!(rig.held(), (1, 0));
    }

    #[test]
    fn a_worker_that_joins_may_know_unresolved_hashes() {
        let rig = Rig::new();
        rig.store(&[1, 2, 9]);
        rig.index.write().stored(rig.workers[1], Tier::Host, None, &[1, 2], &[100, 101]);
        assert_eq!(rig.held(), (0, 3));
        rig.shared.joined(&rig.index, rig.workers[1]);
        assert_eq!(rig.held(), (2, 1));
    }
}
