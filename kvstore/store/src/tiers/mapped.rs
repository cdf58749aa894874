//! Blocks that lie in the memory of pools on this host, and are read there: nothing is copied before an engine loads them, and host
//! memory does not have them a second time. They are a tier of the catalog whose slots have no memory of their own.
//!
//! A pool keeps such a block as long as its lease lasts, and ends the connection of a client that holds one for longer: so a block is
//! forgotten here when its time is up, whoever still reads it. A reader notices by the generation of the pool's slot. And what is leased
//! cannot be evicted there: a block that was read is forgotten soon after, and asked for again when another prompt wants it. Listeners are
//! told nothing of blocks that come and go so fast.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvstore_block::BlockIdentity;
use kvstore_catalog::{Registered, TenantId};
use kvstore_remote::with_identity;

use super::Tiers;
use crate::far::{LeaseGuard, MappedBlock};
use crate::job::Prepare;
use crate::memory::{MAPPED_SLOTS, MappedPlace};
use crate::metrics::StoreCounters;
use crate::planted::{Planted, is_planted};
use crate::shared::MAPPED;

/// How long a block stays known after it was read: for whoever wants it at the same time.
const AFTER_READ: Duration = Duration::from_millis(100);
/// How often blocks that were read are looked for, where nothing else wakes the thread.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// A block of a pool that is known here.
#[derive(Debug)]
struct Known {
    identity: BlockIdentity,
    until: Instant,
    lease: Arc<LeaseGuard>,
}

/// What is known of pools' blocks, by their slots in the catalog's tier of them.
#[derive(Debug, Default)]
pub(crate) struct Mapped {
    known: Vec<Option<Known>>,
    /// When the time of each is up.
    ends: BTreeSet<(Instant, u32)>,
}

impl Mapped {
    pub(crate) fn next_deadline(&self, now: Instant) -> Option<Instant> {
        self.ends.first().map(|(until, _)| (now + LOOK_EVERY).min(*until))
    }

    /// The block in this slot is forgotten at this time, if not before.
    fn shorten(&mut self, slot: u32, until: Instant) {
        let Some(known) = self.known.get_mut(slot as usize).and_then(Option::as_mut) else { return };
        if until < known.until {
            self.ends.remove(&(known.until, slot));
            self.ends.insert((until, slot));
            known.until = until;
        }
    }

    fn set(&mut self, slot: u32, known: Known) {
        self.ends.insert((known.until, slot));
        if self.known.is_empty() {
            self.known.resize_with(MAPPED_SLOTS as usize, || None);
        }
        self.known[slot as usize] = Some(known);
    }

    fn take(&mut self, slot: u32) -> Option<Known> {
        let known = self.known.get_mut(slot as usize)?.take()?;
        self.ends.remove(&(known.until, slot));
        Some(known)
    }
}

impl Tiers {
    /// Makes blocks of a chain known that lie in a pool's memory, from the block `first` on; how many, from the first on.
    pub(crate) fn map(&mut self, prepare: &Prepare, first: usize, blocks: Vec<MappedBlock>) -> usize {
        let (chain, mut count) = (&prepare.chain, 0);
        for (block, position) in blocks.into_iter().zip(first..chain.len()) {
            let (identity, parent) = (chain[position], position.checked_sub(1).map(|before| chain[before]));
            let word = prepare.meta(position).first_chunk().map_or(0, |word| u64::from_le_bytes(*word));
            if !self.map_one(identity, parent, position as u32, (prepare.tenant, word), block) {
                break;
            }
            count += 1;
        }
        count
    }

    /// False when there is no room for it.
    fn map_one(
        &mut self,
        identity: BlockIdentity,
        parent: Option<BlockIdentity>,
        position: u32,
        (tenant, word): (TenantId, u64),
        block: MappedBlock,
    ) -> bool {
        let shared = Arc::clone(&self.shared);
        let MappedBlock { slab, slot: there, generation, bytes, wire_checksum, lease, until } = block;
        let checksum = with_identity(wire_checksum, &identity);
        let place = Arc::new(MappedPlace { slab, slot: there, generation, position, word });
        let known = shared.catalog.pin(MAPPED, &identity);
        if known.is_none() && shared.catalog.contains(&identity) {
            return true;
        }
        if let Some(known) = &known
            && known.checksum() == checksum
        {
            // The new lease follows the old one.
            self.mapped.take(known.slot());
            shared.memory.set_mapped(known.slot(), Some(place));
            self.mapped.set(known.slot(), Known { identity, until, lease });
            return true;
        }
        drop(known);
        self.unmap(&identity);
        let (mut evicted, mut reserved) = (Vec::new(), Vec::new());
        shared.catalog.reserve(MAPPED, 1, tenant, &mut evicted, &mut reserved);
        for evicted in evicted {
            self.left_mapped(evicted.slot);
        }
        let Some(reserved) = reserved.pop() else { return false };
        let (filling, cost) = (reserved.fill(), shared.recompute_cost(position));
        let slot = filling.slot();
        shared.memory.set_mapped(slot, Some(place));
        let complete = filling.complete(checksum, bytes);
        if complete.register(identity, parent, cost) != Registered::New {
            shared.memory.set_mapped(slot, None);
            return false;
        }
        self.mapped.set(slot, Known { identity, until, lease });
        StoreCounters::add(&shared.counters.from_far, 1);
        StoreCounters::add(&shared.counters.mapped, 1);
        true
    }

    /// Forgets a block of a pool.
    pub(crate) fn unmap(&mut self, identity: &BlockIdentity) {
        let slot = self.shared.catalog.places(identity).and_then(|places| places.slot(MAPPED));
        if let Some(slot) = slot.filter(|_| self.shared.catalog.remove(MAPPED, identity)) {
            self.left_mapped(slot);
        }
    }

    /// Forgets a block of a pool that does not have its checksum, and tells the pool, unless it has the slot for another block by now.
    /// Whether it was damaged; `None`: no pool is known to have it.
    pub(crate) fn drop_mapped(&mut self, identity: &BlockIdentity) -> Option<bool> {
        let slot = self.shared.catalog.places(identity).and_then(|places| places.slot(MAPPED))?;
        let is_damaged = self.shared.memory.mapped(slot).is_some_and(|place| !place.is_gone());
        let lease = self.mapped.known.get(slot as usize).and_then(Option::as_ref).map(|known| &known.lease);
        if let Some(lease) = lease.filter(|_| is_damaged) {
            lease.suspect(*identity);
        }
        self.unmap(identity);
        Some(is_damaged)
    }

    /// Forgets blocks whose leases are about to end, or that were read.
    pub(crate) fn expire_mapped(&mut self) {
        while let Some(slot) = self.shared.memory.next_read_mapped() {
            self.mapped.shorten(slot, self.now + AFTER_READ);
        }
        while let Some(&(until, slot)) = self.mapped.ends.first()
            && until <= self.now
            && !is_planted(Planted::KeptLease)
        {
            let known = self.mapped.known[slot as usize].as_ref();
            let identity = known.map(|known| known.identity).expect("a block with an end is known");
            self.unmap(&identity);
        }
    }

    fn left_mapped(&mut self, slot: u32) {
        self.shared.memory.set_mapped(slot, None);
        self.mapped.take(slot);
    }
}
