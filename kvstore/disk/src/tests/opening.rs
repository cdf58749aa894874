//! Results and effects of opening, formatting and inspecting a store.

use std::time::Instant;

use kvstore_io::{IoErrorKind, Operation};

use super::{AREA, Bench, GOOD, SLOT_BYTES, TIMEOUT, config, layout, open};
use crate::format::PAGE_BYTES;
use crate::layout::{PageCopy, SegmentLayout};
use crate::testing::{SharedDisk, pool};
use crate::{Area, ClockReading, DiskConfig, DiskError, DiskLog, SegmentState, Usage, inspect};

#[test]
fn of_two_records_of_a_block_the_newer_wins() {
    let mut bench = Bench::new(config());
    bench.write(4, 9);
    bench.write(2, 9);
    let (mut bench, recovered, report) = bench.reopen();
    assert_eq!((recovered.len(), recovered[0].slot, report.duplicates), (1, 2, 1));
    assert_eq!(bench.read(2, 9), GOOD);
    bench.run_until_idle();
    assert_eq!(bench.reopen().2.duplicates, 0, "the older one has its tombstone");
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
    // A page carries the count of bytes written before it.
    let expected = Usage {
        total_bytes: before.total_bytes - PAGE_BYTES as u64,
        day_bytes: before.day_bytes - PAGE_BYTES as u64,
        ..before
    };
    assert!(report.is_formatted && log.usage() == expected, "{:?} {expected:?}", log.usage());
    drop(log);
    let now = ClockReading { instant: Instant::now(), unix_s: 9 };
    let log = DiskLog::format(other.clone(), &[AREA], disk.engine(), 3, now).expect("anew");
    assert_eq!(log.usage(), expected);
    drop(log);
    assert_eq!(open(&disk, other, 4).expect("the new one").0.usage(), expected);
}

#[test]
fn the_bytes_written_survive_a_restart() {
    let mut bench = Bench::new(config());
    bench.write(0, 1);
    bench.write(1, 1);
    let usage = bench.log.usage();
    // Two payloads of two pages and two table pages; a page carries the count of bytes written before it.
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
    bench.damage(layout().header_offset(PageCopy::A), 100);
    let (bench, recovered, report) = bench.reopen();
    assert_eq!((recovered.len(), report.headers_damaged), (1, 1));
    bench.damage(layout().header_offset(PageCopy::B), 100);
    let (bench, recovered, report) = bench.reopen();
    assert_eq!((recovered.len(), report.headers_damaged), (1, 1), "A was restored");
    let (_, _, report) = bench.reopen();
    assert_eq!(report.headers_damaged, 0);
}

#[test]
fn further_areas_join_and_a_segment_without_header_keeps_its_blocks() {
    let disk = SharedDisk::new(4 << 20, 3);
    let areas = [AREA, Area { offset: 2 << 20, ..AREA }];
    let now = ClockReading { instant: Instant::now(), unix_s: 9 };
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
        for copy in [PageCopy::A, PageCopy::B] {
            let at = second.header_offset(copy) as usize;
            disk.bytes[at + 100] ^= 1;
        }
    });
    let (_, recovered, report) = open(&areas);
    assert_eq!((recovered.len(), report.headers_damaged), (1, 2));
    assert_eq!(recovered[0].slot, slots + 1);
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
fn inspection_says_what_is_there() {
    let mut bench = Bench::new(config());
    (0..5).for_each(|slot| bench.write(slot, slot as u8));
    bench.log.forget(4);
    bench.run_until_idle();
    bench.damage(layout().header_offset(PageCopy::B), 9);
    bench.damage(layout().table_offset(PageCopy::B, 1), 9);
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
