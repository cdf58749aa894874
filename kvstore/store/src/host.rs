//! The host tier: a slab, a catalog with least-recently-used eviction, and the thread that copies.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded};
use dataplane_memory::{Slab, SlotPool, SlotRef};
use kvstore_block::BlockIdentity;
use kvstore_catalog::{Catalog, Registered};
use xxhash_rust::xxh3::Xxh3;

use crate::StoreCounters;

/// Jobs that may wait for the copying thread.
const JOBS_MAX: usize = 1024;
const CHUNK_BYTES: usize = 8 << 10;

/// A block on its way out of the worker's pool.
#[derive(Debug)]
pub struct Offload {
    /// What it is.
    pub identity: BlockIdentity,
    /// Where it is; the reference is dropped when the copy is made.
    pub slot: SlotRef,
}

/// The queue is full; the job comes back.
#[derive(Debug)]
pub struct Throttled<T>(pub T);

/// What the store's thread reports.
#[derive(Debug)]
pub enum Moved {
    /// An offload is over; the evicted blocks had to go for it.
    Offloaded {
        /// The block.
        identity: BlockIdentity,
        /// Whether it is in the host tier now.
        stored: bool,
        /// Blocks that had to go.
        evicted: Vec<BlockIdentity>,
    },
    /// Blocks were brought into the given slots; the leading `verified` of them are good.
    Onboarded {
        /// The caller's number for the request.
        request: u64,
        /// The slots that were given.
        slots: Vec<SlotRef>,
        /// How many of them hold verified blocks.
        verified: usize,
    },
    /// A block was found damaged and thrown away.
    Damaged {
        /// The block.
        identity: BlockIdentity,
    },
}

enum Job {
    Offload(Offload),
    Onboard { request: u64, blocks: Vec<(BlockIdentity, SlotRef)>, targets: Vec<SlotRef> },
}

#[derive(Debug)]
struct Tier {
    catalog: Catalog,
    checksums: HashMap<BlockIdentity, u64>,
}

/// Blocks in host memory.
#[derive(Debug)]
pub struct HostStore {
    pool: Arc<SlotPool>,
    /// Held for map operations only, never while bytes are copied.
    tier: Arc<Mutex<Tier>>,
    jobs: Option<Sender<Job>>,
    counters: Arc<StoreCounters>,
    thread: Option<JoinHandle<()>>,
}

impl HostStore {
    /// Starts the store over `slab`. `notify` is called on its thread and must not block.
    pub fn start(
        slab: Arc<Slab>,
        notify: impl FnMut(Moved) + Send + 'static,
    ) -> Result<Self, std::io::Error> {
        let pool = SlotPool::new(slab);
        let catalog = Catalog::with_capacity(pool.slot_count());
        let checksums = HashMap::with_capacity(pool.slot_count());
        let tier = Arc::new(Mutex::new(Tier { catalog, checksums }));
        let counters = Arc::new(StoreCounters::default());
        let (jobs, inbox) = bounded(JOBS_MAX);
        let mover = Mover {
            pool: Arc::clone(&pool),
            tier: Arc::clone(&tier),
            counters: Arc::clone(&counters),
            notify: Box::new(notify),
        };
        let thread = std::thread::Builder::new()
            .name("kvasir-host-tier".to_owned())
            .spawn(move || mover.run(&inbox))?;
        Ok(Self { pool, tier, jobs: Some(jobs), counters, thread: Some(thread) })
    }

    /// What it has done so far.
    #[must_use]
    pub fn counters(&self) -> &Arc<StoreCounters> {
        &self.counters
    }

    /// Blocks that fit.
    #[must_use]
    pub fn capacity_blocks(&self) -> usize {
        self.pool.slot_count()
    }

    /// Slots of the tier that something other than its catalog refers to: zero when nothing is under way.
    #[must_use]
    pub fn leased_slots(&self) -> usize {
        self.pool.used_count().saturating_sub(lock(&self.tier).catalog.len())
    }

    /// Length of the longest prefix of `chain` that is here.
    #[must_use]
    pub fn look_up(&self, chain: &[BlockIdentity]) -> usize {
        let tier = lock(&self.tier);
        chain.iter().take_while(|identity| tier.catalog.contains(identity)).count()
    }

    /// Queues a block for the copy into this tier; [`Moved::Offloaded`] follows.
    pub fn offload(&self, offload: Offload) -> Result<(), Throttled<Offload>> {
        match self.try_send(Job::Offload(offload)) {
            Err(Job::Offload(offload)) => {
                self.counters.throttled.fetch_add(1, Ordering::Relaxed);
                Err(Throttled(offload))
            }
            _ => Ok(()),
        }
    }

    /// Queues the copy of `chain` into `targets`; [`Moved::Onboarded`] with `request` follows. Blocks that
    /// have gone since the look-up are simply not counted as verified.
    pub fn onboard(
        &self,
        request: u64,
        chain: &[BlockIdentity],
        targets: Vec<SlotRef>,
    ) -> Result<(), Throttled<Vec<SlotRef>>> {
        assert_eq!(chain.len(), targets.len(), "one slot for each block");
        let mut leased = Vec::with_capacity(chain.len());
        let found = lock(&self.tier).catalog.match_prefix(chain, &mut leased);
        let blocks = chain[..found].iter().copied().zip(leased).collect();
        match self.try_send(Job::Onboard { request, blocks, targets }) {
            Err(Job::Onboard { targets, .. }) => Err(Throttled(targets)),
            _ => Ok(()),
        }
    }

    fn try_send(&self, job: Job) -> Result<(), Job> {
        let Some(jobs) = &self.jobs else { return Err(job) };
        jobs.try_send(job).map_err(|error| match error {
            TrySendError::Full(job) | TrySendError::Disconnected(job) => job,
        })
    }
}

impl Drop for HostStore {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // A panic there has been printed; there is nobody to hand it to.
            let _panicked = thread.join();
        }
    }
}

/// A panic while the lock was held leaves maps that are consistent step by step; going on is safe.
fn lock(tier: &Mutex<Tier>) -> MutexGuard<'_, Tier> {
    tier.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Mover {
    pool: Arc<SlotPool>,
    tier: Arc<Mutex<Tier>>,
    counters: Arc<StoreCounters>,
    notify: Box<dyn FnMut(Moved) + Send>,
}

impl Mover {
    fn run(mut self, inbox: &Receiver<Job>) {
        for job in inbox {
            match job {
                Job::Offload(offload) => self.offload(&offload),
                Job::Onboard { request, blocks, targets } => self.onboard(request, blocks, targets),
            }
            let blocks = lock(&self.tier).catalog.len() as u64;
            self.counters.blocks.store(blocks, Ordering::Relaxed);
        }
    }

    fn offload(&mut self, offload: &Offload) {
        let mut evicted = Vec::new();
        let identity = offload.identity;
        if lock(&self.tier).catalog.contains(&identity) {
            (self.notify)(Moved::Offloaded { identity, stored: true, evicted });
            return;
        }
        let Some(target) = self.free_slot(&mut evicted) else {
            self.counters.throttled.fetch_add(1, Ordering::Relaxed);
            (self.notify)(Moved::Offloaded { identity, stored: false, evicted });
            return;
        };
        let bytes = offload.slot.slab().layout().slot_bytes;
        target.slab().copy_from(offload.slot.slab(), (offload.slot.slot(), 0), (target.slot(), 0), bytes);
        let checksum = checksum(&target);
        let mut tier = lock(&self.tier);
        if let Registered::New = tier.catalog.register(offload.identity, target) {
            tier.checksums.insert(offload.identity, checksum);
            drop(tier);
            self.counters.offloaded.fetch_add(1, Ordering::Relaxed);
        } else {
            drop(tier);
        }
        (self.notify)(Moved::Offloaded { identity, stored: true, evicted });
    }

    fn free_slot(&mut self, evicted: &mut Vec<BlockIdentity>) -> Option<SlotRef> {
        loop {
            if let Some(slot) = self.pool.acquire() {
                return Some(slot);
            }
            let mut tier = lock(&self.tier);
            let (identity, _slot) = tier.catalog.evict()?;
            tier.checksums.remove(&identity);
            evicted.push(identity);
            self.counters.evicted.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn onboard(&mut self, request: u64, blocks: Vec<(BlockIdentity, SlotRef)>, targets: Vec<SlotRef>) {
        let mut verified = 0;
        for ((identity, source), target) in blocks.iter().zip(&targets) {
            let bytes = source.slab().layout().slot_bytes;
            target.slab().copy_from(source.slab(), (source.slot(), 0), (target.slot(), 0), bytes);
            let expected = lock(&self.tier).checksums.get(identity).copied();
            if expected != Some(checksum(target)) {
                self.discard(*identity);
                break;
            }
            verified += 1;
        }
        drop(blocks);
        self.counters.onboarded.fetch_add(verified as u64, Ordering::Relaxed);
        (self.notify)(Moved::Onboarded { request, slots: targets, verified });
    }

    fn discard(&mut self, identity: BlockIdentity) {
        let mut tier = lock(&self.tier);
        tier.catalog.remove(&identity);
        tier.checksums.remove(&identity);
        drop(tier);
        tracing::warn!(block = identity.short(), "host tier: a block is damaged; it will be recomputed");
        self.counters.checksum_failures.fetch_add(1, Ordering::Relaxed);
        (self.notify)(Moved::Damaged { identity });
    }
}

/// xxh3-64 of a whole slot, through a buffer that stays in the L1 cache.
fn checksum(slot: &SlotRef) -> u64 {
    let bytes = slot.slab().layout().slot_bytes;
    let mut hasher = Xxh3::new();
    let mut chunk = [0; CHUNK_BYTES];
    let mut at = 0;
    while at < bytes {
        let len = CHUNK_BYTES.min(bytes - at);
        slot.slab().read(slot.slot(), at, &mut chunk[..len]);
        hasher.update(&chunk[..len]);
        at += len;
    }
    hasher.digest()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use dataplane_memory::{PageSize, SlabLayout};

    use super::*;

    fn slab(slot_count: u32) -> Arc<Slab> {
        let layout = SlabLayout { slot_bytes: 20_000, slot_count };
        Arc::new(Slab::create("store", layout, PageSize::Standard).expect("slab"))
    }

    fn identity(number: u8) -> BlockIdentity {
        BlockIdentity([number; 16])
    }

    struct Rig {
        device: Arc<SlotPool>,
        host: Arc<Slab>,
        store: HostStore,
        moved: Receiver<Moved>,
    }

    fn rig(host_slots: u32) -> Rig {
        let host = slab(host_slots);
        let (sender, moved) = bounded(64);
        let notify = move |event| assert!(sender.send(event).is_ok());
        let store = HostStore::start(Arc::clone(&host), notify).expect("store");
        Rig { device: SlotPool::new(slab(8)), host, store, moved }
    }

    impl Rig {
        fn next(&self) -> Moved {
            self.moved.recv_timeout(Duration::from_secs(5)).expect("the store answers")
        }

        fn offload(&self, number: u8) -> Vec<BlockIdentity> {
            let slot = self.device.acquire().expect("slot");
            slot.slab().write(slot.slot(), 0, &[number; 20_000]);
            assert!(self.store.offload(Offload { identity: identity(number), slot }).is_ok());
            match self.next() {
                Moved::Offloaded { evicted, .. } => evicted,
                other => panic!("{other:?}"),
            }
        }

        fn onboard(&self, chain: &[u8]) -> (Vec<SlotRef>, usize) {
            let chain: Vec<BlockIdentity> = chain.iter().copied().map(identity).collect();
            let targets = chain.iter().map(|_| self.device.acquire().expect("slot")).collect();
            assert!(self.store.onboard(7, &chain, targets).is_ok());
            match self.next() {
                Moved::Onboarded { request: 7, slots, verified } => (slots, verified),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn blocks_come_back_as_they_went() {
        let rig = rig(3);
        assert!(rig.offload(1).is_empty() && rig.offload(2).is_empty() && rig.offload(3).is_empty());
        assert_eq!(rig.store.look_up(&[1, 2, 9, 3].map(identity)), 2);
        let (slots, verified) = rig.onboard(&[1, 2]);
        assert_eq!(verified, 2);
        for (number, slot) in [1_u8, 2].into_iter().zip(&slots) {
            let mut bytes = [0; 20_000];
            slot.slab().read(slot.slot(), 0, &mut bytes);
            assert_eq!(bytes, [number; 20_000]);
        }
        // 1 and 2 were used last, so 3 goes first.
        assert_eq!(rig.offload(4), [identity(3)]);
        drop(slots);
        assert_eq!(rig.device.used_count(), 0);
        assert_eq!(rig.store.leased_slots(), 0);
    }

    #[test]
    fn a_damaged_block_is_a_miss_and_is_thrown_away() {
        let rig = rig(2);
        rig.offload(1);
        for slot in 0..2 {
            rig.host.write(slot, 100, &[0xEE]);
        }
        let chain = [identity(1)];
        let targets = vec![rig.device.acquire().expect("slot")];
        assert!(rig.store.onboard(7, &chain, targets).is_ok());
        assert!(matches!(rig.next(), Moved::Damaged { .. }));
        assert!(matches!(rig.next(), Moved::Onboarded { verified: 0, .. }));
        assert_eq!(rig.store.look_up(&chain), 0);
        assert_eq!(rig.store.counters().checksum_failures.load(Ordering::Relaxed), 1);
    }
}
