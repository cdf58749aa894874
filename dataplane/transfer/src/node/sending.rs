//! The sending half: computed blocks are pushed to the peer that has reserved slots for them.

use std::ops::Bound;
use std::time::Instant;

use dataplane_fabric::Fabric;
use dataplane_memory::Lease;

use super::{Notice, Outcome, TransferId, TransferNode};
use crate::budget::Budget;
use crate::config::PEER_BLOCKS_MAX;
use crate::metrics::TransferCounters;
use crate::outbound::{Outbound, Reservation, Reserved};
use crate::stages::StageClock;
use crate::wire::Message;

/// Most transfers served in one round: a transfer whose peer accepts nothing spends no budget.
const TURNS_MAX: usize = 256;

impl<F: Fabric> TransferNode<F> {
    pub(super) fn outbound_for(&mut self, transfer: TransferId, now: Instant) -> Option<&mut Outbound> {
        if self.cancelled.contains(transfer) {
            self.notices.push(Notice::Pushed { transfer, complete: false });
            return None;
        }
        if self.outbound.get(transfer).is_none() {
            let lease = Lease { owner: None, expires_at: now + self.limits.lease, held: Outbound::default() };
            if self.outbound.grant(transfer, lease).is_err() {
                self.notices.push(Notice::Pushed { transfer, complete: false });
                return None;
            }
        }
        self.outbound.held_mut(transfer)
    }

    /// Takes one message of a reservation, whose slots begin at block `offset` of the reservation. A
    /// transfer that is reserved already keeps its slots, since they are being written to.
    pub(super) fn reserved(&mut self, transfer: TransferId, offset: usize, part: Reservation, now: Instant) {
        let peer = part.peer;
        let is_last = offset + part.slots.len() == part.blocks;
        match self.reserve_outbound(transfer, offset, part, now) {
            Reserved::Whole => {
                self.return_push_if_not_direct(transfer);
                self.active.insert(transfer);
                self.reserved_now.push(transfer);
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
        // The owner was notified of a cancelled transfer already.
        if self.cancelled.contains(transfer) {
            return Reserved::Refused;
        }
        if !self.outbound.get(transfer).is_some_and(|lease| lease.held.has_receiver()) {
            let others = self.peers.get(&peer).map_or(0, |state| state.blocks_reserved);
            if offset > 0 || others + blocks > PEER_BLOCKS_MAX {
                return Reserved::Refused;
            }
            let Some(outbound) = self.outbound_for(transfer, now) else { return Reserved::Refused };
            let is_announced = outbound.content.is_some();
            if !is_announced && self.outbound.count_owned(&Some(peer)) >= self.limits.transfers_max / 4 {
                // One peer may not fill the table with transfers that this node's owner has not pushed.
                self.end_outbound(transfer, false);
                return Reserved::Refused;
            }
        }
        let Some(outbound) = self.outbound.held_mut(transfer) else { return Reserved::Refused };
        let before = outbound.blocks_reserved();
        let reserved = outbound.reserve(offset, part, now);
        if matches!(reserved, Reserved::InPart | Reserved::Whole) {
            let added = outbound.blocks_reserved() - before;
            if let Some(state) = self.peers.get_mut(&peer) {
                state.blocks_reserved += added;
            }
            self.outbound.hand_to(transfer, Some(peer));
            self.outbound.renew(transfer, now + self.limits.lease);
        }
        reserved
    }

    /// Posts messages and writes.
    pub(super) fn post(&mut self, budget: &mut Budget) {
        self.reserve_waiting(budget);
        self.pump_outboxes();
        self.write_hand_offs(budget);
    }

    fn write_hand_offs(&mut self, budget: &mut Budget) {
        let (mut next, mut turns) = (self.first_in_turn(), 0);
        while let Some(transfer) = next.filter(|_| !budget.is_spent() && turns < TURNS_MAX) {
            turns += 1;
            next = self.next_in_turn(transfer);
            let Some(outbound) = self.outbound.held_mut(transfer) else { continue };
            let (before, was_stopped) = (outbound.bytes_posted, outbound.is_stopped());
            let clock = StageClock { now: self.now, times: &self.counters.stages };
            outbound.write(&mut self.fabric, budget, &clock);
            TransferCounters::add(&self.counters.bytes_sent, outbound.bytes_posted - before);
            let is_over = outbound.is_stopped() && !was_stopped;
            let number = outbound.number.filter(|_| is_over);
            self.drop_waiting_sums(number);
            self.end_turn(transfer, budget.is_spent() || turns == TURNS_MAX);
        }
    }

    /// Checksums written parts, announces them, and ends transfers.
    pub(super) fn announce(&mut self, budget: &mut Budget) {
        let (mut next, mut turns) = (self.first_in_turn(), 0);
        while let Some(transfer) = next.filter(|_| !budget.is_spent() && turns < TURNS_MAX) {
            turns += 1;
            next = self.next_in_turn(transfer);
            let Some(outbound) = self.outbound.held_mut(transfer) else {
                self.active.remove(&transfer);
                continue;
            };
            let finish_id = self.next_id;
            let (before, sending, was_direct) = (outbound.bytes_summed, outbound.sending, outbound.is_direct);
            let clock = StageClock { now: self.now, times: &self.counters.stages };
            outbound.announce(transfer, &mut self.fabric, finish_id, budget, &clock);
            TransferCounters::add(&self.counters.bytes_summed, outbound.bytes_summed - before);
            TransferCounters::add(&self.counters.sent_directly, u64::from(outbound.is_direct && !was_direct));
            if outbound.sending != sending {
                self.finishing.insert(finish_id, transfer);
                self.next_id += 1;
            }
            if !outbound.has_work() {
                self.active.remove(&transfer);
            }
            self.end_turn(transfer, budget.is_spent() || turns == TURNS_MAX);
        }
    }

    /// Returns the first outbound transfer with work in this round.
    fn first_in_turn(&self) -> Option<TransferId> {
        self.active.range(self.turn..).next().or_else(|| self.active.first()).copied()
    }

    /// Returns the active transfer after `transfer`, until each was served once.
    fn next_in_turn(&self, transfer: TransferId) -> Option<TransferId> {
        let behind = (Bound::Excluded(transfer), Bound::Unbounded);
        if transfer >= self.turn {
            let next = self.active.range(behind).next().copied();
            next.or_else(|| self.active.first().copied().filter(|&first| first < self.turn))
        } else {
            self.active.range(behind).next().copied().filter(|&next| next < self.turn)
        }
    }

    /// Ends the turns of a round at `transfer`, which is served last in the next round, so that a large
    /// transfer delays no small one. Writing and checksums end at different transfers, each when its budget
    /// is spent: the nearer end counts, so that the transfers in between are served.
    fn end_turn(&mut self, transfer: TransferId, is_last: bool) {
        let (turn, behind) = (self.turn, transfer.wrapping_add(1));
        let ahead = |next: TransferId| next.wrapping_sub(turn);
        if is_last && (self.next_turn == turn || ahead(behind) < ahead(self.next_turn)) {
            self.next_turn = behind;
        }
    }

    pub(super) fn end_outbound(&mut self, transfer: TransferId, complete: bool) {
        if let Some(lease) = self.outbound.release(transfer) {
            self.forget_outbound(transfer, &lease);
            self.notices.push(Notice::Pushed { transfer, complete });
        }
    }

    pub(super) fn cancel(&mut self, transfer: TransferId, now: Instant) {
        let known = self.inbound.contains_key(&transfer) || self.outbound.get(transfer).is_some();
        if known {
            TransferCounters::add(&self.counters.transfers_cancelled, 1);
        }
        if self.inbound.contains_key(&transfer) {
            self.end_inbound(transfer, Outcome::SenderStopped, false);
        } else {
            self.cancelled.insert(transfer, now);
        }
        self.abandon_outbound(transfer);
    }

    /// Stops a transfer after what was posted, and tells the receiver, if there is one.
    pub(super) fn abandon_outbound(&mut self, transfer: TransferId) {
        let Some(outbound) = self.outbound.held_mut(transfer) else { return };
        outbound.abandon();
        let (number, has_receiver) = (outbound.number, outbound.reservation().is_some());
        self.drop_waiting_sums(number);
        if has_receiver {
            self.active.insert(transfer);
        } else {
            self.end_outbound(transfer, false);
        }
    }
}
