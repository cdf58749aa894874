//! Staging slots in use by one transfer, counted until they are free again.
//!
//! No reference is held: a slot whose use has ended may be in use by another transfer, which its use number
//! shows.

use dataplane_memory::{SlotPool, SlotRef};

#[derive(Debug)]
pub(super) struct Lent {
    /// Slot, and the number of its use.
    uses: Vec<(u32, u32)>,
    most: usize,
}

impl Lent {
    pub(super) fn new(most: usize) -> Self {
        Self { uses: Vec::with_capacity(most), most }
    }

    /// Whether `count` more slots may be allocated to the transfer.
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
