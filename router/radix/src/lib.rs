//! The prefix index: the length of the prefix that each (worker, rank) holds, and its tier.
//!
//! *Structure.* A compressed prefix tree over block hashes. A node is a run of up to 28 blocks in 256 bytes, with its
//! holders: up to four members in one word, else a bit per member, and masks for those that hold part of
//! it or hold it in lower tiers. Children of a fork are in one table, the only child of a node is in the node.
//! Beside the tree, one table per member has the position of each block by the engine's hash.
//!
//! *Readers* ([`Reader`]) walk down the tree: no lock, no allocation, no waiting; the cost is that of the nodes passed and
//! nearly flat in the number of members. *One writer at a time* ([`IndexWriter`]) changes the tree concurrently. Safety
//! argument: (1) values that must be seen together are in one word, and everything that a word refers to was stored before
//! it; (2) a reader uses values taken from a node only if the node's shape is still the same afterwards; (3) unlinked memory
//! is reused only after every reader that was reading then has left (`grace.rs`). From (1) and (2) each node is seen as it was
//! at one moment, from (3) it is still the node that the link meant. So a prefix that was wholly stored before a look-up and
//! stays is counted in full, and blocks that a member never held are never counted. The same code runs under loom, and there
//! each of the three, broken on purpose, is detected.
//!
//! *Memory*: about 24 bytes per (worker, block); nodes, sets and tables are freed as blocks go. Limit and behaviour at the
//! limit: [`IndexConfig`]. 100 M blocks and [`MEMBERS_MAX`] members fit the numbers used.
//!
//! *Rejected alternatives*, 128 blocks: one table of sequence hashes, a probe per block: 4.5 us where this takes
//! 0.13 to 1.3, and it needs the hashes chained. Binary search in it: right only without holes. Sets as maps:
//! a cost per worker. Interned sets: a set of its own for nearly every node. Figures: `bench/RESULTS.md`.

mod aliases;
mod arena;
mod children;
mod grace;
mod holders;
mod huge;
mod index;
mod keys;
mod limits;
mod node;
mod parked;
mod pool;
mod reader;
mod sync;
mod writer;

pub use holders::Tier;
pub use index::{Held, Index, IndexConfig, IndexWriter, Member, Outcome, Usage};
pub use keys::EngineHash;
pub use limits::{MEMBERS_MAX, READERS_MAX};
pub use reader::{Overlaps, Reader};

/// A fault that a model check plants, to show that it is detected.
#[cfg(loom)]
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlantedFault {
    /// No fault.
    Nothing,
    /// Unlinked memory is reused at once.
    NoGrace,
    /// A split is published before the new node is complete.
    EarlySplit,
    /// Readers do not check the shape again.
    NoSecondLook,
}

#[cfg(loom)]
static BROKEN: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);

/// Plants a fault in the following models.
#[cfg(loom)]
#[doc(hidden)]
pub fn break_on_purpose(what: PlantedFault) {
    BROKEN.store(what as u32, std::sync::atomic::Ordering::SeqCst);
}

#[cfg(loom)]
pub(crate) fn broken(what: PlantedFault) -> bool {
    BROKEN.load(std::sync::atomic::Ordering::SeqCst) == what as u32
}
