//! Direct hand-offs over RDMA, between threads that sleep without work: software cards that each reach the
//! memory of an accelerator, whose address faults on any access by the CPU.

use std::net::SocketAddr;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use dataplane_fabric::wait::ThreadPolicy;
use dataplane_memory::testing::{Abilities, ChecksummerDouble, DeviceDouble, SumFaults};
use dataplane_memory::{DeviceMemory, Slab, SlabLayout, SlotPool};
use dataplane_transfer::{
    Command, Limits, Notice, Outcome, PieceLayout, TransferCounters, TransferNode, TransferService,
};
use dataplane_verbs::testing::{Reach, SoftwareDevice};
use dataplane_verbs::{Registration, VerbsConfig, VerbsFabric};

const LAYOUT: PieceLayout = PieceLayout::whole(4, 4096, 1);
const BLOCKS: usize = 6;
const PATIENCE: Duration = Duration::from_secs(60);

/// One node with slots in its accelerator's memory, which its card registers.
struct Side {
    node: TransferNode<VerbsFabric>,
    memory: Arc<DeviceDouble>,
    pool: Arc<SlotPool>,
    counters: Arc<TransferCounters>,
    address: String,
}

fn side(seed: u64) -> Side {
    let slots = SlabLayout { slot_bytes: LAYOUT.slot_bytes(), slot_count: 8 };
    let abilities = Abilities { dma_buf: true, peer_memory: false };
    let memory = DeviceDouble::new(slots.slots_bytes(), abilities);
    let shared = Arc::clone(&memory) as Arc<dyn DeviceMemory>;
    let card = SoftwareDevice::new();
    card.put_beside(Arc::clone(&shared), Reach { dma_buf: true, peer_memory: false });
    let pool = SlotPool::new(Arc::new(Slab::on_device("device", slots, shared).expect("slab")));
    let config = VerbsConfig {
        send_queue_depth: 128,
        request_queue_depth: 128,
        completion_entries: 2048,
        receive_buffers: 256,
        receive_buffer_bytes: 1024,
        receive_credits: 16,
        send_buffers: 64,
        ..VerbsConfig::default()
    };
    let listen = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
    let fabric = VerbsFabric::new(card.open().expect("open"), pool.slab(), listen, config).expect("fabric");
    assert_eq!(fabric.registration(pool.slab()), Some(Registration::DmaBuf));
    let address = fabric.listening_on().expect("listening").to_string();
    let counters = Arc::new(TransferCounters::default());
    let limits = Limits { lease: PATIENCE, ..Limits::default() };
    let faults = SumFaults { polls_max: 40, ..SumFaults::default() };
    let node = TransferNode::new(fabric, LAYOUT, limits, Arc::clone(&counters))
        .with_checksummer(ChecksummerDouble::new(seed, 16, faults));
    Side { node, memory, pool, counters, address }
}

fn bytes_of(transfer: u64, block: usize) -> Vec<u8> {
    (0..LAYOUT.slot_bytes())
        .map(|at| (transfer as usize * 101 + block * 57 + at * 13 + at / 255) as u8)
        .collect()
}

#[test]
fn services_hand_over_between_accelerators_without_a_copy() {
    let sides = [side(1), side(2)];
    let slots = |side: &Side| -> Vec<_> { (0..BLOCKS).map(|_| side.pool.acquire().expect("slot")).collect() };
    let (sources, targets) = (slots(&sides[0]), slots(&sides[1]));
    let stride = sources[0].slab().layout().stride();
    let [source, memory] = sides.each_ref().map(|side| Arc::clone(&side.memory));
    memory.reorder_writes();
    let (address, pools) = (sides[0].address.clone(), sides.each_ref().map(|side| Arc::clone(&side.pool)));
    let counters = sides.each_ref().map(|side| Arc::clone(&side.counters));
    let (tell, told) = mpsc::channel();
    let [sender, receiver] = sides.map(|side| {
        let tell = tell.clone();
        TransferService::start(side.node, ThreadPolicy::default(), move |notice| drop(tell.send(notice)))
            .expect("a thread")
    });
    for transfer in 1..=20 {
        for (block, slot) in sources.iter().enumerate() {
            source.write(slot.slot() as usize * stride, &bytes_of(transfer, block)).expect("inside");
        }
        let (content, first_block) = ([transfer as u8; 16], 0);
        let (slots, address, deadline) = (targets.clone(), address.clone(), Instant::now() + PATIENCE);
        receiver
            .submit(Command::Expect { transfer, address, content, first_block, slots, deadline })
            .expect("room");
        for layer in 0..LAYOUT.layers {
            let (slots, layers) = (sources.clone(), layer..layer + 1);
            sender.submit(Command::Push { transfer, content, first_block, slots, layers }).expect("room");
        }
        sender.submit(Command::PushEnd { transfer }).expect("room");
        for _ in 0..2 {
            match told.recv_timeout(PATIENCE).expect("a notice") {
                Notice::Arrived { slots, outcome, .. } => {
                    assert_eq!((slots.len(), outcome), (BLOCKS, Outcome::Complete));
                }
                Notice::Pushed { complete, .. } => assert!(complete),
            }
        }
        for (block, slot) in targets.iter().enumerate() {
            let mut bytes = vec![0; LAYOUT.slot_bytes()];
            memory.read(slot.slot() as usize * stride, &mut bytes).expect("inside");
            assert!(bytes == bytes_of(transfer, block), "transfer {transfer}, block {block}");
        }
        std::thread::sleep(Duration::from_millis(3));
    }
    let counted = |side: usize, name: &str| {
        counters[side].snapshot().into_iter().find(|(other, ..)| *other == name).map(|(.., value)| value)
    };
    assert_eq!((counted(0, "sent_directly"), counted(1, "received_directly")), (Some(20), Some(20)));
    drop((sender, receiver, sources, targets));
    assert!(pools.iter().all(|pool| pool.used_count() == 0), "slots leaked");
}
