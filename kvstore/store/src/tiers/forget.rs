//! Blocks that are thrown away, also those on their way from one tier to another.

use kvstore_block::BlockIdentity;

use super::Tiers;
use crate::job::{Medium, Moved};
use crate::planted::{Planted, is_planted};
use crate::shared::DISK;

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
            self.drop_from_host(*identity);
        }
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
