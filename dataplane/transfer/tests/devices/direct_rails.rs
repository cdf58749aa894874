//! Direct hand-offs over two rails, of which either may fail and come back.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dataplane_fabric::sim::{Faults, SimFabric, SimNetwork};
use dataplane_memory::testing::SumFaults;
use dataplane_transfer::{Bond, BondConfig, Outcome, Rail};

use crate::rig::{RECEIVER, SENDER, Shape, Side, TICK, World};
use crate::runs::{Random, transfers};

/// Two nodes and the networks between them; of the second rail, whether it reaches the devices.
fn bonded(seed: u64, is_second_direct: bool) -> (World<Bond<SimFabric>>, [SimNetwork; 2]) {
    let faults = Faults { delay_ticks_max: 4, queue_depth_max: 12, ..Faults::default() };
    let networks = [1, 2].map(|rail| SimNetwork::new(seed * 31 + rail, faults));
    let (millis, start) = (Arc::new(AtomicU64::new(0)), Instant::now());
    let sums = SumFaults { polls_max: 1 + seed % 5, ..SumFaults::default() };
    let sides = [(); 2].map(|()| {
        Side::new(&Shape::direct(seed, sums), |device, host| {
            let (slots, staging) = (Arc::clone(device.slab()), Arc::clone(host.slab()));
            let second = if is_second_direct {
                networks[1].add_direct_node_named(Arc::clone(&slots), "two")
            } else {
                networks[1].add_node_named(Arc::clone(&staging), "two")
            };
            let slab = if is_second_direct { slots } else { staging };
            let first = networks[0].add_direct_node_named(slab, "one");
            let rails = [first, second].map(|fabric| Rail { fabric, rank: 0 }).into();
            let millis = Arc::clone(&millis);
            let clock = Box::new(move || start + Duration::from_millis(millis.load(Ordering::Relaxed)));
            let (retry_first, retry_max) = (Duration::from_millis(2), Duration::from_millis(16));
            Bond::new(
                rails,
                BondConfig { slice_bytes: 300, retry_first, retry_max, seed, ..BondConfig::default() },
                clock,
            )
        })
    });
    if is_second_direct {
        sides[RECEIVER].memory.reorder_writes();
    }
    let clocks = networks.clone();
    let tick = move || {
        millis.fetch_add(TICK.as_millis() as u64, Ordering::Relaxed);
        clocks.iter().for_each(|network| network.advance(1));
    };
    (World::new(sides, "one:0,two:0".to_owned(), tick, start), networks)
}

#[test]
fn slices_of_both_rails_are_verified_together() {
    for seed in 1..=8 {
        println!("seed {seed}");
        let (mut world, networks) = bonded(seed, true);
        let sum = transfers(&mut world, &mut Random(seed), 30, 0, |transfer, random, _| {
            if seed % 2 == 0 && transfer % 7 == 0 {
                networks[random.below(2) as usize].cut(SENDER);
            }
        });
        println!("{sum:?}");
        assert_eq!(world.sides[RECEIVER].counter("received_directly"), 30);
        assert!(sum.of(Outcome::Complete) == 30 || seed % 2 == 0 && sum.of(Outcome::Complete) > 15);
        world.settle();
    }
}

/// A rail that does not reach the devices may be given any slice: everything is staged.
#[test]
fn one_rail_out_of_reach_is_enough_to_stage() {
    let (mut world, _) = bonded(3, false);
    let sum = transfers(&mut world, &mut Random(3), 20, 0, |_, _, _| ());
    assert_eq!(sum.of(Outcome::Complete) + sum.of(Outcome::Refused), 20, "{sum:?}");
    let of = |side: usize, name: &str| world.sides[side].counter(name);
    // What comes after a refusal begins anew, and is counted again.
    assert!(of(SENDER, "sent_directly") == 0 && of(SENDER, "sent_staged") >= 20);
    assert_eq!(of(RECEIVER, "received_directly"), 0);
    world.settle();
}

/// A slot's number would be written over another slab by one of the rails.
#[test]
#[should_panic(expected = "all rails show their peers one slab")]
fn rails_that_show_two_slabs_are_no_bond() {
    let network = SimNetwork::new(1, Faults::default());
    Side::new(&Shape::direct(1, SumFaults::default()), |device, host| {
        let rails = [device, host].map(|pool| network.add_direct_node(Arc::clone(pool.slab())));
        let rails = rails.map(|fabric| Rail { fabric, rank: 0 }).into();
        Bond::new(rails, BondConfig::default(), Box::new(Instant::now))
    });
}
