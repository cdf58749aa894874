//! Limit on the bytes that the store's thread hashes before it turns to other work.

/// Bytes hashed in a part of a round: about a millisecond.
const HASH_BYTES_MAX: usize = 8 << 20;

/// Bytes left to hash. A block is hashed whole, so the last one may exceed the budget.
#[derive(Debug)]
pub(crate) struct HashBudget {
    left: usize,
}

impl HashBudget {
    pub(crate) fn new() -> Self {
        Self { left: HASH_BYTES_MAX }
    }

    /// Starts another part of a round with the full budget.
    pub(crate) fn refill(&mut self) {
        self.left = HASH_BYTES_MAX;
    }

    /// Whether the budget is used up: further hashing waits for the next round.
    pub(crate) fn is_spent(&self) -> bool {
        self.left == 0
    }

    pub(super) fn spend(&mut self, bytes: usize) {
        self.left = self.left.saturating_sub(bytes);
    }
}
