//! Direct hand-offs in combination with staging at one side or for other heads, nodes without staging, and
//! greetings.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_fabric::sim::{Faults, SimNetwork};
use dataplane_fabric::{Event, Fabric, WorkRequest};
use dataplane_memory::testing::{Abilities, DeviceDouble, SumFaults};
use dataplane_memory::{DeviceMemory, PageSize, Slab, SlabLayout};
use dataplane_transfer::{
    Command, HeadRange, Limits, Notice, Outcome, PieceLayout, TransferCounters, TransferNode,
};

use crate::rig::{
    LAYOUT, RECEIVER, Reach, SENDER, Shape, Side, TICK, World, content_of, simulated, simulated_side,
};
use crate::runs::transfers;

/// Every pairing of nodes that stage, that only send directly, and that send and receive directly: each can
/// verify the other's sums.
#[test]
fn each_side_is_direct_or_staged_on_its_own() {
    for (sender, receiver) in [
        (Reach::Host, Reach::Device),
        (Reach::Sources, Reach::Host),
        (Reach::Sources, Reach::Sources),
        (Reach::Sources, Reach::Device),
        (Reach::Device, Reach::Host),
        (Reach::Host, Reach::Both),
        (Reach::Both, Reach::Both),
        (Reach::Both, Reach::Host),
    ] {
        println!("{sender:?} to {receiver:?}");
        let sums = SumFaults { polls_max: 4, ..SumFaults::default() };
        let shape = Shape { reach: [sender, receiver], ..Shape::direct(6, sums) };
        let (mut world, _) = simulated(&shape, Faults { delay_ticks_max: 3, ..Faults::default() });
        let sum = transfers(&mut world, &mut fastrand::Rng::with_seed(6), 20, 0, |_, _, _| ());
        let refused = sum.of(Outcome::Refused);
        assert_eq!(sum.of(Outcome::Complete) + refused, 20, "{sum:?}");
        let is_shown = matches!(receiver, Reach::Device | Reach::Both);
        assert!(refused == 0 || !is_shown, "only staging slots can be too few");
        world.run_until_idle();
        let of = |side: usize, name: &str| world.sides[side].counter(name);
        let is_direct = u64::from(sender != Reach::Host);
        let (direct, staged) = (of(SENDER, "sent_directly"), of(SENDER, "sent_staged"));
        assert!(direct >= is_direct * (20 - refused) && staged == (1 - is_direct) * 20, "{direct} {staged}");
        let is_direct = u64::from(is_shown);
        let (direct, staged) = (of(RECEIVER, "received_directly"), of(RECEIVER, "received_staged"));
        assert_eq!((direct, staged), (is_direct * 20, (1 - is_direct) * (20 - refused)));
    }
}

fn shard(first: u16, count: u16) -> PieceLayout {
    PieceLayout { layers: 3, rows: 8, heads: HeadRange { first, count }, head_bytes: 16, fingerprint: 5 }
}

fn heads_of(layout: &PieceLayout) -> Vec<u8> {
    let heads = layout.heads.first..layout.heads.first + layout.heads.count;
    let rows = 0..u32::from(layout.layers) * layout.rows;
    let head = |row: u32, head: u16| {
        (0..layout.head_bytes).map(move |at| (row * 31 + u32::from(head) * 77 + at) as u8)
    };
    rows.flat_map(|row| heads.clone().flat_map(move |number| head(row, number))).collect()
}

/// Pushes meant to go directly, to a receiver with more heads: they are staged once that is known, in their
/// order, whether the pushes ended before or after.
#[test]
fn pushes_to_a_receiver_with_other_heads_are_staged_after_all() {
    for (steps, is_ended_first) in [(0, true), (0, false), (30, true), (30, false)] {
        let network = SimNetwork::new(4, Faults { delay_ticks_max: 3, ..Faults::default() });
        let mut sides = [(shard(2, 2), Reach::Sources), (shard(0, 4), Reach::Host)].map(|(layout, reach)| {
            let sums = SumFaults { polls_max: 5, ..SumFaults::default() };
            simulated_side(&Shape { layout, ..Shape::direct(4, sums) }, reach, &network)
        });
        let (mut now, transfer, content) = (Instant::now(), 1, [9; 16]);
        let (sources, targets) = (sides[SENDER].slots(3), sides[RECEIVER].slots(3));
        sources.iter().for_each(|slot| sides[SENDER].fill(slot, &heads_of(&shard(2, 2))));
        let push = |layer: u16| {
            let (slots, layers) = (sources.clone(), layer..layer + 1);
            Command::Push { transfer, content, first_block: 0, slots, layers }
        };
        let run = |sides: &mut [Side<_>; 2], now: &mut Instant, steps: usize| {
            for _ in 0..steps {
                *now += TICK;
                network.advance(1);
                sides
                    .iter_mut()
                    .for_each(|side| _ = side.staging.poll(&mut side.node, *now, &mut side.notices));
            }
        };
        (0..2).for_each(|layer| sides[SENDER].handle(push(layer), now));
        if is_ended_first {
            sides[SENDER].handle(push(2), now);
            sides[SENDER].handle(Command::PushEnd { transfer }, now);
        }
        run(&mut sides, &mut now, steps);
        assert!(sides[SENDER].summer().doorbells() > 0 || steps == 0, "it begins as if it were direct");
        let (slots, address, deadline) = (targets.clone(), "0".to_owned(), now + Duration::from_secs(2));
        sides[RECEIVER]
            .handle(Command::Expect { transfer, address, content, first_block: 0, slots, deadline }, now);
        run(&mut sides, &mut now, 40);
        if !is_ended_first {
            sides[SENDER].handle(push(2), now);
            sides[SENDER].handle(Command::PushEnd { transfer }, now);
        }
        run(&mut sides, &mut now, 200);
        let told = std::mem::take(&mut sides[RECEIVER].notices);
        let is_whole = |notice: &Notice| matches!(notice, Notice::Arrived { outcome: Outcome::Complete, .. });
        assert!(told.len() == 1 && told.iter().all(is_whole), "{told:?}");
        drop(told);
        let told = std::mem::take(&mut sides[SENDER].notices);
        assert!(matches!(told[..], [Notice::Pushed { complete: true, .. }]), "{told:?}");
        let (all, own) = (heads_of(&shard(0, 4)), 32..64);
        for slot in &targets {
            let bytes = sides[RECEIVER].bytes_of(slot);
            for (row, expected) in bytes.chunks(64).zip(all.chunks(64)) {
                assert!(row[own.clone()] == expected[own.clone()] && row[..32].iter().all(|&byte| byte == 0));
            }
        }
        assert_eq!((sides[SENDER].counter("sent_directly"), sides[SENDER].counter("sent_staged")), (0, 1));
        drop((sources, targets));
        assert!(sides.iter().all(Side::is_clean));
    }
}

/// The opposite direction: an expectation into a device's slots is received into staging slots once its
/// sender's heads are known.
#[test]
fn a_receiver_that_lacks_heads_of_its_sender_stages_after_all() {
    let network = SimNetwork::new(4, Faults { delay_ticks_max: 3, ..Faults::default() });
    let sides = [(shard(0, 4), Reach::Both), (shard(2, 2), Reach::Both)].map(|(layout, reach)| {
        simulated_side(&Shape { layout, ..Shape::direct(4, SumFaults::default()) }, reach, &network)
    });
    let mut world = World::new(sides, "0".to_owned(), move || network.advance(1), Instant::now());
    for transfer in 1..=9 {
        let (sources, targets) = (world.sides[SENDER].slots(3), world.sides[RECEIVER].slots(3));
        sources.iter().for_each(|slot| world.sides[SENDER].fill(slot, &heads_of(&shard(0, 4))));
        world.expect(transfer, 0, targets);
        // The first transfer is not cancelled, the second before its way of receiving is known, the third after.
        let cancelled_after = [None, Some(0), Some(9)][transfer as usize % 3];
        world.run(cancelled_after.unwrap_or(5));
        let staged = world.sides[RECEIVER].counter("received_staged");
        if cancelled_after.is_some() {
            world.command(RECEIVER, Command::Cancel { transfer });
        }
        world.push(transfer, &sources, 0..3);
        world.command(SENDER, Command::PushEnd { transfer });
        let (slots, outcome) = world.wait();
        match cancelled_after {
            None => assert_eq!((slots.len(), outcome), (3, Outcome::Complete)),
            Some(_) => assert_eq!((slots.len(), outcome), (0, Outcome::SenderStopped)),
        }
        let is_known = transfer > 1 && cancelled_after != Some(0) || transfer == 3;
        assert!(!is_known || staged >= transfer / 3, "transfer {transfer}: {staged} staged");
        for slot in &slots {
            assert!(world.sides[RECEIVER].bytes_of(slot) == heads_of(&shard(2, 2)), "transfer {transfer}");
        }
    }
    world.run_until_idle();
    let of = |side: usize, name: &str| world.sides[side].counter(name);
    assert_eq!((of(RECEIVER, "received_directly"), of(SENDER, "sent_directly")), (0, 0));
    assert_eq!(of(RECEIVER, "received_staged"), 6, "all but those that were cancelled before");
}

/// A given-back expectation with more blocks than there are staging slots is refused, like one that is
/// staged from the beginning.
#[test]
fn a_receiver_with_too_few_staging_slots_refuses_what_it_cannot_receive_directly() {
    let network = SimNetwork::new(4, Faults::default());
    let sides = [(shard(0, 4), 32), (shard(2, 2), 8)].map(|(layout, staging_slots)| {
        let shape = Shape { layout, staging_slots, ..Shape::direct(4, SumFaults::default()) };
        simulated_side(&shape, Reach::Both, &network)
    });
    let mut world = World::new(sides, "0".to_owned(), move || network.advance(1), Instant::now());
    // Half of eight slots are for received blocks.
    for (transfer, blocks, expected) in
        [(1, 5, Outcome::Refused), (2, 4, Outcome::Complete), (3, 5, Outcome::Refused)]
    {
        let (sources, targets) = (world.sides[SENDER].slots(blocks), world.sides[RECEIVER].slots(blocks));
        world.push(transfer, &sources, 0..3);
        world.command(SENDER, Command::PushEnd { transfer });
        world.expect(transfer, 0, targets);
        let (slots, outcome) = world.wait();
        let count = if expected == Outcome::Complete { blocks } else { 0 };
        assert_eq!((slots.len(), outcome), (count, expected), "transfer {transfer}");
        drop((slots, sources));
        world.run_until_idle();
    }
}

/// Without staging slots the transfer ends, and both sides are told.
#[test]
fn other_heads_without_staging_end_the_transfer() {
    for (receiver, expected) in [(Reach::Host, Outcome::SenderStopped), (Reach::Device, Outcome::Refused)] {
        let network = SimNetwork::new(4, Faults::default());
        let mut sides = [(shard(2, 2), Reach::Sources), (shard(0, 4), receiver)].map(|(layout, reach)| {
            simulated_side(&Shape { layout, ..Shape::direct(4, SumFaults::default()) }, reach, &network)
        });
        let (mut now, transfer, content, first_block) = (Instant::now(), 1, [9; 16], 0);
        let (slots, layers) = (sides[SENDER].slots(3), 0..3);
        sides[SENDER].node.handle(Command::Push { transfer, content, first_block, slots, layers }, now);
        sides[SENDER].node.handle(Command::PushEnd { transfer }, now);
        let (slots, address) = (sides[RECEIVER].slots(3), "0".to_owned());
        let deadline = now + Duration::from_secs(2);
        sides[RECEIVER]
            .handle(Command::Expect { transfer, address, content, first_block, slots, deadline }, now);
        for _ in 0..100 {
            now += TICK;
            network.advance(1);
            let [sender, receiver] = &mut sides;
            sender.node.poll(now, &mut sender.notices);
            receiver.staging.poll(&mut receiver.node, now, &mut receiver.notices);
        }
        let told = std::mem::take(&mut sides[RECEIVER].notices);
        assert!(matches!(told[..], [Notice::Arrived { outcome, .. }] if outcome == expected), "{told:?}");
        let told = std::mem::take(&mut sides[SENDER].notices);
        assert!(matches!(told[..], [Notice::Pushed { complete: false, .. }]), "{told:?}");
        drop(told);
        assert!(sides.iter().all(Side::is_clean));
    }
}

/// A fabric that shows device slots to its peers, on a node without a checksummer: refused, since no
/// staging slot can replace them.
#[test]
fn device_slots_that_nobody_verifies_are_refused() {
    let shape = Shape { sums: None, ..Shape::direct(2, SumFaults::default()) };
    let (mut world, _) = simulated(&shape, Faults::default());
    let targets = world.sides[RECEIVER].slots(2);
    world.expect(1, 0, targets);
    world.run(3);
    assert!(matches!(world.arrival(), Some((slots, Outcome::Refused)) if slots.is_empty()));
    world.push_whole(2, 2);
    world.run(3);
    assert_eq!(world.sides[SENDER].counter("sent_staged"), 1, "what is sent can be staged all the same");
    world.run_until_idle();
}

/// Peers write to one slab of a kind, by slot numbers: slots of another slab of that kind would be taken
/// for live slots of it.
#[test]
fn slots_of_a_slab_that_peers_do_not_write_to_are_refused() {
    let network = SimNetwork::new(2, Faults::default());
    let shape = Shape::direct(2, SumFaults::default());
    let _sender = simulated_side(&shape, Reach::Device, &network);
    let layout = SlabLayout { slot_bytes: LAYOUT.slot_bytes(), slot_count: 8 };
    let memory: Arc<dyn DeviceMemory> = DeviceDouble::new(layout.slots_bytes(), Abilities::default());
    let shown = Arc::new(Slab::on_device("shown", layout, memory).expect("slab"));
    let mut side = Side::new(&shape, |_, _| network.add_direct_node(Arc::clone(&shown)));
    let (mut now, content, first_block) = (Instant::now(), [1; 16], 0);
    let slots = [side.slots(2), vec![side.host.acquire().expect("slot")]];
    for (transfer, slots) in (1..).zip(slots) {
        let (address, deadline) = ("0".to_owned(), now + Duration::from_secs(1));
        side.handle(Command::Expect { transfer, address, content, first_block, slots, deadline }, now);
        now += TICK;
        side.staging.poll(&mut side.node, now, &mut side.notices);
        let told = std::mem::take(&mut side.notices);
        assert!(matches!(told[..], [Notice::Arrived { outcome: Outcome::Refused, .. }]), "{told:?}");
    }
    assert!(side.is_clean(), "nothing was staged");
}

/// A push that cannot be sent ends its transfer: one after the receiver's terms are known, and one after
/// others that could be sent.
#[test]
fn a_refused_push_is_never_complete() {
    for (layouts, receiver) in [([shard(2, 2), shard(0, 4)], Reach::Host), ([LAYOUT; 2], Reach::Device)] {
        let network = SimNetwork::new(4, Faults::default());
        let [first, second] = layouts;
        let sides = [(first, Reach::Sources), (second, receiver)].map(|(layout, reach)| {
            simulated_side(&Shape { layout, ..Shape::direct(4, SumFaults::default()) }, reach, &network)
        });
        let mut world = World::new(sides, "0".to_owned(), move || network.advance(1), Instant::now());
        let (device, targets) = (world.sides[SENDER].slots(2), world.sides[RECEIVER].slots(2));
        let mixed = vec![device[0].clone(), world.sides[SENDER].host.acquire().expect("slot")];
        world.expect(1, 0, targets);
        world.run(20);
        let (now, content, transfer) = (world.now, content_of(1), 1);
        for (slots, layers) in [(device, 0..1), (mixed, 1..2)] {
            let push = Command::Push { transfer, content, first_block: 0, slots, layers };
            world.sides[SENDER].node.handle(push, now);
        }
        world.sides[SENDER].node.handle(Command::PushEnd { transfer }, now);
        assert!(matches!(world.wait(), (slots, Outcome::SenderStopped) if slots.is_empty()));
        world.run_until_idle();
        let told = std::mem::take(&mut world.sides[SENDER].notices);
        let is_refusal = |notice: &Notice| matches!(notice, Notice::Pushed { complete: false, .. });
        assert!(!told.is_empty() && told.iter().all(is_refusal), "{told:?}");
    }
}

/// Sums of a push that is staged after all fail: they are no longer needed.
#[test]
fn late_sums_of_a_returned_push_do_not_end_it() {
    let network = SimNetwork::new(4, Faults::default());
    let sides = [(shard(2, 2), Reach::Sources), (shard(0, 4), Reach::Host)].map(|(layout, reach)| {
        let sums = SumFaults { polls_max: 4000, ..SumFaults::default() };
        simulated_side(&Shape { layout, ..Shape::direct(4, sums) }, reach, &network)
    });
    let mut world = World::new(sides, "0".to_owned(), move || network.advance(1), Instant::now());
    let (sources, targets) = (world.sides[SENDER].slots(3), world.sides[RECEIVER].slots(3));
    world.push(1, &sources, 0..3);
    world.command(SENDER, Command::PushEnd { transfer: 1 });
    drop(sources);
    world.run(3);
    world.expect(1, 0, targets);
    world.run_until(|world| world.sides[SENDER].counter("sent_staged") == 1);
    assert!(world.sides[SENDER].node.sums_in_flight() > 0, "they are late");
    world.sides[SENDER].summer().kill();
    let (slots, outcome) = world.wait();
    assert_eq!((slots.len(), outcome), (3, Outcome::Complete));
    drop(slots);
    world.run_until_idle();
    let told = std::mem::take(&mut world.sides[SENDER].notices);
    assert!(matches!(told[..], [Notice::Pushed { complete: true, .. }]), "{told:?}");
}

/// Encodes a node's greeting: its oldest and newest version, layout, the set of checksums, the one that it
/// asks for.
fn greeting(versions: [u16; 2], checksums: u8, wanted: u8) -> Box<[u8]> {
    let PieceLayout { layers, rows, heads, head_bytes, fingerprint } = LAYOUT;
    let mut bytes = vec![1];
    versions.iter().for_each(|version| bytes.extend(version.to_le_bytes()));
    bytes.extend(layers.to_le_bytes());
    bytes.extend(rows.to_le_bytes());
    bytes.extend([heads.first.to_le_bytes(), heads.count.to_le_bytes()].concat());
    bytes.extend(head_bytes.to_le_bytes());
    bytes.extend(fingerprint.to_le_bytes());
    bytes.extend([checksums, wanted]);
    bytes.into_boxed_slice()
}

/// The reasons are tested in `negotiation.rs`; here, that the connection ends, and only with a reason.
#[test]
fn greetings_that_do_not_go_together_end_the_connection() {
    for (greeting, is_kept) in [
        (greeting([7, 7], 0b11, 0), true),
        (greeting([7, 7], 0b11, 1), true),
        (greeting([7, 7], 0b01, 0), true),
        (greeting([7, 7], 0b1111_1111, 1), true),
        (greeting([6, 7], 0b11, 0), true),
        ([&greeting([7, 9], 0b11, 0)[..], b"and what a later one says"].concat().into(), true),
        (greeting([5, 6], 0b11, 0), false),
        (greeting([8, 9], 0b11, 0), false),
        (greeting([7, 7], 0b11, 2), false),
        (greeting([7, 7], 0b01, 1), false),
        (greeting([7, 7], 0, 0), false),
        (greeting([7, 7], 0b11, 0)[..27].into(), false),
    ] {
        let network = SimNetwork::new(1, Faults::default());
        let layout = SlabLayout { slot_bytes: LAYOUT.slot_bytes(), slot_count: 4 };
        let slab = || Arc::new(Slab::create("greetings", layout, PageSize::Standard).expect("slab"));
        let counters = Arc::new(TransferCounters::default());
        let mut node = TransferNode::new(network.add_node(slab()), LAYOUT, Limits::default(), counters);
        let mut stranger = network.add_node(slab());
        let peer = stranger.connect("0").expect("address");
        let (mut now, mut events, mut notices) = (Instant::now(), Vec::new(), Vec::new());
        for step in 0..20 {
            now += TICK;
            network.advance(1);
            node.poll(now, &mut notices);
            stranger.poll(16, &mut events);
            if step == 5 {
                stranger.post(WorkRequest::message(peer, greeting.clone())).expect("room");
            }
        }
        let is_down = events.iter().any(|event| matches!(event, Event::PeerDown { .. }));
        assert_eq!(is_down, !is_kept, "{greeting:?}: {events:?}");
    }
}

/// Tests the rig: a slot that is kept on purpose must be detected.
#[test]
#[should_panic(expected = "something is left")]
fn a_planted_leak_is_found() {
    let (mut world, _) = simulated(&Shape::direct(1, SumFaults::default()), Faults::default());
    std::mem::forget(world.sides[SENDER].device.acquire());
    world.run_until_idle();
}
