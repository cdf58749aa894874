//! Bytes that are not what was written: they are misses, and never a wrong block.

use std::time::Instant;

use super::{AREA, Bench, DISK_BYTES, GOOD, SLOT_BYTES, TIMEOUT, config, layout, miss, open};
use crate::format::{PAGE_BYTES, PageHeader, PageKind, seal_page};
use crate::layout::PageCopy;
use crate::testing::{Faults, Random, SharedDisk, pool};
use crate::{DiskCompletion, MissReason, ReadCheck, ReadOutcome, Recovered, Usage, inspect};

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
    // The same bytes, written again under the next generation, are lost on the way: the disk holds stale bytes
    // that are equal. This is the one case in which stale bytes are right.
    bench.write(1, 7);
    assert_eq!(bench.read(1, 7), GOOD);
    // The same bytes in a slot that holds another block.
    bench.disk.with(|disk| disk.bytes[place(2)..place(3)].copy_from_slice(&first));
    assert_eq!(bench.read(2, 8), miss(MissReason::Damaged));
}

#[test]
fn a_torn_table_page_loses_nothing_that_was_there_before() {
    for copy in [PageCopy::A, PageCopy::B] {
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
    // Byte 63 of each first record is covered by the page's checksum only.
    for copy in [PageCopy::A, PageCopy::B] {
        bench.damage(layout().table_offset(copy, 0) + (layout().record_range(0).start + 10) as u64, 2);
    }
    let (mut bench, recovered, report) = bench.reopen();
    assert_eq!((recovered.len(), report.records_salvaged, report.pages_damaged), (1, 1, 2), "{report:?}");
    assert_eq!(bench.read(30, 2), GOOD);
}

#[test]
fn a_salvaged_record_is_a_tombstone_if_there_is_one_of_its_generation() {
    // The copies are read in an order that the seed draws.
    for seed in 0..16 {
        let mut bench = Bench::on(SharedDisk::new(DISK_BYTES, seed), config());
        bench.write(30, 2);
        assert!(bench.log.forget(30));
        bench.run_until_idle();
        for copy in [PageCopy::A, PageCopy::B] {
            bench.damage(layout().table_offset(copy, 0) + (layout().record_range(0).start + 10) as u64, 2);
        }
        let (_, recovered, report) = bench.reopen();
        assert!(recovered.is_empty() && report.pages_damaged == 2, "seed {seed}: {report:?}");
    }
}

/// Pages with good checksums and any contents, as an attacker with write access to the disk can make them.
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
            let copy = if random.per_mille(500) { PageCopy::A } else { PageCopy::B };
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
            bench.log.read(block.slot, block.identity, memory, ReadCheck::Log, 0).expect("accepted");
            reads += 1;
        }
        for done in bench.run_until_idle() {
            if let DiskCompletion::Read {
                outcome: ReadOutcome::Verified { bytes },
                memory: Some(memory),
                ..
            } = done
            {
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
