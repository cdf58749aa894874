//! Moves and sharded hand-offs over a simulated fabric: every byte is checked, whatever happens on the way.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_fabric::sim::{Faults, SimFabric, SimNetwork};
use dataplane_fabric::{Priority, Rows, SlotRange, Target};
use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool, SlotRef};
use dataplane_transfer::{
    Batch, Command, Direction, HeadRange, Limits, MoveOutcome, Notice, Outcome, Piece, PieceLayout, Ticket,
    TransferCounters, TransferNode, senders_of,
};

const SLOT_BYTES: usize = 64 << 10;
const TICK: Duration = Duration::from_millis(1);

struct World {
    network: SimNetwork,
    pools: Vec<Arc<SlotPool>>,
    nodes: Vec<TransferNode<SimFabric>>,
    notices: Vec<Vec<Notice>>,
    now: Instant,
}

impl World {
    fn new(seed: u64, faults: Faults, layouts: &[PieceLayout], limits: Limits) -> Self {
        let network = SimNetwork::new(seed, faults);
        let pool_of = |layout: &PieceLayout| {
            let layout = SlabLayout { slot_bytes: layout.slot_bytes(), slot_count: 64 };
            SlotPool::new(Arc::new(Slab::create("moves", layout, PageSize::Standard).expect("slab")))
        };
        let pools: Vec<_> = layouts.iter().map(pool_of).collect();
        let node = |(layout, pool): (&PieceLayout, &Arc<SlotPool>)| {
            let fabric = network.add_node(Arc::clone(pool.slab()));
            TransferNode::new(fabric, *layout, limits, Arc::new(TransferCounters::default()))
        };
        let nodes = layouts.iter().zip(&pools).map(node).collect();
        let notices = layouts.iter().map(|_| Vec::new()).collect();
        Self { network, pools, nodes, notices, now: Instant::now() }
    }

    fn pair(seed: u64, faults: Faults, limits: Limits) -> Self {
        let layout = PieceLayout::whole(1, SLOT_BYTES as u32, 1);
        Self::new(seed, faults, &[layout, layout], limits)
    }

    fn step(&mut self) {
        self.now += TICK;
        self.network.advance(1);
        for (node, notices) in self.nodes.iter_mut().zip(&mut self.notices) {
            node.poll(self.now, notices);
        }
    }

    fn run(&mut self, ticks: u32) {
        (0..ticks).for_each(|_| self.step());
    }

    fn start(&mut self, batch: Batch) -> Ticket {
        let ticket = self.nodes[0].open_move().expect("room for a batch");
        self.nodes[0].handle(Command::Move { ticket, batch }, self.now);
        ticket
    }

    fn outcome(&self, ticket: Ticket) -> Option<MoveOutcome> {
        self.notices[0].iter().find_map(|notice| match notice {
            Notice::Moved { ticket: moved, outcome } if *moved == ticket => Some(*outcome),
            _ => None,
        })
    }

    fn slots(&self, node: usize, count: usize) -> Vec<SlotRef> {
        (0..count).map(|_| self.pools[node].acquire().expect("enough slots")).collect()
    }
}

fn fill(slot: &SlotRef, seed: usize) {
    let bytes: Vec<u8> = (0..SLOT_BYTES).map(|at| (at * 13 + at / 255 + seed * 101) as u8).collect();
    slot.slab().write(slot.slot(), 0, &bytes);
}

fn bytes_of(slot: &SlotRef) -> Vec<u8> {
    let mut bytes = vec![0; SLOT_BYTES];
    slot.slab().read(slot.slot(), 0, &mut bytes);
    bytes
}

fn whole(here: &SlotRef, there: &SlotRef) -> Piece {
    Piece {
        local: SlotRange { slot: here.clone(), offset: 0, len: SLOT_BYTES as u32 },
        remote: Target { slot: there.slot(), generation: there.generation(), offset: 0 },
        rows: None,
    }
}

fn batch(direction: Direction, priority: Priority, pieces: Vec<Piece>, deadline: Instant) -> Batch {
    Batch { address: "1".to_owned(), direction, priority, pieces, deadline }
}

#[test]
fn writes_and_reads_bring_every_byte_in_slices() {
    for seed in 1..=6 {
        let limits = Limits { slice_bytes: 5000, urgent_window_bytes: 20_000, ..Limits::default() };
        let faults = Faults { delay_ticks_max: 7, queue_depth_max: 5, ..Faults::default() };
        let mut world = World::pair(seed, faults, limits);
        let (here, there) = (world.slots(0, 8), world.slots(1, 8));
        for (number, (here, there)) in here.iter().zip(&there).enumerate() {
            fill(here, number);
            fill(there, 50 + number);
        }
        let deadline = world.now + Duration::from_secs(60);
        let written = here[..4].iter().zip(&there[..4]).map(|(here, there)| whole(here, there)).collect();
        let read = here[4..].iter().zip(&there[4..]).map(|(here, there)| whole(here, there)).collect();
        let writes = world.start(batch(Direction::Write, Priority::Urgent, written, deadline));
        let reads = world.start(batch(Direction::Read, Priority::Background, read, deadline));
        world.run(600);
        assert_eq!(
            (world.outcome(writes), world.outcome(reads)),
            (Some(MoveOutcome::Done), Some(MoveOutcome::Done))
        );
        for (here, there) in here.iter().zip(&there) {
            assert!(bytes_of(here) == bytes_of(there), "seed {seed}: slots differ");
        }
        assert!(world.nodes[0].is_idle());
        drop((here, there));
        assert_eq!(world.pools[0].used_count(), 0, "slots leaked");
    }
}

#[test]
fn rows_are_cut_between_rows() {
    let limits = Limits { slice_bytes: 1000, ..Limits::default() };
    let mut world = World::pair(3, Faults::default(), limits);
    let (here, there) = (world.slots(0, 1).remove(0), world.slots(1, 1).remove(0));
    fill(&here, 1);
    fill(&there, 2);
    let (before, source) = (bytes_of(&there), bytes_of(&here));
    let rows = Rows { bytes: 96, local_stride: 256, remote_stride: 128 };
    let local = SlotRange { slot: here.clone(), offset: 32, len: 96 * 200 };
    let remote = Target { slot: there.slot(), generation: there.generation(), offset: 64 };
    let piece = Piece { local, remote, rows: Some(rows) };
    let deadline = world.now + Duration::from_secs(9);
    let ticket = world.start(batch(Direction::Write, Priority::Urgent, vec![piece], deadline));
    world.run(60);
    assert_eq!(world.outcome(ticket), Some(MoveOutcome::Done));
    let mut expected = before;
    for row in 0..200 {
        expected[64 + row * 128..][..96].copy_from_slice(&source[32 + row * 256..][..96]);
    }
    assert!(bytes_of(&there) == expected);
}

/// Background waits while something urgent is in flight, and is not forgotten.
#[test]
fn urgent_goes_before_background() {
    let limits = Limits {
        slice_bytes: 8192,
        urgent_window_bytes: 16_384,
        background_window_bytes: 8192,
        ..Limits::default()
    };
    let faults = Faults { delay_ticks_max: 3, ..Faults::default() };
    let mut world = World::pair(5, faults, limits);
    let (here, there) = (world.slots(0, 12), world.slots(1, 12));
    let pieces = |range: std::ops::Range<usize>| -> Vec<Piece> {
        range.map(|number| whole(&here[number], &there[number])).collect()
    };
    let deadline = world.now + Duration::from_secs(60);
    let (offload, urgent) = (pieces(0..8), pieces(8..12));
    let background = world.start(batch(Direction::Write, Priority::Background, offload, deadline));
    world.run(4);
    let first = world.start(batch(Direction::Write, Priority::Urgent, urgent, deadline));
    let mut finished = Vec::new();
    for _ in 0..2000 {
        world.step();
        for ticket in [background, first] {
            if world.outcome(ticket).is_some() && !finished.contains(&ticket) {
                finished.push(ticket);
            }
        }
    }
    assert_eq!(finished, [first, background]);
}

#[test]
fn a_cancelled_or_late_batch_waits_for_what_is_in_flight() {
    for by_deadline in [false, true] {
        let limits = Limits { slice_bytes: 4096, urgent_window_bytes: 8192, ..Limits::default() };
        let faults = Faults { delay_ticks_max: 20, ..Faults::default() };
        let mut world = World::pair(7, faults, limits);
        let (here, there) = (world.slots(0, 4), world.slots(1, 4));
        let pieces = here.iter().zip(&there).map(|(here, there)| whole(here, there)).collect();
        let deadline = world.now + if by_deadline { TICK * 60 } else { Duration::from_secs(60) };
        let ticket = world.start(batch(Direction::Read, Priority::Urgent, pieces, deadline));
        drop(here);
        world.run(50);
        assert_eq!(world.outcome(ticket), None);
        if !by_deadline {
            world.nodes[0].cancel_move(ticket);
        }
        let mut ticks = 0;
        while world.outcome(ticket).is_none() {
            assert!(world.pools[0].used_count() > 0, "slots are held while reads may land in them");
            world.step();
            ticks += 1;
            assert!(ticks < 60, "never over");
        }
        let expected = if by_deadline { MoveOutcome::Deadline } else { MoveOutcome::Cancelled };
        assert_eq!(world.outcome(ticket), Some(expected));
        assert_eq!(world.pools[0].used_count(), 0, "slots leaked");
        assert!(world.nodes[0].is_idle());
    }
}

#[test]
fn a_dead_or_absent_peer_ends_a_batch() {
    let mut world = World::pair(9, Faults { delay_ticks_max: 9, ..Faults::default() }, Limits::default());
    let (here, there) = (world.slots(0, 4), world.slots(1, 4));
    let pieces = || here.iter().zip(&there).map(|(here, there)| whole(here, there)).collect::<Vec<_>>();
    let deadline = world.now + Duration::from_secs(60);
    let ticket = world.start(batch(Direction::Write, Priority::Urgent, pieces(), deadline));
    world.run(12);
    world.network.kill(1);
    world.run(30);
    assert_eq!(world.outcome(ticket), Some(MoveOutcome::PeerDown));
    // A connect that fails, then the rest that follows it: both are answered, the second at once.
    let absent = world.start(batch(Direction::Write, Priority::Urgent, pieces(), deadline));
    world.run(15);
    assert_eq!(world.outcome(absent), Some(MoveOutcome::PeerDown));
    let resting = world.start(batch(Direction::Write, Priority::Urgent, pieces(), deadline));
    world.step();
    assert_eq!(world.outcome(resting), Some(MoveOutcome::PeerDown));
    let nowhere =
        Batch { address: "mars".to_owned(), ..batch(Direction::Read, Priority::Urgent, pieces(), deadline) };
    let nowhere = world.start(nowhere);
    world.step();
    assert_eq!(world.outcome(nowhere), Some(MoveOutcome::Refused));
    drop(here);
    assert_eq!(world.pools[0].used_count(), 0, "slots leaked");
}

/// A fabric that never completes: the batch is given up and its peer disconnected, within the bound.
#[test]
fn a_mute_peer_cannot_hold_a_batch_for_ever() {
    let mut world = World::pair(11, Faults { delay_ticks_max: 1, ..Faults::default() }, Limits::default());
    let (here, there) = (world.slots(0, 1), world.slots(1, 1));
    let deadline = world.now + TICK * 20;
    world.run(3);
    world.network.set_faults(Faults { lose_one_in: 1, ..Faults::default() });
    let ticket =
        world.start(batch(Direction::Read, Priority::Urgent, vec![whole(&here[0], &there[0])], deadline));
    drop(here);
    world.run(1900);
    assert_eq!(world.outcome(ticket), None, "the peer may still write to the slot");
    world.run(200);
    assert_eq!(world.outcome(ticket), Some(MoveOutcome::Deadline));
    assert_eq!(world.pools[0].used_count(), 0, "slots leaked");
}

/// As many connects as waits allow, however many batches want the same dead peer.
#[test]
fn many_batches_make_few_connects() {
    let mut world = World::pair(13, Faults { delay_ticks_max: 2, ..Faults::default() }, Limits::default());
    world.network.kill(1);
    let (here, there) = (world.slots(0, 1), world.slots(1, 1));
    let mut waits = Vec::new();
    let mut down_since = world.now;
    for _ in 0..4000 {
        let deadline = world.now + Duration::from_secs(60);
        let ticket = world.start(batch(
            Direction::Write,
            Priority::Urgent,
            vec![whole(&here[0], &there[0])],
            deadline,
        ));
        world.step();
        // Answered within one step: no connect was made. Otherwise one was.
        if world.outcome(ticket).is_none() {
            waits.push(world.now - down_since);
            down_since = world.now;
            world.run(4);
        }
        world.nodes[0].close_move(ticket);
        world.notices[0].clear();
    }
    assert!((4..=14).contains(&waits.len()), "{} connects in 4 s: {waits:?}", waits.len());
    assert!(waits.last() > waits.get(1), "the waits grow: {waits:?}");
}

// --- sharded hand-offs ---

fn shard(heads: HeadRange) -> PieceLayout {
    PieceLayout { layers: 3, rows: 32, heads, head_bytes: 64, fingerprint: 5 }
}

fn model_byte(block: usize, layer: usize, row: usize, head: usize, at: usize) -> u8 {
    (block * 89 + layer * 53 + row * 31 + head * 7 + at) as u8
}

fn shard_bytes(layout: &PieceLayout, block: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    for layer in 0..usize::from(layout.layers) {
        for row in 0..layout.rows as usize {
            for head in usize::from(layout.heads.first)..usize::from(layout.heads.first + layout.heads.count)
            {
                bytes.extend(
                    (0..layout.head_bytes as usize).map(|at| model_byte(block, layer, row, head, at)),
                );
            }
        }
    }
    bytes
}

/// Prefill and decode with different tensor parallelism: each decode rank gets exactly its heads, from as many
/// prefill ranks as it takes, layer by layer, with the checksums of the common part.
#[test]
fn a_hand_off_between_different_parallelisms_is_exact() {
    const HEADS: u16 = 8;
    for (prefill, decode) in [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2), (8, 1), (16, 2), (2, 16)] {
        let ranks = |parallelism: u16| -> Vec<PieceLayout> {
            (0..parallelism)
                .map(|rank| shard(HeadRange::of_rank(HEADS, parallelism, rank).expect("divides")))
                .collect()
        };
        let (senders, receivers) = (ranks(prefill), ranks(decode));
        let layouts: Vec<PieceLayout> = senders.iter().chain(&receivers).copied().collect();
        let faults = Faults { delay_ticks_max: 4, ..Faults::default() };
        let mut world = World::new(u64::from(prefill * 100 + decode), faults, &layouts, Limits::default());
        let blocks = 5;
        let content = [9; 16];
        let sources: Vec<Vec<SlotRef>> = (0..senders.len()).map(|node| world.slots(node, blocks)).collect();
        for (layout, slots) in senders.iter().zip(&sources) {
            for (block, slot) in slots.iter().enumerate() {
                slot.slab().write(slot.slot(), 0, &shard_bytes(layout, block));
            }
        }
        let mut expected_arrivals = vec![0; layouts.len()];
        let mut asked = vec![0_u64; senders.len()];
        let mut targets = Vec::new();
        for (rank, receiver) in receivers.iter().enumerate() {
            let node = senders.len() + rank;
            let slots = world.slots(node, blocks);
            let heads: Vec<HeadRange> = senders.iter().map(|layout| layout.heads).collect();
            for sender in senders_of(receiver.heads, &heads).expect("all heads") {
                // One transfer for each pair of ranks.
                let transfer = (1 + sender as u64) << 32 | rank as u64;
                let (address, deadline) = (sender.to_string(), world.now + Duration::from_secs(5));
                let slots = slots.clone();
                let now = world.now;
                world.nodes[node].handle(
                    Command::Expect { transfer, address, first_block: 0, content, slots, deadline },
                    now,
                );
                for layer in 0..3 {
                    let slots = sources[sender].clone();
                    let layers = layer..layer + 1;
                    world.nodes[sender]
                        .handle(Command::Push { transfer, content, first_block: 0, slots, layers }, now);
                }
                world.nodes[sender].handle(Command::PushEnd { transfer }, now);
                asked[sender] += 1;
                expected_arrivals[node] += 1;
            }
            targets.push(slots);
        }
        world.run(400);
        for (rank, (receiver, slots)) in receivers.iter().zip(&targets).enumerate() {
            let node = senders.len() + rank;
            let arrived = world.notices[node]
                .iter()
                .filter(|notice| matches!(notice, Notice::Arrived { outcome: Outcome::Complete, slots, .. } if slots.len() == blocks))
                .count();
            assert_eq!(arrived, expected_arrivals[node], "tp {prefill} to {decode}, rank {rank}");
            for (block, slot) in slots.iter().enumerate() {
                let mut bytes = vec![0; receiver.slot_bytes()];
                slot.slab().read(slot.slot(), 0, &mut bytes);
                assert!(
                    bytes == shard_bytes(receiver, block),
                    "tp {prefill} to {decode}, rank {rank}: block {block}"
                );
            }
        }
        world.notices.iter_mut().for_each(Vec::clear);
        drop((sources, targets));
        for (node, pool) in world.nodes.iter().zip(&world.pools) {
            assert!(node.is_idle());
            assert_eq!(pool.used_count(), 0, "slots leaked");
        }
    }
}
