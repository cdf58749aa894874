//! Arguments and results of the client's operations, and records of the requests in flight.

use std::time::Instant;

use dataplane_fabric::PeerId;
use dataplane_memory::SlotRef;
use kvstore_block::BlockIdentity;

use super::fetch::Fetch;
use super::storing::Store;
use crate::{Description, NodeId};

/// Id of an operation of one [`crate::RemotePool`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// Reason why an operation was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// The maximum number of operations is in flight.
    Full,
    /// No blocks, more than allowed, or more targets than blocks.
    TooLong,
    /// The look-up is still in progress, its leases are over, or there are no targets or more than blocks.
    Gone,
}

/// A refused fetch, with the targets that were passed in.
#[derive(Debug)]
pub struct RefusedFetch {
    /// Reason of the refusal.
    pub reason: Refusal,
    /// The targets that were passed in.
    pub targets: Vec<SlotRef>,
}

/// A block to store.
#[derive(Debug, Clone)]
pub struct StoreBlock {
    /// Identity of the block.
    pub identity: BlockIdentity,
    /// The group it belongs to, see [`crate::group_of`].
    pub group: BlockIdentity,
    /// Slot that holds the bytes.
    pub slot: SlotRef,
    /// Description to be stored with the block.
    pub description: Description,
}

/// Result of storing one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreResult {
    /// The node has verified and registered the block.
    Stored,
    /// The node already had the block.
    Present,
    /// The block is being written or verified already, for this client or another one.
    Pending,
    /// The node has no room now.
    Full,
    /// The node's slots are too small for it.
    TooLarge,
    /// The bytes that arrived had the wrong checksum.
    Damaged,
    /// No node, no answer in time, or no connection. The node may have stored the block.
    Failed,
}

/// A block that was fetched and verified.
#[derive(Debug)]
pub struct Verified {
    /// Slot that holds the bytes.
    pub slot: SlotRef,
    /// Description that was stored with the block.
    pub description: Description,
}

/// Result of an operation.
#[derive(Debug)]
pub enum Outcome {
    /// A look-up ended.
    Found {
        /// Id of the look-up.
        ticket: Ticket,
        /// The leading blocks that were found; none ends the ticket.
        blocks: Vec<Description>,
    },
    /// A fetch or read ended.
    Fetched {
        /// Id of the fetch.
        ticket: Ticket,
        /// The leading blocks, verified, in the first of the targets.
        blocks: Vec<Verified>,
        /// Targets without a block, which are free.
        unused: Vec<SlotRef>,
        /// Number of targets that follow in [`Outcome::Returned`]: a read into them is in flight.
        held: usize,
    },
    /// The targets that a fetch held, once nothing can write to them any more.
    Returned {
        /// Id of the fetch.
        ticket: Ticket,
        /// The slots.
        slots: Vec<SlotRef>,
    },
    /// A store ended.
    Stored {
        /// Id of the store.
        ticket: Ticket,
        /// One result for each block, in order.
        results: Vec<StoreResult>,
    },
}

#[derive(Debug)]
pub(super) enum Operation {
    Fetch(Fetch),
    Store(Store),
}

impl Operation {
    /// Whether this writes a second home of the group.
    pub(super) fn copies(&self, group: &BlockIdentity) -> bool {
        matches!(self, Self::Store(store) if store.replicates.as_ref() == Some(group))
    }
}

/// A request to a node.
#[derive(Debug, Clone, Copy)]
pub(super) struct Request {
    pub(super) node: NodeId,
    pub(super) peer: PeerId,
    pub(super) sent_at: Instant,
    /// Deadline of the answer; `None` after the answer, while the client has the next step.
    pub(super) timeout_at: Option<Instant>,
    pub(super) purpose: Purpose,
}

/// Purpose of a request. The operation may have ended meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    LookUp { ticket: u64, group: usize },
    Store { ticket: u64, part: usize },
    Probe,
}
