//! Hand-offs between different tensor parallelism over a simulated fabric.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_fabric::sim::{Faults, SimFabric, SimNetwork};
use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool, SlotRef};
use dataplane_transfer::{
    Command, HeadRange, Limits, Notice, Outcome, PieceLayout, TransferCounters, TransferNode, senders_of,
};

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
            SlotPool::new(Arc::new(Slab::create("sharded", layout, PageSize::Standard).expect("slab")))
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

    fn slots(&self, node: usize, count: usize) -> Vec<SlotRef> {
        (0..count).map(|_| self.pools[node].acquire().expect("enough slots")).collect()
    }
}

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
                // Each pair of ranks has a transfer of its own.
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
