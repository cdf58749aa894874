//! The host and disk tiers (`kvstore-store`) beside `foyer` 0.22.6, the published hybrid cache, on one workload.
//!
//! `cargo run --release --manifest-path bench/peers/blocks/Cargo.toml -- [--quick] [--folder DIR] [--bytes 131072,1048576]`.
//! A workspace of its own: `kvstore-object` asks for a newer tokio than `dynamo-kv-router`, in `bench/peers`, allows.
//!
//! Blocks of incompressible bytes that hang on nothing, 256 MiB of memory over 2 GiB of disk, O_DIRECT, files filled with
//! zeros before. Sides take turns, each round beginning with the next of them, with empty stores, the first round uncounted;
//! medians of the others, with the least and the most.
//!
//! - *write*: 1.25 GiB that the disk has room for, offered as fast as memory takes them (*flood*: what the disk cannot
//!   follow is dropped by either side) and with at most 32 MiB under way (*paced*: neither written nor dropped); until each
//!   is written or dropped, synced by neither. Ours gives blocks back when its queue is full, and the caller waits; foyer always takes them.
//! - *read*: blocks that only the disk has, each once, 1 and 16 at a time.
//! - *mixed*: a Zipf sequence over 3 GiB of blocks, 16 at a time, stored when missing; writing to the disk on insertion
//!   and on eviction.
//!
//! Settings. Ours: a node's defaults (io_uring, depth 64, S3-FIFO in both tiers, segments of 256 MiB). foyer: the fully
//! configured example of its README (16 MiB blocks, 2 flushers, 2 reclaimers, 4 clean blocks, FIFO), but buffers of 64 MiB,
//! which are that much more memory (twice, in turn), a submit queue of 128 MiB, no compression; its default w-TinyLFU in
//! memory; its io_uring engine as it comes (a thread that never sleeps) and its default psync; tokio with 2 threads.
//!
//! Not equal: foyer's value is used where it lies on the heap, ours is copied from host memory into a slot of the
//! caller's and verified there (one copy more). Both verify what the disk gives once; samples of every block are compared besides, all
//! bytes in the uncounted round. foyer's buffers and queue are 256 MiB beyond the 256, and what is in the queue is found there, as in memory:
//! so ours is shown with 512 MiB, too. Ours evicts a block at a time, foyer 16 MiB; ours writes what finds a block again after a crash apart
//! from it, foyer beside it.

mod folder;
mod ours;
mod report;
mod side;
mod theirs;
mod workload;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use hdrhistogram::Histogram;

use ours::Ours;
use report::{Line, Written};
use side::{Mode, Pace, Setup, Side, processor_time};
use theirs::{Engine, Theirs};
use workload::{Contents, Random, zipf};

const MIB: usize = 1 << 20;
const ZIPF_EXPONENT: f64 = 0.9;
const CONCURRENCY: [usize; 2] = [1, 16];

#[derive(Parser)]
struct Cli {
    /// Small tiers and one counted round, to check that everything runs; the numbers mean nothing.
    #[arg(long)]
    quick: bool,
    /// Folder for the files; default: a temporary folder, which is removed.
    #[arg(long)]
    folder: Option<PathBuf>,
    /// Sizes of blocks in bytes, multiples of 4 KiB.
    #[arg(long, value_delimiter = ',', default_values_t = [128 << 10, 1 << 20])]
    bytes: Vec<usize>,
    /// Counted rounds, of which median, least and most are shown; with a multiple of four, each side goes first
    /// equally often.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Print our store's counters after each mixed phase.
    #[arg(long)]
    counters: bool,
    /// Seed of contents and order.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

#[derive(Debug, Clone, Copy)]
enum Contender {
    /// Our side with this multiple of the memory.
    Ours(usize),
    Theirs(Engine),
}

const CONTENDERS: [(Contender, &str); 4] = [
    (Contender::Ours(1), "kvasir, io_uring"),
    (Contender::Ours(2), "kvasir, as much memory as foyer takes"),
    (Contender::Theirs(Engine::Uring), "foyer, io_uring"),
    (Contender::Theirs(Engine::Psync), "foyer, psync"),
];

/// Workload for blocks of one size.
struct Work {
    setup: Setup,
    keys: u64,
    written: usize,
    window_bytes: usize,
    reads: [usize; CONCURRENCY.len()],
    mixed: Vec<u64>,
    seed: u64,
    shows_counters: bool,
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    let folder = cli
        .folder
        .clone()
        .unwrap_or_else(|| std::env::temp_dir().join(format!("kvasir-bench-blocks-{}", std::process::id())));
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let outcome = compare_all(&cli, &folder);
    for made in ["kvasir", "foyer"] {
        let _not_made = std::fs::remove_dir_all(folder.join(made));
    }
    if cli.folder.is_none() {
        let _not_empty = std::fs::remove_dir(&folder);
    }
    outcome
}

fn compare_all(cli: &Cli, folder: &std::path::Path) -> Result<()> {
    println!("Files in {}, on {}", folder.display(), folder::file_system(folder)?);
    let (sizes, rounds) =
        if cli.quick { (vec![128 << 10], 1) } else { (cli.bytes.clone(), cli.rounds.max(1)) };
    let mut instance = u64::from(std::process::id()) << 32;
    for block_bytes in sizes {
        ensure!(
            block_bytes >= 4096 && block_bytes.is_multiple_of(4096),
            "{block_bytes} is no multiple of 4 KiB"
        );
        let mut work = Work::new(cli, folder, block_bytes)?;
        let mut lines = Vec::new();
        for (_, name) in CONTENDERS {
            lines.push(Line::new(name)?);
        }
        for number in 0..=rounds {
            for turn in 0..CONTENDERS.len() {
                // The sides take turns in going first, because the first may find an idle disk.
                let at = (number + turn) % CONTENDERS.len();
                let ((contender, name), line) = (CONTENDERS[at], &mut lines[at]);
                instance += 16;
                (work.setup.instance, work.setup.compares_all) = (instance, number == 0);
                let mut unused = Line::new(name)?;
                let line = if number == 0 { &mut unused } else { line };
                round(contender, &work, number as u64, line)
                    .with_context(|| format!("{name}, round {number}"))?;
            }
        }
        report::print(&work.setup, rounds, &mut lines);
    }
    Ok(())
}

impl Work {
    fn new(cli: &Cli, folder: &std::path::Path, block_bytes: usize) -> Result<Self> {
        let scale = if cli.quick { 16 } else { 1 };
        let (memory_bytes, disk_bytes) = (256 * MIB / scale, 2048 * MIB / scale);
        let keys = (3072 * MIB / scale / block_bytes) as u64;
        // foyer keeps one page more for each block; all written blocks must fit.
        let written = disk_bytes / 8 * 5 / (block_bytes + 4096);
        let reads = [written / 6, written / 3];
        let setup = Setup {
            folder: folder.to_owned(),
            block_bytes,
            memory_bytes,
            disk_bytes,
            contents: Contents::new(block_bytes, cli.seed),
            instance: 0,
            compares_all: false,
        };
        let mixed = zipf(keys, keys as usize * 2, ZIPF_EXPONENT, cli.seed);
        Ok(Self {
            setup,
            keys,
            written,
            window_bytes: memory_bytes / 8,
            reads,
            mixed,
            seed: cli.seed,
            shows_counters: cli.counters,
        })
    }

    fn open(&self, contender: Contender, mode: Mode, part: u64) -> Result<Box<dyn Side>> {
        wait_for_quiet()?;
        let setup = Setup { instance: self.setup.instance + part, ..self.setup.clone() };
        Ok(match contender {
            Contender::Ours(times) => {
                let setup = Setup { memory_bytes: times * setup.memory_bytes, ..setup };
                Box::new(Ours::open(&setup, mode, self.keys as usize)?)
            }
            Contender::Theirs(engine) => Box::new(Theirs::open(&setup, engine, mode)?),
        })
    }
}

/// Each phase starts with an empty store; only reads follow the paced write.
fn round(contender: Contender, work: &Work, number: u64, line: &mut Line) -> Result<()> {
    let keys: Vec<u64> = (0..work.written as u64).collect();
    let block_bytes = work.setup.block_bytes;
    let mut part = 0;
    let mut open = |mode| {
        part += 1;
        work.open(contender, mode, part)
    };
    for (pace, written) in [Pace::Flood, Pace::Window(work.window_bytes)].into_iter().zip(0..) {
        let mut side = open(Mode::Insertion)?;
        let spent = side.write(&keys, pace)?;
        let kept = keys.iter().filter(|&&key| side.is_on_disk(key)).count();
        line.written[written].push(Written::new(spent, kept, keys.len(), block_bytes));
        if pace == Pace::Flood {
            continue;
        }
        let mut only_on_disk: Vec<u64> =
            keys.iter().copied().filter(|&key| side.is_on_disk(key) && !side.is_in_memory(key)).collect();
        Random::new(work.seed + number).shuffle(&mut only_on_disk);
        let mut from = 0;
        for (at, (&concurrency, &count)) in CONCURRENCY.iter().zip(&work.reads).enumerate() {
            ensure!(
                only_on_disk.len() >= from + count,
                "only {} blocks are on the disk alone",
                only_on_disk.len()
            );
            let (keys, latency) = (&only_on_disk[from..from + count], &mut line.latency[at]);
            let spent = side.read(keys, concurrency, latency)?;
            line.read[at].push(Written::new(spent, count, count, block_bytes));
            from += count;
        }
    }
    for (at, mode) in [Mode::Insertion, Mode::Eviction].into_iter().enumerate() {
        let mut side = open(mode)?;
        let (spent, found) = side.mixed(&work.mixed, CONCURRENCY[1])?;
        let requests = work.mixed.len();
        if work.shows_counters
            && let Some(counters) = side.counters()
        {
            println!("{mode:?}: {counters}");
        }
        ensure!(
            found.memory + found.disk + found.missed == requests,
            "{found:?} are not {requests} requests"
        );
        line.mixed[at].push((Written::new(spent, requests, requests, block_bytes), found));
    }
    Ok(())
}

/// Waits until the threads of the previous side have ended.
fn wait_for_quiet() -> Result<()> {
    const LOOK: Duration = Duration::from_millis(20);
    let started = Instant::now();
    loop {
        let before = processor_time();
        std::thread::sleep(LOOK);
        if processor_time() - before < LOOK / 10 {
            return Ok(());
        }
        ensure!(started.elapsed() < Duration::from_secs(20), "threads of the side before still run");
    }
}

/// Histogram of latencies in nanoseconds, up to ten seconds, to three digits.
fn histogram() -> Result<Histogram<u64>> {
    Ok(Histogram::new_with_bounds(1, 10_000_000_000, 3)?)
}
