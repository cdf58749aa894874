//! The hot path of io_uring allocates nothing: counted for reads and writes, from slots and from memory of their own.

#![forbid(unsafe_code)]

use std::sync::Arc;

use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool};
use kvstore_io::files::open_file;
use kvstore_io::uring::{self, RingConfig, UringEngine};
use kvstore_io::{Buffer, Completion, IoEngine, Operation, Request};
use tests_allocations::{Counting, count};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const DEPTH: u64 = 16;

/// Runs `count` requests, with up to `DEPTH` in flight.
fn run(
    engine: &mut UringEngine,
    pool: &Arc<SlotPool>,
    arrived: &mut Vec<Completion>,
    count: u64,
    box_each: bool,
) {
    let (mut sent, mut done) = (0, 0);
    while done < count {
        while sent < count && engine.in_flight() < DEPTH as usize {
            if box_each {
                drop(std::hint::black_box(Box::new(sent)));
            }
            let slot = pool.acquire().expect("a slot");
            let operation = if sent % 3 == 0 { Operation::Write } else { Operation::Read };
            let buffer = Buffer::Slot { slot, offset: 0, len: 4096 };
            let request = Request { id: sent, operation, file: 0, offset: sent % 256 * 4096, buffer };
            assert!(engine.submit(request).is_ok(), "room");
            sent += 1;
        }
        engine.wait(None).expect("wait");
        engine.poll(usize::MAX, arrived);
        for completion in arrived.drain(..) {
            assert!(completion.result.is_ok());
            done += 1;
        }
    }
}

#[test]
fn requests_allocate_nothing() {
    let path = std::env::temp_dir().join(format!("kvasir-allocations-{}", std::process::id()));
    let files = open_file(&path, 1 << 20, true, true).expect("a file");
    std::fs::remove_file(&path).expect("remove");
    let config = RingConfig { depth: DEPTH as usize, ..RingConfig::default() };
    let mut engine = uring::open(files, &config).expect("io_uring");
    let layout = SlabLayout { slot_bytes: 4096, slot_count: DEPTH as u32 };
    let slab = Arc::new(Slab::create("allocations", layout, PageSize::Standard).expect("slab"));
    let pool = SlotPool::new(Arc::clone(&slab));
    let mut arrived = Vec::with_capacity(DEPTH as usize);
    let requests = 20_000;
    for registered in [false, true] {
        if registered {
            engine.register(&slab).expect("register");
        }
        run(&mut engine, &pool, &mut arrived, 1000, false);
        let before = engine.enters();
        let allocations = count(|| run(&mut engine, &pool, &mut arrived, requests, false)).allocations;
        let enters = engine.enters() - before;
        println!(
            "registered {registered}: {requests} requests, {allocations} allocations, {enters} system calls"
        );
        assert_eq!(allocations, 0);
        assert!(enters <= requests + 16, "more than one system call for a request");
    }
    let planted = count(|| run(&mut engine, &pool, &mut arrived, 1000, true));
    assert_eq!(planted.allocations, 1000, "a planted allocation is counted");
}
