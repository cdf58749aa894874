//! One transfer that is sent: blocks are copied to staging slots in the order of the pushes, and pushed on piece by piece.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Instant;

use dataplane_fabric::Fabric;
use dataplane_memory::{SlotCopy, SlotPool, SlotRef};

use super::copies::Purpose;
use super::lent::Lent;
use crate::node::{Command, TransferId, TransferNode};
use crate::shard::PieceLayout;

/// Some blocks of one push.
#[derive(Debug)]
struct Part {
    first_block: u32,
    layers: Range<u16>,
    /// Where the layers lie in a slot.
    offset: u32,
    len: u32,
    device: Vec<SlotRef>,
    /// Of the leading blocks, those whose copies were started.
    staged: Vec<SlotRef>,
    copied: usize,
}

#[derive(Debug)]
pub(super) struct Outgoing {
    content: [u8; 16],
    /// In the order of the pushes: a receiver verifies the layers of a block in order.
    parts: VecDeque<Part>,
    /// Number of the part at the front.
    first_part: u64,
    /// Copies under way, also those of parts that were dropped.
    copying: usize,
    lent: Lent,
    /// The owner has said that nothing more comes.
    is_ended: bool,
    /// The node knows of the transfer, and of its end.
    is_told: bool,
    is_end_told: bool,
    /// Nothing more is passed on: cancelled, or a copy failed, or the receiver is gone.
    is_stopped: bool,
    /// What the node said in the end.
    pushed: Option<bool>,
}

impl Outgoing {
    pub(super) fn new(content: [u8; 16], slots_max: usize) -> Self {
        Self {
            content,
            parts: VecDeque::new(),
            first_part: 0,
            copying: 0,
            lent: Lent::new(slots_max.max(1)),
            is_ended: false,
            is_told: false,
            is_end_told: false,
            is_stopped: false,
            pushed: None,
        }
    }

    pub(super) fn push(
        &mut self,
        first_block: u32,
        slots: Vec<SlotRef>,
        layers: Range<u16>,
        layout: &PieceLayout,
        piece_blocks: usize,
    ) {
        if self.is_stopped {
            return;
        }
        let offset = u32::from(layers.start) * layout.layer_bytes();
        let len = layers.len() as u32 * layout.layer_bytes();
        let (mut slots, mut first_block) = (slots.into_iter(), first_block);
        loop {
            let device: Vec<SlotRef> = slots.by_ref().take(piece_blocks.max(1)).collect();
            if device.is_empty() {
                return;
            }
            let (staged, next_block) = (Vec::with_capacity(device.len()), first_block + device.len() as u32);
            let layers = layers.clone();
            self.parts.push_back(Part { first_block, layers, offset, len, device, staged, copied: 0 });
            first_block = next_block;
        }
    }

    pub(super) fn end(&mut self) {
        self.is_ended = true;
    }

    pub(super) fn has_parts(&self) -> bool {
        !self.parts.is_empty()
    }

    fn waiting(&self) -> Option<usize> {
        self.parts.iter().position(|part| part.staged.len() < part.device.len())
    }

    pub(super) fn wants_slot(&self) -> bool {
        self.waiting().is_some()
    }

    pub(super) fn has_room(&mut self, pool: &SlotPool) -> bool {
        self.lent.has_room(pool, 1)
    }

    /// The next copy, into `staged`.
    pub(super) fn next(&self, transfer: TransferId, staged: &SlotRef) -> Option<(SlotCopy, Purpose)> {
        let index = self.waiting()?;
        let part = &self.parts[index];
        let (from, to) = (part.device[part.staged.len()].clone(), staged.clone());
        let (offset, len) = (part.offset, part.len);
        let copy = SlotCopy { token: 0, from, from_offset: offset, to, to_offset: offset, len };
        Some((copy, Purpose::Out { transfer, part: self.first_part + index as u64 }))
    }

    /// The copy that `next` told was started.
    pub(super) fn started(&mut self, staged: SlotRef) {
        let Some(index) = self.waiting() else { return };
        self.lent.add(&staged);
        self.parts[index].staged.push(staged);
        self.copying += 1;
    }

    /// A copy has ended.
    pub(super) fn copied(&mut self, part: u64) {
        self.copying -= 1;
        let index = part.checked_sub(self.first_part);
        if let Some(part) = index.and_then(|index| self.parts.get_mut(index as usize)) {
            part.copied += 1;
        }
    }

    /// Pushes on what is copied.
    pub(super) fn forward<F: Fabric>(
        &mut self,
        transfer: TransferId,
        node: &mut TransferNode<F>,
        now: Instant,
    ) {
        while let Some(part) = self.parts.pop_front_if(|part| part.copied == part.device.len()) {
            self.first_part += 1;
            self.is_told = true;
            let Part { first_block, layers, staged: slots, .. } = part;
            let content = self.content;
            node.handle(Command::Push { transfer, content, first_block, slots, layers }, now);
        }
        if self.is_ended && self.parts.is_empty() && !self.is_stopped && !self.is_end_told {
            (self.is_told, self.is_end_told) = (true, true);
            node.handle(Command::PushEnd { transfer }, now);
        }
    }

    /// Drops what was not passed on and cancels the rest. Copies under way go on into slots that nobody else has.
    pub(super) fn stop<F: Fabric>(&mut self, transfer: TransferId, node: &mut TransferNode<F>, now: Instant) {
        if self.is_stopped {
            return;
        }
        self.drop_parts();
        if self.pushed.is_some() {
            return;
        }
        if !self.is_told {
            // The node answers for a transfer only once it knows of it.
            self.is_told = true;
            node.handle(Command::PushEnd { transfer }, now);
        }
        node.handle(Command::Cancel { transfer }, now);
    }

    fn drop_parts(&mut self) {
        self.is_stopped = true;
        self.first_part += self.parts.len() as u64;
        self.parts.clear();
    }

    /// The node is done with the transfer.
    pub(super) fn pushed(&mut self, complete: bool) {
        self.pushed.get_or_insert(complete);
        if !self.is_end_told {
            self.drop_parts();
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.pushed.is_some() && self.copying == 0
    }

    pub(super) fn is_complete(&self) -> bool {
        self.pushed == Some(true) && !self.is_stopped
    }
}
