//! Bonds over simulated rails. A rail is a network of its own, so that one can fail while the others go on.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dataplane_fabric::sim::{Faults, SimFabric, SimNetwork};
use dataplane_fabric::testing::{Pair, SLOT_BYTES, conformance, pool};
use dataplane_fabric::{Completion, Operation, Priority, SlotRange, Source, Target};
use dataplane_memory::testing::{Abilities, DeviceDouble};
use dataplane_memory::{DeviceMemory, PageSize, SlabKind, SlotPool, SlotRef};

use super::wire::LinkName;
use super::*;

const NAMES: [&str; 3] = ["one", "two", "three"];

struct World {
    networks: Vec<SimNetwork>,
    clock: Arc<AtomicU64>,
    start: Instant,
    bonds: [Bond<SimFabric>; 2],
    pools: [Arc<SlotPool>; 2],
    events: [Vec<Event>; 2],
}

fn bond(
    networks: &[SimNetwork],
    ranks: &[u8],
    slab: &Arc<dataplane_memory::Slab>,
    config: BondConfig,
    clock: (&Arc<AtomicU64>, Instant),
) -> Bond<SimFabric> {
    let rail = |(index, network): (usize, &SimNetwork)| Rail {
        fabric: network.add_node_named(Arc::clone(slab), NAMES[index]),
        rank: ranks[index],
    };
    let rails = networks.iter().enumerate().map(rail).collect();
    let (ticks, start) = (Arc::clone(clock.0), clock.1);
    Bond::new(rails, config, Box::new(move || start + Duration::from_micros(ticks.load(Ordering::Relaxed))))
}

impl World {
    fn new(seed: u64, ranks: &[u8], faults: impl Fn(usize) -> Faults, config: BondConfig) -> Self {
        let networks: Vec<SimNetwork> =
            (0..ranks.len()).map(|rail| SimNetwork::new(seed + rail as u64 * 7919, faults(rail))).collect();
        let (clock, start) = (Arc::new(AtomicU64::new(0)), Instant::now());
        let pools = [pool("a"), pool("b")];
        let bonds = [0, 1].map(|node| bond(&networks, ranks, pools[node].slab(), config, (&clock, start)));
        Self { networks, clock, start, bonds, pools, events: [Vec::new(), Vec::new()] }
    }

    fn step(&mut self) {
        self.clock.fetch_add(100, Ordering::Relaxed);
        self.networks.iter().for_each(|network| network.advance(1));
        for (bond, events) in self.bonds.iter_mut().zip(&mut self.events) {
            bond.flush();
            bond.poll(64, events);
        }
    }

    fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> bool) -> u32 {
        for steps in 0..200_000 {
            if done(self) {
                return steps;
            }
            self.step();
        }
        panic!("never: {what}; {:?} after {:?}", self.events, self.start.elapsed());
    }

    fn connect(&mut self) -> (PeerId, PeerId) {
        let address: Vec<String> =
            NAMES[..self.networks.len()].iter().map(|name| format!("{name}:1")).collect();
        let to_b = self.bonds[0].connect(&address.join(",")).expect("an address");
        self.until("connected", |world| !world.events[0].is_empty() && !world.events[1].is_empty());
        let Some(Event::Accepted { peer: to_a }) = self.events[1].first().cloned() else {
            panic!("expected an accepted peer: {:?}", self.events);
        };
        assert_eq!(self.events[0], [Event::Connected { peer: to_b }]);
        self.events.iter_mut().for_each(Vec::clear);
        // Let the other links come up too.
        (0..50).for_each(|_| self.step());
        (to_b, to_a)
    }
}

/// Runs the contract of every fabric over one rail, over two, and over three of different ranks.
#[test]
fn conforms_to_the_contract() {
    for ranks in [&[0][..], &[0, 0], &[1, 0, 1]] {
        let seed = Cell::new(0);
        conformance(&mut || {
            seed.set(seed.get() + 1);
            let faults = |_| Faults { delay_ticks_max: 5, ..Faults::default() };
            let config = BondConfig { slice_bytes: 30_000, ..BondConfig::default() };
            let World { networks, clock, bonds: [a, b], pools: [pool_a, pool_b], .. } =
                World::new(seed.get(), ranks, faults, config);
            let names: Vec<String> = NAMES[..ranks.len()].iter().map(|name| format!("{name}:1")).collect();
            Pair {
                a: Some(Box::new(a)),
                b: Some(Box::new(b)),
                pool_a,
                pool_b,
                address_of_b: names.join(","),
                tick: Box::new(move || {
                    clock.fetch_add(100, Ordering::Relaxed);
                    networks.iter().for_each(|network| network.advance(1));
                }),
            }
        });
    }
}

fn content(round: usize) -> Vec<u8> {
    (0..SLOT_BYTES).map(|at| (at * 17 + at / 253 + round * 59) as u8).collect()
}

/// Rails fail and recover at random moments while slots are written, read and announced. The bytes that an
/// immediate announces are complete, events arrive once and in order, every request completes once, and no
/// slot is held at the end.
#[test]
fn rails_fail_and_nothing_is_lost_doubled_or_early() {
    for seed in 1..=12 {
        let faults =
            |rail| Faults { delay_ticks_max: 3 + rail as u64 * 4, queue_depth_max: 8, ..Faults::default() };
        let retry_first = Duration::from_millis(3);
        let config = BondConfig { slice_bytes: 9000, retry_first, ..BondConfig::default() };
        let mut world = World::new(seed, &[0, 0, 1], faults, config);
        let (to_b, to_a) = world.connect();
        let mut random = fastrand::Rng::with_seed(seed);
        let mut below = |bound: u64| random.u64(..bound);
        let mut cuts = 0;
        for round in 0..60_usize {
            let source = world.pools[0].acquire().expect("a slot");
            let back = world.pools[0].acquire().expect("a slot");
            let target = world.pools[1].acquire().expect("a slot");
            source.slab().write(source.slot(), 0, &content(round));
            let there = Target::of(&target, 0);
            let write = Operation::Write {
                source: Source::Slot { slot: source.clone(), offset: 0, len: SLOT_BYTES as u32 },
                target: there,
                rows: None,
                immediate: Some(round as u32),
            };
            let message = Operation::Send { message: (round as u64).to_le_bytes().into() };
            let id = 1000 + round as u64 * 10;
            for (offset, operation) in [(1, write), (2, message)] {
                let post = WorkRequest { id: id + offset, peer: to_b, priority: Priority::Urgent, operation };
                world.bonds[0].post(post).expect("room");
            }
            // Never all rails at once: that ends the peer, which another test covers.
            let mut ended = 0;
            world.until("the round", |world| {
                if below(40) == 0 && ended < 2 {
                    world.networks[below(2) as usize].cut(below(2) as usize);
                    ended += 1;
                    cuts += 1;
                }
                let announced = Event::Immediate { peer: to_a, value: round as u32 };
                let told = Event::Message { peer: to_a, message: (round as u64).to_le_bytes().into() };
                world.events[1] == [announced, told]
            });
            let mut bytes = vec![0; SLOT_BYTES];
            target.slab().read(target.slot(), 0, &mut bytes);
            assert!(bytes == content(round), "seed {seed}, round {round}: announced and not whole");
            let read = Operation::Read {
                into: SlotRange { slot: back.clone(), offset: 0, len: SLOT_BYTES as u32 },
                from: there,
                rows: None,
            };
            let post =
                WorkRequest { id: id + 3, peer: to_b, priority: Priority::Background, operation: read };
            world.bonds[0].post(post).expect("room");
            world.until("completions", |world| world.events[0].len() == 3);
            let mut done: Vec<u64> = world.events[0]
                .iter()
                .map(|event| match event {
                    Event::Completed { id, completion: Completion::Done } => *id,
                    other => panic!("seed {seed}, round {round}: {other:?}"),
                })
                .collect();
            done.sort_unstable();
            assert_eq!(done, [id + 1, id + 2, id + 3]);
            back.slab().read(back.slot(), 0, &mut bytes);
            assert!(bytes == content(round), "seed {seed}, round {round}: read and not whole");
            world.events.iter_mut().for_each(Vec::clear);
            (0..below(60)).for_each(|_| world.step());
        }
        let counters = world.bonds[0].counters();
        assert!(
            cuts > 5 && counters.links_failed() > 3 && counters.links_restored() > 2,
            "{cuts} cuts: {counters:?}"
        );
        (0..2000).for_each(|_| world.step());
        assert!(world.events.iter().all(Vec::is_empty), "nothing comes twice: {:?}", world.events);
        assert!(world.bonds[0].in_flight.is_empty() && world.bonds[1].in_flight.is_empty());
        assert!(world.bonds[0].peers.values().all(|peer| peer.lanes.iter().all(lane::Lane::is_idle)));
        assert_eq!(world.pools[0].used_count() + world.pools[1].used_count(), 0, "slots leaked");
    }
}

/// A rail fails at the sender's end while its packets are still in transit. The bytes arrive over the other
/// rail; once they are announced the receiver reuses the slot, and no write of the old rail may land in it
/// any more.
#[test]
fn late_packets_of_a_dead_rail_never_land_in_a_reused_slot() {
    let mut failed = 0;
    for seed in 1..=10 {
        let faults =
            |rail| Faults { delay_ticks_max: [200, 3][rail], queue_depth_max: 16, ..Faults::default() };
        let config =
            BondConfig { slice_bytes: 9000, retry_first: Duration::from_secs(60), ..BondConfig::default() };
        let mut world = World::new(seed, &[0, 0], faults, config);
        let (to_b, to_a) = world.connect();
        (0..300).for_each(|_| world.step());
        let source = world.pools[0].acquire().expect("a slot");
        let target = world.pools[1].acquire().expect("a slot");
        source.slab().write(source.slot(), 0, &content(1));
        let operation = Operation::Write {
            source: Source::Slot { slot: source.clone(), offset: 0, len: SLOT_BYTES as u32 },
            target: Target::of(&target, 0),
            rows: None,
            immediate: Some(1),
        };
        world.bonds[0]
            .post(WorkRequest { id: 1, peer: to_b, priority: Priority::Urgent, operation })
            .expect("room");
        (0..4).for_each(|_| world.step());
        world.networks[0].cut_one_end(0);
        world
            .until("the bytes", |world| world.events[1].contains(&Event::Immediate { peer: to_a, value: 1 }));
        let mut bytes = vec![0; SLOT_BYTES];
        target.slab().read(target.slot(), 0, &mut bytes);
        assert!(bytes == content(1), "seed {seed}");
        target.slab().write(target.slot(), 0, &vec![0xDD; SLOT_BYTES]);
        (0..600).for_each(|_| world.step());
        target.slab().read(target.slot(), 0, &mut bytes);
        assert!(bytes.iter().all(|&byte| byte == 0xDD), "seed {seed}: a late write landed in a reused slot");
        failed += world.bonds[0].counters().slices_retried();
    }
    assert!(failed > 10, "slices were on the dead rail: {failed}");
}

/// Two of three links fail at one end or at both, at different moments: control frames about one may be
/// lost with the next. The third is healthy, so the peer stays, posted requests arrive, and none waits for
/// ever.
#[test]
fn one_healthy_link_of_three_is_enough() {
    let mut failed = 0;
    for seed in 1..=200_u64 {
        let faults = |_| Faults { delay_ticks_max: 40, queue_depth_max: 16, ..Faults::default() };
        let config =
            BondConfig { slice_bytes: 9000, retry_first: Duration::from_secs(60), ..BondConfig::default() };
        let mut world = World::new(seed, &[0, 0, 0], faults, config);
        let (to_b, to_a) = world.connect();
        (0..100).for_each(|_| world.step());
        let mut random = fastrand::Rng::with_seed(seed);
        let mut below = |bound: u64| random.u64(..bound);
        let cuts: Vec<(u64, u64)> = (0..2).map(|_| (below(120), below(3))).collect();
        let mut expected = Vec::new();
        let mut kept = Vec::new();
        for step in 0..150_u64 {
            for (network, &(_, ends)) in cuts.iter().enumerate().filter(|(_, (at, _))| *at == step) {
                let network = &world.networks[network];
                match ends {
                    2 => network.cut(0),
                    end => network.cut_one_end(end as usize),
                }
            }
            if step % 25 == 0 {
                let value = step as u32;
                let source = world.pools[0].acquire().expect("a slot");
                let target = world.pools[1].acquire().expect("a slot");
                source.slab().write(source.slot(), 0, &content(step as usize));
                let operation = Operation::Write {
                    source: Source::Slot { slot: source, offset: 0, len: SLOT_BYTES as u32 },
                    target: Target::of(&target, 0),
                    rows: None,
                    immediate: Some(value),
                };
                let id = 1 + step;
                let post = WorkRequest { id, peer: to_b, priority: Priority::Urgent, operation };
                world.bonds[0].post(post).expect("room");
                expected.push((id, value));
                kept.push((step as usize, target));
            }
            world.step();
        }
        let mut steps = 0;
        let is_missing = |world: &World| {
            expected.iter().any(|&(id, value)| {
                !world.events[1].contains(&Event::Immediate { peer: to_a, value })
                    || !world.events[0].contains(&Event::Completed { id, completion: Completion::Done })
            })
        };
        while is_missing(&world) {
            steps += 1;
            // Two repetitions, and the time until they arrive.
            assert!(steps < 6000, "seed {seed}: {cuts:?}, {:?}", world.events);
            world.step();
        }
        for (round, target) in &kept {
            let mut bytes = vec![0; SLOT_BYTES];
            target.slab().read(target.slot(), 0, &mut bytes);
            assert!(bytes == content(*round), "seed {seed}: write {round}");
        }
        let told = world.events[1].iter().filter(|event| matches!(event, Event::Immediate { .. })).count();
        assert_eq!(told, expected.len(), "seed {seed}: once each: {:?}", world.events[1]);
        for bond in &world.bonds {
            assert_eq!(bond.peers.len(), 1, "seed {seed}: {cuts:?}");
            failed += bond.counters().links_failed();
        }
    }
    assert!(failed >= 2 * 2 * 200, "each end has lost two links each time: {failed}");
}

/// A connection that comes up and fails at once is made again at growing intervals.
#[test]
fn a_link_that_does_not_last_is_tried_less_often() {
    let retry_first = Duration::from_millis(1);
    let config = BondConfig { retry_first, retry_max: Duration::from_millis(64), ..BondConfig::default() };
    let mut world = World::new(3, &[0, 0], |_| Faults::default(), config);
    world.connect();
    let is_up = |world: &World| {
        assert_eq!(world.bonds[0].peers.len(), 1, "the other link is up");
        world.bonds[0].peers.values().all(|peer| peer.links[0].is_up())
    };
    let mut waits = Vec::new();
    for _ in 0..7 {
        world.networks[0].cut(0);
        world.until("down", |world| !is_up(world));
        waits.push(world.until("up again", |world| is_up(world)));
    }
    assert!(waits[6] > 16 * waits[0].max(10), "in steps of 100 us: {waits:?}");
    (0..700).for_each(|_| world.step());
    world.networks[0].cut(0);
    world.until("down", |world| !is_up(world));
    let after_a_while = world.until("up again", |world| is_up(world));
    assert!(after_a_while < waits[6] / 4, "it has lasted for a while: {waits:?}, {after_a_while}");
}

/// Frames that a peer repeats without end postpone no deadline. The clock advances within a poll, like a
/// real one.
#[test]
fn a_flood_of_control_frames_puts_off_no_deadline() {
    let faults = |_| Faults { queue_depth_max: 1024, ..Faults::default() };
    let mut world = World::new(6, &[0, 0], faults, BondConfig::default());
    let (to_b, _) = world.connect();
    let (ticks, start, calls) = (Arc::clone(&world.clock), world.start, AtomicU64::new(0));
    world.bonds[1].clock = Box::new(move || {
        let calls = calls.fetch_add(1, Ordering::Relaxed);
        start + Duration::from_micros(ticks.load(Ordering::Relaxed)) + Duration::from_nanos(calls)
    });
    let mut stranger = world.networks[0].add_node(Arc::clone(pool("stranger").slab()));
    stranger.connect("1").expect("connect");
    world.until("a stranger", |world| world.bonds[1].awaiting_hello.len() == 1);
    let name = LinkName { link: 0, connection: u32::MAX };
    for _ in 0..GREET_WITHIN.as_micros() / 100 + 100 {
        let link = &world.bonds[0].peers[&to_b].links[0];
        let (rail, inner) = (link.rail, link.inner.expect("up"));
        assert!(world.bonds[0].post_frame(rail, inner, &Frame::Fenced { name, delivered: [0, 0] }));
        world.step();
    }
    assert!(world.bonds[1].awaiting_hello.is_empty(), "its time is over");
}

/// A peer that floods one rail does not block the events of others.
#[test]
fn a_flooded_rail_leaves_a_share_to_the_others() {
    let faults = |_| Faults { queue_depth_max: 1024, ..Faults::default() };
    let mut world = World::new(4, &[0, 0], faults, BondConfig::default());
    // Two peers, each with one link, over a rail of its own.
    let peers: Vec<PeerId> = ["one:1", "two:1"]
        .iter()
        .map(|address| world.bonds[0].connect(address).expect("an address"))
        .collect();
    world.until("connected", |world| world.events[0].len() == 2 && world.events[1].len() == 2);
    world.events.iter_mut().for_each(Vec::clear);
    let message = |peer| WorkRequest::message(peer, vec![7].into_boxed_slice());
    for _ in 0..600 {
        world.bonds[0].post(message(peers[0])).expect("room");
    }
    world.bonds[0].post(message(peers[1])).expect("room");
    world.bonds[0].flush();
    world.networks.iter().for_each(|network| network.advance(10));
    let mut events = Vec::new();
    world.bonds[1].poll(64, &mut events);
    world.bonds[1].poll(64, &mut events);
    let from: std::collections::HashSet<PeerId> = events
        .iter()
        .map(|event| match event {
            Event::Message { peer, .. } => *peer,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(from.len(), 2, "after two polls of {} events", events.len());
}

/// When the last rail fails, the peer is reported down, once, and every request is completed.
#[test]
fn the_last_rail_ends_the_peer() {
    let config = BondConfig { slice_bytes: 9000, ..BondConfig::default() };
    let faults = |_| Faults { delay_ticks_max: 6, ..Faults::default() };
    let mut world = World::new(5, &[0, 1], faults, config);
    let (to_b, _) = world.connect();
    let slot = world.pools[0].acquire().expect("a slot");
    let target = Target { slab: SlabKind::Host, slot: 0, generation: 0, offset: 0 };
    for id in 1..=8_u64 {
        let source = Source::Slot { slot: slot.clone(), offset: 0, len: SLOT_BYTES as u32 };
        let operation = Operation::Write { source, target, rows: None, immediate: Some(1) };
        world.bonds[0]
            .post(WorkRequest { id, peer: to_b, priority: Priority::Urgent, operation })
            .expect("room");
    }
    drop(slot);
    (0..4).for_each(|_| world.step());
    world.networks.iter().for_each(|network| network.kill(1));
    world.until("the end", |world| {
        world.events[0].iter().any(|event| matches!(event, Event::PeerDown { peer, .. } if *peer == to_b))
    });
    let completed = world.events[0].iter().filter(|event| matches!(event, Event::Completed { .. })).count();
    assert_eq!(completed, 8, "{:?}", world.events[0]);
    assert_eq!(world.pools[0].used_count(), 0, "slots leaked");
    assert!(world.bonds[0].peers.is_empty() && world.bonds[0].inners.is_empty());
    assert!(world.bonds[0].sessions.is_empty());
}

/// Bytes go to the faster rail, and to the better rank alone while that is up.
#[test]
fn slices_go_where_they_are_done_first() {
    let config = BondConfig { slice_bytes: 4096, link_window_bytes: 1 << 20, ..BondConfig::default() };
    let faults = |rail| Faults { delay_ticks_max: [2, 40, 2][rail], queue_depth_max: 4, ..Faults::default() };
    let mut world = World::new(9, &[0, 0, 1], faults, config);
    let (to_b, to_a) = world.connect();
    let source = world.pools[0].acquire().expect("a slot");
    let target = world.pools[1].acquire().expect("a slot");
    let mut posted = [0_u64; 3];
    for round in 0..40_u32 {
        let source = Source::Slot { slot: source.clone(), offset: 0, len: SLOT_BYTES as u32 };
        let there = Target::of(&target, 0);
        let operation = Operation::Write { source, target: there, rows: None, immediate: Some(round) };
        let post = WorkRequest { id: 0, peer: to_b, priority: Priority::Urgent, operation };
        world.bonds[0].post(post).expect("room");
        let mut seen = std::collections::HashSet::new();
        world.until("the round", |world| {
            for (&id, in_flight) in &world.bonds[0].in_flight {
                if seen.insert(id) {
                    posted[in_flight.link] += in_flight.bytes;
                }
            }
            world.events[1].contains(&Event::Immediate { peer: to_a, value: round })
        });
        world.events.iter_mut().for_each(Vec::clear);
    }
    assert_eq!(posted[2], 0, "the third rail is of a lower rank");
    assert!(posted[1] > 0, "the slow rail carries some: {posted:?}");
    assert!(posted[0] > posted[1] * 3, "the fast rail carries most: {posted:?}");
}

/// A silent connection is closed after a timeout, and one that sends an invalid frame at once.
#[test]
fn strangers_do_not_stay() {
    let mut world = World::new(2, &[0, 0], |_| Faults::default(), BondConfig::default());
    let mut rude = world.networks[0].add_node(Arc::clone(world.pools[0].slab()));
    let mute = rude.connect("1").expect("an address");
    let loud = rude.connect("1").expect("an address");
    (0..5).for_each(|_| world.step());
    rude.post(WorkRequest::message(loud, Box::new([7; 40]))).expect("room");
    let mut events = Vec::new();
    for _ in 0..20 {
        world.step();
        rude.poll(16, &mut events);
    }
    let is_down = |events: &[Event], peer| {
        events.iter().any(|event| matches!(event, Event::PeerDown { peer: down, .. } if *down == peer))
    };
    assert!(is_down(&events, loud) && !is_down(&events, mute));
    for _ in 0..(GREET_WITHIN.as_micros() / 100) {
        world.step();
    }
    rude.poll(16, &mut events);
    assert!(is_down(&events, mute));
    assert!(world.bonds[1].awaiting_hello.is_empty() && world.events[1].is_empty());
}

/// A rail that is dead when the connection is made affects no other rail, and joins when it recovers.
#[test]
fn a_dead_rail_does_not_stop_a_connection() {
    for dead in [0, 1] {
        let config = BondConfig { retry_first: Duration::from_millis(2), ..BondConfig::default() };
        let faults = |rail| Faults { delay_ticks_max: [1, 9][rail], ..Faults::default() };
        let mut world = World::new(3, &[0, 1], faults, config);
        world.networks[dead].kill(1);
        let (to_b, to_a) = world.connect();
        let ping = |world: &mut World, value: u8| {
            let message = Operation::Send { message: Box::new([value]) };
            let post = WorkRequest { id: 0, peer: to_b, priority: Priority::Urgent, operation: message };
            world.bonds[0].post(post).expect("room");
            let expected = Event::Message { peer: to_a, message: Box::new([value]) };
            world.until("the message", |world| world.events[1].contains(&expected));
        };
        ping(&mut world, 1);
        world.networks[dead].revive(1);
        (0..2000).for_each(|_| world.step());
        world.networks[1 - dead].cut(0);
        ping(&mut world, 2);
        assert!(world.events[0].is_empty(), "rail {dead}: {:?}", world.events[0]);
    }
}

/// A node that has restarted under the same address is another peer, not a continuation of the old one.
#[test]
fn a_peer_that_starts_anew_is_another() {
    let config = BondConfig { retry_first: Duration::from_millis(2), ..BondConfig::default() };
    let mut world = World::new(4, &[0, 0], |_| Faults::default(), config);
    let (to_b, to_a) = world.connect();
    // The peer drops its end of the connection, as after a restart, and one rail notices earlier than the other.
    world.bonds[1].disconnect(to_a);
    world.networks[0].cut(0);
    world.until("the end", |world| {
        world.events[0].iter().any(|event| matches!(event, Event::PeerDown { peer, .. } if *peer == to_b))
    });
    (0..400).for_each(|_| world.step());
    assert!(
        world.bonds[0].peers.is_empty() && world.bonds[1].peers.is_empty(),
        "nothing is left of either end"
    );
}

/// The better rail reaches a device's memory, the other the host's: reads and writes of either take the
/// rail that reaches it.
#[test]
fn reads_and_writes_take_the_rail_that_reaches_their_memory() {
    let networks =
        [1, 2].map(|seed| SimNetwork::new(seed, Faults { delay_ticks_max: 4, ..Faults::default() }));
    let (clock, start) = (Arc::new(AtomicU64::new(0)), Instant::now());
    let layout = dataplane_memory::SlabLayout { slot_bytes: 4096, slot_count: 4 };
    let pools = [0, 1].map(|_| {
        let memory = DeviceDouble::new(layout.slots_bytes(), Abilities::default());
        let device = Slab::on_device("device", layout, memory as Arc<dyn DeviceMemory>).expect("slab");
        let host = Slab::create("host", layout, PageSize::Standard).expect("slab");
        [device, host].map(|slab| SlotPool::new(Arc::new(slab)))
    });
    let mut bonds = [0, 1].map(|node: usize| {
        let [device, host] = [0, 1].map(|memory: usize| Arc::clone(pools[node][memory].slab()));
        let rails = vec![
            Rail { fabric: networks[0].add_direct_node_named(device, "one"), rank: 0 },
            Rail { fabric: networks[1].add_node_named(host, "two"), rank: 1 },
        ];
        let ticks = Arc::clone(&clock);
        let now = move || start + Duration::from_micros(ticks.load(Ordering::Relaxed));
        Bond::new(rails, BondConfig { slice_bytes: 1000, ..BondConfig::default() }, Box::new(now))
    });
    let to_b = bonds[0].connect("one:1,two:1").expect("an address");
    let mut events: [Vec<Event>; 2] = Default::default();
    let step = |bonds: &mut [Bond<SimFabric>; 2], events: &mut [Vec<Event>; 2]| {
        clock.fetch_add(100, Ordering::Relaxed);
        networks.iter().for_each(|network| network.advance(1));
        for (bond, events) in bonds.iter_mut().zip(events) {
            bond.flush();
            bond.poll(64, events);
        }
    };
    (0..100).for_each(|_| step(&mut bonds, &mut events));
    assert_eq!(events[0], [Event::Connected { peer: to_b }]);
    let put = |slot: &SlotRef, byte: u8| match slot.slab().device() {
        Some(device) => device.write(slot.slot() as usize * layout.stride(), &[byte; 4096]).expect("inside"),
        None => slot.slab().write(slot.slot(), 0, &[byte; 4096]),
    };
    let get = |slot: &SlotRef| {
        let mut bytes = vec![0; 4096];
        match slot.slab().device() {
            Some(device) => device.read(slot.slot() as usize * layout.stride(), &mut bytes).expect("inside"),
            None => slot.slab().read(slot.slot(), 0, &mut bytes),
        }
        bytes
    };
    let (device, host) = (0, 1);
    for (number, (here, there, is_read)) in [
        (device, device, false),
        (host, host, false),
        (host, device, false),
        (device, device, true),
        (host, host, true),
    ]
    .into_iter()
    .enumerate()
    {
        let (near, far) = (pools[0][here].acquire().expect("slot"), pools[1][there].acquire().expect("slot"));
        let (from, to) = if is_read { (&far, &near) } else { (&near, &far) };
        put(from, number as u8 + 1);
        let operation = match is_read {
            true => Operation::Read {
                into: SlotRange { slot: near.clone(), offset: 0, len: 4096 },
                from: Target::of(&far, 0),
                rows: None,
            },
            false => Operation::Write {
                source: Source::Slot { slot: near.clone(), offset: 0, len: 4096 },
                target: Target::of(&far, 0),
                rows: None,
                immediate: None,
            },
        };
        let before = [0, 1].map(|rail| bonds[0].counters().rail(rail).bytes.load(Ordering::Relaxed));
        let id = number as u64 + 1;
        let request = WorkRequest { id, peer: to_b, priority: Priority::Urgent, operation };
        bonds[0].post(request).expect("room");
        (0..200).for_each(|_| step(&mut bonds, &mut events));
        assert!(events[0].contains(&Event::Completed { id, completion: Completion::Done }), "{events:?}");
        assert!(get(to).iter().all(|&byte| byte == number as u8 + 1), "{here} {there} {is_read}");
        let moved =
            [0, 1].map(|rail| bonds[0].counters().rail(rail).bytes.load(Ordering::Relaxed) - before[rail]);
        assert_eq!(moved, if there == device { [4096, 0] } else { [0, 4096] });
    }
}
