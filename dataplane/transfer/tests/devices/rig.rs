//! Two nodes with an accelerator each, and the network between them.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use dataplane_fabric::Fabric;
use dataplane_fabric::faults::CorruptingFabric;
use dataplane_fabric::sim::{Faults, SimFabric, SimNetwork};
use dataplane_memory::testing::{
    Abilities, ChecksummerDouble, CopierDouble, CopyFaults, DeviceDouble, SumFaults,
};
use dataplane_memory::{DeviceMemory, PageSize, Slab, SlabLayout, SlotPool, SlotRef};
use dataplane_shm::{ShmConfig, ShmFabric};
use dataplane_transfer::{
    Command, Limits, Notice, Outcome, PieceLayout, Staging, StagingLimits, TransferCounters, TransferId,
    TransferNode,
};

pub(crate) const LAYOUT: PieceLayout = PieceLayout::whole(4, 256, 1);
pub(crate) const TICK: Duration = Duration::from_millis(1);
pub(crate) const PATIENCE_STEPS: usize = 15_000;
pub(crate) const SENDER: usize = 0;
pub(crate) const RECEIVER: usize = 1;

/// Memory that a node's fabric reaches, beside the staging slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reach {
    /// No device: everything is staged.
    Host,
    /// Device slots are sources only; peers write to staging slots.
    Sources,
    /// Peers write to device slots.
    Device,
    /// Peers write to device slots and to staging slots.
    Both,
}

/// One node, with an accelerator.
pub(crate) struct Side<F> {
    pub(crate) node: TransferNode<F>,
    pub(crate) staging: Staging<CopierDouble>,
    pub(crate) memory: Arc<DeviceDouble>,
    pub(crate) device: Arc<SlotPool>,
    pub(crate) host: Arc<SlotPool>,
    summer: Arc<Mutex<ChecksummerDouble>>,
    counters: Arc<TransferCounters>,
    pub(crate) notices: Vec<Notice>,
}

pub(crate) struct Shape {
    pub(crate) layout: PieceLayout,
    pub(crate) device_slots: u32,
    pub(crate) staging_slots: u32,
    pub(crate) copies: CopyFaults,
    /// Faults of a device's sums; `None`: no device computes sums.
    pub(crate) sums: Option<SumFaults>,
    /// Memory that the sender's fabric and the receiver's fabric reach.
    pub(crate) reach: [Reach; 2],
    /// Short in simulated time; on real threads longer, since a busy machine may suspend a thread.
    pub(crate) lease: Duration,
    pub(crate) seed: u64,
}

impl Shape {
    pub(crate) fn new(seed: u64, copies: CopyFaults) -> Self {
        let lease = Duration::from_millis(400);
        let (sums, reach) = (None, [Reach::Host; 2]);
        Self { layout: LAYOUT, device_slots: 256, staging_slots: 32, copies, sums, reach, lease, seed }
    }

    /// Device to device without staging.
    pub(crate) fn direct(seed: u64, sums: SumFaults) -> Self {
        let copies = CopyFaults::default();
        Self { sums: Some(sums), reach: [Reach::Device; 2], ..Self::new(seed, copies) }
    }
}

impl<F: Fabric> Side<F> {
    /// Makes a side; `fabric` makes its fabric from the device's slots and the staging slots.
    pub(crate) fn new(shape: &Shape, fabric: impl FnOnce(&Arc<SlotPool>, &Arc<SlotPool>) -> F) -> Self {
        let slots = |slot_count| SlabLayout { slot_bytes: shape.layout.slot_bytes(), slot_count };
        let memory = DeviceDouble::new(slots(shape.device_slots).slots_bytes(), Abilities::default());
        let shared = Arc::clone(&memory) as Arc<dyn DeviceMemory>;
        let device = Slab::on_device("device", slots(shape.device_slots), shared).expect("slab");
        let host = Slab::create("staging", slots(shape.staging_slots), PageSize::Standard).expect("slab");
        let [device, host] = [device, host].map(|slab| SlotPool::new(Arc::new(slab)));
        let counters = Arc::new(TransferCounters::default());
        let limits = Limits { lease: shape.lease, ..Limits::default() };
        let mut node = TransferNode::new(fabric(&device, &host), shape.layout, limits, Arc::clone(&counters));
        let faults = shape.sums.unwrap_or_default();
        let summer = Arc::new(Mutex::new(ChecksummerDouble::new(shape.seed, 8, faults)));
        if shape.sums.is_some() {
            node = node.with_checksummer(Arc::clone(&summer));
        }
        let copier = CopierDouble::new(shape.seed, 16, shape.copies);
        let limits = StagingLimits { piece_blocks: 3, ..StagingLimits::of(&host) };
        let staging = Staging::new(copier, Arc::clone(&host), limits);
        Self { node, staging, memory, device, host, summer, counters, notices: Vec::new() }
    }

    pub(crate) fn handle(&mut self, command: Command, now: Instant) {
        self.staging.handle(&mut self.node, command, now);
    }

    pub(crate) fn summer(&self) -> MutexGuard<'_, ChecksummerDouble> {
        self.summer.lock().expect("one thread")
    }

    pub(crate) fn slots(&self, count: usize) -> Vec<SlotRef> {
        (0..count).map(|_| self.device.acquire().expect("enough slots")).collect()
    }

    pub(crate) fn fill(&self, slot: &SlotRef, bytes: &[u8]) {
        self.memory.write(slot.slot() as usize * slot.slab().layout().stride(), bytes).expect("inside");
    }

    pub(crate) fn bytes_of(&self, slot: &SlotRef) -> Vec<u8> {
        let mut bytes = vec![0; slot.slab().layout().slot_bytes];
        self.memory.read(slot.slot() as usize * slot.slab().layout().stride(), &mut bytes).expect("inside");
        bytes
    }

    pub(crate) fn counter(&self, name: &str) -> u64 {
        self.counters.snapshot().into_iter().find(|(n, ..)| *n == name).expect("a counter").2
    }

    pub(crate) fn is_clean(&self) -> bool {
        self.staging.is_idle()
            && self.node.is_idle()
            && self.staging.in_flight() == 0
            && self.device.used_count() == 0
            && self.host.used_count() == 0
    }
}

/// Two nodes and a way to let time pass between them.
pub(crate) struct World<F> {
    pub(crate) sides: [Side<F>; 2],
    pub(crate) address: String,
    tick: Box<dyn FnMut()>,
    pub(crate) now: Instant,
    /// Deadline of [`World::expect`].
    pub(crate) patience: Duration,
}

impl<F: Fabric> World<F> {
    /// Makes a world of the sender, at `address`, and the receiver; `tick` advances time by one millisecond.
    pub(crate) fn new(
        sides: [Side<F>; 2],
        address: String,
        tick: impl FnMut() + 'static,
        now: Instant,
    ) -> Self {
        let patience = Duration::from_millis(300);
        Self { sides, address, tick: Box::new(tick), now, patience }
    }

    pub(crate) fn step(&mut self) {
        self.now += TICK;
        (self.tick)();
        for Side { staging, node, notices, .. } in &mut self.sides {
            staging.poll(node, self.now, notices);
        }
    }

    pub(crate) fn run(&mut self, steps: usize) {
        (0..steps).for_each(|_| self.step());
    }

    /// Lets time pass until `is_so` returns true.
    pub(crate) fn run_until(&mut self, mut is_so: impl FnMut(&mut Self) -> bool) {
        for _ in 0..PATIENCE_STEPS {
            if is_so(self) {
                return;
            }
            self.step();
        }
        panic!("it never comes");
    }

    pub(crate) fn command(&mut self, side: usize, command: Command) {
        self.sides[side].handle(command, self.now);
    }

    pub(crate) fn expect(&mut self, transfer: TransferId, first_block: u32, slots: Vec<SlotRef>) {
        let (address, content) = (self.address.clone(), content_of(transfer));
        let deadline = self.now + self.patience;
        self.command(RECEIVER, Command::Expect { transfer, address, content, first_block, slots, deadline });
    }

    pub(crate) fn push(&mut self, transfer: TransferId, slots: &[SlotRef], layers: std::ops::Range<u16>) {
        let (content, slots) = (content_of(transfer), slots.to_vec());
        self.command(SENDER, Command::Push { transfer, content, first_block: 0, slots, layers });
    }

    pub(crate) fn push_whole(&mut self, transfer: TransferId, blocks: usize) {
        let slots = self.sides[SENDER].slots(blocks);
        for (block, slot) in slots.iter().enumerate() {
            self.sides[SENDER].fill(slot, &content(transfer, block));
        }
        self.push(transfer, &slots, 0..LAYOUT.layers);
        self.command(SENDER, Command::PushEnd { transfer });
    }

    pub(crate) fn arrival(&mut self) -> Option<(Vec<SlotRef>, Outcome)> {
        let notices = &mut self.sides[RECEIVER].notices;
        let at = notices.iter().position(|notice| matches!(notice, Notice::Arrived { .. }))?;
        match notices.remove(at) {
            Notice::Arrived { slots, outcome, .. } => Some((slots, outcome)),
            _ => None,
        }
    }

    pub(crate) fn check(&self, slots: &[SlotRef], transfer: TransferId, first_block: usize) {
        for (index, slot) in slots.iter().enumerate() {
            let wanted = content(transfer, first_block + index);
            assert!(self.sides[RECEIVER].bytes_of(slot) == wanted, "transfer {transfer}, block {index}");
        }
    }

    /// Lets time pass until the receiver's notice.
    pub(crate) fn wait(&mut self) -> (Vec<SlotRef>, Outcome) {
        let mut told = None;
        self.run_until(|world| {
            told = world.arrival();
            told.is_some()
        });
        told.expect("told")
    }

    /// Lets time pass until no node holds a slot.
    pub(crate) fn run_until_idle(&mut self) {
        // A peer whose answer was lost is given up after five seconds; until then the slots that it was
        // told of are held.
        for _ in 0..PATIENCE_STEPS {
            if self.sides.iter().all(Side::is_clean) {
                return;
            }
            self.step();
        }
        for side in &self.sides {
            let (node, staging) = (side.node.is_idle(), side.staging.is_idle());
            let (device, host) = (side.device.used_count(), side.host.used_count());
            println!("idle: node {node}, staging {staging}; slots: device {device}, host {host}");
        }
        panic!("something is left");
    }
}

pub(crate) fn content_of(transfer: TransferId) -> [u8; 16] {
    [transfer as u8; 16]
}

pub(crate) fn content(transfer: TransferId, block: usize) -> Vec<u8> {
    (0..LAYOUT.slot_bytes()).map(|at| (transfer as usize * 31 + block * 7 + at) as u8).collect()
}

/// A node of a simulated network.
pub(crate) fn simulated_side(shape: &Shape, reach: Reach, network: &SimNetwork) -> Side<SimFabric> {
    Side::new(shape, |device, host| match reach {
        Reach::Host => network.add_node(Arc::clone(host.slab())),
        Reach::Sources => network.add_direct_node(Arc::clone(host.slab())),
        Reach::Device => network.add_direct_node(Arc::clone(device.slab())),
        Reach::Both => network.add_node_showing([host, device].map(|pool| Arc::clone(pool.slab())), "sim"),
    })
}

pub(crate) fn simulated(shape: &Shape, faults: Faults) -> (World<SimFabric>, SimNetwork) {
    let network = SimNetwork::new(shape.seed, faults);
    let sides = shape.reach.map(|reach| simulated_side(shape, reach, &network));
    // Writes of a NIC to the receiver's device become visible only after `flush_nic_writes`.
    if matches!(shape.reach[RECEIVER], Reach::Device | Reach::Both) {
        sides[RECEIVER].memory.reorder_writes();
    }
    let clock = network.clone();
    (World::new(sides, "0".to_owned(), move || clock.advance(1), Instant::now()), network)
}

pub(crate) fn shared_memory(shape: &Shape, corrupt_one_in: u64) -> World<CorruptingFabric<ShmFabric>> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let address = format!("@kvasir-staging-{}-{number}", std::process::id());
    let mut listen = Some(&*address);
    let sides = [(); 2].map(|()| {
        Side::new(shape, |_, host| {
            let slab = Arc::clone(host.slab());
            let fabric = ShmFabric::new(slab, listen.take(), ShmConfig::default()).expect("fabric");
            let one_in = if corrupt_one_in == 0 { u64::MAX } else { corrupt_one_in };
            CorruptingFabric::new(fabric, one_in, shape.seed)
        })
    });
    World::new(sides, address, || (), Instant::now())
}
