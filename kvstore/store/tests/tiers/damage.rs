//! Under every fault of the disk, a block is intact or it is not there.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::unbounded;
use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool};
use kvstore_block::BlockIdentity;
use kvstore_catalog::PolicyKind;
use kvstore_disk::{AdmissionConfig, Area, ClockReading, DiskConfig, DiskLog};
use kvstore_io::IoEngine;
use kvstore_io::faulty::{Faults, FaultyEngine};
use kvstore_io::files::{FolderConfig, open_folder};
use kvstore_io::ring::RingConfig;
use kvstore_io::uring;
use kvstore_store::{
    DISK_META_BYTES_MAX, DiskTier, HostTier, Plan, Prompt, RemoteCoverage, StoreBuilder, StoreConfig,
    WriteMode,
};

use crate::rig::{
    BLOCK, Behind, PATIENCE, Rig, TOKENS, chain, disk_over, files, no_disk, open_disk, with_disk,
};

#[test]
fn a_deadline_ends_a_load_with_what_has_come() {
    let files = files(16);
    let blocks = chain(5, 6);
    let slow = Faults { delay: 1.0, delay_polls_max: 1 << 20, ..Faults::default() };
    let mut rig = Rig::new(with_disk(8, &files, WriteMode::Through));
    (0..6).for_each(|position| rig.offload(&blocks, position));
    rig.wait_until_on_disk(6);
    drop(rig);
    let mut rig = Rig::new(Behind { host_slots: 8, disk: None, write: WriteMode::Through });
    assert_eq!(rig.onboard(&blocks, PATIENCE), 0, "nothing is there");
    let slow_disk = disk_over(&files, move |engine| {
        Box::new(FaultyLater { inner: FaultyEngine::new(engine, Faults::default()), left: 64, then: slow })
    });
    rig = over_disk(rig, slow_disk, 8);
    let started = Instant::now();
    let verified = rig.onboard(&blocks, Duration::from_millis(50));
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    assert!(verified < 6, "the disk was not slow");
    assert_eq!(rig.counter("late_blocks"), 6 - verified as u64);
}

/// The same pool with another store, over this disk.
fn over_disk(rig: Rig, disk: DiskTier, host_slots: u32) -> Rig {
    let host = HostTier { slots: host_slots, pages: PageSize::Standard, eviction: PolicyKind::Lru };
    let builder = StoreBuilder::new(StoreConfig::new(BLOCK, TOKENS), host).expect("memory").disk(disk);
    let (sender, moved) = unbounded();
    let (store, survivors) = builder
        .start(move |event| {
            let _over = sender.send(event);
        })
        .expect("threads");
    Rig { store, moved, survivors, ..rig }
}

/// Opens like any disk; from the first block on it has these faults.
struct FaultyLater<E: IoEngine> {
    inner: FaultyEngine<E>,
    left: usize,
    then: Faults,
}

impl<E: IoEngine> IoEngine for FaultyLater<E> {
    fn name(&self) -> &'static str {
        "faulty later"
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
}

/// Random work over a disk that tears, loses, misdirects and rots: what is said to be good is good, events are true, and
/// nothing is left.
#[test]
fn random_work_over_a_disk_full_of_faults_never_gives_a_wrong_block() {
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(11_u64);
    println!("SEED={seed}");
    for (round, write) in [WriteMode::Through, WriteMode::Back].into_iter().enumerate() {
        let mut random = fastrand::Rng::with_seed(seed + round as u64);
        let mut draw = move |bound: usize| random.usize(..bound);
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
                    let device_blocks = draw(3).min(of.len());
                    let prompt = Prompt {
                        chain: &of[device_blocks..],
                        groups: &[],
                        device_blocks,
                        tokens: of.len() * TOKENS as usize + 1,
                        block_tokens: TOKENS as usize,
                        queued_tokens: 0,
                    };
                    if let Plan::Onboard { blocks, .. } = rig.store.plan(&prompt, RemoteCoverage::Unknown) {
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
        let (log, recovered, _) = DiskLog::open(config, &areas, Box::new(engine), 5, ClockReading::now())?;
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
    rig.wait_until_on_disk(16);
    assert_eq!(rig.onboard(&blocks, PATIENCE), 16);
    assert!(rig.counter("disk_read_blocks") >= 12);
    rig.events_are_true(&blocks);
    drop(rig);
    std::fs::remove_dir_all(folder).expect("the files go");
}

/// A reader that found host memory's copy damaged discards it; the next reader gets the disk's copy.
#[test]
fn what_is_damaged_in_host_memory_alone_comes_back_from_the_disk() {
    let files = files(16);
    let blocks = chain(12, 2);
    let host = HostTier { slots: 2, pages: PageSize::Standard, eviction: PolicyKind::Lru };
    let builder = StoreBuilder::new(StoreConfig::new(BLOCK, TOKENS), host).expect("memory");
    let memory = Arc::clone(builder.slab());
    let (sender, moved) = unbounded();
    let notify = move |event| {
        let _over = sender.send(event);
    };
    let builder = builder.disk(open_disk(&files, Faults::default()));
    let (store, survivors) = builder.start(notify).expect("threads");
    let mut rig = Rig { store, moved, survivors, ..Rig::new(no_disk(1)) };
    (0..2).for_each(|position| rig.offload(&blocks, position));
    rig.wait_until_on_disk(2);
    for slot in 0..2 {
        let mut byte = [0];
        memory.read(slot, 500, &mut byte);
        memory.write(slot, 500, &[byte[0] ^ 1]);
    }
    let held = rig.store.hold_now(&blocks).expect("both are there");
    assert!(held.iter().all(|block| block.to_bytes().is_none()), "both are damaged");
    drop(held);
    rig.store.forget_on_host(blocks.clone());
    assert_eq!(rig.onboard(&blocks, PATIENCE), 2);
    assert_eq!((rig.counter("disk_read_blocks"), rig.store.blocks()), (2, [2, 2]));
    rig.events_are_true(&blocks);
}

#[test]
fn writes_that_fail_are_tried_again_until_the_disk_has_every_block() {
    let faults = Faults { seed: 5, no_space: 0.3, ..Faults::default() };
    let disk = disk_over(&files(48), move |engine| {
        Box::new(FaultyLater { inner: FaultyEngine::new(engine, Faults::default()), left: 64, then: faults })
    });
    let mut rig = over_disk(Rig::new(no_disk(1)), disk, 64);
    let blocks = chain(9, 32);
    (0..32).for_each(|position| rig.offload(&blocks, position));
    rig.wait_until_on_disk(32);
    rig.events_are_true(&blocks);
    let failures = rig.counter("disk_write_failures");
    assert!(failures > 4, "{failures} of writes have failed");
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
    rig.wait_until_on_disk(1);
    // A block written before the damage may come back; every byte of it is compared.
    rig.onboard(&blocks, PATIENCE);
    assert!(rig.counter("checksum_failures") >= 1);
}
