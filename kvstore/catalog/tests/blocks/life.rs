//! The life of a block: states that are dropped, leaf-first, leases, quotas, removal, restart.

use kvstore_catalog::{
    Catalog, CatalogConfig, CatalogError, PolicyKind, Registered, Registration, SlotOrder, TenantId,
    TenantQuota, TierConfig, TierIndex,
};

use crate::bed::{
    ANYBODY, Random, TIER, catalog, contents, evict, identity, number, reserve, store, store_chain,
};

const POLICIES: [PolicyKind; 3] = [PolicyKind::Lru, PolicyKind::S3Fifo, PolicyKind::Cost];

fn free(catalog: &Catalog) -> u32 {
    catalog.usage(TIER).expect("the tier").free
}

#[test]
fn every_state_that_is_dropped_gives_its_slot_back() {
    let catalog = catalog(PolicyKind::Lru, 4);
    drop(reserve(&catalog, ANYBODY).0.expect("a slot"));
    assert_eq!(free(&catalog), 4);
    drop(reserve(&catalog, ANYBODY).0.expect("a slot").fill());
    assert_eq!(free(&catalog), 4);
    let complete = reserve(&catalog, ANYBODY).0.expect("a slot").fill().complete(1, 64);
    assert_eq!(free(&catalog), 3);
    drop(complete);
    assert_eq!(free(&catalog), 4);
    assert_eq!(store(&catalog, ANYBODY, 1, None), Some(Registered::New));
    assert_eq!(store(&catalog, ANYBODY, 1, None), Some(Registered::Present));
    assert_eq!(free(&catalog), 3, "a second copy gives its slot back");
    let mut evicting = Vec::new();
    assert_eq!(catalog.evict(TIER, 9, &mut evicting), 1);
    assert!(!catalog.contains(&identity(1)), "what is going is not found");
    assert!(catalog.lease(TIER, &identity(1)).is_none());
    assert_eq!((evicting[0].checksum(), evicting[0].bytes()), (1, 64));
    evicting.clear();
    assert!(catalog.contains(&identity(1)), "an eviction that is dropped puts the block back");
    catalog.debug_check();
    assert_eq!(evict(&catalog, 9), [1]);
    assert_eq!(free(&catalog), 4);
    catalog.debug_check();
}

#[test]
fn a_batch_registers_and_what_the_caller_sees_is_what_it_stored() {
    let catalog = catalog(PolicyKind::default(), 64);
    let (mut evicted, mut reserved) = (Vec::new(), Vec::new());
    assert_eq!(catalog.reserve(TIER, 40, ANYBODY, &mut evicted, &mut reserved), 40);
    let slots: Vec<u32> = reserved.iter().map(|slot| slot.slot()).collect();
    let entry = |(at, slot): (usize, kvstore_catalog::Reserved)| Registration {
        complete: slot.fill().complete(at as u64 * 3, at as u32),
        identity: identity(at as u64 + 1),
        parent: (at > 0).then(|| identity(at as u64)),
        recompute_seconds: 0.1,
    };
    let mut batch: Vec<Registration> = reserved.drain(..).enumerate().map(entry).collect();
    let outcome = catalog.register(&mut batch);
    assert_eq!((outcome.new, outcome.present), (40, 0));
    let chain: Vec<_> = (1..=50).map(identity).collect();
    let (mut places, mut leases) = (Vec::new(), Vec::new());
    assert_eq!(catalog.match_prefix(&chain, &mut places), 40, "a prefix ends at the first gap");
    assert_eq!(catalog.lease_prefix(TIER, &chain, &mut leases), 40);
    for (at, (places, lease)) in places.iter().zip(&leases).enumerate() {
        assert_eq!((places.slot(TIER), lease.slot()), (Some(slots[at]), slots[at]));
        assert_eq!((lease.checksum(), lease.bytes()), (at as u64 * 3, at as u32));
        assert_eq!(lease.identity(), chain[at]);
        assert_eq!(lease.parent(), (at > 0).then(|| chain[at - 1]));
    }
    catalog.debug_check();
}

#[test]
fn a_block_lies_in_several_tiers_at_once() {
    let tiers = vec![TierConfig::new(8, PolicyKind::Lru), TierConfig::new(16, PolicyKind::Cost)];
    let catalog = Catalog::new(&CatalogConfig::new(tiers)).expect("valid");
    let disk = TierIndex(1);
    store_chain(&catalog, ANYBODY, 1..=3);
    for block in 2..=5 {
        catalog.adopt(disk, block as u32, contents(block, None, 0, 1), ANYBODY).expect("a free slot");
    }
    let mut places = Vec::new();
    assert_eq!(catalog.match_prefix(&[1, 2, 3, 4, 5, 6].map(identity), &mut places), 5);
    let tiers = places.iter().map(|places| (places.slot(TIER).is_some(), places.slot(disk)));
    let expected = [(true, None), (true, Some(2)), (true, Some(3)), (false, Some(4)), (false, Some(5))];
    assert_eq!(tiers.collect::<Vec<_>>(), expected);
    assert_eq!(catalog.lease_prefix(TIER, &[1, 2, 3, 4].map(identity), &mut Vec::new()), 3);
    catalog.debug_check();
}

/// A tree of chains under each policy, evicted to nothing: no parent goes before its children.
#[test]
fn leaves_go_first_whatever_the_policy() {
    for policy in POLICIES {
        let catalog = catalog(policy, 64);
        store_chain(&catalog, ANYBODY, 1..=20);
        for branch in [30, 40] {
            store(&catalog, ANYBODY, branch, Some(10));
            (branch + 1..branch + 9).for_each(|block| {
                store(&catalog, ANYBODY, block, Some(block - 1));
            });
        }
        // The leaves are used, the roots are not: leaf-first holds all the same.
        (0..5).for_each(|_| drop(catalog.lease(TIER, &identity(20))));
        let parent = |block: u64| match block {
            30 | 40 => 10,
            block => block - 1,
        };
        let mut gone: Vec<u64> = Vec::new();
        while let Some(block) = evict(&catalog, 1).pop() {
            assert!(!gone.contains(&parent(block)), "{policy:?}: {block} goes after its parent");
            gone.push(block);
            catalog.debug_check();
        }
        assert_eq!(gone.len(), 38, "{policy:?}");
    }
}

/// Returns the first victim of three blocks after `hold` has run.
fn first_after(policy: PolicyKind, hold: &dyn Fn(&Catalog)) -> u64 {
    let catalog = catalog(policy, 8);
    (1..=3).for_each(|block| {
        store(&catalog, ANYBODY, block, None);
    });
    catalog.advance_clock(TIER);
    (0..3).for_each(|_| hold(&catalog));
    catalog.debug_check();
    evict(&catalog, 1).pop().expect("nobody holds a block any more")
}

/// Pins for a holder's own bookkeeping do not change which block goes first; a lease does.
#[test]
fn a_pin_is_no_use() {
    for policy in POLICIES {
        let victim = first_after(policy, &|_: &Catalog| {});
        let pinned = first_after(policy, &|catalog: &Catalog| {
            let pin = catalog.pin(TIER, &identity(victim)).expect("it is there");
            assert_eq!((pin.identity(), pin.checksum()), (identity(victim), victim));
            drop(pin);
            let mut pins = Vec::new();
            assert_eq!(catalog.pin_prefix(TIER, &[victim, 99].map(identity), &mut pins), 1);
        });
        assert_eq!(pinned, victim, "{policy:?}");
        let leased = first_after(policy, &|catalog: &Catalog| drop(catalog.lease(TIER, &identity(victim))));
        assert_ne!(leased, victim, "{policy:?}");
    }
}

/// A block that is pinned stays where it is until the pin is dropped.
#[test]
fn a_pinned_block_is_not_evicted() {
    for policy in POLICIES {
        let catalog = catalog(policy, 4);
        store(&catalog, ANYBODY, 1, None);
        let pin = catalog.pin(TIER, &identity(1)).expect("it is there");
        assert_eq!(evict(&catalog, 1), [0; 0], "{policy:?}");
        drop(pin);
        assert_eq!(evict(&catalog, 1), [1], "{policy:?}");
        catalog.debug_check();
    }
}

#[test]
fn a_parent_whose_child_was_put_back_stays() {
    let catalog = catalog(PolicyKind::Lru, 8);
    store_chain(&catalog, ANYBODY, 1..=3);
    let mut evicting = Vec::new();
    assert_eq!(catalog.evict(TIER, 3, &mut evicting), 3);
    let leaf = evicting.remove(0);
    assert_eq!(number(&leaf.identity()), 3);
    drop(leaf);
    assert_eq!(catalog.finish(&mut evicting), 0, "2 carries 3, 1 carries 2");
    let mut places = Vec::new();
    assert_eq!(catalog.match_prefix(&[1, 2, 3].map(identity), &mut places), 3);
    catalog.debug_check();
}

#[test]
fn what_is_leased_is_not_evicted_and_comes_back_to_the_policy() {
    for policy in POLICIES {
        let catalog = catalog(policy, 4);
        (1..=4).for_each(|block| store_chain(&catalog, ANYBODY, [block]));
        let leases: Vec<_> =
            (1..=4).map(|block| catalog.lease(TIER, &identity(block)).expect("there")).collect();
        let second = catalog.lease(TIER, &identity(2)).expect("leases are shared");
        assert!(evict(&catalog, 4).is_empty());
        assert!(reserve(&catalog, ANYBODY).0.is_none(), "full is an answer");
        drop(leases);
        catalog.debug_check();
        let mut gone = evict(&catalog, 9);
        gone.sort_unstable();
        assert_eq!(gone, [1, 3, 4], "{policy:?}: 2 is leased still");
        drop(second);
        assert_eq!(evict(&catalog, 9), [2]);
        catalog.debug_check();
    }
}

#[test]
fn a_removed_block_vanishes_at_once_and_its_slot_comes_back_with_the_last_lease() {
    let catalog = catalog(PolicyKind::S3Fifo, 2);
    store_chain(&catalog, ANYBODY, [1, 2]);
    let leases = [catalog.lease(TIER, &identity(1)), catalog.lease(TIER, &identity(1))];
    assert!(catalog.remove(TIER, &identity(1)));
    assert!(!catalog.remove(TIER, &identity(1)));
    assert!(!catalog.contains(&identity(1)));
    assert_eq!(free(&catalog), 0);
    let [first, second] = leases.map(|lease| lease.expect("there"));
    assert_eq!(first.identity(), identity(1), "a lease goes on to hold what it held");
    drop(first);
    assert_eq!(free(&catalog), 0);
    drop(second);
    assert_eq!(free(&catalog), 1);
    // Removed while it waits to be handed back, while evicting, and with everything else.
    let lease = catalog.lease(TIER, &identity(2)).expect("there");
    assert!(evict(&catalog, 1).is_empty());
    drop(lease);
    assert!(catalog.remove(TIER, &identity(2)));
    assert_eq!(free(&catalog), 2);
    store_chain(&catalog, ANYBODY, [3, 4]);
    let mut evicting = Vec::new();
    catalog.evict(TIER, 1, &mut evicting);
    let held = catalog.lease(TIER, &identity(3));
    assert_eq!(catalog.clear(TIER), 2);
    assert_eq!(free(&catalog), 0);
    drop(evicting);
    drop(held);
    assert_eq!(free(&catalog), 2);
    catalog.debug_check();
}

#[test]
fn a_block_that_came_in_anew_while_going_is_there_once() {
    let catalog = catalog(PolicyKind::Cost, 4);
    store_chain(&catalog, ANYBODY, [1]);
    let mut evicting = Vec::new();
    catalog.evict(TIER, 1, &mut evicting);
    assert_eq!(store(&catalog, ANYBODY, 1, None), Some(Registered::New));
    drop(evicting);
    catalog.debug_check();
    assert_eq!(free(&catalog), 3);
    assert_eq!(evict(&catalog, 9), [1]);
}

#[test]
fn a_tenant_over_its_quota_evicts_its_own() {
    for policy in POLICIES {
        let mut config = CatalogConfig::new(vec![TierConfig::new(32, policy)]);
        let (small, large) = (TenantId(1), TenantId(2));
        config.quotas.push(TenantQuota { tenant: small, tier: TIER, slots: 4 });
        let catalog = Catalog::new(&config).expect("valid");
        (100..110).for_each(|block| store_chain(&catalog, large, [block]));
        (1..=4).for_each(|block| store_chain(&catalog, small, [block]));
        let used = catalog.lease(TIER, &identity(1)).expect("there");
        for block in 5..50 {
            let (slot, evicted) = reserve(&catalog, small);
            assert_eq!(evicted.len(), 1);
            assert!(number(&evicted[0].identity) < 100, "{policy:?}: another tenant's block went");
            slot.expect("a slot").fill().complete(0, 1).register(identity(block), None, 1.0);
            assert_eq!(catalog.tenant_slots(TIER, small), 4);
        }
        assert_eq!(catalog.usage(TIER).map(|usage| usage.free), Some(18), "free slots do not help it");
        assert!(catalog.contains(&identity(1)) && (100..110).all(|block| catalog.contains(&identity(block))));
        // All of its own in use: it gets nothing, though others could be evicted.
        let own: Vec<_> = (2..50).filter_map(|block| catalog.lease(TIER, &identity(block))).collect();
        assert_eq!(own.len(), 3);
        assert!(reserve(&catalog, small).0.is_none());
        assert!(reserve(&catalog, large).0.is_some());
        drop((own, used));
        catalog.debug_check();
    }
}

#[test]
fn tenants_under_the_default_quota_are_told_apart_up_to_a_bound() {
    let mut config = CatalogConfig::new(vec![TierConfig {
        default_quota: Some(2),
        order: SlotOrder::FirstFreed,
        ..TierConfig::new(64, PolicyKind::Lru)
    }]);
    config.tenants_max = 3;
    let catalog = Catalog::new(&config).expect("valid");
    let mut block = 0;
    for tenant in 1..=5 {
        for _ in 0..6 {
            block += 1;
            store_chain(&catalog, TenantId(tenant), [block]);
        }
    }
    // Three tenants with two blocks each; the fourth and fifth share an account.
    assert_eq!(free(&catalog), 64 - 8);
    assert_eq!([1, 2, 3, 4, 5].map(|tenant| catalog.tenant_slots(TIER, TenantId(tenant))), [2, 2, 2, 0, 0]);
    assert_eq!(catalog.clear(TIER), 8);
    store_chain(&catalog, TenantId(5), [1]);
    assert_eq!(catalog.tenant_slots(TIER, TenantId(5)), 1, "who left nothing behind makes room");
    catalog.debug_check();
}

/// A disk tier comes back in slot order, children before parents.
#[test]
fn adopted_blocks_are_linked_in_any_order() {
    let catalog = catalog(PolicyKind::Lru, 8);
    for (slot, block) in [(5, 3), (1, 2), (7, 1), (0, 4)] {
        let parent = Some(block - 1).filter(|&parent| parent > 0).map(identity);
        catalog.adopt(TIER, slot, contents(block, parent, block, 9), ANYBODY).expect("a free slot");
    }
    let adopt = |slot, block| catalog.adopt(TIER, slot, contents(block, None, 0, 9), ANYBODY);
    assert_eq!(adopt(5, 9), Err(CatalogError::SlotTaken { tier: 0, slot: 5 }));
    assert_eq!(adopt(8, 9), Err(CatalogError::UnknownSlot { tier: 0, slot: 8 }));
    assert_eq!(adopt(2, 1), Err(CatalogError::Duplicate { tier: 0, slot: 2, present: 7 }));
    catalog.debug_check();
    let lease = catalog.lease(TIER, &identity(3)).expect("there");
    assert_eq!((lease.slot(), lease.checksum(), lease.bytes()), (5, 3, 9));
    drop(lease);
    assert_eq!(evict(&catalog, 9), [4, 3, 2, 1]);
    assert_eq!(free(&catalog), 8);
}

/// Blocks of trees come in any order, go, and come back; no block is evicted before a child that is there.
#[test]
fn chains_are_evicted_from_their_leaves_in_whatever_order_they_came() {
    for (seed, policy) in (1..=30).zip(POLICIES.into_iter().cycle()) {
        let mut random = Random(seed);
        let mut below = |bound: usize| random.draw(bound as u64) as usize;
        let count = 120;
        // Parents by block, from 1; a chain for the most part.
        let parents: Vec<Option<u64>> = (0..=count as u64)
            .map(|block| match block {
                0 | 1 => None,
                block if below(4) == 0 => Some(1 + below(block as usize - 1) as u64),
                block => Some(block - 1),
            })
            .collect();
        let parent_of = |block: u64| parents[block as usize];
        let catalog = catalog(policy, 80);
        let mut there = std::collections::BTreeSet::new();
        let mut evictions = 0;
        for step in 0..3000 {
            let block = 1 + below(count) as u64;
            let went: Vec<u64> = match below(5) {
                0..=2 if !there.contains(&block) => {
                    let (mut evicted, mut reserved) = (Vec::new(), Vec::new());
                    catalog.reserve(TIER, 1, ANYBODY, &mut evicted, &mut reserved);
                    let went = evicted.iter().map(|evicted| number(&evicted.identity)).collect();
                    let complete = reserved.pop().expect("a slot").fill().complete(block, 64);
                    let new = complete.register(identity(block), parent_of(block).map(identity), 1.0);
                    assert_eq!(new, Registered::New);
                    there.insert(block);
                    went
                }
                3 => {
                    let mut evicting = Vec::new();
                    catalog.evict(TIER, 1 + below(4), &mut evicting);
                    let kept = below(evicting.len() + 1);
                    // Some are put back, children and parents among them.
                    evicting.truncate(kept);
                    let went = evicting.iter().map(|block| number(&block.identity())).collect::<Vec<_>>();
                    catalog.finish(&mut evicting);
                    went.into_iter().filter(|&block| !catalog.contains(&identity(block))).collect()
                }
                _ => Vec::new(),
            };
            evictions += went.len();
            for block in &went {
                assert!(there.remove(block), "{policy:?}, seed {seed}, step {step}: {block} was not there");
            }
            // Blocks that came in this step came after the eviction.
            let orphaned = |&&child: &&u64| {
                child != block && parent_of(child).is_some_and(|parent| went.contains(&parent))
            };
            assert_eq!(there.iter().find(orphaned), None, "{policy:?}, seed {seed}, step {step}: {went:?}");
            if step % 50 == 0 {
                catalog.debug_check();
            }
        }
        assert!(evictions > 500, "{evictions} are too few to tell");
        catalog.debug_check();
        let left = evict(&catalog, usize::MAX);
        assert_eq!(left.len(), there.len());
        for (at, block) in left.iter().enumerate() {
            let before = left[..at].iter().filter_map(|&child| parent_of(child));
            let children = there.iter().filter(|&&child| parent_of(child) == Some(*block)).count();
            assert_eq!(before.filter(|parent| parent == block).count(), children, "leaves first");
        }
        assert_eq!(free(&catalog), 80);
    }
}

#[test]
fn slots_take_turns_where_that_is_asked_for() {
    let next = |order| {
        let tier = TierConfig { order, ..TierConfig::new(4, PolicyKind::Lru) };
        let catalog = Catalog::new(&CatalogConfig::new(vec![tier])).expect("valid");
        (0..6).map(|_| reserve(&catalog, ANYBODY).0.expect("a slot").slot()).collect::<Vec<_>>()
    };
    assert_eq!(next(SlotOrder::LastFreed), [0; 6]);
    assert_eq!(next(SlotOrder::FirstFreed), [0, 1, 2, 3, 0, 1]);
}

#[test]
fn a_configuration_is_checked() {
    let new = |config: &CatalogConfig| Catalog::new(config).err();
    assert_eq!(new(&CatalogConfig::new(Vec::new())), Some(CatalogError::TierCount(0)));
    let five = vec![TierConfig::new(1, PolicyKind::Lru); 5];
    assert_eq!(new(&CatalogConfig::new(five)), Some(CatalogError::TierCount(5)));
    let mut config = CatalogConfig::new(vec![TierConfig::new(0, PolicyKind::Lru)]);
    assert_eq!(new(&config), Some(CatalogError::SlotCount { tier: 0, slots: 0 }));
    config.tiers[0].slots = 1;
    config.quotas.push(TenantQuota { tenant: ANYBODY, tier: TierIndex(1), slots: 1 });
    assert_eq!(new(&config), Some(CatalogError::UnknownTier(1)));
    let one = catalog(PolicyKind::S3Fifo, 1);
    (1..9).for_each(|block| store_chain(&one, ANYBODY, [block]));
    assert_eq!(evict(&one, 2), [8]);
    assert!(one.lease(TierIndex(3), &identity(1)).is_none(), "an unknown tier is a miss");
}

/// Callers that name parents in a circle cannot make the blocks stay for ever.
#[test]
fn blocks_in_a_circle_are_evicted() {
    for circle in [&[1_u64, 2][..], &[1, 2, 3, 4, 5], &[5, 3, 1, 2, 4]] {
        for policy in [PolicyKind::Lru, PolicyKind::S3Fifo, PolicyKind::Cost] {
            let catalog = catalog(policy, 8);
            for (at, &block) in circle.iter().enumerate() {
                let parent = circle[(at + 1) % circle.len()];
                store(&catalog, ANYBODY, block, Some(parent)).expect("room");
                catalog.debug_check();
            }
            // A block that is put back on its way out closes no circle either.
            let mut evicting = Vec::new();
            catalog.evict(TIER, 1, &mut evicting);
            evicting.clear();
            catalog.debug_check();
            let mut gone = Vec::new();
            while gone.len() < circle.len() {
                let next = evict(&catalog, 1);
                assert!(!next.is_empty(), "{policy:?}: {gone:?} of {circle:?} could be evicted");
                gone.extend(next);
                catalog.debug_check();
            }
        }
    }
}
