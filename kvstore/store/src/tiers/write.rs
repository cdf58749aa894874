//! From host memory to the disk: as soon as a block is there (*through*), or when it has to leave (*back*).

use std::time::{Duration, Instant};

use crate::plan::{Priority, Tier};
use kvstore_block::BlockIdentity;
use kvstore_catalog::{Evicting, Registered, Reserved, TenantId};
use kvstore_disk::Usage;

use super::Tiers;
use crate::disk::{DiskCommand, DiskCopy, Hold, HostCopy, Write};
use crate::fault_injection::{Planted, is_planted};
use crate::job::{Description, Medium, StoreEvent};
use crate::metrics::StoreCounters;
use crate::shared::{DISK, HOST};

/// Blocks written back to the disk at a time, so that their slots come free while new blocks arrive.
const LEAVING_MAX: usize = 16;
/// Blocks that wait to be written which are looked at in a round of the thread.
const WRITES_MAX: usize = 64;
/// Bytes of a block's position in its chain, which stands before the caller's data.
pub(crate) const META_FIXED: usize = 4;

/// A block that was not handed to the disk.
struct NotWritten {
    hold: Hold,
    /// Time after which there is bandwidth for the block; `None`: the disk does not take the block.
    wait: Option<Duration>,
}

impl From<Hold> for NotWritten {
    fn from(hold: Hold) -> Self {
        Self { hold, wait: None }
    }
}

impl Tiers {
    /// Counts an offer of a block: blocks that are offered often enough are written to the disk.
    pub(crate) fn count_offer(&self, identity: &BlockIdentity) {
        if let Some(disk) = &self.disk {
            disk.gate.count_offer(identity);
        }
    }

    /// Queues a block that is new in host memory to be written.
    pub(crate) fn write_through(&mut self, identity: BlockIdentity) {
        if let Some(disk) = &mut self.disk {
            disk.unwritten.push(identity, || self.shared.catalog.pin(HOST, &identity));
        }
    }

    /// Writes under way that can still be answered.
    pub(super) fn writing(&self) -> usize {
        self.disk.as_ref().map_or(0, |disk| disk.writes.answering())
    }

    /// Begins a retry that is due, releases writes held back for bandwidth, and hands waiting blocks to the
    /// disk's queue. Returns whether more can be done at once.
    pub(crate) fn resume_writes(&mut self, now: Instant) -> bool {
        self.retry_write(now);
        if self.bandwidth.release_writes(now) {
            self.room.mark_released();
        }
        self.write_waiting()
    }

    /// Begins the write of a block whose last one failed, if a retry is due.
    fn retry_write(&mut self, now: Instant) {
        if self.next_retry().is_none() {
            return;
        }
        let Some(disk) = &mut self.disk else { return };
        let (shared, writes) = (&self.shared, &disk.writes);
        let is_wanted = |block: &BlockIdentity| {
            shared.holds(HOST, block) && !shared.holds(DISK, block) && !writes.contains(block)
        };
        let Some(identity) = disk.failed.next(now, is_wanted) else { return };
        let Some(lease) = self.shared.catalog.pin(HOST, &identity) else {
            return disk.failed.give_up(&identity, now);
        };
        let parent =
            self.descriptions[lease.slot() as usize].as_ref().and_then(|description| description.parent);
        if let Some(parent) = parent.filter(|parent| !shared.holds(DISK, parent) && !writes.contains(parent))
        {
            disk.unwritten.wait_for_parent(parent, identity);
            return disk.failed.give_up(&identity, now);
        }
        // The block's bytes were charged when it was admitted first.
        disk.gate.keep(identity);
        let (slot, bytes) = (lease.slot(), lease.bytes());
        if let Err(NotWritten { wait, .. }) = self.write_to_disk(identity, slot, bytes, Hold::Lease(lease)) {
            // A limit has been reached.
            if let Some(disk) = &mut self.disk {
                disk.failed.put_back(identity, now);
            }
            if let Some(wait) = wait {
                self.bandwidth.hold_writes(wait);
            }
        }
    }

    /// When the next retry is due; `None` while the disk's queue is full or writes are held back: their ends wake the thread.
    pub(crate) fn next_retry(&self) -> Option<Instant> {
        let disk =
            self.disk.as_ref().filter(|disk| disk.link.has_room() && !self.bandwidth.holds_writes())?;
        disk.failed.next_deadline()
    }

    /// Writes waiting blocks, as far as the disk's queue has room; returns whether it has room for more of
    /// them.
    pub(super) fn write_waiting(&mut self) -> bool {
        for _ in 0..WRITES_MAX {
            if self.bandwidth.holds_writes() {
                return false;
            }
            let Some(disk) = self.disk.as_mut().filter(|disk| disk.link.has_room()) else { return false };
            let Some((identity, held)) = disk.unwritten.pop() else { return false };
            let Some(lease) = held.or_else(|| self.shared.catalog.pin(HOST, &identity)) else {
                StoreCounters::add(&self.shared.counters.gone_unwritten, 1);
                continue;
            };
            let (slot, bytes) = (lease.slot(), lease.bytes());
            // A block that is not written stays in host memory all the same.
            let refused = self.write_to_disk(identity, slot, bytes, Hold::Lease(lease));
            if let Err(NotWritten { hold: Hold::Lease(lease), wait: Some(wait) }) = refused {
                if let Some(disk) = &mut self.disk {
                    disk.unwritten.put_back(identity, lease);
                }
                self.bandwidth.hold_writes(wait);
                return false;
            }
        }
        self.disk.as_ref().is_some_and(|disk| !disk.unwritten.is_empty())
    }

    /// Starts the eviction of the blocks that go next by writing them to the disk. Blocks that the disk has,
    /// or does not take, go at once.
    pub(super) fn write_back(&mut self, tenant: TenantId) {
        let Some(disk) = self.disk.as_ref().filter(|_| !self.bandwidth.holds_writes()) else { return };
        let count = LEAVING_MAX.saturating_sub(disk.writes.answering()).min(disk.link.room());
        let mut evicting = Vec::new();
        self.shared.catalog.evict_for(HOST, tenant, count, &mut evicting);
        for evicting in evicting {
            let (identity, slot, bytes) = (evicting.identity(), evicting.slot(), evicting.bytes());
            match self.write_to_disk(identity, slot, bytes, Hold::Evicting(evicting)) {
                Ok(()) => {}
                Err(NotWritten { hold: Hold::Evicting(evicting), wait: Some(wait) }) => {
                    // This block and those after it stay in host memory until there is bandwidth.
                    self.bandwidth.hold_writes(wait);
                    drop(evicting);
                    return;
                }
                Err(NotWritten { hold: Hold::Evicting(evicting), wait: None }) => {
                    self.finish_eviction(evicting, false);
                }
                Err(NotWritten { hold: Hold::Lease(_), .. }) => {}
            }
        }
    }

    /// Ends the eviction of a block whose removal listeners know of already, or not.
    fn finish_eviction(&mut self, evicting: Evicting, is_published: bool) {
        let (identity, slot) = (evicting.identity(), evicting.slot());
        let is_evicted = evicting.finish();
        let place = self.shared.catalog.places(&identity).and_then(|places| places.slot(HOST));
        if is_evicted && !is_published && place.is_none() {
            self.left_host(identity, slot);
        } else if !is_evicted && is_published && place == Some(slot) {
            // A child of the block was put back, so the block stays. In another slot it would be a new copy,
            // which has been published.
            self.tell(StoreEvent::Stored { identity, medium: Medium::Host });
        }
    }

    /// Hands a block of host memory to the disk; gives `hold` back when the disk has it, or does not get it.
    fn write_to_disk(
        &mut self,
        identity: BlockIdentity,
        slot: u32,
        bytes: u32,
        hold: Hold,
    ) -> Result<(), NotWritten> {
        let (Some(disk), Some(description)) = (&mut self.disk, &self.descriptions[slot as usize]) else {
            return Err(hold.into());
        };
        let is_there = self.shared.holds(DISK, &identity) || disk.writes.contains(&identity);
        // Without its parent a block could never be found; leaves that are written back come before their parents.
        let parent_is_there = description
            .parent
            .is_none_or(|parent| self.shared.holds(DISK, &parent) || disk.writes.contains(&parent));
        let is_wanted = parent_is_there || matches!(hold, Hold::Evicting(_));
        if let Some(parent) = description.parent.filter(|_| !is_there && !is_wanted) {
            disk.unwritten.wait_for_parent(parent, identity);
        }
        if is_there || !is_wanted || !disk.link.has_room() || description.meta.len() > crate::META_BYTES_MAX {
            return Err(hold.into());
        }
        if !disk.gate.admits(identity, bytes, self.retained.wants_written(&identity)) {
            StoreCounters::add(&self.shared.counters.not_admitted, 1);
            return Err(hold.into());
        }
        if let Err(wait) = self.bandwidth.admit(Tier::Disk, Priority::Offload, u64::from(bytes)) {
            disk.gate.keep(identity);
            return Err(NotWritten { hold, wait: Some(wait) });
        }
        let (tenant, host_copy) = (description.tenant, hold.host_copy());
        let Some(reserved) = self.disk_slot(tenant) else { return Err(hold.into()) };
        let (Some(disk), Some(description)) = (&mut self.disk, &self.descriptions[slot as usize]) else {
            return Err(hold.into());
        };
        let payload = self.shared.memory.slot(slot).clone();
        let disk_slot = reserved.slot();
        let filling = reserved.fill();
        let meta = meta_of(description);
        let (parent, position) = (description.parent, description.position);
        let _count = disk.writes_out.guard();
        let write = Write { identity, parent, tenant, position, meta, payload, bytes, hold, filling, _count };
        match disk.link.try_send(DiskCommand::Write(Box::new(write))) {
            Ok(()) => {
                disk.writes.begin(identity, disk_slot, host_copy);
                disk.unwritten.parent_began(&identity);
                Ok(())
            }
            Err(DiskCommand::Write(write)) => {
                StoreCounters::add(&self.shared.counters.throttled, 1);
                // The tombstone of the block that was there before has not been written.
                disk.slots.forget(disk_slot);
                Err(write.hold.into())
            }
            Err(_) => unreachable!("a refused command comes back as it was"),
        }
    }

    /// A slot of the disk, made by evicting if need be.
    fn disk_slot(&mut self, tenant: TenantId) -> Option<Reserved> {
        let disk = self.disk.as_mut()?;
        let (mut evicted, mut reserved) = (Vec::new(), Vec::new());
        self.shared.catalog.reserve(DISK, 1, tenant, &mut evicted, &mut reserved);
        for evicted in evicted {
            disk.slots.forget(evicted.slot);
            disk.reads.gone_from_disk(&evicted.identity);
            StoreCounters::add(&self.shared.counters.disk_evicted, 1);
            (self.notify)(StoreEvent::Removed { identity: evicted.identity, medium: Medium::Disk });
        }
        let reserved = reserved.pop()?;
        disk.slots.replace(reserved.slot());
        Some(reserved)
    }

    /// The disk has answered a write.
    pub(crate) fn written(&mut self, write: Write, is_written: bool, usage: Usage) {
        let Write { identity, parent, position, payload, bytes, hold, filling, .. } = write;
        let Some(disk) = &mut self.disk else { return };
        disk.gate.used(usage);
        let ended = disk.writes.end(&identity);
        self.room.mark_released();
        drop(payload);
        if is_written {
            disk.failed.written(&identity, self.now);
        } else {
            let is_wanted = ended.disk_copy == DiskCopy::Wanted;
            StoreCounters::add(&self.shared.counters.write_failures, usize::from(is_wanted));
            disk.failed.failed(identity, is_wanted && ended.host_copy == HostCopy::Stays, self.now);
        }
        let slot = filling.slot();
        let is_wanted = ended.disk_copy == DiskCopy::Wanted || is_planted(Planted::ForgottenWrite);
        if is_written && is_wanted {
            let cost = self.shared.recompute_cost(position);
            let complete = filling.complete(hold.checksum(), bytes);
            if let Registered::New = complete.register(identity, parent, cost) {
                StoreCounters::add(&self.shared.counters.to_disk, 1);
                self.tell(StoreEvent::Stored { identity, medium: Medium::Disk });
                self.pin_if_retained(DISK, &identity);
            }
        } else {
            disk.slots.forget(slot);
            disk.reads.gone_from_disk(&identity);
            drop(filling);
        }
        if let Hold::Evicting(evicting) = hold {
            let is_published = ended.host_copy == HostCopy::Leaves { removal_published: true };
            self.finish_eviction(evicting, is_published);
        }
    }
}

/// The record that the disk keeps with a block beside its checksum.
fn meta_of(description: &Description) -> Vec<u8> {
    let mut meta = Vec::with_capacity(META_FIXED + description.meta.len());
    meta.extend_from_slice(&description.position.to_le_bytes());
    meta.extend_from_slice(&description.meta);
    meta
}

/// Splits a disk record's metadata into the block's position in its chain and the caller's data.
pub(crate) fn parse_meta(meta: &[u8]) -> Option<(u32, &[u8])> {
    let (position, rest) = meta.split_first_chunk::<META_FIXED>()?;
    Some((u32::from_le_bytes(*position), rest))
}
