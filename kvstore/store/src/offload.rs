//! New blocks: into host memory, and from there to the tiers below.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use dataplane_memory::SlotRef;
use kvstore_block::BlockIdentity;
use kvstore_catalog::{Evicting, Filling, Registered, Reserved, TenantId};
use kvstore_disk::{Moment, Usage, Verdict};
use kvstore_plan::{Priority, Tier};

use crate::config::WriteMode;
use crate::device::{Purpose, Refused};
use crate::disk::{DiskCommand, DiskLink, Hold, Write};
use crate::job::{Medium, Moved, NewBlock, Source};
use crate::metrics::StoreCounters;
use crate::mover::Mover;
use crate::shared::{DISK, HOST};

/// Blocks written back to the disk at a time, so that their slots come free while new blocks arrive.
const LEAVING_MAX: usize = 16;
/// Blocks that may wait for room in the disk's queue; further ones stay in host memory only.
const UNWRITTEN_MAX: usize = 65_536;
/// The part of host memory that those may hold, as a divisor.
const UNWRITTEN_SHARE: usize = 2;
/// Blocks written back between two walks over the disk's slots that hang children on their parents.
const ORPHANS_MAX: usize = 4096;
/// Blocks that wait to be written which are looked at in a round of the thread.
const WRITES_MAX: usize = 64;
/// A block's place in its chain and its checksum stand before what its owner keeps with it.
pub(crate) const META_FIXED: usize = 12;

/// A write that is under way.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct WriteState {
    /// The block was forgotten meanwhile.
    is_forgotten: bool,
    /// It leaves host memory once it is written.
    is_leaving: bool,
    /// That host memory has it no more was told meanwhile.
    is_told: bool,
    /// The device does not answer.
    pub(crate) is_stuck: bool,
}

/// A block that was not handed to the disk.
struct NotWritten {
    hold: Hold,
    /// After this time there is bandwidth for it; `None`: it is not wanted there.
    wait: Option<Duration>,
}

impl From<Hold> for NotWritten {
    fn from(hold: Hold) -> Self {
        Self { hold, wait: None }
    }
}

impl Mover {
    pub(crate) fn offload(&mut self, block: NewBlock) {
        if self.shared.holds(HOST, &block.identity) {
            return self.over(block, true);
        }
        let Some(reserved) = self.host_slot(block.description.tenant) else {
            // Other tenants wait behind one that is at its quota for the end of a write, not for bandwidth.
            let is_short = self.shared.free(HOST) == 0 || !self.bandwidth.holds_writes();
            if is_short && self.will_make_room() {
                self.held.push_front(block);
            } else {
                StoreCounters::add(&self.shared.counters.throttled, 1);
                self.over(block, false);
            }
            return;
        };
        let filling = reserved.fill();
        let slot = filling.slot();
        if let Source::Slot(source) = &block.source
            && source.slab().device().is_some()
        {
            let source = source.clone();
            return self.offload_from_device(block, source, filling);
        }
        let copied = match &block.source {
            Source::Slot(source) => {
                let started = Instant::now();
                let copied = self.shared.memory.copy_in(slot, source);
                self.shared.observe_copy(self.shared.config.block_bytes, started.elapsed());
                copied
            }
            Source::Bytes(pieces) => {
                Some((pieces.iter().map(bytes::Bytes::len).sum(), self.shared.memory.write(slot, pieces)))
            }
        };
        let Some((bytes, checksum)) = copied else {
            StoreCounters::add(&self.shared.counters.unfit, 1);
            drop(filling);
            return self.over(block, false);
        };
        self.take_in(block, filling, bytes, checksum);
    }

    /// Starts the copy of a block out of a device's memory.
    fn offload_from_device(&mut self, block: NewBlock, source: SlotRef, filling: Filling) {
        let bytes = source.slab().layout().slot_bytes;
        if bytes > self.shared.config.block_bytes || self.shared.config.quantised.is_some() {
            StoreCounters::add(&self.shared.counters.unfit, 1);
            drop(filling);
            return self.over(block, false);
        }
        let target = self.shared.memory.slot(filling.slot()).clone();
        let refused = self.start_copy(source, target, bytes, Purpose::In { block, filling, bytes });
        let Err(Refused { purpose: Purpose::In { block, filling, .. }, is_full }) = refused else {
            return;
        };
        drop(filling);
        if is_full {
            // One of those under way will make room.
            self.held.push_front(block);
        } else {
            StoreCounters::add(&self.shared.counters.unfit, 1);
            self.over(block, false);
        }
    }

    /// A block's bytes are in host memory: it becomes known.
    pub(crate) fn take_in(&mut self, mut block: NewBlock, filling: Filling, bytes: usize, checksum: u64) {
        let slot = filling.slot();
        // The pool can have its slot back now; the rest concerns the store alone.
        block.source = Source::Bytes(Vec::new());
        let description = block.description.clone();
        let cost = self.shared.recompute_cost(description.position);
        let complete = filling.complete(checksum, bytes as u32);
        if let Registered::New = complete.register(block.identity, description.parent, cost) {
            self.descriptions[slot as usize] = Some(description);
            StoreCounters::add(&self.shared.counters.offloaded, 1);
            self.tell_stored(block.identity);
            if self.shared.config.disk_write == WriteMode::Through {
                self.write_through(block.identity);
            }
            self.offer_far(block.identity);
        }
        self.over(block, true);
    }

    pub(crate) fn over(&mut self, block: NewBlock, is_stored: bool) {
        let NewBlock { identity, source, done, .. } = block;
        drop(source);
        match done {
            Some(done) => done(is_stored),
            None => (self.notify)(Moved::Offloaded { identity }),
        }
    }

    /// A slot of host memory, made by evicting if need be.
    pub(crate) fn host_slot(&mut self, tenant: TenantId) -> Option<Reserved> {
        let writes_back = self.disk.is_some() && self.shared.config.disk_write == WriteMode::Back;
        if writes_back && !self.shared.catalog.has_room(HOST, tenant) {
            self.write_back(tenant);
            let is_on_its_way = self.writing() > 0 || self.bandwidth.holds_writes();
            let is_queue_full = self.disk.as_ref().is_some_and(|disk| !disk.has_room());
            if !self.shared.catalog.has_room(HOST, tenant) && (is_on_its_way || is_queue_full) {
                return None;
            }
        }
        self.host_slot_now(tenant)
    }

    /// The same without waiting for what would have to be written first.
    pub(crate) fn host_slot_now(&mut self, tenant: TenantId) -> Option<Reserved> {
        let (mut evicted, mut reserved) = (Vec::new(), Vec::new());
        loop {
            self.shared.catalog.reserve(HOST, 1, tenant, &mut evicted, &mut reserved);
            for evicted in evicted.drain(..) {
                self.left_host(evicted.identity, evicted.slot);
            }
            // Blocks that only wait to be written give way; the youngest first, so that chains stay whole.
            if !reserved.is_empty() || !self.let_go_of_unwritten() {
                return reserved.pop();
            }
        }
    }

    /// Holds one block less of those that wait to be written; false when none is held.
    fn let_go_of_unwritten(&mut self) -> bool {
        let held = self.unwritten.iter_mut().rev().find_map(|(_, lease)| lease.take());
        self.unwritten_held -= usize::from(held.is_some());
        held.is_some()
    }

    /// Tells that host memory has the block, unless nobody was told that it had not.
    pub(crate) fn tell_stored(&mut self, identity: BlockIdentity) {
        let state = self.in_writing.get(&identity);
        if state.is_none_or(|state| !state.is_leaving || state.is_told) {
            (self.notify)(Moved::Stored { identity, medium: Medium::Host });
        }
    }

    fn left_host(&mut self, identity: BlockIdentity, slot: u32) {
        self.descriptions[slot as usize] = None;
        self.in_writing.entry(identity).and_modify(|state| state.is_told = true);
        StoreCounters::add(&self.shared.counters.evicted, 1);
        (self.notify)(Moved::Removed { identity, medium: Medium::Host });
    }

    fn write_through(&mut self, identity: BlockIdentity) {
        if self.disk.is_none() || self.unwritten.len() >= UNWRITTEN_MAX {
            return;
        }
        // In the order of arrival, so that a chain is written from its root.
        let is_held = self.unwritten_held < self.descriptions.len() / UNWRITTEN_SHARE;
        let lease = if is_held { self.shared.catalog.lease(HOST, &identity) } else { None };
        self.unwritten_held += usize::from(lease.is_some());
        self.unwritten.push_back((identity, lease));
    }

    /// Goes on with writes: with those held back whose bandwidth is there, and with what waits for room in the disk's queue.
    /// Whether there is more to be done at once.
    pub(crate) fn resume_writes(&mut self, now: Instant) -> bool {
        if self.bandwidth.release_writes(now) {
            self.room_came_free();
        }
        self.write_waiting()
    }

    /// Writes what waits, as far as the disk's queue has room; whether there is more for which it has.
    fn write_waiting(&mut self) -> bool {
        for _ in 0..WRITES_MAX {
            let has_room = self.disk.as_ref().is_some_and(DiskLink::has_room);
            if !has_room || self.bandwidth.holds_writes() {
                return false;
            }
            let Some((identity, held)) = self.unwritten.pop_front() else { return false };
            self.unwritten_held -= usize::from(held.is_some());
            let Some(lease) = held.or_else(|| self.shared.catalog.lease(HOST, &identity)) else { continue };
            let (slot, bytes) = (lease.slot(), lease.bytes());
            // A block that is not written stays in host memory all the same.
            let refused = self.write_to_disk(identity, slot, bytes, Hold::Lease(lease));
            if let Err(NotWritten { hold: Hold::Lease(lease), wait: Some(wait) }) = refused {
                self.admitted = Some(identity);
                self.unwritten_held += 1;
                self.unwritten.push_front((identity, Some(lease)));
                self.bandwidth.hold_writes(wait);
                return false;
            }
        }
        !self.unwritten.is_empty()
    }

    /// Starts the way out of host memory for the blocks that go next. Those that the disk has, or does not take, go at
    /// once.
    fn write_back(&mut self, tenant: TenantId) {
        let mut evicting = Vec::new();
        let room = self.disk.as_ref().map_or(0, DiskLink::room);
        let count = LEAVING_MAX.saturating_sub(self.writing()).min(room);
        if self.bandwidth.holds_writes() {
            return;
        }
        self.shared.catalog.evict_for(HOST, tenant, count, &mut evicting);
        for evicting in evicting {
            let (identity, slot, bytes) = (evicting.identity(), evicting.slot(), evicting.bytes());
            match self.write_to_disk(identity, slot, bytes, Hold::Evicting(evicting)) {
                Ok(()) => {}
                Err(NotWritten { hold: Hold::Evicting(evicting), wait: Some(wait) }) => {
                    // It stays, and those after it, until there is bandwidth.
                    self.admitted = Some(identity);
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

    fn finish_eviction(&mut self, evicting: Evicting, is_told: bool) {
        let (identity, slot) = (evicting.identity(), evicting.slot());
        // It stays when a block that hangs on it was put back meanwhile. What is here again was never told to be gone.
        if evicting.finish() && !is_told && !self.shared.holds(HOST, &identity) {
            self.left_host(identity, slot);
        }
    }

    /// Writes under way that can still be answered.
    pub(crate) fn writing(&self) -> usize {
        self.in_writing.values().filter(|state| !state.is_stuck).count()
    }

    /// Hands a block of host memory to the disk; gives `hold` back when the disk has it, or does not get it.
    fn write_to_disk(
        &mut self,
        identity: BlockIdentity,
        slot: u32,
        bytes: u32,
        hold: Hold,
    ) -> Result<(), NotWritten> {
        let (Some(disk), Some(description)) = (&self.disk, &self.descriptions[slot as usize]) else {
            return Err(hold.into());
        };
        let is_there = self.shared.holds(DISK, &identity) || self.in_writing.contains_key(&identity);
        // Without its parent a block could never be found; leaves that are written back come before their parents.
        let parent_is_there = description
            .parent
            .is_none_or(|parent| self.shared.holds(DISK, &parent) || self.in_writing.contains_key(&parent));
        let is_wanted = parent_is_there || matches!(hold, Hold::Evicting(_));
        if is_there || !is_wanted || !disk.has_room() || description.meta.len() > crate::META_BYTES_MAX {
            return Err(hold.into());
        }
        // The sketch forgets; this block was offered just now.
        let seen = u32::from(self.seen.estimate(&identity)).max(1);
        let was_admitted = self.admitted.take() == Some(identity);
        if !was_admitted
            && self.admission.decide(seen, u64::from(bytes), &self.usage, Moment::now()) != Verdict::Admit
        {
            StoreCounters::add(&self.shared.counters.not_admitted, 1);
            return Err(hold.into());
        }
        if let Err(wait) = self.bandwidth.admit(Tier::Disk, Priority::Offload, u64::from(bytes)) {
            return Err(NotWritten { hold, wait: Some(wait) });
        }
        let (mut evicted, mut reserved) = (Vec::new(), Vec::new());
        self.shared.catalog.reserve(DISK, 1, description.tenant, &mut evicted, &mut reserved);
        for evicted in evicted {
            self.tombstones.insert(evicted.slot);
            StoreCounters::add(&self.shared.counters.disk_evicted, 1);
            (self.notify)(Moved::Removed { identity: evicted.identity, medium: Medium::Disk });
        }
        let Some(reserved) = reserved.pop() else { return Err(hold.into()) };
        // The checksum is that of the copy into host memory: damage since then is found when the block is read.
        let mut meta = Vec::with_capacity(META_FIXED + description.meta.len());
        meta.extend_from_slice(&description.position.to_le_bytes());
        meta.extend_from_slice(&hold.checksum().to_le_bytes());
        meta.extend_from_slice(&description.meta);
        let is_leaving = matches!(hold, Hold::Evicting(_));
        // What was to be forgotten there is replaced.
        self.tombstones.remove(&reserved.slot());
        let write = Write {
            identity,
            parent: description.parent,
            tenant: description.tenant,
            position: description.position,
            meta,
            payload: self.shared.memory.slot(slot).clone(),
            bytes,
            hold,
            filling: reserved.fill(),
        };
        match disk.try_send(DiskCommand::Write(Box::new(write))) {
            Ok(()) => {
                self.in_writing.insert(identity, WriteState { is_leaving, ..WriteState::default() });
                Ok(())
            }
            Err(DiskCommand::Write(write)) => {
                StoreCounters::add(&self.shared.counters.throttled, 1);
                Err(write.hold.into())
            }
            Err(_) => unreachable!("a refused command comes back as it was"),
        }
    }

    /// The disk has answered a write.
    pub(crate) fn written(&mut self, write: Write, is_written: bool, usage: Usage) {
        self.usage = usage;
        let Write { identity, parent, position, payload, bytes, hold, filling, .. } = write;
        let state = self.in_writing.remove(&identity).unwrap_or_default();
        self.room_came_free();
        drop(payload);
        let slot = filling.slot();
        if is_written && !state.is_forgotten {
            let cost = self.shared.recompute_cost(position);
            let complete = filling.complete(hold.checksum(), bytes);
            if let Registered::New = complete.register(identity, parent, cost) {
                StoreCounters::add(&self.shared.counters.to_disk, 1);
                (self.notify)(Moved::Stored { identity, medium: Medium::Disk });
            }
        } else {
            self.tombstones.insert(slot);
            drop(filling);
        }
        if let Hold::Evicting(evicting) = hold {
            self.finish_eviction(evicting, state.is_told);
            self.relink();
        }
    }

    /// Blocks that were written before their parents are hung on them from time to time.
    fn relink(&mut self) {
        self.orphans += 1;
        if self.orphans >= ORPHANS_MAX {
            self.orphans = 0;
            self.shared.catalog.relink(DISK);
        }
    }

    /// The device does not answer: nobody waits for it any more.
    pub(crate) fn stuck(&mut self, identity: BlockIdentity, is_write: bool) {
        if is_write {
            self.in_writing.entry(identity).and_modify(|state| state.is_stuck = true);
            self.room_came_free();
        } else {
            self.give_up_read(&identity);
        }
    }

    /// Hands tombstones to the disk, as far as its queue has room.
    pub(crate) fn bury(&mut self) {
        let Some(disk) = &self.disk else { return };
        while let Some(&slot) = self.tombstones.first() {
            if disk.try_send(DiskCommand::Forget(slot)).is_err() {
                return;
            }
            self.tombstones.remove(&slot);
        }
    }

    /// Takes blocks out of every tier of this node, also those on their way from one to another.
    pub(crate) fn forget(&mut self, chain: &[BlockIdentity]) {
        self.forget_unwritten(chain);
        for identity in chain {
            self.in_writing.entry(*identity).and_modify(|state| state.is_forgotten = true);
            if let Some(reading) = self.reading.get(identity) {
                self.forgotten.insert(reading.number);
            }
            self.drop_from_host(*identity);
            self.drop_from_disk(*identity);
        }
    }

    /// Takes blocks out of host memory alone. A write that is under way goes on: what it writes is verified when it is read.
    pub(crate) fn forget_on_host(&mut self, chain: &[BlockIdentity]) {
        self.forget_unwritten(chain);
        for identity in chain {
            self.drop_from_host(*identity);
        }
    }

    /// Blocks that wait to be written are not going to be.
    fn forget_unwritten(&mut self, chain: &[BlockIdentity]) {
        let gone: HashSet<&BlockIdentity> =
            if self.unwritten.is_empty() { HashSet::new() } else { chain.iter().collect() };
        self.unwritten.retain(|(identity, lease)| {
            let is_kept = !gone.contains(identity);
            self.unwritten_held -= usize::from(!is_kept && lease.is_some());
            is_kept
        });
    }

    pub(crate) fn drop_from_host(&mut self, identity: BlockIdentity) {
        if self.shared.catalog.remove(HOST, &identity) {
            self.in_writing.entry(identity).and_modify(|state| state.is_told = true);
            (self.notify)(Moved::Removed { identity, medium: Medium::Host });
        }
    }

    pub(crate) fn drop_from_disk(&mut self, identity: BlockIdentity) {
        let slot = self.shared.catalog.places(&identity).and_then(|places| places.slot(DISK));
        if self.shared.catalog.remove(DISK, &identity) {
            self.tombstones.extend(slot);
            (self.notify)(Moved::Removed { identity, medium: Medium::Disk });
        }
    }
}
