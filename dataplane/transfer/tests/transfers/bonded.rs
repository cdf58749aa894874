//! Hand-offs over bonded rails that fail and come back: the whole layer at once, under a simulated clock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dataplane_fabric::sim::{Faults, SimFabric, SimNetwork};
use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool, SlotRef};
use dataplane_transfer::{
    Bond, BondConfig, Command, Limits, Notice, Outcome, PieceLayout, Rail, TransferCounters, TransferNode,
};

const LAYERS: u16 = 6;
const SLOT_BYTES: usize = 24 << 10;
const LAYOUT: PieceLayout = PieceLayout::whole(LAYERS, SLOT_BYTES as u32 / LAYERS as u32, 1);
const NAMES: [&str; 2] = ["one", "two"];

struct World {
    networks: Vec<SimNetwork>,
    micros: Arc<AtomicU64>,
    start: Instant,
    pools: [Arc<SlotPool>; 2],
    nodes: [TransferNode<Bond<SimFabric>>; 2],
    notices: [Vec<Notice>; 2],
    random: fastrand::Rng,
    /// Time in microseconds at which a rail was last cut.
    cut_at: u64,
}

impl World {
    fn new(seed: u64) -> Self {
        let faults =
            |rail| Faults { delay_ticks_max: 3 + rail * 3, queue_depth_max: 12, ..Faults::default() };
        let networks: Vec<SimNetwork> =
            (0..2).map(|rail| SimNetwork::new(seed * 31 + rail, faults(rail))).collect();
        let (micros, start) = (Arc::new(AtomicU64::new(0)), Instant::now());
        let layout = SlabLayout { slot_bytes: SLOT_BYTES, slot_count: 64 };
        let pools = [(); 2].map(|()| {
            SlotPool::new(Arc::new(Slab::create("bonded", layout, PageSize::Standard).expect("slab")))
        });
        let nodes = [0, 1].map(|node: usize| {
            let rail = |(index, network): (usize, &SimNetwork)| Rail {
                fabric: network.add_node_named(Arc::clone(pools[node].slab()), NAMES[index]),
                rank: 0,
            };
            let rails = networks.iter().enumerate().map(rail).collect();
            let micros = Arc::clone(&micros);
            let clock = Box::new(move || start + Duration::from_micros(micros.load(Ordering::Relaxed)));
            // Shorter than the time between two cuts, so that a rail is back before the other one goes.
            let (retry_first, retry_max) = (Duration::from_millis(2), Duration::from_millis(16));
            let seed = seed + 1;
            let config =
                BondConfig { slice_bytes: 5000, retry_first, retry_max, seed, ..BondConfig::default() };
            let lease = Duration::from_secs(2);
            let limits = Limits { seed, lease, ..Limits::default() };
            TransferNode::new(
                Bond::new(rails, config, clock),
                LAYOUT,
                limits,
                Arc::new(TransferCounters::default()),
            )
        });
        Self {
            networks,
            micros,
            start,
            pools,
            nodes,
            notices: [Vec::new(), Vec::new()],
            random: fastrand::Rng::with_seed(seed),
            cut_at: 0,
        }
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.random.u64(..bound)
    }

    fn now(&self) -> Instant {
        self.start + Duration::from_micros(self.micros.load(Ordering::Relaxed))
    }

    fn step(&mut self) {
        self.micros.fetch_add(200, Ordering::Relaxed);
        self.networks.iter().for_each(|network| network.advance(1));
        let now = self.now();
        for (node, notices) in self.nodes.iter_mut().zip(&mut self.notices) {
            node.poll(now, notices);
        }
    }

    fn slots(&self, node: usize, count: usize) -> Vec<SlotRef> {
        (0..count).map(|_| self.pools[node].acquire().expect("enough slots")).collect()
    }
}

fn content(seed: u64, block: usize) -> Vec<u8> {
    (0..SLOT_BYTES).map(|at| (seed as usize * 37 + block * 11 + at + at / 250) as u8).collect()
}

fn bytes_of(slot: &SlotRef) -> Vec<u8> {
    let mut bytes = vec![0; SLOT_BYTES];
    slot.slab().read(slot.slot(), 0, &mut bytes);
    bytes
}

const ADDRESS: &str = "one:1,two:1";

/// One hand-off from node 1 to node 0, with a rail cut at a random moment.
fn round(world: &mut World, transfer: u64) -> Outcome {
    let blocks = 1 + world.below(8) as usize;
    let (sources, targets) = (world.slots(1, blocks), world.slots(0, blocks));
    for (block, slot) in sources.iter().enumerate() {
        slot.slab().write(slot.slot(), 0, &content(transfer, block));
    }
    let deadline = world.now() + Duration::from_secs(5);
    let (address, now) = (ADDRESS.to_owned(), world.now());
    let slots = targets.clone();
    let expect = Command::Expect { transfer, address, first_block: 0, content: [1; 16], slots, deadline };
    world.nodes[0].handle(expect, now);
    for layer in 0..LAYERS {
        let (slots, now) = (sources.clone(), world.now());
        let push =
            Command::Push { transfer, content: [1; 16], first_block: 0, slots, layers: layer..layer + 1 };
        world.nodes[1].handle(push, now);
        for _ in 0..world.below(6) {
            world.step();
        }
        // Never both at once: that would end the peer, as intended.
        let is_whole = world.micros.load(Ordering::Relaxed) > world.cut_at + 40_000;
        if is_whole && world.below(6) == 0 {
            world.cut_at = world.micros.load(Ordering::Relaxed);
            let (rail, end) = (world.below(2) as usize, world.below(2) as usize);
            if world.below(2) == 0 {
                world.networks[rail].cut(end)
            } else {
                world.networks[rail].cut_one_end(end)
            }
        }
    }
    let now = world.now();
    world.nodes[1].handle(Command::PushEnd { transfer }, now);
    let mut arrived = None;
    for _ in 0..40_000 {
        for notice in world.notices[0].drain(..) {
            match notice {
                Notice::Arrived { slots, outcome, .. } => {
                    for (block, slot) in slots.iter().enumerate() {
                        assert!(
                            bytes_of(slot) == content(transfer, block),
                            "transfer {transfer}, block {block}"
                        );
                    }
                    assert!(arrived.replace(outcome).is_none(), "told twice");
                }
                Notice::Pushed { .. } => {}
            }
        }
        if let Some(arrived) = arrived {
            return arrived;
        }
        world.step();
    }
    panic!("transfer {transfer} never ends");
}

#[test]
fn a_rail_less_changes_nothing_that_anybody_sees() {
    let (mut whole, mut rounds, mut failed) = (0, 0, 0);
    for seed in 1..=25 {
        let mut world = World::new(seed);
        for transfer in 1..=30 {
            let arrived = round(&mut world, transfer);
            rounds += 1;
            whole += u64::from(arrived == Outcome::Complete);
            for _ in 0..world.below(200) {
                world.step();
            }
        }
        failed += world.nodes[0].fabric().counters().links_failed();
        for _ in 0..20_000 {
            world.step();
        }
        world.notices.iter_mut().for_each(Vec::clear);
        for (node, pool) in world.nodes.iter().zip(&world.pools) {
            assert!(node.is_idle(), "seed {seed}");
            assert_eq!(pool.used_count(), 0, "seed {seed}: slots leaked");
        }
    }
    println!("{whole} of {rounds} whole; {failed} links failed and their peer went on");
    assert_eq!(whole, rounds, "a rail was always left");
    assert!(failed > 20, "{failed} links failed");
}
