//! Look-ups and leases allocate nothing; nor does storing once the vectors have grown. A counting allocator sees
//! every block, and a planted box.
#![cfg(not(loom))]
#![forbid(unsafe_code)]

mod bed;

use std::hint::black_box;

use bed::{ANYBODY, TIER, catalog, identity, store_chain};
use kvstore_catalog::{PolicyKind, Registration};
use tests_allocations::{Counting, count};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn look_up_lease_and_store_allocate_nothing() {
    for policy in [PolicyKind::Lru, PolicyKind::S3Fifo, PolicyKind::Cost] {
        let catalog = catalog(policy, 256);
        store_chain(&catalog, ANYBODY, 1..=128);
        let chain: Vec<_> = (1..=128).map(identity).collect();
        let (mut places, mut leases) = (Vec::with_capacity(128), Vec::with_capacity(128));
        let looking = count(|| {
            for _ in 0..10_000 {
                assert_eq!(catalog.match_prefix(black_box(&chain), &mut places), 128);
                assert_eq!(catalog.lease_prefix(TIER, black_box(&chain), &mut leases), 128);
                assert!(catalog.contains(&chain[7]));
                places.clear();
                leases.clear();
            }
        });
        assert_eq!(looking.allocations, 0, "{policy:?}: 2,560,000 blocks looked up");
        let (mut evicted, mut reserved) = (Vec::with_capacity(128), Vec::with_capacity(128));
        let (mut batch, mut evicting) = (Vec::with_capacity(128), Vec::with_capacity(128));
        let mut block = 1000;
        let storing = count(|| {
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
        assert_eq!(storing.allocations, 0, "{policy:?}: 12,800 blocks stored and evicted");
    }
    assert_eq!(count(|| drop(black_box(Box::new(1)))).allocations, 1, "the counter must see a planted box");
}
