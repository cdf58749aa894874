//! Order within a lane, also over several connections; independence of the lanes; full queues.

use std::time::Instant;

use dataplane_fabric::{Event, Fabric, Full, Operation, Priority, SlotRange, WorkRequest};
use dataplane_tcp::TcpConfig;

use crate::nodes::{Nodes, PATIENCE, completed, content, fill, target, write};

const MIB: usize = 1 << 20;

/// Large and small writes, then a message, an immediate or a read: each finds all bytes in place.
#[test]
fn what_follows_a_write_finds_it_landed() {
    for connections_per_peer in [1, 2, 8] {
        let config = TcpConfig { connections_per_peer, ..TcpConfig::default() };
        let mut nodes = Nodes::new(&config, 3 * MIB, 8);
        let from: Vec<_> = std::iter::from_fn(|| nodes.pool_a.acquire()).collect();
        let to: Vec<_> = std::iter::from_fn(|| nodes.pool_b.acquire()).collect();
        let into = &from[7];
        for round in 0..40_u32 {
            let byte = round as u8 + 1;
            let lens = [3 * MIB, 100, 20_000, MIB + 1, 16 << 10, 4096, 2 * MIB];
            for (at, len) in lens.into_iter().enumerate() {
                fill(&from[at], len, byte);
                let immediate = (round % 3 == 1 && at == 6).then_some(round);
                nodes.post(Priority::Urgent, 0, write(&from[at], &to[at], len, immediate));
            }
            match round % 3 {
                0 => nodes.post(Priority::Urgent, 0, Operation::Send { message: Box::new([byte]) }),
                1 => {}
                _ => {
                    let range = SlotRange { slot: into.clone(), offset: 0, len: 2 * MIB as u32 };
                    let read = Operation::Read { into: range, from: target(&to[6]), rows: None };
                    nodes.post(Priority::Urgent, 9, read);
                }
            }
            nodes.until("what follows", |nodes| {
                nodes
                    .seen_b
                    .iter()
                    .any(|event| matches!(event, Event::Message { .. } | Event::Immediate { .. }))
                    || completed(&nodes.seen_a, 9).is_some()
            });
            for (at, len) in lens.into_iter().enumerate() {
                assert!(
                    content(&to[at], len).iter().all(|found| *found == byte),
                    "round {round}, write {at}"
                );
            }
            if round % 3 == 2 {
                assert!(content(into, 2 * MIB).iter().all(|found| *found == byte), "round {round}, the read");
            }
            nodes.forget();
        }
    }
}

/// Writes of the same bytes, large and small in turn, with nothing between them: the last one stays.
#[test]
fn writes_of_the_same_bytes_keep_their_order() {
    for connections_per_peer in [2, 5] {
        let config = TcpConfig { connections_per_peer, ..TcpConfig::default() };
        let mut nodes = Nodes::new(&config, 2 * MIB, 9);
        let from: Vec<_> = std::iter::from_fn(|| nodes.pool_a.acquire()).collect();
        let to: Vec<_> = std::iter::from_fn(|| nodes.pool_b.acquire()).collect();
        from.iter().zip(1..).for_each(|(slot, byte)| fill(slot, 2 * MIB, byte));
        for round in 0..30_usize {
            let (first, second) = (&to[round % 2], &to[2]);
            for at in 0..9 {
                let len = [2 * MIB, 20_000, 100, MIB][(at + round) % 4];
                nodes.post(Priority::Urgent, 0, write(&from[at], first, len, None));
                nodes.post(Priority::Urgent, 0, write(&from[8 - at], second, 2 * MIB, None));
                if at % 3 == 0 {
                    nodes.a.flush();
                }
            }
            nodes.post(Priority::Urgent, 0, Operation::Send { message: Box::new([1]) });
            nodes.until("the message", |nodes| !nodes.seen_b.is_empty());
            nodes.forget();
            assert_eq!(content(first, 100), [9; 100], "round {round}");
            assert!(content(second, 2 * MIB).iter().all(|byte| *byte == 1), "round {round}");
        }
    }
}

fn seconds_to_deliver(nodes: &mut Nodes, message: u8) -> f64 {
    let start = Instant::now();
    nodes.post(Priority::Urgent, 0, Operation::Send { message: Box::new([message]) });
    nodes.until("the message", |nodes| {
        nodes.seen_b.iter().any(|event| matches!(event, Event::Message { .. }))
    });
    nodes.seen_b.clear();
    start.elapsed().as_secs_f64()
}

/// 64 MiB wait on the background lane when an urgent message is posted.
#[test]
fn nothing_urgent_waits_behind_the_background() {
    let mut nodes = Nodes::new(&TcpConfig::default(), MIB, 64);
    let from: Vec<_> = std::iter::from_fn(|| nodes.pool_a.acquire()).collect();
    let to: Vec<_> = std::iter::from_fn(|| nodes.pool_b.acquire()).collect();
    let mut idle: Vec<f64> = (0..21).map(|_| seconds_to_deliver(&mut nodes, 1)).collect();
    let (mut busy, mut drained) = (Vec::new(), Vec::new());
    for _ in 0..9 {
        nodes.forget();
        let start = Instant::now();
        for (at, (from, to)) in from.iter().zip(&to).enumerate() {
            nodes.post(Priority::Background, at as u64 + 1, write(from, to, MIB, None));
        }
        // The background is under way, not only queued.
        (0..4).for_each(|_| nodes.step());
        busy.push(seconds_to_deliver(&mut nodes, 2));
        assert!(completed(&nodes.seen_a, 64).is_none(), "the background was over before the message");
        nodes.until("the background", |nodes| completed(&nodes.seen_a, 64).is_some());
        drained.push(start.elapsed().as_secs_f64());
    }
    let median = |times: &mut Vec<f64>| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    };
    let (idle, busy, drained) = (median(&mut idle), median(&mut busy), median(&mut drained));
    let us = 1e6;
    println!(
        "idle {:.1} us, behind 64 MiB {:.1} us ({:.1} times); all 64 MiB {:.0} us",
        idle * us,
        busy * us,
        busy / idle,
        drained * us
    );
    // A turn of each side lies between, 256 KiB of 64 MiB each, and what the noise of a machine adds.
    assert!(busy < drained / 20.0 && busy < idle * 100.0, "{busy} s of {drained} s");
}

/// Both sides keep all their queues full with writes and reads of both lanes; everything ends, nothing is lost.
#[test]
fn full_queues_on_both_sides_do_not_block_each_other() {
    for connections_per_peer in [1, 4] {
        let config =
            TcpConfig { connections_per_peer, queue_depth: 64, reads_max: 8, ..TcpConfig::default() };
        let mut nodes = Nodes::new(&config, 512 << 10, 6);
        let slots_a: Vec<_> = std::iter::from_fn(|| nodes.pool_a.acquire()).collect();
        let slots_b: Vec<_> = std::iter::from_fn(|| nodes.pool_b.acquire()).collect();
        let total = 3000_u64;
        let (mut next_a, mut next_b, mut fulls) = (1, 1, 0_u64);
        let (mut done_a, mut done_b) = (0, 0);
        let start = Instant::now();
        while done_a < total || done_b < total {
            for side in 0..2 {
                let (fabric, peer, next, ours, theirs) = match side {
                    0 => (&mut nodes.a, nodes.to_b, &mut next_a, &slots_a, &slots_b),
                    _ => (&mut nodes.b, nodes.to_a, &mut next_b, &slots_b, &slots_a),
                };
                while *next <= total {
                    let id: u64 = *next;
                    let (ours, theirs) = (&ours[id as usize % 6], &theirs[id as usize * 5 % 6]);
                    let len = [64, 5000, 70_000, 512 << 10][id as usize / 2 % 4];
                    let operation = if id.is_multiple_of(2) {
                        write(ours, theirs, len, None)
                    } else {
                        let into = SlotRange { slot: ours.clone(), offset: 0, len: len as u32 };
                        Operation::Read { into, from: target(theirs), rows: None }
                    };
                    let priority = Priority::ALL[id as usize / 8 % 2];
                    if let Err(Full(_)) = fabric.post(WorkRequest { id, peer, priority, operation }) {
                        fulls += 1;
                        break;
                    }
                    *next += 1;
                }
            }
            nodes.step();
            done_a += nodes.seen_a.len() as u64;
            done_b += nodes.seen_b.len() as u64;
            let is_done = |event: &Event| {
                matches!(event, Event::Completed { completion: dataplane_fabric::Completion::Done, .. })
            };
            assert!(
                nodes.seen_a.iter().chain(&nodes.seen_b).all(is_done),
                "{:?} {:?}",
                nodes.seen_a,
                nodes.seen_b
            );
            nodes.forget();
            assert!(start.elapsed() < PATIENCE * 3, "stuck at {done_a} and {done_b} of {total}");
        }
        assert_eq!((done_a, done_b), (total, total));
        assert!(fulls > 100, "the queues were full only {fulls} times");
    }
}
