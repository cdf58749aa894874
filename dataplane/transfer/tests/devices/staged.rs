//! Whole runs of staged hand-offs, over the simulated fabric and over shared memory.

use std::collections::BTreeMap;

use dataplane_fabric::sim::Faults;
use dataplane_memory::testing::CopyFaults;
use dataplane_transfer::Outcome;

use crate::rig::{Shape, shared_memory, simulated};
use crate::runs::transfers;

#[test]
fn without_faults_everything_arrives() {
    for seed in 1..=10 {
        println!("seed {seed}");
        let shape = Shape::new(seed, CopyFaults { polls_max: 1 + seed % 9, fail_one_in: 0 });
        let faults = Faults { delay_ticks_max: 4, queue_depth_max: 6, ..Faults::default() };
        let (mut world, _) = simulated(&shape, faults);
        let sum = transfers(&mut world, &mut fastrand::Rng::with_seed(seed), 30, 0, |_, _, _| ());
        println!("{sum:?}");
        // Some are expected while too many slots wait for peers: they are refused, and no other transfer fails.
        assert_eq!(sum.of(Outcome::Complete) + sum.of(Outcome::Refused), 30);
        assert!(sum.of(Outcome::Complete) >= 10);
        world.run_until_idle();
    }
}

/// Loss, corruption, reordering, cut links, failed copies and cancellations by either side, all at once.
#[test]
fn whatever_goes_wrong_what_arrives_is_right_and_nothing_is_left() {
    let mut outcomes: BTreeMap<String, u64> = BTreeMap::new();
    for seed in 1..=40 {
        println!("seed {seed}");
        let copies = CopyFaults { polls_max: 1 + seed % 12, fail_one_in: [0, 40][seed as usize % 2] };
        let faults = Faults {
            delay_ticks_max: 1 + seed % 7,
            lose_one_in: [0, 60, 0][seed as usize % 3],
            corrupt_one_in: [0, 0, 30, 30][seed as usize % 4],
            reorder: seed % 5 == 0,
            queue_depth_max: 6,
        };
        let (mut world, network) = simulated(&Shape::new(seed, copies), faults);
        let sum =
            transfers(&mut world, &mut fastrand::Rng::with_seed(seed), 40, 6, |transfer, random, world| {
                if seed % 6 == 0 && transfer % 10 == 0 {
                    network.cut(random.u64(..2) as usize);
                    world.run(3);
                }
            });
        println!("{sum:?}");
        sum.outcomes.into_iter().for_each(|(outcome, count)| *outcomes.entry(outcome).or_default() += count);
        network.set_faults(Faults::default());
        world.run_until_idle();
    }
    println!("{outcomes:?}");
    for outcome in ["Complete", "Corrupted", "SenderStopped", "Deadline", "DeviceFailed", "PeerDown"] {
        assert!(outcomes.get(outcome).is_some_and(|&count| count > 3), "{outcome}: {outcomes:?}");
    }
}

#[test]
fn over_shared_memory_with_corruption_failed_copies_and_cancellations() {
    let mut complete = 0;
    for seed in 1..=16 {
        println!("seed {seed}");
        let (is_faulty, is_cancelled) = (seed % 2 == 1, seed % 4 > 1);
        let copies = CopyFaults { polls_max: 1 + seed % 9, fail_one_in: if is_faulty { 50 } else { 0 } };
        let mut world = shared_memory(&Shape::new(seed, copies), if is_faulty { 20 } else { 0 });
        let cancel_one_in = if is_cancelled { 6 } else { 0 };
        let sum = transfers(&mut world, &mut fastrand::Rng::with_seed(seed), 30, cancel_one_in, |_, _, _| ());
        println!("{sum:?}");
        if !is_faulty && !is_cancelled {
            assert_eq!(sum.of(Outcome::Complete) + sum.of(Outcome::Refused), 30, "{sum:?}");
        }
        complete += sum.of(Outcome::Complete);
        world.run_until_idle();
    }
    assert!(complete > 100, "{complete} of 480");
}
