//! Allocations of all threads are counted together. There is a single test, because a second, concurrent one
//! would be counted too.

#![forbid(unsafe_code)]

use std::hint::black_box;
use std::thread;

use tests_allocations::CountingAllThreads;

#[global_allocator]
static ALLOCATOR: CountingAllThreads = CountingAllThreads::new();

const THREADS: usize = 4;
const BOXES: usize = 1000;

#[test]
fn other_threads_are_counted() {
    let (allocations, live) = (ALLOCATOR.allocations(), ALLOCATOR.live_bytes());
    let boxes = || (0..BOXES).map(|_| black_box(Box::new([0_u8; 64]))).collect::<Vec<_>>();
    let threads: Vec<_> = (0..THREADS).map(|_| thread::spawn(boxes)).collect();
    let held: Vec<_> = threads.into_iter().map(|thread| thread.join().expect("a thread")).collect();
    let made = ALLOCATOR.allocations() - allocations;
    assert!(made >= (THREADS * BOXES) as u64, "{made} allocations");
    let bytes = (THREADS * BOXES * 64) as i64;
    assert!(ALLOCATOR.live_bytes() - live >= bytes, "{} bytes are out", ALLOCATOR.live_bytes() - live);
    let before = ALLOCATOR.live_bytes();
    drop(held);
    assert!(before - ALLOCATOR.live_bytes() >= bytes, "{} bytes came back", before - ALLOCATOR.live_bytes());
}
