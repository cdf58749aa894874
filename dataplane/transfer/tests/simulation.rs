//! Many transfers over a simulated fabric with seeded faults. With any fault: blocks that are reported as
//! arrived are byte for byte the ones sent, and in the end no slot is held.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_fabric::sim::{Faults, SimFabric, SimNetwork};
use dataplane_fabric::{Event, Fabric};
use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool, SlotRef};
use dataplane_transfer::{
    Command, Limits, Notice, Outcome, PieceLayout, Stage, TransferCounters, TransferId, TransferNode,
};

const LAYOUT: PieceLayout = PieceLayout::whole(4, 256, 1);
const TICK: Duration = Duration::from_millis(1);

struct World {
    network: SimNetwork,
    pools: [Arc<SlotPool>; 2],
    nodes: [Option<TransferNode<SimFabric>>; 2],
    counters: [Arc<TransferCounters>; 2],
    now: Instant,
    notices: [Vec<Notice>; 2],
    /// Time from an expectation to its deadline.
    patience: Duration,
}

const SENDER: usize = 0;
const RECEIVER: usize = 1;

impl World {
    fn new(seed: u64, faults: Faults) -> Self {
        Self::patient(seed, faults, Duration::from_millis(400), Duration::from_millis(300))
    }

    /// A world with this lease, and this time from an expectation to its deadline.
    fn patient(seed: u64, faults: Faults, lease: Duration, patience: Duration) -> Self {
        let network = SimNetwork::new(seed, faults);
        let layout = SlabLayout { slot_bytes: LAYOUT.slot_bytes(), slot_count: 256 };
        let pools = [(); 2].map(|()| {
            SlotPool::new(Arc::new(Slab::create("sim", layout, PageSize::Standard).expect("slab")))
        });
        let counters = [(); 2].map(|()| Arc::new(TransferCounters::default()));
        // Every other world checksums one block in a round.
        let round_bytes = if seed.is_multiple_of(2) { 1 } else { Limits::default().round_bytes };
        let limits = Limits { lease, round_bytes, ..Limits::default() };
        let nodes = [0, 1].map(|index| {
            let fabric = network.add_node(Arc::clone(pools[index].slab()));
            Some(TransferNode::new(fabric, LAYOUT, limits, Arc::clone(&counters[index])))
        });
        let notices = [Vec::new(), Vec::new()];
        Self { network, pools, nodes, counters, now: Instant::now(), notices, patience }
    }

    fn step(&mut self) {
        self.now += TICK;
        self.network.advance(1);
        for (node, notices) in self.nodes.iter_mut().zip(&mut self.notices) {
            if let Some(node) = node {
                node.poll(self.now, notices);
            }
        }
    }

    fn run(&mut self, steps: usize) {
        (0..steps).for_each(|_| self.step());
    }

    fn command(&mut self, node: usize, command: Command) {
        let now = self.now;
        if let Some(node) = &mut self.nodes[node] {
            node.handle(command, now);
        }
    }

    fn acquire(&self, node: usize, count: usize) -> Vec<SlotRef> {
        (0..count).map(|_| self.pools[node].acquire().expect("enough slots")).collect()
    }

    fn expect(&mut self, transfer: TransferId, first_block: u32, blocks: usize) {
        let slots = self.acquire(RECEIVER, blocks);
        let deadline = self.now + self.patience;
        let address = "0".to_owned();
        self.command(
            RECEIVER,
            Command::Expect {
                transfer,
                address,
                content: content_of(transfer),
                first_block,
                slots,
                deadline,
            },
        );
    }

    fn push(&mut self, transfer: TransferId, first_block: u32, slots: &[SlotRef], layers: Range<u16>) {
        let slots = slots.to_vec();
        self.command(
            SENDER,
            Command::Push { transfer, content: content_of(transfer), first_block, slots, layers },
        );
    }

    fn counter(&self, node: usize, name: &str) -> u64 {
        self.counters[node].snapshot().into_iter().find(|(n, ..)| *n == name).expect("a counter").2
    }
}

fn content_of(transfer: TransferId) -> [u8; 16] {
    [transfer as u8; 16]
}

fn fill(slot: &SlotRef, transfer: TransferId, block: usize) {
    slot.slab().write(slot.slot(), 0, &content(transfer, block));
}

fn content(transfer: TransferId, block: usize) -> Vec<u8> {
    (0..LAYOUT.slot_bytes()).map(|at| (transfer as usize * 31 + block * 7 + at) as u8).collect()
}

fn check(slots: &[SlotRef], transfer: TransferId, first_block: usize) {
    for (index, slot) in slots.iter().enumerate() {
        let mut bytes = vec![0; LAYOUT.slot_bytes()];
        slot.slab().read(slot.slot(), 0, &mut bytes);
        assert!(
            bytes == content(transfer, first_block + index),
            "transfer {transfer} block {index}: wrong bytes"
        );
    }
}

/// Runs `count` transfers with random sizes, timing and cancellations; returns how many arrived whole.
fn run(mut world: World, seed: u64, count: u64, cancel_one_in: u64) -> (World, u64) {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut complete = 0;
    for transfer in 1..=count {
        let blocks = 1 + random.u64(..12) as usize;
        let held = random.u64(..blocks as u64) as usize;
        let sources = world.acquire(SENDER, blocks);
        let receiver_first = random.u64(..2) == 0;
        if receiver_first {
            world.expect(transfer, held as u32, blocks - held);
        }
        for layer in 0..LAYOUT.layers {
            for (block, slot) in sources.iter().enumerate() {
                fill(slot, transfer, block);
            }
            world.push(transfer, 0, &sources, layer..layer + 1);
            for _ in 0..random.u64(..3) {
                world.step();
            }
            if cancel_one_in > 0 && random.u64(..cancel_one_in * u64::from(LAYOUT.layers)) == 0 {
                let side = random.u64(..2) as usize;
                world.command(side, Command::Cancel { transfer });
            }
        }
        drop(sources);
        world.command(SENDER, Command::PushEnd { transfer });
        if !receiver_first {
            world.expect(transfer, held as u32, blocks - held);
        }
        for _ in 0..random.u64(..30) {
            world.step();
        }
        complete += settle(&mut world, transfer, held);
    }
    for _ in 0..1500 {
        world.step();
        complete += settle(&mut world, 0, 0);
    }
    (world, complete)
}

/// Checks and drops arrived blocks; blocks of earlier transfers carry their own number.
fn settle(world: &mut World, current: TransferId, held: usize) -> u64 {
    let mut complete = 0;
    for notice in world.notices[RECEIVER].drain(..) {
        if let Notice::Arrived { transfer, slots, outcome } = notice {
            if transfer == current {
                check(&slots, transfer, held);
            } else if let Some(slot) = slots.first() {
                // The number of held blocks is no longer known: it is found from the content.
                let mut bytes = vec![0; LAYOUT.slot_bytes()];
                slot.slab().read(slot.slot(), 0, &mut bytes);
                let first = (0..12).find(|&block| content(transfer, block) == bytes).expect("its own bytes");
                check(&slots, transfer, first);
            }
            complete += u64::from(outcome == Outcome::Complete);
        }
    }
    world.notices[SENDER].clear();
    complete
}

fn assert_nothing_is_held(world: &World, seed: u64) {
    for (node, pool) in world.nodes.iter().zip(&world.pools) {
        assert!(node.as_ref().is_none_or(TransferNode::is_idle), "seed {seed}: a table is not empty");
        assert_eq!(pool.used_count(), 0, "seed {seed}: slots leaked");
    }
}

#[test]
fn a_calm_network_brings_everything() {
    for seed in 1..=20_u64 {
        let faults = Faults { delay_ticks_max: 6, ..Faults::default() };
        // Worlds that checksum one block in a round have a backlog.
        let long = Duration::from_secs(5);
        let world = match seed.is_multiple_of(2) {
            true => World::patient(seed, faults, long, long),
            false => World::new(seed, faults),
        };
        let (world, complete) = run(world, seed, 60, 0);
        assert_eq!(complete, 60, "seed {seed}");
        assert_nothing_is_held(&world, seed);
        assert_eq!(world.counter(RECEIVER, "checksum_failures"), 0);
    }
}

/// Each stage is counted once, at the side where it happens: times are whole rounds of a simulated millisecond.
#[test]
fn stages_are_counted_once_for_each_transfer_or_part() {
    let mut world = World::new(3, Faults::default());
    let sources = world.acquire(SENDER, 5);
    sources.iter().enumerate().for_each(|(block, slot)| fill(slot, 1, block));
    world.expect(1, 0, 5);
    world.run(20);
    for layer in 0..LAYOUT.layers {
        world.push(1, 0, &sources, layer..layer + 1);
        world.run(10);
    }
    world.command(SENDER, Command::PushEnd { transfer: 1 });
    world.run(20);
    drop(sources);
    assert_eq!(settle(&mut world, 1, 0), 1);
    let of = |node: usize, stage: Stage| {
        let snapshot = world.counters[node].stages.snapshot().swap_remove(stage as usize);
        (snapshot.cumulative.last().map_or(0, |(_, count)| *count), snapshot.sum_us)
    };
    let parts = u64::from(LAYOUT.layers);
    assert_eq!([Stage::Reserve, Stage::FirstPart, Stage::Whole].map(|stage| of(RECEIVER, stage).0), [1; 3]);
    assert_eq!(of(RECEIVER, Stage::Verify).0, parts);
    assert_eq!([Stage::Write, Stage::Sum].map(|stage| of(SENDER, stage).0), [parts; 2]);
    assert_eq!(of(SENDER, Stage::Finish).0, 1);
    // The first layer was pushed 20 ms after the expectation, and the last one 30 ms later.
    let (first, whole) = (of(RECEIVER, Stage::FirstPart).1, of(RECEIVER, Stage::Whole).1);
    assert!((15_000..25_000).contains(&first) && (50_000..60_000).contains(&whole), "{first} {whole}");
    assert_eq!(of(SENDER, Stage::Reserve).0 + of(RECEIVER, Stage::Write).0, 0, "each side has its own");
}

#[test]
fn corrupted_and_reordered_bytes_never_arrive() {
    for (reorder, corrupt_one_in) in [(false, 9), (true, 0), (true, 20)] {
        // Without a backlog, so that nothing but the faults ends a transfer.
        for seed in [1, 3, 5, 7, 9] {
            let faults = Faults { delay_ticks_max: 4, corrupt_one_in, reorder, ..Faults::default() };
            let (world, complete) = run(World::new(seed, faults), seed, 60, 0);
            assert!(complete < 60, "seed {seed}: the faults must bite");
            if !reorder {
                assert!(world.counter(RECEIVER, "checksum_failures") > 0);
            }
            assert_nothing_is_held(&world, seed);
        }
    }
}

#[test]
fn losses_and_cancellations_leave_nothing_behind() {
    for seed in 1..=8 {
        let faults = Faults { delay_ticks_max: 5, lose_one_in: 40, ..Faults::default() };
        let (mut world, complete) = run(World::new(seed, faults), seed, 80, 4);
        assert!(complete > 0 && complete < 80, "seed {seed}: {complete} complete");
        // A lost acknowledgement keeps slots in quarantine as long as the connection lives, by design.
        world.network.kill(SENDER);
        world.nodes[SENDER] = None;
        for _ in 0..10 {
            world.step();
        }
        world.notices[RECEIVER].clear();
        assert_eq!(world.pools[RECEIVER].used_count(), 0, "seed {seed}: slots leaked");
    }
}

#[test]
fn a_dead_sender_ends_the_wait() {
    let mut world = World::new(3, Faults::default());
    world.expect(1, 0, 5);
    let sources = world.acquire(SENDER, 5);
    for (block, slot) in sources.iter().enumerate() {
        fill(slot, 1, block);
    }
    world.push(1, 0, &sources[..2], 0..LAYOUT.layers);
    for _ in 0..20 {
        world.step();
    }
    world.network.kill(SENDER);
    for _ in 0..20 {
        world.step();
    }
    let notice = world.notices[RECEIVER].pop();
    let Some(Notice::Arrived { slots, outcome: Outcome::PeerDown, .. }) = notice else {
        panic!("expected the end of the wait, got {notice:?}");
    };
    assert_eq!(slots.len(), 2, "what was verified before the death is kept");
    check(&slots, 1, 0);
}

#[test]
fn a_missing_receiver_costs_a_lease_and_no_more() {
    let mut world = World::new(4, Faults::default());
    let sources = world.acquire(SENDER, 3);
    world.push(9, 0, &sources, 0..LAYOUT.layers);
    drop(sources);
    assert_eq!(world.pools[SENDER].used_count(), 3, "held for the receiver");
    for _ in 0..500 {
        world.step();
    }
    assert!(matches!(world.notices[SENDER][..], [Notice::Pushed { transfer: 9, complete: false }]));
    assert_eq!(world.pools[SENDER].used_count(), 0);
    assert_eq!(world.counter(SENDER, "leases_expired"), 1);
}

/// Two legs with the same id but of different requests: not one byte is written.
#[test]
fn legs_of_different_requests_exchange_nothing() {
    let mut world = World::new(6, Faults::default());
    world.expect(1, 0, 3);
    let slots = world.acquire(SENDER, 3);
    let layers = 0..LAYOUT.layers;
    world.command(SENDER, Command::Push { transfer: 1, content: [77; 16], first_block: 0, slots, layers });
    for _ in 0..30 {
        world.step();
    }
    let notice = world.notices[RECEIVER].pop();
    let Some(Notice::Arrived { slots, outcome: Outcome::SenderStopped, .. }) = notice else {
        panic!("expected a refusal, got {notice:?}");
    };
    assert!(slots.is_empty());
    assert_eq!(world.counter(SENDER, "bytes_sent"), 0);
    assert_nothing_is_held(&world, 6);
}

/// The first transfer is not stopped, and its owner can distinguish the refusal of the second from its end.
#[test]
fn a_transfer_that_is_expected_twice_arrives_once_and_whole() {
    let mut world = World::new(7, Faults::default());
    world.expect(1, 0, 4);
    let sources = world.acquire(SENDER, 4);
    for (block, slot) in sources.iter().enumerate() {
        fill(slot, 1, block);
    }
    world.push(1, 0, &sources, 0..2);
    world.run(10);
    world.expect(1, 0, 4);
    world.run(10);
    let notice = world.notices[RECEIVER].pop();
    let Some(Notice::Arrived { transfer: 1, slots, outcome: Outcome::Duplicate }) = notice else {
        panic!("expected a refusal, got {notice:?}");
    };
    assert!(slots.is_empty() && world.notices[RECEIVER].is_empty());
    world.push(1, 0, &sources, 2..LAYOUT.layers);
    world.command(SENDER, Command::PushEnd { transfer: 1 });
    world.run(20);
    let notice = world.notices[RECEIVER].pop();
    let Some(Notice::Arrived { transfer: 1, slots, outcome: Outcome::Complete }) = notice else {
        panic!("expected the blocks, got {notice:?}");
    };
    assert_eq!(slots.len(), 4);
    check(&slots, 1, 0);
    drop((slots, sources));
    assert_nothing_is_held(&world, 7);
}

/// By another node, while the transfer is running, and by the same one after its own has arrived.
#[test]
fn a_second_reservation_ends_neither_the_transfer_nor_a_connection() {
    let mut world = World::new(9, Faults::default());
    let layout = SlabLayout { slot_bytes: LAYOUT.slot_bytes(), slot_count: 16 };
    let pool = SlotPool::new(Arc::new(Slab::create("third", layout, PageSize::Standard).expect("slab")));
    let fabric = world.network.add_node(Arc::clone(pool.slab()));
    let mut third = TransferNode::new(fabric, LAYOUT, Limits::default(), Arc::default());
    let mut told = Vec::new();
    let expect = |transfer: TransferId, now: Instant| Command::Expect {
        transfer,
        address: "0".to_owned(),
        content: content_of(transfer),
        first_block: 0,
        slots: (0..3).map(|_| pool.acquire().expect("slot")).collect(),
        deadline: now + Duration::from_millis(200),
    };
    world.expect(1, 0, 3);
    third.handle(expect(2, world.now), world.now);
    for round in 0..20 {
        if round == 10 {
            third.handle(expect(1, world.now), world.now);
        }
        world.step();
        third.poll(world.now, &mut told);
    }
    let refused = told.pop();
    assert!(
        matches!(refused, Some(Notice::Arrived { transfer: 1, outcome: Outcome::SenderStopped, .. })),
        "{refused:?}"
    );
    for transfer in [1, 2] {
        let sources = world.acquire(SENDER, 3);
        for (block, slot) in sources.iter().enumerate() {
            fill(slot, transfer, block);
        }
        world.push(transfer, 0, &sources, 0..LAYOUT.layers);
    }
    for _ in 0..10 {
        world.step();
        third.poll(world.now, &mut told);
    }
    for (transfer, notice) in [(1, world.notices[RECEIVER].pop()), (2, told.pop())] {
        let Some(Notice::Arrived { transfer: of, slots, outcome: Outcome::Complete }) = notice else {
            panic!("transfer {transfer}: expected the blocks, got {notice:?}");
        };
        assert_eq!((of, slots.len()), (transfer, 3));
        check(&slots, transfer, 0);
    }
    world.expect(1, 0, 3);
    world.run(10);
    world.command(SENDER, Command::PushEnd { transfer: 1 });
    world.run(10);
    let again = world.notices[RECEIVER].pop();
    assert!(
        matches!(again, Some(Notice::Arrived { transfer: 1, outcome: Outcome::SenderStopped, .. })),
        "{again:?}"
    );
    assert_eq!(world.counter(SENDER, "peers_lost"), 0);
}

/// An idle node sleeps until its next deadline.
#[test]
fn a_peer_that_never_greets_has_a_deadline_that_wakes_the_node() {
    let mut world = World::new(8, Faults::default());
    let mut mute = world.network.add_node(Arc::clone(world.pools[SENDER].slab()));
    mute.connect("1").expect("an address");
    world.run(5);
    let next = world.nodes[RECEIVER].as_ref().and_then(TransferNode::next_deadline);
    let deadline = next.expect("that of the greeting");
    assert!(deadline > world.now && deadline < world.now + Duration::from_secs(60));
    world.now = deadline;
    world.step();
    let mut events = Vec::new();
    mute.poll(8, &mut events);
    assert!(events.iter().any(|event| matches!(event, Event::PeerDown { .. })), "{events:?}");
}

/// Tests the rig: the leak check must detect a slot that is kept on purpose.
#[test]
#[should_panic(expected = "slots leaked")]
fn a_planted_leak_is_found() {
    let (world, _) = run(World::new(1, Faults::default()), 1, 5, 0);
    std::mem::forget(world.pools[SENDER].acquire());
    assert_nothing_is_held(&world, 1);
}

/// The number of connects is limited by the backoff, not by the number of transfers that need the same dead peer.
#[test]
fn many_expectations_make_few_connects() {
    let mut world = World::new(13, Faults { delay_ticks_max: 8, ..Faults::default() });
    world.network.kill(SENDER);
    let mut waits = Vec::new();
    let mut down_since = world.now;
    for transfer in 0..4000 {
        world.expect(transfer, 0, 1);
        world.step();
        // A refusal takes longer than one step only if a connect was made. One connect in eight is that fast.
        if world.notices[RECEIVER].is_empty() {
            waits.push(world.now - down_since);
            down_since = world.now;
            world.run(8);
        }
        let told = std::mem::take(&mut world.notices[RECEIVER]);
        let is_down = matches!(told[..], [Notice::Arrived { outcome: Outcome::PeerDown, .. }]);
        assert!(is_down, "transfer {transfer}: {told:?}");
    }
    assert!((4..=14).contains(&waits.len()), "{} connects in 4 s: {waits:?}", waits.len());
    assert!(waits.last() > waits.get(1), "the waits grow: {waits:?}");
}
