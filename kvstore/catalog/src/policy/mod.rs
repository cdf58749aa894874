//! Eviction policies: strategies over the same candidates.
//!
//! A policy orders the candidates of one tier, which are the registered blocks without a registered child
//! that were not found pinned. Blocks with children are not in its queues at all: that is what makes eviction
//! leaf-first, and costs nothing to skip. When its last child goes, a parent comes in at the old end, for it
//! is older than its children were.
//!
//! Uses reach the policy without a lock: a reader writes the record whose line it owns anyway (the clock of
//! its last use, a count up to 3), and the policy reads both only when a block has come to the old end. A
//! queue of touches was the alternative: it costs each reader a shared counter and another line, loses
//! touches when no writer drains it, and makes the writer relink each block of each look-up.
//!
//! Under the tier's lock. Each call is O(1) amortised: a block that is moved was used since, or was given
//! another round.

mod cost;
mod ghost;
mod lru;
mod s3_fifo;

use crate::config::PolicyKind;
use crate::list::Node;
use crate::record::Record;
use crate::sketch::FrequencySketch;

/// State that a policy may read and change.
pub(crate) struct PolicyContext<'a> {
    pub(crate) nodes: &'a mut [Node],
    pub(crate) records: &'a [Record],
    pub(crate) sketch: Option<&'a FrequencySketch>,
    pub(crate) clock: u32,
}

/// End of the order at which a candidate comes in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Oldest,
    Newest,
}

pub(crate) trait Policy: Send + std::fmt::Debug {
    /// A block was registered in the slot; it is no candidate yet.
    fn register(&mut self, field: &mut PolicyContext<'_>, slot: u32);
    /// The slot becomes a candidate.
    fn link(&mut self, field: &mut PolicyContext<'_>, slot: u32, end: End);
    /// The slot is no candidate any more.
    fn unlink(&mut self, field: &mut PolicyContext<'_>, slot: u32);
    /// The candidate that should go next, if there is one. It stays a candidate.
    fn next(&mut self, field: &mut PolicyContext<'_>) -> Option<u32>;
    /// The block left the slot, which was unlinked before.
    fn leave(&mut self, field: &mut PolicyContext<'_>, slot: u32, evicted: bool);
    /// The clock has moved on to `field.clock`.
    fn tick(&mut self, _field: &mut PolicyContext<'_>) {}
    /// Candidates, to check.
    fn candidates(&self, nodes: &[Node]) -> Vec<u32>;
}

/// The policy of a tier, with all its memory.
pub(crate) fn create(kind: PolicyKind, slots: u32, seed: u64) -> Box<dyn Policy> {
    match kind {
        PolicyKind::Lru => Box::new(lru::Lru::new()),
        PolicyKind::S3Fifo => Box::new(s3_fifo::S3Fifo::new(slots)),
        PolicyKind::Cost => Box::new(cost::Cost::new(slots, seed)),
    }
}

/// Bytes that the policy takes for each slot, beside nodes and records.
pub(crate) fn bytes_per_slot(kind: PolicyKind) -> usize {
    match kind {
        PolicyKind::Lru => 0,
        PolicyKind::S3Fifo => ghost::BYTES_PER_ENTRY,
        // The dense array of candidates, and the sketch.
        PolicyKind::Cost => 4 + 8,
    }
}
