//! Tiers that are not on this node: host memory of other nodes ([`remote`]), objects ([`object`]).
//!
//! Each has a thread of its own, behind [`FarTier`]. The store's thread asks one after the other for what the faster ones
//! have not got, and brings what they deliver into host memory, where the request that waits for it finds it like
//! anything else. A tier that does not answer costs the request its deadline and nobody else anything.

mod in_flight_reads;
mod lent_slot;
pub mod object;
mod offer;
mod offer_queue;
pub mod remote;
mod search;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::plan::Tier;
use crossbeam_channel::Sender;
use dataplane_memory::{Slab, SlotRef};
use kvstore_block::BlockIdentity;

use crate::job::RetentionRequest;
use crate::mover::Message;
use crate::{Description, HostBlock};
use lent_slot::LentSlot;
pub(crate) use search::FarLinks;

/// A block for a tier further away.
#[derive(Debug)]
pub struct Outgoing {
    /// Which block.
    pub identity: BlockIdentity,
    /// What it is.
    pub description: Description,
    /// Where its bytes are.
    pub slot: SlotRef,
    /// Holds them there until this is dropped.
    pub block: HostBlock,
}

/// Slots of host memory for blocks that a tier further away has.
#[derive(Debug)]
pub struct Incoming {
    /// The store's number of the request.
    pub request: u64,
    /// The chain from its root.
    pub chain: Vec<BlockIdentity>,
    /// The first block that is wanted, and with it all that follow.
    pub first: usize,
    /// A slot for each of those.
    pub targets: Vec<SlotRef>,
    /// What has not arrived by then is not waited for.
    pub deadline: Instant,
    pub(crate) slots: Vec<LentSlot>,
    /// Further slots of the read that the tier keeps for now: they follow in [`FarResult::Returned`].
    pub(crate) held: usize,
}

/// Slots of a read that was answered before they could be given back.
#[derive(Debug)]
pub struct ReturnedSlots {
    /// The store's number of the request.
    pub(crate) request: u64,
    pub(crate) slots: Vec<LentSlot>,
}

/// A block in one of the slots of a read, which the tier has verified. The checksum goes with it into host memory: what changes the bytes
/// afterwards is found by whoever reads them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delivered {
    /// Its length.
    pub bytes: u32,
    /// The checksum of its bytes by the writer's account.
    pub sum: DeliveredSum,
}

/// A checksum of a block that a tier further away has delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeliveredSum {
    /// `dataplane-checksum`'s, by the block's first writer.
    Block(u64),
    /// xxh3-64, by this tier: the bytes are compared with it once more when host memory takes the other checksum.
    Xxh3(u64),
}

/// A lease at a pool of this host, for all blocks that it covers: it ends when this is dropped.
pub struct LeaseGuard {
    tell: Box<dyn Fn(LeaseEvent) + Send + Sync>,
}

/// An event of a lease at a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseEvent {
    /// A block that it covers does not have its checksum.
    Damaged(BlockIdentity),
    /// Its blocks are not read any more.
    Ended,
}

impl LeaseGuard {
    /// `tell` is called on any thread and must not block.
    pub fn new(tell: impl Fn(LeaseEvent) + Send + Sync + 'static) -> Self {
        Self { tell: Box::new(tell) }
    }

    pub(crate) fn suspect(&self, identity: BlockIdentity) {
        (self.tell)(LeaseEvent::Damaged(identity));
    }
}

impl std::fmt::Debug for LeaseGuard {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("LeaseGuard")
    }
}

impl Drop for LeaseGuard {
    fn drop(&mut self) {
        (self.tell)(LeaseEvent::Ended);
    }
}

/// A block that lies in the memory of a pool on this host, and is read there.
#[derive(Debug, Clone)]
pub struct MappedBlock {
    /// The pool's memory.
    pub slab: Arc<Slab>,
    /// The slot.
    pub slot: u32,
    /// Of the slot, while it holds this block.
    pub generation: u32,
    /// Its length.
    pub bytes: u32,
    /// `dataplane-checksum` of its bytes and its identity ([`kvstore_remote::with_identity`]).
    pub wire_checksum: u64,
    /// Keeps it there.
    pub lease: Arc<LeaseGuard>,
    /// The lease is to be ended by then.
    pub until: Instant,
}

/// What a tier further away answers.
#[derive(Debug)]
pub enum FarResult {
    /// The leading blocks of those that were asked for lie in a pool's memory that is mapped here; comes before [`FarResult::Found`], which
    /// counts the others.
    Mapped {
        /// The store's number of the request.
        request: u64,
        /// The blocks, from the first that was asked for.
        blocks: Vec<MappedBlock>,
    },
    /// So many leading blocks are there.
    Found {
        /// The store's number of the request.
        request: u64,
        /// How many.
        blocks: usize,
    },
    /// The leading blocks have arrived, and were verified; each with what its writer knew of it.
    Arrived {
        /// What was asked for.
        incoming: Incoming,
        /// Each that has arrived.
        blocks: Vec<Delivered>,
    },
    /// The slots that a read kept when it was answered: nothing writes to them any more.
    Returned(ReturnedSlots),
    /// A node of the tier can be reached again: what waits is offered at once.
    Reached(Tier),
    /// A tier is done with what it was offered.
    Offered {
        /// Which tier.
        tier: Tier,
        /// Blocks that it keeps since.
        kept: usize,
        /// Blocks that are larger than it can keep.
        too_large: usize,
        /// The last blocks of portions that it could not take: it was out of reach.
        failed: Vec<BlockIdentity>,
        /// The same where it was full.
        refused: Vec<BlockIdentity>,
    },
}

/// In which portions a tier takes new blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Portion {
    /// One by one, with the first block of the group of so many that it belongs to.
    Single {
        /// Blocks of a group, counted from the start of the chain.
        group: u32,
    },
    /// So many blocks of a chain together, counted from its start.
    Run(u32),
}

/// A tier that is not on this node. Called by the store's thread; must not block. Each `look_up` and `read` is answered
/// once, at about its deadline at the latest, through the way that the tier was given at its start.
pub trait FarTier: Send {
    /// Which kind it is, for what is known of its speed.
    fn tier(&self) -> Tier;
    /// How long a look-up and the read after it may take.
    fn patience(&self) -> Duration;
    /// Asks how many blocks it has of `chain` (which starts at the root) from the block `first` on. False when it cannot be
    /// asked now.
    fn look_up(&mut self, request: u64, chain: &[BlockIdentity], first: usize, deadline: Instant) -> bool;
    /// Asks for blocks that it said it has; "full" hands the request back.
    fn read(&mut self, incoming: Incoming) -> Result<(), Incoming>;
    /// What was found for the request is not going to be read.
    fn leave(&mut self, request: u64);
    /// In which portions it takes new blocks.
    fn portion(&self) -> Portion;
    /// Whether it takes a portion of so many bytes now. If not, it is done with something later and says so
    /// ([`FarResult::Offered`]).
    fn has_room(&self, bytes: u64) -> bool;
    /// Offers it a portion that is new here; `head` is the first block of the group or run. False when it cannot be taken now.
    /// Each portion that is taken is answered once ([`FarResult::Offered`]).
    fn offer(&mut self, blocks: Vec<Outgoing>, head: BlockIdentity) -> bool;
    /// Asks it to retain the blocks of a chain (which starts at the root) for so long, now or when they come. A hint; a tier that evicts
    /// nothing has nothing to do.
    fn retain(&mut self, _request: &Arc<RetentionRequest>, _how_long: Duration) {}
}

/// The way for the answers of other nodes' tiers into the store.
#[derive(Clone)]
pub struct FarInbox(pub(crate) Sender<Message>);

impl FarInbox {
    /// Hands over an answer.
    pub fn send(&self, result: FarResult) {
        // A store that has stopped needs no answers.
        let _stopped = self.0.send(Message::Far(result));
    }
}
