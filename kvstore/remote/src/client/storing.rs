//! Stores: blocks are offered to their nodes, written to the slots that those grant, and committed behind the
//! writes.
//!
//! A store consists of parts, one for each node and at most as many blocks as a message names. Writes and the
//! commit travel on one lane, so the commit is delivered when the writes have landed (clause 1 of the fabric
//! contract) and needs to wait for no completion. A part that runs out of time commits the writes that were
//! posted: the node then knows which slots will not be written any more.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use dataplane_fabric::{Fabric, PeerId, Target};
use dataplane_memory::SlabKind;
use kvstore_block::BlockIdentity;

use super::RemotePool;
use super::operation::{Operation, Outcome, Purpose, StoreBlock, StoreResult, Ticket};
use crate::NodeId;
use crate::metrics::add;
use crate::wire::{BLOCKS_PER_MESSAGE_MAX, Grant, Message, Offer};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PartStage {
    Reserving,
    Writing,
    Committing,
    Ended,
}

#[derive(Debug)]
pub(super) struct Part {
    node: NodeId,
    pub(super) request: u64,
    /// Index of the result, and the block.
    pub(super) blocks: Vec<(usize, StoreBlock)>,
    /// Slot at the node for each block that was granted one.
    pub(super) targets: Vec<Option<Target>>,
    pub(super) stage: PartStage,
    /// Bits of the blocks that the node granted a slot for, and of those whose write was posted.
    pub(super) wanted: u64,
    pub(super) posted: u64,
    /// Time after which no write is posted.
    pub(super) write_until: Option<Instant>,
}

#[derive(Debug)]
pub(super) struct Store {
    pub(super) parts: Vec<Part>,
    pub(super) results: Vec<Option<StoreResult>>,
    pub(super) deadline: Instant,
    /// Group whose second home this store writes; its outcome is not reported.
    pub(super) replicates: Option<BlockIdentity>,
}

impl Store {
    pub(super) fn new(count: usize, deadline: Instant) -> Self {
        Self { parts: Vec::new(), results: vec![None; count], deadline, replicates: None }
    }
}

impl<F: Fabric> RemotePool<F> {
    /// Starts a store: offers the blocks to their nodes, or all to `only`.
    pub(super) fn start_store(
        &mut self,
        mut store: Store,
        blocks: Vec<StoreBlock>,
        only: Option<NodeId>,
        now: Instant,
    ) -> Ticket {
        let mut by_node: BTreeMap<NodeId, Vec<(usize, StoreBlock)>> = BTreeMap::new();
        for (at, block) in blocks.into_iter().enumerate() {
            let usable = |id| self.nodes.get(&id).is_some_and(|node| node.is_usable());
            let home = only.or_else(|| self.placement.best_two(&block.group, usable)[0]);
            let room = block.slot.slab().layout().slot_bytes;
            let fits = (1..=room).contains(&(block.description.bytes as usize));
            match home.filter(|_| fits) {
                Some(home) => by_node.entry(home).or_default().push((at, block)),
                None => store.results[at] = Some(StoreResult::Failed),
            }
        }
        for (node, blocks) in by_node {
            let mut blocks = blocks.into_iter();
            loop {
                let blocks: Vec<_> = blocks.by_ref().take(BLOCKS_PER_MESSAGE_MAX).collect();
                if blocks.is_empty() {
                    break;
                }
                let request = self.fresh_id();
                store.parts.push(Part {
                    node,
                    request,
                    targets: vec![None; blocks.len()],
                    blocks,
                    stage: PartStage::Reserving,
                    wanted: 0,
                    posted: 0,
                    write_until: None,
                });
            }
        }
        self.due_at(store.deadline);
        let ticket = self.fresh_id();
        for (number, part) in store.parts.iter_mut().enumerate() {
            let offer = |(_, block): &(usize, StoreBlock)| Offer {
                identity: block.identity,
                description: block.description,
            };
            let (node, request) = (part.node, part.request);
            let message = Message::Reserve { request, offers: part.blocks.iter().map(offer).collect() };
            let purpose = Purpose::Store { ticket, part: number };
            let times = (now, now + self.config.request_timeout);
            if !self.ask_node(node, request, &message, purpose, times) {
                part.stage = PartStage::Ended;
            }
        }
        self.operations.insert(ticket, Operation::Store(store));
        self.touched.insert(ticket);
        Ticket(ticket)
    }

    fn store_mut(&mut self, ticket: u64) -> Option<&mut Store> {
        match self.operations.get_mut(&ticket) {
            Some(Operation::Store(store)) => Some(store),
            _ => None,
        }
    }

    /// Handles a node's answer to an offer. False when it violates the protocol.
    pub(super) fn granted(
        &mut self,
        id: NodeId,
        request: u64,
        peer: PeerId,
        lease_ms: u32,
        grants: &[Grant],
        now: Instant,
    ) -> bool {
        let is_reserved = grants.iter().any(|grant| matches!(grant, Grant::Slot { .. }));
        let known = self.requests.get(&request).filter(|known| known.peer == peer).copied();
        let purpose = known.map(|known| known.purpose);
        let is_wanted = match purpose {
            Some(Purpose::Store { ticket, .. }) => self.operations.contains_key(&ticket),
            Some(_) => return false,
            None => false,
        };
        let (Some(known), Some(Purpose::Store { ticket, part })) = (known.filter(|_| is_wanted), purpose)
        else {
            self.answered(request, peer);
            add(&self.counters.totals.late_answers, 1);
            if is_reserved {
                // The part has ended: commit no write, so that the node can reuse the slots.
                self.send_or_disconnect(id, &Message::Commit { request, written: 0 }, now);
            }
            return true;
        };
        if let Some(node) = self.nodes.get_mut(&id) {
            node.breaker.success();
        }
        let Some(Operation::Store(store)) = self.operations.get_mut(&ticket) else { return false };
        let (results, part_number) = (&mut store.results, part);
        let part = &mut store.parts[part];
        if part.stage != PartStage::Reserving || grants.len() != part.blocks.len() {
            return false;
        }
        for (bit, &grant) in grants.iter().enumerate() {
            let result = match grant {
                Grant::Slot { slot, generation } => {
                    part.targets[bit] = Some(Target { slab: SlabKind::Host, slot, generation, offset: 0 });
                    part.wanted |= 1 << bit;
                    continue;
                }
                Grant::Present => StoreResult::Present,
                Grant::Pending => StoreResult::Pending,
                Grant::Full => StoreResult::Full,
                Grant::Refused => StoreResult::TooLarge,
            };
            results[part.blocks[bit].0] = Some(result);
        }
        if !is_reserved {
            part.stage = PartStage::Ended;
            self.answered(request, peer);
            self.touched.insert(ticket);
            return true;
        }
        part.stage = PartStage::Writing;
        let until = known.sent_at + Duration::from_millis(lease_ms.into()) * 3 / 4;
        part.write_until = Some(until);
        let wanted = part.wanted;
        if let Some(known) = self.requests.get_mut(&request) {
            known.timeout_at = None;
        }
        let bits = (0..BLOCKS_PER_MESSAGE_MAX).filter(|bit| wanted & (1 << bit) != 0);
        match self.nodes.get_mut(&id) {
            Some(node) => node.writes.extend(bits.map(|bit| (request, bit))),
            None => self.fail_part(ticket, part_number),
        }
        self.due_at(until);
        true
    }

    /// Commits the writes of this part that were posted; no more will be.
    pub(super) fn commit_part(&mut self, ticket: u64, number: usize, now: Instant) {
        let timeout_at = now + self.config.transfer_timeout;
        let Some(store) = self.store_mut(ticket) else { return };
        let part = &mut store.parts[number];
        if part.stage != PartStage::Writing {
            return;
        }
        part.stage = PartStage::Committing;
        let (id, request, written) = (part.node, part.request, part.posted);
        if let Some(known) = self.requests.get_mut(&request) {
            known.timeout_at = Some(timeout_at);
            self.due_at(timeout_at);
            self.send_or_disconnect(id, &Message::Commit { request, written }, now);
        }
    }

    pub(super) fn committed(&mut self, ticket: u64, number: usize, registered: u64, damaged: u64) {
        let Some(store) = self.store_mut(ticket) else { return };
        let (results, part) = (&mut store.results, &mut store.parts[number]);
        part.stage = PartStage::Ended;
        for (bit, (at, _)) in part.blocks.iter().enumerate().filter(|(bit, _)| part.wanted & (1 << bit) != 0)
        {
            results[*at] = Some(match (registered & (1 << bit) != 0, damaged & (1 << bit) != 0) {
                (true, _) => StoreResult::Stored,
                (false, true) => StoreResult::Damaged,
                (false, false) => StoreResult::Failed,
            });
        }
        self.touched.insert(ticket);
    }

    /// Ends a part whose node does not answer, or is disconnected.
    pub(super) fn fail_part(&mut self, ticket: u64, number: usize) {
        if let Some(store) = self.store_mut(ticket) {
            store.parts[number].stage = PartStage::Ended;
            self.touched.insert(ticket);
        }
    }

    /// Ends a store: it is complete, cancelled, or past its deadline.
    pub(super) fn end_store(&mut self, ticket: u64, now: Instant) {
        let parts = self.store_mut(ticket).map_or(0, |store| store.parts.len());
        (0..parts).for_each(|part| self.commit_part(ticket, part, now));
        let Some(Operation::Store(store)) = self.operations.remove(&ticket) else { return };
        let results: Vec<StoreResult> =
            store.results.iter().map(|result| result.unwrap_or(StoreResult::Failed)).collect();
        let count = |wanted: &[StoreResult]| results.iter().filter(|result| wanted.contains(result)).count();
        if let Some(group) = store.replicates {
            if results.iter().all(|result| matches!(result, StoreResult::Stored | StoreResult::Present)) {
                add(&self.counters.totals.replicated_groups, 1);
                self.replication.done.remember(group, self.config.replicated_max);
            }
            return;
        }
        let totals = &self.counters.totals;
        add(&totals.stored_blocks, count(&[StoreResult::Stored]));
        add(&totals.present_blocks, count(&[StoreResult::Present, StoreResult::Pending]));
        add(&totals.full_blocks, count(&[StoreResult::Full, StoreResult::TooLarge]));
        add(&totals.failed_blocks, count(&[StoreResult::Failed, StoreResult::Damaged]));
        self.outcomes.push(Outcome::Stored { ticket: Ticket(ticket), results });
    }

    /// Ends a store once every part has ended.
    pub(super) fn advance_store(&mut self, ticket: u64, now: Instant) {
        let over = |store: &mut Store| store.parts.iter().all(|part| part.stage == PartStage::Ended);
        if self.store_mut(ticket).is_some_and(over) {
            self.end_store(ticket, now);
        }
    }
}
