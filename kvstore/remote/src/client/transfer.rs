//! One-sided reads and writes in flight, and the checksums of the blocks read.
//!
//! Each node has its own queues and limits: a slow node delays no other. A block counts only when
//! [`RemotePool::verify`] has found its bytes right.

use std::time::Instant;

use dataplane_fabric::{
    Completion, Fabric, Full, Operation as Post, PeerId, Priority, SlotRange, Source, Target, WorkRequest,
};
use dataplane_memory::{SlabKind, SlotRef};
use kvstore_block::BlockIdentity;

use super::RemotePool;
use super::fetch::{BlockState, Stage};
use super::operation::{Operation, Purpose};
use super::storing::PartStage;
use crate::NodeId;
use crate::checksum::with_identity;
use crate::metrics::add;
use crate::wire::{Description, Message};

#[derive(Debug, Clone, Copy)]
pub(super) struct Transfer {
    pub(super) node: NodeId,
    pub(super) peer: PeerId,
    pub(super) posted_at: Instant,
    /// Ticket and index of the block that is read; `None` for a write.
    read: Option<(u64, usize)>,
}

/// A block whose read has completed and whose checksum is to be verified.
#[derive(Debug)]
pub(super) struct Check {
    ticket: u64,
    index: usize,
    node: NodeId,
    identity: BlockIdentity,
    description: Description,
    slot: SlotRef,
}

impl<F: Fabric> RemotePool<F> {
    /// Posts transfers to all nodes as far as there is room: reads first, since no request waits for writes.
    /// Each time another node comes first: a fabric that copies accepts a bounded amount between two polls.
    pub(super) fn pump_all(&mut self, now: Instant) {
        let mut order = std::mem::take(&mut self.pump_order);
        let (behind, before) = (self.nodes.range(self.pump_first..), self.nodes.range(..self.pump_first));
        order.extend(behind.chain(before).map(|(&id, _)| id));
        if let Some(&second) = order.get(1) {
            self.pump_first = second;
        }
        for &id in &order {
            if let Some(node) = self.nodes.get_mut(&id) {
                node.pump_outbox(&mut self.fabric);
            }
            while self.post_read(id, now) {}
        }
        for id in order.drain(..) {
            while self.post_write(id, now) {}
            if let Some(node) = self.nodes.get(&id) {
                node.publish();
            }
        }
        self.pump_order = order;
    }

    /// Posts the next read to a node; false when nothing more can be posted.
    fn post_read(&mut self, id: NodeId, now: Instant) -> bool {
        let most = self.config.transfers_in_flight_max;
        let Some(node) = self.nodes.get_mut(&id).filter(|node| node.connected) else { return false };
        let Some(peer) = node.peer.filter(|_| node.reads_in_flight < most) else { return false };
        let Some(&(ticket, index)) = node.reads.front() else { return false };
        let Some(Operation::Fetch(fetch)) = self.operations.get_mut(&ticket) else {
            node.reads.pop_front();
            return true;
        };
        let Some(block) = fetch.blocks.get_mut(index).filter(|block| block.state == BlockState::Queued)
        else {
            node.reads.pop_front();
            return true;
        };
        let lease = fetch.groups[block.group].lease;
        let may = lease.is_some_and(|lease| lease.peer == peer && now < lease.until);
        let named = block.target.as_ref().zip(block.found).filter(|(target, found)| {
            let room = target.slab().layout().slot_bytes;
            may && (1..=room).contains(&(found.description.bytes as usize))
        });
        let Some((target, found)) = named else {
            block.state = BlockState::Missing;
            node.reads.pop_front();
            self.touched.insert(ticket);
            return true;
        };
        self.next_id += 1;
        let into = SlotRange { slot: target.clone(), offset: 0, len: found.description.bytes };
        let from = Target { slab: SlabKind::Host, slot: found.slot, generation: found.generation, offset: 0 };
        let operation = Post::Read { into, from, rows: None };
        let request = WorkRequest { id: self.next_id, peer, priority: Priority::Urgent, operation };
        if self.fabric.post(request).is_err() {
            return false;
        }
        block.state = BlockState::Reading;
        node.reads.pop_front();
        node.reads_in_flight += 1;
        let transfer = Transfer { node: id, peer, posted_at: now, read: Some((ticket, index)) };
        self.transfers.insert(self.next_id, transfer);
        self.due_at(now + self.config.transfer_timeout);
        true
    }

    /// Posts the next write to a node; false when nothing more can be posted.
    fn post_write(&mut self, id: NodeId, now: Instant) -> bool {
        let most = self.config.transfers_in_flight_max;
        let Some(node) = self.nodes.get_mut(&id).filter(|node| node.connected) else { return false };
        let Some(peer) = node.peer.filter(|_| node.writes_in_flight < most) else { return false };
        let Some(&(request, bit)) = node.writes.front() else { return false };
        let purpose =
            self.requests.get(&request).filter(|known| known.peer == peer).map(|known| known.purpose);
        let (ticket, number) = match purpose {
            Some(Purpose::Store { ticket, part }) => (ticket, part),
            _ => (0, 0),
        };
        let part = match self.operations.get_mut(&ticket) {
            Some(Operation::Store(store)) => store.parts.get_mut(number),
            _ => None,
        };
        let part = part.filter(|part| part.stage == PartStage::Writing && part.request == request);
        let Some((part, target)) = part.and_then(|part| part.targets[bit].map(|target| (part, target)))
        else {
            node.writes.pop_front();
            return true;
        };
        let block = &part.blocks[bit].1;
        self.next_id += 1;
        let source = Source::Slot { slot: block.slot.clone(), offset: 0, len: block.description.bytes };
        let operation = Post::Write { source, target, rows: None, immediate: None };
        let write = WorkRequest { id: self.next_id, peer, priority: Priority::Background, operation };
        if let Err(Full(_)) = self.fabric.post(write) {
            return false;
        }
        part.posted |= 1 << bit;
        let is_last = part.posted == part.wanted;
        node.writes.pop_front();
        node.writes_in_flight += 1;
        self.transfers.insert(self.next_id, Transfer { node: id, peer, posted_at: now, read: None });
        self.due_at(now + self.config.transfer_timeout);
        if is_last {
            self.commit_part(ticket, number, now);
        }
        true
    }

    pub(super) fn completed(&mut self, id: u64, completion: Completion, _now: Instant) {
        let Some(transfer) = self.transfers.remove(&id) else { return };
        if let Some(node) = self.nodes.get_mut(&transfer.node) {
            match transfer.read {
                Some(_) => node.reads_in_flight -= 1,
                None => node.writes_in_flight -= 1,
            }
        }
        let Some((ticket, index)) = transfer.read else { return };
        let Some(Operation::Fetch(fetch)) = self.operations.get_mut(&ticket) else { return };
        self.touched.insert(ticket);
        let is_wanted = fetch.stage == Stage::Reading && completion == Completion::Done;
        let block = &mut fetch.blocks[index];
        block.state = BlockState::Missing;
        if let Some((slot, found)) = block.target.as_ref().zip(block.found).filter(|_| is_wanted) {
            block.state = BlockState::Checking;
            let (slot, identity) = (slot.clone(), block.identity);
            let (description, node) = (found.description, transfer.node);
            self.checks.push_back(Check { ticket, index, node, identity, description, slot });
        }
    }

    /// Verifies a bounded number of bytes; returns the number of blocks it worked on.
    pub(super) fn verify(&mut self) -> usize {
        let mut budget = self.config.verify_bytes_per_poll;
        let mut work = 0;
        while budget > 0 {
            let Some(check) = self.checks.front() else { break };
            work += 1;
            let bytes = check.description.bytes as usize;
            let sum = self.verifier.advance(&check.slot, bytes, &mut budget);
            let Some((check, sum)) = sum.and_then(|sum| Some((self.checks.pop_front()?, sum))) else { break };
            let sum = with_identity(sum, &check.identity);
            self.checked(check, sum);
        }
        work
    }

    fn checked(&mut self, check: Check, sum: u64) {
        let is_right = sum == check.description.checksum;
        if let Some(Operation::Fetch(fetch)) = self.operations.get_mut(&check.ticket) {
            fetch.blocks[check.index].state =
                if is_right { BlockState::Verified } else { BlockState::Missing };
            self.touched.insert(check.ticket);
        }
        let Some(node) = self.nodes.get(&check.node) else { return };
        if is_right {
            add(&node.counters.read_blocks, 1);
            add(&node.counters.read_bytes, check.description.bytes as usize);
            return;
        }
        tracing::warn!(
            node = node.name,
            identity = check.identity.short(),
            "remote tier: the checksum of a block of this node does not match; the node is asked to check it"
        );
        add(&node.counters.damaged_blocks, 1);
        add(&self.counters.totals.damaged_blocks, 1);
        // The message may be lost: the next reader reports the block again.
        self.send(check.node, &Message::ReportDamaged { chain: vec![check.identity] });
    }

    /// Drops the checks of an operation that has ended.
    pub(super) fn forget_checks(&mut self, ticket: u64) {
        if self.checks.front().is_some_and(|check| check.ticket == ticket) {
            self.verifier.reset();
        }
        self.checks.retain(|check| check.ticket != ticket);
    }
}
