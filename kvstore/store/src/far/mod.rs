//! Tiers that are not on this node: host memory of other nodes ([`remote`]), objects ([`object`]).
//!
//! Each has a thread of its own, behind [`SecondaryTier`]. The store's thread asks one tier after the other for the
//! blocks that the faster ones do not have, and brings the delivered blocks into host memory, where the
//! request that waits finds them like any others. A tier that does not answer costs the request its deadline,
//! and no other request anything.

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
use crate::store_thread::Message;
use crate::{Description, HostBlock};
use lent_slot::LentSlot;
pub(crate) use search::SecondaryTiers;

/// A block for a tier further away.
#[derive(Debug)]
pub struct OfferedBlock {
    /// Identity of the block.
    pub identity: BlockIdentity,
    /// Description of the block.
    pub description: Description,
    /// Slot of host memory with the block's bytes.
    pub slot: SlotRef,
    /// Keeps the bytes in `slot` until it is dropped.
    pub block: HostBlock,
}

/// Slots of host memory for blocks that a tier further away has.
#[derive(Debug)]
pub struct FetchRequest {
    /// The store's number of the request.
    pub request: u64,
    /// The chain from its root.
    pub chain: Vec<BlockIdentity>,
    /// The first block that is wanted; all blocks behind it are wanted too.
    pub first: usize,
    /// A slot for each wanted block.
    pub targets: Vec<SlotRef>,
    /// Blocks that have not arrived by this time are not waited for.
    pub deadline: Instant,
    pub(crate) slots: Vec<LentSlot>,
    /// Further slots of the read that the tier keeps for now: they follow in [`SecondaryTierEvent::Returned`].
    pub(crate) held: usize,
}

/// Slots of a read that was answered before they could be given back.
#[derive(Debug)]
pub struct ReturnedSlots {
    /// The store's number of the request.
    pub(crate) request: u64,
    pub(crate) slots: Vec<LentSlot>,
}

/// A block in one of the slots of a read, which the tier has verified. The checksum goes with it into host
/// memory: a later change of the bytes is found by the block's readers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Delivered {
    /// Length of the block in bytes.
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

/// A lease at a pool of this host, for all blocks that it covers. Dropping the guard ends the lease.
pub struct LeaseGuard {
    tell: Box<dyn Fn(LeaseEvent) + Send + Sync>,
}

/// An event of a lease at a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseEvent {
    /// A block covered by the lease does not have its checksum.
    Damaged(BlockIdentity),
    /// The blocks of the lease are not read any more.
    Ended,
}

impl LeaseGuard {
    /// `tell` is called on any thread and must not block.
    pub fn new(tell: impl Fn(LeaseEvent) + Send + Sync + 'static) -> Self {
        Self { tell: Box::new(tell) }
    }

    pub(crate) fn report_damaged(&self, identity: BlockIdentity) {
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
    /// Generation of the slot while it holds this block.
    pub generation: u32,
    /// Length of the block in bytes.
    pub bytes: u32,
    /// `dataplane-checksum` of its bytes and its identity ([`kvstore_remote::with_identity`]).
    pub wire_checksum: u64,
    /// Keeps the block in the pool's memory.
    pub lease: Arc<LeaseGuard>,
    /// Time by which the lease must be ended.
    pub until: Instant,
}

/// An answer of a tier that is not on this node.
#[derive(Debug)]
pub enum SecondaryTierEvent {
    /// The leading blocks that were asked for lie in a pool's memory that is mapped here. Comes before
    /// [`SecondaryTierEvent::Found`], which counts the other blocks.
    Mapped {
        /// The store's number of the request.
        request: u64,
        /// The blocks, from the first that was asked for.
        blocks: Vec<MappedBlock>,
    },
    /// The tier has this many leading blocks.
    Found {
        /// The store's number of the request.
        request: u64,
        /// Number of leading blocks.
        blocks: usize,
    },
    /// The leading blocks have arrived and were verified.
    Arrived {
        /// The read, with its slots.
        incoming: FetchRequest,
        /// Length and checksum of each block that has arrived.
        blocks: Vec<Delivered>,
    },
    /// Slots that a read kept when it was answered; nothing writes to them any more.
    Returned(ReturnedSlots),
    /// A node of the tier can be reached again: waiting blocks are offered at once.
    Reached(Tier),
    /// A tier has ended an offer.
    Offered {
        /// The tier.
        tier: Tier,
        /// Number of offered blocks that the tier has stored.
        kept: usize,
        /// Number of offered blocks that are larger than the tier can keep.
        too_large: usize,
        /// Last blocks of the portions that failed because the tier was out of reach.
        failed: Vec<BlockIdentity>,
        /// Last blocks of the portions that were refused because the tier was full.
        refused: Vec<BlockIdentity>,
    },
}

/// Size of the portions in which a tier takes new blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OfferBatch {
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
pub trait SecondaryTier: Send {
    /// Kind of the tier, by which its speed is measured.
    fn tier(&self) -> Tier;
    /// Longest time that a look-up and the read after it may take.
    fn patience(&self) -> Duration;
    /// Asks how many blocks it has of `chain` (which starts at the root) from the block `first` on. False when it cannot be
    /// asked now.
    fn look_up(&mut self, request: u64, chain: &[BlockIdentity], first: usize, deadline: Instant) -> bool;
    /// Asks for blocks that it said it has; "full" hands the request back.
    fn read(&mut self, incoming: FetchRequest) -> Result<(), FetchRequest>;
    /// Drops the result of a look-up that is not going to be read.
    fn leave(&mut self, request: u64);
    /// Size of the portions in which the tier takes new blocks.
    fn offer_batch(&self) -> OfferBatch;
    /// Whether the tier takes a portion of so many bytes now. If not, an offer in flight will end later and
    /// be reported ([`SecondaryTierEvent::Offered`]).
    fn has_room(&self, bytes: u64) -> bool;
    /// Offers it a portion that is new here; `head` is the first block of the group or run. False when it cannot be taken now.
    /// Each portion that is taken is answered once ([`SecondaryTierEvent::Offered`]).
    fn offer(&mut self, blocks: Vec<OfferedBlock>, head: BlockIdentity) -> bool;
    /// Asks it to retain the blocks of a chain (which starts at the root) for so long, now or when they come. A hint; a tier that evicts
    /// nothing has nothing to do.
    fn retain(&mut self, _request: &Arc<RetentionRequest>, _how_long: Duration) {}
}

/// The way for the answers of other nodes' tiers into the store.
#[derive(Clone)]
pub struct SecondaryTierInbox(pub(crate) Sender<Message>);

impl SecondaryTierInbox {
    /// Hands over an answer.
    pub fn send(&self, result: SecondaryTierEvent) {
        // A store that has stopped needs no answers.
        let _stopped = self.0.send(Message::Far(result));
    }
}
