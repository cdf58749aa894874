//! Readers beside a busy writer. What was wholly stored before a look-up and stays counts in full; what was
//! never stored never counts; and when everything has gone again, so has the memory.

#![cfg(not(loom))]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use router_radix::{Index, IndexConfig, Tier};

fn hash(chain: u64, at: u64) -> u64 {
    (chain * 1_000_003 + at + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

const BLOCKS: u64 = 70;

/// The blocks of a chain; groups of eight chains share their first 40.
fn chain(number: u64) -> Vec<u64> {
    (0..BLOCKS).map(|at| if at < 40 { hash(number / 8, at) } else { hash(1000 + number, at) }).collect()
}

fn period() -> Duration {
    let seconds = std::env::var("KVASIR_STRESS_SECONDS").ok().and_then(|value| value.parse().ok());
    Duration::from_secs(seconds.unwrap_or(4))
}

#[test]
fn readers_beside_a_writer_see_what_is_true_throughout() {
    let index = Index::new(IndexConfig::default());
    let (steady, busy, never) = {
        let mut writer = index.write();
        (writer.join().expect("room"), writer.join().expect("room"), writer.join().expect("room"))
    };
    for number in 0..64 {
        let blocks = chain(number);
        // The engine's name of a block is its last hash's, shifted: not the hash itself.
        let keys: Vec<u64> = (0..BLOCKS).map(|at| number * 1000 + at + 1).collect();
        index.write().stored(steady, Tier::Device, None, &keys, &blocks);
    }
    let (stop, lookups) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for thread in 0..2_u64 {
            let (index, stop, lookups) = (&index, &stop, &lookups);
            scope.spawn(move || {
                let mut reader = index.reader().expect("a reader");
                let mut number = thread;
                while !stop.load(Ordering::Relaxed) {
                    number = (number * 5 + 3) % 64;
                    let overlaps = reader.overlaps(&chain(number));
                    assert_eq!(overlaps.device(steady), BLOCKS as u32, "chain {number}");
                    assert_eq!(overlaps.any(never), 0);
                    assert!(overlaps.any(busy) <= BLOCKS as u32 - 10, "the last ten are never its");
                    lookups.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let ends = Instant::now() + period();
        let mut random = 7_u64;
        while Instant::now() < ends {
            for _ in 0..64 {
                random =
                    random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let number = (random >> 33) % 64;
                let len = (random >> 40) % (BLOCKS - 10) + 1;
                let tier = if random >> 50 & 3 == 0 { Tier::Host } else { Tier::Device };
                let blocks = &chain(number)[..len as usize];
                // Equal prefixes have equal names.
                let keys: Vec<u64> = (0..len)
                    .map(|at| if at < 40 { number / 8 * 100 + at + 1 } else { 10_000 + number * 100 + at })
                    .collect();
                let mut writer = index.write();
                match random >> 55 & 7 {
                    0..=2 => drop(writer.stored(busy, tier, None, &keys, blocks)),
                    3 => {
                        let mut reversed = keys.clone();
                        reversed.reverse();
                        writer.removed(busy, tier, &reversed);
                    }
                    4 | 5 => drop(writer.removed(busy, tier, &keys)),
                    6 => {
                        // Off the path, so that the shared runs are split here and there.
                        let odd = [hash(77_777, random >> 20)];
                        let parent = keys[keys.len() / 2];
                        writer.stored(busy, tier, Some(parent), &[random | 1 << 63], &odd);
                    }
                    _ if random >> 20 & 31 == 0 => writer.clear(busy),
                    _ => drop(writer.sweep()),
                }
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    let lookups = lookups.load(Ordering::Relaxed);
    println!("stress: {lookups} look-ups beside the writer");
    assert!(lookups > 1000);
    let mut writer = index.write();
    writer.leave(steady);
    writer.leave(busy);
    while writer.sweep() {}
    assert_eq!((writer.usage().nodes, writer.usage().entries), (0, 0), "{:?}", writer.usage());
}

/// Resident memory of this process.
fn resident_bytes() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").expect("statm");
    pages.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).expect("a number") * 4096
}

/// Waves of 400,000 blocks come and go.
#[test]
fn memory_returns_to_its_start() {
    let waves = std::env::var("KVASIR_SOAK_WAVES").ok().and_then(|value| value.parse().ok()).unwrap_or(6);
    let index = Index::new(IndexConfig::default());
    let members: Vec<_> = (0..16).map(|_| index.write().join().expect("room")).collect();
    let mut after = Vec::new();
    for wave in 0..waves {
        let mut stored = Vec::new();
        for number in 0..5000_u64 {
            let member = members[number as usize % 16];
            let base = wave * 1_000_000 + number;
            let keys: Vec<u64> = (0..80).map(|at| hash(base, at)).collect();
            index.write().stored(member, Tier::Device, None, &keys, &keys);
            stored.push((member, keys));
        }
        let full = index.write().usage();
        assert_eq!(full.entries, 400_000);
        for (number, (member, mut keys)) in stored.into_iter().enumerate() {
            if wave % 2 == 1 && number % 3 > 0 {
                continue;
            }
            keys.reverse();
            index.write().removed(member, Tier::Device, &keys);
        }
        if wave % 2 == 1 {
            members.iter().for_each(|&member| index.write().clear(member));
        }
        while index.write().sweep() {}
        let empty = index.write().usage();
        println!(
            "wave {wave}: {} MiB full, {} KiB after, resident {} MiB",
            full.bytes >> 20,
            empty.bytes >> 10,
            resident_bytes() >> 20
        );
        assert_eq!((empty.nodes, empty.entries), (0, 0));
        after.push((empty.bytes, resident_bytes()));
    }
    let (first, last) = (after[0], after[after.len() - 1]);
    assert!(last.0 <= first.0, "{after:?}");
    assert!(last.1 <= first.1 + (8 << 20), "resident memory grew: {after:?}");
}

/// At its bound the index refuses what is new and stays exact about what it has.
#[test]
fn the_memory_bound_holds() {
    let memory_max = 24 << 20;
    let index = Index::new(IndexConfig { memory_max });
    let member = index.write().join().expect("room");
    let mut reader = index.reader().expect("a reader");
    let mut refused = Vec::new();
    for number in 0..20_000_u64 {
        let keys: Vec<u64> = (0..80).map(|at| hash(number, at)).collect();
        let outcome = index.write().stored(member, Tier::Device, None, &keys, &keys);
        assert!(outcome.refused == 0 || outcome.changed == 0);
        if outcome.refused > 0 {
            refused.push(number);
        }
        let usage = index.write().usage();
        assert!(usage.bytes <= memory_max, "{usage:?}");
    }
    assert!(
        refused.len() > 1000 && refused[0] > 1000,
        "{} refused, from {:?} on",
        refused.len(),
        refused.first()
    );
    let held = |reader: &mut router_radix::Reader, number: u64| {
        let keys: Vec<u64> = (0..80).map(|at| hash(number, at)).collect();
        reader.overlaps(&keys).device(member)
    };
    assert_eq!(held(&mut reader, 0), 80);
    assert_eq!(held(&mut reader, refused[0]), 0);
    index.write().clear(member);
    while index.write().sweep() {}
    let keys: Vec<u64> = (0..80).map(|at| hash(refused[0], at)).collect();
    assert_eq!(
        index.write().stored(member, Tier::Device, None, &keys, &keys).changed,
        80,
        "there is room again"
    );
}
