//! Allocations that are counted for a thread, and those that are not.

#![forbid(unsafe_code)]

use std::hint::black_box;
use std::thread;

use tests_allocations::{Counting, Counts, count};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn counts(allocations: u64, deallocations: u64, allocated_bytes: u64) -> Counts {
    Counts { allocations, deallocations, allocated_bytes }
}

#[test]
fn blocks_and_bytes_are_counted() {
    assert_eq!(count(|| {}), counts(0, 0, 0));
    assert_eq!(count(|| drop(black_box(Box::new(1_u64)))), counts(1, 1, 8), "a box");
    assert_eq!(count(|| drop(black_box(vec![0_u8; 100]))), counts(1, 1, 100), "zeroed");
    let mut held = black_box(Vec::<u8>::with_capacity(10));
    assert_eq!(count(|| held.reserve_exact(30)), counts(1, 1, 30), "a block that grows");
    held.push(1);
    assert_eq!(count(|| held.shrink_to_fit()), counts(1, 1, 1), "a block that shrinks");
    assert_eq!(count(move || drop(black_box(held))), counts(0, 1, 0), "what was made before is given back");
}

#[test]
fn each_thread_has_its_own() {
    let spawned = thread::spawn(|| {
        let made: Vec<_> = (0..1000).map(|_| black_box(Box::new(7_u8))).collect();
        (Counts::of_this_thread(), made)
    });
    let (theirs, made) = spawned.join().expect("a thread");
    assert!(theirs.allocations > 1000, "{theirs:?}");
    // The deallocation counts for the thread that drops the box.
    assert_eq!(count(move || drop(made)), counts(0, 1001, 0));
    let ours = count(|| {
        let other = thread::spawn(|| count(|| drop(black_box(Box::new(1_u8)))));
        assert_eq!(other.join().expect("a thread"), counts(1, 1, 1));
        (0..1000).for_each(|_| drop(black_box(Box::new(1_u8))));
    });
    // Starting a thread allocates on the starting thread.
    assert!((1000..1100).contains(&ours.allocations), "{ours:?}");
}
