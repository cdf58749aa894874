//! The fabric's contract over the double of a shared device, and the cases of this transport: ends, failures,
//! strangers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use dataplane_fabric::testing::{LAYOUT, Pair, SLOT_BYTES, conformance, sleep};
use dataplane_fabric::{
    Completion, Event, Fabric, Operation, PeerAccess, PeerId, Priority, Source, Target, WorkRequest,
};
use dataplane_ipc::IpcFabric;
use dataplane_memory::testing::{Abilities, CopyFaults, DeviceDouble, SharingDouble};
use dataplane_memory::{DeviceMemory, DeviceSharing, SlabKind, SlotPool, SlotRef};
use dataplane_shm::ShmConfig;

const PATIENCE: Duration = Duration::from_secs(10);
const MEMORY_BYTES: usize = 17 * (SLOT_BYTES + 64);

fn name() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("@kvasir-ipc-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

struct Node {
    fabric: IpcFabric,
    sharing: Option<Arc<SharingDouble>>,
    pool: Arc<SlotPool>,
    memory: Arc<DeviceDouble>,
    seen: Vec<Event>,
}

impl Node {
    fn new(listen: Option<&str>, faults: CopyFaults, access: PeerAccess) -> Self {
        let memory = DeviceDouble::new(MEMORY_BYTES, Abilities::default());
        let sharing = Arc::new(SharingDouble::new(LAYOUT, &memory, faults));
        let pool = SlotPool::new(Arc::clone(sharing.slab()));
        let config = ShmConfig { access, ..ShmConfig::default() };
        let fabric = IpcFabric::new(sharing.clone(), listen, config).expect("a node");
        Self { fabric, sharing: Some(sharing), pool, memory, seen: Vec::new() }
    }

    fn step(&mut self) {
        self.fabric.flush();
        self.fabric.poll(64, &mut self.seen);
    }

    fn is_down(&self, peer: PeerId) -> bool {
        self.seen.iter().any(|event| matches!(event, Event::PeerDown { peer: down, .. } if *down == peer))
    }

    fn completed(&self, id: u64) -> Option<Completion> {
        self.seen.iter().find_map(|event| match event {
            Event::Completed { id: ended, completion } if *ended == id => Some(*completion),
            _ => None,
        })
    }

    fn bytes(&self, slot: &SlotRef, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.read(slot.slot() as usize * LAYOUT.stride(), &mut bytes).expect("inside");
        bytes
    }

    fn fill(&self, slot: &SlotRef, byte: u8) {
        let at = slot.slot() as usize * LAYOUT.stride();
        self.memory.write(at, &vec![byte; SLOT_BYTES]).expect("inside");
    }

    fn write(&mut self, id: u64, peer: PeerId, source: SlotRef, target: &SlotRef, immediate: Option<u32>) {
        let source = Source::Slot { slot: source, offset: 0, len: SLOT_BYTES as u32 };
        let target = Target::of(target, 0);
        let operation = Operation::Write { source, target, rows: None, immediate };
        let request = WorkRequest { id, peer, priority: Priority::Urgent, operation };
        self.fabric.post(request).expect("room");
    }
}

fn until(nodes: &mut [&mut Node], what: &str, mut done: impl FnMut(&[&mut Node]) -> bool) {
    let started = Instant::now();
    loop {
        nodes.iter_mut().for_each(|node| node.step());
        if done(nodes) {
            return;
        }
        let seen: Vec<&Vec<Event>> = nodes.iter().map(|node| &node.seen).collect();
        assert!(started.elapsed() < PATIENCE, "never: {what}: {seen:?}");
    }
}

/// Two connected nodes, and the id of each at the other.
fn two(faults: CopyFaults) -> (Node, Node, PeerId, PeerId) {
    let address = name();
    let mut a = Node::new(None, faults, PeerAccess::Write);
    let mut b = Node::new(Some(&address), faults, PeerAccess::Write);
    let to_b = a.fabric.connect(&address).expect("connect starts");
    let mut to_a = None;
    until(&mut [&mut a, &mut b], "connected", |nodes| {
        to_a = nodes[1].seen.iter().find_map(|event| match event {
            Event::Accepted { peer } => Some(*peer),
            _ => None,
        });
        to_a.is_some() && nodes[0].seen.contains(&Event::Connected { peer: to_b })
    });
    (a.seen, b.seen) = (Vec::new(), Vec::new());
    (a, b, to_b, to_a.expect("accepted"))
}

#[test]
fn conforms_to_the_contract_with_a_device_that_is_late() {
    for polls_max in [1, 7] {
        conformance(&mut || {
            let (address, faults) = (name(), CopyFaults { polls_max, fail_one_in: 0 });
            let a = Node::new(None, faults, PeerAccess::default());
            let b = Node::new(Some(&address), faults, PeerAccess::default());
            Pair {
                a: Some(Box::new(a.fabric)),
                b: Some(Box::new(b.fabric)),
                pool_a: a.pool,
                pool_b: b.pool,
                address_of_b: address,
                tick: Box::new(|| {}),
            }
        });
    }
}

/// A message posted behind a write is delivered after its bytes, however slow the device is. The other lane
/// does not wait.
#[test]
fn nothing_overtakes_the_copies_of_its_lane() {
    let (mut a, mut b, to_b, to_a) = two(CopyFaults { polls_max: 200, fail_one_in: 0 });
    for round in 1..20_u8 {
        let (source, target) = (a.pool.acquire().expect("a slot"), b.pool.acquire().expect("a slot"));
        a.fill(&source, round);
        b.fill(&target, 0);
        a.write(u64::from(round), to_b, source, &target, Some(u32::from(round)));
        a.fabric.post(WorkRequest::message(to_b, Box::new([round]))).expect("room");
        let beside = Operation::Send { message: Box::new([0, round]) };
        let beside = WorkRequest { id: 0, peer: to_b, priority: Priority::Background, operation: beside };
        a.fabric.post(beside).expect("room");
        let told = |node: &Node, event: &Event| node.seen.iter().position(|seen| seen == event);
        let message = Event::Message { peer: to_a, message: Box::new([round]) };
        let beside = Event::Message { peer: to_a, message: Box::new([0, round]) };
        let immediate = Event::Immediate { peer: to_a, value: u32::from(round) };
        until(&mut [&mut a, &mut b], "the message", |nodes| {
            if told(nodes[1], &immediate).is_some() {
                assert!(nodes[1].bytes(&target, SLOT_BYTES).iter().all(|&byte| byte == round), "{round}");
            }
            told(nodes[1], &message).is_some() && nodes[0].completed(u64::from(round)).is_some()
        });
        let (immediate, message) = (told(&b, &immediate), told(&b, &message));
        assert!(immediate < message && immediate.is_some() && told(&b, &beside).is_some());
        (a.seen, b.seen) = (Vec::new(), Vec::new());
    }
}

/// The end is reported to the peer after the last copy has ended, and no event follows it.
#[test]
fn an_end_waits_for_the_copies_that_were_begun() {
    let (mut a, mut b, to_b, to_a) = two(CopyFaults { polls_max: 5000, fail_one_in: 0 });
    let targets: Vec<SlotRef> = (0..8).map(|_| b.pool.acquire().expect("a slot")).collect();
    for (id, target) in (1..).zip(&targets) {
        let source = a.pool.acquire().expect("a slot");
        a.fill(&source, 7);
        a.write(id, to_b, source, target, None);
    }
    a.fabric.flush();
    a.fabric.disconnect(to_b);
    let refused = WorkRequest::message(to_b, Box::new([1]));
    assert!(a.fabric.post(refused).is_err(), "nothing more is taken");
    until(&mut [&mut a, &mut b], "the end on both sides", |nodes| {
        let is_over = nodes[1].is_down(to_a);
        assert!(!is_over || nodes[0].pool.used_count() == 0, "a copy is under way after the end was told");
        is_over && nodes[0].is_down(to_b)
    });
    for id in 1..9 {
        assert!(a.completed(id).is_some(), "request {id}");
    }
    let before: Vec<Vec<u8>> = targets.iter().map(|target| b.bytes(target, SLOT_BYTES)).collect();
    targets.iter().for_each(|target| b.fill(target, 9));
    for _ in 0..6000 {
        a.step();
        b.step();
    }
    assert!(targets.iter().all(|target| b.bytes(target, SLOT_BYTES).iter().all(|&byte| byte == 9)));
    for (id, bytes) in (1..).zip(&before) {
        if a.completed(id) == Some(Completion::Done) {
            assert!(bytes.iter().all(|&byte| byte == 7), "request {id} is told as done and has not landed");
        }
    }
}

#[test]
fn a_copy_that_fails_ends_the_connection_and_completes_everything() {
    let (mut a, mut b, to_b, to_a) = two(CopyFaults { polls_max: 3, fail_one_in: 4 });
    let target = b.pool.acquire().expect("a slot");
    for id in 1..=12 {
        let source = a.pool.acquire().expect("a slot");
        a.write(id, to_b, source, &target, Some(id as u32));
    }
    until(&mut [&mut a, &mut b], "the end", |nodes| nodes[0].is_down(to_b) && nodes[1].is_down(to_a));
    let ended: Vec<Completion> = (1..=12).map(|id| a.completed(id).expect("completed")).collect();
    let done = ended.iter().take_while(|&&completion| completion == Completion::Done).count();
    assert!(done < 12 && ended[done..].iter().all(|&completion| completion == Completion::PeerDown));
    let told = b.seen.iter().filter(|event| matches!(event, Event::Immediate { .. })).count();
    assert_eq!(told, done, "what did not land is not told");
    let reason = a.seen.iter().find_map(|event| match event {
        Event::PeerDown { reason, .. } => Some(reason.clone()),
        _ => None,
    });
    assert!(reason.expect("a reason").contains("told to fail"));
    assert_eq!(a.pool.used_count(), 0);
}

/// A node that shows no slab can write to its peer, which cannot write back.
#[test]
fn a_node_that_gives_nothing_writes_to_others() {
    let address = name();
    let faults = CopyFaults::default();
    let mut a = Node::new(None, faults, PeerAccess::None);
    let mut b = Node::new(Some(&address), faults, PeerAccess::Write);
    let shown = [&a, &b].map(|node| node.fabric.shown_slab(SlabKind::Device).is_some());
    assert_eq!(shown, [false, true]);
    let to_b = a.fabric.connect(&address).expect("connect starts");
    until(&mut [&mut a, &mut b], "connected", |nodes| {
        nodes[0].seen.contains(&Event::Connected { peer: to_b }) && !nodes[1].seen.is_empty()
    });
    let Event::Accepted { peer: to_a } = b.seen[0] else { panic!("{:?}", b.seen) };
    let (source, target) = (a.pool.acquire().expect("a slot"), b.pool.acquire().expect("a slot"));
    a.fill(&source, 3);
    a.write(1, to_b, source.clone(), &target, Some(1));
    until(&mut [&mut a, &mut b], "the write", |nodes| {
        nodes[1].seen.contains(&Event::Immediate { peer: to_a, value: 1 })
    });
    assert!(b.bytes(&target, SLOT_BYTES).iter().all(|&byte| byte == 3));
    b.write(2, to_a, target, &source, None);
    until(&mut [&mut a, &mut b], "the refusal", |nodes| nodes[1].is_down(to_a) && nodes[0].is_down(to_b));
    assert_eq!(b.completed(2), Some(Completion::PeerDown));
}

/// Memory that the driver cannot attach: the connecting side gets the reason, and the other side gets no
/// event of the peer.
#[test]
fn memory_out_of_reach_is_refused_with_the_reason() {
    let address = name();
    let mut a = Node::new(None, CopyFaults::default(), PeerAccess::Write);
    let memory = DeviceDouble::new(MEMORY_BYTES, Abilities::default());
    let layout = dataplane_memory::SlabLayout { slot_count: 2, slot_bytes: 64 };
    #[derive(Debug)]
    struct Lying(SharingDouble);
    impl DeviceSharing for Lying {
        fn slab(&self) -> &Arc<dataplane_memory::Slab> {
            self.0.slab()
        }
        fn export(&self) -> Result<Vec<u8>, dataplane_memory::DeviceError> {
            Ok(b"nobody's".to_vec())
        }
        fn carries(&self, slab: &Arc<dataplane_memory::Slab>) -> bool {
            self.0.carries(slab)
        }
        fn attach(
            &self,
            exported: &[u8],
            layout: dataplane_memory::SlabLayout,
        ) -> Result<dataplane_memory::AttachedSlab, dataplane_memory::DeviceError> {
            self.0.attach(exported, layout)
        }
    }
    let lying = Arc::new(Lying(SharingDouble::new(layout, &memory, CopyFaults::default())));
    let pool = SlotPool::new(Arc::clone(lying.slab()));
    let config = ShmConfig { access: PeerAccess::Write, ..ShmConfig::default() };
    let fabric = IpcFabric::new(lying, Some(&address), config).expect("a node");
    let mut b = Node { fabric, sharing: None, pool, memory, seen: Vec::new() };
    let to_b = a.fabric.connect(&address).expect("connect starts");
    until(&mut [&mut a, &mut b], "the refusal", |nodes| nodes[0].is_down(to_b));
    let [Event::PeerDown { reason, .. }] = &a.seen[..] else { panic!("{:?}", a.seen) };
    assert!(reason.contains("cannot be attached") && reason.contains("nobody exported it"), "{reason}");
    assert!(b.seen.is_empty(), "it was never a peer: {:?}", b.seen);
    let refused = a.fabric.counters().snapshot().into_iter().find(|(name, ..)| *name == "refused_peers");
    assert_eq!(refused.map(|(.., count)| count), Some(1));
}

/// The peer may write until both sides have said goodbye: a node that is dropped waits for that.
#[test]
fn a_node_that_goes_down_waits_for_copies_into_its_memory() {
    let (mut a, b, to_b, _) = two(CopyFaults { polls_max: 3000, fail_one_in: 0 });
    let target = b.pool.acquire().expect("a slot");
    for id in 1..9 {
        let source = a.pool.acquire().expect("a slot");
        a.write(id, to_b, source, &target, None);
    }
    a.fabric.flush();
    let others = std::thread::spawn(move || {
        let started = Instant::now();
        while !a.is_down(to_b) {
            a.step();
            assert!(started.elapsed() < PATIENCE, "it waits for ever: {:?}", a.seen);
        }
        a.pool.used_count()
    });
    let Node { fabric, pool, memory, .. } = b;
    drop(fabric);
    // Bytes written from here on are not overwritten.
    let at = target.slot() as usize * LAYOUT.stride();
    memory.write(at, &vec![9; SLOT_BYTES]).expect("inside");
    assert_eq!(others.join().expect("the peer"), 0);
    let mut bytes = vec![0; SLOT_BYTES];
    memory.read(at, &mut bytes).expect("inside");
    assert!(bytes.iter().all(|&byte| byte == 9), "a copy landed after the node was gone");
    drop((target, pool));
}

/// Copies of a lost device may continue: its peers keep their slots until its process has ended.
#[test]
fn a_lost_device_says_no_goodbye() {
    let (mut a, mut b, to_b, to_a) = two(CopyFaults { polls_max: 1_000_000, fail_one_in: 0 });
    let target = b.pool.acquire().expect("a slot");
    for id in 1..4 {
        let source = a.pool.acquire().expect("a slot");
        a.write(id, to_b, source, &target, Some(id as u32));
    }
    a.fabric.flush();
    a.sharing.as_ref().expect("a double").lose();
    until(&mut [&mut a, &mut b], "the copies' ends", |nodes| {
        (1..4).all(|id| nodes[0].completed(id).is_some())
    });
    assert!((1..4).all(|id| a.completed(id) == Some(Completion::PeerDown)));
    let started = Instant::now();
    while started.elapsed() < Duration::from_millis(200) {
        a.step();
        b.step();
    }
    assert!(!b.is_down(to_a) && b.seen.is_empty(), "{:?}", b.seen);
    let refused = b.fabric.post(WorkRequest::message(to_a, Box::new([1])));
    assert!(refused.is_err(), "it is no peer to write to any more");
}

/// A node of another transport at the same address is refused in the handshake.
#[test]
fn a_peer_of_shared_host_memory_is_refused() {
    let address = name();
    let mut node = Node::new(Some(&address), CopyFaults::default(), PeerAccess::Write);
    let slab = Arc::clone(dataplane_fabric::testing::pool("host").slab());
    let mut host = dataplane_shm::ShmFabric::new(slab, None, ShmConfig::default()).expect("a node");
    let peer = host.connect(&address).expect("connect starts");
    let (mut seen, started) = (Vec::new(), Instant::now());
    while seen.is_empty() {
        host.poll(64, &mut seen);
        node.step();
        assert!(started.elapsed() < PATIENCE);
    }
    assert!(matches!(&seen[..], [Event::PeerDown { peer: down, .. }] if *down == peer), "{seen:?}");
    assert!(node.seen.is_empty());
}

/// The number of peers is limited, and the end of a peer makes room for another.
#[test]
fn peers_are_bounded() {
    let address = name();
    let faults = CopyFaults::default();
    let mut b = Node::new(Some(&address), faults, PeerAccess::Write);
    let limit = ShmConfig { connections_max: 2, access: PeerAccess::Write, ..ShmConfig::default() };
    let memory = DeviceDouble::new(MEMORY_BYTES, Abilities::default());
    let sharing = Arc::new(SharingDouble::new(LAYOUT, &memory, faults));
    let pool = SlotPool::new(Arc::clone(sharing.slab()));
    let fabric = IpcFabric::new(sharing, None, limit).expect("a node");
    let mut a = Node { fabric, sharing: None, pool, memory, seen: Vec::new() };
    let peers = [(); 2].map(|()| a.fabric.connect(&address).expect("room"));
    assert!(a.fabric.connect(&address).expect_err("a third").to_string().contains("limit"));
    until(&mut [&mut a, &mut b], "both", |nodes| {
        peers.iter().all(|&peer| nodes[0].seen.contains(&Event::Connected { peer }))
    });
    a.fabric.disconnect(peers[0]);
    until(&mut [&mut a, &mut b], "room", |nodes| nodes[0].is_down(peers[0]));
    a.fabric.connect(&address).expect("room again");
}

#[test]
fn a_sleeper_is_woken_by_messages_and_ends() {
    let (mut a, mut b, to_b, to_a) = two(CopyFaults::default());
    let sleeper = std::thread::spawn(move || {
        let started = Instant::now();
        let mut slept = 0;
        while !b.is_down(to_a) {
            if b.fabric.prepare_wait() {
                sleep(&b.fabric, Some(Instant::now() + Duration::from_secs(5)));
                slept += 1;
            }
            b.fabric.poll(64, &mut b.seen);
            assert!(started.elapsed() < Duration::from_secs(4), "it was not woken");
        }
        (slept, b.seen.iter().filter(|event| matches!(event, Event::Message { .. })).count())
    });
    for number in 0..5 {
        std::thread::sleep(Duration::from_millis(60));
        a.fabric.post(WorkRequest::message(to_b, Box::new([number]))).expect("room");
        a.fabric.flush();
        a.step();
    }
    a.fabric.disconnect(to_b);
    let started = Instant::now();
    while !a.is_down(to_b) {
        a.step();
        assert!(started.elapsed() < PATIENCE);
    }
    let (slept, messages) = sleeper.join().expect("the sleeper");
    assert!(slept >= 1 && messages == 5, "slept {slept} times, {messages} messages");
}
