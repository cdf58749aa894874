//! How much one round of the transfer thread may do.

/// Bytes of work left in this round. Checksumming and posting call `spend` and stop when `is_spent`, so that a round's time does
/// not grow with the backlog.
#[derive(Debug)]
pub(crate) struct Budget {
    bytes: usize,
    spent: usize,
}

impl Budget {
    /// For a round of so many bytes.
    pub(crate) fn new(bytes: usize) -> Self {
        Self { bytes, spent: 0 }
    }

    /// May exceed what is left: the last step is finished.
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
