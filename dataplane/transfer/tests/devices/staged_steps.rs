//! Staged hand-offs step by step: the overlap of steps, their order, and refusals.

use std::time::{Duration, Instant};

use dataplane_fabric::sim::Faults;
use dataplane_memory::testing::CopyFaults;
use dataplane_transfer::{Command, Notice, Outcome};

use crate::rig::{LAYOUT, RECEIVER, SENDER, Shape, content, simulated};

/// The first piece is in transit while others wait for a staging slot, and more blocks are sent than there
/// are slots.
#[test]
fn pieces_travel_while_others_are_copied() {
    let shape = Shape { staging_slots: 48, ..Shape::new(7, CopyFaults { polls_max: 10, fail_one_in: 0 }) };
    let (mut world, _) = simulated(&shape, Faults::default());
    let blocks = 24;
    let targets = world.sides[RECEIVER].slots(blocks);
    world.expect(1, 0, targets);
    world.run(5);
    world.push_whole(1, blocks);
    let mut overlapped = 0;
    for _ in 0..600 {
        world.step();
        let staged = world.sides[SENDER].host.used_count();
        assert!(staged <= 6, "an eighth of the pool for one transfer, not {staged}");
        let is_travelling = world.sides[SENDER].counter("bytes_sent") > 0;
        overlapped += u64::from(is_travelling && world.sides[SENDER].staging.in_flight() > 0);
    }
    let (slots, outcome) = world.arrival().expect("over");
    assert_eq!((slots.len(), outcome), (blocks, Outcome::Complete));
    world.check(&slots, 1, 0);
    assert!(overlapped > 5, "bytes travel while copies go on: {overlapped}");
    let doorbells = world.sides[SENDER].staging.copier_mut().doorbells();
    assert!(doorbells < blocks as u64, "{doorbells} doorbells for {blocks} copies");
    drop(slots);
    world.sides[SENDER].notices.clear();
    world.run_until_idle();
}

/// Layers that have arrived are in device memory before the next are computed.
#[test]
fn layers_are_copied_on_as_they_are_verified() {
    let (mut world, _) = simulated(&Shape::new(3, CopyFaults::default()), Faults::default());
    let (sources, targets) = (world.sides[SENDER].slots(2), world.sides[RECEIVER].slots(2));
    world.expect(1, 0, targets.clone());
    for (block, slot) in sources.iter().enumerate() {
        world.sides[SENDER].fill(slot, &content(1, block));
    }
    let layer_bytes = LAYOUT.layer_bytes() as usize;
    for layer in 0..LAYOUT.layers {
        world.push(1, &sources, layer..layer + 1);
        world.run(30);
        let end = layer_bytes * (usize::from(layer) + 1);
        for (block, slot) in targets.iter().enumerate() {
            let found = world.sides[RECEIVER].bytes_of(slot);
            assert!(found[..end] == content(1, block)[..end], "layer {layer} of block {block}");
            assert!(found[end..].iter().all(|&byte| byte == 0), "and nothing of the next");
        }
    }
    world.command(SENDER, Command::PushEnd { transfer: 1 });
    world.run(30);
    assert!(matches!(world.arrival(), Some((slots, Outcome::Complete)) if slots.len() == 2));
}

/// A cancelled transfer is over only when its copies are, and until then holds their slots.
#[test]
fn cancelled_transfers_wait_for_their_copies() {
    let copies = CopyFaults { polls_max: 60, fail_one_in: 0 };
    for seed in 1..=10 {
        println!("seed {seed}");
        let (mut world, _) = simulated(&Shape::new(seed, copies), Faults::default());
        let targets = world.sides[RECEIVER].slots(4);
        world.expect(1, 0, targets);
        world.run(5);
        world.push_whole(1, 4);
        world.run(2);
        let in_flight = world.sides[SENDER].staging.in_flight();
        assert!(in_flight > 0, "copies are under way");
        world.command(SENDER, Command::Cancel { transfer: 1 });
        let mut steps = 0;
        while world.sides[SENDER].staging.in_flight() > 0 {
            assert!(world.sides[SENDER].notices.is_empty(), "not over before its copies are");
            let side = &world.sides[SENDER];
            assert!(side.host.used_count() >= 1 && side.device.used_count() >= 1, "held by the copies");
            world.step();
            steps += 1;
        }
        assert!(steps > 1, "the copies took a while");
        let told = std::mem::take(&mut world.sides[SENDER].notices);
        assert!(matches!(told[..], [Notice::Pushed { transfer: 1, complete: false }]), "{told:?}");
        world.run_until_idle();
    }
}

/// Receivers that reserve at the same time, while the copier is full (16 copies) with those of the first of them, are all served.
#[test]
fn transfers_that_are_reserved_while_the_copier_is_full_are_sent() {
    let copies = CopyFaults { polls_max: 6, fail_one_in: 0 };
    let shape = Shape { staging_slots: 256, ..Shape::new(12, copies) };
    let (mut world, _) = simulated(&shape, Faults::default());
    world.patience = shape.lease / 2;
    let transfers = 1..=8;
    for transfer in transfers.clone() {
        world.push_whole(transfer, 9);
    }
    for transfer in transfers.clone() {
        let targets = world.sides[RECEIVER].slots(9);
        world.expect(transfer, 0, targets);
    }
    world.run_until(|world| world.sides[SENDER].staging.in_flight() == 16);
    let mut arrived = 0;
    world.run_until(|world| {
        for notice in std::mem::take(&mut world.sides[RECEIVER].notices) {
            let Notice::Arrived { transfer, slots, outcome } = notice else { panic!("{notice:?}") };
            assert_eq!((slots.len(), outcome), (9, Outcome::Complete));
            world.check(&slots, transfer, 0);
            arrived += 1;
        }
        arrived == transfers.clone().count()
    });
    world.run_until_idle();
}

/// Prompts whose receivers never come hold no staging slots, so they do not delay transfers that are
/// reserved. Their own slots return with their leases.
#[test]
fn transfers_that_nobody_asks_for_keep_nobody_waiting() {
    let shape = Shape::new(9, CopyFaults::default());
    let (mut world, _) = simulated(&shape, Faults::default());
    for transfer in 1..=30 {
        let slots = world.sides[SENDER].slots(6);
        for layer in 0..LAYOUT.layers {
            world.push(transfer, &slots, layer..layer + 1);
        }
        world.command(SENDER, Command::PushEnd { transfer });
    }
    world.run(20);
    let sender = &world.sides[SENDER];
    assert_eq!((sender.host.used_count(), sender.device.used_count()), (0, 180));
    assert!(!sender.staging.has_backlog(), "nothing to poll for");
    let targets = world.sides[RECEIVER].slots(9);
    world.push_whole(99, 9);
    world.expect(99, 0, targets);
    let (begun, (slots, outcome)) = (world.now, world.wait());
    assert_eq!((slots.len(), outcome), (9, Outcome::Complete));
    assert!(world.now - begun < shape.lease / 4, "{:?}", world.now - begun);
    world.check(&slots, 99, 0);
    drop(slots);
    world.run_until_idle();
    let told = std::mem::take(&mut world.sides[SENDER].notices);
    let incomplete =
        told.iter().filter(|notice| matches!(notice, Notice::Pushed { complete: false, .. })).count();
    assert_eq!((told.len(), incomplete, world.sides[SENDER].counter("leases_expired")), (31, 30, 30));
}

/// A round does not visit staged transfers that no receiver has reserved.
#[test]
fn what_waits_does_not_lengthen_a_round() {
    const WAITING: u64 = 3000;
    let shape = Shape { lease: Duration::from_secs(3600), ..Shape::new(13, CopyFaults::default()) };
    let (mut world, _) = simulated(&shape, Faults::default());
    let fastest = |world: &mut crate::rig::World<_>| {
        let rounds = (0..400).map(|_| {
            let start = Instant::now();
            world.step();
            start.elapsed()
        });
        rounds.min().expect("rounds")
    };
    let before = fastest(&mut world);
    let slots = world.sides[SENDER].slots(1);
    for transfer in 1..=WAITING {
        world.push(transfer, &slots, 0..LAYOUT.layers);
    }
    let after = fastest(&mut world);
    println!("a round: {before:?}, and {after:?} with {WAITING} transfers that wait");
    assert!(
        after < before * 8 + Duration::from_micros(20),
        "{before:?} a round, and {after:?} with {WAITING} that wait"
    );
}

/// If the receiver holds the beginning of a prompt, only the rest is copied.
#[test]
fn what_the_receiver_has_is_not_copied() {
    for is_early in [false, true] {
        let (mut world, _) = simulated(&Shape::new(11, CopyFaults::default()), Faults::default());
        let targets = world.sides[RECEIVER].slots(3);
        if is_early {
            world.expect(1, 9, targets);
            world.run(5);
            world.push_whole(1, 12);
        } else {
            world.push_whole(1, 12);
            world.run(5);
            world.expect(1, 9, targets);
        }
        let (slots, outcome) = world.wait();
        assert_eq!((slots.len(), outcome), (3, Outcome::Complete));
        world.check(&slots, 1, 9);
        drop(slots);
        world.run_until_idle();
        // Pieces of three blocks, of which the last is reserved.
        assert_eq!(world.sides[SENDER].staging.copier_mut().copied(), 3, "early {is_early}");
    }
}

#[test]
fn failed_copies_and_a_dead_device_end_transfers() {
    // At the receiver: the leading blocks before the failure are kept.
    let (mut world, _) = simulated(&Shape::new(5, CopyFaults::default()), Faults::default());
    let targets = world.sides[RECEIVER].slots(9);
    world.expect(1, 0, targets);
    world.push_whole(1, 9);
    world.sides[RECEIVER].staging.copier_mut().set_faults(CopyFaults { polls_max: 3, fail_one_in: 4 });
    world.run(100);
    let (slots, outcome) = world.arrival().expect("over");
    assert!(slots.len() < 9 && outcome == Outcome::DeviceFailed, "{} {outcome:?}", slots.len());
    world.check(&slots, 1, 0);
    drop(slots);
    // At the sender: the receiver is told of the end.
    world.sides[SENDER].notices.clear();
    let targets = world.sides[RECEIVER].slots(9);
    world.expect(2, 0, targets);
    world.run(5);
    world.sides[SENDER].staging.copier_mut().kill();
    world.push_whole(2, 9);
    world.run(50);
    assert!(matches!(world.arrival(), Some((slots, Outcome::SenderStopped)) if slots.is_empty()));
    let told = std::mem::take(&mut world.sides[SENDER].notices);
    assert!(matches!(told[..], [Notice::Pushed { transfer: 2, complete: false }]), "{told:?}");
    world.run_until_idle();
}

#[test]
fn more_than_the_staging_slots_for_peers_is_refused_at_once() {
    let (mut world, _) = simulated(&Shape::new(9, CopyFaults::default()), Faults::default());
    let (fits, beyond) = (world.sides[RECEIVER].slots(10), world.sides[RECEIVER].slots(7));
    world.expect(1, 0, fits);
    world.expect(2, 0, beyond);
    world.step();
    assert!(matches!(world.arrival(), Some((slots, Outcome::Refused)) if slots.is_empty()));
    world.push_whole(1, 10);
    world.run(60);
    let (slots, outcome) = world.arrival().expect("over");
    assert_eq!((slots.len(), outcome), (10, Outcome::Complete));
    drop(slots);
    let beyond = world.sides[RECEIVER].slots(16);
    world.expect(3, 0, beyond);
    world.push_whole(3, 16);
    world.run(60);
    assert!(matches!(world.arrival(), Some((slots, Outcome::Complete)) if slots.len() == 16), "free again");
    world.run_until_idle();
}
