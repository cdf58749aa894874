//! The blocks of a pool in a slot pool of their own, on the test's thread: what the product has a store for.

use std::sync::Arc;

use dataplane_fabric::wait::Bell;
use dataplane_memory::{Slab, SlotPool};
use kvstore_block::BlockIdentity;
use kvstore_catalog::{PoolCatalog, PoolRegistered};
use kvstore_remote::{Answer, Description, LookedUp, PoolBlocks, PoolLevels, Readable, Writable};

pub(crate) struct MemoryBlocks {
    pool: Arc<SlotPool>,
    catalog: PoolCatalog,
    /// What is in each slot, by its index; of use only for slots that the catalog names.
    described: Vec<Description>,
    evicted: u64,
}

impl MemoryBlocks {
    pub(crate) fn new(pool: &Arc<SlotPool>) -> Self {
        let slots = pool.slot_count();
        let nothing = Description { parent: BlockIdentity([0; 16]), bytes: 0, checksum: 0, meta: 0 };
        let (catalog, described) = (PoolCatalog::with_capacity(slots), vec![nothing; slots]);
        Self { pool: Arc::clone(pool), catalog, described, evicted: 0 }
    }
}

impl PoolBlocks for MemoryBlocks {
    // Whoever has a reference to a slot keeps it.
    type Reading = ();
    type Writing = ();

    fn slab(&self) -> &Arc<Slab> {
        self.pool.slab()
    }

    fn levels(&self) -> PoolLevels {
        let (slots, free) = (self.pool.slot_count(), self.pool.free_count());
        PoolLevels { slots, free, blocks: self.catalog.len(), evicted: self.evicted }
    }

    fn look_up(&mut self, _question: u64, chain: &[BlockIdentity]) -> LookedUp<()> {
        let mut slots = Vec::new();
        self.catalog.match_prefix(chain, &mut slots);
        let readable = |slot: dataplane_memory::SlotRef| {
            let description = self.described[slot.slot() as usize];
            Readable { slot, description, hold: () }
        };
        LookedUp::Now(slots.into_iter().map(readable).collect())
    }

    fn find(&mut self, identity: &BlockIdentity) -> Option<Readable<()>> {
        let slot = self.catalog.get(identity)?;
        let description = self.described[slot.slot() as usize];
        Some(Readable { slot, description, hold: () })
    }

    fn contains(&mut self, identity: &BlockIdentity) -> bool {
        self.catalog.get(identity).is_some()
    }

    fn reserve(&mut self) -> Option<Writable<()>> {
        let slot = self.pool.acquire().or_else(|| {
            self.catalog.evict()?;
            self.evicted += 1;
            self.pool.acquire()
        })?;
        Some(Writable { slot, hold: () })
    }

    fn register(
        &mut self,
        _question: u64,
        identity: BlockIdentity,
        description: Description,
        written: Writable<()>,
    ) -> Option<bool> {
        self.described[written.slot.slot() as usize] = description;
        let registered = self.catalog.register(identity, written.slot);
        assert!(matches!(registered, PoolRegistered::New), "nobody else could: it was pending");
        Some(true)
    }

    fn remove(&mut self, identity: &BlockIdentity) {
        self.catalog.remove(identity);
    }

    fn next_answer(&mut self) -> Option<Answer<()>> {
        None
    }

    fn has_answers(&self) -> bool {
        false
    }

    fn set_bell(&mut self, _bell: Arc<Bell>) {}
}
