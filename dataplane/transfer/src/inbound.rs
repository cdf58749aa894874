//! The receiving side of one transfer: what was announced, what has landed, what is verified.

use std::collections::HashMap;
use std::time::Instant;

use dataplane_fabric::PeerId;
use dataplane_memory::SlotRef;

use crate::checksum;
use crate::config::PieceLayout;
use crate::wire::SlotName;

#[derive(Debug)]
struct Announcement {
    first_layer: u16,
    layers: u16,
    first_block: u32,
    sums: Vec<u64>,
}

/// One transfer that we wait for.
#[derive(Debug)]
pub(crate) struct Inbound {
    pub(crate) peer: PeerId,
    pub(crate) tag: u16,
    pub(crate) content: [u8; 16],
    pub(crate) first_block: u32,
    pub(crate) slots: Vec<SlotRef>,
    pub(crate) deadline: Instant,
    /// Whether the sender has been told of the slots.
    pub(crate) reserved: bool,
    pub(crate) corrupted: bool,
    /// Per block: how many leading layers are verified.
    layers_verified: Vec<u16>,
    announced: HashMap<u16, Announcement>,
    /// Immediates whose announcement has not come (possible only on a fabric that reorders).
    landed_early: Vec<u16>,
}

/// Announcements and immediates that may wait for their other half.
const UNMATCHED_MAX: usize = 4096;

impl Inbound {
    pub(crate) fn new(
        peer: PeerId,
        tag: u16,
        content: [u8; 16],
        first_block: u32,
        slots: Vec<SlotRef>,
        deadline: Instant,
    ) -> Self {
        let layers_verified = vec![0; slots.len()];
        Self {
            peer,
            tag,
            content,
            first_block,
            slots,
            deadline,
            reserved: false,
            corrupted: false,
            layers_verified,
            announced: HashMap::new(),
            landed_early: Vec::new(),
        }
    }

    pub(crate) fn slot_names(&self) -> Vec<SlotName> {
        let name = |slot: &SlotRef| SlotName { slot: slot.slot(), generation: slot.generation() };
        self.slots.iter().map(name).collect()
    }

    /// Takes an announcement; false when it makes no sense.
    pub(crate) fn announce(
        &mut self,
        layout: &PieceLayout,
        sequence: u16,
        layers: (u16, u16),
        first_block: u32,
        sums: Vec<u64>,
    ) -> bool {
        let (first_layer, layers) = layers;
        let blocks_fit = first_block
            .checked_sub(self.first_block)
            .is_some_and(|first| first as usize + sums.len() <= self.slots.len());
        let layers_fit =
            layers > 0 && first_layer.checked_add(layers).is_some_and(|end| end <= layout.layers);
        if !blocks_fit || !layers_fit || self.announced.len() >= UNMATCHED_MAX {
            return false;
        }
        self.announced.insert(sequence, Announcement { first_layer, layers, first_block, sums });
        if let Some(at) = self.landed_early.iter().position(|&early| early == sequence) {
            self.landed_early.swap_remove(at);
            self.verify(layout, sequence);
        }
        true
    }

    /// Takes an immediate. Returns the number of pieces that failed verification.
    pub(crate) fn landed(&mut self, layout: &PieceLayout, sequence: u16) -> u64 {
        if self.announced.contains_key(&sequence) {
            return self.verify(layout, sequence);
        }
        if self.landed_early.len() < UNMATCHED_MAX {
            self.landed_early.push(sequence);
        }
        0
    }

    fn verify(&mut self, layout: &PieceLayout, sequence: u16) -> u64 {
        let Some(announcement) = self.announced.remove(&sequence) else { return 0 };
        let first = (announcement.first_block - self.first_block) as usize;
        let offset = usize::from(announcement.first_layer) * layout.layer_bytes as usize;
        let len = usize::from(announcement.layers) * layout.layer_bytes as usize;
        let mut failures = 0;
        for (index, expected) in announcement.sums.into_iter().enumerate() {
            let block = first + index;
            let slot = &self.slots[block];
            let verified = &mut self.layers_verified[block];
            let in_order = *verified == announcement.first_layer;
            if in_order && checksum::of_range(slot.slab(), slot.slot(), offset, len) == expected {
                *verified += announcement.layers;
            } else {
                failures += 1;
                self.corrupted = true;
            }
        }
        failures
    }

    /// Leading blocks of which every byte is verified.
    pub(crate) fn verified_prefix(&self, layout: &PieceLayout) -> usize {
        self.layers_verified.iter().take_while(|&&layers| layers == layout.layers).count()
    }

    pub(crate) fn is_complete(&self, layout: &PieceLayout) -> bool {
        self.verified_prefix(layout) == self.slots.len()
    }
}
