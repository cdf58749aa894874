//! Each fault occurs, is counted, and is detected by the suite of the contract.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use super::*;
use crate::testing::{Conformance, MemoryEngine, MemoryFiles, Random, conformance, random_requests};
use crate::{Buffer, Completion, IoEngine, IoErrorKind, Operation, PageBuffer, Request};

const FILE_BYTES: usize = 1 << 20;

fn engine(files: &MemoryFiles, faults: Faults) -> FaultyEngine<MemoryEngine> {
    FaultyEngine::new(MemoryEngine::new(files, 4096, 256 << 10, 16), faults)
}

fn run(engine: &mut dyn IoEngine, operation: Operation, offset: u64, fill: u8, bytes: usize) -> Completion {
    let mut buffer = PageBuffer::zeroed(bytes);
    buffer.fill(fill);
    let request = Request { id: 9, operation, file: 0, offset, buffer: Buffer::Pages(buffer) };
    assert!(engine.submit(request).is_ok(), "room");
    let mut arrived = Vec::new();
    for _ in 0..1000 {
        engine.wait(Some(std::time::Instant::now() + Duration::from_millis(1))).expect("wait");
        if engine.poll(1, &mut arrived) == 1 {
            return arrived.pop().expect("one");
        }
    }
    panic!("no completion");
}

#[test]
fn without_faults_and_with_delays_it_keeps_the_contract() {
    for (delay, track_unsynced) in [(0.0, false), (0.3, false), (0.2, true)] {
        let files = MemoryFiles::new(&[2 << 20, FILE_BYTES]);
        let faults = Faults { delay, reorder: delay > 0.0, track_unsynced, ..Faults::default() };
        let mut open = || Box::new(engine(&files, faults.clone())) as Box<dyn IoEngine>;
        conformance(&mut open, &Conformance { seed: 5, ..Conformance::default() });
    }
}

/// The suite must be able to fail.
#[test]
fn the_suite_catches_each_fault() {
    let none = Faults::default();
    let planted = [
        ("torn", Faults { torn_write: 0.02, ..none.clone() }),
        ("misdirected", Faults { misdirected_write: 0.02, ..none.clone() }),
        ("lost", Faults { lost_write: 0.02, ..none.clone() }),
        ("rot at rest", Faults { rot_at_rest: 0.02, ..none.clone() }),
        ("rot on read", Faults { rot_on_read: 0.02, ..none.clone() }),
        ("media error", Faults { media_error: 0.02, ..none.clone() }),
        ("no space", Faults { no_space: 0.02, ..none.clone() }),
        ("gone", Faults { device_gone: 0.002, ..none.clone() }),
    ];
    for (name, faults) in planted {
        let files = MemoryFiles::new(&[FILE_BYTES]);
        let mut open = || Box::new(engine(&files, faults.clone())) as Box<dyn IoEngine>;
        let options = Conformance { seed: 3, ..Conformance::default() };
        let caught = catch_unwind(AssertUnwindSafe(|| random_requests(&mut open, &options)));
        assert!(caught.is_err(), "{name}: the suite saw nothing");
    }
}

#[test]
fn writes_go_wrong_as_told() {
    let none = Faults::default();
    let old = vec![7; FILE_BYTES];
    let changed = |files: &MemoryFiles| -> Vec<usize> {
        (0..FILE_BYTES).filter(|&at| files.bytes()[0][at] != 7).collect()
    };
    for seed in 0..40 {
        let files = MemoryFiles::new(&[FILE_BYTES]);
        let attempt = |faults: Faults| {
            files.bytes()[0].copy_from_slice(&old);
            let mut engine = engine(&files, Faults { seed, ..faults });
            let completion = run(&mut engine, Operation::Write, 65536, 9, 8192);
            assert!(completion.result.is_ok(), "acknowledged");
            let Buffer::Pages(pages) = &completion.buffer else { panic!("its own buffer") };
            assert!(pages.len() == 8192 && pages.iter().all(|&byte| byte == 9), "the buffer is untouched");
            (changed(&files), engine.counters())
        };
        let (landed, counters) = attempt(Faults { torn_write: 1.0, ..none.clone() });
        assert_eq!(counters.torn_writes, 1);
        assert!(landed.len() < 8192 && landed.len().is_multiple_of(SECTOR_BYTES), "seed {seed}");
        assert!(landed.iter().all(|at| (65536..65536 + 8192).contains(at)));

        let (landed, counters) = attempt(Faults { lost_write: 1.0, ..none.clone() });
        assert_eq!((landed.len(), counters.lost_writes), (0, 1));

        let (landed, counters) = attempt(Faults { misdirected_write: 1.0, ..none.clone() });
        assert_eq!((landed.len(), counters.misdirected_writes), (8192, 1));
        assert!(landed[0].is_multiple_of(4096) && landed[0] != 65536, "elsewhere: {}", landed[0]);

        let (landed, counters) = attempt(Faults { rot_at_rest: 1.0, ..none.clone() });
        assert_eq!(counters.rotten_writes, 1);
        let wrong: Vec<u8> = landed.iter().map(|&at| files.bytes()[0][at] ^ 9).filter(|&x| x != 0).collect();
        let missing = 8192 - landed.len();
        assert!(wrong.iter().map(|byte| byte.count_ones()).sum::<u32>() as usize + missing == 1, "one bit");
    }
}

#[test]
fn reads_and_the_device_go_wrong_as_told() {
    let files = MemoryFiles::new(&[FILE_BYTES]);
    let mut faulty = engine(&files, Faults { rot_on_read: 1.0, ..Faults::default() });
    let completion = run(&mut faulty, Operation::Read, 0, 1, 4096);
    let Buffer::Pages(pages) = completion.buffer else { panic!("its own buffer") };
    assert_eq!(pages.iter().map(|byte| byte.count_ones()).sum::<u32>(), 1);
    assert_eq!(faulty.counters().rotten_reads, 1);

    faulty.set_faults(Faults::default());
    faulty.spoil(0, 8192, 4096);
    let error = run(&mut faulty, Operation::Read, 4096, 1, 8192).result.expect_err("spoilt");
    assert_eq!(error.kind, IoErrorKind::Media);
    assert!(run(&mut faulty, Operation::Read, 0, 1, 8192).result.is_ok(), "the rest is not lost");
    assert!(run(&mut faulty, Operation::Write, 8192, 1, 4096).result.is_ok());
    assert!(run(&mut faulty, Operation::Read, 4096, 1, 8192).result.is_ok(), "healed by the write");
    assert_eq!(faulty.counters().media_errors, 1);

    faulty.set_faults(Faults { no_space: 1.0, ..Faults::default() });
    let error = run(&mut faulty, Operation::Write, 0, 1, 4096).result.expect_err("full");
    assert_eq!((error.kind, faulty.counters().no_space), (IoErrorKind::NoSpace, 1));

    faulty.set_faults(Faults { device_gone: 1.0, ..Faults::default() });
    let error = run(&mut faulty, Operation::Read, 0, 1, 4096).result.expect_err("gone");
    assert_eq!(error.kind, IoErrorKind::Device);
    faulty.set_faults(Faults::default());
    assert!(run(&mut faulty, Operation::Read, 0, 1, 4096).result.is_err(), "it stays away");
    assert_eq!(faulty.sync(0).expect_err("gone").kind, IoErrorKind::Device);
    faulty.set_gone(false);
    assert!(run(&mut faulty, Operation::Read, 0, 1, 4096).result.is_ok());
}

#[test]
fn equal_seeds_mean_equal_faults() {
    let outcome = |seed| {
        let files = MemoryFiles::new(&[FILE_BYTES]);
        let faults =
            Faults { seed, torn_write: 0.3, lost_write: 0.2, misdirected_write: 0.2, ..Faults::default() };
        let mut engine = engine(&files, faults);
        for step in 0..50 {
            run(&mut engine, Operation::Write, (step % 17) << 14, step as u8, 16384).result.expect("written");
        }
        (engine.counters(), files.bytes()[0].clone())
    };
    assert!(outcome(1) == outcome(1));
    assert!(outcome(1) != outcome(2));
}

/// After a power cut each sector has contents that were written to it, and guaranteed writes are intact.
#[test]
fn a_power_cut_spares_what_was_guaranteed() {
    let mut lost_in_all = 0;
    for seed in 0..60 {
        let spares = if seed % 2 == 0 { PowerCut::SparesCompleted } else { PowerCut::SparesSynced };
        let files = MemoryFiles::new(&[64 << 10]);
        let mut engine = engine(&files, Faults { seed, track_unsynced: true, ..Faults::default() });
        let mut random = Random(seed);
        // For each block: values since the last guarantee, the guaranteed one first.
        let mut possible: Vec<Vec<u8>> = vec![vec![0]; 16];
        for value in 1..=30_u8 {
            let block = random.below(15);
            run(&mut engine, Operation::Write, block * 4096, value, 8192).result.expect("written");
            for at in [block as usize, block as usize + 1] {
                match spares {
                    PowerCut::SparesCompleted => possible[at] = vec![value],
                    PowerCut::SparesSynced => possible[at].push(value),
                }
            }
            if random.chance(0.1) {
                engine.sync(0).expect("sync");
                possible.iter_mut().for_each(|values| *values = vec![*values.last().expect("one")]);
            }
        }
        // A write in flight.
        let mut buffer = PageBuffer::zeroed(4096);
        buffer.fill(99);
        let request =
            Request { id: 1, operation: Operation::Write, file: 0, offset: 0, buffer: Buffer::Pages(buffer) };
        assert!(engine.submit(request).is_ok());
        engine.flush().expect("flush");
        let mut none = Vec::new();
        assert_eq!(engine.poll(0, &mut none), 0);
        possible[0].push(99);
        lost_in_all += engine.power_cut(spares).expect("cut");
        assert_eq!((engine.in_flight(), engine.poll(9, &mut none)), (0, 0), "no completion survives");
        let bytes = files.bytes();
        for (block, values) in possible.iter().enumerate() {
            for sector in bytes[0][block * 4096..(block + 1) * 4096].chunks(SECTOR_BYTES) {
                assert!(sector.iter().all(|&byte| byte == sector[0]), "sectors are whole");
                assert!(
                    values.contains(&sector[0]),
                    "block {block} has {}, not {values:?} (seed {seed})",
                    sector[0]
                );
            }
        }
    }
    assert!(lost_in_all > 60, "{lost_in_all} writes lost or torn: the cuts do something");
}
