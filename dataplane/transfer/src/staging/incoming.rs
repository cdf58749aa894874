//! One transfer that is received: verified bytes in staging slots are copied on, row by row if the sender
//! has only some of this node's heads, else all layers that arrived at once.

use dataplane_memory::{SlotCopy, SlotRef};

use super::copies::Purpose;
use crate::node::{Outcome, TransferId};
use crate::shard::SharedHeads;

/// Leading rows of one block: each number is at most the one before.
#[derive(Debug, Clone, Copy, Default)]
struct Progress {
    verified: u32,
    started: u32,
    copied: u32,
}

#[derive(Debug)]
pub(super) struct Incoming {
    device: Vec<SlotRef>,
    staged: Vec<SlotRef>,
    blocks: Vec<Progress>,
    /// Rows of a block.
    rows: u32,
    cut: Option<SharedHeads>,
    /// Copies in flight, also those of blocks that were dropped.
    copying: usize,
    /// Number of leading blocks without a failed copy.
    good: usize,
    /// The block to check next.
    cursor: usize,
    outcome: Option<Outcome>,
}

impl Incoming {
    pub(super) fn new(device: Vec<SlotRef>, staged: Vec<SlotRef>, rows: u32) -> Self {
        let count = device.len();
        Self {
            device,
            staged,
            blocks: vec![Progress::default(); count],
            rows,
            cut: None,
            copying: 0,
            good: count,
            cursor: 0,
            outcome: None,
        }
    }

    pub(super) fn staged(&self) -> Vec<SlotRef> {
        self.staged.clone()
    }

    /// Records the number of verified layers of each block.
    pub(super) fn record_verified(&mut self, cut: SharedHeads, layers: &[u16]) {
        if self.has_arrived() {
            return;
        }
        self.cut = Some(cut);
        for (block, &layers) in self.blocks.iter_mut().zip(layers) {
            block.verified = u32::from(layers) * cut.rows_per_layer();
        }
        self.cursor = 0;
    }

    /// Records the bytes shared with the sender, if no round has recorded them.
    pub(super) fn agreed(&mut self, cut: SharedHeads) {
        self.cut.get_or_insert(cut);
    }

    /// Whether the node is done with the transfer.
    pub(super) fn has_arrived(&self) -> bool {
        self.outcome.is_some()
    }

    /// Records that the node is done with the transfer: the first `count` blocks are verified, the others
    /// are dropped.
    pub(super) fn arrived(&mut self, count: usize, outcome: Outcome) {
        self.device.truncate(count);
        self.staged.truncate(count);
        self.blocks.truncate(count);
        self.blocks.iter_mut().for_each(|block| block.verified = self.rows);
        self.good = if self.cut.is_some() { self.good.min(count) } else { 0 };
        self.cursor = 0;
        self.outcome = Some(outcome);
    }

    /// Returns the next copy.
    pub(super) fn next(&mut self, transfer: TransferId) -> Option<(SlotCopy, Purpose)> {
        let cut = self.cut?;
        while self.cursor < self.good {
            let Progress { verified, started, .. } = self.blocks[self.cursor];
            if started < verified {
                let (row_bytes, stride) = cut.row_here();
                let rows = if row_bytes == stride { verified - started } else { 1 };
                let offset = cut.offset_here(0) + started * stride as u32;
                let len = rows * row_bytes as u32;
                let (from, to) = (self.staged[self.cursor].clone(), self.device[self.cursor].clone());
                let copy = SlotCopy { token: 0, from, from_offset: offset, to, to_offset: offset, len };
                return Some((copy, Purpose::In { transfer, block: self.cursor as u32, rows }));
            }
            self.cursor += 1;
        }
        None
    }

    /// Records that the copy that `next` returned was started.
    pub(super) fn started(&mut self, purpose: Purpose) {
        let Purpose::In { block, rows, .. } = purpose else { return };
        self.blocks[block as usize].started += rows;
        self.copying += 1;
    }

    /// Records that a copy has ended, successfully or not.
    pub(super) fn copied(&mut self, block: u32, rows: u32) {
        self.copying -= 1;
        if let Some(block) = self.blocks.get_mut(block as usize) {
            block.copied += rows;
        }
    }

    pub(super) fn failed(&mut self, block: u32) {
        self.good = self.good.min(block as usize);
    }

    pub(super) fn is_over(&self) -> bool {
        let is_copied = |block: &Progress| block.copied == self.rows;
        self.outcome.is_some() && self.copying == 0 && self.blocks[..self.good].iter().all(is_copied)
    }

    /// Returns the device slots that hold verified blocks, and the outcome of the transfer.
    pub(super) fn into_end(mut self) -> (Vec<SlotRef>, Outcome) {
        let outcome = if self.good < self.blocks.len() { Some(Outcome::DeviceFailed) } else { self.outcome };
        self.device.truncate(self.good);
        (self.device, outcome.unwrap_or(Outcome::DeviceFailed))
    }
}
