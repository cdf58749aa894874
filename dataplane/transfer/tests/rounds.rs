//! One round of a node does a bounded amount of work, and repeats none of it, for any backlog.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_fabric::sim::{Faults, SimFabric, SimNetwork};
use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool, SlotRef};
use dataplane_transfer::{
    Command, Limits, Notice, Outcome, PieceLayout, TransferCounters, TransferId, TransferNode,
};

const BLOCK_BYTES: usize = 300_000;
const LAYOUT: PieceLayout = PieceLayout::whole(2, BLOCK_BYTES as u32 / 2, 1);
const ROUND_BYTES: usize = 64 << 10;
/// Checksums are computed in chunks: the last one may exceed the budget by this much.
const CHUNK_BYTES: usize = 8 << 10;

struct Side {
    node: TransferNode<SimFabric>,
    pool: Arc<SlotPool>,
    counters: Arc<TransferCounters>,
    notices: Vec<Notice>,
}

impl Side {
    fn new(network: &SimNetwork, slots: u32) -> Self {
        let layout = SlabLayout { slot_bytes: BLOCK_BYTES, slot_count: slots };
        let slab = Slab::create("rounds", layout, PageSize::Standard).expect("a slab");
        let pool = SlotPool::new(Arc::new(slab));
        let counters = Arc::new(TransferCounters::default());
        let limits = Limits { round_bytes: ROUND_BYTES, ..Limits::default() };
        let fabric = network.add_node(Arc::clone(pool.slab()));
        let node = TransferNode::new(fabric, LAYOUT, limits, Arc::clone(&counters));
        Self { node, pool, counters, notices: Vec::new() }
    }

    fn acquire(&self, count: usize) -> Vec<SlotRef> {
        (0..count).map(|_| self.pool.acquire().expect("a slot")).collect()
    }

    fn counter(&self, name: &str) -> u64 {
        self.counters.snapshot().into_iter().find(|(known, ..)| *known == name).expect("a counter").2
    }
}

struct World {
    network: SimNetwork,
    sender: Side,
    receiver: Side,
    now: Instant,
}

impl World {
    fn new(faults: Faults, slots: u32) -> Self {
        let network = SimNetwork::new(1, faults);
        let (sender, receiver) = (Side::new(&network, slots), Side::new(&network, slots));
        Self { network, sender, receiver, now: Instant::now() }
    }

    /// Starts both halves of a transfer: all layers of `part_blocks` blocks are pushed at a time.
    fn hand_off(&mut self, transfer: TransferId, blocks: usize, part_blocks: usize) {
        let content = [transfer as u8; 16];
        let (sources, slots) = (self.sender.acquire(blocks), self.receiver.acquire(blocks));
        for (block, slot) in sources.iter().enumerate() {
            let bytes: Vec<u8> =
                (0..BLOCK_BYTES).map(|at| (transfer as usize + block * 7 + at) as u8).collect();
            slot.slab().write(slot.slot(), 0, &bytes);
        }
        let deadline = self.now + Duration::from_secs(20);
        let address = "0".to_owned();
        let expect = Command::Expect { transfer, address, content, first_block: 0, slots, deadline };
        self.receiver.node.handle(expect, self.now);
        for (index, part) in sources.chunks(part_blocks).enumerate() {
            let first_block = (index * part_blocks) as u32;
            let push = Command::Push { transfer, content, first_block, slots: part.to_vec(), layers: 0..2 };
            self.sender.node.handle(push, self.now);
        }
        self.sender.node.handle(Command::PushEnd { transfer }, self.now);
    }

    /// Runs one round of each node. Returns the bytes that the sender checksummed in it.
    fn step(&mut self) -> u64 {
        self.now += Duration::from_millis(1);
        self.network.advance(1);
        let before = self.sender.counter("bytes_summed");
        for side in [&mut self.sender, &mut self.receiver] {
            side.node.poll(self.now, &mut side.notices);
        }
        self.sender.counter("bytes_summed") - before
    }

    /// Returns the transfers that have arrived completely, in order of arrival.
    fn arrived(&self) -> Vec<TransferId> {
        let whole = |notice: &Notice| match notice {
            Notice::Arrived { transfer, outcome: Outcome::Complete, .. } => Some(*transfer),
            _ => None,
        };
        self.receiver.notices.iter().filter_map(whole).collect()
    }
}

#[test]
fn a_round_sums_no_more_than_its_budget() {
    let mut world = World::new(Faults::default(), 40);
    world.hand_off(1, 40, 40);
    let (mut longest, mut rounds) = (0, 0);
    while world.arrived().is_empty() {
        longest = longest.max(world.step());
        rounds += 1;
        assert!(rounds < 2000, "no end");
    }
    let bytes = 40 * BLOCK_BYTES;
    assert!(longest <= (ROUND_BYTES + CHUNK_BYTES) as u64, "{longest} bytes in one round");
    // One part: the receiver starts to verify when the sender has checksummed all of it, so each takes its own rounds.
    assert!(rounds >= 2 * (bytes / (ROUND_BYTES + CHUNK_BYTES)), "{rounds} rounds for {bytes} bytes");
    assert_eq!(world.sender.counter("bytes_summed"), bytes as u64);
}

#[test]
fn what_waits_for_the_link_is_summed_once() {
    let faults = Faults { queue_depth_max: 3, delay_ticks_max: 9, ..Faults::default() };
    let mut world = World::new(faults, 16 * 5);
    (1..=16).for_each(|transfer| world.hand_off(transfer, 5, 5));
    (0..3000).for_each(|_| _ = world.step());
    assert_eq!(world.arrived().len(), 16);
    let bytes = (16 * 5 * BLOCK_BYTES) as u64;
    assert_eq!((world.sender.counter("bytes_sent"), world.sender.counter("bytes_summed")), (bytes, bytes));
    assert!(world.sender.node.is_idle() && world.receiver.node.is_idle());
}

#[test]
fn a_small_transfer_does_not_wait_for_the_end_of_a_large_one() {
    let mut world = World::new(Faults { queue_depth_max: 1000, ..Faults::default() }, 101);
    world.hand_off(1, 100, 100);
    (0..20).for_each(|_| _ = world.step());
    world.hand_off(2, 1, 1);
    let mut rounds = 0;
    while world.arrived().is_empty() {
        world.step();
        rounds += 1;
        assert!(rounds < 2000, "no end");
    }
    assert_eq!(world.arrived(), [2], "after {rounds} rounds");
    // The small transfer is checksummed in five rounds, alternating with as many of the large one.
    assert!(rounds < 40, "{rounds} rounds");
}

#[test]
fn a_transfer_that_is_stopped_is_summed_no_further() {
    let mut world = World::new(Faults::default(), 40);
    world.hand_off(1, 40, 1);
    (0..20).for_each(|_| _ = world.step());
    world.sender.node.handle(Command::Cancel { transfer: 1 }, world.now);
    let before = world.sender.counter("bytes_summed");
    (0..20).for_each(|_| _ = world.step());
    assert!(before > 0 && world.sender.counter("bytes_summed") == before);
    assert!(world.sender.node.is_idle() && world.receiver.node.is_idle());
    // The blocks that were verified before are complete.
    let Some(Notice::Arrived { slots, outcome, .. }) = world.receiver.notices.pop() else {
        panic!("no notice")
    };
    assert_eq!(outcome, Outcome::SenderStopped);
    assert!((1..40).contains(&slots.len()), "{} blocks verified", slots.len());
    for (block, slot) in slots.iter().enumerate() {
        let mut bytes = vec![0; BLOCK_BYTES];
        slot.slab().read(slot.slot(), 0, &mut bytes);
        assert!((0..BLOCK_BYTES).all(|at| bytes[at] == (1 + block * 7 + at) as u8), "block {block}");
    }
}

#[test]
fn a_round_posts_no_more_than_its_budget() {
    let mut world = World::new(Faults { queue_depth_max: 1000, ..Faults::default() }, 40);
    world.hand_off(1, 40, 40);
    // A write of at most 128 KiB costs 2 KiB of it, so that a block is three writes.
    let writes_max = (ROUND_BYTES / (2 << 10)) as u64;
    let mut most = 0;
    for _ in 0..20 {
        let before = world.sender.counter("bytes_sent");
        world.step();
        most = most.max(world.sender.counter("bytes_sent") - before);
    }
    assert!(
        (1..=writes_max / 3 * BLOCK_BYTES as u64 + 2 * (128 << 10)).contains(&most),
        "{most} bytes in a round"
    );
}

/// Transfers that wait for their other half, on both sides, and cancelled ones add nothing to a round.
#[test]
fn what_waits_does_not_lengthen_a_round() {
    const WAITING: u64 = 4000;
    let mut world = World::new(Faults::default(), 1);
    world.hand_off(1, 1, 1);
    let fastest = |world: &mut World| {
        let rounds = (0..400).map(|_| {
            let start = Instant::now();
            world.step();
            start.elapsed()
        });
        rounds.min().expect("rounds")
    };
    let before = fastest(&mut world);
    assert_eq!(world.arrived(), [1]);
    let (content, address, now) = ([0; 16], "0".to_owned(), world.now);
    let deadline = now + Duration::from_secs(3600);
    for transfer in 2..2 + WAITING {
        let (slots, address) = (Vec::new(), address.clone());
        let expect = Command::Expect { transfer, address, content, first_block: 0, slots, deadline };
        world.receiver.node.handle(expect, now);
        let push = Command::Push { transfer, content, first_block: 0, slots: Vec::new(), layers: 0..2 };
        world.sender.node.handle(push, now);
        world.sender.node.handle(Command::Cancel { transfer: transfer + WAITING }, now);
    }
    (0..200).for_each(|_| _ = world.step());
    let open = |side: &Side| side.counter("open");
    assert_eq!([open(&world.sender), open(&world.receiver)], [WAITING; 2]);
    let after = fastest(&mut world);
    println!("a round: {before:?}, and {after:?} with {WAITING} transfers that wait");
    assert!(
        after < before * 8 + Duration::from_micros(20),
        "{before:?} a round, and {after:?} with {WAITING} that wait"
    );
}
