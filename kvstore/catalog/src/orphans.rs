//! Registered blocks whose parent is not: found by the parent's identity when that is registered.
//!
//! Blocks of a chain may be registered in any order: by several writers, by a disk that comes back, by a tier whose leaves are
//! written first. A fixed table of lists through the nodes, nothing is allocated after its creation. A step costs one look at a
//! bucket, and none while there are no orphans.

use crate::index::hash_halves;
use crate::list::{List, Node, ORPHANS};

/// Slots for each bucket.
const SLOTS_PER_BUCKET: usize = 4;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Orphans {
    buckets: Box<[List<ORPHANS>]>,
    count: u32,
}

impl Orphans {
    pub(crate) fn new(slots: usize) -> Self {
        let count = (slots / SLOTS_PER_BUCKET).next_power_of_two();
        Self { buckets: vec![List::EMPTY; count].into_boxed_slice(), count: 0 }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    fn bucket(&mut self, parent: [u64; 2]) -> &mut List<ORPHANS> {
        // The index takes the low bits of the same hash; here the high ones do.
        let at = (hash_halves(parent) >> 32) as usize & (self.buckets.len() - 1);
        &mut self.buckets[at]
    }

    /// Notes a block that waits for this parent.
    pub(crate) fn add(&mut self, nodes: &mut [Node], slot: u32, parent: [u64; 2]) {
        self.bucket(parent).push_newest(nodes, slot);
        self.count += 1;
    }

    pub(crate) fn remove(&mut self, nodes: &mut [Node], slot: u32, parent: [u64; 2]) {
        self.bucket(parent).remove(nodes, slot);
        self.count -= 1;
    }

    /// Blocks that wait for this parent, among some that wait for another parent.
    pub(crate) fn candidates<'a>(
        &mut self,
        nodes: &'a [Node],
        parent: [u64; 2],
    ) -> impl Iterator<Item = u32> + use<'a> {
        self.bucket(parent).iter(nodes)
    }

    /// All orphans.
    pub(crate) fn iter<'a>(&'a self, nodes: &'a [Node]) -> impl Iterator<Item = u32> {
        self.buckets.iter().flat_map(|bucket| bucket.iter(nodes))
    }
}
