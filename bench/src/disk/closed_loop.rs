//! Our side: one thread that keeps the depth full.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool};
use hdrhistogram::Histogram;
use kvstore_io::testing::Random;
use kvstore_io::{Buffer, Completion, Operation, Request};

use super::{DiskArgs, GIB, MIXED_READS, Measured, Mode, Point, Target};
use crate::size;

/// Latencies up to a minute.
const LATENCY_NS_MAX: u64 = 60_000_000_000;

/// One of ours.
pub(super) fn measure(args: &DiskArgs, target: &Target, point: Point, seed: u64) -> Result<Measured> {
    let mut engine = target.open(args, point.depth, point.size)?;
    let places = engine.geometry().files[0] / point.size;
    ensure!(places > 0, "{} is smaller than {}", target.path().display(), size::render(point.size));
    let layout = SlabLayout { slot_bytes: point.size as usize, slot_count: point.depth as u32 };
    let slab = Arc::new(Slab::create("bench-disk", layout, PageSize::HugeIfAvailable)?);
    slab.populate(usize::MAX)?;
    let pool = SlotPool::new(Arc::clone(&slab));
    engine.register(&slab)?;
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
    // What completes together is continued in parts, so that the device has work while the rest is looked at.
    let batch = if args.batch == 0 { point.depth.div_ceil(4) } else { args.batch };
    let length = Duration::from_secs_f64(args.seconds);
    let (cpu, started) = (cpu_seconds(), Instant::now());
    for id in 0..point.depth as u64 {
        let slot = pool.acquire().context("a slot for each request")?;
        let buffer = Buffer::Slot { slot, offset: 0, len: point.size as usize };
        sent_at[id as usize] = Instant::now();
        ensure!(engine.submit(next(id, buffer)).is_ok(), "the depth is what was asked for");
    }
    let mut moved = 0_u64;
    let mut now = started;
    while engine.in_flight() > 0 {
        // Hands over what was submitted, and sleeps: one system call.
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

/// User and system time of this process so far, all threads.
fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}
