//! Slots of host memory that far reads fill: each carries its share of the count, and gives it back however it ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvstore_catalog::Filling;

/// The count of slots that are lent. Any thread may give one back; the store's thread alone lends.
///
/// Relaxed throughout: the count guards no other memory, and a slot that comes back in a message was counted off before the
/// message could be taken in.
#[derive(Debug, Default)]
pub(super) struct LentCount(Arc<AtomicUsize>);

impl LentCount {
    /// Lends a slot to a read.
    pub(super) fn lend(&self, filling: Filling) -> LentSlot {
        self.0.fetch_add(1, Ordering::Relaxed);
        LentSlot { filling, share: Share(Arc::clone(&self.0)) }
    }

    /// Slots that are lent now.
    pub(super) fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// One slot's share of the count.
#[derive(Debug)]
struct Share(Arc<AtomicUsize>);

impl Drop for Share {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A slot of host memory that a far read fills. Dropping it frees the slot and gives its share of the count back.
#[derive(Debug)]
pub(crate) struct LentSlot {
    filling: Filling,
    share: Share,
}

impl LentSlot {
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
