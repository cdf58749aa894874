//! Whether writes that completed may be lost: what no flush has carried out goes when the controller is reset.

/// Why a sync fails once after that.
pub(crate) const LOST: &str =
    "the controller was reset after writes that no sync had followed; they may be lost";

/// Where completed writes are.
#[derive(Debug, Default)]
pub(crate) struct VolatileCache {
    is_dirty: bool,
    /// A flush that carries some is under way.
    is_flushing: bool,
    is_lost: bool,
}

impl VolatileCache {
    /// A write completed.
    #[inline]
    pub(crate) fn note_write(&mut self) {
        self.is_dirty = true;
    }

    /// The controller was reset. A flush that succeeds came after it and says nothing about writes before it.
    pub(crate) fn note_reset(&mut self) {
        self.is_lost |= std::mem::take(&mut self.is_dirty) | std::mem::take(&mut self.is_flushing);
    }

    /// Whether writes were lost; says so once.
    pub(crate) fn take_loss(&mut self) -> bool {
        std::mem::take(&mut self.is_lost)
    }

    pub(crate) fn begin_flush(&mut self) {
        self.is_flushing = std::mem::take(&mut self.is_dirty);
    }

    /// Whether writes were lost although the flush succeeded.
    pub(crate) fn end_flush(&mut self, succeeded: bool) -> bool {
        self.is_dirty |= std::mem::take(&mut self.is_flushing) && !succeeded;
        succeeded && self.take_loss()
    }
}
