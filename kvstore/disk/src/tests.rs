//! One test for each promise of the log, on a disk in memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_memory::{SlotPool, SlotRef};
use kvstore_block::BlockIdentity;
use kvstore_io::{IoErrorKind, Operation};

use crate::format::{PAGE_BYTES, PageHeader, PageKind, seal_page};
use crate::layout::{Copy2, SegmentLayout};
use crate::testing::{Faults, Random, SharedDisk, pool};
use crate::{
    Area, Block, DiskConfig, DiskError, DiskLog, Done, MissReason, Moment, ReadOutcome, Recovered,
    RefusedReason, Report, SegmentState, Usage, WriteOutcome, inspect,
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
    Block { identity: identity(id), parent: identity(id.wrapping_sub(1)), tenant: 5, meta: b"meta" }
}

fn open(
    disk: &SharedDisk,
    config: DiskConfig,
    store_id: u64,
) -> Result<(DiskLog, Vec<Recovered>, Report), DiskError> {
    let now = Moment { instant: Instant::now(), unix_s: 1_790_000_000 };
    DiskLog::open(config, &[AREA], disk.engine(), store_id, now)
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
        let (log, ..) = open(&disk, config, 1).expect("a store");
        Self { disk, log, memory: pool(SLOT_BYTES as usize, 80), start: Instant::now(), ms: 0 }
    }

    fn memory(&self, fill: u8) -> SlotRef {
        let slot = self.memory.acquire().expect("memory");
        slot.slab().write(slot.slot(), 0, &[fill; SLOT_BYTES as usize]);
        slot
    }

    fn poll(&mut self, ms: u64) -> Vec<Done> {
        self.ms += ms;
        let now = Moment {
            instant: self.start + Duration::from_millis(self.ms),
            unix_s: 1_790_000_000 + self.ms / 1000,
        };
        let mut done = Vec::new();
        self.log.poll(now, &mut done);
        done
    }

    fn settle(&mut self) -> Vec<Done> {
        (0..500).flat_map(|_| self.poll(1)).collect()
    }

    fn write(&mut self, slot: u32, id: u8) {
        let memory = self.memory(id);
        self.log.write(slot, block(id), memory, 5000, id.into()).expect("accepted");
        let done = self.settle();
        assert!(
            matches!(done[..], [Done::Written { outcome: WriteOutcome::Stored, .. }]),
            "slot {slot}: {done:?}"
        );
    }

    fn read(&mut self, slot: u32, id: u8) -> ReadOutcome {
        let memory = self.memory(0xEE);
        self.log.read(slot, identity(id), memory, 99).expect("accepted");
        let done = self.settle();
        let [Done::Read { outcome, memory: Some(memory), token: 99, .. }] = &done[..] else {
            panic!("one read: {done:?}")
        };
        if let ReadOutcome::Verified { bytes } = outcome {
            let mut found = vec![0; *bytes as usize];
            memory.slab().read(memory.slot(), 0, &mut found);
            assert!(found.iter().all(|&byte| byte == id), "wrong bytes for {id}");
        }
        *outcome
    }

    fn reopen(self) -> (Self, Vec<Recovered>, Report) {
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

#[test]
fn a_block_comes_back_from_memory_and_from_disk() {
    let mut bench = Bench::new(config());
    bench.write(3, 30);
    assert_eq!(bench.read(3, 30), GOOD);
    assert_eq!(bench.read(3, 31), miss(MissReason::Stale), "another block");
    assert_eq!(bench.read(4, 30), miss(MissReason::Stale), "an empty slot");
    let (mut bench, recovered, report) = bench.reopen();
    let [found] = &recovered[..] else { panic!("{recovered:?}") };
    assert_eq!((found.slot, found.identity, found.parent), (3, identity(30), identity(29)));
    assert_eq!((found.tenant, found.bytes, &found.meta[..]), (5, 5000, &b"meta"[..]));
    assert_eq!((report.recovered, report.pages_damaged, report.is_formatted), (1, 0, false));
    assert_eq!(bench.read(3, 30), GOOD);
    assert!(!bench.log.slot_cursor().take(3), "the slot is in use");
    assert_eq!((bench.count("reads"), bench.count("misses_stale")), (1, 0));
}

#[test]
fn a_read_is_one_request_of_the_payload() {
    let mut bench = Bench::new(config());
    bench.write(0, 1);
    let before = bench.disk.with(|disk| disk.requests);
    assert_eq!(bench.read(0, 1), GOOD);
    assert_eq!(bench.disk.with(|disk| disk.requests) - before, 1);
}

#[test]
fn long_payloads_are_cut_to_what_the_engine_takes() {
    let disk = SharedDisk::new(DISK_BYTES, 3);
    disk.with(|disk| (disk.transfer_bytes_max, disk.depth_max) = (4096, 2));
    let mut bench = Bench::on(disk, config());
    for slot in 0..8 {
        let memory = bench.memory(slot);
        bench
            .log
            .write(slot.into(), block(slot), memory, SLOT_BYTES, 0)
            .expect("queued, though the engine is full");
    }
    assert_eq!(bench.settle().len(), 8);
    for slot in 0..8 {
        assert_eq!(bench.read(slot.into(), slot), ReadOutcome::Verified { bytes: SLOT_BYTES });
    }
}

#[test]
fn damage_is_a_miss_once_and_the_block_is_gone() {
    let mut bench = Bench::new(config());
    bench.write(2, 20);
    bench.damage(layout().slot_offset(2) + 4999, 1);
    assert_eq!(bench.read(2, 20), miss(MissReason::Damaged));
    assert_eq!(bench.read(2, 20), miss(MissReason::Stale));
    assert_eq!((bench.count("misses_damaged"), bench.count("tombstones")), (1, 1));
    bench.write(2, 21);
    bench.disk.with(|disk| disk.faults = Faults { media: 1000, ..Faults::default() });
    assert_eq!(bench.read(2, 21), miss(MissReason::Media));
    assert_eq!(bench.count("misses_media"), 1);
    bench.disk.with(|disk| disk.faults = Faults::default());
    bench.write(3, 22);
    let (_, recovered, _) = bench.reopen();
    assert!(matches!(&recovered[..], [Recovered { slot: 3, .. }]), "{recovered:?}");
}

#[test]
fn an_old_payload_or_one_of_another_slot_never_verifies() {
    let mut bench = Bench::new(config());
    let place = |slot| layout().slot_offset(slot) as usize;
    bench.write(1, 7);
    bench.write(2, 8);
    let first = bench.disk.with(|disk| disk.bytes[place(1)..place(2)].to_vec());
    // The same bytes, written again under the next generation, are lost on the way: what lies there is stale, and
    // equal; that is the one case in which stale bytes are right.
    bench.write(1, 7);
    assert_eq!(bench.read(1, 7), GOOD);
    // Those bytes in a slot that holds another block.
    bench.disk.with(|disk| disk.bytes[place(2)..place(3)].copy_from_slice(&first));
    assert_eq!(bench.read(2, 8), miss(MissReason::Damaged));
}

#[test]
fn a_torn_table_page_loses_nothing_that_was_there_before() {
    for copy in [Copy2::A, Copy2::B] {
        let mut bench = Bench::new(config());
        bench.write(0, 1);
        bench.write(1, 2);
        let newest = bench.log.tables.segments[0].pages[0].newest;
        bench.damage(layout().table_offset(copy, 0) + 2048, 512);
        let (mut bench, recovered, report) = bench.reopen();
        assert_eq!(report.pages_damaged, 1);
        // Record 1 came with the newest copy.
        assert_eq!(recovered.len(), if copy == newest { 1 } else { 2 }, "{copy:?} of newest {newest:?}");
        assert_eq!(bench.read(0, 1), GOOD);
        bench.write(5, 3);
        assert_eq!(bench.reopen().1.len(), recovered.len() + 1, "the damaged copy was written over");
    }
}

#[test]
fn records_are_salvaged_when_no_copy_of_their_page_is_whole() {
    let mut bench = Bench::new(config());
    bench.write(0, 1);
    bench.write(30, 2);
    // Byte 63 of each first record belongs to nothing but the page's checksum.
    for copy in [Copy2::A, Copy2::B] {
        bench.damage(layout().table_offset(copy, 0) + (layout().record_range(0).start + 10) as u64, 2);
    }
    let (mut bench, recovered, report) = bench.reopen();
    assert_eq!((recovered.len(), report.records_salvaged, report.pages_damaged), (1, 1, 2), "{report:?}");
    assert_eq!(bench.read(30, 2), GOOD);
}

#[test]
fn of_two_records_of_a_block_the_newer_wins() {
    let mut bench = Bench::new(config());
    bench.write(4, 9);
    bench.write(2, 9);
    let (mut bench, recovered, report) = bench.reopen();
    assert_eq!((recovered.len(), recovered[0].slot, report.duplicates), (1, 2, 1));
    assert_eq!(bench.read(2, 9), GOOD);
    bench.settle();
    assert_eq!(bench.reopen().2.duplicates, 0, "the older one has its tombstone");
}

#[test]
fn forgotten_blocks_stay_forgotten() {
    let mut bench = Bench::new(config());
    bench.write(4, 9);
    assert!(bench.log.forget(4) && !bench.log.forget(4) && !bench.log.forget(u32::MAX));
    assert_eq!(bench.read(4, 9), miss(MissReason::Stale));
    assert!(bench.reopen().1.is_empty());
}

#[test]
fn a_slot_that_is_written_or_forgotten_meanwhile() {
    let mut bench = Bench::new(config());
    bench.disk.with(|disk| disk.is_silent = true);
    let memory = bench.memory(1);
    bench.log.write(0, block(1), memory, 5000, 1).expect("accepted");
    let memory = bench.memory(2);
    let refused = bench.log.write(0, block(2), memory, 5000, 2).expect_err("under way");
    assert_eq!(refused.reason, RefusedReason::SlotBusy);
    assert!(bench.log.forget(0) && !bench.log.forget(0));
    bench.disk.with(|disk| disk.is_silent = false);
    let done = bench.settle();
    assert!(matches!(done[..], [Done::Written { outcome: WriteOutcome::Superseded, memory: Some(_), .. }]));
    assert_eq!(bench.read(0, 1), miss(MissReason::Stale));

    bench.write(0, 3);
    bench.disk.with(|disk| disk.is_silent = true);
    let (target, memory) = (bench.memory(0), bench.memory(4));
    bench.log.read(0, identity(3), target, 1).expect("accepted");
    bench.log.write(0, block(4), memory, 5000, 2).expect("accepted");
    bench.disk.with(|disk| disk.is_silent = false);
    let done = bench.settle();
    let is_stale =
        |done: &Done| matches!(done, Done::Read { outcome: ReadOutcome::Miss(MissReason::Stale), .. });
    assert!(done.len() == 2 && done.iter().any(is_stale), "{done:?}");
    assert_eq!(bench.read(0, 4), GOOD, "the read did not forget the new block");
}

#[test]
fn full_and_invalid_hand_back() {
    let mut bench = Bench::new(DiskConfig { operations_max: 2, ..config() });
    bench.disk.with(|disk| disk.is_silent = true);
    for slot in 0..2 {
        let memory = bench.memory(1);
        bench.log.write(slot, block(slot as u8), memory, 1, 0).expect("accepted");
    }
    let mut refused = |slot, bytes, meta: &'static [u8]| {
        let memory = bench.memory(1);
        bench.log.write(slot, Block { meta, ..block(1) }, memory, bytes, 0).expect_err("refused").reason
    };
    assert_eq!(refused(2, 1, b""), RefusedReason::Full);
    assert_eq!(refused(u32::MAX, 1, b""), RefusedReason::Invalid);
    assert_eq!(refused(2, 0, b""), RefusedReason::Invalid);
    assert_eq!(refused(2, SLOT_BYTES + 1, b""), RefusedReason::Invalid);
    assert_eq!(refused(2, 1, &[0; 17]), RefusedReason::Invalid);
    assert_eq!(bench.memory.used_count(), 2, "the memory came back");
}

#[test]
fn a_lost_device_fails_at_once_and_comes_back() {
    let mut bench = Bench::new(config());
    bench.write(0, 1);
    bench.disk.with(|disk| disk.is_gone = true);
    assert_eq!(bench.read(0, 1), miss(MissReason::Device));
    assert!(!bench.log.is_available());
    let memory = bench.memory(1);
    let refused = bench.log.read(0, identity(1), memory, 0).expect_err("refused");
    assert_eq!(refused.reason, RefusedReason::Unavailable);
    assert!(bench.log.flush(4, true));
    let done = bench.poll(0);
    assert!(matches!(done[..], [Done::Flushed { token: 4, is_synced: false, .. }]), "{done:?}");
    (0..30).for_each(|_| assert!(bench.poll(100).is_empty()));
    assert!(!bench.log.is_available(), "probes fail");
    bench.disk.with(|disk| disk.is_gone = false);
    (0..400).for_each(|_| drop(bench.poll(100)));
    assert!(bench.log.is_available());
    assert_eq!(bench.read(0, 1), GOOD, "a device error forgets nothing");
    assert_eq!((bench.count("outages"), bench.count("misses_device")), (1, 1));
}

#[test]
fn a_device_that_does_not_answer_costs_a_bounded_time() {
    let mut bench = Bench::new(config());
    bench.write(0, 1);
    bench.disk.with(|disk| disk.is_silent = true);
    let (target, memory) = (bench.memory(0), bench.memory(2));
    bench.log.read(0, identity(1), target, 1).expect("accepted");
    bench.log.write(1, block(2), memory, 5000, 2).expect("accepted");
    assert!(bench.poll(1_000).is_empty() && bench.poll(9_000).is_empty());
    let done = bench.poll(1_100);
    assert_eq!(done.len(), 2, "{done:?}");
    let still_held = |done: &Done| {
        matches!(
            done,
            Done::Read { memory: None, outcome: ReadOutcome::Miss(MissReason::Device), .. }
                | Done::Written { memory: None, outcome: WriteOutcome::Failed(IoErrorKind::Device), .. }
        )
    };
    assert!(done.iter().all(still_held), "the device may write into it yet: {done:?}");
    assert_eq!(bench.memory.used_count(), 2);
    assert!(!bench.log.is_available());
    bench.disk.with(|disk| disk.is_silent = false);
    let done: Vec<Done> = (0..400).flat_map(|_| bench.poll(100)).collect();
    assert!(done.is_empty(), "reported once: {done:?}");
    assert_eq!(bench.memory.used_count(), 0, "the late answer freed it");
    assert!(bench.log.is_available());
    assert_eq!(bench.read(0, 1), GOOD);
    bench.write(1, 3);
}

#[test]
fn a_log_that_idled_does_not_take_its_own_sleep_for_the_device_s() {
    let mut bench = Bench::new(config());
    bench.write(0, 1);
    bench.ms += 3_600_000;
    bench.disk.with(|disk| disk.is_silent = true);
    let target = bench.memory(0);
    bench.log.read(0, identity(1), target, 1).expect("accepted");
    bench.ms += 60_000;
    assert!(bench.poll(0).is_empty() && bench.poll(5_000).is_empty() && bench.log.is_available());
    bench.disk.with(|disk| disk.is_silent = false);
    let done = bench.settle();
    assert!(matches!(done[..], [Done::Read { outcome: GOOD, .. }]), "{done:?}");
}

#[test]
fn table_writes_that_fail_are_tried_again_then_given_up() {
    let mut bench = Bench::new(config());
    let memory = bench.memory(1);
    bench.log.write(0, block(1), memory, 5000, 1).expect("accepted");
    while bench.poll(0).is_empty() {}
    bench.disk.with(|disk| disk.faults = Faults { media: 1000, ..Faults::default() });
    assert!(bench.log.flush(7, false) && !bench.log.flush(8, false), "one flush at a time");
    let done = bench.settle();
    assert!(matches!(done[..], [Done::Flushed { token: 7, failed_pages: 1, is_synced: false }]), "{done:?}");
    assert_eq!(bench.count("table_write_failures"), 1);
    assert!(!bench.log.tables.is_clean(0), "the disk has not got it");
    assert!(bench.log.flush(8, false));
    let done = bench.settle();
    assert!(matches!(done[..], [Done::Flushed { failed_pages: 1, .. }]), "no flush forgets it: {done:?}");
    bench.disk.with(|disk| disk.faults = Faults::default());
    assert_eq!(bench.read(0, 1), GOOD);
    assert!(bench.log.flush(9, true));
    let done = bench.settle();
    assert!(matches!(done[..], [Done::Flushed { failed_pages: 0, is_synced: true, .. }]), "{done:?}");
    assert!(bench.log.tables.is_clean(0));
    bench.write(1, 2);
    assert_eq!(bench.reopen().1.len(), 2, "the next change of the page carried both");
}

#[test]
fn a_log_whose_tables_could_not_be_written_is_not_closed_cleanly() {
    let mut bench = Bench::new(config());
    let memory = bench.memory(1);
    bench.log.write(0, block(1), memory, 5000, 1).expect("accepted");
    while bench.poll(0).is_empty() {}
    bench.disk.with(|disk| disk.failing = Some((Operation::Write, IoErrorKind::Media)));
    bench.settle();
    assert_eq!(bench.count("table_write_failures"), 1, "given up before it is closed");
    let Bench { log, .. } = bench;
    assert!(!log.close(TIMEOUT).is_clean);
}

#[test]
fn errors_that_say_nothing_of_the_medium_forget_nothing_and_become_an_outage() {
    let mut bench = Bench::new(config());
    bench.write(0, 1);
    bench.disk.with(|disk| disk.failing = Some((Operation::Read, IoErrorKind::Other)));
    for failures in 1..=8 {
        assert!(bench.log.is_available());
        assert_eq!(bench.read(0, 1), miss(MissReason::Device), "failure {failures}");
    }
    (0..100).for_each(|_| drop(bench.poll(100)));
    assert!(!bench.log.is_available(), "it is no answer to a probe");
    bench.disk.with(|disk| disk.failing = None);
    (0..400).for_each(|_| drop(bench.poll(100)));
    assert!(bench.log.is_available());
    assert_eq!(bench.read(0, 1), GOOD);
    assert_eq!((bench.count("tombstones"), bench.count("outages")), (0, 1));
}

#[test]
fn a_device_that_reads_nothing_is_not_formatted() {
    let mut bench = Bench::new(config());
    bench.write(0, 1);
    let disk = bench.disk.clone();
    drop(bench);
    disk.with(|disk| disk.failing = Some((Operation::Read, IoErrorKind::Other)));
    let careless = DiskConfig { reformat: true, ..config() };
    assert!(matches!(open(&disk, careless, 2).err(), Some(DiskError::Io { .. })));
    disk.with(|disk| disk.failing = None);
    assert_eq!(open(&disk, config(), 2).expect("untouched").1.len(), 1);
}

#[test]
fn a_medium_that_gives_nothing_back_does_not_empty_the_index() {
    let mut bench = Bench::new(config());
    (0..20).for_each(|slot| bench.write(slot, slot as u8));
    bench.disk.with(|disk| disk.failing = Some((Operation::Read, IoErrorKind::Media)));
    for slot in 0..20 {
        let memory = bench.memory(0);
        let _refused = bench.log.read(slot, identity(slot as u8), memory, 1);
        (0..20).for_each(|_| drop(bench.poll(0)));
    }
    assert!(!bench.log.is_available());
    assert_eq!(bench.count("tombstones"), 8);
}

#[test]
fn a_device_that_only_reads_goes_on_reading() {
    let mut bench = Bench::new(config());
    bench.write(0, 1);
    bench.disk.with(|disk| disk.failing = Some((Operation::Write, IoErrorKind::Unsupported)));
    let mut tried = [0, 0];
    for round in 0..2 {
        for _ in 0..400 {
            let memory = bench.memory(2);
            match bench.log.write(1, block(2), memory, 5000, 2) {
                Ok(()) => tried[round] += 1,
                Err(refused) => assert_eq!(refused.reason, RefusedReason::Unavailable),
            }
            bench.poll(25);
            (0..8).for_each(|_| drop(bench.poll(0)));
            if round == 0 && tried[0] >= 8 {
                break;
            }
        }
        assert_eq!(bench.read(0, 1), GOOD);
        assert!(bench.log.is_available());
    }
    // Ten seconds with pauses of 1, 2, 4 and 8.
    assert!(tried[0] == 8 && (1..=6).contains(&tried[1]), "{tried:?}");
    assert_eq!(bench.count("outages"), 0);
    bench.disk.with(|disk| disk.failing = None);
    (0..40).for_each(|_| drop(bench.poll(1000)));
    bench.write(1, 2);
    assert_eq!(bench.read(1, 2), GOOD);
}

#[test]
fn a_flush_of_the_engine_that_failed_is_tried_again() {
    let mut bench = Bench::new(config());
    bench.write(0, 1);
    let target = bench.memory(0);
    bench.disk.with(|disk| (disk.is_silent, disk.flushes, disk.flushes_to_fail) = (true, 0, 3));
    bench.log.read(0, identity(1), target, 1).expect("accepted");
    (0..5).for_each(|_| drop(bench.poll(0)));
    assert_eq!(bench.disk.with(|disk| disk.flushes), 4, "until one succeeds, and no more");
}

#[test]
fn an_engine_with_a_request_that_hangs_is_not_waited_for() {
    let mut bench = Bench::new(config());
    bench.write(0, 1);
    let target = bench.memory(0);
    bench.disk.with(|disk| disk.is_silent = true);
    bench.log.read(0, identity(1), target, 1).expect("accepted");
    let Bench { disk, log, memory, .. } = bench;
    assert!(!log.close(Duration::from_millis(50)).is_clean);
    assert_eq!(disk.with(|disk| disk.engines_dropped), 0, "dropping it would wait");
    assert_eq!(memory.used_count(), 1, "the device may write there");
    let impatient = DiskConfig { operation_timeout: Duration::from_millis(20), ..config() };
    assert!(matches!(open(&disk, impatient, 2).err(), Some(DiskError::Timeout { .. })));
    assert_eq!(disk.with(|disk| disk.engines_dropped), 0);
    disk.with(|disk| disk.is_silent = false);
    drop(open(&disk, config(), 2).expect("a store").0.close(TIMEOUT));
    assert_eq!(disk.with(|disk| disk.engines_dropped), 1);
}

#[test]
fn a_salvaged_record_is_a_tombstone_if_there_is_one_of_its_generation() {
    // The copies are read in an order that the seed draws.
    for seed in 0..16 {
        let mut bench = Bench::on(SharedDisk::new(DISK_BYTES, seed), config());
        bench.write(30, 2);
        assert!(bench.log.forget(30));
        bench.settle();
        for copy in [Copy2::A, Copy2::B] {
            bench.damage(layout().table_offset(copy, 0) + (layout().record_range(0).start + 10) as u64, 2);
        }
        let (_, recovered, report) = bench.reopen();
        assert!(recovered.is_empty() && report.pages_damaged == 2, "seed {seed}: {report:?}");
    }
}

#[test]
fn formatting_anew_keeps_the_account_of_what_was_written() {
    let mut bench = Bench::new(config());
    (0..10).for_each(|slot| bench.write(slot, slot as u8));
    let before = bench.log.usage();
    let disk = bench.disk.clone();
    drop(bench);
    let other = DiskConfig { fingerprint: 1, slot_bytes: 8192, reformat: true, ..config() };
    let (log, _, report) = open(&disk, other.clone(), 2).expect("anew");
    // A page carries what had been written before it.
    let expected = Usage {
        total_bytes: before.total_bytes - PAGE_BYTES as u64,
        day_bytes: before.day_bytes - PAGE_BYTES as u64,
        ..before
    };
    assert!(report.is_formatted && log.usage() == expected, "{:?} {expected:?}", log.usage());
    drop(log);
    let now = Moment { instant: Instant::now(), unix_s: 9 };
    let log = DiskLog::format(other.clone(), &[AREA], disk.engine(), 3, now).expect("anew");
    assert_eq!(log.usage(), expected);
    drop(log);
    assert_eq!(open(&disk, other, 4).expect("the new one").0.usage(), expected);
}

#[test]
fn a_flush_carries_all_records_and_syncs() {
    let mut bench = Bench::new(DiskConfig { table_delay: Duration::from_secs(10), ..config() });
    for slot in 0..60 {
        let memory = bench.memory(slot as u8);
        bench.log.write(slot, block(slot as u8), memory, 5000, 1).expect("accepted");
    }
    assert_eq!(bench.settle().len(), 60);
    assert_eq!(bench.count("table_writes"), 0, "records wait for each other");
    assert!(bench.log.flush(7, true));
    let done = bench.settle();
    assert!(matches!(done[..], [Done::Flushed { token: 7, failed_pages: 0, is_synced: true }]), "{done:?}");
    assert_eq!(bench.count("table_writes"), u64::from(layout().pages.min(2)), "one write for many records");
    bench.disk.with(crate::testing::Disk::cut_power);
    assert_eq!(bench.reopen().1.len(), 60);
}

#[test]
fn closing_writes_everything() {
    let mut bench = Bench::new(DiskConfig { table_delay: Duration::from_secs(10), ..config() });
    let memory = bench.memory(1);
    bench.log.write(0, block(1), memory, 5000, 1).expect("accepted");
    let Bench { disk, log, .. } = bench;
    let closed = log.close(TIMEOUT);
    assert!(closed.is_clean && closed.done.len() == 2, "{closed:?}");
    disk.with(crate::testing::Disk::cut_power);
    assert_eq!(open(&disk, config(), 2).expect("a store").1.len(), 1);
}

#[test]
fn the_bytes_written_survive_a_restart() {
    let mut bench = Bench::new(config());
    bench.write(0, 1);
    bench.write(1, 1);
    let usage = bench.log.usage();
    // Two payloads of two pages and two table pages; a page carries what had been written before it.
    assert_eq!(usage.total_bytes, 6 * PAGE_BYTES as u64);
    assert_eq!(usage.day_bytes, usage.total_bytes);
    let expected = usage.total_bytes - PAGE_BYTES as u64;
    let (bench, ..) = bench.reopen();
    assert_eq!(bench.log.usage(), Usage { total_bytes: expected, day_bytes: expected, ..usage });
}

#[test]
fn what_is_not_this_store_is_refused_with_both_names() {
    let mut bench = Bench::new(config());
    bench.write(0, 1);
    let disk = bench.disk.clone();
    drop(bench);
    let other = DiskConfig { fingerprint: 0xBEEF, ..config() };
    let error = open(&disk, other.clone(), 2).err().expect("another model").to_string();
    assert!(error.contains("0x000000000000f00d") && error.contains("0x000000000000beef"), "{error}");
    let slots = DiskConfig { slot_bytes: 8192, ..config() };
    let error = open(&disk, slots, 2).err().expect("other slots").to_string();
    assert!(error.contains("16384 bytes") && error.contains("8192 bytes"), "{error}");
    assert_eq!(open(&disk, config(), 2).expect("untouched").1.len(), 1);
    let (log, recovered, report) =
        open(&disk, DiskConfig { reformat: true, ..other.clone() }, 3).expect("anew");
    assert!(report.is_formatted && recovered.is_empty());
    drop(log);
    let (_, recovered, report) = open(&disk, other, 4).expect("the new one");
    assert!(!report.is_formatted && recovered.is_empty(), "old tables name another store");

    disk.with(|disk| disk.bytes.fill(0x41));
    assert!(matches!(
        open(&disk, config(), 5).err(),
        Some(DiskError::NotAStore { segment: 0, file: 0, offset: 4096 })
    ));
    assert!(open(&disk, DiskConfig { reformat: true, ..config() }, 5).is_ok());
}

#[test]
fn a_lost_header_copy_is_written_again() {
    let mut bench = Bench::new(config());
    bench.write(0, 1);
    bench.damage(layout().header_offset(Copy2::A), 100);
    let (bench, recovered, report) = bench.reopen();
    assert_eq!((recovered.len(), report.headers_damaged), (1, 1));
    bench.damage(layout().header_offset(Copy2::B), 100);
    let (bench, recovered, report) = bench.reopen();
    assert_eq!((recovered.len(), report.headers_damaged), (1, 1), "A was restored");
    let (_, _, report) = bench.reopen();
    assert_eq!(report.headers_damaged, 0);
}

#[test]
fn further_areas_join_and_a_segment_without_header_keeps_its_blocks() {
    let disk = SharedDisk::new(4 << 20, 3);
    let areas = [AREA, Area { offset: 2 << 20, ..AREA }];
    let now = Moment { instant: Instant::now(), unix_s: 9 };
    let open = |areas: &[Area]| DiskLog::open(config(), areas, disk.engine(), 1, now).expect("a store");
    let slots = open(&areas[..1]).0.slot_count();
    let (log, ..) = open(&areas);
    assert_eq!(log.slot_count(), 2 * slots);
    let memory = pool(SLOT_BYTES as usize, 80);
    let mut bench = Bench { disk: disk.clone(), log, memory, start: Instant::now(), ms: 0 };
    bench.write(slots + 1, 4);
    drop(bench);
    let second = SegmentLayout { area: areas[1], ..layout() };
    disk.with(|disk| {
        for copy in [Copy2::A, Copy2::B] {
            let at = second.header_offset(copy) as usize;
            disk.bytes[at + 100] ^= 1;
        }
    });
    let (_, recovered, report) = open(&areas);
    assert_eq!((recovered.len(), report.headers_damaged), (1, 2));
    assert_eq!(recovered[0].slot, slots + 1);
}

#[test]
fn long_runs_of_forgotten_slots_are_trimmed_once() {
    let trim_bytes_min = 8 * u64::from(SLOT_BYTES);
    let mut bench = Bench::new(DiskConfig { trim_bytes_min, ..config() });
    (0..30).for_each(|slot| bench.write(slot, slot as u8));
    (0..7).chain(10..20).for_each(|slot| assert!(bench.log.forget(slot)));
    bench.settle();
    let told = bench.disk.with(|disk| disk.discards.clone());
    assert_eq!(told, [(layout().slot_offset(10), 10 * u64::from(SLOT_BYTES))], "seven slots are too few");
    bench.log.forget(7);
    bench.settle();
    let told = bench.disk.with(|disk| disk.discards.clone());
    assert_eq!(told[1..], [(layout().slot_offset(0), 8 * u64::from(SLOT_BYTES))]);
    (20..30).chain([8, 9]).for_each(|slot| assert_eq!(bench.read(slot, slot as u8), GOOD));
    assert_eq!((bench.count("trims"), bench.count("trimmed_bytes")), (2, 18 * u64::from(SLOT_BYTES)));
}

#[test]
fn inspection_says_what_is_there() {
    let mut bench = Bench::new(config());
    (0..5).for_each(|slot| bench.write(slot, slot as u8));
    bench.log.forget(4);
    bench.settle();
    bench.damage(layout().header_offset(Copy2::B), 9);
    bench.damage(layout().table_offset(Copy2::B, 1), 9);
    let blank = Area { offset: AREA.offset + AREA.bytes, bytes: 64 << 10, ..AREA };
    let mut engine = bench.disk.engine();
    let summary = inspect(engine.as_mut(), &[AREA, blank], TIMEOUT).expect("a summary");
    let [segment, other] = &summary.segments[..] else { panic!("{summary:?}") };
    assert_eq!((segment.state, segment.live, segment.live_bytes), (SegmentState::Valid, 4, 20_000));
    assert_eq!((segment.tombstones, segment.headers_damaged, segment.records_damaged), (1, 1, 0));
    assert_eq!(segment.header.map(|header| header.fingerprint), Some(0xF00D));
    assert!(segment.oldest_written_at_s < segment.newest_written_at_s, "{segment:?}");
    assert_eq!(other.state, SegmentState::Blank);
    assert!(summary.usage.total_bytes > 10 * PAGE_BYTES as u64);
    bench.disk.with(|disk| disk.bytes.fill(0x41));
    let summary = inspect(engine.as_mut(), &[AREA], TIMEOUT).expect("a summary");
    assert_eq!(summary.segments[0].state, SegmentState::Foreign);
}

/// Pages with good checksums and any contents: whoever can write to the disk can make these.
#[test]
fn pages_made_in_bad_faith_neither_panic_nor_verify() {
    let mut random = Random(8);
    let (mut refused, mut opened, mut reads) = (0, 0, 0);
    for round in 0..2000 {
        let mut bench = Bench::new(config());
        bench.write(0, 1);
        let store_id = bench.log.tables.store_id;
        let Bench { disk, log, .. } = bench;
        drop(log);
        for _ in 0..3 {
            let is_header = random.per_mille(300);
            let copy = if random.per_mille(500) { Copy2::A } else { Copy2::B };
            let page = random.below(layout().pages.into()) as u32;
            let at = if is_header { layout().header_offset(copy) } else { layout().table_offset(copy, page) };
            let any = |random: &mut Random, usual: u64| {
                if random.per_mille(900) { usual } else { random.next() >> random.below(64) }
            };
            let header = PageHeader {
                kind: if is_header { PageKind::Header } else { PageKind::Table },
                store_id: any(&mut random, store_id),
                sequence: any(&mut random, 100),
                segment: any(&mut random, 0) as u32,
                page: any(&mut random, if is_header { 0 } else { page.into() }) as u32,
                usage: Usage { total_bytes: random.next(), day_bytes: random.next(), ..Usage::default() },
            };
            disk.with(|disk| {
                let start = at as usize;
                let page = disk.bytes[start..].first_chunk_mut::<PAGE_BYTES>().expect("a page");
                for _ in 0..1 + random.below(40) {
                    page[random.below(if is_header { 100 } else { 4096 }) as usize] = random.next() as u8;
                }
                seal_page(page, &header);
            });
        }
        let summary = inspect(disk.engine().as_mut(), &[AREA], TIMEOUT).expect("a summary");
        assert_eq!(summary.segments.len(), 1);
        let Ok((log, recovered, _)) = open(&disk, config(), 2) else {
            refused += 1;
            continue;
        };
        opened += 1;
        let memory = pool(SLOT_BYTES as usize, 80);
        let mut bench = Bench { disk, log, memory, start: Instant::now(), ms: 0 };
        for block in recovered {
            let memory = bench.memory(0xEE);
            bench.log.read(block.slot, block.identity, memory, 0).expect("accepted");
            reads += 1;
        }
        for done in bench.settle() {
            if let Done::Read { outcome: ReadOutcome::Verified { bytes }, memory: Some(memory), .. } = done {
                let mut found = vec![0; bytes as usize];
                memory.slab().read(memory.slot(), 0, &mut found);
                assert_eq!(found, vec![1; 5000], "round {round}");
            }
        }
        bench.write(1, 2);
        assert_eq!(bench.read(1, 2), GOOD);
    }
    println!("{refused} refused, {opened} opened, {reads} blocks read");
    assert!(refused > 50 && opened > 500 && reads > 300);
}
