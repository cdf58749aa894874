//! A write allocates nothing, as counted by an allocator. A process of its own, since it counts all allocations.

#![forbid(unsafe_code)]

mod support;

use dataplane_fabric::{Event, Fabric, Operation, Priority, Rows, Source, Target, WorkRequest};
use dataplane_memory::SlabKind;
use dataplane_verbs::VerbsConfig;
use dataplane_verbs::testing::SoftwareDevice;
use support::{Two, small};
use tests_allocations::{Counting, count};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// `count` writes in rounds, every kind of them: plain, in rows, inline, with an immediate, on both lanes.
fn writes(two: &mut Two, count: u64) {
    let (mut seen_a, mut seen_b): (Vec<Event>, Vec<Event>) =
        (std::mem::take(&mut two.seen_a), std::mem::take(&mut two.seen_b));
    let target = Target { slab: SlabKind::Host, slot: two.target.slot(), generation: 0, offset: 0 };
    let mut done = 0;
    for first in (0..count).step_by(16) {
        for id in first..(first + 16).min(count) {
            let slot = || Source::Slot { slot: two.source.clone(), offset: 0, len: 256 };
            let rows = Some(Rows { bytes: 64, local_stride: 128, remote_stride: 64 });
            let (source, rows, immediate) = match id % 4 {
                0 => (slot(), None, None),
                1 => (slot(), rows, None),
                2 => (Source::Inline { bytes: [7; 16], len: 16 }, None, None),
                _ => (slot(), None, Some(9)),
            };
            let operation = Operation::Write { source, target, rows, immediate };
            let priority = Priority::ALL[(id / 4) as usize % 2];
            two.a.post(WorkRequest { id: id + 1, peer: two.to_b, priority, operation }).expect("room");
        }
        two.a.flush();
        while done < (first + 16).min(count) {
            two.b.poll(64, &mut seen_b);
            two.a.poll(64, &mut seen_a);
            done += seen_a.iter().filter(|event| matches!(event, Event::Completed { .. })).count() as u64;
            seen_a.clear();
            seen_b.clear();
        }
    }
    (two.seen_a, two.seen_b) = (seen_a, seen_b);
}

#[test]
fn writes_allocate_nothing() {
    let (device_a, device_b) = (SoftwareDevice::new(), SoftwareDevice::new());
    let config = VerbsConfig { inline_bytes: 64, ..small() };
    let mut two =
        Two::new(device_a.open().expect("open"), device_b.open().expect("open"), config.clone(), config);
    (two.seen_a, two.seen_b) = (Vec::with_capacity(1024), Vec::with_capacity(1024));
    writes(&mut two, 10_000);
    assert_eq!(count(|| writes(&mut two, 100_000)).allocations, 0);
    let planted = count(|| {
        writes(&mut two, 100);
        drop(std::hint::black_box(Box::new(1_u8)));
    });
    assert_eq!(planted.allocations, 1, "the rig must see one");
}
