//! Blocks that are written, read, forgotten and handed back, and what that costs.

use std::time::Duration;

use super::{
    Bench, DISK_BYTES, GOOD, SLOT_BYTES, TIMEOUT, block, block_of, config, identity, layout, miss, open,
};
use crate::testing::SharedDisk;
use crate::{Block, DiskCompletion, DiskConfig, MissReason, ReadCheck, ReadOutcome, Refusal, WriteOutcome};

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
            .write(slot.into(), block_of(slot, SLOT_BYTES as usize), memory, SLOT_BYTES, 0)
            .expect("queued, though the engine is full");
    }
    assert_eq!(bench.run_until_idle().len(), 8);
    for slot in 0..8 {
        assert_eq!(bench.read(slot.into(), slot), ReadOutcome::Verified { bytes: SLOT_BYTES });
    }
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
    assert_eq!(refused.reason, Refusal::SlotBusy);
    assert!(bench.log.forget(0) && !bench.log.forget(0));
    bench.disk.with(|disk| disk.is_silent = false);
    let done = bench.run_until_idle();
    assert!(matches!(
        done[..],
        [DiskCompletion::Written { outcome: WriteOutcome::Superseded, memory: Some(_), .. }]
    ));
    assert_eq!(bench.read(0, 1), miss(MissReason::Stale));

    bench.write(0, 3);
    bench.disk.with(|disk| disk.is_silent = true);
    let (target, memory) = (bench.memory(0), bench.memory(4));
    bench.log.read(0, identity(3), target, ReadCheck::Log, 1).expect("accepted");
    bench.log.write(0, block(4), memory, 5000, 2).expect("accepted");
    bench.disk.with(|disk| disk.is_silent = false);
    let done = bench.run_until_idle();
    let is_stale = |done: &DiskCompletion| {
        matches!(done, DiskCompletion::Read { outcome: ReadOutcome::Miss(MissReason::Stale), .. })
    };
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
    assert_eq!(refused(2, 1, b""), Refusal::Full);
    assert_eq!(refused(u32::MAX, 1, b""), Refusal::Invalid);
    assert_eq!(refused(2, 0, b""), Refusal::Invalid);
    assert_eq!(refused(2, SLOT_BYTES + 1, b""), Refusal::Invalid);
    assert_eq!(refused(2, 1, &[0; 17]), Refusal::Invalid);
    assert_eq!(bench.memory.used_count(), 2, "the memory came back");
}

#[test]
fn a_flush_carries_all_records_and_syncs() {
    let mut bench = Bench::new(DiskConfig { table_delay: Duration::from_secs(10), ..config() });
    for slot in 0..60 {
        let memory = bench.memory(slot as u8);
        bench.log.write(slot, block(slot as u8), memory, 5000, 1).expect("accepted");
    }
    assert_eq!(bench.run_until_idle().len(), 60);
    assert_eq!(bench.count("table_writes"), 0, "records wait for each other");
    assert!(bench.log.flush(7, true));
    let done = bench.run_until_idle();
    assert!(
        matches!(done[..], [DiskCompletion::Flushed { token: 7, failed_pages: 0, is_synced: true }]),
        "{done:?}"
    );
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
