//! Blocks that are thrown away, also those on their way from one tier to another.

use kvstore_block::BlockIdentity;

use super::Tiers;
use crate::job::{Medium, Moved};
use crate::planted::{Planted, is_planted};
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
            self.drop_from_host(*identity);
            self.drop_from_disk(*identity);
        }
    }

    /// Takes blocks out of host memory alone. A write that is under way goes on: what it writes is verified when it is
    /// read.
    pub(crate) fn forget_on_host(&mut self, chain: &[BlockIdentity]) {
        if let Some(disk) = &mut self.disk {
            disk.unwritten.forget(chain);
        }
        for identity in chain {
            self.drop_damaged(*identity);
        }
    }

    /// Throws a block away whose bytes in host memory are damaged; and what the disk has, if they came from another node and nobody has
    /// compared them since: they may have been damaged before they were written. Whether the disk may still have it.
    pub(crate) fn drop_damaged(&mut self, identity: BlockIdentity) -> bool {
        let slot = self.shared.catalog.places(&identity).and_then(|places| places.slot(HOST));
        let came_damaged = slot.is_some_and(|slot| self.shared.memory.is_unverified(slot));
        if let Some(disk) = self.disk.as_mut().filter(|_| came_damaged) {
            disk.unwritten.forget(&[identity]);
            disk.writes.forget(&identity);
        }
        self.drop_from_host(identity);
        if came_damaged {
            self.drop_from_disk(identity);
        }
        !came_damaged
    }

    pub(super) fn drop_from_disk(&mut self, identity: BlockIdentity) {
        let Some(disk) = &mut self.disk else { return };
        let slot = self.shared.catalog.places(&identity).and_then(|places| places.slot(DISK));
        if self.shared.catalog.remove(DISK, &identity) {
            if let Some(slot) = slot.filter(|_| !is_planted(Planted::LostTombstone)) {
                disk.slots.forget(slot);
            }
            self.tell(Moved::Removed { identity, medium: Medium::Disk });
        }
    }
}
