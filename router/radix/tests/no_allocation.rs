//! A look-up allocates nothing. A counting allocator sees a million of them, and a planted box.

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
