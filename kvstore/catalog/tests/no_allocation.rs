//! Look-ups and leases allocate nothing; nor does storing once the vectors have grown. A counting allocator sees
//! every block, and a planted box.
#![cfg(not(loom))]

mod bed;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;

use bed::{ANYBODY, TIER, catalog, identity, store_chain};
use kvstore_catalog::{PolicyKind, Registration};

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
fn look_up_lease_and_store_allocate_nothing() {
    for policy in [PolicyKind::Lru, PolicyKind::S3Fifo, PolicyKind::Cost] {
        let catalog = catalog(policy, 256);
        store_chain(&catalog, ANYBODY, 1..=128);
        let chain: Vec<_> = (1..=128).map(identity).collect();
        let (mut places, mut leases) = (Vec::with_capacity(128), Vec::with_capacity(128));
        let looking = allocations(|| {
            for _ in 0..10_000 {
                assert_eq!(catalog.match_prefix(black_box(&chain), &mut places), 128);
                assert_eq!(catalog.lease_prefix(TIER, black_box(&chain), &mut leases), 128);
                assert!(catalog.contains(&chain[7]));
                places.clear();
                leases.clear();
            }
        });
        assert_eq!(looking, 0, "{policy:?}: 2,560,000 blocks looked up");
        let (mut evicted, mut reserved) = (Vec::with_capacity(128), Vec::with_capacity(128));
        let (mut batch, mut evicting) = (Vec::with_capacity(128), Vec::with_capacity(128));
        let mut block = 1000;
        let storing = allocations(|| {
            for _ in 0..100 {
                evicted.clear();
                catalog.reserve(TIER, 128, ANYBODY, &mut evicted, &mut reserved);
                batch.extend(reserved.drain(..).map(|slot| {
                    block += 1;
                    let complete = slot.fill().complete(block, 1);
                    Registration { complete, identity: identity(block), parent: None, recompute_seconds: 1.0 }
                }));
                assert_eq!(catalog.register(&mut batch).new, 128);
                catalog.evict(TIER, 100, &mut evicting);
                assert_eq!(catalog.finish(&mut evicting), 100);
            }
        });
        assert_eq!(storing, 0, "{policy:?}: 12,800 blocks stored and evicted");
    }
    assert_eq!(allocations(|| drop(black_box(Box::new(1)))), 1, "the counter must see a planted box");
}
