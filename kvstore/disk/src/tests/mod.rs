//! One test for each promise of the log, on a disk in memory.

mod blocks;
mod damage;
mod failures;
mod opening;

use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_memory::{SlotPool, SlotRef};
use kvstore_block::BlockIdentity;

use crate::layout::SegmentLayout;
use crate::testing::{SharedDisk, pool};
use crate::{
    Area, Block, ClockReading, DiskCompletion, DiskConfig, DiskError, DiskLog, MissReason, ReadCheck,
    ReadOutcome, Recovered, RecoveryReport, WriteOutcome,
};

const SLOT_BYTES: u32 = 16 << 10;
const AREA: Area = Area { file: 0, offset: 4096, bytes: 1 << 20 };
const DISK_BYTES: usize = 2 << 20;
const TIMEOUT: Duration = Duration::from_secs(5);

struct Bench {
    disk: SharedDisk,
    log: DiskLog,
    memory: Arc<SlotPool>,
    start: Instant,
    ms: u64,
}

fn config() -> DiskConfig {
    DiskConfig { fingerprint: 0xF00D, slot_bytes: SLOT_BYTES, meta_bytes_max: 16, ..DiskConfig::default() }
}

fn identity(id: u8) -> BlockIdentity {
    BlockIdentity([id; 16])
}

fn block(id: u8) -> Block<'static> {
    block_of(id, 5000)
}

/// Returns a block of `bytes` bytes.
fn block_of(id: u8, bytes: usize) -> Block<'static> {
    let checksum = dataplane_checksum::checksum(&vec![id; bytes]);
    Block { identity: identity(id), parent: identity(id.wrapping_sub(1)), tenant: 5, checksum, meta: b"meta" }
}

fn open(
    disk: &SharedDisk,
    config: DiskConfig,
    store_id: u64,
) -> Result<(DiskLog, Vec<Recovered>, RecoveryReport), DiskError> {
    open_areas(disk, config, &[AREA], store_id)
}

fn open_areas(
    disk: &SharedDisk,
    config: DiskConfig,
    areas: &[Area],
    store_id: u64,
) -> Result<(DiskLog, Vec<Recovered>, RecoveryReport), DiskError> {
    let now = ClockReading { instant: Instant::now(), unix_s: 1_790_000_000 };
    DiskLog::open(config, areas, disk.engine(), store_id, now)
}

fn layout() -> SegmentLayout {
    SegmentLayout::new(AREA, 0, SLOT_BYTES, 16).expect("slots")
}

impl Bench {
    fn new(config: DiskConfig) -> Self {
        let disk = SharedDisk::new(DISK_BYTES, 3);
        Self::on(disk, config)
    }

    fn on(disk: SharedDisk, config: DiskConfig) -> Self {
        Self::over(disk, config, &[AREA])
    }

    fn over(disk: SharedDisk, config: DiskConfig, areas: &[Area]) -> Self {
        let (log, ..) = open_areas(&disk, config, areas, 1).expect("a store");
        Self { disk, log, memory: pool(SLOT_BYTES as usize, 80), start: Instant::now(), ms: 0 }
    }

    fn memory(&self, fill: u8) -> SlotRef {
        let slot = self.memory.acquire().expect("memory");
        slot.slab().write(slot.slot(), 0, &[fill; SLOT_BYTES as usize]);
        slot
    }

    fn poll(&mut self, ms: u64) -> Vec<DiskCompletion> {
        self.ms += ms;
        let now = ClockReading {
            instant: self.start + Duration::from_millis(self.ms),
            unix_s: 1_790_000_000 + self.ms / 1000,
        };
        let mut done = Vec::new();
        self.log.poll(now, &mut done);
        done
    }

    fn run_until_idle(&mut self) -> Vec<DiskCompletion> {
        (0..500).flat_map(|_| self.poll(1)).collect()
    }

    fn write(&mut self, slot: u32, id: u8) {
        let memory = self.memory(id);
        self.log.write(slot, block(id), memory, 5000, id.into()).expect("accepted");
        let done = self.run_until_idle();
        assert!(
            matches!(done[..], [DiskCompletion::Written { outcome: WriteOutcome::Stored, .. }]),
            "slot {slot}: {done:?}"
        );
    }

    fn read(&mut self, slot: u32, id: u8) -> ReadOutcome {
        let memory = self.memory(0xEE);
        self.log.read(slot, identity(id), memory, ReadCheck::Log, 99).expect("accepted");
        let done = self.run_until_idle();
        let [DiskCompletion::Read { outcome, memory: Some(memory), token: 99, .. }] = &done[..] else {
            panic!("one read: {done:?}")
        };
        if let ReadOutcome::Verified { bytes } = outcome {
            let mut found = vec![0; *bytes as usize];
            memory.slab().read(memory.slot(), 0, &mut found);
            assert!(found.iter().all(|&byte| byte == id), "wrong bytes for {id}");
        }
        *outcome
    }

    fn reopen(self) -> (Self, Vec<Recovered>, RecoveryReport) {
        let Self { disk, log, memory, start, ms } = self;
        drop(log);
        let (log, recovered, report) = open(&disk, config(), 2).expect("a store");
        (Self { disk, log, memory, start, ms }, recovered, report)
    }

    fn count(&self, name: &str) -> u64 {
        let found = self.log.counters().snapshot().into_iter().find(|(other, ..)| *other == name);
        found.expect("a counter of this name").2
    }

    fn damage(&self, offset: u64, bytes: usize) {
        let offset = offset as usize;
        self.disk.with(|disk| disk.bytes[offset..offset + bytes].fill(0x77));
    }
}

const GOOD: ReadOutcome = ReadOutcome::Verified { bytes: 5000 };

fn miss(reason: MissReason) -> ReadOutcome {
    ReadOutcome::Miss(reason)
}
