//! A node: a run of up to [`NODE_BLOCKS`] consecutive blocks, their holders, and their children.
//!
//! One writer changes nodes while readers walk through them, so values that must be seen together are in one word. The
//! *shape* has the slots in use and the children of the last one; it carries a version, so that a reader notices a change
//! between two loads. A block's slot number never changes: a split leaves the first blocks in the node and moves the rest to
//! a new node *at the same numbers*, so that positions and masks stay valid.

use crate::holders::HolderSets;
use crate::limits::NODE_BLOCKS;
use crate::sync::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// Number of a node; 0 is the root.
pub(crate) type NodeId = u32;
/// Number of a fork: a node's set of several children.
pub(crate) type ForkId = u32;

pub(crate) const ROOT: NodeId = 0;
/// Bit that marks a fork's number in `Node::parent`.
pub(crate) const FORK: u32 = 1 << 31;

/// Children of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Children {
    None,
    One(NodeId),
    /// Several children, in the table of children under this number.
    Many(ForkId),
}

/// Packed word: `base` (5 bits), `len` (5), kind of children (2), their number (28), version (24).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape(pub(crate) u64);

impl Shape {
    pub(crate) fn new(base: usize, len: usize, children: Children) -> Self {
        debug_assert!(base + len <= NODE_BLOCKS, "{base} + {len}");
        Self(0).with(base, len, children)
    }

    /// Returns these contents with the next version.
    pub(crate) fn with(self, base: usize, len: usize, children: Children) -> Self {
        let (kind, number) = match children {
            Children::None => (0, 0),
            Children::One(node) => (1, node),
            Children::Many(fork) => (2, fork),
        };
        let version = (self.0 >> 40).wrapping_add(1) << 40;
        Self(version | u64::from(number) << 12 | kind << 10 | (len as u64) << 5 | base as u64)
    }

    pub(crate) fn with_len(self, len: usize) -> Self {
        self.with(self.base(), len, self.children())
    }

    pub(crate) fn with_children(self, children: Children) -> Self {
        self.with(self.base(), self.len(), children)
    }

    /// First slot in use.
    pub(crate) fn base(self) -> usize {
        (self.0 & 31) as usize
    }

    /// Number of slots in use.
    pub(crate) fn len(self) -> usize {
        (self.0 >> 5 & 31) as usize
    }

    /// Slot after the last one in use.
    pub(crate) fn end(self) -> usize {
        self.base() + self.len()
    }

    pub(crate) fn children(self) -> Children {
        let number = (self.0 >> 12) as u32 & ((1 << 28) - 1);
        match self.0 >> 10 & 3 {
            0 => Children::None,
            1 => Children::One(number),
            _ => Children::Many(number),
        }
    }

    /// The slots in use as bits.
    pub(crate) fn mask(self) -> u32 {
        bits(self.base(), self.end())
    }
}

/// Bits `from..to`.
pub(crate) fn bits(from: usize, to: usize) -> u32 {
    ((1_u64 << to) - (1_u64 << from)) as u32
}

#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Node {
    shape: AtomicU64,
    /// Up to four members that hold all of the node on the device. Ignored while `holder_sets` is set.
    pub(crate) list: AtomicU64,
    /// Holders that a list of four cannot represent; null without any.
    pub(crate) holder_sets: AtomicPtr<HolderSets>,
    /// The node before, or the fork that this is a child of ([`FORK`]). Readers compare it with the key of their look-up in the
    /// table of children; other uses are the writer's.
    pub(crate) parent: AtomicU32,
    /// Node that received the last slots in a split, as long as that node exists; for the writer.
    pub(crate) next_part: AtomicU32,
    pub(crate) hashes: [AtomicU64; NODE_BLOCKS],
}

#[cfg(not(loom))]
const _: () = assert!(size_of::<Node>() == 256);

impl Node {
    /// An empty node, for loom, whose atomics are not valid as zeroed memory.
    #[cfg(loom)]
    pub(crate) fn empty() -> Self {
        Self {
            shape: AtomicU64::new(0),
            list: AtomicU64::new(0),
            holder_sets: AtomicPtr::new(std::ptr::null_mut()),
            parent: AtomicU32::new(0),
            next_part: AtomicU32::new(0),
            hashes: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    /// Acquire: everything that the shape refers to (hashes, children, holders) was stored before it.
    #[inline]
    pub(crate) fn shape(&self) -> Shape {
        Shape(self.shape.load(Ordering::Acquire))
    }

    /// Release: pairs with [`Self::shape`].
    pub(crate) fn publish(&self, shape: Shape) {
        self.shape.store(shape.0, Ordering::Release);
    }

    pub(crate) fn hash(&self, slot: usize) -> u64 {
        self.hashes[slot].load(Ordering::Relaxed)
    }

    pub(crate) fn set_hash(&self, slot: usize, hash: u64) {
        self.hashes[slot].store(hash, Ordering::Relaxed);
    }

    /// Number of slots of `shape` that equal `wanted`, from the first on.
    #[inline]
    pub(crate) fn agreement(&self, shape: Shape, wanted: &[u64]) -> usize {
        self.agreement_from(shape.base(), shape.end(), wanted)
    }

    #[inline]
    pub(crate) fn agreement_from(&self, from: usize, end: usize, wanted: &[u64]) -> usize {
        let own = &self.hashes[from.min(NODE_BLOCKS)..end.min(NODE_BLOCKS)];
        let len = own.len().min(wanted.len());
        let (own, wanted) = (&own[..len], &wanted[..len]);
        let mut at = 0;
        // Four at a time: atomic loads are not vectorised, but this needs no branch for each.
        for (own, wanted) in own.chunks_exact(4).zip(wanted.chunks_exact(4)) {
            let differs = |n: usize| own[n].load(Ordering::Relaxed) ^ wanted[n];
            if differs(0) | differs(1) | differs(2) | differs(3) != 0 {
                break;
            }
            at += 4;
        }
        while at < len && own[at].load(Ordering::Relaxed) == wanted[at] {
            at += 1;
        }
        at
    }
}

/// A list of up to four members in a word: three bits of count, 13 bits each.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct List(pub(crate) u64);

pub(crate) const LIST_MAX: usize = 4;

impl List {
    pub(crate) fn len(self) -> usize {
        (self.0 >> 61) as usize
    }

    pub(crate) fn ids(self) -> impl Iterator<Item = u16> {
        (0..self.len()).map(move |at| (self.0 >> (13 * at)) as u16 & 0x1FFF)
    }

    pub(crate) fn contains(self, id: u16) -> bool {
        self.ids().any(|other| other == id)
    }

    pub(crate) fn of(ids: impl Iterator<Item = u16>) -> Self {
        let mut list = Self(0);
        for id in ids {
            let len = list.len();
            debug_assert!(len < LIST_MAX);
            list = Self(list.0 & !(7 << 61) | u64::from(id) << (13 * len) | (len as u64 + 1) << 61);
        }
        list
    }

    pub(crate) fn with(self, id: u16) -> Self {
        Self::of(self.ids().chain(std::iter::once(id)))
    }

    pub(crate) fn without(self, id: u16) -> Self {
        Self::of(self.ids().filter(|&other| other != id))
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn shapes_and_lists_keep_what_they_are_given() {
        for children in [Children::None, Children::One((1 << 27) - 1), Children::Many((1 << 28) - 1)] {
            let shape = Shape::new(5, 23, children);
            assert_eq!((shape.base(), shape.len(), shape.end(), shape.children()), (5, 23, 28, children));
            assert_ne!(shape.with_len(23), shape, "a version of its own");
            assert_eq!(shape.with_len(3).mask(), 0b1110_0000);
        }
        let list = List::of([8191, 0, 77].into_iter()).with(4096);
        assert_eq!(list.ids().collect::<Vec<_>>(), [8191, 0, 77, 4096]);
        assert_eq!(list.without(0).ids().collect::<Vec<_>>(), [8191, 77, 4096]);
        assert!(list.contains(77) && !list.contains(1) && list.without(9) == list);
    }
}
