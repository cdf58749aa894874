//! Hand-offs of more blocks than one message names: a prompt of 131,072 tokens has 8,192 blocks of sixteen.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_fabric::Fabric;
use dataplane_fabric::sim::{Faults, SimNetwork};
use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool};
use dataplane_shm::{ShmConfig, ShmFabric};
use dataplane_transfer::{Command, Limits, Notice, Outcome, PieceLayout, TransferNode};

const LAYOUT: PieceLayout = PieceLayout::whole(2, 32, 1);
const TICK: Duration = Duration::from_millis(1);
const STEPS_MAX: usize = 60_000;
/// Block counts whose names take two messages, and three.
const COUNTS: [usize; 2] = [8192, 16_500];
const CONTENT: [u8; 16] = [7; 16];

fn pools(blocks: usize) -> [Arc<SlotPool>; 2] {
    let layout = SlabLayout { slot_bytes: LAYOUT.slot_bytes(), slot_count: blocks as u32 };
    [(); 2].map(|()| SlotPool::new(Arc::new(Slab::create("long", layout, PageSize::Standard).expect("slab"))))
}

/// Makes bytes that differ between blocks and between layers.
fn bytes_of(block: usize) -> Vec<u8> {
    (0..LAYOUT.slot_bytes()).map(|at| (block ^ ((block >> 8) * 31) ^ (at * 7)) as u8).collect()
}

/// Runs one hand-off of every slot but the first `held`, which the receiver has already.
fn hand_over<F: Fabric>(
    fabrics: [F; 2],
    pools: &[Arc<SlotPool>; 2],
    address: &str,
    held: usize,
    mut tick: impl FnMut(),
) {
    let limits = Limits { lease: Duration::from_secs(600), ..Limits::default() };
    let [mut sender, mut receiver] =
        fabrics.map(|fabric| TransferNode::new(fabric, LAYOUT, limits, Arc::default()));
    let blocks = pools[0].slot_count();
    let [sources, mut targets] =
        pools.each_ref().map(|pool| (0..blocks).map(|_| pool.acquire().expect("slot")).collect::<Vec<_>>());
    for (block, slot) in sources.iter().enumerate() {
        slot.slab().write(slot.slot(), 0, &bytes_of(block));
    }
    let mut now = Instant::now();
    let (address, deadline) = (address.to_owned(), now + TICK * STEPS_MAX as u32);
    let (first_block, slots) = (held as u32, targets.split_off(held));
    drop(targets);
    let expect = Command::Expect { transfer: 1, address, content: CONTENT, first_block, slots, deadline };
    receiver.handle(expect, now);
    for layer in 0..LAYOUT.layers {
        let (slots, layers) = (sources.clone(), layer..layer + 1);
        sender.handle(Command::Push { transfer: 1, content: CONTENT, first_block: 0, slots, layers }, now);
    }
    drop(sources);
    sender.handle(Command::PushEnd { transfer: 1 }, now);
    let (mut pushed, mut arrived) = (Vec::new(), Vec::new());
    for _ in 0..STEPS_MAX {
        now += TICK;
        tick();
        sender.poll(now, &mut pushed);
        receiver.poll(now, &mut arrived);
        if !pushed.is_empty() && !arrived.is_empty() {
            break;
        }
    }
    assert!(matches!(pushed[..], [Notice::Pushed { transfer: 1, complete: true }]), "{pushed:?}");
    let Some(Notice::Arrived { transfer: 1, slots, outcome: Outcome::Complete }) = arrived.pop() else {
        panic!("{blocks} blocks did not arrive");
    };
    assert_eq!(slots.len(), blocks - held);
    for (block, slot) in (held..).zip(&slots) {
        let mut bytes = vec![0; LAYOUT.slot_bytes()];
        slot.slab().read(slot.slot(), 0, &mut bytes);
        assert!(bytes == bytes_of(block), "block {block}");
    }
    drop(slots);
    assert!(sender.is_idle() && receiver.is_idle());
    assert!(pools.iter().all(|pool| pool.used_count() == 0), "slots leaked");
}

#[test]
fn a_prompt_of_more_blocks_than_one_message_names_is_handed_over_whole() {
    for (seed, blocks) in (1..).zip(COUNTS) {
        // Also with queues that are full in the middle of a reservation.
        for queue_depth_max in [1, 512] {
            if queue_depth_max == 1 && blocks > COUNTS[0] {
                continue;
            }
            let network =
                SimNetwork::new(seed, Faults { delay_ticks_max: 3, queue_depth_max, ..Faults::default() });
            let pools = pools(blocks);
            let fabrics = pools.each_ref().map(|pool| network.add_node(Arc::clone(pool.slab())));
            hand_over(fabrics, &pools, "0", 0, || network.advance(1));
        }
    }
}

#[test]
fn such_a_prompt_is_handed_over_whole_through_shared_memory() {
    for blocks in COUNTS {
        let pools = pools(blocks);
        let address = format!("@kvasir-long-{}-{blocks}", std::process::id());
        let mut listen = Some(&*address);
        let fabrics = pools.each_ref().map(|pool| {
            let slab = Arc::clone(pool.slab());
            ShmFabric::new(slab, listen.take(), ShmConfig::default()).expect("fabric")
        });
        hand_over(fabrics, &pools, &address, 100, || ());
    }
}
