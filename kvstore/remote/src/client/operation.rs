//! What callers hand over and get back, and what is remembered of the questions that were asked.

use std::time::Instant;

use dataplane_fabric::PeerId;
use dataplane_memory::SlotRef;
use kvstore_block::BlockIdentity;

use super::fetch::Fetch;
use super::storing::Store;
use crate::{Description, NodeId};

/// Names an operation of one [`crate::RemotePool`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// Why an operation was not begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// As many operations as allowed are under way.
    Full,
    /// No blocks, more than allowed, or more targets than blocks.
    TooLong,
    /// The look-up is not over, or its leases are.
    Gone,
}

/// An operation was not begun; the targets come back.
#[derive(Debug)]
pub struct Refused {
    /// Why.
    pub reason: Refusal,
    /// What was handed over.
    pub targets: Vec<SlotRef>,
}

/// A block to store.
#[derive(Debug, Clone)]
pub struct StoreBlock {
    /// Its name.
    pub identity: BlockIdentity,
    /// The group it belongs to, see [`crate::group_of`].
    pub group: BlockIdentity,
    /// Where its bytes are.
    pub slot: SlotRef,
    /// What is stored with it.
    pub description: Description,
}

/// What became of one block of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreResult {
    /// It is there now, verified by the node.
    Stored,
    /// It was there.
    Present,
    /// Somebody else is writing it.
    Pending,
    /// The node has no room now.
    Full,
    /// The node's slots are too small for it.
    TooLarge,
    /// The bytes that arrived had the wrong checksum.
    Damaged,
    /// No node, no answer in time, or no connection. Whether it is there is unknown.
    Failed,
}

/// A block that was fetched and verified.
#[derive(Debug)]
pub struct Verified {
    /// Where its bytes are now.
    pub slot: SlotRef,
    /// What was stored with it.
    pub description: Description,
}

/// How an operation ended.
#[derive(Debug)]
pub enum Outcome {
    /// A look-up ended.
    Found {
        /// Which.
        ticket: Ticket,
        /// The leading blocks that were found; none ends the ticket.
        blocks: Vec<Description>,
    },
    /// A fetch or read ended.
    Fetched {
        /// Which.
        ticket: Ticket,
        /// The leading blocks, verified, in the first of the targets.
        blocks: Vec<Verified>,
        /// Targets that hold nothing of use and are free.
        unused: Vec<SlotRef>,
        /// How many targets follow in [`Outcome::Returned`]: a read into them is in flight.
        held: usize,
    },
    /// The targets that a fetch held, now that nothing can write to them any more.
    Returned {
        /// Which.
        ticket: Ticket,
        /// The slots.
        slots: Vec<SlotRef>,
    },
    /// A store ended.
    Stored {
        /// Which.
        ticket: Ticket,
        /// One for each block, in their order.
        results: Vec<StoreResult>,
    },
}

#[derive(Debug)]
pub(super) enum Operation {
    Fetch(Fetch),
    Store(Store),
}

/// A question to a node.
#[derive(Debug, Clone, Copy)]
pub(super) struct Request {
    pub(super) node: NodeId,
    pub(super) peer: PeerId,
    pub(super) sent_at: Instant,
    /// `None` while it is our turn.
    pub(super) timeout_at: Option<Instant>,
    pub(super) purpose: Purpose,
}

/// What a question is about. The operation may have ended meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    LookUp { ticket: u64, group: usize },
    Store { ticket: u64, part: usize },
    Probe,
}
