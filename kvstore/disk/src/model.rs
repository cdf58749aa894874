//! Random operations on a failing disk, compared with a model of what was written.
//!
//! Each block's bytes follow from its identity and version, so any wrong byte that a read calls verified is
//! seen. Power is cut and the store reopened in between. The same harness with verification switched off has to
//! find wrong blocks: a check that cannot fail proves nothing.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_memory::{SlotPool, SlotRef};
use kvstore_block::BlockIdentity;

use crate::testing::{FaultCounts, Faults, Random, SharedDisk, pool};
use crate::{
    Area, Block, ClockReading, DiskCompletion, DiskConfig, DiskLog, MissReason, ReadCheck, ReadOutcome,
    Recovered, WriteOutcome,
};

const SLOT_BYTES: u32 = 8192;
const AREAS: [Area; 2] =
    [Area { file: 0, offset: 0, bytes: 200 << 10 }, Area { file: 0, offset: 256 << 10, bytes: 100 << 10 }];
const DISK_BYTES: usize = 512 << 10;
const IDENTITIES: u64 = 60;

#[derive(Debug, Default)]
struct Outcome {
    verified: u64,
    wrong: u64,
    damaged: u64,
    stale: u64,
    media: u64,
    device: u64,
    reopened: u64,
    recovered: u64,
    lost_stores: u64,
    /// Reads that should have been verified and were not.
    failed_reads: u64,
    /// Blocks that a clean restart should have recovered and did not.
    forgotten: u64,
}

#[derive(Debug, Clone, Copy)]
struct Run {
    seed: u64,
    steps: u64,
    faults: Faults,
    power_cuts: bool,
    trusts_device: bool,
}

enum Pending {
    Write { id: u64, version: u64 },
    Read { id: u64, expected: Option<u64>, checksum: Option<u64> },
}

struct World {
    run: Run,
    disk: SharedDisk,
    log: Option<DiskLog>,
    memory: Arc<SlotPool>,
    /// Empty slots, and the slot at which the search for the next one begins.
    free: BTreeSet<u32>,
    next_slot: u32,
    random: Random,
    /// Contents of each slot: the block, and its version if this process wrote it.
    stored: BTreeMap<u32, (u64, Option<u64>)>,
    /// Number of versions that each block has had.
    versions: HashMap<u64, u64>,
    pending: HashMap<u64, Pending>,
    next_token: u64,
    start: Instant,
    step: u64,
    outcome: Outcome,
}

fn identity(id: u64) -> BlockIdentity {
    let mut bytes = [0x5A; 16];
    bytes[..8].copy_from_slice(&id.to_le_bytes());
    BlockIdentity(bytes)
}

fn content(id: u64, version: u64) -> Vec<u8> {
    let mut random = Random(id << 32 | version);
    let len = 1 + random.below(SLOT_BYTES.into()) as usize;
    let mut bytes = vec![0; len];
    bytes.chunks_mut(8).for_each(|chunk| chunk.copy_from_slice(&random.next().to_le_bytes()[..chunk.len()]));
    bytes
}

fn config() -> DiskConfig {
    DiskConfig {
        fingerprint: 9,
        slot_bytes: SLOT_BYTES,
        meta_bytes_max: 24,
        operations_max: 8,
        table_writes_max: 2,
        table_delay: Duration::from_millis(20),
        operation_timeout: Duration::from_mins(5),
        ..DiskConfig::default()
    }
}

impl World {
    fn new(run: Run) -> Self {
        let disk = SharedDisk::new(DISK_BYTES, run.seed ^ 0xD15C);
        let mut world = Self {
            run,
            disk,
            log: None,
            memory: pool(SLOT_BYTES as usize, 16),
            free: BTreeSet::new(),
            next_slot: 0,
            random: Random(run.seed),
            stored: BTreeMap::new(),
            versions: HashMap::new(),
            pending: HashMap::new(),
            next_token: 0,
            start: Instant::now(),
            step: 0,
            outcome: Outcome::default(),
        };
        world.open();
        world.disk.with(|disk| disk.faults = run.faults);
        world
    }

    fn now(&self) -> ClockReading {
        ClockReading {
            instant: self.start + Duration::from_millis(self.step),
            unix_s: 1_790_000_000 + self.step / 1000,
        }
    }

    fn log(&mut self) -> &mut DiskLog {
        self.log.as_mut().expect("an open log")
    }

    fn open(&mut self) -> Vec<Recovered> {
        let store_id = self.random.next();
        let now = self.now();
        // Losing both copies of a header loses the store, but does not end the run.
        let opened = DiskLog::open(config(), &AREAS, self.disk.engine(), store_id, now).or_else(|error| {
            println!("seed {}, step {}: {error}; formatted anew", self.run.seed, self.step);
            self.outcome.lost_stores += 1;
            let faults = self.disk.with(|disk| std::mem::take(&mut disk.faults));
            let config = DiskConfig { reformat: true, ..config() };
            let opened = DiskLog::open(config, &AREAS, self.disk.engine(), store_id, now);
            self.disk.with(|disk| disk.faults = faults);
            opened
        });
        let (mut log, recovered, _) = opened.expect("a store");
        log.trusts_device = self.run.trusts_device;
        (self.free, self.next_slot) = ((0..log.slot_count()).collect(), 0);
        self.log = Some(log);
        self.pending.clear();
        self.stored.clear();
        for block in &recovered {
            let id = u64::from_le_bytes(block.identity.0[..8].try_into().expect("8 bytes"));
            assert_eq!(identity(id), block.identity, "a block that nobody wrote");
            assert_eq!(block.meta[..], id.to_le_bytes(), "the meta bytes are the block's");
            assert_eq!(block.parent, identity(id + 1));
            self.stored.insert(block.slot, (id, None));
            self.free.remove(&block.slot);
        }
        self.outcome.recovered += recovered.len() as u64;
        recovered
    }

    fn memory(&mut self) -> SlotRef {
        self.memory.acquire().expect("operations_max is less than the pool")
    }

    fn token(&mut self, pending: Pending) -> u64 {
        self.next_token += 1;
        self.pending.insert(self.next_token, pending);
        self.next_token
    }

    fn any_stored(&mut self) -> Option<(u32, u64, Option<u64>)> {
        let count = self.stored.len() as u64;
        let index = if count == 0 { return None } else { self.random.below(count) as usize };
        self.stored.iter().nth(index).map(|(&slot, &(id, version))| (slot, id, version))
    }

    fn write(&mut self) {
        if self.log().in_flight() >= 8 {
            return;
        }
        let id = self.random.below(IDENTITIES);
        // As a catalog does: a block has one slot, and an older block is evicted to make room.
        let before = self.stored.iter().find(|(_, (other, _))| *other == id).map(|(&slot, _)| slot);
        if let Some(slot) = before {
            self.forget(slot);
        }
        let slot = match self.free.range(self.next_slot..).chain(&self.free).next().copied() {
            Some(slot) => {
                self.free.remove(&slot);
                self.next_slot = slot + 1;
                slot
            }
            None => {
                let Some((slot, ..)) = self.any_stored() else { return };
                self.stored.remove(&slot);
                slot
            }
        };
        let version = self.versions.entry(id).and_modify(|version| *version += 1).or_insert(0);
        let version = *version;
        let bytes = content(id, version);
        let memory = self.memory();
        memory.slab().write(memory.slot(), 0, &bytes);
        let token = self.token(Pending::Write { id, version });
        let meta = id.to_le_bytes();
        let checksum = dataplane_checksum::checksum(&bytes);
        let block =
            Block { identity: identity(id), parent: identity(id + 1), tenant: 3, checksum, meta: &meta };
        let refused = self.log().write(slot, block, memory, bytes.len() as u32, token);
        assert!(refused.is_ok(), "{refused:?} for slot {slot}");
    }

    fn read(&mut self) {
        let Some((slot, id, expected)) = self.any_stored() else { return };
        if self.log().in_flight() >= 8 {
            return;
        }
        let memory = self.memory();
        let checksum = self.log().block(slot).map(|block| block.checksum);
        let token = self.token(Pending::Read { id, expected, checksum });
        // With `trusts_device` only the log's own verification is switched off.
        let by_caller = !self.run.trusts_device && self.random.below(4) == 0;
        let check = if by_caller { ReadCheck::Caller } else { ReadCheck::Log };
        assert!(self.log().read(slot, identity(id), memory, check, token).is_ok());
    }

    fn forget(&mut self, slot: u32) {
        self.stored.remove(&slot);
        self.log().forget(slot);
        self.free.insert(slot);
    }

    fn poll(&mut self) {
        let (now, mut done) = (self.now(), Vec::new());
        self.log().poll(now, &mut done);
        done.into_iter().for_each(|done| self.take(done));
    }

    fn take(&mut self, done: DiskCompletion) {
        match done {
            DiskCompletion::Written { token, slot, outcome, memory } => {
                assert!(memory.is_some());
                let Some(Pending::Write { id, version }) = self.pending.remove(&token) else {
                    panic!("no write has the token {token}")
                };
                if outcome == WriteOutcome::Stored {
                    // A block that was written twice at once is kept once, as a catalog would.
                    let twin = self.stored.iter().find(|(_, (other, _))| *other == id).map(|(&slot, _)| slot);
                    if let Some(twin) = twin {
                        self.forget(twin);
                    }
                    self.stored.insert(slot, (id, Some(version)));
                } else {
                    self.free.insert(slot);
                }
            }
            DiskCompletion::Read { token, slot, outcome, memory } => {
                let Some(Pending::Read { id, expected, checksum }) = self.pending.remove(&token) else {
                    panic!("no read has the token {token}")
                };
                let memory = memory.expect("the device answered");
                let outcome = match outcome {
                    ReadOutcome::Unverified { bytes } => self.verify(slot, bytes, checksum, &memory),
                    outcome => outcome,
                };
                self.judge(slot, id, expected, outcome, &memory);
            }
            DiskCompletion::Flushed { .. } => {}
        }
    }

    /// Compares the bytes that were read with the checksum that the block had when the read began, as the log
    /// does for [`ReadCheck::Log`]. A damaged block is forgotten.
    fn verify(&mut self, slot: u32, bytes: u32, checksum: Option<u64>, memory: &SlotRef) -> ReadOutcome {
        let mut found = vec![0; bytes as usize];
        memory.slab().read(memory.slot(), 0, &mut found);
        if checksum == Some(dataplane_checksum::checksum(&found)) {
            return ReadOutcome::Verified { bytes };
        }
        self.log().forget(slot);
        ReadOutcome::Miss(MissReason::Damaged)
    }

    fn judge(&mut self, slot: u32, id: u64, expected: Option<u64>, outcome: ReadOutcome, memory: &SlotRef) {
        match outcome {
            ReadOutcome::Unverified { .. } => unreachable!("verified before"),
            ReadOutcome::Verified { bytes } => {
                let mut found = vec![0; bytes as usize];
                memory.slab().read(memory.slot(), 0, &mut found);
                let latest = self.versions.get(&id).copied().unwrap_or(0);
                let mut versions = expected.map_or(0..=latest, |version| version..=version);
                let is_right = versions.any(|version| content(id, version) == found);
                self.outcome.verified += 1;
                self.outcome.wrong += u64::from(!is_right);
            }
            ReadOutcome::Miss(reason) => {
                let is_current = self.stored.get(&slot) == Some(&(id, expected));
                self.outcome.failed_reads += u64::from(is_current);
                match reason {
                    MissReason::Damaged => self.outcome.damaged += 1,
                    MissReason::Stale => self.outcome.stale += 1,
                    MissReason::Media => self.outcome.media += 1,
                    MissReason::Device => self.outcome.device += 1,
                }
                if is_current && matches!(reason, MissReason::Damaged | MissReason::Media) {
                    self.stored.remove(&slot);
                    self.free.insert(slot);
                }
            }
        }
    }

    fn cut_power(&mut self) {
        self.disk.with(super::testing::Disk::cut_power);
        self.log = None;
        self.outcome.reopened += 1;
        self.open();
    }

    fn close(&mut self) {
        while self.log().in_flight() > 0 {
            self.poll();
            self.step += 1;
        }
        let log = self.log.take().expect("an open log");
        let closed = log.close(Duration::from_secs(20));
        let before = std::mem::take(&mut self.stored);
        self.outcome.reopened += 1;
        let recovered = self.open();
        if closed.is_clean {
            for (slot, (id, _)) in before {
                let is_there =
                    recovered.iter().any(|block| block.slot == slot && block.identity == identity(id));
                self.outcome.forgotten += u64::from(!is_there);
            }
        }
    }

    fn run(mut self) -> (Outcome, FaultCounts) {
        for _ in 0..self.run.steps {
            self.step += self.random.below(8);
            match self.random.below(1000) {
                0..400 => self.write(),
                400..800 => self.read(),
                800..860 => {
                    if let Some((slot, ..)) = self.any_stored() {
                        self.forget(slot);
                    }
                }
                860..880 => {
                    let sync = self.random.per_mille(500);
                    self.log().flush(0, sync);
                }
                880..884 if self.run.power_cuts => self.cut_power(),
                884..886 => self.close(),
                _ => self.poll(),
            }
        }
        (self.outcome, self.disk.with(|disk| disk.happened))
    }
}

const BAD: Faults =
    Faults { lost_write: 10, torn_write: 10, misdirected_write: 10, misdirected_read: 10, rot: 20, media: 5 };

fn seeds() -> std::ops::Range<u64> {
    match std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()) {
        Some(seed) => seed..seed + 1,
        None => 1..9,
    }
}

#[test]
fn a_good_disk_loses_nothing() {
    for seed in seeds() {
        let run =
            Run { seed, steps: 20_000, faults: Faults::default(), power_cuts: false, trusts_device: false };
        let (outcome, _) = World::new(run).run();
        println!("seed {seed}: {outcome:?}");
        assert_eq!((outcome.wrong, outcome.failed_reads, outcome.forgotten), (0, 0, 0), "seed {seed}");
        assert_eq!((outcome.damaged, outcome.media, outcome.device, outcome.lost_stores), (0, 0, 0, 0));
        assert!(outcome.verified > 3000 && outcome.reopened > 10 && outcome.recovered > 100, "{outcome:?}");
    }
}

#[test]
fn a_bad_disk_and_power_cuts_never_give_a_wrong_block() {
    let (mut sum, mut happened) = (Outcome::default(), FaultCounts::default());
    for seed in seeds() {
        let run = Run { seed, steps: 40_000, faults: BAD, power_cuts: true, trusts_device: false };
        let (outcome, faults) = World::new(run).run();
        println!("seed {seed}: {outcome:?} {faults:?}");
        assert_eq!(outcome.wrong, 0, "seed {seed}");
        sum.verified += outcome.verified;
        sum.damaged += outcome.damaged;
        sum.media += outcome.media;
        sum.reopened += outcome.reopened;
        sum.recovered += outcome.recovered;
        happened.torn += faults.torn;
        happened.lost += faults.lost;
        happened.misdirected += faults.misdirected;
        happened.rotten += faults.rotten;
    }
    println!("sum: {sum:?} {happened:?}");
    let runs = seeds().count();
    let least = happened.torn.min(happened.lost).min(happened.misdirected).min(happened.rotten);
    assert!(least as usize > 50 * runs, "too few faults to prove anything");
    assert!(sum.verified as usize > 3000 * runs && sum.damaged as usize > 50 * runs, "{sum:?}");
    assert!(sum.media as usize > 5 * runs && sum.reopened as usize > 60 * runs, "{sum:?}");
    assert!(sum.recovered as usize > 250 * runs, "{sum:?}");
}

#[test]
fn the_model_catches_a_log_that_trusts_its_device() {
    let seed = 1;
    let run = Run { seed, steps: 20_000, faults: BAD, power_cuts: true, trusts_device: true };
    let (outcome, _) = World::new(run).run();
    println!("seed {seed}, verification off: {outcome:?}");
    assert!(outcome.wrong > 50, "the model misses wrong blocks: {outcome:?}");
}
