//! Blocks of host memory that the store itself holds: for idle conversations, and for retention.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

use kvstore_catalog::Lease;

/// Slots of host memory that are held, each with the number of its leases: a block may be held several times.
///
/// Relaxed throughout: the store's thread alone holds blocks; other threads only read the count.
#[derive(Debug)]
pub(crate) struct HeldSlots {
    leases: Box<[AtomicU32]>,
    slots: AtomicUsize,
}

impl HeldSlots {
    pub(crate) fn new(slot_count: usize) -> Self {
        let leases = (0..slot_count).map(|_| AtomicU32::new(0)).collect();
        Self { leases, slots: AtomicUsize::new(0) }
    }

    /// Number of slots that are held.
    pub(crate) fn slots(&self) -> usize {
        self.slots.load(Ordering::Relaxed)
    }

    /// Counts the slot as held as long as the block exists.
    pub(crate) fn hold(self: &Arc<Self>, lease: Lease) -> HeldBlock {
        if self.leases[lease.slot() as usize].fetch_add(1, Ordering::Relaxed) == 0 {
            self.slots.fetch_add(1, Ordering::Relaxed);
        }
        HeldBlock { lease, held: Arc::clone(self) }
    }
}

/// A block of host memory that stays there while this exists.
#[derive(Debug)]
pub(crate) struct HeldBlock {
    lease: Lease,
    held: Arc<HeldSlots>,
}

impl HeldBlock {
    pub(crate) fn lease(&self) -> &Lease {
        &self.lease
    }
}

impl Drop for HeldBlock {
    fn drop(&mut self) {
        if self.held.leases[self.lease.slot() as usize].fetch_sub(1, Ordering::Relaxed) == 1 {
            self.held.slots.fetch_sub(1, Ordering::Relaxed);
        }
    }
}
