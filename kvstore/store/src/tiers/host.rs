//! Slots of host memory: taken by evicting, filled, made known, given up.

use std::sync::atomic::{AtomicU64, Ordering};

use kvstore_block::BlockIdentity;
use kvstore_catalog::{Filling, Registered, Reserved, TenantId};

use super::Tiers;
use crate::config::WriteMode;
use crate::fault_injection::{Planted, is_planted};
use crate::job::{Description, Medium, StoreEvent};
use crate::metrics::StoreCounters;
use crate::quota::UNOWNED;
use crate::shared::HOST;

/// Slots that are kept free for callers who fill them: a part of host memory, as a divisor, and at most.
const AHEAD_SHARE: usize = 32;
const AHEAD_MAX: usize = 16;
/// Evictions by other threads that are published in a round.
const EVICTED_TOLD_MAX: usize = 256;

/// Source of a block of host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// The worker's pool.
    Pool,
    /// The disk.
    Disk,
    /// A tier of other nodes.
    Far,
}

impl Origin {
    fn counter(self, counters: &StoreCounters) -> &AtomicU64 {
        match self {
            Self::Pool => &counters.offloaded,
            Self::Disk => &counters.from_disk,
            Self::Far => &counters.from_far,
        }
    }
}

/// A block whose bytes have come into host memory.
pub(crate) struct Arrival {
    pub(crate) identity: BlockIdentity,
    pub(crate) parent: Option<BlockIdentity>,
    /// Position of the block in its chain.
    pub(crate) position: u32,
    pub(crate) bytes: u32,
    pub(crate) checksum: u64,
    pub(crate) origin: Origin,
    /// Description of the block for the tiers below, as far as it is known.
    pub(crate) description: Option<Description>,
}

impl Tiers {
    /// A slot of host memory, made by evicting if need be.
    pub(crate) fn host_slot(&mut self, tenant: TenantId) -> Option<Reserved> {
        let writes_back = self.disk.is_some() && self.shared.config.disk_write == WriteMode::Back;
        if writes_back && !self.shared.catalog.has_room(HOST, tenant) {
            self.write_back(tenant);
            let is_on_its_way = self.writing() > 0 || self.bandwidth.holds_writes();
            let is_queue_full = !self.disk_has_room();
            if !self.shared.catalog.has_room(HOST, tenant) && (is_on_its_way || is_queue_full) {
                return None;
            }
        }
        self.host_slot_now(tenant)
    }

    /// Evicts so that callers who fill slots themselves find free ones, if any of them has asked lately.
    pub(crate) fn evict_ahead(&mut self) {
        if !self.shared.wants_free_slots.swap(false, Ordering::Relaxed) {
            return;
        }
        let wanted = (self.host_slots() / AHEAD_SHARE).min(AHEAD_MAX);
        if self.shared.free(HOST) as usize * 2 > wanted {
            return;
        }
        if self.disk.is_some() && self.shared.config.disk_write == WriteMode::Back {
            // The slots become free when the disk has their blocks.
            return self.write_back(UNOWNED);
        }
        let (mut evicted, mut reserved) = (Vec::new(), Vec::new());
        self.shared.catalog.reserve(HOST, wanted, UNOWNED, &mut evicted, &mut reserved);
        for evicted in evicted {
            self.left_host(evicted.identity, evicted.slot);
        }
        if reserved.len() < wanted {
            // Blocks that are being written cannot be evicted yet.
            self.shared.wants_free_slots.store(true, Ordering::Relaxed);
        }
    }

    /// The same without waiting for blocks that would have to be written first.
    pub(crate) fn host_slot_now(&mut self, tenant: TenantId) -> Option<Reserved> {
        let (mut evicted, mut reserved) = (Vec::new(), Vec::new());
        if !self.shared.catalog.has_room(HOST, tenant) {
            // Blocks that wait to be written give way, but only where the disk cannot take them now.
            self.write_waiting();
        }
        loop {
            self.shared.catalog.reserve(HOST, 1, tenant, &mut evicted, &mut reserved);
            for evicted in evicted.drain(..) {
                self.left_host(evicted.identity, evicted.slot);
            }
            if !reserved.is_empty() {
                return reserved.pop();
            }
            if !self.disk.as_mut().is_some_and(|disk| disk.unwritten.release_held()) {
                return None;
            }
        }
    }

    /// Makes a block known whose bytes have come; false when host memory has it already.
    pub(crate) fn register(&mut self, filling: Filling, arrival: Arrival) -> bool {
        let Arrival { identity, parent, position, bytes, checksum, origin, description } = arrival;
        let slot = filling.slot();
        let cost = self.shared.recompute_cost(position);
        let meta = description.as_ref().map_or(&[][..], |description| &description.meta);
        self.shared.memory.note(slot, position, meta);
        let is_new = filling.complete(checksum, bytes).register(identity, parent, cost) == Registered::New;
        if is_new {
            self.descriptions[slot as usize] = description;
            StoreCounters::add(origin.counter(&self.shared.counters), 1);
            self.tell_stored(identity);
            self.pin_if_retained(HOST, &identity);
        }
        is_new
    }

    /// Publishes that host memory has the block, unless listeners were never told that it left.
    fn tell_stored(&mut self, identity: BlockIdentity) {
        if !self.is_published_on_host(&identity) {
            self.tell(StoreEvent::Stored { identity, medium: Medium::Host });
        }
    }

    pub(super) fn left_host(&mut self, identity: BlockIdentity, slot: u32) {
        self.descriptions[slot as usize] = None;
        StoreCounters::add(&self.shared.counters.evicted, 1);
        self.tell_gone_from_host(identity);
    }

    /// Publishes the removal of blocks that other threads have evicted, some of them a round; false when there was none. This thread
    /// alone registers host blocks. A block that is present was stored again after its eviction and that event is already out, so
    /// that no removal follows.
    pub(crate) fn tell_evicted_elsewhere(&mut self) -> bool {
        let mut told = false;
        for _ in 0..EVICTED_TOLD_MAX {
            let Some(identity) = self.shared.evicted_elsewhere.pop() else { break };
            told = true;
            if !self.shared.holds(HOST, &identity) {
                self.tell_gone_from_host(identity);
            }
        }
        told
    }

    /// Takes a block out of host memory, also one that is leaving it.
    pub(crate) fn drop_from_host(&mut self, identity: BlockIdentity) {
        let is_published = self.shared.holds(HOST, &identity) || self.is_published_on_host(&identity);
        self.retained.copy_lost(HOST, &identity, self.now, &self.shared);
        if self.shared.catalog.remove(HOST, &identity) && is_published {
            self.tell_gone_from_host(identity);
        }
    }

    /// Whether the block is leaving host memory and listeners still believe that it is there.
    fn is_published_on_host(&self, identity: &BlockIdentity) -> bool {
        self.disk.as_ref().is_some_and(|disk| disk.writes.is_published_on_host(identity))
    }

    fn tell_gone_from_host(&mut self, identity: BlockIdentity) {
        if let Some(disk) = &mut self.disk {
            disk.writes.removal_published(&identity);
        }
        if !is_planted(Planted::SilentRemoval) {
            self.tell(StoreEvent::Removed { identity, medium: Medium::Host });
        }
    }
}
