//! One transfer that is sent: blocks are copied to staging slots in the order of the pushes, and pushed to
//! the node piece by piece.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Instant;

use dataplane_fabric::Fabric;
use dataplane_memory::{SlotCopy, SlotPool, SlotRef};

use super::copies::Purpose;
use super::slot_allotment::SlotAllotment;
use crate::node::{Command, TransferId, TransferNode};
use crate::shard::PieceLayout;

/// Blocks of one push.
#[derive(Debug)]
struct StagedLayers {
    first_block: u32,
    layers: Range<u16>,
    /// Offset of the layers in a slot.
    offset: u32,
    len: u32,
    device: Vec<SlotRef>,
    /// A staging slot for each device slot, or none yet: if slots were given out singly, transfers could
    /// wait for each other.
    staged: Vec<SlotRef>,
    /// Number of leading blocks whose copies were started.
    started: usize,
    copied: usize,
}

impl StagedLayers {
    fn has_any_of(&self, blocks: &Range<u32>) -> bool {
        self.first_block < blocks.end && blocks.start < self.first_block + self.device.len() as u32
    }
}

#[derive(Debug)]
pub(super) struct Outgoing {
    content: [u8; 16],
    /// Parts in the order of the pushes: a receiver verifies the layers of a block in order.
    parts: VecDeque<StagedLayers>,
    /// Number of the part at the front.
    first_part: u64,
    /// Copies in flight, also those of parts that were dropped.
    copying: usize,
    lent: SlotAllotment,
    /// Whether the owner has ended the pushes.
    is_ended: bool,
    /// Whether the node was told of the end.
    is_end_reported: bool,
    /// The blocks that the receiver has reserved, once it has.
    wanted: Option<Range<u32>>,
    /// Whether the transfer was stopped: cancelled, or a copy failed, or the receiver is gone.
    is_stopped: bool,
    /// The node's final report: whether everything was sent.
    pushed: Option<bool>,
}

impl Outgoing {
    pub(super) fn new(content: [u8; 16], slots_max: usize) -> Self {
        Self {
            content,
            parts: VecDeque::new(),
            first_part: 0,
            copying: 0,
            lent: SlotAllotment::new(slots_max.max(1)),
            is_ended: false,
            is_end_reported: false,
            wanted: None,
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
            let (layers, next_block) = (layers.clone(), first_block + device.len() as u32);
            let part = StagedLayers {
                first_block,
                layers,
                offset,
                len,
                device,
                staged: Vec::new(),
                started: 0,
                copied: 0,
            };
            if self.wanted.as_ref().is_none_or(|wanted| part.has_any_of(wanted)) {
                self.parts.push_back(part);
            }
            first_block = next_block;
        }
    }

    pub(super) fn end(&mut self) {
        self.is_ended = true;
    }

    /// Whether blocks or the end remain to be copied or passed on. Blocks that no receiver has reserved wait.
    pub(super) fn has_work(&self) -> bool {
        let is_end_due = self.is_ended && !self.is_end_reported && !self.is_stopped;
        self.wanted.is_some() && (!self.parts.is_empty() || is_end_due)
    }

    /// Records the blocks that the receiver has reserved: other blocks need not be copied. A second reservation changes nothing.
    pub(super) fn want(&mut self, wanted: Range<u32>) {
        if self.wanted.is_some() {
            return;
        }
        // Parts get their slots in order: only leading parts have copies in flight, and their numbers do
        // not change.
        let staged = self.parts.iter().take_while(|part| !part.staged.is_empty()).count();
        let mut number = 0;
        self.parts.retain(|part| {
            number += 1;
            number <= staged || part.has_any_of(&wanted)
        });
        self.wanted = Some(wanted);
    }

    /// Number of staging slots that the next part needs; none before its receiver has reserved it.
    pub(super) fn wants_slots(&self) -> Option<usize> {
        self.wanted.as_ref()?;
        self.parts.iter().find(|part| part.staged.is_empty()).map(|part| part.device.len())
    }

    pub(super) fn has_room(&mut self, pool: &SlotPool, count: usize) -> bool {
        self.lent.has_room(pool, count)
    }

    /// Gives the next part its staging slots.
    pub(super) fn stage(&mut self, slots: Vec<SlotRef>) {
        slots.iter().for_each(|slot| self.lent.add(slot));
        if let Some(part) = self.parts.iter_mut().find(|part| part.staged.is_empty()) {
            part.staged = slots;
        }
    }

    /// Returns the next copy, of a part that has its slots.
    pub(super) fn next(&self, transfer: TransferId) -> Option<(SlotCopy, Purpose)> {
        let index = self.parts.iter().position(|part| part.started < part.staged.len())?;
        let part = &self.parts[index];
        let (from, to) = (part.device[part.started].clone(), part.staged[part.started].clone());
        let (offset, len) = (part.offset, part.len);
        let copy = SlotCopy { token: 0, from, from_offset: offset, to, to_offset: offset, len };
        Some((copy, Purpose::Out { transfer, part: self.first_part + index as u64 }))
    }

    /// Records that the copy that `next` returned was started.
    pub(super) fn started(&mut self) {
        if let Some(part) = self.parts.iter_mut().find(|part| part.started < part.staged.len()) {
            part.started += 1;
            self.copying += 1;
        }
    }

    /// Records that a copy has ended.
    pub(super) fn copied(&mut self, part: u64) {
        self.copying -= 1;
        let index = part.checked_sub(self.first_part);
        if let Some(part) = index.and_then(|index| self.parts.get_mut(index as usize)) {
            part.copied += 1;
        }
    }

    /// Pushes copied blocks to the node.
    pub(super) fn forward<F: Fabric>(
        &mut self,
        transfer: TransferId,
        node: &mut TransferNode<F>,
        now: Instant,
    ) {
        while let Some(part) = self.parts.pop_front_if(|part| part.copied == part.device.len()) {
            self.first_part += 1;
            let StagedLayers { first_block, layers, staged: slots, .. } = part;
            let content = self.content;
            node.handle(Command::Push { transfer, content, first_block, slots, layers }, now);
        }
        if self.is_ended && self.parts.is_empty() && !self.is_stopped && !self.is_end_reported {
            self.is_end_reported = true;
            node.handle(Command::PushEnd { transfer }, now);
        }
    }

    /// Whether the transfer can still be stopped.
    pub(super) fn is_open(&self) -> bool {
        !self.is_stopped && self.pushed.is_none()
    }

    /// Drops the blocks that were not passed on and cancels the rest. Copies in flight continue into slots
    /// that no other transfer uses.
    pub(super) fn stop<F: Fabric>(&mut self, transfer: TransferId, node: &mut TransferNode<F>, now: Instant) {
        if !self.is_open() {
            return;
        }
        self.drop_parts();
        node.handle(Command::Cancel { transfer }, now);
    }

    fn drop_parts(&mut self) {
        self.is_stopped = true;
        self.first_part += self.parts.len() as u64;
        self.parts.clear();
    }

    /// Records that the node is done with the transfer.
    pub(super) fn pushed(&mut self, complete: bool) {
        self.pushed.get_or_insert(complete);
        if !self.is_end_reported {
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
