//! Blocks in stores that several workers share (`kvasir store`).
//!
//! A store tells the names of its blocks and not their tokens. The names are those by which the workers' engines call the blocks in
//! their own events, so what a name stands for is known from any worker that has told of it. A name that none has told of waits
//! until one does.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use router_radix::{EngineHash, IndexWriter, Member, Tier};

/// What workers with the same stores find there: a member of the index, whose blocks are all in [`Tier::Remote`].
#[derive(Debug)]
pub struct SharedBlocks {
    member: Member,
    /// Copies of blocks that no worker has told of yet. Locked with the index's writer, after it.
    waiting: Mutex<HashMap<EngineHash, u32>>,
}

impl SharedBlocks {
    /// Nothing yet, under a place in the index of their own.
    #[must_use]
    pub fn new(member: Member) -> Self {
        Self { member, waiting: Mutex::default() }
    }

    /// Their place in the index.
    #[must_use]
    pub fn member(&self) -> Member {
        self.member
    }

    /// Names that no worker has told of yet.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.lock().len()
    }

    /// A store holds one copy more of each of these.
    pub fn stored(&self, index: &mut IndexWriter<'_>, workers: &[Member], names: &[EngineHash]) {
        let mut unknown = names.to_vec();
        // Names with a copy in another store are known here.
        for from in std::iter::once(&self.member).chain(workers) {
            if unknown.is_empty() {
                return;
            }
            let asked = std::mem::take(&mut unknown);
            index.stored_as(self.member, Tier::Remote, *from, &asked, &mut unknown);
        }
        let mut waiting = self.lock();
        unknown.into_iter().for_each(|name| *waiting.entry(name).or_default() += 1);
    }

    /// A store holds one copy less of each of these.
    pub fn removed(&self, index: &mut IndexWriter<'_>, names: &[EngineHash]) {
        let mut waiting = self.lock();
        let is_placed = |name: &EngineHash| match waiting.get_mut(name) {
            None => true,
            Some(1) => {
                waiting.remove(name);
                false
            }
            Some(copies) => {
                *copies -= 1;
                false
            }
        };
        let placed: Vec<EngineHash> = names.iter().copied().filter(is_placed).collect();
        index.removed(self.member, Tier::Remote, &placed);
    }

    /// A worker has told what these names stand for.
    pub fn described(&self, index: &mut IndexWriter<'_>, worker: Member, names: &[EngineHash]) {
        let mut waiting = self.lock();
        if waiting.is_empty() {
            return;
        }
        let told = names.iter().filter_map(|name| waiting.remove_entry(name)).collect();
        self.place(index, worker, told, &mut waiting);
    }

    /// A worker that shares the stores has joined: it may know names that wait.
    pub fn joined(&self, index: &mut IndexWriter<'_>, worker: Member) {
        let mut waiting = self.lock();
        let all = waiting.drain().collect();
        self.place(index, worker, all, &mut waiting);
    }

    fn place(
        &self,
        index: &mut IndexWriter<'_>,
        worker: Member,
        names: Vec<(EngineHash, u32)>,
        waiting: &mut HashMap<EngineHash, u32>,
    ) {
        let mut unknown = Vec::new();
        for (name, copies) in names {
            for _ in 0..copies {
                index.stored_as(self.member, Tier::Remote, worker, &[name], &mut unknown);
            }
        }
        unknown.into_iter().for_each(|name| *waiting.entry(name).or_default() += 1);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<EngineHash, u32>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use router_radix::{Index, IndexConfig};

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

        /// The first worker computes a chain of blocks 100, 101, … under names 1, 2, …
        fn compute(&self, blocks: u64) {
            let keys: Vec<u64> = (1..=blocks).collect();
            let hashes: Vec<u64> = keys.iter().map(|key| 99 + key).collect();
            let mut index = self.index.write();
            index.stored(self.workers[0], Tier::Device, None, &keys, &hashes);
            self.shared.described(&mut index, self.workers[0], &keys);
        }

        fn store(&self, names: &[u64]) {
            self.shared.stored(&mut self.index.write(), &self.workers, names);
        }

        fn remove(&self, names: &[u64]) {
            self.shared.removed(&mut self.index.write(), names);
        }

        /// Leading blocks of the chain that the stores hold, and names that wait.
        fn held(&self) -> (u32, usize) {
            let prompt: Vec<u64> = (100..120).collect();
            let mut reader = self.index.reader().expect("a reader");
            (reader.overlaps(&prompt).any(self.shared.member()), self.shared.waiting())
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
        // A second store has what nobody but the first one knows any more.
        rig.store(&[2, 3, 4]);
        assert_eq!(rig.held(), (3, 1), "4 was never stored before it was forgotten");
        rig.remove(&[2]);
        assert_eq!(rig.held(), (3, 1), "one copy of two");
        rig.remove(&[2, 4]);
        assert_eq!(rig.held(), (1, 0));
    }

    #[test]
    fn names_wait_for_a_worker_that_tells_of_them() {
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
    fn a_worker_that_joins_may_know_names_that_wait() {
        let rig = Rig::new();
        rig.store(&[1, 2, 9]);
        rig.index.write().stored(rig.workers[1], Tier::Host, None, &[1, 2], &[100, 101]);
        assert_eq!(rig.held(), (0, 3));
        rig.shared.joined(&mut rig.index.write(), rig.workers[1]);
        assert_eq!(rig.held(), (2, 1));
    }
}
