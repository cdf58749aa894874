//! Hand-offs of blocks in a device's memory over a fabric, or with checksums, that need them in host memory.
//!
//! [`Staging`] sits between an owner and its [`TransferNode`]: it takes the same commands and gives the
//! same notices, with slots in device memory, and gives the node slots of a pinned host pool instead.
//!
//! ```text
//! Push(device slots)    ─ copy, piece by piece ─▶ Push(host slots)
//! Arrived(device slots) ◀─ copy, as verified ──── Expect(host slots)
//! ```
//!
//! The first piece of a push is in transit while the next is copied, and layers that arrive are copied
//! while later ones are in transit. No block is copied before its receiver has reserved it, so that staging
//! slots are held by transfers that make progress. Blocks copied out of a staging slot were verified there,
//! by the checksums of the sender.
//!
//! Invariants: a staging slot is free again only when neither a copy nor the fabric nor a peer can access
//! it: the copier holds references to both ends, the node to the slots that a peer was told of. Every
//! transfer ends with one notice, and not before the last of its copies. At most
//! [`StagingLimits::inbound_slots_max`] staging slots wait for peers, so that the two directions of two
//! nodes cannot wait for each other; at most [`StagingLimits::outbound_slots_each`] belong to one transfer
//! that is sent, and a piece gets all of its slots at once, so that two transfers cannot wait for each
//! other either.
//!
//! Driven by the node's thread ([`crate::TransferService::start_staged`]); nothing blocks. While
//! [`Staging::in_flight`] is not zero, it must be polled: the completion of a copy is not signalled. Per
//! block and piece: one copy and a few table steps.
//!
//! A hand-off is staged only when it cannot be direct: without a
//! [`Checksummer`](dataplane_memory::Checksummer), over connections that do not reach the device, or with a
//! peer that has other heads. The last two are known once the peer has greeted, or, for a push, once its
//! receiver has reserved it; the node then gives back the push, or the slots of the expectation, and the
//! hand-off is staged.

mod copies;
mod incoming;
mod outgoing;
mod schedule;
mod slot_allotment;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use dataplane_fabric::Fabric;
use dataplane_memory::{Copier, DeviceError, SlotPool, SlotRef};

use crate::metrics::TransferCounters;
use crate::node::{Command, Notice, Outcome, ReturnedExpectation, ReturnedPush, TransferId, TransferNode};
use crate::outbound::Pushed;
use crate::shard::PieceLayout;
use copies::{Copies, Purpose};
use incoming::Incoming;
use outgoing::Outgoing;
use slot_allotment::SlotAllotment;

/// Bounds of a [`Staging`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StagingLimits {
    /// Most staging slots that wait for peers' writes. An `Expect` beyond it is refused. Must be fewer than
    /// the pool has, or nothing can be sent while they wait.
    pub inbound_slots_max: usize,
    /// Most staging slots of one transfer that is sent; further blocks wait.
    pub outbound_slots_each: usize,
    /// Blocks that are pushed together once all of them are copied; at most as many as a transfer has slots.
    pub piece_blocks: usize,
    /// Most copies in flight.
    pub copies_max: usize,
}

impl StagingLimits {
    /// Returns limits that give half of `pool` to each direction, and an eighth to one transfer that is sent.
    #[must_use]
    pub fn of(pool: &SlotPool) -> Self {
        let slots = pool.slot_count();
        let (inbound_slots_max, outbound_slots_each) = (slots / 2, (slots / 8).max(1));
        Self { inbound_slots_max, outbound_slots_each, piece_blocks: 8, copies_max: 256 }
    }
}

/// Transfers of one node from and to device memory. See the module's documentation.
#[derive(Debug)]
pub struct Staging<C> {
    copies: Copies<C>,
    pool: Arc<SlotPool>,
    limits: StagingLimits,
    outgoing: BTreeMap<TransferId, Outgoing>,
    /// The outgoing transfers with work to do. A round costs nothing for a transfer that no peer has reserved.
    active: BTreeSet<TransferId>,
    incoming: BTreeMap<TransferId, Incoming>,
    lent_inbound: SlotAllotment,
    lent_outbound: SlotAllotment,
    /// The outgoing transfer that is served first in the next round.
    turn: TransferId,
    /// Notices of commands that were refused before they reached the node.
    refused: Vec<Notice>,
    /// Buffer kept for its capacity.
    done: Vec<(Purpose, Result<(), DeviceError>)>,
    notices: Vec<Notice>,
    transfers_scratch: Vec<TransferId>,
}

fn is_on_device(slot: &SlotRef) -> bool {
    slot.slab().device().is_some()
}

impl<C: Copier> Staging<C> {
    /// Makes a staging through `pool`: host slots as large as the device's, in a slab that the node's
    /// fabric lets its peers write. No other user may take slots from the pool while the staging exists.
    #[must_use]
    pub fn new(copier: C, pool: Arc<SlotPool>, limits: StagingLimits) -> Self {
        let slots = pool.slot_count();
        let outbound = slots.saturating_sub(limits.inbound_slots_max).max(1);
        let outbound_slots_each = limits.outbound_slots_each.clamp(1, outbound);
        // A piece gets all of its slots at once, so its size is limited by the slots of a transfer.
        let piece_blocks = limits.piece_blocks.clamp(1, outbound_slots_each);
        let limits = StagingLimits { outbound_slots_each, piece_blocks, ..limits };
        Self {
            copies: Copies::new(copier, limits.copies_max),
            pool,
            limits,
            outgoing: BTreeMap::new(),
            active: BTreeSet::new(),
            incoming: BTreeMap::new(),
            lent_inbound: SlotAllotment::new(limits.inbound_slots_max.min(slots)),
            lent_outbound: SlotAllotment::new(outbound),
            turn: 0,
            refused: Vec::new(),
            done: Vec::with_capacity(limits.copies_max),
            notices: Vec::new(),
            transfers_scratch: Vec::new(),
        }
    }

    /// Returns the copier, for inspection.
    pub fn copier_mut(&mut self) -> &mut C {
        &mut self.copies.copier
    }

    /// Returns the number of copies in flight: while it is not zero, the staging must be polled.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.copies.copier.in_flight()
    }

    /// Whether nothing is staged or copied; checked for leaks.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        let is_empty = self.outgoing.is_empty() && self.incoming.is_empty();
        is_empty && self.copies.is_empty() && self.refused.is_empty()
    }

    /// Whether reserved blocks wait for a staging slot or for the copier: poll again soon.
    #[must_use]
    pub fn has_backlog(&self) -> bool {
        self.in_flight() > 0 || !self.active.is_empty() || !self.refused.is_empty()
    }

    /// Executes one command, or passes it on to the node if it concerns host slots only.
    pub fn handle<F: Fabric>(&mut self, node: &mut TransferNode<F>, command: Command, now: Instant) {
        match command {
            Command::Expect { transfer, .. }
                if self.incoming.contains_key(&transfer) || node.expects(transfer) =>
            {
                let (slots, outcome) = (Vec::new(), Outcome::Duplicate);
                self.refused.push(Notice::Arrived { transfer, slots, outcome });
            }
            Command::Expect { transfer, address, content, first_block, slots, deadline }
                if slots.iter().any(is_on_device) && !node.receives_directly(&slots) =>
            {
                // Peers that write to another host slab would overwrite its slots of the same numbers.
                let is_shown = node.shows_pool(&self.pool);
                let staged = is_shown.then(|| self.stage_in(transfer, slots, node.layout())).flatten();
                let Some(incoming) = staged else {
                    tracing::warn!(
                        transfer,
                        "staging: transfer refused: too few free staging slots, or peers cannot write to them"
                    );
                    node.handle(Command::Decline { transfer, address }, now);
                    let outcome = Outcome::Refused;
                    self.refused.push(Notice::Arrived { transfer, slots: Vec::new(), outcome });
                    return;
                };
                let slots = incoming.staged();
                self.incoming.insert(transfer, incoming);
                TransferCounters::add(&node.counters().received_staged, 1);
                node.handle(
                    Command::Expect { transfer, address, content, first_block, slots, deadline },
                    now,
                );
                self.update_verified(node, transfer);
            }
            Command::Push { transfer, content, first_block, slots, layers }
                if self.outgoing.contains_key(&transfer)
                    || (slots.iter().any(is_on_device) && !node.sends_directly(transfer, &slots)) =>
            {
                self.stage_out(node, transfer, content, [Pushed { first_block, slots, layers }], now);
            }
            Command::PushEnd { transfer } if self.outgoing.contains_key(&transfer) => {
                if let Some(outgoing) = self.outgoing.get_mut(&transfer) {
                    outgoing.end();
                    self.active.insert(transfer);
                }
            }
            Command::Cancel { transfer } => match self.outgoing.get_mut(&transfer) {
                Some(outgoing) if outgoing.is_open() => {
                    outgoing.stop(transfer, node, now);
                    self.active.insert(transfer);
                }
                _ => node.handle(Command::Cancel { transfer }, now),
            },
            other => node.handle(other, now),
        }
    }

    fn stage_out<F: Fabric>(
        &mut self,
        node: &mut TransferNode<F>,
        transfer: TransferId,
        content: [u8; 16],
        pushed: impl IntoIterator<Item = Pushed>,
        now: Instant,
    ) {
        let StagingLimits { outbound_slots_each, piece_blocks, .. } = self.limits;
        let outgoing = self.outgoing.entry(transfer).or_insert_with(|| {
            TransferCounters::add(&node.counters().sent_staged, 1);
            Outgoing::new(content, outbound_slots_each)
        });
        for Pushed { first_block, slots, layers } in pushed {
            // The node learns of the transfer and its content, which starts its lease; it learns of blocks
            // when they are staged.
            let (slots_none, its_layers) = (Vec::new(), layers.clone());
            let told =
                Command::Push { transfer, content, first_block, slots: slots_none, layers: its_layers };
            node.handle(told, now);
            outgoing.push(first_block, slots, layers, node.layout(), piece_blocks);
        }
        if let Some(wanted) = node.blocks_wanted(transfer) {
            outgoing.want(wanted);
            self.active.insert(transfer);
        }
    }

    /// Stages the transfers that the node cannot send or receive directly.
    fn take_returned<F: Fabric>(&mut self, node: &mut TransferNode<F>, now: Instant) {
        for ReturnedExpectation { transfer, slots } in node.take_returned_expectations() {
            let is_shown = node.shows_pool(&self.pool);
            let staged = is_shown.then(|| self.stage_in(transfer, slots, node.layout())).flatten();
            match staged {
                Some(incoming) => {
                    TransferCounters::add(&node.counters().received_staged, 1);
                    node.receive_into(transfer, incoming.staged());
                    self.incoming.insert(transfer, incoming);
                }
                None => {
                    tracing::warn!(
                        transfer,
                        "staging: transfer refused: too few free staging slots, or peers cannot write to them"
                    );
                    node.refuse_expectation(transfer);
                }
            }
        }
        let returned: Vec<ReturnedPush> = node.take_returned().collect();
        for ReturnedPush { transfer, content, pushed, is_ended } in returned {
            self.stage_out(node, transfer, content, pushed, now);
            if let Some(outgoing) = self.outgoing.get_mut(&transfer).filter(|_| is_ended) {
                outgoing.end();
                self.active.insert(transfer);
            }
        }
    }

    /// Allocates staging slots for all of `slots`; `None` when there are not enough, or the transfer is known.
    fn stage_in(
        &mut self,
        transfer: TransferId,
        slots: Vec<SlotRef>,
        layout: &PieceLayout,
    ) -> Option<Incoming> {
        let has_room = self.lent_inbound.has_room(&self.pool, slots.len());
        let fits = has_room && slots.iter().all(is_on_device);
        if !fits || self.incoming.contains_key(&transfer) {
            return None;
        }
        let staged: Option<Vec<SlotRef>> = slots.iter().map(|_| self.pool.acquire()).collect();
        let staged = staged?;
        staged.iter().for_each(|slot| self.lent_inbound.add(slot));
        Some(Incoming::new(slots, staged, u32::from(layout.layers) * layout.rows))
    }

    /// Makes progress with the copies and with the node. Returns the number of events handled; notices are appended.
    pub fn poll<F: Fabric>(
        &mut self,
        node: &mut TransferNode<F>,
        now: Instant,
        notices: &mut Vec<Notice>,
    ) -> usize {
        notices.append(&mut self.refused);
        let copied = self.reap(node, now);
        for &transfer in &self.active {
            if let Some(outgoing) = self.outgoing.get_mut(&transfer) {
                outgoing.forward(transfer, node, now);
            }
        }
        let mut own = std::mem::take(&mut self.notices);
        let moved = node.poll(now, &mut own);
        for (transfer, cut) in node.ended_now() {
            if let Some(incoming) = self.incoming.get_mut(transfer) {
                incoming.agreed(*cut);
            }
        }
        own.drain(..).for_each(|notice| notices.extend(self.digest(notice)));
        self.notices = own;
        self.take_returned(node, now);
        for &transfer in node.reserved_now() {
            if let (Some(outgoing), Some(wanted)) =
                (self.outgoing.get_mut(&transfer), node.blocks_wanted(transfer))
            {
                outgoing.want(wanted);
                self.active.insert(transfer);
            }
        }
        if moved > 0 {
            let mut transfers = std::mem::take(&mut self.transfers_scratch);
            transfers.extend(self.incoming.keys());
            transfers.drain(..).for_each(|transfer| self.update_verified(node, transfer));
            self.transfers_scratch = transfers;
        }
        let impossible = self.start_copies();
        self.copies.copier.flush();
        impossible.iter().for_each(|&purpose| self.copy_failed(purpose, node, now));
        self.tell(notices);
        copied + moved + impossible.len()
    }

    /// Appends notices of transfers that are over.
    fn tell(&mut self, notices: &mut Vec<Notice>) {
        let arrived = self.incoming.extract_if(.., |_, incoming| incoming.is_over());
        notices.extend(arrived.map(|(transfer, incoming)| {
            let (slots, outcome) = incoming.into_end();
            Notice::Arrived { transfer, slots, outcome }
        }));
        let Self { outgoing, active, .. } = self;
        active.retain(|&transfer| {
            let Some(of_transfer) = outgoing.get(&transfer) else { return false };
            if of_transfer.is_over() {
                notices.push(Notice::Pushed { transfer, complete: of_transfer.is_complete() });
                outgoing.remove(&transfer);
                return false;
            }
            of_transfer.has_work()
        });
    }

    /// Handles a notice of the node; returns it if its transfer is not staged.
    fn digest(&mut self, notice: Notice) -> Option<Notice> {
        match notice {
            Notice::Arrived { transfer, slots, outcome } => match self.incoming.get_mut(&transfer) {
                Some(incoming) if !incoming.has_arrived() => {
                    incoming.arrived(slots.len(), outcome);
                    None
                }
                _ => Some(Notice::Arrived { transfer, slots, outcome }),
            },
            Notice::Pushed { transfer, complete } => match self.outgoing.get_mut(&transfer) {
                Some(outgoing) => {
                    outgoing.pushed(complete);
                    self.active.insert(transfer);
                    None
                }
                None => Some(Notice::Pushed { transfer, complete }),
            },
        }
    }

    fn update_verified<F: Fabric>(&mut self, node: &TransferNode<F>, transfer: TransferId) {
        let view = node.inbound_view(transfer);
        if let Some((incoming, (cut, layers))) = self.incoming.get_mut(&transfer).zip(view) {
            incoming.record_verified(cut, layers);
        }
    }
}
