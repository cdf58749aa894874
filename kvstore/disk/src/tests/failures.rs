//! Devices that fail, fall silent or go away: time and memory stay bounded, and the index is kept.

use std::time::Duration;

use kvstore_io::{IoErrorKind, Operation};

use super::{AREA, Bench, DISK_BYTES, GOOD, TIMEOUT, block, config, identity, miss, open};
use crate::testing::{Faults, SharedDisk};
use crate::{
    Area, DiskCompletion, DiskConfig, DiskError, MissReason, ReadCheck, ReadOutcome, Refusal, WriteOutcome,
};

#[test]
fn a_lost_device_fails_at_once_and_comes_back() {
    let mut bench = Bench::new(config());
    bench.write(0, 1);
    bench.disk.with(|disk| disk.is_gone = true);
    assert_eq!(bench.read(0, 1), miss(MissReason::Device));
    assert!(!bench.log.is_available());
    let memory = bench.memory(1);
    let refused = bench.log.read(0, identity(1), memory, ReadCheck::Log, 0).expect_err("refused");
    assert_eq!(refused.reason, Refusal::Unavailable);
    assert!(bench.log.flush(4, true));
    let done = bench.poll(0);
    assert!(matches!(done[..], [DiskCompletion::Flushed { token: 4, is_synced: false, .. }]), "{done:?}");
    (0..30).for_each(|_| assert!(bench.poll(100).is_empty()));
    assert!(!bench.log.is_available(), "probes fail");
    bench.disk.with(|disk| disk.is_gone = false);
    (0..400).for_each(|_| drop(bench.poll(100)));
    assert!(bench.log.is_available());
    assert_eq!(bench.read(0, 1), GOOD, "a device error forgets nothing");
    assert_eq!((bench.count("outages"), bench.count("misses_device")), (1, 1));
}

#[test]
fn a_device_that_fails_takes_a_log_over_several_devices_with_it() {
    let device_bytes = AREA.bytes / 4;
    let devices: Vec<Area> = (0..3)
        .map(|column| Area { offset: AREA.offset + column * device_bytes, bytes: device_bytes, ..AREA })
        .collect();
    for (column, device) in (0_u8..).zip(&devices) {
        let disk = SharedDisk::new(DISK_BYTES, 3);
        let mut bench = Bench::over(disk, DiskConfig { stripes: 3, ..config() }, &devices);
        (0..3).for_each(|slot| bench.write(slot, slot as u8 + 1));
        let bytes = device.offset as usize..(device.offset + device.bytes) as usize;
        bench.disk.with(|disk| disk.gone_bytes = bytes);
        assert_eq!(bench.read((column + 1) as u32 % 3, (column + 1) % 3 + 1), GOOD, "not asked yet");
        assert_eq!(bench.read(column.into(), column + 1), miss(MissReason::Device), "device {column}");
        let refused = |bench: &mut Bench, slot: u8| {
            let memory = bench.memory(1);
            let read = bench.log.read(slot.into(), identity(slot + 1), memory, ReadCheck::Log, 0);
            assert_eq!(read.expect_err("refused").reason, Refusal::Unavailable, "slot {slot}");
        };
        for _ in 0..300 {
            (0..3).for_each(|slot| refused(&mut bench, slot));
            assert!(bench.poll(100).is_empty(), "it waits for no device");
        }
        bench.disk.with(|disk| disk.gone_bytes = 0..0);
        (0..400).for_each(|_| drop(bench.poll(100)));
        (0..3).for_each(|slot| assert_eq!(bench.read(slot, slot as u8 + 1), GOOD));
        assert_eq!(bench.count("outages"), 1, "device {column}");
    }
}

#[test]
fn a_device_that_does_not_answer_costs_a_bounded_time() {
    let mut bench = Bench::new(config());
    bench.write(0, 1);
    bench.disk.with(|disk| disk.is_silent = true);
    let (target, memory) = (bench.memory(0), bench.memory(2));
    bench.log.read(0, identity(1), target, ReadCheck::Log, 1).expect("accepted");
    bench.log.write(1, block(2), memory, 5000, 2).expect("accepted");
    assert!(bench.poll(1_000).is_empty() && bench.poll(9_000).is_empty());
    let done = bench.poll(1_100);
    assert_eq!(done.len(), 2, "{done:?}");
    let still_held = |done: &DiskCompletion| {
        matches!(
            done,
            DiskCompletion::Read { memory: None, outcome: ReadOutcome::Miss(MissReason::Device), .. }
                | DiskCompletion::Written {
                    memory: None,
                    outcome: WriteOutcome::Failed(IoErrorKind::Device),
                    ..
                }
        )
    };
    assert!(done.iter().all(still_held), "the device may write into it yet: {done:?}");
    assert_eq!(bench.memory.used_count(), 2);
    assert!(!bench.log.is_available());
    bench.disk.with(|disk| disk.is_silent = false);
    let done: Vec<DiskCompletion> = (0..400).flat_map(|_| bench.poll(100)).collect();
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
    bench.log.read(0, identity(1), target, ReadCheck::Log, 1).expect("accepted");
    bench.ms += 60_000;
    assert!(bench.poll(0).is_empty() && bench.poll(5_000).is_empty() && bench.log.is_available());
    bench.disk.with(|disk| disk.is_silent = false);
    let done = bench.run_until_idle();
    assert!(matches!(done[..], [DiskCompletion::Read { outcome: GOOD, .. }]), "{done:?}");
}

#[test]
fn table_writes_that_fail_are_tried_again_then_given_up() {
    let mut bench = Bench::new(config());
    let memory = bench.memory(1);
    bench.log.write(0, block(1), memory, 5000, 1).expect("accepted");
    while bench.poll(0).is_empty() {}
    bench.disk.with(|disk| disk.faults = Faults { media: 1000, ..Faults::default() });
    assert!(bench.log.flush(7, false) && !bench.log.flush(8, false), "one flush at a time");
    let done = bench.run_until_idle();
    assert!(
        matches!(done[..], [DiskCompletion::Flushed { token: 7, failed_pages: 1, is_synced: false }]),
        "{done:?}"
    );
    assert_eq!(bench.count("table_write_failures"), 1);
    assert!(!bench.log.tables.is_clean(0), "the disk has not got it");
    assert!(bench.log.flush(8, false));
    let done = bench.run_until_idle();
    assert!(
        matches!(done[..], [DiskCompletion::Flushed { failed_pages: 1, .. }]),
        "no flush forgets it: {done:?}"
    );
    bench.disk.with(|disk| disk.faults = Faults::default());
    assert_eq!(bench.read(0, 1), GOOD);
    assert!(bench.log.flush(9, true));
    let done = bench.run_until_idle();
    assert!(
        matches!(done[..], [DiskCompletion::Flushed { failed_pages: 0, is_synced: true, .. }]),
        "{done:?}"
    );
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
    bench.run_until_idle();
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
fn a_medium_that_gives_nothing_back_does_not_empty_the_index() {
    let mut bench = Bench::new(config());
    (0..20).for_each(|slot| bench.write(slot, slot as u8));
    bench.disk.with(|disk| disk.failing = Some((Operation::Read, IoErrorKind::Media)));
    for slot in 0..20 {
        let memory = bench.memory(0);
        let _refused = bench.log.read(slot, identity(slot as u8), memory, ReadCheck::Log, 1);
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
                Err(refused) => assert_eq!(refused.reason, Refusal::Unavailable),
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
    // Ten seconds with pauses of 1, 2, 4 and 8 seconds.
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
    bench.log.read(0, identity(1), target, ReadCheck::Log, 1).expect("accepted");
    (0..5).for_each(|_| drop(bench.poll(0)));
    assert_eq!(bench.disk.with(|disk| disk.flushes), 4, "until one succeeds, and no more");
}

#[test]
fn an_engine_with_a_request_that_hangs_is_not_waited_for() {
    let mut bench = Bench::new(config());
    bench.write(0, 1);
    let target = bench.memory(0);
    bench.disk.with(|disk| disk.is_silent = true);
    bench.log.read(0, identity(1), target, ReadCheck::Log, 1).expect("accepted");
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
