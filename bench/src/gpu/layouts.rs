//! The layout kernels on the shapes of real models, beside a copy of the same bytes within the device.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use dataplane_cuda::{Device, DeviceMemory, Priority, Region, Stream};
use dataplane_gpu::{
    BlockCopy, CopyRoute, KernelQueue, KernelQueueConfig, LayoutKernels, PagedTensors, Plane, SubmitError,
    Sums,
};
use dataplane_kernels::{EngineTensors, HeadRange, InnerOrder, KeyValueLayout, SlotLayout};

use super::Effort;
use super::rig::{Copies, LimitComparison, beside, blocks_that_fit, piece, singles, slab};
use crate::results::{self, Better};

const TOKENS: u32 = 16;
const BATCHES_MAX: u32 = 8;

/// A model's blocks in 16-bit elements.
#[derive(Debug, Clone, Copy)]
struct Model {
    name: &'static str,
    layers: u32,
    heads: u32,
    head_dim: u32,
    parts: KeyValueLayout,
    order: InnerOrder,
}

const LLAMA: Model = Model {
    name: "llama-3-70b nhd",
    layers: 80,
    heads: 8,
    head_dim: 128,
    parts: KeyValueLayout::BeforeBlocks,
    order: InnerOrder::Nhd,
};

const MODELS: [Model; 3] = [
    LLAMA,
    Model { name: "llama-3-70b hnd", order: InnerOrder::Hnd, ..LLAMA },
    Model {
        name: "deepseek latent",
        layers: 61,
        heads: 1,
        head_dim: 576,
        parts: KeyValueLayout::Latent,
        ..LLAMA
    },
];

impl Model {
    fn parts(&self) -> u32 {
        if self.parts == KeyValueLayout::Latent { 1 } else { 2 }
    }

    fn slot(&self) -> SlotLayout {
        SlotLayout::new(self.layers * self.parts(), TOKENS, self.heads, 2 * self.head_dim)
    }
}

/// Operation on a batch.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Work {
    Gather,
    GatherSummed,
    Scatter,
    ScatterSummed,
}

struct Rig {
    copies: Copies,
    queue: KernelQueue,
    plain: CopyRoute,
    pairs: Vec<BlockCopy>,
    /// One copy of as many bytes as a batch reads.
    whole: dataplane_cuda::CopyRequest,
    bytes: u64,
    failed: Option<String>,
}

pub(super) fn run(device: &Device, kernels: &Arc<LayoutKernels>, effort: &Effort) -> Result<()> {
    println!(
        "# layouts: GB/s read and written = share of a copy within the device of the same bytes (least-most); one batch alone \
         p50 / p99 / p99.9 of how many"
    );
    for model in MODELS {
        let model = Model { layers: model.layers.min(effort.layers_max), ..model };
        let most = blocks_that_fit(effort, effort.blocks_max, model.slot().bytes())?;
        for blocks in [1, most] {
            let mut rig = Rig::new(device, kernels, &model, blocks)?;
            let name = format!("{} x {blocks}", model.name);
            rig.beside_a_copy(effort, &name)?;
            rig.beside_each_other(effort, &name)?;
        }
    }
    Ok(())
}

impl Rig {
    fn new(device: &Device, kernels: &Arc<LayoutKernels>, model: &Model, blocks: u32) -> Result<Self> {
        let slot = model.slot();
        let bytes = slot.bytes() * u64::from(blocks);
        let engine = EngineTensors {
            order: model.order,
            parts: model.parts,
            blocks: blocks.into(),
            tokens: TOKENS,
            heads: model.heads,
            head_bytes: 2 * model.head_dim,
        };
        let tensors = slab(device, usize::try_from(bytes)?, 1)?;
        let layer_bytes = bytes / u64::from(model.layers);
        let layers: Vec<Plane> = (0..u64::from(model.layers))
            .map(|layer| Plane { memory: tensors.clone(), offset: (layer * layer_bytes) as usize })
            .collect();
        let paged = Arc::new(PagedTensors::of_engine(&engine, &layers)?);
        let slots = slab(device, usize::try_from(slot.bytes())?, blocks)?;
        let heads = HeadRange::all(model.heads);
        let plain = CopyRoute::new(paged, slots.clone(), slot, heads)?;
        let mut copies = Copies::new(device)?;
        let copied = usize::try_from(bytes)?.min(slots.bytes());
        // The slots as one piece, for the copy that is the limit.
        let flat = dataplane_memory::SlabLayout { slot_bytes: copied, slot_count: 1 };
        let flat = Arc::new(dataplane_cuda::DeviceSlab::part(&slots, 0, flat)?);
        let (from, to) = (copies.region(Region::Device(tensors))?, copies.region(Region::Device(flat))?);
        let config = KernelQueueConfig { items_max: blocks, batches_max: BATCHES_MAX };
        let queue = KernelQueue::new(kernels.clone(), Stream::new(device, Priority::Urgent)?, config)?;
        // Slots in order, blocks scattered by a stride that shares no factor with their count.
        let stride = (0..)
            .map(|step| u64::from(blocks) / 3 + 1 + step)
            .find(|&stride| gcd(stride, blocks.into()) == 1);
        let stride = stride.context("a stride")?;
        let pairs = (0..blocks)
            .map(|slot| BlockCopy { block: u64::from(slot) * stride % u64::from(blocks), slot })
            .collect();
        let whole = piece((from, 0), (to, 0), copied);
        Ok(Self { copies, queue, plain, pairs, whole, bytes, failed: None })
    }

    fn submit(&mut self, work: Work) -> Result<(), SubmitError> {
        let (queue, pairs) = (&mut self.queue, &self.pairs);
        match work {
            Work::Gather => queue.gather(&self.plain, pairs, Sums::None, 0),
            Work::GatherSummed => queue.gather(&self.plain, pairs, Sums::Take, 0),
            Work::Scatter => queue.scatter(&self.plain, pairs, Sums::None, 0),
            Work::ScatterSummed => queue.scatter(&self.plain, pairs, Sums::Take, 0),
        }
    }

    fn poll(&mut self) -> Result<()> {
        let failed = &mut self.failed;
        self.queue.poll(usize::MAX, |end| {
            if end.result.is_err() || end.statuses.iter().any(|word| *word != 0) {
                *failed = Some(format!("{:?}, first status {:?}", end.result, end.statuses.first()));
            }
        });
        if let Some(reason) = &self.failed { bail!("a batch failed: {reason}") } else { Ok(()) }
    }

    fn passes(&mut self, work: Work, passes: u32) -> Result<()> {
        for _ in 0..passes {
            while let Err(refusal) = self.submit(work) {
                if refusal != SubmitError::Full {
                    return Err(refusal.into());
                }
                self.poll()?;
            }
        }
        while self.queue.in_flight() > 0 {
            self.poll()?;
        }
        Ok(())
    }

    /// Gather and scatter beside a copy: each reads and writes every byte once.
    fn beside_a_copy(&mut self, effort: &Effort, name: &str) -> Result<()> {
        for (work, word) in [(Work::Gather, "gather"), (Work::Scatter, "scatter")] {
            let whole = [self.whole];
            let LimitComparison { ours, ratio, range, ratios } = beside(effort, |is_limit, passes| {
                if is_limit { self.copies.passes(&whole, passes) } else { self.passes(work, passes) }
            })?;
            let few = self.alone(effort);
            let alone = singles(&few, || self.passes(work, 1))?;
            let row = format!("{word} {name}");
            results::add("gpu", &row, ("share of one copy", Better::Higher), &ratios);
            results::add_latencies("gpu", &format!("{row}: a batch alone"), &alone);
            println!(
                "{word} {name}: {:.1} GB/s = {ratio:.3} ({:.3}-{:.3}); {} of {}",
                2.0 * self.bytes as f64 / ours / 1e9,
                range.0,
                range.1,
                alone.render(),
                few.singles
            );
        }
        Ok(())
    }

    /// Checksums during the copy, as extra time over the same copy without them.
    fn beside_each_other(&mut self, effort: &Effort, name: &str) -> Result<()> {
        for (work, over, word) in [
            (Work::GatherSummed, Work::Gather, "checksum in gather, over gather"),
            (Work::ScatterSummed, Work::Scatter, "checksum in scatter, over scatter"),
        ] {
            let LimitComparison { ratio, range, ratios, .. } =
                beside(effort, |is_limit, passes| self.passes(if is_limit { over } else { work }, passes))?;
            results::add("gpu", &format!("{word}, {name}"), ("ratio", Better::Higher), &ratios);
            let extra = |ratio: f64| (1.0 / ratio - 1.0) * 100.0;
            println!(
                "{word}, {name}: {:+.1} % ({:+.1} to {:+.1})",
                extra(ratio),
                extra(range.1),
                extra(range.0)
            );
        }
        Ok(())
    }

    /// Fewer single operations for large batches, each of which takes long.
    fn alone(&self, effort: &Effort) -> Effort {
        let most = ((16_u64 << 30) / self.bytes.max(1)).max(20) as usize;
        Effort { singles: effort.singles.min(most), ..*effort }
    }
}

fn gcd(one: u64, other: u64) -> u64 {
    if other == 0 { one } else { gcd(other, one % other) }
}
