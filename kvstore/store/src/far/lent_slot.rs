//! Slots of host memory that far reads fill: each carries its share of the count, and gives it back however it ends.

use kvstore_catalog::Filling;

use crate::guarded_count::{CountGuard, GuardedCount};

/// A slot of host memory that a far read fills. Dropping it frees the slot and gives its share of the count back.
#[derive(Debug)]
pub(crate) struct LentSlot {
    filling: Filling,
    share: CountGuard,
}

impl LentSlot {
    /// Lends a slot to a read.
    pub(super) fn new(filling: Filling, lent: &GuardedCount) -> Self {
        Self { filling, share: lent.guard() }
    }

    /// The slot's number.
    pub(super) fn slot(&self) -> u32 {
        self.filling.slot()
    }

    /// The slot, which is not lent any more.
    pub(super) fn into_filling(self) -> Filling {
        let Self { filling, share } = self;
        drop(share);
        filling
    }

    /// The decrement that the test plants: the slot comes back, its share of the count does not.
    #[cfg(test)]
    pub(super) fn lose_share(self) {
        let Self { filling, share } = self;
        std::mem::forget(share);
        drop(filling);
    }
}
