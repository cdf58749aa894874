//! Reads that must not succeed, and what a peer may ask for.

use dataplane_fabric::{Completion, Fabric, Full, Operation, Priority, Rows, SlotRange, Target, WorkRequest};
use dataplane_memory::SlabKind;
use dataplane_tcp::TcpConfig;

use crate::nodes::{self, Nodes, completed, content, fill, is_down, target};

const SLOT_BYTES: usize = 8 << 20;

fn read(nodes: &Nodes, from: Target, len: usize, rows: Option<Rows>) -> Operation {
    let slot = nodes.pool_a.acquire().expect("slot");
    Operation::Read { into: SlotRange { slot, offset: 0, len: len as u32 }, from, rows }
}

fn goes_down(nodes: &mut Nodes, id: u64) {
    nodes.until("both sides to be told", |nodes| {
        nodes.seen_a.iter().any(is_down) && nodes.seen_b.iter().any(is_down)
    });
    assert_eq!(completed(&nodes.seen_a, id), Some(Completion::PeerDown));
    assert_eq!(nodes.pool_a.used_count(), 0, "an ended read holds no slot");
}

#[test]
fn stale_names_and_ranges_outside_end_the_connection() {
    let rows = |bytes, stride| Some(Rows { bytes, local_stride: bytes, remote_stride: stride });
    for (generation, offset, len, rows) in [
        (1, 0, 64, None),
        (0, SLOT_BYTES as u32 - 63, 64, None),
        (0, 4, 64, rows(8, (SLOT_BYTES as u32 - 8) / 7)),
        (0, 0, 64, rows(8, u32::MAX)),
    ] {
        let mut nodes = Nodes::new(&TcpConfig::default(), SLOT_BYTES, 2);
        let there = nodes.pool_b.acquire().expect("slot");
        let from = Target { slab: SlabKind::Host, slot: there.slot(), generation, offset };
        let operation = read(&nodes, from, len, rows);
        nodes.post(Priority::Urgent, 5, operation);
        goes_down(&mut nodes, 5);
    }
}

/// The slot is given back and taken again while its bytes are on their way.
#[test]
fn a_slot_that_is_reused_while_it_is_read_is_never_served() {
    // The short read is one send, which is caught when it ends; the long one is caught at its next.
    for (connections_per_peer, len) in [(1, 2 << 20), (1, SLOT_BYTES), (3, SLOT_BYTES)] {
        let config = TcpConfig { connections_per_peer, send_buffer_bytes: 64 << 10, ..TcpConfig::default() };
        let mut nodes = Nodes::new(&config, SLOT_BYTES, 2);
        let there = nodes.pool_b.acquire().expect("slot");
        fill(&there, SLOT_BYTES, 3);
        let from = target(&there);
        let operation = read(&nodes, from, len, None);
        nodes.post(Priority::Urgent, 5, operation);
        // The request goes over and the answer begins; the reader takes nothing of it.
        nodes.a.flush();
        for _ in 0..50 {
            nodes.b.poll(64, &mut nodes.seen_b);
            nodes.b.flush();
        }
        assert!(nodes.b.counters().sent_bytes.get() < len as u64, "not all was sent");
        drop(there);
        goes_down(&mut nodes, 5);
    }
}

#[test]
fn reads_beyond_the_bound_are_handed_back() {
    let mut nodes = Nodes::new(&TcpConfig { reads_max: 3, ..TcpConfig::default() }, 4096, 8);
    let there = nodes.pool_b.acquire().expect("slot");
    fill(&there, 4096, 8);
    for id in 1..=4 {
        let operation = read(&nodes, target(&there), 4096, None);
        let request = WorkRequest { id, peer: nodes.to_b, priority: Priority::Urgent, operation };
        match nodes.a.post(request) {
            Ok(()) => assert!(id <= 3),
            Err(Full(back)) => assert_eq!((id, back.id), (4, 4)),
        }
    }
    nodes.until("three reads", |nodes| nodes.seen_a.len() == 3);
    assert_eq!(nodes.pool_a.used_count(), 0);
    let operation = read(&nodes, target(&there), 0, None);
    nodes.post(Priority::Background, 9, operation);
    nodes.until("an empty read", |nodes| completed(&nodes.seen_a, 9).is_some());
}

#[test]
fn what_is_sent_without_a_copy_arrives_and_the_attempts_end_where_the_kernel_copies() {
    let config = TcpConfig { zero_copy_from: Some(4096), ..TcpConfig::default() };
    let mut nodes = Nodes::new(&config, 1 << 20, 4);
    let (from, to) = (nodes.pool_a.acquire().expect("slot"), nodes.pool_b.acquire().expect("slot"));
    for round in 0..30_u8 {
        fill(&from, 1 << 20, round + 1);
        let len = [1 << 20, 5000, 4096, 100][usize::from(round) % 4];
        nodes.post(Priority::Urgent, 1, nodes::write(&from, &to, len, Some(7)));
        nodes.until("the write", |nodes| completed(&nodes.seen_a, 1).is_some() && !nodes.seen_b.is_empty());
        assert!(content(&to, len).iter().all(|byte| *byte == round + 1), "round {round}");
        nodes.forget();
    }
    let counters = nodes.a.counters();
    let (copied, sent) = (counters.copied_sends.get(), counters.zero_copy_sends.get());
    println!(
        "{copied} sends copied after all, {sent} not; {} registrations failed",
        counters.failed_registrations.get()
    );
    assert!(copied >= 1 && copied + sent <= 2, "loopback copies, and one report is enough");
    drop(from);
    assert_eq!(nodes.pool_a.used_count(), 0, "slots are free once the kernel has said so");
}
