//! The receiving side of one transfer: what was announced, what has landed, what is verified.

use std::collections::HashMap;
use std::time::Instant;

use dataplane_fabric::PeerId;
use dataplane_memory::SlotRef;

use crate::checksum;
use crate::shard::Cut;
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
    layers: u16,
    /// What the sender has in common with us, once it has told what it holds.
    cut: Option<Cut>,
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
        layers: u16,
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
            layers,
            cut: None,
            announced: HashMap::new(),
            landed_early: Vec::new(),
        }
    }

    /// The sender has said what it holds: its slots can be asked for.
    pub(crate) fn reserve(&mut self, cut: Cut) {
        self.cut = Some(cut);
        self.reserved = true;
    }

    pub(crate) fn slot_names(&self) -> Vec<SlotName> {
        let name = |slot: &SlotRef| SlotName { slot: slot.slot(), generation: slot.generation() };
        self.slots.iter().map(name).collect()
    }

    /// Takes an announcement; false when it makes no sense.
    pub(crate) fn announce(
        &mut self,
        sequence: u16,
        layers: (u16, u16),
        first_block: u32,
        sums: Vec<u64>,
    ) -> bool {
        let (first_layer, layers) = layers;
        let blocks_fit = first_block
            .checked_sub(self.first_block)
            .is_some_and(|first| first as usize + sums.len() <= self.slots.len());
        let layers_fit = layers > 0 && first_layer.checked_add(layers).is_some_and(|end| end <= self.layers);
        if !blocks_fit || !layers_fit || self.announced.len() >= UNMATCHED_MAX {
            return false;
        }
        self.announced.insert(sequence, Announcement { first_layer, layers, first_block, sums });
        if let Some(at) = self.landed_early.iter().position(|&early| early == sequence) {
            self.landed_early.swap_remove(at);
            self.verify(sequence);
        }
        true
    }

    /// Takes an immediate. Returns the number of pieces that failed verification.
    pub(crate) fn landed(&mut self, sequence: u16) -> u64 {
        if self.announced.contains_key(&sequence) {
            return self.verify(sequence);
        }
        if self.landed_early.len() < UNMATCHED_MAX {
            self.landed_early.push(sequence);
        }
        0
    }

    fn verify(&mut self, sequence: u16) -> u64 {
        let (Some(announcement), Some(cut)) = (self.announced.remove(&sequence), self.cut) else { return 0 };
        let first = (announcement.first_block - self.first_block) as usize;
        let layers = announcement.first_layer..announcement.first_layer + announcement.layers;
        let (offset, len) = (cut.offset_here(layers.start) as usize, cut.len(&layers) as usize);
        let mut failures = 0;
        for (index, expected) in announcement.sums.into_iter().enumerate() {
            let block = first + index;
            let slot = &self.slots[block];
            let verified = &mut self.layers_verified[block];
            let in_order = *verified == announcement.first_layer;
            let sum = || checksum::of_rows(slot.slab(), slot.slot(), offset, len, cut.row_here());
            if in_order && sum() == expected {
                *verified += announcement.layers;
            } else {
                failures += 1;
                self.corrupted = true;
            }
        }
        failures
    }

    /// What the sender has in common with us, and how many leading layers of each block are verified.
    pub(crate) fn view(&self) -> Option<(Cut, &[u16])> {
        self.cut.map(|cut| (cut, &*self.layers_verified))
    }

    /// Leading blocks of which every byte is verified.
    pub(crate) fn verified_prefix(&self) -> usize {
        self.layers_verified.iter().take_while(|&&layers| layers == self.layers).count()
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.verified_prefix() == self.slots.len()
    }
}
