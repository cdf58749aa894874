//! The sending half: what is computed is pushed to whoever has reserved slots for it.

use std::time::Instant;

use dataplane_fabric::{Fabric, PeerId, Priority};
use dataplane_memory::Lease;

use super::{Notice, Outcome, TransferId, TransferNode};
use crate::budget::Budget;
use crate::config::PEER_BLOCKS_MAX;
use crate::metrics::TransferCounters;
use crate::outbound::{Outbound, Reservation, Reserved};
use crate::stages::StageClock;
use crate::wire::Message;

impl<F: Fabric> TransferNode<F> {
    pub(super) fn outbound_for(&mut self, transfer: TransferId, now: Instant) -> Option<&mut Outbound> {
        if self.cancelled.contains_key(&transfer) {
            self.notices.push(Notice::Pushed { transfer, complete: false });
            return None;
        }
        if self.outbound.get_mut(transfer).is_none() {
            let lease = Lease { owner: None, expires_at: now + self.limits.lease, held: Outbound::default() };
            if self.outbound.grant(transfer, lease).is_err() {
                self.notices.push(Notice::Pushed { transfer, complete: false });
                return None;
            }
        }
        self.outbound.get_mut(transfer).map(|lease| &mut lease.held)
    }

    /// Takes one message of a reservation, with the slots from block `offset` of the reservation on. A transfer that is
    /// reserved already keeps its slots, since they are being written to.
    pub(super) fn reserved(&mut self, transfer: TransferId, offset: usize, part: Reservation, now: Instant) {
        let (peer, terms) = (part.peer, part.terms);
        let is_last = offset + part.slots.len() == part.blocks;
        match self.reserve_outbound(transfer, offset, part, now) {
            Reserved::Whole => {
                if !terms.allow_direct() {
                    self.give_back_direct(transfer);
                }
                if let Some(lease) = self.outbound.get_mut(transfer) {
                    lease.held.reserved_at = Some(now);
                }
                self.active.insert(transfer);
            }
            // One answer to all messages of a reservation.
            Reserved::Refused if is_last => self.send(peer, Message::Finished { transfer }),
            Reserved::Refused | Reserved::InPart | Reserved::Repeated => {}
        }
    }

    fn reserve_outbound(
        &mut self,
        transfer: TransferId,
        offset: usize,
        part: Reservation,
        now: Instant,
    ) -> Reserved {
        let (peer, blocks) = (part.peer, part.blocks);
        // The owner was told of a cancelled one: it is not told again.
        if self.cancelled.contains_key(&transfer) {
            return Reserved::Refused;
        }
        if !self.outbound.get(transfer).is_some_and(|lease| lease.held.has_receiver()) {
            let others: usize = self.outbound.owned(&Some(peer)).map(Outbound::blocks_reserved).sum();
            if offset > 0 || others + blocks > PEER_BLOCKS_MAX {
                return Reserved::Refused;
            }
            let Some(outbound) = self.outbound_for(transfer, now) else { return Reserved::Refused };
            let is_announced = outbound.content.is_some();
            if !is_announced && self.outbound.count_owned(&Some(peer)) >= self.limits.transfers_max / 4 {
                // One peer may not fill the table with transfers that nobody here knows of.
                self.end_outbound(transfer, false);
                return Reserved::Refused;
            }
        }
        let Some(lease) = self.outbound.get_mut(transfer) else { return Reserved::Refused };
        let reserved = lease.held.reserve(offset, part);
        if matches!(reserved, Reserved::InPart | Reserved::Whole) {
            lease.owner = Some(peer);
            lease.expires_at = now + self.limits.lease;
        }
        reserved
    }

    /// Posts messages, writes of hand-offs, and moves.
    pub(super) fn post(&mut self, budget: &mut Budget) {
        self.reserve_waiting(budget);
        let mut peers = std::mem::take(&mut self.peers_scratch);
        peers.extend(self.peers.iter().filter(|(_, peer)| !peer.outbox.is_empty()).map(|(&id, _)| id));
        peers.sort_unstable();
        peers.drain(..).for_each(|peer| self.pump_outbox(peer));
        self.peers_scratch = peers;
        // A fabric that copies may not take enough in a round for both.
        if self.moves_first {
            self.write_moves();
        }
        self.write_hand_offs(budget);
        if !self.moves_first {
            self.write_moves();
        }
    }

    fn write_hand_offs(&mut self, budget: &mut Budget) {
        let mut turns = self.active_in_turn();
        for transfer in turns.drain(..) {
            let Some(lease) = self.outbound.get_mut(transfer) else { continue };
            let (before, was_abandoned) = (lease.held.bytes_posted, lease.held.is_abandoned);
            let was_spent = budget.is_spent();
            let clock = StageClock { now: self.now, times: &self.counters.stages };
            lease.held.write(&mut self.fabric, budget, &clock);
            TransferCounters::add(&self.counters.bytes_sent, lease.held.bytes_posted - before);
            let is_over = lease.held.is_abandoned && !was_abandoned;
            let number = lease.held.number.filter(|_| is_over);
            self.forget_sums(number);
            self.end_turn(transfer, budget.is_spent() && !was_spent);
        }
        self.transfers_scratch = turns;
    }

    fn write_moves(&mut self) {
        // A decode step waits for each hand-off: background moves to the same peer wait for them in turn.
        let busy: Vec<PeerId> = if self.mover.has_backlog() {
            self.active.iter().filter_map(|&id| self.outbound.get(id)?.owner).collect()
        } else {
            Vec::new()
        };
        let peers = &self.peers;
        self.mover.pump(&mut self.fabric, |peer, priority| {
            peers.get(&peer).is_some_and(|state| state.connected)
                && (priority == Priority::Urgent || !busy.contains(&peer))
        });
    }

    /// Sums what was written, announces it, and ends transfers.
    pub(super) fn announce(&mut self, budget: &mut Budget) {
        let mut turns = self.active_in_turn();
        for transfer in turns.drain(..) {
            let Some(lease) = self.outbound.get_mut(transfer) else {
                self.active.remove(&transfer);
                continue;
            };
            let finish_id = self.next_id;
            let held = &mut lease.held;
            let (before, was_posted, was_direct) = (held.bytes_summed, held.finish_posted, held.is_direct);
            let was_spent = budget.is_spent();
            let clock = StageClock { now: self.now, times: &self.counters.stages };
            held.announce(transfer, &mut self.fabric, finish_id, budget, &clock);
            TransferCounters::add(&self.counters.bytes_summed, held.bytes_summed - before);
            TransferCounters::add(&self.counters.sent_directly, u64::from(held.is_direct && !was_direct));
            if held.finish_posted && !was_posted {
                self.finishing.insert(finish_id, transfer);
                self.next_id += 1;
            }
            if !held.has_work() {
                self.active.remove(&transfer);
            }
            self.end_turn(transfer, budget.is_spent() && !was_spent);
        }
        self.transfers_scratch = turns;
    }

    /// Outbound transfers with something to do, each once.
    fn active_in_turn(&mut self) -> Vec<TransferId> {
        let mut order = std::mem::take(&mut self.transfers_scratch);
        order.extend(self.active.range(self.turn..));
        order.extend(self.active.range(..self.turn));
        order
    }

    /// The first transfer that spends a budget in a round is the last in the next, so that a large one keeps no small one waiting.
    fn end_turn(&mut self, transfer: TransferId, has_spent: bool) {
        if has_spent && self.next_turn == self.turn {
            self.next_turn = transfer.wrapping_add(1);
        }
    }

    pub(super) fn end_outbound(&mut self, transfer: TransferId, complete: bool) {
        if let Some(lease) = self.outbound.release(transfer) {
            self.active.remove(&transfer);
            self.forget_sums(lease.held.number);
            self.notices.push(Notice::Pushed { transfer, complete });
        }
    }

    pub(super) fn remember_cancelled(&mut self, transfer: TransferId, now: Instant) {
        if self.cancelled.len() < self.limits.transfers_max {
            self.cancelled.insert(transfer, now + self.limits.lease);
        }
    }

    pub(super) fn cancel(&mut self, transfer: TransferId, now: Instant) {
        let known = self.inbound.contains_key(&transfer) || self.outbound.get_mut(transfer).is_some();
        if known {
            TransferCounters::add(&self.counters.transfers_cancelled, 1);
        }
        if self.inbound.contains_key(&transfer) {
            self.end_inbound(transfer, Outcome::SenderStopped, false);
        } else {
            self.remember_cancelled(transfer, now);
        }
        self.abandon_outbound(transfer);
    }

    /// Sends no more of a transfer than was posted, and tells the receiver, if there is one.
    pub(super) fn abandon_outbound(&mut self, transfer: TransferId) {
        let Some(lease) = self.outbound.get_mut(transfer) else { return };
        lease.held.abandon();
        let (number, has_receiver) = (lease.held.number, lease.held.reservation.is_some());
        self.forget_sums(number);
        if has_receiver {
            self.active.insert(transfer);
        } else {
            self.end_outbound(transfer, false);
        }
    }
}
