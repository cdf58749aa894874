//! A look-up allocates nothing: a counting allocator sees a million of them, and a planted box. What an index has allocated is freed.

#![cfg(not(loom))]
#![forbid(unsafe_code)]

use std::hint::black_box;

use router_radix::{Index, IndexConfig, Tier};
use tests_allocations::{Counting, count};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_million_look_ups_allocate_nothing() {
    let index = Index::new(IndexConfig::default());
    let workers: Vec<_> = (0..70).map(|_| index.write().join().expect("room")).collect();
    let prompt: Vec<u64> = (1..=100).collect();
    for (at, &worker) in workers.iter().enumerate() {
        let held = &prompt[..30 + at];
        let tier = if at % 3 == 0 { Tier::Host } else { Tier::Device };
        index.write().stored(worker, tier, None, held, held);
    }
    let mut reader = index.reader().expect("a reader");
    let mut held = 0;
    let during = count(|| {
        for _ in 0..1_000_000 {
            held += u64::from(reader.overlaps(black_box(&prompt)).any(workers[9]));
        }
    });
    assert_eq!(held, 39_000_000);
    assert_eq!(during.allocations, 0);
    assert_eq!(count(|| drop(black_box(Box::new(1)))).allocations, 1, "the counter must see a planted box");
}

/// Holds prompts with thousands of children of one node, so that directories and pages of children grow and are replaced, and
/// removes the workers again.
fn live_and_end() {
    let index = Index::new(IndexConfig::default());
    let workers: Vec<_> = (0..70).map(|_| index.write().join().expect("room")).collect();
    for number in 0..4000_u64 {
        let held = [1, 2, 1000 + number, 9000 + number];
        index.write().stored(workers[number as usize % 70], Tier::Device, None, &held, &held);
    }
    for worker in workers.into_iter().skip(3) {
        index.write().leave(worker);
    }
}

#[test]
fn an_index_frees_what_it_has_allocated() {
    // Memory that is kept for the thread is allocated once.
    live_and_end();
    let during = count(live_and_end);
    assert!(during.allocations > 1000, "{during:?}");
    assert_eq!(during.allocations, during.deallocations);
}
