//! Removal of blocks, also of blocks on their way from one tier to another.

use kvstore_block::BlockIdentity;

use super::Tiers;
use crate::fault_injection::{Planted, is_planted};
use crate::job::{Medium, StoreEvent};
use crate::shared::{DISK, HOST};

impl Tiers {
    /// Takes blocks out of every tier of this node.
    pub(crate) fn forget(&mut self, chain: &[BlockIdentity]) {
        if let Some(disk) = &mut self.disk {
            disk.unwritten.forget(chain);
            for identity in chain {
                disk.writes.forget(identity);
                disk.reads.forget(identity);
            }
        }
        for identity in chain {
            self.retained.cancel(identity, self.now, &self.shared);
            self.unmap(identity);
            self.drop_from_host(*identity);
            self.drop_from_disk(*identity);
        }
    }

    /// Takes blocks out of host memory alone whose copies there are damaged. A write that is under way goes on.
    pub(crate) fn forget_on_host(&mut self, chain: &[BlockIdentity]) {
        if let Some(disk) = &mut self.disk {
            disk.unwritten.forget(chain);
        }
        for identity in chain {
            self.drop_damaged(*identity);
        }
    }

    /// Discards a block whose bytes in host memory are damaged. They may have come from the disk as they are,
    /// or been written there: the log verifies the next read of the block. Returns whether the block was
    /// damaged; one in a pool's memory may only have gone from there.
    pub(crate) fn drop_damaged(&mut self, identity: BlockIdentity) -> bool {
        if !self.shared.holds(HOST, &identity)
            && let Some(is_damaged) = self.drop_mapped(&identity)
        {
            return is_damaged;
        }
        self.drop_from_host(identity);
        if let Some(disk) = &mut self.disk
            && (self.shared.holds(DISK, &identity) || disk.writes.contains(&identity))
        {
            disk.reads.verify_next(identity);
        }
        true
    }

    pub(super) fn drop_from_disk(&mut self, identity: BlockIdentity) {
        let Some(disk) = &mut self.disk else { return };
        let slot = self.shared.catalog.places(&identity).and_then(|places| places.slot(DISK));
        disk.reads.gone_from_disk(&identity);
        self.retained.copy_lost(DISK, &identity, self.now, &self.shared);
        if self.shared.catalog.remove(DISK, &identity) {
            if let Some(slot) = slot.filter(|_| !is_planted(Planted::LostTombstone)) {
                disk.slots.forget(slot);
            }
            self.tell(StoreEvent::Removed { identity, medium: Medium::Disk });
        }
    }
}
