//! One operation on an index.

use kvstore_block::chained_hash;

/// A stored block: the hash of its tokens, and the engine's hash of it.
type Block = (u64, u64);

/// One operation on an index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operation {
    /// A worker stored blocks after `parent`.
    Stored {
        /// Number of the worker.
        worker: usize,
        /// The engine's hash of the block before the first; `None` at the start of a chain.
        parent: Option<u64>,
        /// (block hash, sequence hash), each the child of the one before.
        blocks: Vec<Block>,
    },
    /// A worker removed blocks.
    Removed {
        /// Number of the worker.
        worker: usize,
        /// The engine's hashes of the blocks.
        sequences: Vec<u64>,
    },
    /// A prompt is looked up.
    Lookup {
        /// Block hashes of the prompt.
        blocks: Vec<u64>,
    },
}

/// Operations on one index.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Workload {
    /// Number of workers; their numbers are below it.
    pub workers: usize,
    /// Operations in order.
    pub operations: Vec<Operation>,
}

impl Workload {
    /// Number of blocks that are stored or removed.
    #[must_use]
    pub fn changed_blocks(&self) -> usize {
        let of = |operation: &Operation| match operation {
            Operation::Stored { blocks, .. } => blocks.len(),
            Operation::Removed { sequences, .. } => sequences.len(),
            Operation::Lookup { .. } => 0,
        };
        self.operations.iter().map(of).sum()
    }
}

/// The sequence hashes of a chain of block hashes.
#[must_use]
pub fn chained(blocks: &[u64]) -> Vec<u64> {
    let mut parent = None;
    let next = |&block: &u64| {
        let hash = chained_hash(parent, block);
        parent = Some(hash);
        hash
    };
    blocks.iter().map(next).collect()
}
