//! Ends of look-ups and fetches: complete, cancelled or past the deadline, and the release of their leases and
//! slots.

use std::sync::atomic::Ordering;
use std::time::Instant;

use dataplane_fabric::Fabric;
use dataplane_memory::SlotRef;

use super::{Block, BlockState, Lease, Stage};
use crate::client::RemotePool;
use crate::client::operation::{Operation, Outcome, Ticket, Verified};
use crate::metrics::add;
use crate::wire::{Description, Message};

impl<F: Fabric> RemotePool<F> {
    /// Advances an operation, once for all its events of a poll.
    pub(in crate::client) fn advance(&mut self, ticket: u64, now: Instant) {
        let Some(fetch) = self.fetch_mut(ticket) else { return self.advance_store(ticket, now) };
        let gap = fetch.gap();
        let stage = fetch.stage;
        for block in fetch.blocks.iter_mut().skip(gap) {
            if matches!(block.state, BlockState::Asked | BlockState::Found | BlockState::Queued) {
                block.state = BlockState::Missing;
            }
        }
        match stage {
            Stage::LookingUp if fetch.blocks[..gap].iter().all(|block| block.state == BlockState::Found) => {
                self.end_look_up(ticket, gap, now);
            }
            Stage::Reading => {
                let verified = fetch.leading(BlockState::Verified);
                if verified == gap {
                    return self.end_fetch(ticket, now);
                }
            }
            Stage::Draining if fetch.blocks.iter().all(|block| block.state != BlockState::Reading) => {
                let held: Vec<SlotRef> =
                    fetch.blocks.iter_mut().filter_map(|block| block.target.take()).collect();
                let level = &self.counters.totals.held_slots;
                level.fetch_sub(held.len() as u64, Ordering::Relaxed);
                self.outcomes.push(Outcome::Returned { ticket: Ticket(ticket), slots: held });
                return self.drop_fetch(ticket, now);
            }
            _ => {}
        }
        self.release_unused(ticket, now);
    }

    pub(in crate::client) fn end_look_up(&mut self, ticket: u64, found: usize, now: Instant) {
        let Some(fetch) = self.fetch_mut(ticket) else { return };
        let description = |block: &Block| block.found.map(|found| found.description);
        let missed = fetch.blocks.len() - found;
        let blocks: Vec<Description> = fetch.blocks[..found].iter().filter_map(description).collect();
        fetch.blocks[found..].iter_mut().for_each(|block| block.state = BlockState::Missing);
        fetch.usable = found;
        let leases = fetch.groups.iter().filter(|group| group.blocks.start < found);
        let until = leases.filter_map(|group| Some(group.lease?.until)).min().unwrap_or(now);
        fetch.stage = Stage::Held { until };
        add(&self.counters.totals.missed_blocks, missed);
        self.due_at(until);
        self.outcomes.push(Outcome::Found { ticket: Ticket(ticket), blocks });
        if found == 0 {
            self.drop_fetch(ticket, now);
        }
    }

    /// Ends a look-up or fetch: it is complete, cancelled, or past its deadline.
    pub(in crate::client) fn end_fetch(&mut self, ticket: u64, now: Instant) {
        let Some(fetch) = self.fetch_mut(ticket) else { return };
        match fetch.stage {
            Stage::LookingUp => {
                let found = fetch.leading(BlockState::Found);
                self.end_look_up(ticket, found, now);
                self.release_unused(ticket, now);
            }
            Stage::Held { .. } => self.drop_fetch(ticket, now),
            Stage::Draining => {}
            Stage::Reading => self.end_reading(ticket, now),
        }
    }

    fn end_reading(&mut self, ticket: u64, now: Instant) {
        let Some(fetch) = self.fetch_mut(ticket) else { return };
        let count = fetch.leading(BlockState::Verified);
        let (asked, mapped) = (fetch.usable, fetch.mapped);
        fetch.stage = Stage::Draining;
        let (mut blocks, mut unused, mut held) = (Vec::with_capacity(count), Vec::new(), 0);
        let mut bytes = 0;
        for (index, block) in fetch.blocks.iter_mut().enumerate() {
            if block.state == BlockState::Reading {
                held += 1;
                continue;
            }
            match (block.target.take(), block.found) {
                (Some(slot), Some(found)) if index < count => {
                    bytes += found.description.bytes as usize;
                    blocks.push(Verified { slot, description: found.description });
                }
                (Some(slot), _) => unused.push(slot),
                (None, _) => {}
            }
            if index >= count {
                block.state = BlockState::Missing;
            }
        }
        tracing::trace!(ticket, count, bytes, held, "remote tier: fetched");
        let totals = &self.counters.totals;
        add(&totals.hit_blocks, count - mapped);
        add(&totals.missed_blocks, asked - count);
        add(&totals.held_slots, held);
        self.forget_checks(ticket);
        self.queue_hot_groups(ticket, &blocks, now);
        self.outcomes.push(Outcome::Fetched { ticket: Ticket(ticket), blocks, unused, held });
        if held == 0 {
            self.drop_fetch(ticket, now);
        } else {
            self.release_unused(ticket, now);
        }
    }

    /// Gives back the leases without a block that is to be read.
    fn release_unused(&mut self, ticket: u64, now: Instant) {
        let Some(fetch) = self.fetch_mut(ticket) else { return };
        let blocks = &fetch.blocks;
        let is_used = |block: &Block| {
            matches!(block.state, BlockState::Found | BlockState::Queued | BlockState::Reading)
        };
        let mut over = Vec::new();
        for group in &mut fetch.groups {
            if group.lease.is_some() && !blocks[group.blocks.clone()].iter().any(is_used) {
                over.extend(group.lease.take());
            }
        }
        over.into_iter().for_each(|lease| self.give_back(lease, now));
    }

    pub(in crate::client) fn give_back(&mut self, lease: Lease, now: Instant) {
        let Some(node) = self.nodes.get_mut(&lease.node).filter(|node| node.peer == Some(lease.peer)) else {
            return;
        };
        node.leases = node.leases.saturating_sub(1);
        self.send_or_disconnect(lease.node, &Message::Release { lease: lease.id }, now);
    }

    /// Removes an operation that has nothing in flight.
    pub(in crate::client) fn drop_fetch(&mut self, ticket: u64, now: Instant) {
        let Some(Operation::Fetch(fetch)) = self.operations.remove(&ticket) else { return };
        for lease in fetch.groups.into_iter().filter_map(|group| group.lease) {
            self.give_back(lease, now);
        }
    }
}
