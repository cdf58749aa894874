//! Blocks that wait for room in the disk's queue, in the order of arrival, so that a chain is written from its root.
//!
//! The first of them are held in host memory until they are written: blocks that the disk has already go
//! before. A block that arrives before its parent waits until the write of the parent has begun; it is not
//! held meanwhile.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use kvstore_block::BlockIdentity;
use kvstore_catalog::Lease;

/// Blocks that may wait, for room or for their parents; further ones stay in host memory only.
const UNWRITTEN_MAX: usize = 65_536;
/// Divisor of host memory: the part of it that waiting blocks may hold.
const HELD_SHARE: usize = 2;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct WriteBacklog {
    waiting: VecDeque<(BlockIdentity, Option<Lease>)>,
    /// Number of blocks in `waiting` that are held.
    held: usize,
    /// No block in `waiting` is held from this index on.
    held_end: usize,
    held_max: usize,
    /// Blocks that wait for a parent, by the parent.
    children: HashMap<BlockIdentity, Children>,
    /// Number of blocks in `children`.
    children_count: usize,
    /// The parents in `children`, in the order in which they were missed first.
    parents: BTreeMap<u64, BlockIdentity>,
    /// Key of the next parent in `parents`.
    next_parent: u64,
}

/// Blocks that wait for one parent.
#[derive(Debug)]
struct Children {
    /// Key of the parent in `parents`.
    parent: u64,
    blocks: Vec<BlockIdentity>,
}

impl WriteBacklog {
    pub(crate) fn new(host_slots: usize) -> Self {
        Self {
            waiting: VecDeque::new(),
            held: 0,
            held_end: 0,
            held_max: host_slots / HELD_SHARE,
            children: HashMap::new(),
            children_count: 0,
            parents: BTreeMap::new(),
            next_parent: 0,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Blocks that wait for room, not for their parents.
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Adds a block, held by the result of `lease` as far as more blocks may be held; drops the block when
    /// too many wait.
    pub(crate) fn push(&mut self, identity: BlockIdentity, lease: impl FnOnce() -> Option<Lease>) {
        if self.waiting.len() >= UNWRITTEN_MAX {
            return;
        }
        let lease = if self.held < self.held_max { lease() } else { None };
        let is_held = lease.is_some();
        self.waiting.push_back((identity, lease));
        if is_held {
            self.held += 1;
            self.held_end = self.waiting.len();
        }
    }

    /// Lets a block wait for its parent, before which it cannot be written: it is pushed again when the
    /// parent's write begins. When too many blocks wait, those that have waited longest are given up.
    pub(crate) fn wait_for_parent(&mut self, parent: BlockIdentity, identity: BlockIdentity) {
        while self.children_count >= UNWRITTEN_MAX
            && let Some((_, &oldest)) = self.parents.first_key_value()
        {
            self.remove_children(&oldest);
        }
        let children = self.children.entry(parent).or_insert_with(|| {
            self.parents.insert(self.next_parent, parent);
            self.next_parent += 1;
            Children { parent: self.next_parent - 1, blocks: Vec::new() }
        });
        children.blocks.push(identity);
        self.children_count += 1;
    }

    /// Queues the blocks that wait for this parent, whose write has begun.
    pub(crate) fn parent_began(&mut self, parent: &BlockIdentity) {
        self.remove_children(parent).into_iter().for_each(|child| self.push(child, || None));
    }

    fn remove_children(&mut self, parent: &BlockIdentity) -> Vec<BlockIdentity> {
        let Some(children) = self.children.remove(parent) else { return Vec::new() };
        self.parents.remove(&children.parent);
        self.children_count -= children.blocks.len();
        children.blocks
    }

    /// Removes the block that has waited longest.
    pub(crate) fn pop(&mut self) -> Option<(BlockIdentity, Option<Lease>)> {
        let (identity, lease) = self.waiting.pop_front()?;
        self.held -= usize::from(lease.is_some());
        self.held_end = self.held_end.saturating_sub(1);
        Some((identity, lease))
    }

    /// Puts a block back before all others.
    pub(crate) fn put_back(&mut self, identity: BlockIdentity, lease: Lease) {
        self.held += 1;
        self.held_end += 1;
        self.waiting.push_front((identity, Some(lease)));
    }

    /// Releases one held block, the youngest first, so that chains stay whole; false when none is held. No
    /// block is visited twice until further blocks are held.
    pub(crate) fn release_held(&mut self) -> bool {
        let held = (self.waiting.range_mut(..self.held_end).enumerate().rev())
            .find_map(|(at, (_, lease))| lease.take().map(|lease| (at, lease)));
        self.held_end = held.as_ref().map_or(0, |(at, _)| *at);
        self.held -= usize::from(held.is_some());
        held.is_some()
    }

    /// Panics when a count disagrees with what it counts.
    #[cfg(test)]
    pub(crate) fn check(&self) {
        assert_eq!(
            self.held,
            self.waiting.iter().filter(|(_, lease)| lease.is_some()).count(),
            "held blocks"
        );
        let behind = self.waiting.iter().skip(self.held_end);
        assert!(behind.into_iter().all(|(_, lease)| lease.is_none()), "held behind the end of those held");
        let count: usize = self.children.values().map(|children| children.blocks.len()).sum();
        assert_eq!(self.children_count, count, "children");
        assert_eq!(self.children.len(), self.parents.len(), "parents");
        for (parent, children) in &self.children {
            assert_eq!(self.parents.get(&children.parent), Some(parent), "the key of a parent");
        }
    }

    /// These blocks are not going to be written.
    pub(crate) fn forget(&mut self, chain: &[BlockIdentity]) {
        if !self.children.is_empty() {
            chain.iter().for_each(|parent| drop(self.remove_children(parent)));
        }
        if self.waiting.is_empty() {
            return;
        }
        let gone: HashSet<&BlockIdentity> = chain.iter().collect();
        self.waiting.retain(|(identity, lease)| {
            let is_kept = !gone.contains(identity);
            self.held -= usize::from(!is_kept && lease.is_some());
            is_kept
        });
        self.held_end = self.held_end.min(self.waiting.len());
    }
}

#[cfg(test)]
mod tests {
    use kvstore_catalog::{Catalog, CatalogConfig, PolicyKind, TenantId, TierConfig, TierIndex};

    use super::*;

    const TIER: TierIndex = TierIndex(0);

    fn identity(number: u8) -> BlockIdentity {
        BlockIdentity([number; 16])
    }

    /// A catalog with so many blocks, no one hanging on another.
    fn catalog(blocks: u8) -> Catalog {
        let tier = TierConfig::new(u32::from(blocks), PolicyKind::Lru);
        let catalog = Catalog::new(&CatalogConfig::new(vec![tier])).expect("a catalog");
        let (mut evicted, mut reserved) = (Vec::new(), Vec::new());
        catalog.reserve(TIER, usize::from(blocks), TenantId(0), &mut evicted, &mut reserved);
        for (number, reserved) in (0..blocks).zip(reserved) {
            reserved.fill().complete(1, 1).register(identity(number), None, 1.0);
        }
        catalog
    }

    #[test]
    fn half_of_host_memory_is_held_at_most_and_the_youngest_give_way_first() {
        let catalog = catalog(8);
        let pinned = || catalog.census(TIER).pinned;
        let mut unwritten = WriteBacklog::new(8);
        (0..8).for_each(|number| unwritten.push(identity(number), || catalog.lease(TIER, &identity(number))));
        assert_eq!(pinned(), 4);
        assert!(unwritten.release_held());
        assert_eq!(pinned(), 3);
        let (first, lease) = unwritten.pop().expect("eight wait");
        assert!(first == identity(0) && lease.is_some());
        unwritten.put_back(first, lease.expect("held"));
        unwritten.forget(&[identity(1), identity(7)]);
        assert_eq!((pinned(), unwritten.held), (2, 2));
        let left: Vec<(BlockIdentity, bool)> = std::iter::from_fn(|| unwritten.pop())
            .map(|(identity, lease)| (identity, lease.is_some()))
            .collect();
        let expected = [(0, true), (2, true), (3, false), (4, false), (5, false), (6, false)];
        assert_eq!(left, expected.map(|(number, is_held)| (identity(number), is_held)));
        assert_eq!((pinned(), unwritten.held), (0, 0));
        assert!(!unwritten.release_held());
    }

    #[test]
    fn children_wait_for_the_writes_of_their_parents() {
        let mut unwritten = WriteBacklog::new(8);
        let next = |unwritten: &mut WriteBacklog| unwritten.pop().map(|(identity, _)| identity);
        for (parent, child) in [(1, 2), (2, 3), (1, 4), (9, 10)] {
            unwritten.wait_for_parent(identity(parent), identity(child));
        }
        assert!(unwritten.is_empty());
        unwritten.parent_began(&identity(7));
        unwritten.parent_began(&identity(1));
        assert_eq!([(); 3].map(|()| next(&mut unwritten)), [Some(identity(2)), Some(identity(4)), None]);
        unwritten.forget(&[identity(9)]);
        unwritten.parent_began(&identity(9));
        assert!(unwritten.is_empty());
        assert_eq!((unwritten.children_count, unwritten.children.len()), (1, 1));
        unwritten.parent_began(&identity(2));
        assert_eq!(next(&mut unwritten), Some(identity(3)));
        // Parents that never come keep no others from waiting.
        let number = |at: u32| BlockIdentity(u128::from(at).to_le_bytes());
        (0..UNWRITTEN_MAX as u32 + 3).for_each(|at| unwritten.wait_for_parent(number(at), number(at + 1)));
        assert_eq!(unwritten.children_count, UNWRITTEN_MAX);
        unwritten.parent_began(&number(2));
        assert!(unwritten.is_empty(), "it has given up");
        for at in 3..UNWRITTEN_MAX as u32 + 3 {
            unwritten.parent_began(&number(at));
            assert_eq!(next(&mut unwritten), Some(number(at + 1)));
        }
        assert_eq!((unwritten.children.len(), unwritten.parents.len(), unwritten.children_count), (0, 0, 0));
        // A parent that is missed again is the youngest.
        unwritten.wait_for_parent(number(1), number(2));
        unwritten.wait_for_parent(number(3), number(4));
        unwritten.parent_began(&number(1));
        unwritten.wait_for_parent(number(1), number(2));
        assert_eq!(unwritten.parents.values().copied().collect::<Vec<_>>(), [number(3), number(1)]);
        unwritten.check();
    }

    #[test]
    fn what_is_not_held_at_the_end_is_not_gone_through_again() {
        let catalog = catalog(9);
        let mut unwritten = WriteBacklog::new(8);
        (0..8).for_each(|number| unwritten.push(identity(number), || catalog.lease(TIER, &identity(number))));
        assert_eq!((unwritten.held, unwritten.held_end), (4, 4));
        assert!(unwritten.release_held());
        let (first, lease) = unwritten.pop().expect("eight wait");
        assert_eq!((unwritten.held, unwritten.held_end), (2, 2));
        // One that is held behind many that are not is the first to go.
        unwritten.push(identity(8), || catalog.lease(TIER, &identity(8)));
        assert_eq!((unwritten.held, unwritten.held_end), (3, 8));
        assert!(unwritten.release_held());
        assert!(
            unwritten.waiting.back().is_some_and(|(last, lease)| *last == identity(8) && lease.is_none())
        );
        assert!(unwritten.release_held());
        unwritten.put_back(first, lease.expect("held"));
        assert_eq!((unwritten.held, unwritten.held_end), (2, 2));
        unwritten.forget(&(1..8).map(identity).collect::<Vec<_>>());
        assert_eq!((unwritten.held, unwritten.held_end), (1, 2));
        assert!(unwritten.release_held() && !unwritten.release_held());
        assert_eq!((unwritten.held_end, catalog.census(TIER).pinned), (0, 0));
    }
}
