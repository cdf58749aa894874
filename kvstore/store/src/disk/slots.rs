//! Slots of the disk whose records the disk is to forget.

use std::collections::BTreeSet;

use super::{DiskCommand, DiskLink};

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct DiskSlots {
    /// Slots whose tombstones have not been handed to the disk.
    tombstones: BTreeSet<u32>,
}

impl DiskSlots {
    /// Whether tombstones wait.
    pub(crate) fn has_tombstones(&self) -> bool {
        !self.tombstones.is_empty()
    }

    /// Marks the slot's record on the disk to be forgotten.
    pub(crate) fn forget(&mut self, slot: u32) {
        self.tombstones.insert(slot);
    }

    /// Removes the slot's tombstone: a new block replaces the record.
    pub(crate) fn replace(&mut self, slot: u32) {
        self.tombstones.remove(&slot);
    }

    /// Hands tombstones to the disk, as far as its queue has room.
    pub(crate) fn send_tombstones(&mut self, link: &DiskLink) {
        while let Some(&slot) = self.tombstones.first() {
            if link.try_send(DiskCommand::Forget(slot)).is_err() {
                return;
            }
            self.tombstones.remove(&slot);
        }
    }
}
