//! A store over a pool of test blocks, and disks in memory that misbehave on demand.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, unbounded};
use dataplane_memory::testing::{CopierDouble, DeviceDouble};
use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool, SlotRef};
use kvstore_block::{BlockIdentity, IdentityChain};
use kvstore_catalog::PolicyKind;
use kvstore_disk::{AdmissionConfig, Area, ClockReading, DiskConfig, DiskLog};
use kvstore_io::IoEngine;
use kvstore_io::faulty::{Faults, FaultyEngine};
use kvstore_io::testing::{MemoryEngine, MemoryFiles};
use kvstore_store::{
    DISK_META_BYTES_MAX, Description, DiskTier, HostTier, Medium, Offload, Onboard, RecoveredBlock, Store,
    StoreBuilder, StoreConfig, StoreEvent, TenantId, WriteMode,
};

pub(crate) const BLOCK: usize = 20_000;
pub(crate) const TOKENS: u32 = 16;
/// Slots of the worker's pool.
const POOL_SLOTS: u32 = 64;
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) struct Rig {
    pub(crate) pool: Arc<SlotPool>,
    pub(crate) store: Store,
    pub(crate) moved: Receiver<StoreEvent>,
    pub(crate) survivors: Vec<RecoveredBlock>,
    /// `Stored` minus `Removed` events of each block and medium.
    pub(crate) told: HashMap<(BlockIdentity, Medium), i32>,
    pub(crate) next_request: u64,
}

pub(crate) struct Behind {
    pub(crate) host_slots: u32,
    pub(crate) disk: Option<(MemoryFiles, Faults)>,
    pub(crate) write: WriteMode,
}

pub(crate) fn files(blocks: usize) -> MemoryFiles {
    MemoryFiles::new(&[(blocks * BLOCK.next_multiple_of(4096) + (1 << 20)).next_multiple_of(4096)])
}

pub(crate) fn disk_over(
    files: &MemoryFiles,
    engine: impl FnOnce(MemoryEngine) -> Box<dyn IoEngine> + Send + 'static,
) -> DiskTier {
    let files = files.clone();
    let open = move || {
        let engine = engine(MemoryEngine::new(&files, 4096, 1 << 20, 64));
        let bytes = engine.geometry().files[0];
        let config = DiskConfig {
            slot_bytes: BLOCK.next_multiple_of(4096) as u32,
            meta_bytes_max: DISK_META_BYTES_MAX as u16,
            operations_max: 32,
            operation_timeout: Duration::from_millis(500),
            probe_interval: Duration::from_millis(20),
            ..DiskConfig::default()
        };
        let areas = [Area { file: 0, offset: 0, bytes }];
        let (log, recovered, _) = DiskLog::open(config, &areas, engine, 77, ClockReading::now())?;
        Ok((log, recovered))
    };
    let admission = AdmissionConfig { frequency_min: 1, ..AdmissionConfig::default() };
    DiskTier { open: Box::new(open), depth: 16, eviction: PolicyKind::Lru, admission }
}

pub(crate) fn open_disk(files: &MemoryFiles, faults: Faults) -> DiskTier {
    disk_over(files, move |engine| Box::new(FaultyEngine::new(engine, faults)))
}

impl Rig {
    pub(crate) fn new(behind: Behind) -> Self {
        Self::configured(behind, StoreConfig::new(BLOCK, TOKENS))
    }

    pub(crate) fn configured(behind: Behind, config: StoreConfig) -> Self {
        let layout = SlabLayout { slot_bytes: BLOCK, slot_count: POOL_SLOTS };
        let slab = Slab::create("pool", layout, PageSize::Standard).expect("slab");
        Self::over(slab, None, behind, config)
    }

    /// The pool lies in the memory of a device, and `copier` goes there and back.
    pub(crate) fn on_device(behind: Behind, memory: Arc<DeviceDouble>, copier: CopierDouble) -> Self {
        let layout = SlabLayout { slot_bytes: BLOCK, slot_count: POOL_SLOTS };
        let slab = Slab::on_device("pool", layout, memory).expect("slab");
        Self::over(slab, Some(copier), behind, StoreConfig::new(BLOCK, TOKENS))
    }

    /// Starts a store behind a pool in host memory.
    pub(crate) fn of(builder: StoreBuilder) -> Self {
        let layout = SlabLayout { slot_bytes: BLOCK, slot_count: POOL_SLOTS };
        Self::started(Slab::create("pool", layout, PageSize::Standard).expect("slab"), builder)
    }

    fn over(pool: Slab, copier: Option<CopierDouble>, behind: Behind, config: StoreConfig) -> Self {
        let host =
            HostTier { slots: behind.host_slots, pages: PageSize::Standard, eviction: PolicyKind::Lru };
        let config = StoreConfig { disk_write: behind.write, ..config };
        let mut builder = StoreBuilder::new(config, host).expect("memory");
        if let Some((files, faults)) = behind.disk {
            builder = builder.disk(open_disk(&files, faults));
        }
        if let Some(copier) = copier {
            builder = builder.copier(Box::new(copier));
        }
        Self::started(pool, builder)
    }

    fn started(pool: Slab, builder: StoreBuilder) -> Self {
        let pool = SlotPool::new(Arc::new(pool));
        let (sender, moved) = unbounded();
        let notify = move |event| {
            let _over = sender.send(event);
        };
        let (store, survivors) = builder.start(notify).expect("threads");
        Self { pool, store, moved, survivors, told: HashMap::new(), next_request: 0 }
    }

    pub(crate) fn next(&mut self) -> StoreEvent {
        let moved = self.moved.recv_timeout(PATIENCE).expect("the store answers");
        match &moved {
            StoreEvent::Stored { identity, medium } => {
                *self.told.entry((*identity, *medium)).or_default() += 1
            }
            StoreEvent::Removed { identity, medium } => {
                *self.told.entry((*identity, *medium)).or_default() -= 1
            }
            _ => {}
        }
        moved
    }

    /// Takes in the events that have come so far.
    pub(crate) fn listen(&mut self) {
        while !self.moved.is_empty() {
            self.next();
        }
    }

    pub(crate) fn offload(&mut self, chain: &[BlockIdentity], position: usize) {
        self.offload_for(TenantId(0), chain, position);
    }

    pub(crate) fn offload_for(&mut self, tenant: TenantId, chain: &[BlockIdentity], position: usize) {
        let slot = self.pool.acquire().expect("slot");
        write(&slot, &contents(&chain[position]));
        let parent = position.checked_sub(1).map(|before| chain[before]);
        let description =
            Description { parent, position: position as u32, meta: vec![position as u8; 40].into(), tenant };
        let offload = Offload { identity: chain[position], description, slot };
        assert!(self.store.offload(offload).is_ok(), "the queue is short");
        loop {
            if matches!(self.next(), StoreEvent::Offloaded { identity } if identity == chain[position]) {
                return;
            }
        }
    }

    /// Brings a chain in and compares every byte of what is said to be good.
    pub(crate) fn onboard(&mut self, chain: &[BlockIdentity], within: Duration) -> usize {
        self.onboard_from(0, chain, within)
    }

    /// The same for the blocks of a prompt from `first` on.
    pub(crate) fn onboard_from(&mut self, first: usize, blocks: &[BlockIdentity], within: Duration) -> usize {
        let (chain, first) = (blocks, first as u32);
        let targets: Vec<SlotRef> = chain.iter().map(|_| self.pool.acquire().expect("slot")).collect();
        targets.iter().for_each(|slot| write(slot, &[0xEE; BLOCK]));
        self.next_request += 1;
        let request = self.next_request;
        let deadline = Instant::now() + within;
        let job = Onboard { request, chain: chain.to_vec(), first, targets, deadline };
        assert!(self.store.onboard(job).is_ok());
        loop {
            let StoreEvent::Onboarded { request: answered, slots, verified } = self.next() else { continue };
            if answered != request {
                continue;
            }
            for (identity, slot) in chain.iter().zip(&slots).take(verified) {
                assert!(read(slot) == contents(identity), "a block is not what was stored");
            }
            return verified;
        }
    }

    /// Waits until the disk holds so many blocks.
    pub(crate) fn wait_until_on_disk(&mut self, on_disk: u64) {
        let started = Instant::now();
        while self.store.blocks()[1] != on_disk || self.store.leased_slots() > 0 {
            assert!(
                started.elapsed() < PATIENCE,
                "{:?} blocks, not {on_disk}: {:?}",
                self.store.blocks(),
                self.store.counters().snapshot()
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        self.listen();
    }

    pub(crate) fn counter(&self, name: &str) -> u64 {
        let counters = self.store.counters().snapshot();
        counters.iter().find(|(of, ..)| *of == name).map(|(.., value)| *value).expect("a known counter")
    }

    /// Waits until the events agree with the blocks that are there.
    pub(crate) fn events_are_true(&mut self, all: &[BlockIdentity]) {
        let started = Instant::now();
        loop {
            self.listen();
            let there = self.store.blocks();
            let told = [Medium::Host, Medium::Disk].map(|medium| self.told_of(medium, all));
            if told == there {
                return;
            }
            assert!(started.elapsed() < PATIENCE, "told {told:?}, there {there:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn told_of(&self, medium: Medium, all: &[BlockIdentity]) -> u64 {
        let survivors = self.survivors.iter().filter(|_| medium == Medium::Disk);
        let before: Vec<BlockIdentity> = survivors.map(|survivor| survivor.identity).collect();
        let count = |identity: &BlockIdentity| {
            let told = self.told.get(&(*identity, medium)).copied().unwrap_or(0);
            let now = told + i32::from(before.contains(identity));
            assert!((0..=1).contains(&now), "{medium:?}: told {now} times");
            now as u64
        };
        all.iter().map(count).sum()
    }
}

/// Writes a slot, wherever it is.
pub(crate) fn write(slot: &SlotRef, bytes: &[u8]) {
    let slab = slot.slab();
    match slab.device() {
        Some(device) => {
            device.write(slot.slot() as usize * slab.layout().stride(), bytes).expect("the device's memory");
        }
        None => slab.write(slot.slot(), 0, bytes),
    }
}

pub(crate) fn read(slot: &SlotRef) -> Vec<u8> {
    let (slab, mut bytes) = (slot.slab(), vec![0; BLOCK]);
    match slab.device() {
        Some(device) => {
            let offset = slot.slot() as usize * slab.layout().stride();
            device.read(offset, &mut bytes).expect("the device's memory");
        }
        None => slab.read(slot.slot(), 0, &mut bytes),
    }
    bytes
}

pub(crate) fn chain(seed: u64, blocks: usize) -> Vec<BlockIdentity> {
    let mut identity = IdentityChain::new(seed, &[]);
    (0..blocks as u32).map(|block| identity.next(&[block; TOKENS as usize])).collect()
}

pub(crate) fn contents(identity: &BlockIdentity) -> Vec<u8> {
    (0..BLOCK).map(|at| identity.0[at % 16].wrapping_add((at / 16) as u8)).collect()
}

pub(crate) fn no_disk(host_slots: u32) -> Behind {
    Behind { host_slots, disk: None, write: WriteMode::Through }
}

pub(crate) fn with_disk(host_slots: u32, files: &MemoryFiles, write: WriteMode) -> Behind {
    Behind { host_slots, disk: Some((files.clone(), Faults::default())), write }
}
