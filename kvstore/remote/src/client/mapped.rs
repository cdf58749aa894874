//! Blocks of a node on this host that are read where they lie: its memory is mapped into this process.
//!
//! A look-up leases what it finds. [`RemotePool::map`] takes leases over from it, with the blocks that they cover; each block stays where it
//! is until its lease is over, and no byte is moved. Whoever reads a block compares it with its checksum, and looks at the slot's generation
//! afterwards: a lease that ended meanwhile, or a node that did not keep its word, shows there.

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
    /// Blocks that it covers and that are read in place.
    blocks: usize,
}

/// The part of a node's memory that one client reads in place at a time, as a divisor: the node cannot evict it. The rest is copied.
const SHARE: usize = 4;

/// A block in a slot of a node's memory.
#[derive(Debug, Clone)]
pub struct MappedBlock {
    /// The node's memory.
    pub slab: Arc<Slab>,
    /// The slot.
    pub slot: u32,
    /// Of the slot, while it holds this block.
    pub generation: u32,
    /// What was stored with it.
    pub description: Description,
}

/// Leading blocks of a look-up that one lease covers.
#[derive(Debug)]
pub struct MappedGroup {
    /// The lease: to be given back by [`RemotePool::release`].
    pub lease: PoolLease,
    /// The blocks are not to be read after this.
    pub until: Instant,
    /// Consecutive blocks.
    pub blocks: Vec<MappedBlock>,
}

impl<F: Fabric> RemotePool<F> {
    /// Takes the leading blocks of what a look-up found, `count` at most, out of it, as far as they lie in memory that is mapped here. The
    /// others are read as before ([`RemotePool::read`]); the ticket is over when there are none.
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

    /// Gives a lease back: its blocks are not read any more.
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

    /// A block that was read in place does not have its checksum: its node is told.
    pub fn suspect(&mut self, lease: PoolLease, identity: BlockIdentity) {
        let Some(node) = self.nodes.get(&lease.node).filter(|node| node.peer == Some(lease.peer)) else {
            return;
        };
        tracing::warn!(node = node.name, identity = identity.short(), "remote tier: wrong bytes");
        add(&node.counters.damaged_blocks, 1);
        add(&self.counters.totals.damaged_blocks, 1);
        // Told once and not surely: the next reader tells it again.
        self.send(lease.node, &Message::Suspect { chain: vec![identity] });
    }
}
