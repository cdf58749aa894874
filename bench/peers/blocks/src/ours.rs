//! Kvasir's store: host memory over the disk's log, composed as a node does with its default settings.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};
use crossbeam_channel::{Receiver, unbounded};
use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool, SlotRef};
use hdrhistogram::Histogram;
use kvstore_block::BlockIdentity;
use kvstore_catalog::PolicyKind;
use kvstore_disk::{AdmissionConfig, Area, ClockReading, DiskConfig, DiskLog, Recovered};
use kvstore_io::files::{FolderConfig, open_folder};
use kvstore_io::ring::RingConfig;
use kvstore_io::{IoEngine, uring};
use kvstore_store::{
    DISK_META_BYTES_MAX, Description, DiskTier, HostTier, Medium, Onboard, Store, StoreBuilder, StoreConfig,
    StoreEvent, TenantId, WriteMode,
};

use crate::side::{Found, Mode, Pace, Setup, Side, Spent, Stopwatch};
use crate::workload::{Contents, mix};

/// The node's defaults: operations at the disk, bytes of a file, the longest single read or write.
const DEPTH: usize = 64;
const SEGMENT_BYTES: u64 = 256 << 20;
const TRANSFER_BYTES_MAX: usize = 1 << 20;
/// Slots into which blocks are read.
const TARGETS: u32 = 64;
/// Time without progress after which a run fails.
const PATIENCE: Duration = Duration::from_secs(60);
/// Interval at which a condition without a notification is polled.
const RECHECK: Duration = Duration::from_micros(100);
const KEY_MASK: u64 = 0x5DEE_CE66_D1CE_4E5B;

/// Reports of the store's thread.
struct Told {
    on_disk: Vec<AtomicBool>,
    written: AtomicUsize,
    /// Number of blocks that host memory has taken or refused.
    put: AtomicUsize,
}

pub struct Ours {
    store: Store,
    pool: Arc<SlotPool>,
    told: Arc<Told>,
    onboarded: Receiver<(u64, Vec<SlotRef>, usize)>,
    contents: Contents,
    compares_all: bool,
    next_request: u64,
    offered: usize,
    /// Number of times that the queue returned a block, which was then offered again.
    given_back: u64,
}

/// Fails if a number has not changed for [`PATIENCE`].
struct Progress {
    last: usize,
    since: Instant,
}

impl Progress {
    fn new(now: usize) -> Self {
        Self { last: now, since: Instant::now() }
    }

    /// Whether the number has changed since the last call.
    fn look(&mut self, now: usize, what: &str) -> Result<bool> {
        let has_changed = now != self.last;
        if has_changed {
            *self = Self::new(now);
        }
        ensure!(self.since.elapsed() < PATIENCE, "{what}: no progress for {PATIENCE:?}");
        Ok(has_changed)
    }
}

impl Ours {
    pub fn open(setup: &Setup, mode: Mode, keys: usize) -> Result<Self> {
        let layout = SlabLayout { slot_bytes: setup.block_bytes, slot_count: TARGETS };
        let pool = SlotPool::new(Arc::new(Slab::create("bench", layout, PageSize::Standard)?));
        let disk_write = if mode == Mode::Eviction { WriteMode::Back } else { WriteMode::Through };
        let config = StoreConfig { disk_write, ..StoreConfig::new(setup.block_bytes, 16) };
        let slots = u32::try_from(setup.memory_bytes / setup.block_bytes)?;
        let host = HostTier { slots, pages: PageSize::Standard, eviction: PolicyKind::S3Fifo };
        let told = Arc::new(Told {
            on_disk: (0..keys).map(|_| AtomicBool::new(false)).collect(),
            written: AtomicUsize::new(0),
            put: AtomicUsize::new(0),
        });
        let (sender, onboarded) = unbounded();
        let listener = Arc::clone(&told);
        let notify = move |moved| match moved {
            StoreEvent::Stored { identity, medium: Medium::Disk } => {
                listener.on_disk[key_of(&identity)].store(true, Ordering::Relaxed);
                listener.written.fetch_add(1, Ordering::Release);
            }
            StoreEvent::Removed { identity, medium: Medium::Disk } => {
                listener.on_disk[key_of(&identity)].store(false, Ordering::Relaxed);
            }
            StoreEvent::Onboarded { request, slots, verified } => {
                // The receiver is gone if the comparison has failed.
                let _over = sender.send((request, slots, verified));
            }
            _ => {}
        };
        let (store, _) = StoreBuilder::new(config, host)?.disk(disk(setup)).start(notify)?;
        Ok(Self {
            store,
            pool,
            told,
            onboarded,
            contents: setup.contents.clone(),
            compares_all: setup.compares_all,
            next_request: 0,
            offered: 0,
            given_back: 0,
        })
    }

    fn written(&self) -> usize {
        self.told.written.load(Ordering::Acquire)
    }

    /// Number of blocks that do not get to the disk: refused by host memory, not admitted to the disk, or too
    /// many for its queue. Blocks that the store's own queue returned were offered again.
    fn dropped(&self) -> usize {
        let refused = self.counted("disk_not_admitted_blocks") + self.counted("throttled_blocks");
        refused.saturating_sub(self.given_back) as usize
    }

    /// Number of blocks that were written or dropped.
    fn done(&self) -> usize {
        self.written() + self.dropped()
    }

    /// Stores a block, waiting while the queue is full: copied and checksummed here if a slot of memory is
    /// free, as the C library does, otherwise by the store's thread.
    fn put(&mut self, key: u64) -> Result<()> {
        let started = Instant::now();
        loop {
            let told = Arc::clone(&self.told);
            let description =
                Description { parent: None, position: 0, meta: Arc::from([]), tenant: TenantId(0) };
            let caller = std::thread::current();
            let done = move |_is_stored| {
                told.put.fetch_add(1, Ordering::Release);
                caller.unpark();
            };
            let block = self.contents.block(key);
            let filled = self
                .store
                .reserve(TenantId(0))
                .and_then(|mut slot| slot.fill(std::iter::once(&block[..])).then_some(slot));
            let queued = match filled {
                Some(slot) => self.store.put_slot(identity(key), description, slot, done),
                None => self.store.put(identity(key), description, vec![block], done),
            };
            if queued.is_ok() {
                self.offered += 1;
                return Ok(());
            }
            self.given_back += 1;
            ensure!(started.elapsed() < PATIENCE, "the store takes no blocks");
            std::thread::sleep(RECHECK);
        }
    }

    /// Stores a block and waits until memory has taken or refused it: foyer's insertion ends when memory has
    /// the block.
    fn put_now(&mut self, key: u64) -> Result<()> {
        self.put(key)?;
        let started = Instant::now();
        while self.told.put.load(Ordering::Acquire) < self.offered {
            ensure!(started.elapsed() < PATIENCE, "memory takes no blocks");
            std::thread::park_timeout(PATIENCE);
        }
        Ok(())
    }

    /// Waits until host memory has taken or refused all blocks.
    fn wait_for_puts(&self) -> Result<()> {
        let put = || self.told.put.load(Ordering::Acquire);
        let mut progress = Progress::new(put());
        while put() < self.offered {
            progress.look(put(), "blocks on their way into host memory")?;
            std::thread::sleep(RECHECK);
        }
        Ok(())
    }

    /// Waits until no block is in transit to the disk. Returns the time at which that was first observed.
    fn settle(&self, watch: &Stopwatch) -> Result<Spent> {
        let (mut spent, mut progress) = (watch.stop(), Progress::new(self.done()));
        let mut quiet = 0;
        while quiet < 3 {
            std::thread::sleep(RECHECK * 10);
            if progress.look(self.done(), "writes to the disk")? || self.store.leased_slots() > 0 {
                (spent, quiet) = (watch.stop(), 0);
            } else {
                quiet += 1;
            }
        }
        Ok(spent)
    }

    fn onboard(&mut self, key: u64) -> Result<u64> {
        let target = self.pool.acquire().ok_or_else(|| anyhow!("no slot is free"))?;
        let request = self.next_request;
        self.next_request += 1;
        let deadline = Instant::now() + PATIENCE;
        let onboard =
            Onboard { request, chain: vec![identity(key)], first: 0, targets: vec![target], deadline };
        self.store.onboard(onboard).map_err(|_| anyhow!("the store takes no requests"))?;
        Ok(request)
    }

    /// Returns the next answer: its request, and whether the block came. Compares the block's bytes.
    fn answer(&self, key_of_request: impl Fn(u64) -> u64) -> Result<(u64, bool)> {
        let (request, slots, verified) = self.onboarded.recv_timeout(PATIENCE)?;
        if verified == 0 {
            return Ok((request, false));
        }
        let (key, slot) = (key_of_request(request), &slots[0]);
        let read = |at, bytes: &mut [u8]| slot.slab().read(slot.slot(), at, bytes);
        ensure!(self.contents.is_right(key, self.compares_all, read), "block {key} is not what was stored");
        Ok((request, true))
    }

    fn disk_reads(&self) -> u64 {
        self.counted("disk_read_blocks")
    }

    /// Value of a counter of the store. An unknown name is an error.
    fn counted(&self, name: &str) -> u64 {
        let counters = self.store.counters().snapshot();
        let found = counters.iter().find(|(found, ..)| *found == name);
        found.map(|(.., value)| *value).unwrap_or_else(|| panic!("the store counts no {name}"))
    }
}

impl Side for Ours {
    fn write(&mut self, keys: &[u64], pace: Pace) -> Result<Spent> {
        let (watch, before) = (Stopwatch::start(), self.done());
        let block_bytes = self.pool.slab().layout().slot_bytes;
        for (at, &key) in keys.iter().enumerate() {
            if let Pace::Window(bytes) = pace {
                let mut progress = Progress::new(self.done());
                while at.saturating_sub(self.done() - before) * block_bytes >= bytes {
                    progress.look(self.done(), "blocks on their way to the disk")?;
                    std::thread::sleep(RECHECK);
                }
            }
            self.put(key)?;
        }
        self.wait_for_puts()?;
        self.settle(&watch)
    }

    fn is_on_disk(&self, key: u64) -> bool {
        self.told.on_disk[key as usize].load(Ordering::Relaxed)
    }

    fn is_in_memory(&self, key: u64) -> bool {
        self.store.is_on_host(&identity(key))
    }

    fn read(&mut self, keys: &[u64], concurrency: usize, latency: &mut Histogram<u64>) -> Result<Spent> {
        let before = self.disk_reads();
        let watch = Stopwatch::start();
        let first = self.next_request;
        let mut started = Vec::with_capacity(keys.len());
        let mut answered = 0;
        while answered < keys.len() {
            if started.len() < keys.len() && started.len() - answered < concurrency {
                started.push(Instant::now());
                self.onboard(keys[started.len() - 1])?;
                continue;
            }
            let (request, has_come) = self.answer(|request| keys[(request - first) as usize])?;
            let at = (request - first) as usize;
            ensure!(has_come, "block {} did not come from the disk", keys[at]);
            latency.saturating_record(started[at].elapsed().as_nanos() as u64);
            answered += 1;
        }
        let spent = watch.stop();
        ensure!(self.disk_reads() - before == keys.len() as u64, "not all blocks came from the disk");
        Ok(spent)
    }

    fn mixed(&mut self, keys: &[u64], concurrency: usize) -> Result<(Spent, Found)> {
        let before = self.disk_reads();
        let watch = Stopwatch::start();
        let mut found = Found::default();
        let mut under_way: VecDeque<(u64, u64)> = VecDeque::with_capacity(concurrency);
        let mut next = 0;
        while next < keys.len() || !under_way.is_empty() {
            if next < keys.len() && under_way.len() < concurrency {
                let key = keys[next];
                next += 1;
                if self.store.look_up(&[identity(key)]) == 0 {
                    found.missed += 1;
                    self.put_now(key)?;
                } else {
                    under_way.push_back((self.onboard(key)?, key));
                }
                continue;
            }
            let key_of = |request| under_way.iter().find(|(of, _)| *of == request).map_or(0, |(_, key)| *key);
            let (request, has_come) = self.answer(key_of)?;
            let at = under_way.iter().position(|(of, _)| *of == request);
            let Some((_, key)) = at.and_then(|at| under_way.remove(at)) else { continue };
            if has_come {
                found.memory += 1;
            } else {
                found.missed += 1;
                self.put_now(key)?;
            }
        }
        let spent = watch.stop();
        found.disk = (self.disk_reads() - before) as usize;
        found.memory = found.memory.saturating_sub(found.disk);
        Ok((spent, found))
    }

    fn counters(&self) -> Option<String> {
        let counters = self.store.counters().snapshot();
        let counted = counters.iter().filter(|(.., value)| *value > 0);
        Some(counted.map(|(name, _, value)| format!("{name} {value}")).collect::<Vec<_>>().join(", "))
    }
}

fn identity(key: u64) -> BlockIdentity {
    let mut identity = [0; 16];
    identity[..8].copy_from_slice(&mix(key).to_le_bytes());
    identity[8..].copy_from_slice(&(key ^ KEY_MASK).to_le_bytes());
    BlockIdentity(identity)
}

fn key_of(identity: &BlockIdentity) -> usize {
    let mut high = [0; 8];
    high.copy_from_slice(&identity.0[8..]);
    (u64::from_le_bytes(high) ^ KEY_MASK) as usize
}

fn disk(setup: &Setup) -> DiskTier {
    let setup = setup.clone();
    let open = move || Ok(open_log(&setup)?);
    let admission = AdmissionConfig { frequency_min: 1, ..AdmissionConfig::default() };
    DiskTier { open: Box::new(open), depth: DEPTH, eviction: PolicyKind::S3Fifo, admission }
}

fn open_log(setup: &Setup) -> Result<(DiskLog, Vec<Recovered>)> {
    let segment_bytes = SEGMENT_BYTES.min(setup.disk_bytes as u64 / 4);
    let count = u32::try_from(setup.disk_bytes as u64 / segment_bytes)?;
    let folder = setup.folder.join("kvasir");
    // Filled with zeros once, so that neither side pays for the first write to each range of a file.
    let files = FolderConfig { write_zeros: true, ..FolderConfig::new(folder, segment_bytes, count) };
    let ring = RingConfig { depth: DEPTH, transfer_bytes_max: TRANSFER_BYTES_MAX, ..RingConfig::default() };
    let engine: Box<dyn IoEngine> = Box::new(uring::open(open_folder(&files)?, &ring)?);
    let config = DiskConfig {
        fingerprint: setup.instance,
        slot_bytes: u32::try_from(setup.block_bytes.next_multiple_of(4096))?,
        meta_bytes_max: DISK_META_BYTES_MAX as u16,
        reformat: true,
        operations_max: DEPTH as u32,
        ..DiskConfig::default()
    };
    let areas: Vec<Area> = (0..count).map(|file| Area { file, offset: 0, bytes: segment_bytes }).collect();
    let (log, recovered, _) =
        DiskLog::open(config, &areas, engine, mix(setup.instance), ClockReading::now())?;
    ensure!(recovered.is_empty(), "blocks of an earlier store are still there");
    Ok((log, recovered))
}
