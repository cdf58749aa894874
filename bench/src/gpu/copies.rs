//! Blocks by the copy queue, between pinned host memory and the device and within the device, beside one
//! `cuMemcpyAsync` of as many bytes.

use std::sync::Arc;

use anyhow::Result;
use dataplane_cuda::{CopyRequest, Device, Pinned, Region, RegionId};
use dataplane_memory::{PageSize, Slab, SlabLayout};

use super::Effort;
use super::rig::{Copies, beside, piece, singles, slab};
use crate::results::{self, Better};
use crate::size;

const BLOCKS: [usize; 7] = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20];

pub(super) fn run(device: &Device, effort: &Effort) -> Result<()> {
    println!(
        "# copies of {} in blocks, no two of them neighbours: GB/s = share of one copy (least-most), driver calls a pass; \
         one block alone p50 / p99 / p99.9",
        size::render(effort.copy_bytes as u64)
    );
    let mut copies = Copies::new(device)?;
    let layout = SlabLayout { slot_bytes: effort.copy_bytes, slot_count: 1 };
    let host = Arc::new(Slab::create("gpu bench", layout, PageSize::HugeIfAvailable)?);
    host.populate(usize::MAX)?;
    let pinned = Arc::new(Pinned::register(device, host)?);
    let host = copies.region(Region::Host(pinned))?;
    let mut on_device =
        || -> Result<RegionId> { copies.region(Region::Device(slab(device, effort.copy_bytes, 1)?)) };
    let (one, other) = (on_device()?, on_device()?);
    for (name, from, to) in [("h2d", host, one), ("d2h", one, host), ("d2d", one, other)] {
        for block in BLOCKS.into_iter().filter(|&block| block <= effort.block_max) {
            compare(&mut copies, effort, (name, from, to), block)?;
        }
    }
    Ok(())
}

fn compare(
    copies: &mut Copies,
    effort: &Effort,
    (name, from, to): (&str, RegionId, RegionId),
    block: usize,
) -> Result<()> {
    let bytes = effort.copy_bytes;
    let whole = [piece((from, 0), (to, 0), bytes)];
    // In reverse order on one side, so that no two copies are contiguous on both sides and none are merged.
    let blocks: Vec<CopyRequest> = (0..bytes / block)
        .map(|at| piece((from, at * block), (to, bytes - (at + 1) * block), block))
        .collect();
    let before = copies.queue.counters().calls;
    copies.passes(&blocks, 1)?;
    let calls = copies.queue.counters().calls - before;
    let result =
        beside(effort, |is_limit, passes| copies.passes(if is_limit { &whole } else { &blocks }, passes))?;
    let alone = singles(effort, || copies.passes(&blocks[..1], 1))?;
    let row = format!("{name} {}", size::render(block as u64));
    results::add("gpu", &row, ("share of one copy", Better::Higher), &result.ratios);
    results::add_latencies("gpu", &format!("{row}: a block alone"), &alone);
    println!(
        "{name} {:>8}: {:7.2} GB/s = {:.3} ({:.3}-{:.3}), {calls} calls; {}",
        size::render(block as u64),
        bytes as f64 / result.ours / 1e9,
        result.ratio,
        result.range.0,
        result.range.1,
        alone.render()
    );
    Ok(())
}
