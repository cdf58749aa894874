//! Order of copies, and the handling of completed copies.

use std::time::Instant;

use dataplane_fabric::Fabric;
use dataplane_memory::{Copier, SlotRef};

use super::Staging;
use super::copies::{Purpose, Started};
use crate::node::{TransferId, TransferNode};

impl<C: Copier> Staging<C> {
    /// Takes the copies that have completed.
    pub(super) fn reap<F: Fabric>(&mut self, node: &mut TransferNode<F>, now: Instant) -> usize {
        let mut done = std::mem::take(&mut self.done);
        self.copies.reap(&mut done);
        let count = done.len();
        for (purpose, result) in done.drain(..) {
            if let Err(error) = result {
                tracing::warn!(%error, ?purpose, "staging: a copy failed, the blocks will be recomputed");
                self.copy_failed(purpose, node, now);
            }
            match purpose {
                Purpose::Out { transfer, part } => {
                    if let Some(outgoing) = self.outgoing.get_mut(&transfer) {
                        outgoing.copied(part);
                        self.active.insert(transfer);
                    }
                }
                Purpose::In { transfer, block, rows } => {
                    if let Some(incoming) = self.incoming.get_mut(&transfer) {
                        incoming.copied(block, rows);
                    }
                }
            }
        }
        self.done = done;
        count
    }

    pub(super) fn copy_failed<F: Fabric>(
        &mut self,
        purpose: Purpose,
        node: &mut TransferNode<F>,
        now: Instant,
    ) {
        match purpose {
            Purpose::Out { transfer, .. } => {
                if let Some(outgoing) = self.outgoing.get_mut(&transfer) {
                    outgoing.stop(transfer, node, now);
                    self.active.insert(transfer);
                }
            }
            Purpose::In { transfer, block, .. } => {
                if let Some(incoming) = self.incoming.get_mut(&transfer) {
                    incoming.failed(block);
                }
            }
        }
    }

    /// Starts copies until the copier is full: first those of received blocks, since they free staging
    /// slots, then those to be sent, round robin over transfers. Returns the purposes of copies that the
    /// copier can never do; without an error there are none.
    pub(super) fn start_copies(&mut self) -> Vec<Purpose> {
        let mut impossible = Vec::new();
        for (&transfer, incoming) in &mut self.incoming {
            while let Some((copy, purpose)) = incoming.next(transfer) {
                match self.copies.start(copy, purpose) {
                    Started::Yes => incoming.started(purpose),
                    Started::Full => return impossible,
                    Started::Never => {
                        impossible.push(purpose);
                        break;
                    }
                }
            }
        }
        let mut order = std::mem::take(&mut self.transfers_scratch);
        order.extend(self.active.range(self.turn..));
        order.extend(self.active.range(..self.turn));
        for transfer in order.drain(..) {
            if !self.start_outgoing(transfer, &mut impossible) {
                break;
            }
        }
        self.transfers_scratch = order;
        impossible
    }

    /// Starts the copies of one transfer. Returns false when the copier is full or staging slots are short:
    /// no later transfer may overtake this one.
    fn start_outgoing(&mut self, transfer: TransferId, impossible: &mut Vec<Purpose>) -> bool {
        let Some(outgoing) = self.outgoing.get_mut(&transfer) else { return true };
        loop {
            if let Some((copy, purpose)) = outgoing.next(transfer) {
                match self.copies.start(copy, purpose) {
                    Started::Yes => outgoing.started(),
                    Started::Full => return false,
                    Started::Never => {
                        impossible.push(purpose);
                        return true;
                    }
                }
                continue;
            }
            let Some(count) = outgoing.wants_slots().filter(|&count| outgoing.has_room(&self.pool, count))
            else {
                return true;
            };
            self.turn = transfer;
            if !self.lent_outbound.has_room(&self.pool, count) {
                return false;
            }
            let staged: Option<Vec<SlotRef>> = (0..count).map(|_| self.pool.acquire()).collect();
            let Some(staged) = staged else { return false };
            staged.iter().for_each(|slot| self.lent_outbound.add(slot));
            outgoing.stage(staged);
            self.turn = transfer.wrapping_add(1);
        }
    }
}
