//! Slot names that a sender was told are void once a block is complete or the transfer is over.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use dataplane_fabric::sim::{Faults, SimFabric, SimNetwork};
use dataplane_fabric::{
    ConnectError, Event, Fabric, Full, Operation, PeerId, Priority, Source, Target, WorkRequest,
};
use dataplane_memory::{PageSize, Slab, SlabKind, SlabLayout, SlotPool, SlotRef};
use dataplane_transfer::{Command, Limits, Notice, Outcome, PieceLayout, TransferCounters, TransferNode};

const LAYOUT: PieceLayout = PieceLayout::whole(2, 256, 1);
const CONTENT: [u8; 16] = [1; 16];

/// Slot names that writes used, and writes to inject.
#[derive(Default)]
struct Script {
    targets: Vec<(PeerId, Target)>,
    more: Vec<WorkRequest>,
    ends: usize,
}

/// A sender's fabric that records the slot names used, and injects the script's writes.
struct Scripted {
    inner: SimFabric,
    script: Arc<Mutex<Script>>,
}

impl Fabric for Scripted {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn shown_slab(&self, kind: SlabKind) -> Option<Arc<Slab>> {
        self.inner.shown_slab(kind)
    }

    fn carries(&self, slab: &Arc<Slab>) -> bool {
        self.inner.carries(slab)
    }

    fn peer_shows(&self, peer: PeerId, kind: SlabKind) -> bool {
        self.inner.peer_shows(peer, kind)
    }

    fn connect(&mut self, address: &str) -> Result<PeerId, ConnectError> {
        self.inner.connect(address)
    }

    fn post(&mut self, request: WorkRequest) -> Result<(), Full> {
        if let Operation::Write { target, .. } = &request.operation {
            self.script.lock().expect("not poisoned").targets.push((request.peer, *target));
        }
        self.inner.post(request)
    }

    fn flush(&mut self) {
        self.inner.flush();
    }

    fn poll(&mut self, budget: usize, events: &mut Vec<Event>) -> usize {
        let mut script = self.script.lock().expect("not poisoned");
        for request in script.more.drain(..) {
            let posted = self.inner.post(request);
            assert!(posted.is_ok(), "there is room");
        }
        let before = events.len();
        let count = self.inner.poll(budget, events);
        script.ends +=
            events[before..].iter().filter(|event| matches!(event, Event::PeerDown { .. })).count();
        count
    }

    fn disconnect(&mut self, peer: PeerId) {
        self.inner.disconnect(peer);
    }

    fn wait_descriptors<'a>(&'a self, descriptors: &mut Vec<BorrowedFd<'a>>) {
        self.inner.wait_descriptors(descriptors);
    }
}

struct World {
    network: SimNetwork,
    sender: TransferNode<Scripted>,
    receiver: TransferNode<SimFabric>,
    pools: [Arc<SlotPool>; 2],
    script: Arc<Mutex<Script>>,
    now: Instant,
    notices: Vec<Notice>,
}

impl World {
    fn new() -> Self {
        let network = SimNetwork::new(1, Faults::default());
        let layout = SlabLayout { slot_bytes: LAYOUT.slot_bytes(), slot_count: 8 };
        let pools = [(); 2].map(|()| {
            SlotPool::new(Arc::new(Slab::create("grants", layout, PageSize::Standard).expect("slab")))
        });
        let script = Arc::new(Mutex::new(Script::default()));
        let node = |index: usize| network.add_node(Arc::clone(pools[index].slab()));
        let scripted = Scripted { inner: node(0), script: Arc::clone(&script) };
        let counters = || Arc::new(TransferCounters::default());
        let sender = TransferNode::new(scripted, LAYOUT, Limits::default(), counters());
        let receiver = TransferNode::new(node(1), LAYOUT, Limits::default(), counters());
        Self { network, sender, receiver, pools, script, now: Instant::now(), notices: Vec::new() }
    }

    fn run(&mut self) {
        for _ in 0..50 {
            self.now += Duration::from_millis(1);
            self.network.advance(1);
            self.sender.poll(self.now, &mut Vec::new());
            self.receiver.poll(self.now, &mut self.notices);
        }
    }

    fn slots(&self, side: usize, count: usize, byte: u8) -> Vec<SlotRef> {
        let slots: Vec<SlotRef> = (0..count).map(|_| self.pools[side].acquire().expect("a slot")).collect();
        slots.iter().for_each(|slot| slot.slab().write(slot.slot(), 0, &vec![byte; LAYOUT.slot_bytes()]));
        slots
    }

    fn expect(&mut self, transfer: u64, slots: Vec<SlotRef>) {
        let (address, deadline) = ("0".to_owned(), self.now + Duration::from_millis(400));
        let expect = Command::Expect { transfer, address, content: CONTENT, first_block: 0, slots, deadline };
        self.receiver.handle(expect, self.now);
        self.run();
    }

    fn push(&mut self, transfer: u64, slots: &[SlotRef], layers: std::ops::Range<u16>) {
        let (content, slots) = (CONTENT, slots.to_vec());
        self.sender.handle(Command::Push { transfer, content, first_block: 0, slots, layers }, self.now);
        self.run();
    }

    /// Writes to a name that the sender was told, as a stray or hostile request would.
    fn write_again(&mut self, told: (PeerId, Target)) {
        let slot = self.slots(0, 1, 0xEE).remove(0);
        let (peer, target) = told;
        let source = Source::Slot { slot, offset: 0, len: 16 };
        let operation = Operation::Write { source, target, rows: None, immediate: None };
        let request = WorkRequest { id: 0, peer, priority: Priority::Urgent, operation };
        self.script.lock().expect("not poisoned").more.push(request);
        self.run();
    }

    fn told(&self) -> (PeerId, Target) {
        self.script.lock().expect("not poisoned").targets[0]
    }

    fn ends(&self) -> usize {
        self.script.lock().expect("not poisoned").ends
    }
}

fn bytes(slot: &SlotRef) -> Vec<u8> {
    let mut bytes = vec![0; LAYOUT.slot_bytes()];
    slot.slab().read(slot.slot(), 0, &mut bytes);
    bytes
}

#[test]
fn a_block_that_is_whole_cannot_be_written_any_more() {
    let mut world = World::new();
    let (sources, targets) = (world.slots(0, 2, 7), world.slots(1, 2, 0));
    world.expect(1, targets.clone());
    // The first block is complete, the second lacks a layer: the transfer continues.
    world.push(1, &sources[..1], 0..2);
    let told = world.told();
    assert_eq!(bytes(&targets[0]), bytes(&sources[0]));
    assert_eq!((world.notices.len(), world.ends()), (0, 0));
    world.write_again(told);
    assert_eq!(bytes(&targets[0]), bytes(&sources[0]), "the block is as it was verified");
    assert_eq!(world.ends(), 1, "and the connection is over");
    let [Notice::Arrived { slots, outcome, .. }] = &world.notices[..] else { panic!("{:?}", world.notices) };
    assert_eq!((slots.len(), *outcome), (1, Outcome::PeerDown));
}

#[test]
fn what_is_granted_can_be_written_and_nothing_else() {
    let mut world = World::new();
    let (sources, targets) = (world.slots(0, 1, 7), world.slots(1, 2, 0));
    world.expect(1, targets[..1].to_vec());
    world.push(1, &sources, 0..1);
    let told = world.told();
    world.write_again(told);
    assert_eq!(bytes(&targets[0])[..16], [0xEE; 16], "until the block is whole its sender may write it");
    assert_eq!(world.ends(), 0);
    // The next slot by its number, with the rest of the first slot's name.
    let (peer, target) = told;
    world.write_again((peer, Target { slot: targets[1].slot(), ..target }));
    assert_eq!((bytes(&targets[1]), world.ends()), (vec![0; LAYOUT.slot_bytes()], 1));
}

#[test]
fn a_transfer_that_is_over_leaves_nothing_that_can_be_written() {
    let mut world = World::new();
    let (sources, targets) = (world.slots(0, 2, 7), world.slots(1, 2, 0));
    world.expect(1, targets);
    world.push(1, &sources, 0..1);
    let told = world.told();
    // The deadline passes; the sender acknowledges, and the slots are free.
    (0..10).for_each(|_| world.run());
    assert!(
        matches!(&world.notices[..], [Notice::Arrived { slots, outcome: Outcome::Deadline, .. }] if slots.is_empty())
    );
    assert_eq!(world.pools[1].used_count(), 0);
    let again = world.slots(1, 2, 3);
    world.write_again(told);
    assert!(
        again.iter().all(|slot| bytes(slot) == vec![3; LAYOUT.slot_bytes()]),
        "the slots are somebody else's"
    );
    assert_eq!(world.ends(), 1);
}

/// Two senders fill halves of the same blocks: the name stays valid until the second has finished.
#[test]
fn a_name_is_good_while_another_transfer_fills_the_slot() {
    let mut world = World::new();
    let (sources, targets) = (world.slots(0, 1, 7), world.slots(1, 1, 0));
    world.expect(1, targets.clone());
    world.expect(2, targets.clone());
    world.push(1, &sources, 0..2);
    assert!(matches!(&world.notices[..], [Notice::Arrived { outcome: Outcome::Complete, .. }]));
    world.push(2, &sources, 0..2);
    assert!(matches!(&world.notices[..], [_, Notice::Arrived { outcome: Outcome::Complete, .. }]));
    assert_eq!(bytes(&targets[0]), bytes(&sources[0]));
    let told = world.told();
    world.write_again(told);
    assert_eq!((bytes(&targets[0]), world.ends()), (bytes(&sources[0]), 1));
}

/// A write that had begun when its grant ended, as a peer on TCP can hold one open: the block counts as
/// damaged, the connection ends, and the slots stay in quarantine until no write can reach them.
#[test]
fn slots_with_a_write_under_way_are_neither_verified_nor_freed() {
    let mut world = World::new();
    let (sources, targets) = (world.slots(0, 2, 7), world.slots(1, 2, 0));
    let stray = targets[0].slot();
    world.expect(1, targets);
    world.push(1, &sources, 0..1);
    let slab = Arc::clone(world.pools[1].slab());
    assert_eq!((world.notices.len(), world.ends()), (0, 0));
    slab.begin_write(stray);
    (0..10).for_each(|_| world.run());
    let arrived = |notices: &[Notice]| matches!(notices, [Notice::Arrived { slots, .. }] if slots.is_empty());
    assert!(arrived(&world.notices), "{:?}", world.notices);
    assert_eq!(world.ends(), 1, "its sender acknowledged, and was not believed");
    assert_eq!(world.pools[1].used_count(), 1, "the other slot is free");
    assert!((0..7).all(|_| world.pools[1].acquire().is_some_and(|slot| slot.slot() != stray)));
    slab.end_write(stray);
    world.run();
    assert_eq!(world.pools[1].used_count(), 0);
}

/// The last layers of a block have landed, and a write into it is still under way.
#[test]
fn a_block_with_a_write_under_way_is_damaged() {
    let mut world = World::new();
    let (sources, targets) = (world.slots(0, 1, 7), world.slots(1, 1, 0));
    let (stray, slab) = (targets[0].slot(), Arc::clone(world.pools[1].slab()));
    world.expect(1, targets);
    slab.begin_write(stray);
    world.push(1, &sources, 0..2);
    world.sender.handle(Command::PushEnd { transfer: 1 }, world.now);
    (0..10).for_each(|_| world.run());
    let [Notice::Arrived { slots, outcome, .. }] = &world.notices[..] else { panic!("{:?}", world.notices) };
    assert_eq!((slots.len(), *outcome), (0, Outcome::Corrupted));
    assert_eq!((world.ends(), world.pools[1].used_count()), (1, 1));
    slab.end_write(stray);
    world.run();
    assert_eq!(world.pools[1].used_count(), 0);
}
