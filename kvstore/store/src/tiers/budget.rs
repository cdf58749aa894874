//! How much the store's thread may hash before it looks at something else.

/// Bytes hashed in a part of a round: about a millisecond.
const HASH_BYTES_MAX: usize = 8 << 20;

/// What is left of it. A block is hashed whole, so the last one may exceed it.
#[derive(Debug)]
pub(crate) struct HashBudget {
    left: usize,
}

impl HashBudget {
    pub(crate) fn new() -> Self {
        Self { left: HASH_BYTES_MAX }
    }

    /// Another part of a round begins.
    pub(crate) fn refill(&mut self) {
        self.left = HASH_BYTES_MAX;
    }

    /// Whether what is left to hash has to wait for the next round.
    pub(crate) fn is_spent(&self) -> bool {
        self.left == 0
    }

    pub(super) fn spend(&mut self, bytes: usize) {
        self.left = self.left.saturating_sub(bytes);
    }
}
