//! Direct hand-offs step by step: the overlap of steps, their order, and the state after an end in between.

use dataplane_fabric::sim::Faults;
use dataplane_memory::testing::SumFaults;
use dataplane_transfer::{Command, Notice, Outcome};

use crate::rig::{LAYOUT, RECEIVER, SENDER, Shape, content, simulated};

fn slow(polls_max: u64) -> SumFaults {
    SumFaults { polls_max, ..SumFaults::default() }
}

/// Sums begin with the push, before there is a receiver; bytes are written when all sums of their piece are
/// known.
#[test]
fn nothing_travels_before_its_sums_are_there() {
    let (mut world, _) = simulated(&Shape::direct(4, slow(60)), Faults::default());
    world.push_whole(1, 8);
    world.step();
    assert_eq!(world.sides[SENDER].node.sums_in_flight(), 8, "nobody has asked for them yet");
    let targets = world.sides[RECEIVER].slots(8);
    world.expect(1, 0, targets);
    let mut waited = 0;
    world.run_until(|world| {
        let is_summed = world.sides[SENDER].node.sums_in_flight() == 0;
        assert!(is_summed || world.sides[SENDER].counter("bytes_sent") == 0, "a sum is missing");
        waited += 1;
        is_summed
    });
    assert!(waited > 10, "the sums took a while: {waited}");
    world.run(100);
    let (slots, outcome) = world.arrival().expect("over");
    assert_eq!((slots.len(), outcome), (8, Outcome::Complete));
    world.check(&slots, 1, 0);
    drop(slots);
    world.run_until_idle();
}

/// Layers are verified as they arrive, before the next are computed; each batch of them is settled once.
#[test]
fn layers_are_verified_as_they_land() {
    let (mut world, _) = simulated(&Shape::direct(3, SumFaults::default()), Faults::default());
    let (sources, targets) = (world.sides[SENDER].slots(3), world.sides[RECEIVER].slots(3));
    world.expect(1, 0, targets.clone());
    for (block, slot) in sources.iter().enumerate() {
        world.sides[SENDER].fill(slot, &content(1, block));
    }
    for layer in 0..LAYOUT.layers {
        let summed_before = world.sides[RECEIVER].summer().doorbells();
        world.push(1, &sources, layer..layer + 1);
        world.run(30);
        assert!(
            world.sides[RECEIVER].summer().doorbells() > summed_before,
            "layer {layer} is summed at once"
        );
        assert_eq!(world.sides[RECEIVER].memory.flush_count(), u64::from(layer) + 1, "once for three blocks");
        let end = LAYOUT.layer_bytes() as usize * (usize::from(layer) + 1);
        for (block, slot) in targets.iter().enumerate() {
            assert!(world.sides[RECEIVER].bytes_of(slot)[..end] == content(1, block)[..end], "layer {layer}");
        }
    }
    assert!(matches!(world.arrival(), Some((slots, Outcome::Complete)) if slots.len() == 3));
}

/// A cancellation after any number of steps, by either side, and the next transfer in the same slots as
/// soon as they are free: each side gets one notice, and no write or sum of the first transfer affects the
/// second.
#[test]
fn cancelled_at_any_step_everything_ends_once_and_no_slot_is_free_too_early() {
    let (mut complete, mut stopped, mut held_by_sums) = (0, 0, 0);
    for (step, side) in (0..60).flat_map(|step| [(step, SENDER), (step, RECEIVER)]) {
        let shape = Shape { device_slots: 6, ..Shape::direct(1 + step, slow(25)) };
        let (mut world, _) = simulated(&shape, Faults { delay_ticks_max: 5, ..Faults::default() });
        let targets = world.sides[RECEIVER].slots(6);
        world.expect(1, 0, targets);
        world.push_whole(1, 6);
        world.run(step as usize);
        world.command(side, Command::Cancel { transfer: 1 });
        let sender = &world.sides[SENDER];
        let is_summing = sender.node.sums_in_flight() > 0;
        assert!(!is_summing || sender.device.used_count() >= sender.node.sums_in_flight(), "held by its sum");
        held_by_sums += u64::from(is_summing);
        let mut told = [0; 2];
        let mut is_next_under_way = false;
        for _ in 0..400 {
            world.step();
            for number in [SENDER, RECEIVER] {
                for notice in std::mem::take(&mut world.sides[number].notices) {
                    match notice {
                        Notice::Arrived { transfer: 1, slots, outcome } => {
                            world.check(&slots, 1, 0);
                            told[number] += 1;
                            complete += u64::from(outcome == Outcome::Complete);
                            stopped += u64::from(outcome == Outcome::SenderStopped);
                        }
                        Notice::Pushed { transfer: 1, .. } => told[number] += 1,
                        Notice::Arrived { slots, outcome, .. } => {
                            assert_eq!((slots.len(), outcome), (6, Outcome::Complete), "step {step}");
                            world.check(&slots, 2, 0);
                            told[number] += 10;
                        }
                        other => assert!(matches!(other, Notice::Pushed { transfer: 2, complete: true })),
                    }
                }
            }
            let is_free = |number: usize| world.sides[number].device.free_count() == 6;
            if !is_next_under_way && is_free(SENDER) && is_free(RECEIVER) {
                is_next_under_way = true;
                let targets = world.sides[RECEIVER].slots(6);
                world.expect(2, 0, targets);
                world.push_whole(2, 6);
            }
        }
        assert_eq!(told, [1, 11], "step {step}, cancelled by {side}");
        assert!(world.sides.iter().all(crate::rig::Side::is_clean), "step {step}");
    }
    println!("{complete} were complete before, {stopped} were stopped, {held_by_sums} while summing");
    assert!(complete > 5 && stopped > 20 && held_by_sums > 20);
}

/// Sums that fail at the receiver: the leading blocks before them are kept, and the other slots are held
/// until the sender has confirmed that it writes no more.
#[test]
fn a_device_that_fails_at_the_receiver_ends_the_transfer() {
    let (mut world, network) = simulated(&Shape::direct(5, SumFaults::default()), Faults::default());
    let (sources, targets) = (world.sides[SENDER].slots(3), world.sides[RECEIVER].slots(3));
    world.expect(1, 0, targets);
    for (block, slot) in sources.iter().enumerate() {
        world.sides[SENDER].fill(slot, &content(1, block));
    }
    world.push(1, &sources[..2], 0..LAYOUT.layers);
    world.run(20);
    world.sides[RECEIVER].summer().kill();
    network.set_faults(Faults { delay_ticks_max: 30, ..Faults::default() });
    let (content, slots, layers) = (crate::rig::content_of(1), vec![sources[2].clone()], 0..LAYOUT.layers);
    world.command(SENDER, Command::Push { transfer: 1, content, first_block: 2, slots, layers });
    let (slots, outcome) = world.wait();
    assert_eq!((slots.len(), outcome), (2, Outcome::DeviceFailed));
    world.check(&slots, 1, 0);
    assert_eq!(world.sides[RECEIVER].device.used_count(), 3, "the last one waits for the sender's answer");
    drop((slots, sources));
    world.run_until_idle();
    let told = std::mem::take(&mut world.sides[SENDER].notices);
    assert!(matches!(told[..], [Notice::Pushed { transfer: 1, complete: false }]), "{told:?}");
}

#[test]
fn a_device_that_cannot_settle_verifies_nothing() {
    let (mut world, _) = simulated(&Shape::direct(6, slow(3)), Faults::default());
    let targets = world.sides[RECEIVER].slots(2);
    world.expect(1, 0, targets);
    world.run(5);
    world.sides[RECEIVER].memory.kill();
    world.push_whole(1, 2);
    world.run(60);
    assert!(matches!(world.arrival(), Some((slots, Outcome::DeviceFailed)) if slots.is_empty()));
    world.run_until_idle();
}

/// Sums that fail at the sender: the receiver is told of the end, and keeps the blocks received so far.
#[test]
fn a_device_that_fails_at_the_sender_stops_the_transfer() {
    let (mut world, _) = simulated(&Shape::direct(7, slow(3)), Faults::default());
    let (sources, targets) = (world.sides[SENDER].slots(4), world.sides[RECEIVER].slots(4));
    world.expect(1, 0, targets);
    for (block, slot) in sources.iter().enumerate() {
        world.sides[SENDER].fill(slot, &content(1, block));
    }
    world.push(1, &sources[..1], 0..LAYOUT.layers);
    world.run(30);
    world.sides[SENDER].summer().kill();
    world.push(1, &sources, 0..LAYOUT.layers);
    world.command(SENDER, Command::PushEnd { transfer: 1 });
    drop(sources);
    world.run(60);
    let (slots, outcome) = world.arrival().expect("over");
    assert_eq!((slots.len(), outcome), (1, Outcome::SenderStopped));
    world.check(&slots, 1, 0);
    drop(slots);
    let told = std::mem::take(&mut world.sides[SENDER].notices);
    assert!(told.iter().all(|notice| matches!(notice, Notice::Pushed { transfer: 1, complete: false })));
    assert!(!told.is_empty());
    world.run_until_idle();
}

/// The sender dies when everything is written and not yet verified: the written blocks are verified.
#[test]
fn what_landed_before_the_end_of_the_connection_is_verified() {
    let (mut world, network) = simulated(&Shape::direct(8, SumFaults::default()), Faults::default());
    let targets = world.sides[RECEIVER].slots(4);
    world.expect(1, 0, targets);
    world.sides[RECEIVER].summer().set_faults(slow(200));
    world.push_whole(1, 4);
    world.run_until(|world| world.sides[RECEIVER].node.sums_in_flight() > 0);
    network.kill(SENDER);
    world.run(20);
    assert!(world.arrival().is_none(), "its sums are under way");
    world.run(200);
    let (slots, outcome) = world.arrival().expect("over");
    assert_eq!((slots.len(), outcome), (4, Outcome::Complete));
    world.check(&slots, 1, 0);
}

/// Sums of a cancelled transfer complete when another one of the same id is expected: they are not of its bytes.
#[test]
fn late_sums_of_an_earlier_transfer_verify_nothing() {
    let (mut world, _) = simulated(&Shape::direct(9, SumFaults::default()), Faults::default());
    let targets = world.sides[RECEIVER].slots(4);
    world.expect(1, 0, targets);
    world.sides[RECEIVER].summer().set_faults(slow(4000));
    world.push_whole(1, 4);
    world.run_until(|world| world.sides[RECEIVER].node.sums_in_flight() == 4);
    world.command(RECEIVER, Command::Cancel { transfer: 1 });
    world.run(20);
    assert!(matches!(world.arrival(), Some((slots, Outcome::SenderStopped)) if slots.is_empty()));
    let targets = world.sides[RECEIVER].slots(4);
    world.expect(1, 0, targets);
    let mut under_way = Vec::new();
    let mut told = None;
    world.run_until(|world| {
        under_way.push(world.sides[RECEIVER].node.sums_in_flight());
        told = world.arrival();
        told.is_some()
    });
    let (slots, outcome) = told.expect("told");
    assert_eq!((slots.len(), outcome), (0, Outcome::Deadline));
    world.run_until_idle();
    assert!(under_way.contains(&4), "{under_way:?}");
}
