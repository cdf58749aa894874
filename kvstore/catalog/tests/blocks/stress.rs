//! Readers lease while writers register, evict and remove: what a leased slot holds is what was asked for.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use kvstore_catalog::{Catalog, PolicyKind, Registration};

use crate::bed::{ANYBODY, Random, TIER, catalog, identity, number};

const SLOTS: u32 = 64;
const CHAINS: u64 = 24;
const CHAIN: u64 = 6;
const WORDS: usize = 4;
const ROUNDS: u64 = 30_000;

/// Contents of the slots: the block's number, several times, so that a slot written meanwhile is seen.
type Slots = [[AtomicU64; WORDS]; SLOTS as usize];

fn block(chain: u64, at: u64) -> u64 {
    1 + chain * CHAIN + at
}

fn write(catalog: &Catalog, slots: &Slots, mut random: Random, leave_early: bool) -> u64 {
    let (mut evicted, mut reserved, mut batch, mut evicting) = (vec![], vec![], vec![], vec![]);
    let mut stored = 0;
    for round in 0..ROUNDS {
        let chain = random.draw(CHAINS);
        evicted.clear();
        catalog.reserve(TIER, CHAIN as usize, ANYBODY, &mut evicted, &mut reserved);
        for (at, slot) in reserved.drain(..).enumerate() {
            let number = block(chain, at as u64);
            let filling = slot.fill();
            slots[filling.slot() as usize].iter().for_each(|word| word.store(number, Ordering::Relaxed));
            let parent = (at > 0).then(|| identity(number - 1));
            let complete = filling.complete(number, 8);
            batch.push(Registration { complete, identity: identity(number), parent, recompute_seconds: 1.0 });
        }
        stored += catalog.register(&mut batch).new as u64;
        match random.draw(8) {
            0 => drop(catalog.remove(TIER, &identity(block(chain, random.draw(CHAIN))))),
            1 => {
                catalog.evict(TIER, 3, &mut evicting);
                if leave_early {
                    evicting.clear();
                }
                catalog.finish(&mut evicting);
            }
            2 if round % 1000 == 0 => drop(catalog.clear(TIER)),
            _ => {}
        }
    }
    stored
}

fn read(catalog: &Catalog, slots: &Slots, mut random: Random, stop: &AtomicBool) -> u64 {
    let mut leases = Vec::new();
    let mut read = 0;
    while !stop.load(Ordering::Relaxed) {
        let chain = random.draw(CHAINS);
        let wanted: Vec<_> = (0..CHAIN).map(|at| identity(block(chain, at))).collect();
        let held = leases.len();
        catalog.lease_prefix(TIER, &wanted, &mut leases);
        for (at, lease) in leases[held..].iter().enumerate() {
            assert_eq!(lease.identity(), wanted[at]);
        }
        // Leases of earlier rounds too.
        for lease in &leases {
            let number = number(&lease.identity());
            for word in &slots[lease.slot() as usize] {
                assert_eq!(word.load(Ordering::Relaxed), number, "slot {}", lease.slot());
            }
            assert_eq!(lease.checksum(), number);
            read += 1;
        }
        if random.draw(4) > 0 || leases.len() > 24 {
            leases.clear();
        }
    }
    read
}

#[test]
fn a_leased_slot_holds_its_block() {
    for (policy, seed) in [(PolicyKind::Lru, 31), (PolicyKind::S3Fifo, 32), (PolicyKind::Cost, 33)] {
        let catalog = catalog(policy, SLOTS);
        let slots: Slots = std::array::from_fn(|_| std::array::from_fn(|_| AtomicU64::new(0)));
        let stop = AtomicBool::new(false);
        let (stored, read) = thread::scope(|scope| {
            let (catalog, slots, stop) = (&catalog, &slots, &stop);
            let readers: Vec<_> = (0..3)
                .map(|reader| scope.spawn(move || read(catalog, slots, Random(seed + 100 * reader), stop)))
                .collect();
            let writers: Vec<_> = (1..3)
                .map(|writer| scope.spawn(move || write(catalog, slots, Random(seed * writer), writer == 1)))
                .collect();
            let stored: u64 = writers.into_iter().map(|writer| writer.join().expect("writer")).sum();
            stop.store(true, Ordering::Relaxed);
            (stored, readers.into_iter().map(|reader| reader.join().expect("reader")).sum::<u64>())
        });
        println!("{policy:?}, seed {seed}: {stored} blocks stored, {read} read under a lease");
        assert!(stored > ROUNDS && read > 1000, "too little happened");
        catalog.debug_check();
        catalog.clear(TIER);
        catalog.debug_check();
        assert_eq!(catalog.usage(TIER).map(|usage| usage.free), Some(SLOTS), "no slot is lost");
    }
}
