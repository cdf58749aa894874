//! The receiving half: slots are reserved; pieces are announced, land and are verified.

use std::time::Instant;

use dataplane_fabric::{Fabric, PeerId};
use dataplane_memory::{SlabKind, SlotRef};

use super::peers::OUTBOX_MAX;
use super::quarantine::{Quarantined, ReleaseOutcome};
use super::{ACKNOWLEDGE_WITHIN, Notice, Outcome, TransferId, TransferNode};
use crate::budget::Budget;
use crate::config::BLOCKS_MAX;
use crate::inbound::{Inbound, PartOutcome};
use crate::metrics::TransferCounters;
use crate::stages::Stage;
use crate::timers::Timer;
use crate::wire::Message;

/// Bytes of a budget that naming one slot to a peer costs: about the bytes that are checksummed in the same
/// time (21 ns).
const NAME_COST: usize = 128;

impl<F: Fabric> TransferNode<F> {
    pub(super) fn expect(
        &mut self,
        transfer: TransferId,
        address: &str,
        content: [u8; 16],
        first_block: u32,
        slots: Vec<SlotRef>,
        deadline: Instant,
    ) {
        let room = self.inbound.len() < self.limits.transfers_max
            && slots.len() <= BLOCKS_MAX
            && self.quarantine.len() < self.limits.transfers_max;
        let peer = match self.peer_at(address) {
            Ok(peer) => peer,
            Err(unreachable) => {
                let outcome = unreachable.as_arrival();
                self.notices.push(Notice::Arrived { transfer, slots: Vec::new(), outcome });
                return;
            }
        };
        // The sender of an earlier transfer of this id was told to stop, and has not answered yet.
        let is_ending = self.quarantine.contains(peer, transfer);
        let is_moving = self.peers.get(&peer).is_some_and(|state| state.outbox.len() < OUTBOX_MAX);
        let Some(tag) = (room && !is_ending && is_moving).then(|| self.free_tag()).flatten() else {
            if !is_ending {
                self.send(peer, Message::Cancel { transfer });
            }
            self.notices.push(Notice::Arrived { transfer, slots: Vec::new(), outcome: Outcome::Refused });
            return;
        };
        self.tags.insert(tag, transfer);
        let number = self.direct_number(&slots);
        let mut inbound = Inbound::new(peer, tag, content, first_block, slots, self.layout.layers, self.now);
        inbound.number = number;
        self.inbound.insert(transfer, inbound);
        self.timers.set(Timer::Arrival(transfer), deadline);
        if self.peers.get(&peer).is_some_and(|peer| peer.terms.is_some()) {
            self.unreserved.push_back(transfer);
        }
    }

    pub(super) fn free_tag(&mut self) -> Option<u16> {
        for _ in 0..=u16::MAX {
            self.next_tag = self.next_tag.wrapping_add(1);
            if !self.tags.contains_key(&self.next_tag) {
                return Some(self.next_tag);
            }
        }
        None
    }

    /// Tells senders the slots of expected transfers, until the budget is spent.
    pub(super) fn reserve_waiting(&mut self, budget: &mut Budget) {
        while !budget.is_spent()
            && let Some(transfer) = self.unreserved.pop_front()
        {
            budget.spend(NAME_COST * self.inbound.get(&transfer).map_or(0, |inbound| inbound.slots.len()));
            self.reserve(transfer);
        }
    }

    fn reserve(&mut self, transfer: TransferId) {
        let Some(inbound) = self.inbound.get_mut(&transfer).filter(|inbound| !inbound.is_reserved()) else {
            return;
        };
        let Some(terms) = self.peers.get(&inbound.peer).and_then(|peer| peer.terms) else { return };
        let is_direct = inbound.number.is_some();
        let slab = if is_direct { SlabKind::Device } else { SlabKind::Host };
        let is_shown = self.fabric.is_shown_to(inbound.peer, slab);
        if is_direct && !(is_shown && terms.allow_direct()) {
            tracing::debug!(transfer, peer = ?inbound.peer, is_shown, "transfer: no direct transfer; received into staging slots");
            return self.returned_expectations.push(transfer);
        }
        if !is_shown && !inbound.slots.is_empty() {
            let peer = inbound.peer;
            tracing::warn!(
                transfer,
                ?peer,
                "transfer: no transport to the sender can write this node's host memory; see transfer.transport on both sides"
            );
            return self.end_inbound(transfer, Outcome::Refused, false);
        }
        TransferCounters::add(&self.counters.received_directly, u64::from(is_direct));
        inbound.reserve(terms, self.now);
        let waited = self.now.saturating_duration_since(inbound.since);
        self.counters.stages.observe(Stage::Reserve, waited);
        let (peer, tag, content, first_block) =
            (inbound.peer, inbound.tag, inbound.content, inbound.first_block);
        let slots = inbound.slot_names();
        let (blocks, offset) = (slots.len() as u32, 0);
        let reserve = Message::Reserve { transfer, tag, content, first_block, blocks, offset, slab, slots };
        self.send(peer, reserve);
    }

    /// Ends an inbound transfer. `writes_over`: whether the sender can no longer write to its slots.
    pub(super) fn end_inbound(&mut self, transfer: TransferId, outcome: Outcome, writes_over: bool) {
        let Some(mut inbound) = self.inbound.remove(&transfer) else { return };
        self.ended_now.extend(inbound.view().map(|(cut, _)| (transfer, cut)));
        self.tags.remove(&inbound.tag);
        self.timers.cancel(Timer::Arrival(transfer));
        self.drop_waiting_sums(inbound.number);
        self.returned_expectations.retain(|&returned| returned != transfer);
        let writes_over = writes_over || inbound.ending().is_some();
        let granted = inbound.take_grants();
        let unverified = inbound.slots.split_off(inbound.verified_blocks);
        let peer = inbound.peer;
        if inbound.is_reserved() && !unverified.is_empty() {
            self.quarantine.insert(peer, transfer, Quarantined { slots: unverified, granted });
            self.timers.set(Timer::Acknowledgement(peer, transfer), self.now + ACKNOWLEDGE_WITHIN);
        }
        if writes_over {
            self.leave_quarantine(peer, transfer);
        } else {
            self.send(peer, Message::Cancel { transfer });
        }
        TransferCounters::add(&self.counters.blocks_received, inbound.slots.len() as u64);
        if outcome == Outcome::Complete {
            let took = self.now.saturating_duration_since(inbound.since);
            self.counters.stages.observe(Stage::Whole, took);
        }
        TransferCounters::add(
            match outcome {
                Outcome::Complete => &self.counters.transfers_completed,
                _ => &self.counters.transfers_incomplete,
            },
            1,
        );
        self.notices.push(Notice::Arrived { transfer, slots: inbound.slots, outcome });
    }

    /// Releases the slots of a transfer that the peer has stopped writing, or can no longer write. If
    /// writes of it are still in progress, the slots are kept until its connection is over.
    pub(super) fn leave_quarantine(&mut self, peer: PeerId, transfer: TransferId) {
        self.timers.cancel(Timer::Acknowledgement(peer, transfer));
        if self.quarantine.leave(peer, transfer) == ReleaseOutcome::Free {
            return;
        }
        if self.peers.contains_key(&peer) {
            tracing::warn!(
                ?peer,
                transfer,
                "transfer: a peer wrote to a slot that it has no grant for; closing the connection"
            );
            self.fabric.disconnect(peer);
        } else {
            self.quarantine.peer_down(peer);
        }
    }

    pub(super) fn landed(&mut self, from: PeerId, value: u32) {
        let Some(&transfer) = self.tags.get(&((value >> 16) as u16)) else { return };
        let Some(inbound) = self.inbound.get_mut(&transfer).filter(|inbound| inbound.peer == from) else {
            return;
        };
        let landing = inbound.landed(transfer, value as u16, self.now);
        self.account_part(transfer, landing);
    }

    fn account_part(&mut self, transfer: TransferId, landing: PartOutcome) {
        self.landed.extend(landing.wanted);
        if let Some(waited) = self.inbound.get_mut(&transfer).and_then(|inbound| inbound.first_part(self.now))
        {
            self.counters.stages.observe(Stage::FirstPart, waited);
        }
        if landing.starts_verifying {
            self.verifying.push_back(transfer);
        }
        self.account_verification(transfer, landing.failures);
    }

    /// Verifies arrived parts, transfer by transfer: an unfinished transfer continues in the next round.
    pub(super) fn verify(&mut self, budget: &mut Budget) {
        while let Some(transfer) = self.verifying.front().copied().filter(|_| !budget.is_spent()) {
            let Some(inbound) = self.inbound.get_mut(&transfer) else {
                self.verifying.pop_front();
                continue;
            };
            let (now, stages) = (self.now, &self.counters.stages);
            let over = |since| stages.observe(Stage::Verify, now.saturating_duration_since(since));
            let failures = inbound.verify(budget, over);
            // A transfer without parts left is done; otherwise the budget is spent.
            self.verifying.pop_front();
            if inbound.has_parts() {
                self.verifying.push_back(transfer);
            }
            self.account_verification(transfer, failures);
        }
    }

    /// Ends the sender's access. The transfer stays open while parts are verified, since they may complete it.
    pub(super) fn writes_ended(&mut self, transfer: TransferId, outcome: Outcome) {
        match self.inbound.get_mut(&transfer).filter(|inbound| inbound.is_verifying()) {
            Some(inbound) => inbound.writes_over(outcome),
            None => self.end_inbound(transfer, outcome, true),
        }
    }

    pub(super) fn account_verification(&mut self, transfer: TransferId, failures: u64) {
        if failures > 0 {
            TransferCounters::add(&self.counters.checksum_failures, failures);
            tracing::warn!(transfer, failures, "transfer: checksum mismatch, the blocks will be recomputed");
        }
        let Some(inbound) = self.inbound.get(&transfer) else { return };
        if inbound.is_complete() {
            self.end_inbound(transfer, Outcome::Complete, true);
        } else if let Some(outcome) = inbound.ending().filter(|_| !inbound.is_verifying()) {
            let outcome = if inbound.corrupted { Outcome::Corrupted } else { outcome };
            self.end_inbound(transfer, outcome, true);
        }
    }

    pub(super) fn announced(&mut self, from: PeerId, message: Message) -> bool {
        let Message::Announce { transfer, sequence, first_layer, layers, first_block, sums } = message else {
            return false;
        };
        let Some(inbound) = self.inbound.get_mut(&transfer).filter(|inbound| inbound.peer == from) else {
            return true; // Of a transfer that we gave up.
        };
        let landing =
            inbound.announce(transfer, sequence, (first_layer, layers), first_block, sums, self.now);
        let is_sensible = landing.is_some();
        self.account_part(transfer, landing.unwrap_or_default());
        is_sensible
    }
}
