//! Tracks whether completed writes may be lost: a reset of the controller loses those that no flush has made
//! durable.

/// Reason of the error with which the next sync fails after such a loss.
pub(crate) const LOST: &str =
    "the controller was reset after writes that no sync had followed; they may be lost";

/// State of completed writes.
#[derive(Debug, Default)]
pub(crate) struct VolatileCache {
    is_dirty: bool,
    /// A flush that covers some of them is in flight.
    is_flushing: bool,
    is_lost: bool,
}

impl VolatileCache {
    /// Records a completed write.
    #[inline]
    pub(crate) fn note_write(&mut self) {
        self.is_dirty = true;
    }

    /// Records a reset. A later flush that succeeds says nothing about writes before the reset.
    pub(crate) fn note_reset(&mut self) {
        self.is_lost |= std::mem::take(&mut self.is_dirty) | std::mem::take(&mut self.is_flushing);
    }

    /// Whether writes were lost; true once for each loss.
    pub(crate) fn take_loss(&mut self) -> bool {
        std::mem::take(&mut self.is_lost)
    }

    pub(crate) fn begin_flush(&mut self) {
        self.is_flushing = std::mem::take(&mut self.is_dirty);
    }

    /// Records the end of a flush. Returns whether writes were lost although the flush succeeded.
    pub(crate) fn end_flush(&mut self, succeeded: bool) -> bool {
        self.is_dirty |= std::mem::take(&mut self.is_flushing) && !succeeded;
        succeeded && self.take_loss()
    }
}
