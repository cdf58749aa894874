//! Blocks that lie in the memory of pools on this host, and are read there: nothing is copied before an engine loads them, and host
//! memory does not have them a second time. They are a tier of the catalog whose slots have no memory of their own.
//!
//! A pool keeps such a block as long as its lease lasts, and ends the connection of a client that holds a
//! lease for longer. A block is therefore forgotten here when its time is up, even while it is read; the
//! reader notices by the generation of the pool's slot. Leased blocks cannot be evicted from the pool, and
//! one client leases a part of a pool at most: a block is forgotten soon after all loads that were told of it
//! have read it, and is asked for again when another prompt needs it. Listeners get no events of such
//! short-lived blocks.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvstore_block::BlockIdentity;
use kvstore_catalog::{Registered, TenantId};
use kvstore_remote::with_identity;

use super::Tiers;
use crate::far::{LeaseGuard, MappedBlock};
use crate::fault_injection::{Planted, is_planted};
use crate::job::Prepare;
use crate::memory::MappedSlot;
use crate::metrics::StoreCounters;
use crate::shared::{DISK, HOST, MAPPED};

/// Time that a block stays known after a read by a load that no search had told of it.
const AFTER_READ: Duration = Duration::from_millis(100);
/// Least time that a block stays known after a search has told of it: its load comes by then, also one that
/// waits for a second search (of another group of layers).
const PROMISE: Duration = Duration::from_secs(1);
/// Interval of the scans for blocks that were read.
const CHECK_INTERVAL: Duration = Duration::from_millis(20);

/// A block of a pool that is known here.
#[derive(Debug)]
struct KnownBlock {
    identity: BlockIdentity,
    place: Arc<MappedSlot>,
    /// End of the lease.
    until: Instant,
    /// Searches have told of the block: it stays until this time, or until the load of each such search has
    /// read it.
    promised: Instant,
    /// Number of searches that have told of the block.
    promises: u32,
    lease: Arc<LeaseGuard>,
}

impl KnownBlock {
    /// Number of searches whose loads have not read the block.
    fn open_promises(&self) -> u32 {
        self.promises.saturating_sub(self.place.reads())
    }

    /// Whether the block is to be forgotten: its lease is about to end, every load that was told of it has
    /// read it, or its promise has passed and it was read [`AFTER_READ`] ago or earlier.
    fn is_over(&self, now: Instant) -> bool {
        let is_done = self.promises > 0 && self.open_promises() == 0;
        let is_idle = self.promised <= now && self.place.was_read_before(now, AFTER_READ);
        self.until <= now + CHECK_INTERVAL || is_done || is_idle
    }
}

/// The known blocks of pools, by their slots in the catalog's tier of them.
#[derive(Debug, Default)]
pub(crate) struct MappedBlocks {
    known: HashMap<u32, KnownBlock>,
    next_look: Option<Instant>,
}

impl MappedBlocks {
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.next_look.filter(|_| !self.known.is_empty())
    }
}

impl Tiers {
    /// Makes blocks of a chain known that lie in a pool's memory, from the block `first` on; returns the
    /// number of leading blocks that are known.
    pub(crate) fn map(&mut self, prepare: &Prepare, first: usize, blocks: Vec<MappedBlock>) -> usize {
        let (chain, mut count) = (&prepare.chain, 0);
        for (block, position) in blocks.into_iter().zip(first..chain.len()) {
            let place = MappedMetadata {
                parent: position.checked_sub(1).map(|before| chain[before]),
                position: position as u32,
                tenant: prepare.tenant,
                word: prepare.meta(position).first_chunk().map_or(0, |word| u64::from_le_bytes(*word)),
            };
            if !self.map_one(chain[position], &place, block) {
                break;
            }
            count += 1;
        }
        count
    }

    /// False when the block cannot be known: its length or slot is not valid here, or there is no room for
    /// it.
    fn map_one(&mut self, identity: BlockIdentity, at: &MappedMetadata, block: MappedBlock) -> bool {
        let shared = Arc::clone(&self.shared);
        let MappedBlock { slab, slot: pool_slot, generation, bytes, wire_checksum, lease, until } = block;
        let is_possible = (1..=shared.config.block_bytes).contains(&(bytes as usize))
            && slab.contains(pool_slot, 0, bytes as usize);
        if !is_possible {
            return false;
        }
        let has_own = [HOST, DISK].into_iter().any(|tier| shared.holds(tier, &identity));
        if has_own {
            return true;
        }
        // A block that is known already gets the new lease.
        let known = self.mapped_slot(&identity).and_then(|slot| self.mapped.known.get(&slot));
        let (was_known, promises) = (known.is_some(), known.map_or(0, KnownBlock::open_promises));
        self.unmap(&identity);
        let (mut evicted, mut reserved) = (Vec::new(), Vec::new());
        shared.catalog.reserve(MAPPED, 1, at.tenant, &mut evicted, &mut reserved);
        for evicted in evicted {
            self.left_mapped(evicted.slot);
        }
        let Some(reserved) = reserved.pop() else { return false };
        let (filling, cost) = (reserved.fill(), shared.recompute_cost(at.position));
        let slot = filling.slot();
        let place = Arc::new(MappedSlot::new(slab, pool_slot, generation, at.position, at.word));
        shared.memory.set_mapped(slot, Some(Arc::clone(&place)));
        let complete = filling.complete(with_identity(wire_checksum, &identity), bytes);
        if complete.register(identity, at.parent, cost) != Registered::New {
            shared.memory.set_mapped(slot, None);
            return false;
        }
        let promised = self.now + PROMISE;
        self.mapped.known.insert(slot, KnownBlock { identity, place, until, promised, promises, lease });
        self.mapped.next_look.get_or_insert(self.now + CHECK_INTERVAL);
        if !was_known {
            StoreCounters::add(&shared.counters.from_far, 1);
            StoreCounters::add(&shared.counters.mapped, 1);
        }
        true
    }

    /// A search begins: blocks of its chain whose leases end before a load could read them are forgotten, and asked for again.
    pub(crate) fn forget_ending(&mut self, chain: &[BlockIdentity]) {
        if self.mapped.known.is_empty() {
            return;
        }
        let soon = self.now + PROMISE;
        for identity in chain {
            let known = self.mapped_slot(identity).and_then(|slot| self.mapped.known.get(&slot));
            if known.is_some_and(|known| known.until < soon) {
                self.unmap(identity);
            }
        }
    }

    /// Promises the known blocks of a chain to a search: they stay for its load, as long as their leases
    /// last.
    pub(crate) fn promise_mapped(&mut self, chain: &[BlockIdentity]) {
        if self.mapped.known.is_empty() {
            return;
        }
        for identity in chain {
            if let Some(slot) = self.mapped_slot(identity)
                && let Some(known) = self.mapped.known.get_mut(&slot)
            {
                known.promised = self.now + PROMISE;
                known.promises = known.promises.saturating_add(1);
            }
        }
    }

    fn mapped_slot(&self, identity: &BlockIdentity) -> Option<u32> {
        self.shared.catalog.places(identity).and_then(|places| places.slot(MAPPED))
    }

    /// Forgets a block of a pool.
    pub(crate) fn unmap(&mut self, identity: &BlockIdentity) {
        let Some(slot) = self.mapped_slot(identity) else { return };
        self.shared.catalog.remove(MAPPED, identity);
        self.left_mapped(slot);
    }

    /// Forgets a block of a pool that does not have its checksum, and tells the pool, unless the pool has
    /// given the slot to another block. Returns whether the block was damaged; `None`: no pool is known to
    /// have it.
    pub(crate) fn drop_mapped(&mut self, identity: &BlockIdentity) -> Option<bool> {
        let slot = self.mapped_slot(identity)?;
        let known = self.mapped.known.get(&slot).filter(|known| !known.place.is_gone());
        if let Some(known) = known {
            known.lease.report_damaged(*identity);
        }
        let is_damaged = known.is_some();
        self.unmap(identity);
        Some(is_damaged)
    }

    /// Forgets the blocks that are over ([`KnownBlock::is_over`]).
    pub(crate) fn expire_mapped(&mut self) {
        if self.mapped.next_look.is_none_or(|look| self.now < look) || is_planted(Planted::KeptLease) {
            return;
        }
        let now = self.now;
        let over = self.mapped.known.values().filter(|known| known.is_over(now));
        let over: Vec<BlockIdentity> = over.map(|known| known.identity).collect();
        over.iter().for_each(|identity| self.unmap(identity));
        self.mapped.next_look = (!self.mapped.known.is_empty()).then(|| now + CHECK_INTERVAL);
    }

    fn left_mapped(&mut self, slot: u32) {
        self.shared.memory.set_mapped(slot, None);
        self.mapped.known.remove(&slot);
    }
}

/// Position of a block in its chain, and its tenant.
struct MappedMetadata {
    parent: Option<BlockIdentity>,
    position: u32,
    tenant: TenantId,
    /// The first bytes of the caller's data kept with the block.
    word: u64,
}
