//! The prefix index: stores, look-ups and removals; warm and beyond the last-level cache; one and two readers,
//! alone and beside a writer. The peers that do the same work are in `bench/peers`.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use router_radix::{Index, IndexConfig, Member, Reader, Tier};
use tools_workload::{Operation, Workload, mooncake, text, tree};

use crate::measure::{Latencies, RoundsArgs, allocations, median, time};
use crate::results::{self, Better};

/// Applies the operations of a workload.
struct Rig {
    index: Index,
    members: Vec<Member>,
    reader: Reader,
}

/// A change in the form that the index accepts.
struct Change {
    worker: usize,
    stored: Option<(Option<u64>, Vec<u64>)>,
    keys: Vec<u64>,
}

impl Change {
    fn of(operation: &Operation) -> Option<Self> {
        match operation {
            Operation::Stored { worker, parent, blocks } => Some(Self {
                worker: *worker,
                stored: Some((*parent, blocks.iter().map(|block| block.0).collect())),
                keys: blocks.iter().map(|block| block.1).collect(),
            }),
            Operation::Removed { worker, sequences } => {
                Some(Self { worker: *worker, stored: None, keys: sequences.clone() })
            }
            Operation::Lookup { .. } => None,
        }
    }
}

impl Rig {
    fn new(workers: usize) -> Result<Self> {
        let index = Index::new(IndexConfig { memory_max: usize::MAX });
        let members: Vec<Member> = (0..workers).map_while(|_| index.write().join()).collect();
        anyhow::ensure!(
            members.len() == workers,
            "{workers} workers: the index takes {}",
            router_radix::MEMBERS_MAX
        );
        let reader = index.reader().context("a reader")?;
        Ok(Self { index, members, reader })
    }

    fn apply(&self, change: &Change) {
        apply(&self.index, &self.members, change);
    }
}

fn apply(index: &Index, members: &[Member], change: &Change) {
    let member = members[change.worker];
    let mut writer = index.write();
    match &change.stored {
        Some((parent, blocks)) => drop(writer.stored(member, Tier::Device, *parent, &change.keys, blocks)),
        None => drop(writer.removed(member, Tier::Device, &change.keys)),
    }
}

/// Runs a workload from a file, in its order.
pub(crate) fn run_file(file: &Path) -> Result<()> {
    let content = std::fs::read_to_string(file).with_context(|| format!("{}", file.display()))?;
    let workload = text::parse(&content).with_context(|| format!("{}", file.display()))?;
    let mut rig = Rig::new(workload.workers)?;
    let (mut times, mut counts) = ([Duration::ZERO; 3], [0_usize; 3]);
    let (mut checksum, mut lookups) = (0_u64, 0_usize);
    let mut latencies = Latencies::new()?;
    for operation in &workload.operations {
        let (phase, spent, count) = match operation {
            Operation::Lookup { blocks } => {
                let (spent, sum) = time(|| rig.reader.overlaps(blocks).device_sum());
                checksum = checksum.wrapping_add(sum);
                lookups += 1;
                latencies.record(spent);
                (1, spent, blocks.len())
            }
            change => {
                let Some(change) = Change::of(change) else { continue };
                let (spent, ()) = time(|| rig.apply(&change));
                (if change.stored.is_some() { 0 } else { 2 }, spent, change.keys.len())
            }
        };
        times[phase] += spent;
        counts[phase] += count;
    }
    for (name, (spent, count)) in ["stored", "looked up", "removed"].iter().zip(times.iter().zip(counts)) {
        let nanos = spent.as_nanos() as f64;
        println!(
            "{name}: {count} blocks in {:.3} ms, {:.1} ns a block",
            nanos / 1e6,
            nanos / count.max(1) as f64
        );
    }
    results::add_latencies("index", "look-ups of the workload", &latencies);
    println!("look-ups: {lookups}, p50 / p99 / p99.9 {}", latencies.render());
    println!("checksum: {checksum}");
    Ok(())
}

/// Prompts of 128 blocks, each on one worker; a quarter of the blocks is common to the prompts of a worker group.
fn grown(number: u64) -> Vec<u64> {
    let hash = |chain: u64, at: u64| (chain << 8 | at).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ chain;
    (0..128).map(|at| if at < 32 { hash(number % 64, at) } else { hash(number + 1000, at) }).collect()
}

/// Grows an index to `pairs` pairs, on as many workers as that takes.
pub(crate) fn grow(pairs: u64) -> Result<()> {
    let workers = router_radix::MEMBERS_MAX as u64;
    let mut rig = Rig::new(workers as usize)?;
    let prompts = pairs / 128;
    println!("# index: {pairs} (worker, block) pairs on {workers} workers");
    let started = std::time::Instant::now();
    let mut storing = Duration::ZERO;
    for number in 0..prompts {
        let blocks = grown(number);
        let keys = tools_workload::chained(&blocks);
        let change = Change { worker: (number % workers) as usize, stored: Some((None, blocks)), keys };
        storing += time(|| rig.apply(&change)).0;
        if number % (prompts / 10).max(1) == 0 {
            let usage = rig.index.write().usage();
            println!(
                "{:>12} pairs, {:>6} MiB, {:.0} s",
                usage.entries,
                usage.bytes >> 20,
                started.elapsed().as_secs_f64()
            );
        }
    }
    let usage = rig.index.write().usage();
    println!(
        "stored in {:.1} s, {:.1} M blocks/s; {} pairs, {:.1} bytes each",
        storing.as_secs_f64(),
        pairs as f64 / storing.as_secs_f64() / 1e6,
        usage.entries,
        usage.bytes as f64 / usage.entries as f64
    );
    let mut latencies = Latencies::new()?;
    for turn in 0..100_000_u64 {
        let number = turn.wrapping_mul(0x9E37_79B9_7F4A_7C15) % prompts;
        let blocks = grown(number);
        let member = rig.members[(number % workers) as usize];
        let (spent, held) = time(|| rig.reader.overlaps(&blocks).device(member));
        anyhow::ensure!(held == 128, "prompt {number}: {held} of 128 blocks");
        latencies.record(spent);
    }
    results::add_latencies("index", &format!("look-up of 128 blocks, {pairs} pairs"), &latencies);
    println!("look-up of 128 blocks {}", latencies.render());
    let members = rig.members.clone();
    let (spent, ()) = time(|| {
        members.iter().for_each(|&member| rig.index.write().leave(member));
        while rig.index.write().sweep() {}
    });
    println!("all left in {:.1} s; {} KiB left", spent.as_secs_f64(), rig.index.write().usage().bytes >> 10);
    Ok(())
}

pub(crate) fn run(smoke: bool, trace: Option<&Path>, rounds: RoundsArgs) -> Result<()> {
    let rounds = rounds.or(1);
    println!(
        "# index: prompts of 128 blocks; p50 / p99 / p99.9 of a look-up, two clock reads included; rounds: {rounds}"
    );
    let (warm, cold) = if smoke { (40, 60) } else { (200, 40_000) };
    let lookups = if smoke { 100 } else { 100_000 };
    for workers in [8, 64, 512, 4096] {
        let holders = (workers / 8).clamp(2, 64);
        let shape = tree::Shape { workers, chains: warm, holders, ..tree::Shape::default() };
        Measurement::of("warm", &tree::workload(&shape)).run(rounds, lookups)?;
    }
    for workers in [8, 512] {
        let shape = tree::Shape { workers, chains: cold, systems: 64, ..tree::Shape::default() };
        Measurement::of("beyond the last-level cache", &tree::workload(&shape)).run(rounds, lookups)?;
    }
    if let Some(trace) = trace {
        let requests = mooncake::read(trace)?;
        for workers in [8, 64] {
            let workload = mooncake::workload(&requests, workers, 32);
            Measurement::of("Mooncake conversation trace", &workload).run(rounds, lookups)?;
        }
    }
    Ok(())
}

/// The measurements of one workload: its blocks are stored, prompts are looked up, and the blocks are removed.
struct Measurement<'a> {
    title: String,
    workers: usize,
    stores: Vec<Change>,
    removals: Vec<Change>,
    prompts: Vec<&'a [u64]>,
    /// Number of (worker, block) pairs.
    blocks: usize,
}

/// Look-ups by some readers, with or without a writer beside them, over all rounds.
struct Lookups {
    readers: usize,
    has_writer: bool,
    latencies: Latencies,
    /// Allocations of the last round's last reader, if they are counted.
    allocated: Option<u64>,
    /// Blocks per second of the writer, by round.
    written: Vec<f64>,
}

impl<'a> Measurement<'a> {
    fn of(title: &str, workload: &'a Workload) -> Self {
        let is_store = |operation: &&Operation| matches!(operation, Operation::Stored { .. });
        let stores: Vec<Operation> = workload.operations.iter().filter(is_store).cloned().collect();
        let prompts = workload.operations.iter().filter_map(|operation| match operation {
            Operation::Lookup { blocks } => Some(&blocks[..]),
            _ => None,
        });
        let removals = tree::removals(&stores).iter().filter_map(Change::of).collect();
        let stores: Vec<Change> = stores.iter().filter_map(Change::of).collect();
        Self {
            title: format!("{title}, {} workers", workload.workers),
            workers: workload.workers,
            removals,
            prompts: prompts.collect(),
            blocks: stores.iter().map(|change| change.keys.len()).sum(),
            stores,
        }
    }

    fn run(&self, rounds: usize, lookups: usize) -> Result<()> {
        let Self { title, blocks, prompts, .. } = self;
        println!("{title}: {blocks} (worker, block) pairs, {} prompts", prompts.len());
        let (mut stored, mut removed) = (Vec::new(), Vec::new());
        let mut all = Vec::new();
        for (readers, has_writer) in [(1, false), (1, true), (2, false), (2, true)] {
            let latencies = Latencies::new()?;
            all.push(Lookups { readers, has_writer, latencies, allocated: None, written: Vec::new() });
        }
        let mut last = None;
        for _ in 0..rounds {
            let mut rig = Rig::new(self.workers)?;
            let (spent, ()) = time(|| self.stores.iter().for_each(|change| rig.apply(change)));
            stored.push(spent.as_nanos() as f64 / *blocks as f64);
            let usage = rig.index.write().usage();
            let bytes_each = usage.bytes as f64 / usage.entries as f64;
            let checksum: u64 = prompts.iter().map(|prompt| rig.reader.overlaps(prompt).device_sum()).sum();
            for entry in &mut all {
                let (latencies, allocated, written) =
                    read(&rig, prompts, &self.stores, lookups, entry.readers, entry.has_writer)?;
                entry.latencies.add(&latencies)?;
                entry.allocated = allocated;
                entry.written.push(written);
            }
            let (spent, ()) = time(|| self.removals.iter().for_each(|change| rig.apply(change)));
            removed.push(spent.as_nanos() as f64 / *blocks as f64);
            while rig.index.write().sweep() {}
            last = Some((bytes_each, rig.index.write().usage().bytes >> 10, checksum));
        }
        let Some((bytes_each, left_kib, checksum)) = last else { return Ok(()) };
        results::add("index", &format!("{title}: stored"), ("ns a block", Better::Lower), &stored);
        let nanos = middle(&stored);
        println!(
            "  stored   {nanos:6.1} ns a block, {:5.1} M blocks/s; {bytes_each:.1} bytes a pair",
            1e3 / nanos
        );
        for entry in &all {
            entry.report(title, lookups);
        }
        results::add("index", &format!("{title}: removed"), ("ns a block", Better::Lower), &removed);
        let nanos = middle(&removed);
        println!("  removed  {nanos:6.1} ns a block; {left_kib} KiB left; checksum {checksum}");
        Ok(())
    }
}

impl Lookups {
    fn report(&self, title: &str, lookups: usize) {
        let Self { readers, has_writer, latencies, allocated, written } = self;
        let plural = if *readers == 1 { "" } else { "s" };
        let beside = if *has_writer { ", beside a writer" } else { "" };
        let row = format!("{title}: look-up, {readers} reader{plural}{beside}");
        results::add_latencies("index", &row, latencies);
        let speed = match has_writer {
            true => format!(" of {:.1} M blocks/s", middle(written) / 1e6),
            false => String::new(),
        };
        let allocated = match allocated {
            Some(count) => format!("{:.2}", *count as f64 / lookups as f64),
            None => "not counted here".to_owned(),
        };
        println!(
            "  {readers} reader{plural:<1} {}, allocations {allocated}{beside}{speed}",
            latencies.render()
        );
    }
}

/// The median; of an even number of values the upper one in the middle.
fn middle(values: &[f64]) -> f64 {
    median(values.to_vec())
}

/// Runs look-ups on some threads, beside a writer that stores and removes its own prompts as fast as it can.
fn read(
    rig: &Rig,
    prompts: &[&[u64]],
    stores: &[Change],
    lookups: usize,
    readers: usize,
    has_writer: bool,
) -> Result<(Latencies, Option<u64>, f64)> {
    let (stop, written) = (AtomicBool::new(false), AtomicU64::new(0));
    let mut all = Latencies::new()?;
    let mut allocated = None;
    let mut busy = Duration::from_nanos(1);
    std::thread::scope(|scope| -> Result<()> {
        let writer = has_writer.then(|| {
            scope.spawn(|| {
                let started = std::time::Instant::now();
                let mut turn = 0_u64;
                while !stop.load(Ordering::Relaxed) {
                    churn(rig, &stores[turn as usize % stores.len()], turn, &written);
                    turn += 1;
                }
                started.elapsed()
            })
        });
        let threads: Vec<_> = (0..readers)
            .map(|thread| {
                scope.spawn(move || -> Result<(Latencies, Option<u64>)> {
                    let mut reader = rig.index.reader().context("a reader")?;
                    let mut latencies = Latencies::new()?;
                    let stride = (prompts.len() * 5 / 8) | 1;
                    let mut at = thread;
                    for _ in 0..prompts.len().min(2000) {
                        at = (at + stride) % prompts.len();
                        reader.overlaps(prompts[at]);
                    }
                    let before = allocations();
                    for _ in 0..lookups {
                        at = (at + stride) % prompts.len();
                        let (spent, _) = time(|| std::hint::black_box(reader.overlaps(prompts[at])));
                        latencies.record(spent);
                    }
                    Ok((latencies, before.and_then(|before| Some(allocations()? - before))))
                })
            })
            .collect();
        for thread in threads {
            let (latencies, count) =
                thread.join().map_err(|_| anyhow::anyhow!("a reader has panicked"))??;
            all.add(&latencies)?;
            allocated = count;
        }
        stop.store(true, Ordering::Relaxed);
        if let Some(writer) = writer {
            busy = writer.join().map_err(|_| anyhow::anyhow!("the writer has panicked"))?;
        }
        Ok(())
    })?;
    Ok((all, allocated, written.load(Ordering::Relaxed) as f64 / busy.as_secs_f64()))
}

/// Stores a prompt that is never looked up below a stored one, and removes it again.
fn churn(rig: &Rig, below: &Change, turn: u64, written: &AtomicU64) {
    let name = |at: u64| (turn << 20 | at).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let keys: Vec<u64> = (0..64).map(name).collect();
    let parent = below.keys.first().copied();
    let stored = Change { worker: below.worker, stored: Some((parent, keys.clone())), keys: keys.clone() };
    apply(&rig.index, &rig.members, &stored);
    let removed = Change { worker: below.worker, stored: None, keys: keys.into_iter().rev().collect() };
    apply(&rig.index, &rig.members, &removed);
    written.fetch_add(128, Ordering::Relaxed);
}
