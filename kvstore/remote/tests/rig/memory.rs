//! The blocks of a pool in a slot pool, on the test's thread, in place of the product's store. With a seed,
//! some answers are delayed like those of a store.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dataplane_fabric::wait::Notifier;
use dataplane_memory::{Slab, SlotPool};
use kvstore_block::BlockIdentity;
use kvstore_catalog::{PoolCatalog, PoolRegistered};
use kvstore_remote::{Answer, Description, LookUpResult, PoolBlocks, PoolLevels, Readable, Writable};

pub(crate) struct MemoryBlocks {
    pool: Arc<SlotPool>,
    catalog: PoolCatalog,
    /// Descriptions by slot; valid only for slots that the catalog names.
    described: Vec<Description>,
    evicted: u64,
    /// `None`: no answer is delayed.
    random: Option<fastrand::Rng>,
    /// Delayed answers, each with the number of polls until it is given.
    delayed: VecDeque<(u64, Answer<()>)>,
    /// Every block of each `retain`, with its time.
    retained: Retained,
}

pub(crate) type Retained = Arc<Mutex<Vec<(BlockIdentity, Duration)>>>;

impl MemoryBlocks {
    pub(crate) fn new(pool: &Arc<SlotPool>) -> Self {
        Self::delaying(pool, 0)
    }

    pub(crate) fn delaying(pool: &Arc<SlotPool>, seed: u64) -> Self {
        let slots = pool.slot_count();
        let nothing = Description { parent: BlockIdentity([0; 16]), bytes: 0, checksum: 0, meta: 0 };
        let (catalog, described) = (PoolCatalog::with_capacity(slots), vec![nothing; slots]);
        Self {
            pool: Arc::clone(pool),
            catalog,
            described,
            evicted: 0,
            random: (seed != 0).then(|| fastrand::Rng::with_seed(seed)),
            delayed: VecDeque::new(),
            retained: Retained::default(),
        }
    }

    /// Every block of each `retain` from now on, with its time.
    pub(crate) fn retained(&self) -> Retained {
        Arc::clone(&self.retained)
    }

    /// Number of polls by which an answer is delayed; `None`: it is given at once.
    fn delay(&mut self) -> Option<u64> {
        let random = self.random.as_mut()?;
        (random.u64(..3) == 0).then(|| random.u64(..12))
    }
}

impl PoolBlocks for MemoryBlocks {
    // A reference to a slot keeps the block there.
    type Reading = ();
    type Writing = ();

    fn slab(&self) -> &Arc<Slab> {
        self.pool.slab()
    }

    fn levels(&self) -> PoolLevels {
        let (slots, free) = (self.pool.slot_count(), self.pool.free_count());
        PoolLevels { slots, free, blocks: self.catalog.len(), evicted: self.evicted }
    }

    fn look_up(&mut self, question: u64, chain: &[BlockIdentity]) -> LookUpResult<()> {
        let mut slots = Vec::new();
        self.catalog.match_prefix(chain, &mut slots);
        let readable = |slot: dataplane_memory::SlotRef| {
            let description = self.described[slot.slot() as usize];
            Readable { slot, description, hold: () }
        };
        let blocks = slots.into_iter().map(readable).collect();
        match self.delay() {
            None => LookUpResult::Ready(blocks),
            Some(polls) => {
                self.delayed.push_back((polls, Answer::Found { question, blocks }));
                LookUpResult::Pending
            }
        }
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
        question: u64,
        identity: BlockIdentity,
        description: Description,
        written: Writable<()>,
    ) -> Option<bool> {
        self.described[written.slot.slot() as usize] = description;
        let registered = self.catalog.register(identity, written.slot);
        assert!(matches!(registered, PoolRegistered::New), "nobody else could: it was pending");
        match self.delay() {
            None => Some(true),
            Some(polls) => {
                self.delayed.push_back((polls, Answer::Registered { question, is_kept: true }));
                None
            }
        }
    }

    fn retain(&mut self, chain: &[BlockIdentity], how_long: Duration) {
        let mut retained = self.retained.lock().expect("nothing panics with it");
        retained.extend(chain.iter().map(|identity| (*identity, how_long)));
    }

    fn remove(&mut self, identity: &BlockIdentity) {
        self.catalog.remove(identity);
    }

    fn next_answer(&mut self) -> Option<Answer<()>> {
        self.delayed.iter_mut().for_each(|(polls, _)| *polls = polls.saturating_sub(1));
        let due = self.delayed.iter().position(|(polls, _)| *polls == 0)?;
        self.delayed.remove(due).map(|(_, answer)| answer)
    }

    fn has_answers(&self) -> bool {
        !self.delayed.is_empty()
    }

    fn set_notifier(&mut self, _notifier: Arc<Notifier>) {}
}
