//! Blocks of host memory on their way to their destinations: copied and verified, or verified and copied by a
//! device.

use std::time::{Duration, Instant};

use dataplane_memory::SlotRef;
use kvstore_block::BlockIdentity;
use kvstore_catalog::Lease;

use super::Loads;
use super::state::{Load, State};
use crate::device::{DeviceCopies, Purpose, UnstartedCopy};
use crate::job::Destination;
use crate::metrics::StoreCounters;
use crate::shared::MAPPED;
use crate::tiers::{ReadStart, Tiers};

/// Bytes copied for all loads together before the inbox is looked at again.
pub(crate) const COPY_BYTES_MAX: usize = 8 << 20;

impl Loads {
    /// Copies blocks that have arrived, and ends complete loads; false when there was nothing to do.
    pub(crate) fn advance(&mut self, tiers: &mut Tiers, device: &mut DeviceCopies) -> bool {
        let mut budget = COPY_BYTES_MAX;
        let has_room = tiers.room.take_for_loads();
        let mut due: Vec<u64> =
            self.table.iter().filter(|(_, load)| load.is_due(has_room)).map(|(&number, _)| number).collect();
        // First come, first served.
        due.sort_unstable();
        let mut worked = false;
        for number in due {
            let Some(mut load) = self.table.remove(&number) else { continue };
            let before = load.cursor;
            let is_over = load.advance(number, &mut budget, tiers, device);
            worked |= is_over || load.cursor > before;
            if is_over {
                Self::finish(load, tiers);
            } else {
                self.take_hold(number, &mut load, tiers, device);
                self.table.insert(number, load);
            }
        }
        if worked {
            // Released leases are room for other work.
            tiers.room.mark_released();
        }
        worked
    }

    /// A block has arrived in a device's memory, or has not.
    pub(crate) fn moved_out(&mut self, number: u64, index: usize, lease: Lease, is_good: bool) {
        drop(lease);
        // A load that was cancelled is gone; its slots were held by the copy until now.
        let Some(load) = self.table.get_mut(&number) else { return };
        load.moving -= 1;
        load.states[index] = if is_good { State::Done(None) } else { State::Failed };
        if !is_good {
            load.cursor = load.cursor.min(index);
        }
        if load.moving == 0 {
            load.copying += load.moving_since.take().map_or(Duration::ZERO, |since| since.elapsed());
        }
    }
}

impl Load {
    /// Whether the load is over.
    fn advance(
        &mut self,
        number: u64,
        budget: &mut usize,
        tiers: &mut Tiers,
        device: &mut DeviceCopies,
    ) -> bool {
        loop {
            if self.is_late {
                return self.moving == 0;
            }
            let Some(state) = self.states.get_mut(self.cursor) else { return self.moving == 0 };
            match state {
                State::ReadingDisk | State::Queued => return false,
                State::Failed => return self.moving == 0,
                State::Done(_) | State::CopyingToDevice => self.cursor += 1,
                State::Resident(_) if *budget == 0 => return false,
                State::Resident(_) => {
                    let State::Resident(lease) = std::mem::replace(state, State::Done(None)) else {
                        continue;
                    };
                    *budget = budget.saturating_sub(lease.bytes() as usize);
                    if !self.hand_over(number, lease, tiers, device) {
                        return false;
                    }
                }
            }
        }
    }

    /// Passes the block at the cursor to its destination; false when there is no room for its copy now.
    fn hand_over(&mut self, number: u64, lease: Lease, tiers: &mut Tiers, device: &mut DeviceCopies) -> bool {
        let index = self.cursor;
        let target = match &self.destination {
            Destination::Held(_) | Destination::Ahead(_) => {
                self.states[index] = State::Done(Some(lease));
                return true;
            }
            Destination::Host => return true,
            Destination::Slots(targets) => &targets[index],
        };
        if !tiers.shared.memory.fits(&lease, target) {
            self.states[index] = State::Failed;
            return true;
        }
        if target.slab().device().is_some() {
            let target = target.clone();
            return self.move_out(number, lease, target, tiers, device);
        }
        let (bytes, started, tier) = (u64::from(lease.bytes()), Instant::now(), lease.tier());
        let is_good = tiers.shared.memory.copy_out(&lease, target);
        self.copying += started.elapsed();
        self.host_bytes += bytes;
        drop(lease);
        if !is_good && tier == MAPPED {
            let is_damaged = tiers.drop_mapped(&self.chain[index]) == Some(true);
            StoreCounters::add(&tiers.shared.counters.checksum_failures, usize::from(is_damaged));
            self.states[index] = State::Failed;
        } else if !is_good {
            self.states[index] = damaged(self.chain[index], number, index, tiers);
        }
        true
    }

    /// Starts the copy of the block at the cursor to a device's memory, after it was verified here unless it is verified there;
    /// false when there is no room for it now.
    fn move_out(
        &mut self,
        number: u64,
        lease: Lease,
        target: SlotRef,
        tiers: &mut Tiers,
        device: &mut DeviceCopies,
    ) -> bool {
        let (index, bytes) = (self.cursor, lease.bytes() as usize);
        if lease.tier() == MAPPED {
            // No device reaches the memory of pools.
            self.states[index] = State::Failed;
            return true;
        }
        if !self.verified_by_caller && !tiers.shared.memory.is_intact(&lease) {
            drop(lease);
            self.states[index] = damaged(self.chain[index], number, index, tiers);
            return true;
        }
        let source = tiers.shared.memory.slot(lease.slot()).clone();
        match device.start(source, target, bytes, Purpose::Out { load: number, index, lease }) {
            Ok(()) => {
                self.states[index] = State::CopyingToDevice;
                self.moving += 1;
                self.host_bytes += bytes as u64;
                self.moving_since.get_or_insert_with(Instant::now);
                true
            }
            Err(UnstartedCopy { purpose: Purpose::Out { lease, .. }, is_full: true }) => {
                self.states[index] = State::Resident(lease);
                false
            }
            Err(_) => {
                self.states[index] = State::Failed;
                true
            }
        }
    }
}

/// Handles a block of host memory that does not match its checksum. The disk may still have it.
fn damaged(identity: BlockIdentity, number: u64, index: usize, tiers: &mut Tiers) -> State {
    if tiers.drop_damaged(identity) {
        tracing::warn!(block = identity.short(), "host tier: a block is damaged and is thrown away");
        StoreCounters::add(&tiers.shared.counters.checksum_failures, 1);
    }
    match tiers.read_from_disk(identity, (number, index), false) {
        ReadStart::InFlight => State::ReadingDisk,
        ReadStart::NoFreeSlot | ReadStart::NotOnDisk => State::Failed,
    }
}
