//! Staging slots that were handed out, to one transfer or to all transfers of a direction, counted until they
//! are free again.
//!
//! No reference is held: a slot whose use has ended is free or in another use, which its use number shows.

use dataplane_memory::{SlotPool, SlotRef};

#[derive(Debug)]
pub(super) struct SlotAllotment {
    /// Slot, and the number of its use.
    uses: Vec<(u32, u32)>,
    most: usize,
}

impl SlotAllotment {
    pub(super) fn new(most: usize) -> Self {
        Self { uses: Vec::with_capacity(most), most }
    }

    /// Whether `count` more slots may be handed out.
    pub(super) fn has_room(&mut self, pool: &SlotPool, count: usize) -> bool {
        if self.uses.len() + count > self.most {
            self.uses.retain(|&(slot, number)| pool.freed_count(slot) == number);
        }
        self.uses.len() + count <= self.most
    }

    pub(super) fn add(&mut self, slot: &SlotRef) {
        self.uses.push((slot.slot(), slot.pool().freed_count(slot.slot())));
    }
}
