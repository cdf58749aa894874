//! A look-up allocates nothing. A counting allocator sees a million of them, and a planted box.

#![cfg(not(loom))]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;

use router_radix::{Index, IndexConfig, Tier};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call is handed to the system's allocator unchanged; the counter does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's contract is the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn allocations(work: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.with(Cell::get);
    work();
    ALLOCATIONS.with(Cell::get) - before
}

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
    let during = allocations(|| {
        for _ in 0..1_000_000 {
            held += u64::from(reader.overlaps(black_box(&prompt)).any(workers[9]));
        }
    });
    assert_eq!(held, 39_000_000);
    assert_eq!(during, 0);
    assert_eq!(allocations(|| drop(black_box(Box::new(1)))), 1, "the counter must see a planted box");
}
