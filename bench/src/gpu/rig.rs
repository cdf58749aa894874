//! Common parts of all comparisons: memory, a queue of plain copies, and two sides timed in turn.

use std::sync::Arc;

use anyhow::{Result, bail};
use dataplane_cuda::{
    Completion, CopyQueue, CopyQueueConfig, CopyRequest, Device, DeviceSlab, Place, Priority, Region,
    RegionId, Stream, SubmitError,
};
use dataplane_memory::SlabLayout;

use super::Effort;
use crate::measure::{Latencies, median, time};

/// A copy queue and a place for its completions.
pub(super) struct Copies {
    pub(super) queue: CopyQueue,
    completions: Vec<Completion>,
}

impl Copies {
    pub(super) fn new(device: &Device) -> Result<Self> {
        let config = CopyQueueConfig::default();
        let queue = CopyQueue::new(Stream::new(device, Priority::Urgent)?, config)?;
        Ok(Self { queue, completions: Vec::with_capacity(config.tokens_max) })
    }

    pub(super) fn region(&mut self, region: Region) -> Result<RegionId> {
        self.queue.add_region(region).ok_or_else(|| anyhow::anyhow!("too many regions"))
    }

    /// Submits copies, in batches of the queue's size.
    pub(super) fn put(&mut self, copies: &[CopyRequest]) -> Result<()> {
        let batch = CopyQueueConfig::default().copies_max;
        for copies in copies.chunks(batch) {
            while let Err(refusal) = self.queue.submit_batch(copies, 0) {
                if refusal != SubmitError::Full {
                    return Err(refusal.into());
                }
                self.poll()?;
            }
            self.queue.flush();
        }
        Ok(())
    }

    fn poll(&mut self) -> Result<()> {
        self.queue.poll(usize::MAX, &mut self.completions);
        for end in self.completions.drain(..) {
            end.result?;
        }
        Ok(())
    }

    pub(super) fn wait(&mut self) -> Result<()> {
        while self.queue.in_flight() > 0 {
            self.poll()?;
        }
        Ok(())
    }

    /// Runs the same copies `passes` times, and waits for all of them.
    pub(super) fn passes(&mut self, copies: &[CopyRequest], passes: u32) -> Result<()> {
        for _ in 0..passes {
            self.put(copies)?;
        }
        self.wait()
    }
}

/// Returns a copy in one piece within the first slots of two regions.
pub(super) fn piece(from: (RegionId, usize), to: (RegionId, usize), bytes: usize) -> CopyRequest {
    let place = |(region, offset)| Place { region, slot: 0, offset };
    CopyRequest::contiguous(place(from), place(to), bytes)
}

/// Allocates device memory of equal slots, and writes it once.
pub(super) fn slab(device: &Device, slot_bytes: usize, slot_count: u32) -> Result<Arc<DeviceSlab>> {
    let slab = DeviceSlab::allocate(device, SlabLayout { slot_bytes, slot_count })?;
    slab.fill(0x5a)?;
    Ok(Arc::new(slab))
}

/// One side compared with its limit.
pub(super) struct LimitComparison {
    /// Seconds of one pass.
    pub(super) ours: f64,
    /// Rate of our side relative to the limit's: the limit's seconds over ours, so that 1 is as fast as the limit.
    pub(super) ratio: f64,
    pub(super) range: (f64, f64),
    /// The ratio of each round.
    pub(super) ratios: Vec<f64>,
}

/// Runs a given number of passes.
pub(super) type Passes<'a> = dyn FnMut(u32) -> Result<()> + 'a;

/// Times both sides in turn. The sides may share resources, so one closure runs both: `true` is the limit.
pub(super) fn beside(
    effort: &Effort,
    mut side: impl FnMut(bool, u32) -> Result<()>,
) -> Result<LimitComparison> {
    let mut passes = [0; 2];
    for (at, passes) in passes.iter_mut().enumerate() {
        side(at == 0, 1)?;
        *passes = calibrate(effort, &mut |passes| side(at == 0, passes))?;
    }
    let (mut ours, mut ratios) = (Vec::new(), Vec::new());
    for round in 0..effort.rounds {
        // The sides take turns in going first.
        let mut seconds = [0.0; 2];
        for at in [round % 2, 1 - round % 2] {
            let (spent, done) = time(|| side(at == 0, passes[at]));
            done?;
            seconds[at] = spent.as_secs_f64() / f64::from(passes[at]);
        }
        ours.push(seconds[1]);
        ratios.push(seconds[0] / seconds[1]);
    }
    let least = ratios.iter().copied().fold(f64::INFINITY, f64::min);
    let most = ratios.iter().copied().fold(0.0, f64::max);
    Ok(LimitComparison { ours: median(ours), ratio: median(ratios.clone()), range: (least, most), ratios })
}

/// Returns the number of passes that take long enough to be timed.
fn calibrate(effort: &Effort, work: &mut Passes<'_>) -> Result<u32> {
    let mut passes = 1;
    loop {
        let (spent, done) = time(|| work(passes));
        done?;
        if spent.as_secs_f64() >= effort.timing_seconds || passes >= 1 << 16 {
            return Ok(passes);
        }
        passes *= 2;
    }
}

/// Times each operation by itself, after uncounted ones.
pub(super) fn singles(effort: &Effort, mut operation: impl FnMut() -> Result<()>) -> Result<Latencies> {
    let mut latencies = Latencies::new()?;
    for number in 0..effort.singles + effort.singles / 10 {
        let (spent, done) = time(&mut operation);
        done?;
        if number >= effort.singles / 10 {
            latencies.record(spent);
        }
    }
    Ok(latencies)
}

/// Returns how many of the `wanted` blocks fit into the usable memory at two times `block_bytes` each.
pub(super) fn blocks_that_fit(effort: &Effort, wanted: u32, block_bytes: u64) -> Result<u32> {
    let fit = (effort.memory_bytes / (2 * block_bytes)).min(u64::from(wanted)) as u32;
    if fit == 0 {
        bail!("{} bytes of device memory are too few for one block of {block_bytes}", effort.memory_bytes);
    }
    Ok(fit)
}
