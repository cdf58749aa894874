//! Direct hand-offs over two rails, of which either may fail and recover: both reach the devices, or one of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dataplane_fabric::sim::{Faults, SimFabric, SimNetwork};
use dataplane_memory::testing::SumFaults;
use dataplane_memory::{PageSize, Slab, SlabLayout, SlotRef};
use dataplane_transfer::{Bond, BondConfig, Command, HeadRange, Outcome, PieceLayout, Rail};

use crate::rig::{LAYOUT, RECEIVER, SENDER, Shape, Side, TICK, World, content, content_of};
use crate::runs::transfers;

/// The memory that peers write into over a node's second rail; over the first it is device slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SecondRail {
    /// Device slots too.
    Device,
    /// Staging slots, and the rail moves no others, like a socket.
    Host,
}

/// Two nodes of one shape and the networks between them.
fn bonded(
    shape: &Shape,
    second: SecondRail,
    faults: [Faults; 2],
) -> (World<Bond<SimFabric>>, [SimNetwork; 2]) {
    bonded_with([shape, shape], second, [0, 0], faults)
}

/// Two nodes and the networks between them, with the ranks of the two rails.
fn bonded_with(
    shapes: [&Shape; 2],
    second: SecondRail,
    ranks: [u8; 2],
    faults: [Faults; 2],
) -> (World<Bond<SimFabric>>, [SimNetwork; 2]) {
    let seed = shapes[0].seed;
    let networks = [0, 1].map(|rail| SimNetwork::new(seed * 31 + 1 + rail as u64, faults[rail]));
    let (millis, start) = (Arc::new(AtomicU64::new(0)), Instant::now());
    let sides = shapes.map(|shape| {
        Side::new(shape, |device, host| {
            let (slots, staging) = (Arc::clone(device.slab()), Arc::clone(host.slab()));
            let first = networks[0].add_direct_node_named(Arc::clone(&slots), "one");
            let second = match second {
                SecondRail::Device => networks[1].add_direct_node_named(slots, "two"),
                SecondRail::Host => networks[1].add_node_named(staging, "two"),
            };
            let rails = [(first, ranks[0]), (second, ranks[1])];
            let rails = rails.map(|(fabric, rank)| Rail { fabric, rank }).into();
            let millis = Arc::clone(&millis);
            let clock = Box::new(move || start + Duration::from_millis(millis.load(Ordering::Relaxed)));
            let (retry_first, retry_max) = (Duration::from_millis(2), Duration::from_millis(16));
            Bond::new(
                rails,
                BondConfig { slice_bytes: 300, retry_first, retry_max, seed, ..BondConfig::default() },
                clock,
            )
        })
    });
    if second == SecondRail::Device {
        // The double would treat its own copies as a card's, so this is left out where some hand-offs are staged.
        sides[RECEIVER].memory.reorder_writes();
    }
    let clocks = networks.clone();
    let tick = move || {
        millis.fetch_add(TICK.as_millis() as u64, Ordering::Relaxed);
        clocks.iter().for_each(|network| network.advance(1));
    };
    (World::new(sides, "one:0,two:0".to_owned(), tick, start), networks)
}

fn shape(seed: u64) -> Shape {
    Shape::direct(seed, SumFaults { polls_max: 1 + seed % 5, ..SumFaults::default() })
}

const FAULTS: Faults =
    Faults { delay_ticks_max: 4, queue_depth_max: 12, lose_one_in: 0, corrupt_one_in: 0, reorder: false };
/// Connections are made, and every message over them is lost.
const BLACK_HOLE: Faults = Faults { lose_one_in: 1, ..FAULTS };

#[test]
fn slices_of_both_rails_are_verified_together() {
    for seed in 1..=8 {
        println!("seed {seed}");
        let (mut world, networks) = bonded(&shape(seed), SecondRail::Device, [FAULTS; 2]);
        let sum = transfers(&mut world, &mut fastrand::Rng::with_seed(seed), 30, 0, |transfer, random, _| {
            if seed % 2 == 0 && transfer % 7 == 0 {
                networks[random.u64(..2) as usize].cut(SENDER);
            }
        });
        println!("{sum:?}");
        assert_eq!(world.sides[RECEIVER].counter("received_directly"), 30);
        assert!(sum.of(Outcome::Complete) == 30 || seed % 2 == 0 && sum.of(Outcome::Complete) > 15);
        world.run_until_idle();
    }
}

/// Over one rail device slots, over the other staging slots: each hand-off takes the way that exists when
/// it begins, and slices go over the rail that reaches their memory.
#[test]
fn direct_and_staged_hand_offs_go_side_by_side() {
    for seed in 1..=8 {
        println!("seed {seed}");
        let (mut world, networks) = bonded(&shape(seed), SecondRail::Host, [FAULTS; 2]);
        let of = |world: &World<_>, side: usize, name: &str| world.sides[side].counter(name);
        let sum = transfers(&mut world, &mut fastrand::Rng::with_seed(seed), 10, 0, |_, _, _| ());
        assert_eq!(
            (sum.of(Outcome::Complete), of(&world, RECEIVER, "received_directly")),
            (10, 10),
            "{sum:?}"
        );
        // The direct rail fails, and does not recover for now.
        networks[0].set_faults(BLACK_HOLE);
        networks[0].cut(SENDER);
        world.run(5);
        let sum = transfers(&mut world, &mut fastrand::Rng::with_seed(seed), 10, 0, |_, _, _| ());
        assert_eq!(sum.of(Outcome::Complete) + sum.of(Outcome::Refused), 10, "{sum:?}");
        assert_eq!(of(&world, RECEIVER, "received_directly"), 10);
        let staged = of(&world, RECEIVER, "received_staged");
        assert!(staged == sum.of(Outcome::Complete) && of(&world, SENDER, "sent_staged") >= staged);
        // The peer is reachable again: its pending greeting times out after five seconds, and another one
        // follows.
        networks[0].set_faults(FAULTS);
        world.run(6000);
        let sum = transfers(&mut world, &mut fastrand::Rng::with_seed(seed), 10, 0, |_, _, _| ());
        assert_eq!(
            (sum.of(Outcome::Complete), of(&world, RECEIVER, "received_directly")),
            (10, 20),
            "{sum:?}"
        );
        world.run_until_idle();
    }
}

/// The direct rail fails repeatedly while transfers are in flight; arrived blocks are right, and failed
/// transfers are reported in time.
#[test]
fn a_direct_rail_that_fails_beside_a_staged_one_costs_transfers_and_no_bytes() {
    let (mut complete, mut staged, mut direct) = (0, 0, 0);
    for seed in 1..=20 {
        println!("seed {seed}");
        let (mut world, networks) = bonded(&shape(seed), SecondRail::Host, [FAULTS; 2]);
        let sum =
            transfers(&mut world, &mut fastrand::Rng::with_seed(seed), 40, 8, |transfer, random, world| {
                if transfer % 3 == 0 {
                    networks[random.u64(..2) as usize].cut(random.u64(..2) as usize);
                    world.run(random.u64(..12) as usize);
                }
            });
        println!("{sum:?}");
        complete += sum.of(Outcome::Complete);
        staged += world.sides[RECEIVER].counter("received_staged");
        direct += world.sides[RECEIVER].counter("received_directly");
        world.run_until_idle();
    }
    assert!(complete > 600 && staged > 10 && direct > 600, "{complete} {staged} {direct}");
}

/// Expects a transfer of four blocks directly, with time to spare; returns its sources.
fn expect_directly(world: &mut World<Bond<SimFabric>>) -> Vec<SlotRef> {
    let (slots, sources) = (world.sides[RECEIVER].slots(4), world.sides[SENDER].slots(4));
    let (address, deadline) = (world.address.clone(), world.now + Duration::from_secs(20));
    let (content, first_block) = (content_of(99), 0);
    let expect = Command::Expect { transfer: 99, address, content, first_block, slots, deadline };
    world.command(RECEIVER, expect);
    world.run_until(|world| world.sides[RECEIVER].counter("received_directly") == 1);
    world.run(50);
    sources
}

/// A block computed after the only connection to the receiver's slots has failed waits for a second, then
/// ends its own transfer only.
#[test]
fn a_transfer_whose_way_is_gone_ends_alone() {
    let shape = Shape { lease: Duration::from_secs(30), ..shape(4) };
    let (mut world, networks) = bonded(&shape, SecondRail::Host, [FAULTS; 2]);
    let sources = expect_directly(&mut world);
    networks[0].set_faults(BLACK_HOLE);
    networks[0].cut(SENDER);
    world.run(20);
    let before = world.now;
    world.push(99, &sources, 0..LAYOUT.layers);
    drop(sources);
    world.command(SENDER, Command::PushEnd { transfer: 99 });
    let (slots, outcome) = world.wait();
    assert_eq!((slots.len(), outcome), (0, Outcome::SenderStopped));
    let waited = world.now - before;
    assert!((Duration::from_secs(1)..Duration::from_millis(1100)).contains(&waited), "{waited:?}");
    world.run_until(|world| world.sides[SENDER].notices.pop().is_some());
    let sum = transfers(&mut world, &mut fastrand::Rng::with_seed(3), 5, 0, |_, _, _| ());
    assert_eq!(sum.of(Outcome::Complete), 5, "{sum:?}");
    assert_eq!(world.sides[SENDER].counter("peers_lost"), 0);
    world.run_until_idle();
}

/// The better rail reaches devices only, and the sender has other heads: everything takes the other rail.
#[test]
fn slices_take_a_worse_rail_where_the_better_one_does_not_reach_their_memory() {
    let heads = |count| PieceLayout {
        heads: HeadRange { first: 0, count },
        head_bytes: LAYOUT.head_bytes / 2,
        ..LAYOUT
    };
    let [sender, receiver] =
        [2, 1].map(|count| Shape { layout: heads(count), ..Shape::direct(5, SumFaults::default()) });
    let (mut world, networks) = bonded_with([&sender, &receiver], SecondRail::Host, [0, 1], [FAULTS; 2]);
    for transfer in 1..=6 {
        world.push_whole(transfer, 3);
        let targets = world.sides[RECEIVER].slots(3);
        world.expect(transfer, 0, targets);
        let (slots, outcome) = world.wait();
        assert_eq!((slots.len(), outcome), (3, Outcome::Complete));
        for (block, slot) in slots.iter().enumerate() {
            let rows = content(transfer, block);
            let first_heads: Vec<u8> = rows
                .chunks(LAYOUT.head_bytes as usize)
                .flat_map(|row| row[..row.len() / 2].to_vec())
                .collect();
            assert!(world.sides[RECEIVER].bytes_of(slot) == first_heads, "transfer {transfer}");
        }
    }
    assert_eq!(world.sides[RECEIVER].counter("received_staged"), 6);
    // Only the better rail is left, which does not reach host memory.
    networks[1].set_faults(BLACK_HOLE);
    networks[1].cut(SENDER);
    world.run(20);
    world.push_whole(7, 3);
    let targets = world.sides[RECEIVER].slots(3);
    world.expect(7, 0, targets);
    assert!(matches!(world.wait(), (slots, Outcome::Refused) if slots.is_empty()));
    world.run_until_idle();
}

/// A first link that fails while the second is still being made leaves no peer waiting for ever.
#[test]
fn a_first_link_that_fails_before_the_second_is_there_ends_the_peer() {
    let (mut world, networks) = bonded(&shape(3), SecondRail::Host, [BLACK_HOLE, FAULTS]);
    let targets = world.sides[RECEIVER].slots(2);
    world.expect(1, 0, targets);
    world.run(50);
    networks[1].cut(SENDER);
    let (slots, outcome) = world.wait();
    assert_eq!((slots.len(), outcome), (0, Outcome::PeerDown));
    for _ in 0..2000 {
        world.step();
        let next = world.sides[RECEIVER].node.next_deadline();
        assert!(next.is_none_or(|at| at >= world.now), "a deadline that is over and stays");
    }
    networks[0].set_faults(FAULTS);
    world.run_until_idle();
}

/// Slices for a device's slots cannot go over the remaining rail: the peer is given up after a second, long
/// before the deadline, and the next hand-off is staged.
#[test]
fn slices_that_no_rail_reaches_end_their_peer() {
    let shape = Shape { lease: Duration::from_secs(30), staging_slots: 64, ..shape(3) };
    let (mut world, networks) = bonded(&shape, SecondRail::Host, [FAULTS; 2]);
    world.patience = Duration::from_secs(2);
    let sources = expect_directly(&mut world);
    // The slices are posted, and lost.
    networks[0].set_faults(BLACK_HOLE);
    world.push(99, &sources, 0..LAYOUT.layers);
    drop(sources);
    world.command(SENDER, Command::PushEnd { transfer: 99 });
    world.run(20);
    networks[0].cut(SENDER);
    let before = world.now;
    let (slots, outcome) = world.wait();
    assert_eq!((slots.len(), outcome), (0, Outcome::PeerDown));
    let waited = world.now - before;
    assert!((Duration::from_secs(1)..Duration::from_millis(1500)).contains(&waited), "{waited:?}");
    world.run_until(|world| world.sides[SENDER].notices.pop().is_some());
    let sum = transfers(&mut world, &mut fastrand::Rng::with_seed(3), 5, 0, |_, _, _| ());
    assert_eq!(sum.of(Outcome::Complete), 5, "{sum:?}");
    assert_eq!(world.sides[RECEIVER].counter("received_staged"), 5);
    world.run_until_idle();
}

/// A first hand-off waits a moment for the better rail, and no longer.
#[test]
fn a_connection_is_told_once_its_links_reach_all_memory_or_a_moment_has_passed() {
    for (faults, is_direct) in [(Faults { delay_ticks_max: 15, ..FAULTS }, true), (BLACK_HOLE, false)] {
        for seed in 1..=5 {
            let shape = Shape { lease: Duration::from_secs(30), ..shape(seed) };
            let (mut world, _) = bonded(&shape, SecondRail::Host, [faults, FAULTS]);
            world.patience = Duration::from_secs(2);
            world.push_whole(1, 3);
            let (targets, before) = (world.sides[RECEIVER].slots(3), world.now);
            world.expect(1, 0, targets);
            let (slots, outcome) = world.wait();
            assert_eq!((slots.len(), outcome), (3, Outcome::Complete), "seed {seed}");
            world.check(&slots, 1, 0);
            drop(slots);
            assert_eq!(world.sides[RECEIVER].counter("received_directly") == 1, is_direct, "seed {seed}");
            let waited = world.now - before;
            assert!(is_direct || (450..600).contains(&waited.as_millis()), "{waited:?}");
            world.run_until_idle();
        }
    }
}

/// A slot's number would be written over another slab by one of the rails.
#[test]
#[should_panic(expected = "rails show their peers one slab of a kind")]
fn rails_that_show_two_slabs_are_no_bond() {
    let network = SimNetwork::new(1, Faults::default());
    let layout = SlabLayout { slot_bytes: LAYOUT.slot_bytes(), slot_count: 8 };
    let other = Arc::new(Slab::create("other", layout, PageSize::Standard).expect("slab"));
    Side::new(&Shape::direct(1, SumFaults::default()), |_, host| {
        let rails = [host.slab(), &other].map(|slab| network.add_node(Arc::clone(slab)));
        let rails = rails.map(|fabric| Rail { fabric, rank: 0 }).into();
        Bond::new(rails, BondConfig::default(), Box::new(Instant::now))
    });
}
