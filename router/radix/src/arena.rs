//! Nodes by number, in segments that are allocated as the index grows and freed when they are empty.
//!
//! Safety argument of the whole crate, as far as nodes go: a reader gets node numbers only from links that it
//! read while pinned, and a number is freed only after every reader that could have read a link to it has left
//! ([`crate::grace`]). So while a reader holds a number its segment exists. Everything in a node is atomic, so the writer's
//! changes to a node in use are never a data race.

use std::collections::BTreeSet;

use crate::limits::{SEGMENT_NODES, SEGMENTS_MAX};
use crate::node::{Node, NodeId};
use crate::sync::{AtomicPtr, Ordering};

#[cfg(not(loom))]
mod segment {
    use crate::huge::{Huge, Zeroed};
    use crate::limits::SEGMENT_NODES;
    use crate::node::Node;

    #[derive(Debug)]
    #[repr(C, align(64))]
    pub(super) struct Segment(pub(super) [Node; SEGMENT_NODES]);

    // SAFETY: atomics whose zeroed form is an unused node; no drop.
    unsafe impl Zeroed for Segment {}

    /// Allocates a segment. `None` when the system has no memory.
    pub(super) fn make() -> Option<*mut Segment> {
        Some(Huge::<Segment>::new()?.into_raw())
    }

    /// # Safety
    /// `segment` is from `make`, and no thread uses it any more.
    pub(super) unsafe fn free(segment: *mut Segment) {
        // SAFETY: the caller's contract.
        drop(unsafe { Huge::from_raw(segment) });
    }
}

#[cfg(loom)]
mod segment {
    use crate::limits::SEGMENT_NODES;
    use crate::node::Node;

    #[derive(Debug)]
    pub(super) struct Segment(pub(super) [Node; SEGMENT_NODES]);

    pub(super) fn make() -> Option<*mut Segment> {
        Some(Box::into_raw(Box::new(Segment(std::array::from_fn(|_| Node::empty())))))
    }

    /// # Safety
    /// `segment` is from `make`, and no thread uses it any more.
    pub(super) unsafe fn free(segment: *mut Segment) {
        // SAFETY: the caller's contract.
        drop(unsafe { Box::from_raw(segment) });
    }
}

use segment::Segment;

/// Bytes of a segment.
pub(crate) const SEGMENT_BYTES: usize = size_of::<Segment>();

/// The nodes, as readers and the writer access them.
#[derive(Debug)]
pub(crate) struct Arena {
    segments: Box<[AtomicPtr<Segment>]>,
}

impl Arena {
    pub(crate) fn new() -> Self {
        let null = |_| AtomicPtr::new(std::ptr::null_mut());
        Self { segments: (0..SEGMENTS_MAX).map(null).collect() }
    }

    /// The node of a number that is in use, or that the caller read from a link while pinned.
    #[inline]
    pub(crate) fn node(&self, id: NodeId) -> &Node {
        let id = id as usize;
        // Acquire: pairs with the release in `NodeAllocator::grow`.
        let segment = self.segments[id / SEGMENT_NODES].load(Ordering::Acquire);
        debug_assert!(!segment.is_null(), "node {id} is not there");
        // SAFETY: the segment was made by `grow` and is not freed while the number is in use or in a pinned
        // reader's hands: see the module's header.
        let segment = unsafe { &*segment };
        &segment.0[id % SEGMENT_NODES]
    }

    /// The node of any number, if its segment exists: for the writer, whose block names may be stale. Only the writer frees
    /// segments, so the segment stays while the writer uses the node.
    pub(crate) fn get(&self, id: NodeId) -> Option<&Node> {
        let segment = self.segments.get(id as usize / SEGMENT_NODES)?.load(Ordering::Acquire);
        // SAFETY: null, or made by `grow` and not freed before the writer, who is the caller, frees it.
        let segment = unsafe { segment.as_ref() }?;
        Some(&segment.0[id as usize % SEGMENT_NODES])
    }

    /// Prefetches a node that is probably needed soon.
    #[inline]
    pub(crate) fn prefetch(&self, id: NodeId) {
        #[cfg(all(target_arch = "x86_64", not(loom)))]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            let at = std::ptr::from_ref(self.node(id)).cast::<i8>();
            for line in 0..4 {
                // SAFETY: a prefetch reads nothing architecturally; any address will do.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(line * 64)) };
            }
        }
        #[cfg(not(all(target_arch = "x86_64", not(loom))))]
        let _ = id;
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        for segment in &self.segments {
            let segment = segment.load(Ordering::Relaxed);
            if !segment.is_null() {
                // SAFETY: made by `grow`; no other thread has access any more.
                let nodes = &unsafe { &*segment }.0;
                for holder_sets in nodes
                    .iter()
                    .map(|node| node.holder_sets.load(Ordering::Relaxed))
                    .filter(|holder_sets| !holder_sets.is_null())
                {
                    // SAFETY: made by `Box::into_raw`; a node that is not in use has none, so each is freed once.
                    drop(unsafe { Box::from_raw(holder_sets) });
                }
                // SAFETY: as above.
                unsafe { segment::free(segment) };
            }
        }
    }
}

#[derive(Debug)]
struct SegmentState {
    /// Free node numbers within the segment.
    free: Vec<u16>,
}

/// The writer's list of free node numbers.
#[derive(Debug, Default)]
pub(crate) struct NodeAllocator {
    segments: Vec<Option<SegmentState>>,
    /// Segments with a free number. The lowest is used first, so that the others run empty.
    non_full: BTreeSet<u32>,
    pub(crate) allocated: usize,
    pub(crate) nodes: usize,
}

impl NodeAllocator {
    /// Allocates a number; its node is as the last owner left it. `None` when all numbers are in use.
    pub(crate) fn allocate(&mut self, arena: &Arena) -> Option<NodeId> {
        let at = match self.non_full.first() {
            Some(&at) => at as usize,
            None => self.grow(arena)?,
        };
        let state = self.segments[at].as_mut()?;
        let within = state.free.pop()?;
        if state.free.is_empty() {
            self.non_full.remove(&(at as u32));
        }
        self.nodes += 1;
        Some((at * SEGMENT_NODES) as NodeId + NodeId::from(within))
    }

    fn grow(&mut self, arena: &Arena) -> Option<usize> {
        let at = self.segments.iter().position(Option::is_none).unwrap_or(self.segments.len());
        if at == SEGMENTS_MAX {
            return None;
        }
        let segment = segment::make()?;
        // Release: pairs with the acquire in `node`.
        arena.segments[at].store(segment, Ordering::Release);
        // From the lowest number up: a run's nodes then lie behind each other.
        let state = SegmentState { free: (0..SEGMENT_NODES as u16).rev().collect() };
        if at == self.segments.len() {
            self.segments.push(Some(state));
        } else {
            self.segments[at] = Some(state);
        }
        self.non_full.insert(at as u32);
        self.allocated += 1;
        Some(at)
    }

    /// Frees a number that no reader can know any more.
    pub(crate) fn free(&mut self, arena: &Arena, id: NodeId) {
        let at = id as usize / SEGMENT_NODES;
        let Some(Some(state)) = self.segments.get_mut(at) else { return };
        state.free.push((id as usize % SEGMENT_NODES) as u16);
        self.nodes -= 1;
        self.non_full.insert(at as u32);
        if state.free.len() < SEGMENT_NODES {
            return;
        }
        self.non_full.remove(&(at as u32));
        self.segments[at] = None;
        self.allocated -= 1;
        let segment = arena.segments[at].swap(std::ptr::null_mut(), Ordering::AcqRel);
        // SAFETY: made by `grow`; every number in it is free, so no link to it exists and no reader has one.
        unsafe { segment::free(segment) };
    }
}
