//! Look-ups and fetches: all groups are asked for at once, blocks are read as they are found, and the leading
//! blocks that are verified count.
//!
//! A block is in one state at a time; only [`BlockState::Reading`] means that the fabric may write its target.
//! A lease is given back when no block of its group is to be read or being read; no read is posted in the last
//! quarter of a lease, counted from the request, so that it has completed before the node's lease expires.

mod ending;

use std::ops::Range;
use std::time::{Duration, Instant};

use dataplane_fabric::{Fabric, PeerId};
use dataplane_memory::SlotRef;
use kvstore_block::BlockIdentity;

use super::RemotePool;
use super::operation::{Operation, Purpose, Ticket};
use crate::NodeId;
use crate::metrics::add;
use crate::wire::{FoundBlock, Message};

/// One in this many choices between two homes takes the worse one.
const EXPLORE_ONE_IN: u64 = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BlockState {
    /// The request to its node is in flight or still to be sent.
    Asked,
    /// The node has leased the block.
    Found,
    /// The read is queued.
    Queued,
    /// A read into its target is in flight.
    Reading,
    /// The read has completed; the checksum is still to be verified.
    Checking,
    Verified,
    /// Not at its node, not read in time, or damaged.
    Missing,
}

#[derive(Debug)]
pub(super) struct Block {
    pub(super) identity: BlockIdentity,
    pub(super) state: BlockState,
    pub(super) group: usize,
    /// Position and description of the block at its node.
    pub(super) found: Option<FoundBlock>,
    pub(super) target: Option<SlotRef>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Lease {
    pub(super) node: NodeId,
    pub(super) peer: PeerId,
    pub(super) id: u64,
    /// Time after which no read is posted.
    pub(super) until: Instant,
}

#[derive(Debug)]
pub(super) struct Group {
    pub(super) name: BlockIdentity,
    pub(super) blocks: Range<usize>,
    /// Nodes in the order in which they are asked.
    homes: [Option<NodeId>; 2],
    /// Number of `homes` that were asked.
    asked: usize,
    /// Whether the second node of the ranking is asked first. Stores go to the first node.
    at_second: bool,
    pub(super) lease: Option<Lease>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// A look-up waits for answers.
    LookingUp,
    /// A look-up has ended; its leases are held until then.
    Held { until: Instant },
    /// Targets are attached; blocks are being read.
    Reading,
    /// The fetch has ended, but reads into its targets are in flight.
    Draining,
}

#[derive(Debug)]
pub(super) struct Fetch {
    pub(super) blocks: Vec<Block>,
    pub(super) groups: Vec<Group>,
    pub(super) stage: Stage,
    pub(super) deadline: Instant,
    /// Number of leading blocks that can be used: those found, or, with targets, those mapped and those with a
    /// target.
    pub(super) usable: usize,
    /// Number of leading blocks that were taken over by [`RemotePool::map`] and are read in place.
    pub(super) mapped: usize,
}

impl Fetch {
    /// Returns a look-up of `count` blocks from position `first` of the chain on.
    pub(super) fn new(
        chain: &[BlockIdentity],
        first: usize,
        count: usize,
        group_blocks: usize,
        deadline: Instant,
    ) -> Self {
        let mut blocks = Vec::with_capacity(count);
        let mut groups: Vec<Group> = Vec::with_capacity(count / group_blocks + 2);
        for (position, &identity) in chain.iter().enumerate().skip(first).take(count) {
            if groups.is_empty() || position % group_blocks == 0 {
                let name = chain[position - position % group_blocks];
                let start = blocks.len();
                groups.push(Group {
                    name,
                    blocks: start..start,
                    homes: [None, None],
                    asked: 0,
                    at_second: false,
                    lease: None,
                });
            }
            let group = groups.len() - 1;
            groups[group].blocks.end += 1;
            blocks.push(Block { identity, state: BlockState::Asked, group, found: None, target: None });
        }
        Self { blocks, groups, stage: Stage::LookingUp, deadline, usable: 0, mapped: 0 }
    }

    /// Assigns the targets to the leading blocks that are not mapped; there are at most as many targets as
    /// blocks.
    pub(super) fn attach(&mut self, targets: Vec<SlotRef>, deadline: Instant) {
        let count = self.mapped + targets.len();
        for (block, target) in self.blocks[self.mapped..].iter_mut().zip(targets) {
            block.target = Some(target);
        }
        self.blocks.iter_mut().skip(count).for_each(|block| block.state = BlockState::Missing);
        self.usable = count;
        self.deadline = deadline;
        self.stage = Stage::Reading;
    }

    /// Position of the first missing block; the blocks behind it cannot be used.
    fn gap(&self) -> usize {
        let missing = |block: &Block| block.state == BlockState::Missing;
        self.blocks.iter().position(missing).unwrap_or(self.blocks.len())
    }

    fn leading(&self, state: BlockState) -> usize {
        self.blocks.iter().take_while(|block| block.state == state).count()
    }

    fn is_asking(&self) -> bool {
        matches!(self.stage, Stage::LookingUp | Stage::Reading)
    }
}

impl<F: Fabric> RemotePool<F> {
    pub(super) fn start_fetch(&mut self, mut fetch: Fetch, now: Instant) -> Ticket {
        add(&self.counters.totals.asked_blocks, fetch.blocks.len());
        self.due_at(fetch.deadline);
        for group in &mut fetch.groups {
            self.replication.sketch.count(&group.name, now);
            let [first, second] =
                self.placement.best_two(&group.name, |id| self.nodes.get(&id).is_some_and(|n| n.is_usable()));
            let is_double = self.replication.done.contains(&group.name);
            group.homes = [first, second.filter(|_| is_double)];
            // The home with the shorter expected wait; at times the other one, so that its measured latency is
            // updated.
            if let [Some(one), Some(other)] = group.homes {
                let wait = |id| self.nodes.get(&id).map_or(Duration::MAX, |node| node.expected_wait());
                let is_better = wait(other) < wait(one);
                if is_better != self.draw().is_multiple_of(EXPLORE_ONE_IN) {
                    group.homes = [Some(other), Some(one)];
                    group.at_second = true;
                }
            }
        }
        let groups = fetch.groups.len();
        let ticket = self.fresh_id();
        self.operations.insert(ticket, Operation::Fetch(fetch));
        (0..groups).for_each(|group| self.ask(ticket, group, now));
        self.touched.insert(ticket);
        Ticket(ticket)
    }

    fn fetch_mut(&mut self, ticket: u64) -> Option<&mut Fetch> {
        match self.operations.get_mut(&ticket) {
            Some(Operation::Fetch(fetch)) => Some(fetch),
            _ => None,
        }
    }

    /// Asks the next home of a group; without one, its blocks are missing.
    fn ask(&mut self, ticket: u64, number: usize, now: Instant) {
        loop {
            let Some(fetch) = self.fetch_mut(ticket).filter(|fetch| fetch.is_asking()) else { return };
            let group = &mut fetch.groups[number];
            if fetch.blocks[group.blocks.start].state != BlockState::Asked {
                return;
            }
            let home = group.homes.get(group.asked).copied().flatten();
            group.asked += 1;
            let range = group.blocks.clone();
            let Some(home) = home else {
                fetch.blocks[range].iter_mut().for_each(|block| block.state = BlockState::Missing);
                self.touched.insert(ticket);
                return;
            };
            let chain = fetch.blocks[range].iter().map(|block| block.identity).collect();
            let request = self.fresh_id();
            let purpose = Purpose::LookUp { ticket, group: number };
            let times = (now, now + self.config.request_timeout);
            if self.ask_node(home, request, &Message::LookUp { request, chain }, purpose, times) {
                return;
            }
        }
    }

    /// Asks the other home after the first did not answer, or lacked blocks.
    pub(super) fn ask_other(&mut self, ticket: u64, number: usize, now: Instant) {
        let Some(fetch) = self.fetch_mut(ticket).filter(|fetch| fetch.is_asking()) else { return };
        let group = &fetch.groups[number];
        if group.homes.get(group.asked).is_some_and(Option::is_some) {
            add(&self.counters.totals.second_asks, 1);
        }
        self.ask(ticket, number, now);
    }

    /// Handles a node's answer to a look-up. False when it violates the protocol.
    pub(super) fn found(
        &mut self,
        (ticket, number): (u64, usize),
        (node, peer): (NodeId, PeerId),
        (lease, lease_ms, sent_at): (u64, u32, Instant),
        blocks: &[FoundBlock],
        now: Instant,
    ) -> bool {
        let Some(fetch) = self.fetch_mut(ticket).filter(|fetch| fetch.is_asking()) else {
            add(&self.counters.totals.late_answers, 1);
            if lease != 0 {
                self.send_or_disconnect(node, &Message::Release { lease }, now);
            }
            return true;
        };
        let gap = fetch.gap();
        let group = &mut fetch.groups[number];
        let range = group.blocks.clone();
        let is_wanted = gap >= range.start && fetch.blocks[range.start].state == BlockState::Asked;
        if blocks.len() > range.len() || (lease == 0) != blocks.is_empty() || group.lease.is_some() {
            return false;
        }
        let is_short = blocks.len() < range.len() && group.at_second && group.asked == 1;
        if is_short || !is_wanted || blocks.is_empty() {
            let name = group.name;
            if lease != 0 {
                self.send_or_disconnect(node, &Message::Release { lease }, now);
            }
            if is_short && is_wanted {
                // The second home has dropped some blocks: the first may still have all.
                self.replication.done.forget(&name);
                self.ask_other(ticket, number, now);
            } else {
                self.miss(ticket, range);
            }
            return true;
        }
        let until = sent_at + Duration::from_millis(lease_ms.into()) * 3 / 4;
        group.lease = Some(Lease { node, peer, id: lease, until });
        for (offset, block) in fetch.blocks[range.clone()].iter_mut().enumerate() {
            block.found = blocks.get(offset).copied();
            block.state = if block.found.is_some() { BlockState::Found } else { BlockState::Missing };
        }
        let is_reading = fetch.stage == Stage::Reading;
        if let Some(node) = self.nodes.get_mut(&node) {
            node.leases += 1;
        }
        if is_reading {
            self.queue_found(ticket, range.start, range.end);
        }
        self.touched.insert(ticket);
        true
    }

    fn miss(&mut self, ticket: u64, range: Range<usize>) {
        if let Some(fetch) = self.fetch_mut(ticket) {
            fetch.blocks[range].iter_mut().for_each(|block| block.state = BlockState::Missing);
        }
        self.touched.insert(ticket);
    }

    /// Queues the reads of the found blocks in a range.
    pub(super) fn queue_found(&mut self, ticket: u64, start: usize, end: usize) {
        let Some(Operation::Fetch(fetch)) = self.operations.get_mut(&ticket) else { return };
        let end = end.min(fetch.blocks.len());
        for index in start..end {
            let block = &mut fetch.blocks[index];
            if block.state != BlockState::Found {
                continue;
            }
            let lease = fetch.groups[block.group].lease;
            let node = lease.and_then(|lease| self.nodes.get_mut(&lease.node).map(|node| (lease, node)));
            match node.filter(|(lease, node)| node.peer == Some(lease.peer)) {
                Some((_, node)) => {
                    block.state = BlockState::Queued;
                    node.reads.push_back((ticket, index));
                }
                None => block.state = BlockState::Missing,
            }
        }
    }

    /// Marks a queued block that cannot be read as missing.
    pub(super) fn unreadable(&mut self, ticket: u64, index: usize) {
        let Some(fetch) = self.fetch_mut(ticket) else { return };
        if fetch.blocks[index].state == BlockState::Queued {
            fetch.blocks[index].state = BlockState::Missing;
            self.touched.insert(ticket);
        }
    }
}
