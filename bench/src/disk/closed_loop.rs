//! Our side of the comparison: one thread that keeps the queue depth full.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool, SlotRef};
use hdrhistogram::Histogram;
use kvstore_io::testing::Random;
use kvstore_io::{Buffer, Completion, Operation, Request};

use super::{DiskArgs, GIB, MIXED_READS, Measured, Mode, Point, Target};
use crate::size;

/// Latencies up to a minute.
const LATENCY_NS_MAX: u64 = 60_000_000_000;

/// Mixed into the seed of written bytes, so that they are not drawn from the same numbers as the offsets.
const CONTENT_SEED: u64 = 1 << 63;
/// Random bytes generated at a time.
const CHUNK_BYTES: usize = 4096;

/// Measures one point. As for fio, the processor time includes generating and filling buffers.
pub(super) fn measure(args: &DiskArgs, target: &Target, point: Point, seed: u64) -> Result<Measured> {
    let cpu = cpu_seconds();
    let mut engine = target.open(args, point.depth, point.size)?;
    let places = engine.geometry().files[0] / point.size;
    ensure!(places > 0, "{} is smaller than {}", target.path().display(), size::render(point.size));
    let layout = SlabLayout { slot_bytes: point.size as usize, slot_count: point.depth as u32 };
    let slab = Arc::new(Slab::create("bench-disk", layout, PageSize::Standard)?);
    slab.populate(usize::MAX)?;
    let pool = SlotPool::new(Arc::clone(&slab));
    engine.register(&slab)?;
    let slots = filled(&pool, point.depth, seed)?;
    let mut random = Random(seed);
    let mut histogram = Histogram::<u64>::new_with_bounds(1, LATENCY_NS_MAX, 3)?;
    let mut sent_at = vec![Instant::now(); point.depth];
    let mut arrived: Vec<Completion> = Vec::with_capacity(point.depth);
    let mut next = |id: u64, buffer: Buffer| {
        let operation = match point.mode {
            Mode::Read => Operation::Read,
            Mode::Write => Operation::Write,
            Mode::Mixed if random.below(100) < MIXED_READS => Operation::Read,
            Mode::Mixed => Operation::Write,
        };
        Request { id, operation, file: 0, offset: random.below(places) * point.size, buffer }
    };
    // Completions are handled in batches, so that the device has work while the rest is processed.
    let batch = args.batch(point.depth);
    let length = Duration::from_secs_f64(args.seconds);
    let started = Instant::now();
    for (id, slot) in (0..).zip(slots) {
        let buffer = Buffer::Slot { slot, offset: 0, len: point.size as usize };
        sent_at[id as usize] = Instant::now();
        ensure!(engine.submit(next(id, buffer)).is_ok(), "the depth is what was asked for");
    }
    let mut moved = 0_u64;
    let mut now = started;
    while engine.in_flight() > 0 {
        // Submits the requests, and sleeps: one system call.
        engine.wait(None)?;
        engine.poll(batch, &mut arrived);
        now = Instant::now();
        let running = now - started < length;
        for Completion { id, buffer, result } in arrived.drain(..) {
            result?;
            moved += point.size;
            histogram.saturating_record((now - sent_at[id as usize]).as_nanos() as u64);
            if running {
                sent_at[id as usize] = now;
                ensure!(engine.submit(next(id, buffer)).is_ok(), "a request that completed made room");
            }
        }
    }
    let seconds = (now - started).as_secs_f64();
    let at = |quantile| histogram.value_at_quantile(quantile) as f64 / 1e3;
    Ok(Measured {
        bytes_per_s: moved as f64 / seconds,
        cpu_s_per_gib: (cpu_seconds() - cpu) / (moved as f64 / GIB),
        p50_us: at(0.5),
        p99_us: at(0.99),
        p99_9_us: at(0.999),
    })
}

/// Returns a slot for each request, full of random bytes that stay the same, as fio's do.
fn filled(pool: &Arc<SlotPool>, count: usize, seed: u64) -> Result<Vec<SlotRef>> {
    let mut random = Random(seed ^ CONTENT_SEED);
    let mut chunk = [0; CHUNK_BYTES];
    let mut slots = Vec::with_capacity(count);
    for _ in 0..count {
        let slot = pool.acquire().context("a slot for each request")?;
        let bytes = slot.slab().layout().slot_bytes;
        for at in (0..bytes).step_by(CHUNK_BYTES) {
            chunk.as_chunks_mut::<8>().0.iter_mut().for_each(|word| *word = random.draw().to_le_bytes());
            slot.slab().write(slot.slot(), at, &chunk[..CHUNK_BYTES.min(bytes - at)]);
        }
        slots.push(slot);
    }
    Ok(slots)
}

/// User and system time of all threads of this process so far.
fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_random_and_follows_from_the_seed() {
        let bytes = |seed| {
            let layout = SlabLayout { slot_bytes: 8192, slot_count: 2 };
            let slab = Arc::new(Slab::create("filled", layout, PageSize::Standard).expect("a slab"));
            let slots = filled(&SlotPool::new(slab), 2, seed).expect("two slots");
            slots.iter().fold(Vec::new(), |mut all, slot| {
                let mut bytes = vec![0; 8192];
                slot.slab().read(slot.slot(), 0, &mut bytes);
                all.append(&mut bytes);
                all
            })
        };
        let (first, again, other) = (bytes(1), bytes(1), bytes(2));
        assert!(first == again && first != other, "seeds 1 and 2");
        let pages: std::collections::HashSet<&[u8]> = first.chunks(4096).collect();
        assert_eq!(pages.len(), 4, "no page is like another");
        // Of 4096 random bytes about 16 are zero.
        assert!(pages.iter().all(|page| page.iter().filter(|byte| **byte == 0).count() < 100));
    }
}
