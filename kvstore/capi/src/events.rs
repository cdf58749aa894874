//! Events: the blocks that the tiers of this node gain and lose, for routers.
//!
//! The store's thread puts events into a queue of fixed capacity, and the caller takes them out. A half-full
//! queue drops events of gained blocks, which costs its reader hits, to keep room for events of lost blocks,
//! whose absence would cost false hits.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvstore_store::{Medium, StoreEvent};

use crate::backend::Identity;

/// A block that a tier gained or lost, `kvasir_kv_event` in C.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// Identity of the block.
    pub identity: Identity,
    /// 1: the tier gained the block; 2: the tier lost it.
    pub kind: u32,
    /// 1: host memory; 2: the disk.
    pub tier: u32,
}

/// `kvasir_kv_event_kind` in C.
const STORED: u32 = 1;
const REMOVED: u32 = 2;
/// `kvasir_kv_tier` in C.
const HOST_TIER: u32 = 1;
const DISK_TIER: u32 = 2;

/// The queue of one store.
#[derive(Debug)]
pub(crate) struct Events {
    /// Most events that wait; 0 turns the queue off.
    capacity: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Event>,
    lost: u64,
}

impl State {
    /// Adds an event. `capacity` is that of the whole queue.
    fn push(&mut self, event: Event, capacity: usize) {
        let room = if event.kind == STORED { capacity.div_ceil(2) } else { capacity };
        if self.waiting.len() < room {
            self.waiting.push_back(event);
        } else {
            self.lost += 1;
        }
    }
}

impl Events {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code panics while the lock is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a report of the store, if it is about a tier.
    pub(crate) fn note(&self, moved: &StoreEvent) {
        let (identity, medium, kind) = match moved {
            StoreEvent::Stored { identity, medium } => (identity, medium, STORED),
            StoreEvent::Removed { identity, medium } => (identity, medium, REMOVED),
            StoreEvent::Offloaded { .. } | StoreEvent::Onboarded { .. } | StoreEvent::Prepared { .. } => {
                return;
            }
        };
        if self.capacity == 0 {
            return;
        }
        let tier = match medium {
            Medium::Host => HOST_TIER,
            Medium::Disk => DISK_TIER,
        };
        let event = Event { identity: identity.0, kind, tier };
        self.state().push(event, self.capacity);
    }

    /// Passes at most `limit` events to `take`, in order. Returns their number.
    pub(crate) fn take(&self, limit: usize, mut take: impl FnMut(usize, Event)) -> usize {
        let mut state = self.state();
        let count = state.waiting.len().min(limit);
        state.waiting.drain(..count).enumerate().for_each(|(at, event)| take(at, event));
        count
    }

    /// Number of events dropped because the queue was full.
    pub(crate) fn lost(&self) -> u64 {
        self.state().lost
    }
}

#[cfg(test)]
mod tests {
    use kvstore_block::BlockIdentity;

    use super::*;

    #[test]
    fn a_full_queue_keeps_room_for_lost_blocks() {
        let stored =
            |first: u8| StoreEvent::Stored { identity: BlockIdentity([first; 16]), medium: Medium::Host };
        let removed =
            |first: u8| StoreEvent::Removed { identity: BlockIdentity([first; 16]), medium: Medium::Disk };
        let events = Events::new(4);
        (0..3).for_each(|first| events.note(&stored(first)));
        (3..6).for_each(|first| events.note(&removed(first)));
        let mut taken = Vec::new();
        assert_eq!(events.take(3, |_, event| taken.push((event.identity[0], event.kind, event.tier))), 3);
        assert_eq!(events.take(3, |_, event| taken.push((event.identity[0], event.kind, event.tier))), 1);
        assert_eq!(taken, [(0, STORED, 1), (1, STORED, 1), (3, REMOVED, 2), (4, REMOVED, 2)]);
        assert_eq!(events.lost(), 2);
        let nobody = Events::new(0);
        nobody.note(&removed(1));
        assert_eq!((nobody.take(9, |_, _| ()), nobody.lost()), (0, 0));
    }
}
