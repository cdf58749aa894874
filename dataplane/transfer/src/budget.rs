//! How much one round of the transfer thread may do.

/// Bytes that the processor may still touch in this round. Whoever sums or posts spends from it and stops once it is spent:
/// a round then takes a bounded time, however much is waiting.
#[derive(Debug)]
pub(crate) struct Budget {
    bytes: usize,
    spent: usize,
}

impl Budget {
    /// For a round of so many bytes.
    pub(crate) fn of(bytes: usize) -> Self {
        Self { bytes, spent: 0 }
    }

    /// The last who spends may go beyond what is left.
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
