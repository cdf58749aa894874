//! Staging in combination with host slots, senders with other heads, and threads.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use dataplane_fabric::sim::{Faults, SimNetwork};
use dataplane_fabric::wait::ThreadPolicy;
use dataplane_memory::DeviceMemory;
use dataplane_memory::testing::CopyFaults;
use dataplane_transfer::{Command, HeadRange, Notice, Outcome, PieceLayout, TransferService};

use crate::rig::{
    LAYOUT, RECEIVER, Reach, SENDER, Shape, Side, TICK, World, content_of, shared_memory, simulated,
    simulated_side,
};

/// A node without staging refuses device slots, and one with it passes on commands for host slots only.
#[test]
fn device_slots_never_reach_the_node() {
    let (mut world, _) = simulated(&Shape::new(1, CopyFaults::default()), Faults::default());
    let (now, content, layers) = (world.now, [0; 16], 0..1);
    let side = &mut world.sides[SENDER];
    let slots = side.slots(1);
    let push = Command::Push { transfer: 1, content, first_block: 0, slots: slots.clone(), layers };
    side.node.handle(push, now);
    let address = "1".to_owned();
    let expect = Command::Expect { transfer: 2, address, content, first_block: 0, slots, deadline: now };
    side.node.handle(expect, now);
    side.node.poll(now, &mut side.notices);
    let told = std::mem::take(&mut side.notices);
    let is_refused = matches!(
        told[..],
        [
            Notice::Pushed { transfer: 1, complete: false },
            Notice::Arrived { transfer: 2, outcome: Outcome::Refused, .. }
        ]
    );
    assert!(is_refused, "{told:?}");
    assert_eq!(side.device.used_count(), 0);
    let source = side.host.acquire().expect("slot");
    source.slab().write(source.slot(), 0, &crate::rig::content(3, 0));
    let targets = world.sides[RECEIVER].slots(1);
    world.push(3, &[source], 0..LAYOUT.layers);
    world.command(SENDER, Command::PushEnd { transfer: 3 });
    world.expect(3, 0, targets);
    world.run(40);
    let (slots, outcome) = world.arrival().expect("over");
    assert_eq!(outcome, Outcome::Complete);
    world.check(&slots, 3, 0);
    assert_eq!(world.sides[SENDER].staging.copier_mut().doorbells(), 0, "no copy at the sender");
}

/// Two senders with half of the heads each fill one receiver's device slots, each writing only its own rows.
#[test]
fn senders_with_some_of_the_heads_leave_the_others_alone() {
    let shard = |first, count| {
        let heads = HeadRange { first, count };
        PieceLayout { layers: 3, rows: 8, heads, head_bytes: 16, fingerprint: 5 }
    };
    let network = SimNetwork::new(4, Faults { delay_ticks_max: 3, ..Faults::default() });
    let layouts = [shard(0, 2), shard(2, 2), shard(0, 4)];
    let mut sides = layouts.map(|layout| {
        let shape = Shape { layout, ..Shape::new(4, CopyFaults { polls_max: 5, fail_one_in: 0 }) };
        simulated_side(&shape, Reach::Host, &network)
    });
    let bytes = |layout: &PieceLayout| -> Vec<u8> {
        let heads = layout.heads.first..layout.heads.first + layout.heads.count;
        let rows = 0..u32::from(layout.layers) * layout.rows;
        let head = |row: u32, head: u16| {
            (0..layout.head_bytes).map(move |at| (row * 31 + u32::from(head) * 77 + at) as u8)
        };
        rows.flat_map(|row| heads.clone().flat_map(move |number| head(row, number))).collect()
    };
    let (mut now, content) = (Instant::now(), [9; 16]);
    let deadline = now + Duration::from_secs(5);
    let targets = sides[2].slots(3);
    for sender in 0..2 {
        let (transfer, slots, address) = (sender as u64 + 1, targets.clone(), sender.to_string());
        sides[2].handle(Command::Expect { transfer, address, content, first_block: 0, slots, deadline }, now);
        let sources = sides[sender].slots(3);
        for slot in &sources {
            sides[sender].fill(slot, &bytes(&layouts[sender]));
        }
        for layer in 0..3 {
            let (slots, layers) = (sources.clone(), layer..layer + 1);
            sides[sender].handle(Command::Push { transfer, content, first_block: 0, slots, layers }, now);
        }
        sides[sender].handle(Command::PushEnd { transfer }, now);
    }
    for _ in 0..500 {
        now += TICK;
        network.advance(1);
        for Side { staging, node, notices, .. } in &mut sides {
            staging.poll(node, now, notices);
        }
    }
    let whole = |notice: &Notice| matches!(notice, Notice::Arrived { outcome: Outcome::Complete, .. });
    assert_eq!(sides[2].notices.iter().filter(|notice| whole(notice)).count(), 2);
    for slot in &targets {
        assert!(sides[2].bytes_of(slot) == bytes(&layouts[2]), "every head at its place");
    }
    sides.iter_mut().for_each(|side| side.notices.clear());
    drop(targets);
    assert!(sides.iter().all(Side::is_clean));
}

/// Two threads over shared memory that sleep without work: rounds apart from each other, so that each
/// begins with both asleep.
#[test]
fn services_stage_in_their_own_threads() {
    let lease = Duration::from_secs(60);
    let shape = Shape { lease, ..Shape::new(11, CopyFaults { polls_max: 40, fail_one_in: 0 }) };
    let World { sides: [sender, receiver], address, .. } = shared_memory(&shape, 0);
    let (sources, targets) = (sender.slots(6), receiver.slots(6));
    let (memory, stride) = (Arc::clone(&receiver.memory), targets[0].slab().layout().stride());
    for (block, slot) in sources.iter().enumerate() {
        sender.fill(slot, &crate::rig::content(1, block));
    }
    let pools = [&sender, &receiver].map(|side| (Arc::clone(&side.device), Arc::clone(&side.host)));
    let (tell, told) = mpsc::channel();
    let [sender, receiver] = [sender, receiver].map(|side| {
        let tell = tell.clone();
        let notify = move |notice| drop(tell.send(notice));
        TransferService::start_staged(side.node, side.staging, ThreadPolicy::default(), notify)
            .expect("a thread")
    });
    for transfer in 1..=20 {
        let content = content_of(transfer);
        let (slots, deadline) = (targets.clone(), Instant::now() + Duration::from_secs(20));
        let address = address.clone();
        let expect = Command::Expect { transfer, address, content, first_block: 0, slots, deadline };
        receiver.submit(expect).expect("room");
        for layer in 0..LAYOUT.layers {
            let (slots, layers) = (sources.clone(), layer..layer + 1);
            let push = Command::Push { transfer, content, first_block: 0, slots, layers };
            sender.submit(push).expect("room");
        }
        sender.submit(Command::PushEnd { transfer }).expect("room");
        let mut seen = [0; 2];
        while seen != [1, 1] {
            match told.recv_timeout(Duration::from_secs(60)).expect("a notice") {
                Notice::Arrived { slots, outcome, .. } => {
                    assert_eq!((slots.len(), outcome), (6, Outcome::Complete));
                    seen[0] += 1;
                }
                Notice::Pushed { complete, .. } => {
                    assert!(complete);
                    seen[1] += 1;
                }
            }
        }
        std::thread::sleep(TICK * 3);
    }
    for (block, slot) in targets.iter().enumerate() {
        let mut bytes = vec![0; LAYOUT.slot_bytes()];
        memory.read(slot.slot() as usize * stride, &mut bytes).expect("inside");
        assert!(bytes == crate::rig::content(1, block), "block {block}");
    }
    drop((sender, receiver, sources, targets));
    assert!(pools.iter().all(|(device, host)| device.used_count() + host.used_count() == 0), "slots leaked");
}
