//! Hand-offs from device memory to device memory through staging slots, over the simulated fabric and over shared
//! memory. Whatever goes wrong on the way, in the network or in a copy: what is reported as arrived is byte for byte
//! what was sent, every transfer ends, and in the end no slot of any memory is held by anybody.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use dataplane_fabric::faults::CorruptingFabric;
use dataplane_fabric::sim::{Faults, SimFabric, SimNetwork};
use dataplane_fabric::{Fabric, Priority, SlotRange, Target};
use dataplane_memory::testing::{Abilities, CopierDouble, CopyFaults, DeviceDouble};
use dataplane_memory::{DeviceMemory, PageSize, Slab, SlabLayout, SlotPool, SlotRef};
use dataplane_shm::{ShmConfig, ShmFabric};
use dataplane_transfer::{
    Batch, Command, Direction, HeadRange, Limits, MoveOutcome, Notice, Outcome, Piece, PieceLayout, Staging,
    StagingLimits, TransferCounters, TransferId, TransferNode, TransferService,
};

const LAYOUT: PieceLayout = PieceLayout::whole(4, 256, 1);
const TICK: Duration = Duration::from_millis(1);
const PATIENCE_STEPS: usize = 15_000;
const SENDER: usize = 0;
const RECEIVER: usize = 1;

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 8) % bound
    }
}

/// One node, with an accelerator.
struct Side<F> {
    node: TransferNode<F>,
    staging: Staging<CopierDouble>,
    memory: Arc<DeviceDouble>,
    device: Arc<SlotPool>,
    host: Arc<SlotPool>,
    counters: Arc<TransferCounters>,
    notices: Vec<Notice>,
}

struct Shape {
    layout: PieceLayout,
    device_slots: u32,
    staging_slots: u32,
    copies: CopyFaults,
    /// Short in simulated time; a busy machine may stop a real thread for longer than that.
    lease: Duration,
    seed: u64,
}

impl Shape {
    fn new(seed: u64, copies: CopyFaults) -> Self {
        let lease = Duration::from_millis(400);
        Self { layout: LAYOUT, device_slots: 128, staging_slots: 32, copies, lease, seed }
    }
}

impl<F: Fabric> Side<F> {
    fn new(shape: &Shape, fabric: impl FnOnce(&Arc<SlotPool>) -> F) -> Self {
        let slots = |slot_count| SlabLayout { slot_bytes: shape.layout.slot_bytes(), slot_count };
        let memory = DeviceDouble::new(slots(shape.device_slots).slots_bytes(), Abilities::default());
        let shared = Arc::clone(&memory) as Arc<dyn DeviceMemory>;
        let device = Slab::on_device("device", slots(shape.device_slots), shared).expect("slab");
        let host = Slab::create("staging", slots(shape.staging_slots), PageSize::Standard).expect("slab");
        let [device, host] = [device, host].map(|slab| SlotPool::new(Arc::new(slab)));
        let counters = Arc::new(TransferCounters::default());
        let limits = Limits { lease: shape.lease, ..Limits::default() };
        let node = TransferNode::new(fabric(&host), shape.layout, limits, Arc::clone(&counters));
        let copier = CopierDouble::new(shape.seed, 16, shape.copies);
        let limits = StagingLimits { piece_blocks: 3, ..StagingLimits::of(&host) };
        let staging = Staging::new(copier, Arc::clone(&host), limits);
        Self { node, staging, memory, device, host, counters, notices: Vec::new() }
    }

    fn handle(&mut self, command: Command, now: Instant) {
        self.staging.handle(&mut self.node, command, now);
    }

    fn slots(&self, count: usize) -> Vec<SlotRef> {
        (0..count).map(|_| self.device.acquire().expect("enough slots")).collect()
    }

    fn fill(&self, slot: &SlotRef, bytes: &[u8]) {
        self.memory.write(slot.slot() as usize * slot.slab().layout().stride(), bytes).expect("inside");
    }

    fn bytes_of(&self, slot: &SlotRef) -> Vec<u8> {
        let mut bytes = vec![0; slot.slab().layout().slot_bytes];
        self.memory.read(slot.slot() as usize * slot.slab().layout().stride(), &mut bytes).expect("inside");
        bytes
    }

    fn counter(&self, name: &str) -> u64 {
        self.counters.snapshot().into_iter().find(|(n, ..)| *n == name).expect("a counter").2
    }

    fn is_clean(&self) -> bool {
        self.staging.is_idle()
            && self.node.is_idle()
            && self.staging.in_flight() == 0
            && self.device.used_count() == 0
            && self.host.used_count() == 0
    }
}

/// Two nodes and what lets time pass between them.
struct World<F> {
    sides: [Side<F>; 2],
    address: String,
    tick: Box<dyn FnMut(u64)>,
    now: Instant,
}

impl<F: Fabric> World<F> {
    fn step(&mut self) {
        self.now += TICK;
        (self.tick)(1);
        for Side { staging, node, notices, .. } in &mut self.sides {
            staging.poll(node, self.now, notices);
        }
    }

    fn run(&mut self, steps: usize) {
        (0..steps).for_each(|_| self.step());
    }

    fn command(&mut self, side: usize, command: Command) {
        self.sides[side].handle(command, self.now);
    }

    fn expect(&mut self, transfer: TransferId, first_block: u32, slots: Vec<SlotRef>) {
        let (address, content) = (self.address.clone(), content_of(transfer));
        let deadline = self.now + Duration::from_millis(300);
        self.command(RECEIVER, Command::Expect { transfer, address, content, first_block, slots, deadline });
    }

    fn push(&mut self, transfer: TransferId, slots: &[SlotRef], layers: std::ops::Range<u16>) {
        let (content, slots) = (content_of(transfer), slots.to_vec());
        self.command(SENDER, Command::Push { transfer, content, first_block: 0, slots, layers });
    }

    fn push_whole(&mut self, transfer: TransferId, blocks: usize) {
        let slots = self.sides[SENDER].slots(blocks);
        for (block, slot) in slots.iter().enumerate() {
            self.sides[SENDER].fill(slot, &content(transfer, block));
        }
        self.push(transfer, &slots, 0..LAYOUT.layers);
        self.command(SENDER, Command::PushEnd { transfer });
    }

    fn arrival(&mut self) -> Option<(Vec<SlotRef>, Outcome)> {
        let notices = &mut self.sides[RECEIVER].notices;
        let at = notices.iter().position(|notice| matches!(notice, Notice::Arrived { .. }))?;
        match notices.remove(at) {
            Notice::Arrived { slots, outcome, .. } => Some((slots, outcome)),
            _ => None,
        }
    }

    fn check(&self, slots: &[SlotRef], transfer: TransferId, first_block: usize) {
        for (index, slot) in slots.iter().enumerate() {
            let wanted = content(transfer, first_block + index);
            assert!(self.sides[RECEIVER].bytes_of(slot) == wanted, "transfer {transfer}, block {index}");
        }
    }

    fn settle(&mut self) {
        // A peer whose answer was lost is given up after five seconds; until then slots that it was told of are held.
        for _ in 0..PATIENCE_STEPS {
            if self.sides.iter().all(Side::is_clean) {
                return;
            }
            self.step();
        }
        let [sender, receiver] = &self.sides;
        for side in [sender, receiver] {
            println!(
                "idle: {}, device {}, host {}",
                side.node.is_idle(),
                side.device.used_count(),
                side.host.used_count()
            );
        }
        panic!("something is left");
    }
}

fn content_of(transfer: TransferId) -> [u8; 16] {
    [transfer as u8; 16]
}

fn content(transfer: TransferId, block: usize) -> Vec<u8> {
    (0..LAYOUT.slot_bytes()).map(|at| (transfer as usize * 31 + block * 7 + at) as u8).collect()
}

fn simulated(shape: &Shape, faults: Faults) -> (World<SimFabric>, SimNetwork) {
    let network = SimNetwork::new(shape.seed, faults);
    let sides = [(); 2].map(|()| Side::new(shape, |host| network.add_node(Arc::clone(host.slab()))));
    let clock = network.clone();
    let tick = Box::new(move |ticks| clock.advance(ticks));
    (World { sides, address: "0".to_owned(), tick, now: Instant::now() }, network)
}

fn shared_memory(shape: &Shape, corrupt_one_in: u64) -> World<CorruptingFabric<ShmFabric>> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let address = format!("@kvasir-staging-{}-{number}", std::process::id());
    let mut listen = Some(&*address);
    let sides = [(); 2].map(|()| {
        Side::new(shape, |host| {
            let slab = Arc::clone(host.slab());
            let fabric = ShmFabric::new(slab, listen.take(), ShmConfig::default()).expect("fabric");
            let one_in = if corrupt_one_in == 0 { u64::MAX } else { corrupt_one_in };
            CorruptingFabric::new(fabric, one_in, shape.seed)
        })
    });
    World { sides, address, tick: Box::new(|_| ()), now: Instant::now() }
}

/// What became of the transfers of one run.
#[derive(Debug, Default)]
struct Sum {
    outcomes: BTreeMap<String, u64>,
    blocks: usize,
    pushed_whole: u64,
}

impl Sum {
    fn of(&self, outcome: Outcome) -> u64 {
        self.outcomes.get(&format!("{outcome:?}")).copied().unwrap_or(0)
    }
}

/// Random transfers, sizes, timing and cancellations.
fn transfers<F: Fabric>(
    world: &mut World<F>,
    random: &mut Random,
    count: u64,
    cancel_one_in: u64,
    mut accident: impl FnMut(u64, &mut Random, &mut World<F>),
) -> Sum {
    let (mut sum, mut held_of) = (Sum::default(), BTreeMap::new());
    let mut pushed = BTreeSet::new();
    for transfer in 1..=count {
        let blocks = 1 + random.below(12) as usize;
        let held = random.below(blocks as u64) as usize;
        let is_first = random.below(2) == 0;
        held_of.insert(transfer, held);
        let sources = world.sides[SENDER].slots(blocks);
        let targets = world.sides[RECEIVER].slots(blocks - held);
        if is_first {
            world.expect(transfer, held as u32, targets.clone());
        }
        for (block, slot) in sources.iter().enumerate() {
            world.sides[SENDER].fill(slot, &content(transfer, block));
        }
        for layer in 0..LAYOUT.layers {
            world.push(transfer, &sources, layer..layer + 1);
            world.run(random.below(3) as usize);
            if cancel_one_in > 0 && random.below(cancel_one_in * u64::from(LAYOUT.layers)) == 0 {
                world.command(random.below(2) as usize, Command::Cancel { transfer });
            }
        }
        drop(sources);
        world.command(SENDER, Command::PushEnd { transfer });
        if !is_first {
            world.expect(transfer, held as u32, targets);
        }
        accident(transfer, random, world);
        for _ in 0..random.below(40) {
            world.step();
            count_up(world, &mut sum, &mut held_of, &mut pushed);
        }
    }
    // Where messages are lost, transfers whose receiver never comes hold staging slots until their leases end, and
    // others wait for these.
    for _ in 0..PATIENCE_STEPS {
        if held_of.is_empty() && pushed.len() as u64 == count {
            return sum;
        }
        world.step();
        count_up(world, &mut sum, &mut held_of, &mut pushed);
    }
    panic!("never told of: {held_of:?}; of {count} pushes, told of {pushed:?}");
}

fn count_up<F: Fabric>(
    world: &mut World<F>,
    sum: &mut Sum,
    held_of: &mut BTreeMap<TransferId, usize>,
    pushed: &mut BTreeSet<TransferId>,
) {
    for notice in std::mem::take(&mut world.sides[RECEIVER].notices) {
        let Notice::Arrived { transfer, slots, outcome } = notice else { panic!("{notice:?}") };
        let held = held_of.remove(&transfer).expect("told once, and only of what was expected");
        world.check(&slots, transfer, held);
        sum.blocks += slots.len();
        *sum.outcomes.entry(format!("{outcome:?}")).or_default() += 1;
    }
    for notice in std::mem::take(&mut world.sides[SENDER].notices) {
        let Notice::Pushed { transfer, complete } = notice else { panic!("{notice:?}") };
        let is_first = pushed.insert(transfer);
        assert!(is_first || !complete, "complete, after it was over");
        sum.pushed_whole += u64::from(complete);
    }
}

#[test]
fn without_faults_everything_arrives() {
    for seed in 1..=10 {
        println!("seed {seed}");
        let shape = Shape::new(seed, CopyFaults { polls_max: 1 + seed % 9, fail_one_in: 0 });
        let faults = Faults { delay_ticks_max: 4, queue_depth_max: 6, ..Faults::default() };
        let (mut world, _) = simulated(&shape, faults);
        let sum = transfers(&mut world, &mut Random(seed), 30, 0, |_, _, _| ());
        println!("{sum:?}");
        // Some come while too many slots wait for peers: they are refused, and nothing else.
        assert_eq!(sum.of(Outcome::Complete) + sum.of(Outcome::Refused), 30);
        assert!(sum.of(Outcome::Complete) >= 10);
        world.settle();
    }
}

/// Loss, corruption, reordering, pulled cables, failed copies and cancellations by either side, all at once.
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
        let sum = transfers(&mut world, &mut Random(seed), 40, 6, |transfer, random, world| {
            if seed % 6 == 0 && transfer % 10 == 0 {
                network.cut(random.below(2) as usize);
                world.run(3);
            }
        });
        println!("{sum:?}");
        sum.outcomes.into_iter().for_each(|(outcome, count)| *outcomes.entry(outcome).or_default() += count);
        network.set_faults(Faults::default());
        world.settle();
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
        let sum = transfers(&mut world, &mut Random(seed), 30, cancel_one_in, |_, _, _| ());
        println!("{sum:?}");
        if !is_faulty && !is_cancelled {
            assert_eq!(sum.of(Outcome::Complete) + sum.of(Outcome::Refused), 30);
        }
        complete += sum.of(Outcome::Complete);
        world.settle();
    }
    assert!(complete > 100, "{complete} of 480");
}

/// The first piece is on its way while others wait for a staging slot, and more blocks are sent than there are slots.
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
    world.settle();
}

/// Layers that have come are in device memory before the next are even computed.
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

/// A cancelled transfer is over only when its copies are, and until then holds what they touch.
#[test]
fn cancelled_transfers_wait_for_their_copies() {
    let copies = CopyFaults { polls_max: 60, fail_one_in: 0 };
    for seed in 1..=10 {
        println!("seed {seed}");
        let (mut world, _) = simulated(&Shape::new(seed, copies), Faults::default());
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
        assert!(world.sides[SENDER].is_clean());
    }
}

#[test]
fn failed_copies_and_a_dead_device_end_transfers() {
    // At the receiver: the leading blocks before the failure are good.
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
    // At the sender: the receiver learns that nothing more comes.
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
    world.settle();
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
    world.settle();
}

/// A node without staging takes no device slots, and one with it passes on what concerns host slots.
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
    let ticket = side.node.open_move().expect("room");
    let local = SlotRange { slot: side.device.acquire().expect("slot"), offset: 0, len: 8 };
    let piece = Piece { local, remote: Target { slot: 0, generation: 0, offset: 0 }, rows: None };
    let (direction, priority, deadline) = (Direction::Write, Priority::Urgent, now + TICK * 50);
    let batch = Batch { address: "1".to_owned(), direction, priority, pieces: vec![piece], deadline };
    side.handle(Command::Move { ticket, batch }, now);
    side.node.poll(now, &mut side.notices);
    let told = std::mem::take(&mut side.notices);
    assert!(matches!(told[..], [Notice::Moved { outcome: MoveOutcome::Refused, .. }]), "{told:?}");
    assert_eq!(side.device.used_count(), 0);
    let source = side.host.acquire().expect("slot");
    source.slab().write(source.slot(), 0, &crate::content(3, 0));
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

/// Two senders with half of the heads each fill one receiver's device slots, each only its own rows.
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
        Side::new(&shape, |host| network.add_node(Arc::clone(host.slab())))
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

/// Two threads over shared memory, that sleep when there is nothing to do: rounds apart from each other, so that each
/// begins with both asleep.
#[test]
fn services_stage_in_their_own_threads() {
    let lease = Duration::from_secs(60);
    let shape = Shape { lease, ..Shape::new(11, CopyFaults { polls_max: 40, fail_one_in: 0 }) };
    let World { sides: [sender, receiver], address, .. } = shared_memory(&shape, 0);
    let (sources, targets) = (sender.slots(6), receiver.slots(6));
    let (memory, stride) = (Arc::clone(&receiver.memory), targets[0].slab().layout().stride());
    for (block, slot) in sources.iter().enumerate() {
        sender.fill(slot, &content(1, block));
    }
    let pools = [&sender, &receiver].map(|side| (Arc::clone(&side.device), Arc::clone(&side.host)));
    let (tell, told) = mpsc::channel();
    let [sender, receiver] = [sender, receiver].map(|side| {
        let tell = tell.clone();
        let notify = move |notice| drop(tell.send(notice));
        TransferService::start_staged(side.node, side.staging, notify).expect("a thread")
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
                other => panic!("{other:?}"),
            }
        }
        std::thread::sleep(TICK * 3);
    }
    for (block, slot) in targets.iter().enumerate() {
        let mut bytes = vec![0; LAYOUT.slot_bytes()];
        memory.read(slot.slot() as usize * stride, &mut bytes).expect("inside");
        assert!(bytes == self::content(1, block), "block {block}");
    }
    drop((sender, receiver, sources, targets));
    assert!(pools.iter().all(|(device, host)| device.used_count() + host.used_count() == 0), "slots leaked");
}
