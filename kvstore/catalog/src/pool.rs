//! Map from blocks to slots for a single thread.
//!
//! A [`PoolCatalog`] maps block identities to slots of one tier and keeps them in least-recently-used order.
//! It holds one [`SlotRef`] per entry; every user of a block holds another. A block that only the catalog
//! refers to can be evicted, any other cannot: "in use" is read off the reference count and never stored
//! twice.
//!
//! Invariants: an identity maps to at most one slot; an entry's bytes are complete (the caller registers a
//! block only when they are); entries never outnumber the pool's slots. One thread owns a catalog. Match,
//! register and evict are O(1) amortised per block; eviction skips blocks in use, each at most once a call.
//!
//! The order is an index-linked list over a slab of entries, not a heap or a `BTreeMap` of stamps: touching a
//! prefix of 100 blocks must not cost 100 × log n.

use std::collections::HashMap;
use std::collections::hash_map::Entry as MapEntry;
use std::hash::{BuildHasherDefault, Hasher};

use dataplane_memory::SlotRef;
use kvstore_block::BlockIdentity;

/// Identities are uniformly distributed already; hashing them again would be waste.
#[derive(Debug, Default, Clone, Copy)]
pub struct IdentityHasher(u64);

impl Hasher for IdentityHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.0 = self.0.rotate_left(5) ^ u64::from_le_bytes(word);
        }
    }
}

type IdentityMap = HashMap<BlockIdentity, u32, BuildHasherDefault<IdentityHasher>>;

const NONE: u32 = u32::MAX;

#[derive(Debug)]
struct Entry {
    identity: BlockIdentity,
    /// `None` only while the entry is on the free list.
    slot: Option<SlotRef>,
    older: u32,
    newer: u32,
}

/// Result of [`PoolCatalog::register`].
#[derive(Debug)]
pub enum PoolRegistered {
    /// The block is new here.
    New,
    /// The block was here already, in this slot; the caller's copy is not needed.
    Present(SlotRef),
}

/// Blocks of one tier.
#[derive(Debug, Default)]
pub struct PoolCatalog {
    by_identity: IdentityMap,
    entries: Vec<Entry>,
    free: Vec<u32>,
    oldest: Option<u32>,
    newest: Option<u32>,
}

impl PoolCatalog {
    /// An empty catalog with room for `capacity` blocks before it grows.
    #[must_use]
    pub fn with_capacity(capacity: usize) -> Self {
        Self {
            by_identity: IdentityMap::with_capacity_and_hasher(capacity, BuildHasherDefault::default()),
            entries: Vec::with_capacity(capacity),
            free: Vec::new(),
            oldest: None,
            newest: None,
        }
    }

    /// Number of blocks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.by_identity.len()
    }

    /// Whether the catalog has no blocks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_identity.is_empty()
    }

    /// Whether the block is here; does not count as use.
    #[must_use]
    pub fn contains(&self, identity: &BlockIdentity) -> bool {
        self.by_identity.contains_key(identity)
    }

    /// The block's slot, which becomes the most recently used.
    pub fn get(&mut self, identity: &BlockIdentity) -> Option<SlotRef> {
        let index = *self.by_identity.get(identity)?;
        self.unlink(index);
        self.link_newest(index);
        self.entries[index as usize].slot.clone()
    }

    /// Slots of the longest prefix of `chain` that is here, appended to `slots`; returns its length. The
    /// prefix becomes the most recently used, its root last of all: leaves are evicted before their parents.
    pub fn match_prefix(&mut self, chain: &[BlockIdentity], slots: &mut Vec<SlotRef>) -> usize {
        let found = chain.iter().take_while(|identity| self.contains(identity)).count();
        self.touch(&chain[..found]);
        let slot = |identity| self.by_identity.get(identity).map(|&index| &self.entries[index as usize]);
        slots.extend(chain[..found].iter().filter_map(|identity| slot(identity)?.slot.clone()));
        found
    }

    /// Makes the blocks of a chain the most recently used, its root last of all.
    pub fn touch(&mut self, chain: &[BlockIdentity]) {
        for identity in chain.iter().rev() {
            if let Some(&index) = self.by_identity.get(identity) {
                self.unlink(index);
                self.link_newest(index);
            }
        }
    }

    /// Adds a complete block as the most recently used.
    pub fn register(&mut self, identity: BlockIdentity, slot: SlotRef) -> PoolRegistered {
        let index = match self.by_identity.entry(identity) {
            MapEntry::Occupied(occupied) => {
                let present = self.entries[*occupied.get() as usize].slot.clone();
                return present.map_or(PoolRegistered::New, PoolRegistered::Present);
            }
            MapEntry::Vacant(vacant) => {
                let entry = Entry { identity, slot: Some(slot), older: NONE, newer: NONE };
                let index = match self.free.pop() {
                    Some(index) => {
                        self.entries[index as usize] = entry;
                        index
                    }
                    None => {
                        self.entries.push(entry);
                        (self.entries.len() - 1) as u32
                    }
                };
                *vacant.insert(index)
            }
        };
        self.link_newest(index);
        PoolRegistered::New
    }

    /// Removes the least recently used block that only this catalog refers to.
    pub fn evict(&mut self) -> Option<(BlockIdentity, SlotRef)> {
        let mut index = self.oldest?;
        loop {
            let entry = &self.entries[index as usize];
            if entry.slot.as_ref().is_some_and(|slot| slot.reference_count() == 1) {
                let identity = entry.identity;
                return self.remove(&identity).map(|slot| (identity, slot));
            }
            index = match entry.newer {
                NONE => return None,
                newer => newer,
            };
        }
    }

    /// Number of blocks that could be evicted now; counts no further than `enough`.
    #[must_use]
    pub fn evictable(&self, enough: usize) -> usize {
        let mut count = 0;
        let mut next = self.oldest;
        while let Some(index) = next.filter(|_| count < enough) {
            let entry = &self.entries[index as usize];
            count += usize::from(entry.slot.as_ref().is_some_and(|slot| slot.reference_count() == 1));
            next = (entry.newer != NONE).then_some(entry.newer);
        }
        count
    }

    /// Takes out one block.
    pub fn remove(&mut self, identity: &BlockIdentity) -> Option<SlotRef> {
        let index = self.by_identity.remove(identity)?;
        self.unlink(index);
        self.free.push(index);
        self.entries[index as usize].slot.take()
    }

    /// Takes out everything.
    pub fn clear(&mut self) -> usize {
        let count = self.len();
        *self = Self::with_capacity(count);
        count
    }

    fn unlink(&mut self, index: u32) {
        let (older, newer) = (self.entries[index as usize].older, self.entries[index as usize].newer);
        match older {
            NONE => self.oldest = (newer != NONE).then_some(newer),
            older => self.entries[older as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = (older != NONE).then_some(older),
            newer => self.entries[newer as usize].older = older,
        }
    }

    fn link_newest(&mut self, index: u32) {
        let newest = self.newest.replace(index);
        let entry = &mut self.entries[index as usize];
        entry.newer = NONE;
        entry.older = newest.unwrap_or(NONE);
        match newest {
            Some(newest) => self.entries[newest as usize].newer = index,
            None => self.oldest = Some(index),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool};

    use super::*;

    fn identity(number: u64) -> BlockIdentity {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        BlockIdentity(bytes)
    }

    fn pool(slot_count: u32) -> Arc<SlotPool> {
        let layout = SlabLayout { slot_bytes: 64, slot_count };
        SlotPool::new(Arc::new(Slab::create("catalog", layout, PageSize::Standard).expect("slab")))
    }

    /// Model test against a plain list in use order.
    #[test]
    fn random_operations_agree_with_a_list() {
        let pool = pool(64);
        let mut catalog = PoolCatalog::with_capacity(8);
        let mut model: Vec<u64> = Vec::new();
        let mut in_use: Vec<(u64, SlotRef)> = Vec::new();
        let mut random = fastrand::Rng::with_seed(1);
        let mut draw = |bound: u64| random.u64(..bound);
        for step in 0..50_000 {
            let number = draw(48);
            match draw(6) {
                0 | 1 => {
                    let Some(slot) = pool.acquire() else { continue };
                    match catalog.register(identity(number), slot) {
                        PoolRegistered::New => {
                            assert!(!model.contains(&number));
                            model.push(number);
                        }
                        PoolRegistered::Present(_) => assert!(model.contains(&number)),
                    }
                }
                2 | 3 => {
                    let found = catalog.get(&identity(number));
                    assert_eq!(found.is_some(), model.contains(&number), "step {step}");
                    if let Some(slot) = found {
                        model.retain(|&other| other != number);
                        model.push(number);
                        if in_use.len() < 10 {
                            in_use.push((number, slot));
                        }
                    }
                }
                4 => {
                    let unused =
                        model.iter().filter(|number| !in_use.iter().any(|(used, _)| used == *number)).count();
                    assert_eq!(catalog.evictable(5), unused.min(5), "step {step}");
                    let evicted = catalog.evict().map(|(identity, _)| identity);
                    let expected =
                        model.iter().position(|number| !in_use.iter().any(|(used, _)| used == number));
                    assert_eq!(evicted, expected.map(|at| identity(model.remove(at))), "step {step}");
                }
                _ if !in_use.is_empty() => drop(in_use.swap_remove(draw(in_use.len() as u64) as usize)),
                _ => {}
            }
            assert_eq!(catalog.len(), model.len());
        }
        in_use.clear();
        assert_eq!(catalog.clear(), model.len());
        assert_eq!(pool.used_count(), 0);
    }

    #[test]
    fn a_prefix_ends_at_the_first_gap() {
        let pool = pool(4);
        let mut catalog = PoolCatalog::with_capacity(4);
        for number in [1, 2, 4] {
            catalog.register(identity(number), pool.acquire().expect("slot"));
        }
        let mut slots = Vec::new();
        assert_eq!(catalog.match_prefix(&[1, 2, 3, 4].map(identity), &mut slots), 2);
        assert_eq!(slots.len(), 2);
        drop(slots);
        let order: Vec<_> = std::iter::from_fn(|| catalog.evict()).map(|(identity, _)| identity).collect();
        assert_eq!(order, [4, 2, 1].map(identity), "leaves go before their roots");
    }
}
