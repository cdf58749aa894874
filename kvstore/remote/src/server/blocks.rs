//! [`PoolBlocks`]: the interface between the pool server and the owner of the blocks.

use std::sync::Arc;
use std::time::Duration;

use dataplane_fabric::wait::Notifier;
use dataplane_memory::{Slab, SlotRef};
use kvstore_block::BlockIdentity;

use crate::wire::Description;

/// A block that can be read in place as long as this value exists.
#[derive(Debug)]
pub struct Readable<H> {
    /// Slot of the block.
    pub slot: SlotRef,
    /// Parent, length, checksum and the writer's word.
    pub description: Description,
    /// Keeps the block in its slot.
    pub hold: H,
}

/// A free slot for a new block, reserved as long as this value exists.
#[derive(Debug)]
pub struct Writable<H> {
    /// The slot.
    pub slot: SlotRef,
    /// Keeps the slot reserved.
    pub hold: H,
}

/// Result of a look-up.
#[derive(Debug)]
pub enum LookUpResult<H> {
    /// The leading blocks that are in memory; no more will follow.
    Ready(Vec<Readable<H>>),
    /// More blocks are being brought into memory: [`Answer::Found`] follows.
    Pending,
}

/// A delayed answer; `question` is the number that was passed to the call.
#[derive(Debug)]
pub enum Answer<H> {
    /// The leading blocks of a look-up that are in memory.
    Found {
        /// Number that was passed to the call.
        question: u64,
        /// The blocks.
        blocks: Vec<Readable<H>>,
    },
    /// Result of registering a new block.
    Registered {
        /// Number that was passed to the call.
        question: u64,
        /// Whether the block was kept and can be found from now on.
        is_kept: bool,
    },
}

/// Slots and blocks at this moment, for metrics and clients.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolLevels {
    /// Slots in memory.
    pub slots: usize,
    /// Slots in memory without a block.
    pub free: usize,
    /// Blocks in memory.
    pub blocks: usize,
    /// Number of blocks evicted from memory so far.
    pub evicted: u64,
}

/// The blocks of a pool. Called by the pool's thread; must not block.
pub trait PoolBlocks {
    /// Guard that keeps a block in its slot.
    type Reading: Send;
    /// Guard that keeps a slot reserved for a new block.
    type Writing: Send;

    /// The memory of all slots.
    fn slab(&self) -> &Arc<Slab>;
    /// Slots and blocks at this moment. May take a lock.
    fn levels(&self) -> PoolLevels;
    /// Looks up the leading blocks of a chain, and counts them as used.
    fn look_up(&mut self, question: u64, chain: &[BlockIdentity]) -> LookUpResult<Self::Reading>;
    /// Returns a block that is in memory.
    fn find(&mut self, identity: &BlockIdentity) -> Option<Readable<Self::Reading>>;
    /// Whether the block is in memory or in a lower tier; counts it as used if so.
    fn contains(&mut self, identity: &BlockIdentity) -> bool;
    /// Reserves a free slot; evicts an unused block if there is none.
    fn reserve(&mut self) -> Option<Writable<Self::Writing>>;
    /// Registers a block whose bytes were verified. Returns whether it is kept; `None`: [`Answer::Registered`]
    /// follows.
    fn register(
        &mut self,
        question: u64,
        identity: BlockIdentity,
        description: Description,
        written: Writable<Self::Writing>,
    ) -> Option<bool>;
    /// Retains consecutive blocks of a chain for this time, now or once they are stored. A hint.
    fn retain(&mut self, chain: &[BlockIdentity], how_long: Duration);
    /// Drops the copy of a block that is damaged in memory.
    fn remove(&mut self, identity: &BlockIdentity);
    /// Takes the next delayed answer.
    fn next_answer(&mut self) -> Option<Answer<Self::Reading>>;
    /// Whether a delayed answer is ready.
    fn has_answers(&self) -> bool;
    /// Sets the notifier to call when a delayed answer is ready.
    fn set_notifier(&mut self, notifier: Arc<Notifier>);
}
