//! Staging slots that were given away, until they are free again.
//!
//! No reference is held: a slot whose generation has moved on is free, or somebody else's.

use dataplane_memory::{SlotPool, SlotRef};

#[derive(Debug)]
pub(super) struct Lent {
    names: Vec<(u32, u32)>,
    most: usize,
}

impl Lent {
    pub(super) fn new(most: usize) -> Self {
        Self { names: Vec::with_capacity(most), most }
    }

    /// Whether `count` more may be given away.
    pub(super) fn has_room(&mut self, pool: &SlotPool, count: usize) -> bool {
        if self.names.len() + count > self.most {
            self.names.retain(|&(slot, generation)| pool.slab().generation(slot) == generation);
        }
        self.names.len() + count <= self.most
    }

    pub(super) fn add(&mut self, slot: &SlotRef) {
        self.names.push((slot.slot(), slot.generation()));
    }
}
