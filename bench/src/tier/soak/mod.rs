//! A long run of data through host memory and a disk, and its verdicts.
//!
//! Conversations offload new blocks from a pool, at a pace that makes the wanted number of distinct bytes pass
//! in the time, and bring old ones back: planned, with too short deadlines, cancelled, held, deleted. The
//! contents of a block follow from its identity, so each byte read back is compared. Meanwhile memory, files,
//! descriptors and threads are sampled; at the end the judge reports figures that grew, resources still in use,
//! and wrong bytes. The run tests time and turnover, not speed. Planted faults show that the judge finds real
//! ones. A smoke run has no fixed time: it continues until its data has passed, within a limit.

mod content;
mod folder;
mod judge;
mod rig;
mod watch;
mod work;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};

use super::files::Scratch;
use crate::size;
use judge::{RunTotals, judge};
use rig::{Rig, get};
use watch::Sample;
use work::Worker;

const GIB: f64 = (1_u64 << 30) as f64;
/// Least number of slots of each tier, so that all threads together find room.
const SLOTS_MIN: u64 = 64;

/// Longest time for the data of a smoke run.
const SMOKE_LIMIT: Duration = Duration::from_secs(60);

/// Bytes that a planted leak loses over the whole run.
const PLANTED_LEAK_BYTES: f64 = (64_u64 << 20) as f64;
/// Bytes that a planted drip loses for each block copied in or out.
const PLANTED_LEAK_BYTES_PER_BLOCK: u64 = 256;

/// A fault that the judge must find.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Plant {
    /// Leases and memory that are never given back.
    Leak,
    /// A little memory for each block.
    Drip,
    /// A file, descriptors and threads that accumulate.
    Grow,
    /// Wrong bytes.
    Wrong,
}

/// The soak.
#[derive(Args, Clone)]
pub(crate) struct SoakArgs {
    /// Minutes of work.
    #[arg(long, default_value_t = 20.0)]
    minutes: f64,
    /// Distinct bytes that pass in that time.
    #[arg(long, default_value = "24GiB", value_parser = size::parse)]
    data: u64,
    /// Host memory.
    #[arg(long, default_value = "2GiB", value_parser = size::parse)]
    host: u64,
    /// The disk tier's file, its log's tables included.
    #[arg(long, default_value = "10GiB", value_parser = size::parse)]
    disk: u64,
    /// Bytes of a block, a multiple of 4 KiB.
    #[arg(long, default_value = "1MiB", value_parser = size::parse)]
    block: u64,
    /// Folder in which the disk tier's folder is created; default: the first of the usual temporary folders
    /// that is on a disk.
    #[arg(long)]
    folder: Option<PathBuf>,
    /// Number of concurrent conversations.
    #[arg(long, default_value_t = 4)]
    threads: usize,
    /// Seed of the draws.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// A fault that the judge must find.
    #[arg(long, value_enum, hide = true)]
    plant: Option<Plant>,
    /// Longest time of the work if the data has not passed when the time is over.
    #[arg(skip)]
    limit: Duration,
}

impl Default for SoakArgs {
    fn default() -> Self {
        Self {
            minutes: 20.0,
            data: 24 << 30,
            host: 2 << 30,
            disk: 10 << 30,
            block: 1 << 20,
            folder: None,
            threads: 4,
            seed: 1,
            plant: None,
            limit: Duration::ZERO,
        }
    }
}

impl SoakArgs {
    fn length(&self) -> Duration {
        Duration::from_secs_f64(self.minutes * 60.0)
    }

    fn check(&self) -> Result<()> {
        ensure!(self.minutes > 0.0 && self.minutes < 1e6, "{} minutes are not usable", self.minutes);
        ensure!(
            self.block.is_multiple_of(4096) && self.block <= 1 << 30,
            "--block is no multiple of 4 KiB up to 1 GiB"
        );
        ensure!((1..=64).contains(&self.threads), "--threads is not 1 to 64");
        ensure!(self.host / self.block >= SLOTS_MIN, "--host has room for less than {SLOTS_MIN} blocks");
        ensure!(self.disk / self.block > SLOTS_MIN, "--disk has room for less than {SLOTS_MIN} blocks");
        ensure!(self.disk.is_multiple_of(4096), "--disk is no multiple of 4 KiB");
        Ok(())
    }
}

pub(crate) fn run(smoke: bool, args: &SoakArgs) -> Result<()> {
    let mut args = args.clone();
    if smoke {
        args.minutes = args.minutes.min(2.5 / 60.0);
        args.limit = SMOKE_LIMIT;
        (args.data, args.host, args.disk, args.block) = (24 << 20, 4 << 20, 12 << 20, 32 << 10);
    }
    args.check()?;
    let parent = folder::choose(args.folder.as_deref())?;
    let slab_bytes: u64 = rig::slab_bytes(&args)?.iter().sum();
    folder::require_room(&parent, args.disk, slab_bytes)?;
    println!(
        "# tier soak: {} through {} of host memory and {} of disk in {}, blocks of {}, \
         {:.1} minutes, {} threads, seed {}",
        size::render(args.data),
        size::render(args.host),
        size::render(args.disk),
        parent.display(),
        size::render(args.block),
        args.minutes,
        args.threads,
        args.seed
    );
    let folder = Scratch::new(&parent)?;
    let rig = Arc::new(Rig::new(&args, folder.path())?);
    let (samples, totals) = soak(&args, &rig, folder.path())?;
    let verdicts = judge(&samples, &totals);
    verdicts.iter().for_each(|verdict| println!("{}", verdict.line()));
    let failed: Vec<&str> =
        verdicts.iter().filter(|verdict| !verdict.is_ok).map(|verdict| verdict.name).collect();
    ensure!(failed.is_empty(), "the soak failed: {} (seed {})", failed.join(", "), args.seed);
    Ok(())
}

/// Runs the work, samples it, and waits until it has come to rest.
fn soak(args: &SoakArgs, rig: &Arc<Rig>, folder: &Path) -> Result<(Vec<Sample>, RunTotals)> {
    let stop = Arc::new(AtomicBool::new(false));
    let mut threads = Vec::new();
    for thread in 0..args.threads {
        let worker = Worker::new(args, rig, thread, &stop);
        let builder = std::thread::Builder::new().name(format!("soak-{thread}"));
        threads.push(builder.spawn(move || worker.run())?);
    }
    let watched = watch(args, rig, folder, || threads.iter().any(std::thread::JoinHandle::is_finished));
    stop.store(true, Ordering::Relaxed);
    let mut leaked = Vec::new();
    for thread in threads {
        match thread.join() {
            Ok(held) => leaked.extend(held?),
            Err(_) => bail!("a thread panicked"),
        }
    }
    let mut samples = watched?;
    // Drop answers to cancelled requests.
    rig.inboxes.iter().for_each(|(_, inbox)| inbox.try_iter().for_each(drop));
    let wait_until_idle = rig.wait_until_idle()?;
    samples.push(Sample {
        at: samples.last().map_or(args.length(), |last| last.at),
        ..Sample::take(wait_until_idle, rig.operations(), folder)?
    });
    let (leased, slots_used) = rig.in_use();
    drop(leaked);
    println!("{}", tally(args, rig));
    let verified = get(&rig.tally.verified);
    let damage = ["checksum_failures", "misses_damaged", "misses_media", "misses_device", "write_failures"];
    let totals = RunTotals {
        disk_bytes: args.disk,
        table_bytes: args.disk - rig.store.slots()[1] * args.block,
        slab_bytes: rig.slab_bytes(),
        data_bytes: args.data,
        distinct_bytes: get(&rig.tally.distinct) * args.block,
        disk_evicted: rig.counted("disk_evicted_blocks"),
        disk_read: rig.counted("disk_read_blocks"),
        verified,
        wrong_bytes: get(&rig.tally.wrong_bytes),
        damaged: damage.iter().map(|name| rig.counted(name)).sum(),
        unanswered: get(&rig.tally.unanswered),
        leased: leased as u64,
        slots_used: slots_used as u64,
        rest_s: wait_until_idle.as_secs_f64(),
    };
    Ok((samples, totals))
}

/// Samples and shows progress until the time is over and the data has passed or the limit is reached, or until
/// a thread ends.
fn watch(args: &SoakArgs, rig: &Rig, folder: &Path, is_over: impl Fn() -> bool) -> Result<Vec<Sample>> {
    let started = Instant::now();
    let pause = (args.length() / 40).clamp(Duration::from_millis(20), Duration::from_secs(5));
    let mut samples = Vec::with_capacity(args.length().max(args.limit).div_duration_f64(pause) as usize + 2);
    let mut planted = Planted::default();
    let is_time_over = |elapsed: Duration| {
        elapsed + pause >= args.length() && (elapsed + pause >= args.limit || rig.has_turned_over(args))
    };
    while !is_time_over(started.elapsed()) && !is_over() {
        std::thread::sleep(pause);
        if let Some(plant) = args.plant {
            let share = started.elapsed().as_secs_f64() / args.length().as_secs_f64();
            planted.step(plant, args.disk, folder, share, rig.operations())?;
        }
        let sample = Sample::take(started.elapsed(), rig.operations(), folder)?;
        samples.push(sample);
        if pause >= Duration::from_secs(1) || samples.len().is_multiple_of(10) {
            println!("{}", progress(args, rig, &sample));
        }
    }
    planted.end();
    ensure!(rig.store.is_alive(), "the store's thread has ended");
    Ok(samples)
}

fn progress(args: &SoakArgs, rig: &Rig, sample: &Sample) -> String {
    let gib = |blocks: u64| (blocks * args.block) as f64 / GIB;
    let [host, disk] = rig.store.blocks();
    format!(
        "{:6.1} s: {:.3} GiB in, {:.3} GiB out; blocks: {host} on host, {disk} on disk; \
         memory: {} MiB own, {} shared; wrong = {}",
        sample.at.as_secs_f64(),
        gib(rig.counted("offloaded_blocks")),
        gib(get(&rig.tally.verified)),
        sample.anonymous_bytes >> 20,
        sample.shared_bytes >> 20,
        get(&rig.tally.wrong_bytes)
    )
}

fn tally(args: &SoakArgs, rig: &Rig) -> String {
    let tally = &rig.tally;
    format!(
        "{:.3} GiB distinct, {} blocks again; {:.3} GiB compared; requests: {} cancelled, {} cut short; {} holds, \
         {} forgets, {} throttled; {} blocks written to the disk, {} read",
        (get(&tally.distinct) * args.block) as f64 / GIB,
        get(&tally.again),
        (get(&tally.verified) * args.block) as f64 / GIB,
        get(&tally.cancelled),
        get(&tally.short),
        get(&tally.holds),
        get(&tally.forgets),
        get(&tally.throttled),
        rig.counted("disk_written_blocks"),
        rig.counted("disk_read_blocks")
    )
}

/// Resources accumulated by planted faults.
#[derive(Default)]
struct Planted {
    memory: Vec<Vec<u8>>,
    files: Vec<std::fs::File>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Planted {
    /// Grows the fault with each sample, given the `share` of the time that has passed and the number of blocks.
    fn step(
        &mut self,
        plant: Plant,
        disk_bytes: u64,
        folder: &Path,
        share: f64,
        operations: u64,
    ) -> Result<()> {
        match plant {
            Plant::Leak => self.leak((share * PLANTED_LEAK_BYTES) as usize),
            Plant::Drip => self.leak((operations * PLANTED_LEAK_BYTES_PER_BLOCK) as usize),
            Plant::Grow => {
                let file = std::fs::File::create(folder.join("planted")).context("a planted file")?;
                // A sparse file: long, with almost no allocated bytes.
                file.set_len((share * disk_bytes as f64) as u64)?;
                self.files.push(file);
                self.threads.push(std::thread::Builder::new().spawn(std::thread::park)?);
            }
            Plant::Wrong => {}
        }
        Ok(())
    }

    /// Grows the leak to `wanted` bytes.
    fn leak(&mut self, wanted: usize) {
        let leaked: usize = self.memory.iter().map(Vec::len).sum();
        self.memory.push(vec![1; wanted.saturating_sub(leaked)]);
    }

    fn end(self) {
        for thread in self.threads {
            thread.thread().unpark();
            // The thread has only slept.
            let _ended = thread.join();
        }
    }
}
