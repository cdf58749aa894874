//! From the disk into host memory.

use crate::plan::Tier;
use kvstore_block::BlockIdentity;
use kvstore_disk::ReadCheck;

use super::{Arrival, Origin, Tiers};
use crate::disk::{DiskCommand, Read, Waiter};
use crate::fault_injection::{Planted, is_planted};
use crate::metrics::StoreCounters;
use crate::quota::UNOWNED;
use crate::shared::DISK;

/// Outcome of an attempt to start a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ReadStart {
    InFlight,
    /// There is no room for the block now.
    NoFreeSlot,
    /// The disk does not have the block.
    NotOnDisk,
}

/// Parent and position of a block in the chain of the loads that wait for it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ChainPosition {
    pub(crate) parent: Option<BlockIdentity>,
    pub(crate) position: Option<u32>,
}

impl Tiers {
    /// Starts a read, or joins one that is under way. `is_paid`: its bandwidth has been taken.
    pub(crate) fn read_from_disk(
        &mut self,
        identity: BlockIdentity,
        waiter: Waiter,
        is_paid: bool,
    ) -> ReadStart {
        let Some(disk) = &mut self.disk else { return ReadStart::NotOnDisk };
        if disk.reads.join(&identity, waiter) {
            return ReadStart::InFlight;
        }
        if disk.writes.is_answering(&identity) {
            // The block is leaving host memory for the disk: it can be read after its write.
            return ReadStart::NoFreeSlot;
        }
        let Some(lease) = self.shared.catalog.lease(DISK, &identity) else { return ReadStart::NotOnDisk };
        let tenant = self.shared.catalog.tenant_of(&lease).unwrap_or(UNOWNED);
        let Some(reserved) = self.host_slot(tenant) else { return ReadStart::NoFreeSlot };
        let Some(disk) = &mut self.disk else { return ReadStart::NotOnDisk };
        let filling = reserved.fill();
        let target = self.shared.memory.slot(filling.slot()).clone();
        let bytes = u64::from(lease.bytes());
        let number = disk.reads.number();
        let _count = disk.reads_out.guard();
        let check = disk.reads.check(&identity);
        let read = Read { number, identity, lease, filling, target, check, description: None, _count };
        if disk.link.try_send(DiskCommand::Read(Box::new(read))).is_err() {
            return ReadStart::NoFreeSlot;
        }
        if !is_paid {
            self.bandwidth.charge(Tier::Disk, bytes);
        }
        disk.reads.begin(number, identity, waiter);
        ReadStart::InFlight
    }

    /// Ends a read that the disk has answered; returns the loads that wait for it.
    pub(crate) fn end_read(&mut self, read: &Read) -> Vec<Waiter> {
        self.room.mark_released();
        let disk = self.disk.as_mut();
        disk.map_or_else(Vec::new, |disk| disk.reads.end(read.number, &read.identity))
    }

    /// Makes a block that the disk has read part of host memory, if it is still wanted. Its readers compare
    /// it with its checksum, if the log has not.
    pub(crate) fn came_from_disk(
        &mut self,
        read: Read,
        bytes: Option<u32>,
        is_gone: bool,
        place: ChainPosition,
    ) {
        let Read { number, identity, lease, filling, check, description, .. } = read;
        let was_forgotten = self.disk.as_mut().is_some_and(|disk| disk.reads.take_forgotten(number));
        if let (Some(bytes), false) = (bytes, was_forgotten) {
            // Readers may name chains of their own making: the parent and the position that were kept with
            // the block count.
            let (parent, position) = match &description {
                Some(description) => (description.parent, description.position),
                None => (place.parent.or(lease.parent()), place.position.unwrap_or(0)),
            };
            let arrival = Arrival {
                identity,
                parent,
                position,
                bytes,
                checksum: lease.checksum(),
                origin: Origin::Disk,
                description,
            };
            self.register(filling, arrival);
        } else {
            StoreCounters::add(&self.shared.counters.disk_misses, 1);
            // A block that was forgotten meanwhile may be on the disk again, in another slot.
            let is_this_copy = self.shared.catalog.places(&identity).and_then(|places| places.slot(DISK))
                == Some(lease.slot());
            drop((lease, filling));
            if is_gone {
                if is_this_copy {
                    self.drop_from_disk(identity);
                }
            } else if let Some(disk) = self.disk.as_mut().filter(|_| check == ReadCheck::Log) {
                // The device has not answered whether the block is damaged.
                disk.reads.verify_next(identity);
            }
        }
    }

    /// Gives up a read that the device does not answer; returns the loads that waited for it.
    pub(crate) fn give_up_read(&mut self, identity: &BlockIdentity) -> Vec<Waiter> {
        self.disk.as_mut().map_or_else(Vec::new, |disk| disk.reads.give_up(identity))
    }

    /// Gives up a write that the device does not answer.
    pub(crate) fn give_up_write(&mut self, identity: &BlockIdentity) {
        if let Some(disk) = &mut self.disk {
            disk.writes.stuck(identity);
            disk.failed.give_up(identity, self.now);
            if is_planted(Planted::LostWrite) {
                disk.writes.end(identity);
            }
        }
        self.room.mark_released();
    }
}
