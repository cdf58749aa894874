//! Blocks of a node on this host that are read in place: its memory is mapped into this process.
//!
//! A look-up leases the blocks it finds. [`RemotePool::map`] takes leases over from it, with the blocks that
//! they cover; each block stays where it is until its lease is over, and no byte is moved. The reader of a
//! block compares it with its checksum, and checks the slot's generation afterwards: this detects a lease that
//! ended meanwhile, or a node that reused the slot too early.

use std::sync::Arc;
use std::time::Instant;

use dataplane_fabric::{Fabric, PeerId};
use dataplane_memory::Slab;
use kvstore_block::BlockIdentity;

use super::fetch::{BlockState, Lease, Stage};
use super::operation::{Operation, Ticket};
use super::{NodeId, RemotePool};
use crate::metrics::add;
use crate::wire::{Description, Message};

/// A lease at a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolLease {
    node: NodeId,
    peer: PeerId,
    id: u64,
    /// Number of blocks of the lease that are read in place.
    blocks: usize,
}

/// Divisor of the part of a node's memory that one client reads in place at a time, since the node cannot evict
/// it. The rest is copied.
const SHARE: usize = 4;

/// A block in a slot of a node's memory.
#[derive(Debug, Clone)]
pub struct MappedBlock {
    /// Memory of the node.
    pub slab: Arc<Slab>,
    /// The slot.
    pub slot: u32,
    /// Generation of the slot while it holds this block.
    pub generation: u32,
    /// Description that was stored with the block.
    pub description: Description,
}

/// Leading blocks of a look-up that one lease covers.
#[derive(Debug)]
pub struct MappedGroup {
    /// The lease, to be given back by [`RemotePool::release`].
    pub lease: PoolLease,
    /// Time after which the blocks must not be read.
    pub until: Instant,
    /// Consecutive blocks of the chain.
    pub blocks: Vec<MappedBlock>,
}

impl<F: Fabric> RemotePool<F> {
    /// Takes over the leading blocks of a look-up, `count` at most, as far as they lie in memory that is mapped
    /// here. The other blocks are read as before ([`RemotePool::read`]); the ticket is over when there are
    /// none.
    pub fn map(&mut self, found: Ticket, count: usize, now: Instant) -> Vec<MappedGroup> {
        let mut groups = Vec::new();
        let Some(Operation::Fetch(fetch)) = self.operations.get_mut(&found.0) else { return groups };
        if !matches!(fetch.stage, Stage::Held { .. }) || fetch.mapped > 0 {
            return groups;
        }
        let count = count.min(fetch.usable);
        for group in &mut fetch.groups {
            let range = group.blocks.start..group.blocks.end.min(count);
            let Some(lease) = group.lease.filter(|lease| !range.is_empty() && now < lease.until) else {
                break;
            };
            let Some(slab) = self.fabric.mapped_slab(lease.peer) else { break };
            let place = |found: &crate::wire::FoundBlock| {
                let is_there = slab.try_generation(found.slot) == Some(found.generation)
                    && slab.contains(found.slot, 0, found.description.bytes as usize);
                is_there.then(|| MappedBlock {
                    slab: Arc::clone(&slab),
                    slot: found.slot,
                    generation: found.generation,
                    description: found.description,
                })
            };
            let wanted = range.len();
            let mapped = self.mapped.get(&lease.peer).copied().unwrap_or(0);
            if mapped + wanted > slab.layout().slot_count as usize / SHARE {
                break;
            }
            let blocks: Vec<MappedBlock> =
                fetch.blocks[range].iter().map_while(|block| block.found.as_ref().and_then(place)).collect();
            let is_whole = blocks.len() == wanted;
            if blocks.is_empty() {
                break;
            }
            for block in &mut fetch.blocks[fetch.mapped..fetch.mapped + blocks.len()] {
                block.state = BlockState::Verified;
            }
            fetch.mapped += blocks.len();
            let Lease { node, peer, id, until } = lease;
            group.lease = None;
            if let Some(node) = self.nodes.get(&node) {
                add(&node.counters.read_blocks, blocks.len());
            }
            *self.mapped.entry(peer).or_default() += blocks.len();
            let lease = PoolLease { node, peer, id, blocks: blocks.len() };
            groups.push(MappedGroup { lease, until, blocks });
            if !is_whole {
                break;
            }
        }
        let (mapped, usable) = (fetch.mapped, fetch.usable);
        add(&self.counters.totals.hit_blocks, mapped);
        add(&self.counters.totals.mapped_blocks, mapped);
        if mapped > 0 && mapped == usable {
            self.drop_fetch(found.0, now);
        }
        groups
    }

    /// Gives a lease back. Its blocks must not be read any more.
    pub fn release(&mut self, lease: PoolLease, now: Instant) {
        let PoolLease { node, peer, id, blocks } = lease;
        if let Some(mapped) = self.mapped.get_mut(&peer) {
            *mapped -= blocks;
            if *mapped == 0 {
                self.mapped.remove(&peer);
            }
        }
        self.give_back(Lease { node, peer, id, until: now }, now);
    }

    /// Reports to the node that a block read in place does not match its checksum.
    pub fn report_damaged(&mut self, lease: PoolLease, identity: BlockIdentity) {
        let Some(node) = self.nodes.get(&lease.node).filter(|node| node.peer == Some(lease.peer)) else {
            return;
        };
        tracing::warn!(
            node = node.name,
            identity = identity.short(),
            "remote tier: the checksum of a block of this node does not match; the node is asked to check it"
        );
        add(&node.counters.damaged_blocks, 1);
        add(&self.counters.totals.damaged_blocks, 1);
        // The message may be lost: the next reader reports the block again.
        self.send(lease.node, &Message::ReportDamaged { chain: vec![identity] });
    }
}
