//! [`PoolBlocks`]: the interface between the pool server and the owner of the blocks.

use std::sync::Arc;
use std::time::Duration;

use dataplane_fabric::wait::Bell;
use dataplane_memory::{Slab, SlotRef};
use kvstore_block::BlockIdentity;

use crate::wire::Description;

/// A block that can be read where it lies, as long as this exists.
#[derive(Debug)]
pub struct Readable<H> {
    /// Where it lies.
    pub slot: SlotRef,
    /// Parent, length, checksum and the writer's word.
    pub description: Description,
    /// Keeps it there.
    pub hold: H,
}

/// A free slot for a new block, as long as this exists.
#[derive(Debug)]
pub struct Writable<H> {
    /// The slot.
    pub slot: SlotRef,
    /// Keeps it free.
    pub hold: H,
}

/// The answer to a look-up.
#[derive(Debug)]
pub enum LookedUp<H> {
    /// The leading blocks that are in memory; there are no more.
    Now(Vec<Readable<H>>),
    /// More are being brought into memory: [`Answer::Found`] follows.
    Later,
}

/// A delayed answer; `question` is the number that the call was given.
#[derive(Debug)]
pub enum Answer<H> {
    /// The leading blocks of a look-up that are in memory.
    Found {
        /// The question's number.
        question: u64,
        /// The blocks.
        blocks: Vec<Readable<H>>,
    },
    /// Whether a new block can be found from now on.
    Registered {
        /// The question's number.
        question: u64,
        /// Whether it can.
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
    /// Blocks that have left memory to make room, so far.
    pub evicted: u64,
}

/// The blocks of a pool. Called by the pool's thread; must not block.
pub trait PoolBlocks {
    /// Keeps a block in its slot.
    type Reading: Send;
    /// Keeps a slot free for a new block.
    type Writing: Send;

    /// The memory of all slots.
    fn slab(&self) -> &Arc<Slab>;
    /// Slots and blocks at this moment. May take a lock.
    fn levels(&self) -> PoolLevels;
    /// The leading blocks of a chain, which count as used.
    fn look_up(&mut self, question: u64, chain: &[BlockIdentity]) -> LookedUp<Self::Reading>;
    /// A block that is in memory.
    fn find(&mut self, identity: &BlockIdentity) -> Option<Readable<Self::Reading>>;
    /// Whether the block is there, in memory or below; it counts as used then.
    fn contains(&mut self, identity: &BlockIdentity) -> bool;
    /// A free slot, at the cost of a block that nobody uses.
    fn reserve(&mut self) -> Option<Writable<Self::Writing>>;
    /// Registers a block whose bytes were verified; whether it is kept. `None`: [`Answer::Registered`] follows.
    fn register(
        &mut self,
        question: u64,
        identity: BlockIdentity,
        description: Description,
        written: Writable<Self::Writing>,
    ) -> Option<bool>;
    /// Retains consecutive blocks of a chain for so long, now or when they come. A hint.
    fn retain(&mut self, chain: &[BlockIdentity], how_long: Duration);
    /// Throws the copy of a block away that is damaged in memory.
    fn remove(&mut self, identity: &BlockIdentity);
    /// The next answer that was not known at once.
    fn next_answer(&mut self) -> Option<Answer<Self::Reading>>;
    /// Whether there is one.
    fn has_answers(&self) -> bool;
    /// Rings the bell when there is one.
    fn set_bell(&mut self, bell: Arc<Bell>);
}
