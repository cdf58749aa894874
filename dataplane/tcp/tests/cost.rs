//! Cost of an operation in allocations and system calls.

#![forbid(unsafe_code)]

mod nodes;

use dataplane_fabric::{Event, Fabric, Operation, Priority, SlotRange, WorkRequest};
use dataplane_tcp::{BATCH_FRAMES_MAX, TcpConfig};
use nodes::{Nodes, target, write};
use tests_allocations::{Counting, count};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Writes of several sizes from a to b, the last of each batch with an immediate and a completion, and a read.
fn write_batches(nodes: &mut Nodes, batches: u32) {
    let (from, to) = (nodes.pool_a.acquire().expect("slot"), nodes.pool_b.acquire().expect("slot"));
    for batch in 0..batches {
        for at in 0..BATCH_FRAMES_MAX as u32 {
            let is_last = at + 1 == BATCH_FRAMES_MAX as u32;
            let len = [16, 600, 4096, 20_000][at as usize % 4];
            let operation = write(&from, &to, len, is_last.then_some(batch));
            nodes.post(Priority::ALL[batch as usize % 2], u64::from(is_last), operation);
        }
        let (slot, from) = (from.clone(), target(&to));
        let into = SlotRange { slot, offset: 0, len: [4096, 20_000][batch as usize % 2] };
        nodes.post(Priority::Urgent, 0, Operation::Read { into, from, rows: None });
        nodes.until("a batch", |nodes| !nodes.seen_a.is_empty() && !nodes.seen_b.is_empty());
        nodes.forget();
    }
}

#[test]
fn writes_and_reads_allocate_nothing() {
    for connections_per_peer in [1, 3] {
        let config = TcpConfig { connections_per_peer, ..TcpConfig::default() };
        let mut nodes = Nodes::new(&config, 32 << 10, 4);
        write_batches(&mut nodes, 20);
        let batches = 100_000 / BATCH_FRAMES_MAX as u32 + 1;
        let here = count(|| write_batches(&mut nodes, batches)).allocations;
        println!("{connections_per_peer} connections: {here} allocations in 100,000 writes");
        assert_eq!(here, 0, "allocations of both sides");
    }
    let planted = count(|| drop(std::hint::black_box(Box::new(7_u64))));
    assert_eq!(planted.allocations, 1, "a planted allocation must be counted");
}

#[test]
fn a_batch_is_one_system_call() {
    // With several connections, large writes take one call too, but several sends.
    let config = TcpConfig { connections_per_peer: 1, ..TcpConfig::default() };
    let mut nodes = Nodes::new(&config, 32 << 10, 4);
    write_batches(&mut nodes, 4);
    let (from, to) = (nodes.pool_a.acquire().expect("slot"), nodes.pool_b.acquire().expect("slot"));
    let counters = nodes.a.counters();
    for round in 0..20 {
        let (calls, frames) = (counters.system_calls.get(), counters.sent_frames.get());
        for _ in 0..BATCH_FRAMES_MAX {
            nodes.post(Priority::Urgent, 0, write(&from, &to, 1000, None));
        }
        nodes.a.flush();
        let mut events: Vec<Event> = Vec::new();
        nodes.a.poll(1, &mut events);
        assert_eq!(counters.system_calls.get() - calls, 1, "round {round}: calls");
        assert_eq!(counters.sent_frames.get() - frames, BATCH_FRAMES_MAX as u64, "round {round}: frames");
        nodes.a.post(WorkRequest::message(nodes.to_b, Box::new([1]))).expect("room");
        nodes.until("the batch at b", |nodes| !nodes.seen_b.is_empty());
        nodes.forget();
    }
    // An idle node makes no system call.
    nodes.step();
    let calls = counters.system_calls.get();
    let mut events = Vec::new();
    for _ in 0..1000 {
        nodes.a.poll(16, &mut events);
    }
    assert_eq!(counters.system_calls.get(), calls);
}
