//! Every capacity of the index, named and derived in one place.

/// (worker, rank) pairs that can be in an index at a time.
pub const MEMBERS_MAX: usize = 4096;

/// Numbers of members inside the index. Twice the pairs: one that was cleared gets a new number at once, and
/// the old one is given back when its blocks have been swept.
#[cfg(not(loom))]
pub(crate) const IDS_MAX: usize = 2 * MEMBERS_MAX;
#[cfg(loom)]
pub(crate) const IDS_MAX: usize = 64;

/// Words of a set of members at most.
pub(crate) const WORDS_MAX: usize = IDS_MAX / 64;

/// Blocks of one node. With the 32-byte header a node is 256 bytes: four cache lines. Nodes of 12 blocks (128
/// bytes) waste less at the end of a run, but a look-up of 128 blocks then follows 11 pointers and not 5.
#[cfg(not(loom))]
pub(crate) const NODE_BLOCKS: usize = 28;
#[cfg(loom)]
pub(crate) const NODE_BLOCKS: usize = 3;

/// Nodes that are allocated and given back together: 2 MiB.
#[cfg(not(loom))]
pub(crate) const SEGMENT_NODES: usize = 8192;
#[cfg(loom)]
pub(crate) const SEGMENT_NODES: usize = 8;

/// Segments at most. Node numbers have 27 bits, so that a position (node and offset) fits 32.
#[cfg(not(loom))]
pub(crate) const SEGMENTS_MAX: usize = (1 << 27) / SEGMENT_NODES;
#[cfg(loom)]
pub(crate) const SEGMENTS_MAX: usize = 2;

/// Slots of one piece of the table of children.
#[cfg(not(loom))]
pub(crate) const TABLE_SLOTS: usize = 512;
#[cfg(loom)]
pub(crate) const TABLE_SLOTS: usize = 4;

/// Readers at a time: threads that route, not requests.
#[cfg(not(loom))]
pub const READERS_MAX: usize = 1024;
/// Readers at a time.
#[cfg(loom)]
pub const READERS_MAX: usize = 2;

/// A node with more members than this that hold only part of it is split where most of them end.
pub(crate) const PARTIAL_MAX: usize = 16;

/// Blocks of one member that wait for a parent that is not known yet. More are left out and counted.
pub(crate) const ORPHANS_MAX: usize = 4096;

/// Blocks of forgotten members that are swept per operation of a writer.
pub(crate) const SWEEP_STEP: usize = 64;
