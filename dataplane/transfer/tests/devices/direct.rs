//! Whole runs of direct hand-offs: no byte goes through host memory.

use std::collections::BTreeMap;

use dataplane_fabric::sim::Faults;
use dataplane_memory::testing::SumFaults;
use dataplane_transfer::Outcome;

use crate::rig::{RECEIVER, SENDER, Shape, simulated};
use crate::runs::{Sum, transfers};

#[test]
fn without_faults_everything_arrives_without_a_copy() {
    for seed in 1..=10 {
        println!("seed {seed}");
        let sums = SumFaults { polls_max: 1 + seed % 9, ..SumFaults::default() };
        let faults = Faults { delay_ticks_max: 4, queue_depth_max: 6, ..Faults::default() };
        let (mut world, _) = simulated(&Shape::direct(seed, sums), faults);
        let sum = transfers(&mut world, &mut fastrand::Rng::with_seed(seed), 30, 0, |_, _, _| ());
        assert_eq!((sum.of(Outcome::Complete), sum.pushed_whole), (30, 30), "{sum:?}");
        world.run_until_idle();
        let [sender, receiver] = &mut world.sides;
        assert_eq!((sender.counter("sent_directly"), receiver.counter("received_directly")), (30, 30));
        assert_eq!((sender.counter("sent_staged"), receiver.counter("received_staged")), (0, 0));
        for side in [sender, receiver] {
            assert_eq!(side.staging.copier_mut().doorbells(), 0, "nothing is copied");
            assert!(side.summer().doorbells() > 0, "the device sums");
        }
    }
}

/// Runs one world with every kind of fault, from a seed.
fn troubled(seed: u64) -> Sum {
    println!("seed {seed}");
    let sums = SumFaults {
        polls_max: 1 + seed % 12,
        fail_one_in: [0, 90][seed as usize % 2],
        wrong_one_in: [0, 0, 150][seed as usize % 3],
    };
    let faults = Faults {
        delay_ticks_max: 1 + seed % 7,
        lose_one_in: [0, 60, 0][seed as usize % 3],
        corrupt_one_in: [0, 0, 30, 30][seed as usize % 4],
        reorder: seed.is_multiple_of(5),
        queue_depth_max: 6,
    };
    let (mut world, network) = simulated(&Shape::direct(seed, sums), faults);
    let sum = transfers(&mut world, &mut fastrand::Rng::with_seed(seed), 40, 6, |transfer, random, world| {
        if seed.is_multiple_of(6) && transfer % 10 == 0 {
            network.cut(random.u64(..2) as usize);
            world.run(3);
        }
    });
    println!("{sum:?}");
    network.set_faults(Faults::default());
    world.run_until_idle();
    sum
}

/// Loss, corruption, reordering, cut links, failed and wrong sums and cancellations by either side, all at once.
#[test]
fn whatever_goes_wrong_what_arrives_is_right_and_nothing_is_left() {
    let mut outcomes: BTreeMap<String, u64> = BTreeMap::new();
    for seed in 1..=40 {
        let sum = troubled(seed);
        sum.outcomes.into_iter().for_each(|(outcome, count)| *outcomes.entry(outcome).or_default() += count);
    }
    println!("{outcomes:?}");
    for outcome in ["Complete", "Corrupted", "SenderStopped", "Deadline", "DeviceFailed", "PeerDown"] {
        assert!(outcomes.get(outcome).is_some_and(|&count| count > 3), "{outcome}: {outcomes:?}");
    }
}

#[test]
fn equal_seeds_give_equal_runs() {
    for seed in [3, 8, 15] {
        assert_eq!(troubled(seed), troubled(seed));
    }
    assert_ne!(troubled(3), troubled(9), "the seed must matter");
}

/// The receiver's device detects bytes that are damaged in transit, and only those blocks are refused.
#[test]
fn damage_on_the_way_is_refused() {
    for seed in 1..=5 {
        let faults = Faults { corrupt_one_in: 9, ..Faults::default() };
        let (mut world, _) = simulated(&Shape::direct(seed, SumFaults::default()), faults);
        let sum = transfers(&mut world, &mut fastrand::Rng::with_seed(seed), 40, 0, |_, _, _| ());
        assert!(sum.of(Outcome::Corrupted) > 5, "{sum:?}");
        assert_eq!(sum.of(Outcome::Corrupted) + sum.of(Outcome::Complete), 40, "{sum:?}");
        assert!(world.sides[RECEIVER].counter("checksum_failures") >= sum.of(Outcome::Corrupted));
        assert_eq!(world.sides[SENDER].counter("checksum_failures"), 0);
        world.run_until_idle();
    }
}
