//! Submitting and polling copies allocates nothing, counted over 10^5 of each; a planted `Box` must be counted.

#![forbid(unsafe_code)]

use std::sync::Arc;

use dataplane_memory::testing::{Abilities, CopierDouble, CopyFaults, DeviceDouble};
use dataplane_memory::{Copier, CopyDone, HostCopier, PageSize, Slab, SlabLayout, SlotCopy, SlotPool};
use tests_allocations::{Counting, count};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const LAYOUT: SlabLayout = SlabLayout { slot_bytes: 4096, slot_count: 16 };

/// Allocations in `rounds` copies from `from` to `to`.
fn run(copier: &mut dyn Copier, from: &Arc<SlotPool>, to: &Arc<SlotPool>, rounds: u64, planted: bool) -> u64 {
    let mut done: Vec<CopyDone> = Vec::with_capacity(64);
    let (mut accepted, mut ended) = (0, 0);
    let counts = count(|| {
        while ended < rounds {
            while accepted < rounds {
                let Some((from, to)) = from.acquire().zip(to.acquire()) else { break };
                let copy = SlotCopy { token: accepted, from, from_offset: 0, to, to_offset: 64, len: 512 };
                if copier.submit(copy).is_err() {
                    break;
                }
                accepted += 1;
            }
            copier.flush();
            ended += copier.poll(&mut done) as u64;
            assert!(done.drain(..).all(|done| done.result.is_ok()));
        }
        if planted {
            drop(std::hint::black_box(Box::new(1_u8)));
        }
    });
    counts.allocations
}

#[test]
fn copies_allocate_nothing() {
    let host = |name| SlotPool::new(Arc::new(Slab::create(name, LAYOUT, PageSize::Standard).expect("slab")));
    let memory = DeviceDouble::new(LAYOUT.slots_bytes(), Abilities::default());
    let device = SlotPool::new(Arc::new(Slab::on_device("device", LAYOUT, memory).expect("slab")));
    let (here, there) = (host("a"), host("b"));
    let mut double = CopierDouble::new(1, 8, CopyFaults { polls_max: 3, fail_one_in: 0 });
    let mut plain = HostCopier::new(8);
    let cases: [(&mut dyn Copier, _); 2] = [(&mut plain, &there), (&mut double, &device)];
    for (copier, target) in cases {
        run(copier, &here, target, 100, false);
        // `run` allocates the vector of completed copies before it counts.
        assert_eq!(run(copier, &here, target, 100_000, false), 0);
        assert_eq!(run(copier, &here, target, 100, true), 1, "the planted one is seen");
    }
}
