//! The disk's slots after their blocks: what it is to forget, and what hangs on nothing.

use std::collections::BTreeSet;

use kvstore_catalog::Catalog;

use super::{DiskCommand, DiskLink};
use crate::shared::DISK;

/// Blocks written back between two walks over the disk's slots that hang children on their parents.
const ORPHANS_MAX: usize = 4096;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct DiskSlots {
    /// Slots whose tombstones have not been handed to the disk.
    tombstones: BTreeSet<u32>,
    /// Blocks written back since children were hung on their parents last.
    orphans: usize,
}

impl DiskSlots {
    /// Whether tombstones wait.
    pub(crate) fn has_tombstones(&self) -> bool {
        !self.tombstones.is_empty()
    }

    /// What was in the slot is to be forgotten there.
    pub(crate) fn forget(&mut self, slot: u32) {
        self.tombstones.insert(slot);
    }

    /// What was to be forgotten is replaced.
    pub(crate) fn replace(&mut self, slot: u32) {
        self.tombstones.remove(&slot);
    }

    /// Hands tombstones to the disk, as far as its queue has room.
    pub(crate) fn bury(&mut self, link: &DiskLink) {
        while let Some(&slot) = self.tombstones.first() {
            if link.try_send(DiskCommand::Forget(slot)).is_err() {
                return;
            }
            self.tombstones.remove(&slot);
        }
    }

    /// A block was written, perhaps before its parent: such blocks are hung on their parents from time to time.
    pub(crate) fn relink(&mut self, catalog: &Catalog) {
        self.orphans += 1;
        if self.orphans >= ORPHANS_MAX {
            self.orphans = 0;
            catalog.relink(DISK);
        }
    }
}
