//! Writes and reads allocate nothing, counted over 10^5 of each; a planted `Box` must be counted.

#![forbid(unsafe_code)]

use std::sync::Arc;

use dataplane_fabric::testing::pool;
use dataplane_fabric::{
    Event, Fabric, Full, Operation, Priority, Rows, SlotRange, Source, Target, WorkRequest,
};
use dataplane_shm::{ShmConfig, ShmFabric};
use tests_allocations::{Counting, count};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn writes_and_reads_allocate_nothing() {
    let (pool_a, pool_b) = (pool("a"), pool("b"));
    let address = format!("@kvasir-shm-allocation-{}", std::process::id());
    let mut a = ShmFabric::new(Arc::clone(pool_a.slab()), None, ShmConfig::default()).expect("a");
    let mut b = ShmFabric::new(Arc::clone(pool_b.slab()), Some(&address), ShmConfig::default()).expect("b");
    let peer = a.connect(&address).expect("connect");
    let mut events = Vec::with_capacity(1024);
    while !events.contains(&Event::Connected { peer }) {
        a.poll(16, &mut events);
        b.poll(16, &mut events);
    }
    let here = pool_a.acquire().expect("a slot");
    let there = pool_b.acquire().expect("a slot");
    let target = Target::of(&there, 0);
    let rows = Rows { bytes: 64, local_stride: 128, remote_stride: 192 };
    let mut run = |rounds: u64, planted: bool| {
        let (mut completed, mut immediates) = (0, 0);
        let counts = count(|| {
            for id in 1..=rounds {
                let source = Source::Slot { slot: here.clone(), offset: 0, len: 1024 };
                let rows = (id % 3 == 0).then_some(rows);
                let write = Operation::Write { source, target, rows, immediate: Some(id as u32) };
                let into = SlotRange { slot: here.clone(), offset: 64, len: 1024 };
                let read = Operation::Read { into, from: target, rows };
                for operation in [write, read] {
                    let priority = Priority::ALL[id as usize % 2];
                    let posted = a.post(WorkRequest { id, peer, priority, operation });
                    assert!(!matches!(posted, Err(Full(_))), "the queues are emptied each time");
                }
                a.flush();
                events.clear();
                b.poll(64, &mut events);
                a.poll(64, &mut events);
                for event in &events {
                    completed += u64::from(matches!(event, Event::Completed { .. }));
                    immediates += u64::from(matches!(event, Event::Immediate { .. }));
                }
                if planted && id == 50 {
                    drop(std::hint::black_box(Box::new(id)));
                }
            }
        });
        assert_eq!((completed, immediates), (2 * rounds, rounds));
        counts.allocations
    };
    run(100, false);
    let allocations = run(100_000, false);
    println!("allocations in 100,000 writes and 100,000 reads: {allocations}");
    assert_eq!(allocations, 0);
    assert_eq!(run(100, true), 1, "the planted one is seen");
}
