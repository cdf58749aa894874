//! Limit of the work that the transfer thread does in one round.

/// Bytes of work left in this round. Checksumming and posting call `spend` and stop when `is_spent`, so that a round's time does
/// not grow with the backlog.
#[derive(Debug)]
pub(crate) struct Budget {
    bytes: usize,
    spent: usize,
}

impl Budget {
    /// Makes the budget of a round, in bytes.
    pub(crate) fn new(bytes: usize) -> Self {
        Self { bytes, spent: 0 }
    }

    /// Spends bytes. May exceed the rest of the budget, since the last step is completed.
    pub(crate) fn spend(&mut self, bytes: usize) {
        self.spent += bytes;
    }

    pub(crate) fn spent(&self) -> usize {
        self.spent
    }

    pub(crate) fn left(&self) -> usize {
        self.bytes.saturating_sub(self.spent)
    }

    pub(crate) fn is_spent(&self) -> bool {
        self.left() == 0
    }
}
