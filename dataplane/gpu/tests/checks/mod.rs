//! Checks that hold on any device, the double or a real one. Targets hold other bytes before each launch.

#![allow(dead_code, reason = "each test uses its part of it")]

mod copies;
pub(crate) mod sums;

use std::sync::Arc;

use dataplane_cuda::{
    CopyQueue, CopyQueueConfig, CopyRequest, Device, DeviceMemory, DeviceSlab, Pinned, Place, Priority,
    Region, RegionId, Stream,
};
use dataplane_gpu::{BlockCopy, KernelQueue, KernelQueueConfig, LayoutKernels, PagedTensors, Plane};
use dataplane_kernels::{EngineTensors, InnerOrder, KeyValueLayout};
use dataplane_memory::{PageSize, Slab, SlabLayout};

pub(crate) use copies::copies_arrive_on_another_device;
pub(crate) use sums::sums_of_ranges_are_those_of_the_processor;

use crate::harness::Random;

/// Two devices, or the same one twice, each with its kernels and queue, and host memory between them.
pub(crate) struct Rig {
    pub(crate) sides: [Side; 2],
}

pub(crate) struct Side {
    pub(crate) device: Device,
    pub(crate) queue: KernelQueue,
}

impl Rig {
    pub(crate) fn new(devices: [Device; 2], kernels: impl Fn(&Device) -> Arc<LayoutKernels>) -> Self {
        let sides = devices.map(|device| {
            let stream = Stream::new(&device, Priority::Urgent).expect("stream");
            let config = KernelQueueConfig { items_max: 64, batches_max: 4 };
            let queue = KernelQueue::new(kernels(&device), stream, config).expect("queue");
            Side { device, queue }
        });
        Self { sides }
    }
}

/// Result of a batch.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Words {
    pub(crate) statuses: Vec<u32>,
    pub(crate) checksums: Vec<u64>,
}

impl Side {
    /// Waits for the one batch in flight and returns its result.
    pub(crate) fn finish(&mut self, token: u64) -> Words {
        let mut ends = Vec::new();
        self.queue.drain(|end| {
            assert_eq!((end.token, end.result), (token, Ok(())));
            ends.push(Words { statuses: end.statuses.to_vec(), checksums: end.checksums.to_vec() });
        });
        assert_eq!(ends.len(), 1);
        ends.pop().expect("one")
    }

    /// Allocates slots filled with random bytes.
    pub(crate) fn slots(&self, random: &mut Random, slot_bytes: usize, slot_count: u32) -> Arc<DeviceSlab> {
        let layout = SlabLayout { slot_bytes, slot_count };
        let slab = DeviceSlab::allocate(&self.device, layout).expect("slots");
        slab.fill(random.bits() as u8).expect("fill");
        Arc::new(slab)
    }

    /// Copies the first slots of a slab to or from host memory through a copy queue.
    pub(crate) fn copy(&self, slots: &Arc<DeviceSlab>, host: &Arc<Slab>, is_back: bool) {
        let stream = Stream::new(&self.device, Priority::Urgent).expect("stream");
        let mut queue = CopyQueue::new(stream, CopyQueueConfig::default()).expect("queue");
        let pinned = Arc::new(Pinned::register(&self.device, host.clone()).expect("pin"));
        let regions = [Region::Host(pinned), Region::Device(slots.clone())];
        let [host_id, slots_id]: [RegionId; 2] =
            regions.map(|region| queue.add_region(region).expect("region"));
        for slot in 0..host.layout().slot_count {
            let place = |region| Place { region, slot, offset: 0 };
            let (from, to) = if is_back { (slots_id, host_id) } else { (host_id, slots_id) };
            let copy = CopyRequest::contiguous(place(from), place(to), host.layout().slot_bytes);
            queue.submit(&copy, u64::from(slot)).expect("room");
        }
        queue.flush();
        let mut ends = Vec::new();
        while queue.in_flight() > 0 {
            queue.poll(usize::MAX, &mut ends);
        }
        assert!(ends.iter().all(|end| end.result.is_ok()), "{ends:?}");
    }
}

pub(crate) fn host_slots(slot_bytes: usize, slot_count: u32) -> Arc<Slab> {
    let layout = SlabLayout { slot_bytes, slot_count };
    Arc::new(Slab::create("checks", layout, PageSize::Standard).expect("slab"))
}

/// A random engine on a device, and a host copy of its bytes.
pub(crate) struct Engine {
    pub(crate) tensors: Arc<PagedTensors>,
    memory: Arc<DeviceSlab>,
    /// Offset of each plane's first block.
    pub(crate) planes: Vec<u64>,
    pub(crate) bytes: Vec<u8>,
}

/// Properties that two engines must share to exchange blocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) layers: u32,
    pub(crate) is_latent: bool,
    pub(crate) tokens: u32,
    pub(crate) heads: u32,
    pub(crate) head_bytes: u32,
    /// All offsets are multiples of this number of bytes.
    pub(crate) unit: u32,
}

impl Shape {
    pub(crate) fn parts(&self) -> u32 {
        if self.is_latent { 1 } else { 2 }
    }
}

impl Engine {
    pub(crate) fn new(
        side: &Side,
        random: &mut Random,
        shape: &Shape,
        contents: &dyn Fn(&mut Random, usize) -> Vec<u8>,
    ) -> Self {
        let places = [KeyValueLayout::Separate, KeyValueLayout::BeforeBlocks, KeyValueLayout::WithinBlock];
        let parts = if shape.is_latent { KeyValueLayout::Latent } else { random.one_of(&places) };
        let Shape { tokens, heads, head_bytes, .. } = *shape;
        let order = random.one_of(&[InnerOrder::Nhd, InnerOrder::Hnd]);
        let engine = EngineTensors { order, parts, blocks: 2 + random.below(6), tokens, heads, head_bytes };
        let (per_layer, in_tensor) = match parts {
            KeyValueLayout::Separate => (2, 1),
            KeyValueLayout::Latent => (1, 1),
            _ => (1, 2),
        };
        let gap = u64::from(shape.unit) * random.below(4);
        let tensor_bytes = engine.layout().piece_bytes() * engine.blocks * in_tensor + gap;
        let starts: Vec<u64> =
            (0..u64::from(shape.layers) * per_layer).map(|tensor| tensor * tensor_bytes + gap).collect();
        let bytes = contents(random, (starts.len() as u64 * tensor_bytes + gap) as usize);
        let memory = side.slots(random, bytes.len(), 1);
        memory.write(0, &bytes).expect("write");
        let tensors: Vec<Plane> =
            starts.iter().map(|&start| Plane { memory: memory.clone(), offset: start as usize }).collect();
        let tensors = Arc::new(PagedTensors::of_engine(&engine, &tensors).expect("tensors"));
        Self { tensors, memory, planes: engine.planes(&starts), bytes }
    }

    pub(crate) fn blocks(&self) -> u64 {
        self.tensors.layout().blocks
    }

    /// Returns the current bytes on the device.
    pub(crate) fn read(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.bytes.len()];
        self.memory.read(0, &mut bytes).expect("read");
        bytes
    }
}

/// Returns some blocks in random order, paired with the slots from the first on.
pub(crate) fn random_pairs(random: &mut Random, blocks: u64, at_most: u64) -> Vec<BlockCopy> {
    let mut numbers: Vec<u64> = (0..blocks).collect();
    for left in (1..numbers.len()).rev() {
        numbers.swap(left, random.below(left as u64 + 1) as usize);
    }
    numbers.truncate(1 + random.below(blocks.min(at_most)) as usize);
    numbers.into_iter().enumerate().map(|(slot, block)| BlockCopy { block, slot: slot as u32 }).collect()
}
