//! The store as a worker uses it: blocks go out and come back as they were, through host memory and the disk, whatever
//! the disk does.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, unbounded};
use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool, SlotRef};
use kvstore_block::{BlockIdentity, BlockLayout, ElementType, IdentityChain};
use kvstore_catalog::PolicyKind;
use kvstore_disk::{AdmissionConfig, Area, DiskConfig, DiskLog, Moment};
use kvstore_io::IoEngine;
use kvstore_io::faulty::{Faults, FaultyEngine};
use kvstore_io::files::{FolderConfig, open_folder};
use kvstore_io::ring::RingConfig;
use kvstore_io::testing::{MemoryEngine, MemoryFiles};
use kvstore_io::uring;
use kvstore_quantise::{Format, QuantisedLayout, Scheme};
use kvstore_store::{
    DISK_META_BYTES_MAX, Description, DiskTier, HostTier, Medium, Moved, Offload, Onboard, Plan, Prompt,
    Store, StoreBuilder, StoreConfig, Survivor, WriteMode,
};

const BLOCK: usize = 20_000;
const TOKENS: u32 = 16;
const PATIENCE: Duration = Duration::from_secs(20);

struct Rig {
    pool: Arc<SlotPool>,
    store: Store,
    moved: Receiver<Moved>,
    survivors: Vec<Survivor>,
    /// What the events say is where.
    told: HashMap<(BlockIdentity, Medium), i32>,
    next_request: u64,
}

struct Behind {
    host_slots: u32,
    disk: Option<(MemoryFiles, Faults)>,
    write: WriteMode,
}

fn files(blocks: usize) -> MemoryFiles {
    MemoryFiles::new(&[(blocks * BLOCK.next_multiple_of(4096) + (1 << 20)).next_multiple_of(4096)])
}

fn disk_over(
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
        let (log, recovered, _) = DiskLog::open(config, &areas, engine, 77, Moment::now())?;
        Ok((log, recovered))
    };
    let admission = AdmissionConfig { frequency_min: 1, ..AdmissionConfig::default() };
    DiskTier { open: Box::new(open), depth: 16, eviction: PolicyKind::Lru, admission }
}

fn open_disk(files: &MemoryFiles, faults: Faults) -> DiskTier {
    disk_over(files, move |engine| Box::new(FaultyEngine::new(engine, faults)))
}

impl Rig {
    fn new(behind: Behind) -> Self {
        let layout = SlabLayout { slot_bytes: BLOCK, slot_count: 64 };
        let pool = SlotPool::new(Arc::new(Slab::create("pool", layout, PageSize::Standard).expect("slab")));
        let host =
            HostTier { slots: behind.host_slots, pages: PageSize::Standard, eviction: PolicyKind::Lru };
        let config = StoreConfig { disk_write: behind.write, ..StoreConfig::new(BLOCK, TOKENS) };
        let mut builder = StoreBuilder::new(config, host).expect("memory");
        if let Some((files, faults)) = behind.disk {
            builder = builder.disk(open_disk(&files, faults));
        }
        let (sender, moved) = unbounded();
        let notify = move |event| {
            let _over = sender.send(event);
        };
        let (store, survivors) = builder.start(notify).expect("threads");
        Self { pool, store, moved, survivors, told: HashMap::new(), next_request: 0 }
    }

    fn next(&mut self) -> Moved {
        let moved = self.moved.recv_timeout(PATIENCE).expect("the store answers");
        match &moved {
            Moved::Stored { identity, medium } => *self.told.entry((*identity, *medium)).or_default() += 1,
            Moved::Removed { identity, medium } => *self.told.entry((*identity, *medium)).or_default() -= 1,
            _ => {}
        }
        moved
    }

    /// Takes in the events that have come so far.
    fn listen(&mut self) {
        while !self.moved.is_empty() {
            self.next();
        }
    }

    fn offload(&mut self, chain: &[BlockIdentity], position: usize) {
        let slot = self.pool.acquire().expect("slot");
        slot.slab().write(slot.slot(), 0, &contents(&chain[position]));
        let parent = position.checked_sub(1).map(|before| chain[before]);
        let description =
            Description { parent, position: position as u32, meta: vec![position as u8; 40].into() };
        let offload = Offload { identity: chain[position], description, slot };
        assert!(self.store.offload(offload).is_ok(), "the queue is short");
        loop {
            if matches!(self.next(), Moved::Offloaded { identity } if identity == chain[position]) {
                return;
            }
        }
    }

    /// Brings a chain in and compares every byte of what is said to be good.
    fn onboard(&mut self, chain: &[BlockIdentity], within: Duration) -> usize {
        let targets: Vec<SlotRef> = chain.iter().map(|_| self.pool.acquire().expect("slot")).collect();
        targets.iter().for_each(|slot| slot.slab().write(slot.slot(), 0, &[0xEE; BLOCK]));
        self.next_request += 1;
        let request = self.next_request;
        let job = Onboard { request, chain: chain.to_vec(), targets, deadline: Instant::now() + within };
        assert!(self.store.onboard(job).is_ok());
        loop {
            let Moved::Onboarded { request: answered, slots, verified } = self.next() else { continue };
            if answered != request {
                continue;
            }
            for (identity, slot) in chain.iter().zip(&slots).take(verified) {
                let mut bytes = vec![0; BLOCK];
                slot.slab().read(slot.slot(), 0, &mut bytes);
                assert!(bytes == contents(identity), "a block is not what was stored");
            }
            return verified;
        }
    }

    /// Waits until the disk holds so many blocks.
    fn settle(&mut self, on_disk: u64) {
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

    fn counter(&self, name: &str) -> u64 {
        let counters = self.store.counters().snapshot();
        counters.iter().find(|(of, ..)| *of == name).map(|(.., value)| *value).expect("a known counter")
    }

    /// What was told of blocks is what is there.
    fn events_are_true(&mut self, all: &[BlockIdentity]) {
        self.listen();
        let [host, disk] = self.store.blocks();
        for (medium, count) in [(Medium::Host, host), (Medium::Disk, disk)] {
            let survivors = self.survivors.iter().filter(|_| medium == Medium::Disk);
            let before: Vec<BlockIdentity> = survivors.map(|survivor| survivor.identity).collect();
            let mut held = 0;
            for identity in all {
                let told = self.told.get(&(*identity, medium)).copied().unwrap_or(0);
                let now = told + i32::from(before.contains(identity));
                assert!((0..=1).contains(&now), "{medium:?}: told {now} times");
                held += now as u64;
            }
            assert_eq!(held, count, "{medium:?}");
        }
    }
}

fn chain(seed: u64, blocks: usize) -> Vec<BlockIdentity> {
    let mut identity = IdentityChain::new(seed, &[]);
    (0..blocks as u32).map(|block| identity.next(&[block; TOKENS as usize])).collect()
}

fn contents(identity: &BlockIdentity) -> Vec<u8> {
    (0..BLOCK).map(|at| identity.0[at % 16].wrapping_add((at / 16) as u8)).collect()
}

fn no_disk(host_slots: u32) -> Behind {
    Behind { host_slots, disk: None, write: WriteMode::Through }
}

fn with_disk(host_slots: u32, files: &MemoryFiles, write: WriteMode) -> Behind {
    Behind { host_slots, disk: Some((files.clone(), Faults::default())), write }
}

#[test]
fn blocks_come_back_from_host_memory_as_they_went() {
    let mut rig = Rig::new(no_disk(3));
    let blocks = chain(1, 4);
    (0..3).for_each(|position| rig.offload(&blocks, position));
    assert_eq!(rig.store.look_up(&blocks), 3);
    assert_eq!(rig.onboard(&blocks, PATIENCE), 3, "the fourth was never stored");
    // A block hangs on the one before it: the last of the chain goes first.
    let other = chain(2, 1);
    rig.offload(&other, 0);
    assert_eq!(rig.store.look_up(&blocks), 2);
    rig.events_are_true(&[blocks, other].concat());
    assert_eq!(rig.pool.used_count(), 0);
    assert_eq!(rig.store.leased_slots(), 0);
}

#[test]
fn what_host_memory_has_no_room_for_comes_back_from_the_disk_and_outlives_the_process() {
    for write in [WriteMode::Through, WriteMode::Back] {
        let files = files(24);
        let blocks = chain(3, 16);
        let mut rig = Rig::new(with_disk(4, &files, write));
        (0..16).for_each(|position| rig.offload(&blocks, position));
        let written = if write == WriteMode::Through { 16 } else { rig.store.blocks()[1] };
        rig.settle(written);
        assert!(written >= 12, "{write:?}: {written}");
        assert_eq!(rig.onboard(&blocks, PATIENCE), 16, "{write:?}");
        rig.settle(rig.store.blocks()[1]);
        rig.events_are_true(&blocks);
        assert_eq!(rig.counter("checksum_failures"), 0);
        let on_disk = rig.store.blocks()[1] as usize;
        drop(rig);

        let mut rig = Rig::new(with_disk(4, &files, write));
        assert_eq!(rig.survivors.len(), on_disk.min(rig.store.look_up(&blocks)), "{write:?}");
        for survivor in &rig.survivors {
            let position = survivor.description.position as usize;
            assert_eq!(survivor.identity, blocks[position]);
            assert_eq!(survivor.description.parent, position.checked_sub(1).map(|before| blocks[before]));
            assert_eq!(*survivor.description.meta, [position as u8; 40]);
        }
        let kept = rig.store.look_up(&blocks);
        assert!(kept >= 12, "{write:?}: {kept}");
        assert_eq!(rig.onboard(&blocks, PATIENCE), kept);
        rig.events_are_true(&blocks);
    }
}

#[test]
fn a_damaged_block_on_the_disk_is_a_miss_and_is_thrown_away() {
    let files = files(16);
    let blocks = chain(4, 8);
    let mut rig = Rig::new(with_disk(2, &files, WriteMode::Through));
    (0..8).for_each(|position| rig.offload(&blocks, position));
    rig.settle(8);
    // Every block's first bytes, wherever they are.
    let mut bytes = files.bytes();
    for identity in &blocks[..6] {
        let wanted = &contents(identity)[..64];
        let at = bytes[0].windows(64).position(|window| window == wanted).expect("it is on the disk");
        bytes[0][at + 1000] ^= 4;
    }
    drop(bytes);
    let mut good = 0;
    while rig.store.look_up(&blocks) > 0 && good < 8 {
        good += 1;
        rig.onboard(&blocks, PATIENCE);
    }
    assert!(rig.counter("disk_missed_blocks") >= 1);
    rig.events_are_true(&blocks);
    assert_eq!(rig.pool.used_count(), 0);
}

#[test]
fn a_deadline_ends_a_load_with_what_has_come() {
    let files = files(16);
    let blocks = chain(5, 6);
    let slow = Faults { delay: 1.0, delay_polls_max: 1 << 20, ..Faults::default() };
    let mut rig = Rig::new(with_disk(8, &files, WriteMode::Through));
    (0..6).for_each(|position| rig.offload(&blocks, position));
    rig.settle(6);
    drop(rig);
    let mut rig = Rig::new(Behind { host_slots: 8, disk: None, write: WriteMode::Through });
    assert_eq!(rig.onboard(&blocks, PATIENCE), 0, "nothing is there");
    let slow_disk = disk_over(&files, move |engine| {
        Box::new(Stuck { inner: FaultyEngine::new(engine, Faults::default()), left: 64, then: slow })
    });
    let host = HostTier { slots: 8, pages: PageSize::Standard, eviction: PolicyKind::Lru };
    let builder = StoreBuilder::new(StoreConfig::new(BLOCK, TOKENS), host).expect("memory").disk(slow_disk);
    let (sender, moved) = unbounded();
    let (store, survivors) = builder
        .start(move |event| {
            let _over = sender.send(event);
        })
        .expect("threads");
    rig = Rig { store, moved, survivors, ..rig };
    let started = Instant::now();
    let verified = rig.onboard(&blocks, Duration::from_millis(50));
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    assert!(verified < 6, "the disk was not slow");
    assert_eq!(rig.counter("late_blocks"), 6 - verified as u64);
}

/// Opens like any disk; then its answers take very long.
struct Stuck<E: IoEngine> {
    inner: FaultyEngine<E>,
    left: usize,
    then: Faults,
}

impl<E: IoEngine> IoEngine for Stuck<E> {
    fn name(&self) -> &'static str {
        "stuck"
    }
    fn geometry(&self) -> &kvstore_io::Geometry {
        self.inner.geometry()
    }
    fn register(&mut self, slab: &Arc<Slab>) -> Result<(), kvstore_io::IoError> {
        self.inner.register(slab)
    }
    fn submit(&mut self, request: kvstore_io::Request) -> Result<(), kvstore_io::Full> {
        if matches!(request.buffer, kvstore_io::Buffer::Slot { .. }) || self.left == 0 {
            self.inner.set_faults(self.then.clone());
        } else {
            self.left -= 1;
        }
        self.inner.submit(request)
    }
    fn flush(&mut self) -> Result<(), kvstore_io::IoError> {
        self.inner.flush()
    }
    fn poll(&mut self, budget: usize, completions: &mut Vec<kvstore_io::Completion>) -> usize {
        self.inner.poll(budget, completions)
    }
    fn wait(&mut self, until: Option<Instant>) -> Result<(), kvstore_io::IoError> {
        let soon = Instant::now() + Duration::from_millis(5);
        self.inner.wait(Some(until.map_or(soon, |until| until.min(soon))))
    }
    fn waker(&self) -> Arc<dyn kvstore_io::Waker> {
        self.inner.waker()
    }
    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }
    fn sync(&mut self, file: u32) -> Result<(), kvstore_io::IoError> {
        self.inner.sync(file)
    }
    fn discard(&mut self, file: u32, offset: u64, bytes: u64) -> Result<bool, kvstore_io::IoError> {
        self.inner.discard(file, offset, bytes)
    }
}

/// Random work over a disk that tears, loses, misdirects and rots: what is said to be good is good, events are true, and
/// nothing is left.
#[test]
fn random_work_over_a_disk_full_of_faults_never_gives_a_wrong_block() {
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(11_u64);
    println!("SEED={seed}");
    for (round, write) in [WriteMode::Through, WriteMode::Back].into_iter().enumerate() {
        let mut state = seed + round as u64;
        let mut draw = move |bound: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) as usize % bound
        };
        let faults = Faults {
            seed,
            torn_write: 0.03,
            misdirected_write: 0.02,
            lost_write: 0.03,
            rot_at_rest: 0.03,
            rot_on_read: 0.02,
            media_error: 0.01,
            no_space: 0.01,
            delay: 0.2,
            delay_polls_max: 20,
            reorder: true,
            ..Faults::default()
        };
        let files = files(40);
        let chains: Vec<Vec<BlockIdentity>> = (0..10).map(|number| chain(100 + number, 8)).collect();
        let mut rig = Rig::new(Behind { host_slots: 12, disk: Some((files, faults)), write });
        let (mut asked, mut got) = (0, 0);
        for _ in 0..1500 {
            let of = &chains[draw(chains.len())];
            match draw(3) {
                0 => {
                    let from = rig.store.look_up(of);
                    if from < of.len() {
                        rig.offload(of, from);
                    }
                }
                1 => {
                    let blocks = 1 + draw(of.len());
                    asked += rig.store.look_up(&of[..blocks]);
                    got += rig.onboard(&of[..blocks], Duration::from_millis(200));
                }
                _ => {
                    let prompt = Prompt {
                        chain: of,
                        device_blocks: draw(3),
                        tokens: of.len() * TOKENS as usize + 1,
                        block_tokens: TOKENS as usize,
                        queued_tokens: 0,
                    };
                    if let Plan::Onboard { blocks, .. } = rig.store.plan(&prompt, true) {
                        assert!(blocks + prompt.device_blocks <= of.len());
                    }
                }
            }
        }
        let started = Instant::now();
        while rig.store.leased_slots() > 0 {
            assert!(started.elapsed() < PATIENCE, "{} slots are held", rig.store.leased_slots());
            std::thread::sleep(Duration::from_millis(5));
        }
        println!("{write:?}: {got} of {asked} blocks came back, {:?}", rig.store.counters().snapshot());
        assert!(got * 2 > asked, "the tiers are of no use");
        assert!(rig.counter("disk_missed_blocks") > 0, "no fault was met");
        rig.events_are_true(&chains.concat());
        assert_eq!(rig.pool.used_count(), 0);
    }
}

/// The engine that the kernel ties to one thread: the log is opened on the thread that drives it.
#[test]
fn blocks_come_back_from_files_over_io_uring() {
    let folder = std::env::temp_dir().join(format!("kvasir-store-uring-{}", std::process::id()));
    let bytes = (24 * BLOCK.next_multiple_of(4096) as u64 + (1 << 20)).next_multiple_of(4096);
    let path = folder.clone();
    let open = move || {
        let files = open_folder(&FolderConfig::new(path, bytes, 1))?;
        let engine = uring::open(files, &RingConfig { depth: 16, ..RingConfig::default() })?;
        let config = DiskConfig {
            slot_bytes: BLOCK.next_multiple_of(4096) as u32,
            meta_bytes_max: DISK_META_BYTES_MAX as u16,
            operations_max: 16,
            ..DiskConfig::default()
        };
        let areas = [Area { file: 0, offset: 0, bytes }];
        let (log, recovered, _) = DiskLog::open(config, &areas, Box::new(engine), 5, Moment::now())?;
        Ok((log, recovered))
    };
    let admission = AdmissionConfig { frequency_min: 1, ..AdmissionConfig::default() };
    let disk = DiskTier { open: Box::new(open), depth: 16, eviction: PolicyKind::Lru, admission };
    let host = HostTier { slots: 4, pages: PageSize::Standard, eviction: PolicyKind::Lru };
    let builder = StoreBuilder::new(StoreConfig::new(BLOCK, TOKENS), host).expect("memory").disk(disk);
    let (sender, moved) = unbounded();
    let started = builder.start(move |event| {
        let _over = sender.send(event);
    });
    let (store, survivors) = match started {
        Ok(started) => started,
        Err(error) if error.to_string().contains("not permitted") || error.to_string().contains("ENOSYS") => {
            println!("SKIPPED: io_uring cannot be used here: {error}");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let mut rig = Rig { store, moved, survivors, ..Rig::new(no_disk(1)) };
    let blocks = chain(8, 16);
    (0..16).for_each(|position| rig.offload(&blocks, position));
    rig.settle(16);
    assert_eq!(rig.onboard(&blocks, PATIENCE), 16);
    assert!(rig.counter("disk_read_blocks") >= 12);
    rig.events_are_true(&blocks);
    drop(rig);
    std::fs::remove_dir_all(folder).expect("the files go");
}

/// A request's number is used again while a read of its first use is under way.
#[test]
fn an_old_read_never_lands_in_a_new_load_with_the_same_number() {
    let files = files(24);
    let blocks = chain(9, 12);
    let mut rig = Rig::new(with_disk(16, &files, WriteMode::Through));
    (0..12).for_each(|position| rig.offload(&blocks, position));
    rig.settle(12);
    drop(rig);
    let slow = Faults { delay: 0.7, delay_polls_max: 40, ..Faults::default() };
    let mut rig = Rig::new(Behind { host_slots: 16, disk: Some((files, slow)), write: WriteMode::Through });
    for round in 0..40_u64 {
        rig.next_request = 1000;
        let from = (round as usize * 5) % 8;
        let within = Duration::from_micros(200 + 150 * (round % 7));
        // Every byte that is said to be good is compared.
        rig.onboard(&blocks[from..], within);
        if round % 5 == 0 {
            rig.store.forget(vec![blocks[3], blocks[7]]);
        }
    }
    assert_eq!(rig.pool.used_count(), 0);
}

#[test]
fn what_is_forgotten_on_its_way_stays_forgotten() {
    let files = files(40);
    let mut rig = Rig::new(with_disk(8, &files, WriteMode::Through));
    let chains: Vec<Vec<BlockIdentity>> = (0..12).map(|number| chain(200 + number, 2)).collect();
    for of in &chains {
        rig.offload(of, 0);
        rig.offload(of, 1);
        rig.store.forget(of.clone());
    }
    rig.settle(0);
    assert_eq!(rig.store.blocks(), [0, 0]);
    rig.events_are_true(&chains.concat());
    drop(rig);
    let rig = Rig::new(with_disk(8, &files, WriteMode::Through));
    assert_eq!(rig.survivors, [], "nothing comes back after a restart");
}

#[test]
fn rot_in_host_memory_does_not_become_a_good_block_on_the_disk() {
    let files = files(16);
    let blocks = chain(10, 1);
    let faults = Faults { delay: 1.0, delay_polls_max: 50, ..Faults::default() };
    let layout = SlabLayout { slot_bytes: BLOCK, slot_count: 8 };
    let pool = SlotPool::new(Arc::new(Slab::create("pool", layout, PageSize::Standard).expect("slab")));
    let host = HostTier { slots: 2, pages: PageSize::Standard, eviction: PolicyKind::Lru };
    let builder = StoreBuilder::new(StoreConfig::new(BLOCK, TOKENS), host).expect("memory");
    let memory = Arc::clone(builder.slab());
    let (sender, moved) = unbounded();
    let (store, survivors) = builder
        .disk(open_disk(&files, faults))
        .start(move |event| {
            let _over = sender.send(event);
        })
        .expect("threads");
    let mut rig = Rig { pool, store, moved, survivors, told: HashMap::new(), next_request: 0 };
    rig.offload(&blocks, 0);
    // Both slots: the block lies in one of them, and the write may be under way or over.
    for slot in 0..2 {
        let mut byte = [0];
        memory.read(slot, 500, &mut byte);
        memory.write(slot, 500, &[byte[0] ^ 1]);
    }
    rig.settle(1);
    // What was written before the damage may come back; every byte of it is compared.
    rig.onboard(&blocks, PATIENCE);
    assert!(rig.counter("checksum_failures") >= 1);
}

/// 8-bit blocks take half the room of bf16 ones and come back close to what they were; what cannot be represented is
/// not kept.
#[test]
fn quantised_blocks_come_back_within_their_error() {
    let layout = BlockLayout {
        layers: 2,
        parts: 2,
        tokens: TOKENS,
        kv_heads: 2,
        head_dim: 32,
        element: ElementType::Bf16,
    };
    for (format, tolerance) in [(Format::Int8, 0.012), (Format::Fp8E4m3, 0.07)] {
        let quantised = QuantisedLayout::new(layout, Scheme::recommended(format, &layout)).expect("it fits");
        assert!(quantised.bytes() < layout.block_bytes() * 3 / 4);
        let slab = SlabLayout { slot_bytes: layout.block_bytes(), slot_count: 4 };
        let pool = SlotPool::new(Arc::new(Slab::create("pool", slab, PageSize::Standard).expect("slab")));
        let config =
            StoreConfig { quantised: Some(quantised), ..StoreConfig::new(quantised.bytes(), TOKENS) };
        let host = HostTier { slots: 2, pages: PageSize::Standard, eviction: PolicyKind::Lru };
        let (sender, moved) = unbounded();
        let notify = move |event| {
            let _over = sender.send(event);
        };
        let (store, survivors) =
            StoreBuilder::new(config, host).expect("memory").start(notify).expect("threads");
        let mut rig = Rig { pool, store, moved, survivors, told: HashMap::new(), next_request: 0 };
        let blocks = chain(20, 2);
        let values: Vec<f32> =
            (0..layout.block_bytes() / 2).map(|at| ((at * 37 % 401) as f32 - 200.0) / 50.0).collect();
        let offload = |rig: &mut Rig, position: usize, first: f32| {
            let slot = rig.pool.acquire().expect("slot");
            let all = std::iter::once(first).chain(values[1..].iter().copied());
            let bytes: Vec<u8> =
                all.flat_map(|value| ((value.to_bits() >> 16) as u16).to_le_bytes()).collect();
            slot.slab().write(slot.slot(), 0, &bytes);
            let description = Description { parent: None, position: 0, meta: Arc::from([]) };
            let identity = blocks[position];
            assert!(rig.store.offload(Offload { identity, description, slot }).is_ok());
            while !matches!(rig.next(), Moved::Offloaded { .. }) {}
        };
        offload(&mut rig, 0, values[0]);
        offload(&mut rig, 1, f32::NAN);
        assert_eq!(rig.store.look_up(&blocks), 1, "what is not finite is not kept");
        assert_eq!(rig.counter("unfit_blocks"), 1);
        let target = rig.pool.acquire().expect("slot");
        let deadline = Instant::now() + PATIENCE;
        let job = Onboard { request: 1, chain: blocks[..1].to_vec(), targets: vec![target], deadline };
        assert!(rig.store.onboard(job).is_ok());
        let slots = loop {
            if let Moved::Onboarded { slots, verified: 1, .. } = rig.next() {
                break slots;
            }
        };
        let mut bytes = vec![0; layout.block_bytes()];
        slots[0].slab().read(slots[0].slot(), 0, &mut bytes);
        for (value, bytes) in values.iter().zip(bytes.chunks_exact(2)) {
            let back = f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16);
            assert!((back - value).abs() <= tolerance * 4.0, "{value} came back as {back}");
        }
    }
}
