//! The prefix index beside the published crates with the same function: `dynamo-kv-router` 1.6.1 and `kv-index`
//! 2.0.0, in one run, on one workload, with equal scores.
//!
//! Each side gets its input in its own form, made outside of the timed part, and answers with a number for each
//! worker. Sides take turns, and the median of the rounds is reported. Times include two clock reads.
//!
//! `cargo run --release --manifest-path bench/peers/Cargo.toml -- catalog [--quick]` compares the catalog of blocks
//! with `kvbm-logical` instead, and `cargo run --release --manifest-path bench/peers/blocks/Cargo.toml -- [--quick]
//! [--folder DIR]`, a workspace of its own, the tiers with `foyer`.

#![forbid(unsafe_code)]

mod catalog;
mod side;

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::{Parser, Subcommand};
use hdrhistogram::Histogram;
use tests_allocations::CountingAllThreads;
use tools_workload::{Operation, Workload, mooncake, tree};

use side::{CHAIN_WORKERS_MAX, Chain, DynamoConcurrent, DynamoRadix, Ours, Prompt, Side};

#[global_allocator]
static ALLOCATOR: CountingAllThreads = CountingAllThreads::new();

#[derive(Parser)]
#[command(args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    /// Tiny input, to check that everything runs; the numbers mean nothing.
    #[arg(long)]
    smoke: bool,
    /// Only our side, to run it under a profiler.
    #[arg(long)]
    alone: bool,
    /// The Mooncake conversation trace, for a second workload.
    #[arg(long)]
    trace: Option<std::path::PathBuf>,
}

#[derive(Subcommand)]
enum Command {
    /// The catalog of blocks beside `kvbm-logical`.
    Catalog(catalog::Options),
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    if let Some(Command::Catalog(options)) = &cli.command {
        return catalog::run(options);
    }
    let chains = if cli.smoke { 40 } else { 200 };
    for workers in [8, 64, 512, 4096] {
        let shape =
            tree::Shape { workers, chains, holders: (workers / 8).clamp(2, 64), ..tree::Shape::default() };
        compare(&format!("tree, {chains} prompts of 128 blocks, warm"), &tree::workload(&shape), &cli)?;
    }
    let chains = if cli.smoke { 100 } else { 40_000 };
    for workers in [8, 64, 512] {
        let shape = tree::Shape { workers, chains, systems: 64, holders: 2, ..tree::Shape::default() };
        let title = format!("tree, {chains} prompts of 128 blocks, beyond the last-level cache");
        compare(&title, &tree::workload(&shape), &cli)?;
    }
    if let Some(path) = &cli.trace {
        let requests = mooncake::read(path)?;
        let count = if cli.smoke { 50 } else { requests.len() };
        for workers in [8, 64] {
            let workload = mooncake::workload(&requests[..count], workers, 32);
            compare("Mooncake conversation trace, blocks of 16 tokens", &workload, &cli)?;
        }
    }
    Ok(())
}

struct Line {
    name: &'static str,
    nanos: Histogram<u64>,
    allocations: f64,
    stored: Vec<f64>,
    removed: Vec<f64>,
    bytes_per_entry: f64,
    left_bytes: i64,
    checksum: u64,
}

/// Makes an empty index.
type Maker = Box<dyn Fn() -> Result<Box<dyn Side>>>;

fn compare(title: &str, workload: &Workload, cli: &Cli) -> Result<()> {
    let stores: Vec<Operation> = workload
        .operations
        .iter()
        .filter(|operation| matches!(operation, Operation::Stored { .. }))
        .cloned()
        .collect();
    let removals = tree::removals(&stores);
    let prompts: Vec<Prompt> = workload
        .operations
        .iter()
        .filter_map(|operation| match operation {
            Operation::Lookup { blocks } => Some(Prompt::new(blocks)),
            _ => None,
        })
        .collect();
    let blocks: usize = Workload { workers: 0, operations: stores.clone() }.changed_blocks();
    println!(
        "# {title}; {} workers, {blocks} (worker, block) pairs, {} prompts",
        workload.workers,
        prompts.len()
    );
    let lookups = if cli.smoke { 50 } else { 60_000 };
    let workers = workload.workers;
    let makers: Vec<Maker> = vec![
        Box::new(move || Ok(Box::new(Ours::new(workers)?))),
        Box::new(|| Ok(Box::new(DynamoConcurrent::compressed()))),
        Box::new(|| Ok(Box::new(DynamoConcurrent::positional()))),
        Box::new(|| Ok(Box::new(DynamoRadix::new()))),
        Box::new(move || Ok(Box::new(Chain::new(workers)?))),
    ];
    let makers = match workers {
        _ if cli.alone => &makers[..1],
        0..=CHAIN_WORKERS_MAX => &makers[..],
        _ => &makers[..4],
    };
    let mut lines: Vec<Line> = Vec::new();
    // One side at a time: two large indexes would not fit the cache together. The outer loop repeats the whole.
    for _ in 0..if cli.smoke { 1 } else { 3 } {
        for (at, make) in makers.iter().enumerate() {
            let mut side = make()?;
            let empty = ALLOCATOR.live_bytes();
            let changes = side.prepare(&stores);
            let (spent, ()) = time(|| side.apply(changes));
            // Memory of the changes themselves is released by now; the rest is the index.
            let bytes = ALLOCATOR.live_bytes() - empty + side.mapped_bytes() as i64;
            if lines.len() == at {
                lines.push(Line {
                    name: side.name(),
                    nanos: Histogram::new_with_bounds(1, 10_000_000_000, 3)?,
                    allocations: 0.0,
                    stored: Vec::new(),
                    removed: Vec::new(),
                    bytes_per_entry: bytes as f64 / blocks as f64,
                    left_bytes: 0,
                    checksum: 0,
                });
            }
            let line = &mut lines[at];
            line.stored.push(spent.as_nanos() as f64 / blocks as f64);
            line.checksum = checksum(side.as_mut(), &prompts, workers);
            time_lookups(side.as_mut(), &prompts, lookups / 3, line);
            let changes = side.prepare(&removals);
            let (spent, ()) = time(|| side.apply(changes));
            line.removed.push(spent.as_nanos() as f64 / blocks as f64);
            line.left_bytes = ALLOCATOR.live_bytes() - empty + side.mapped_bytes() as i64;
        }
    }
    report(lines)
}

fn time<T>(work: impl FnOnce() -> T) -> (Duration, T) {
    let started = Instant::now();
    let result = work();
    (started.elapsed(), result)
}

/// Weighted, so that scores of the wrong worker or prompt do not cancel out.
fn checksum(side: &mut dyn Side, prompts: &[Prompt], workers: usize) -> u64 {
    let step = prompts.len().div_ceil(2000);
    let mut sum = 0_u64;
    for (number, prompt) in prompts.iter().enumerate().step_by(step) {
        for (worker, blocks) in side.scores(prompt, workers).into_iter().enumerate() {
            sum = sum.wrapping_add(u64::from(blocks).wrapping_mul((number * 7919 + worker + 1) as u64));
        }
    }
    sum
}

fn time_lookups(side: &mut dyn Side, prompts: &[Prompt], lookups: usize, line: &mut Line) {
    // An order that differs from that of storing.
    let stride = (prompts.len() * 5 / 8) | 1;
    let order = (0..).map(|number: usize| number.wrapping_mul(stride) % prompts.len());
    for at in order.clone().take(prompts.len().min(2000)) {
        side.before_lookup(&prompts[at]);
        side.lookup(&prompts[at]);
    }
    let mut allocations = 0;
    for at in order.take(lookups) {
        side.before_lookup(&prompts[at]);
        let before = ALLOCATOR.allocations();
        let (spent, ()) = time(|| side.lookup(&prompts[at]));
        allocations += ALLOCATOR.allocations() - before;
        line.nanos.saturating_record(spent.as_nanos() as u64);
    }
    line.allocations = allocations as f64 / lookups as f64;
}

/// The median; of an even number of values the mean of the two in the middle.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len().is_multiple_of(2) { values[middle - 1].midpoint(values[middle]) } else { values[middle] }
}

fn report(lines: Vec<Line>) -> Result<()> {
    println!(
        "{:<36}{:>26}{:>8}{:>8}{:>10}{:>10}{:>8}{:>9}",
        "", "look-up p50/p99/p99.9 ns", "ratio", "allocs", "store ns", "remove ns", "B/pair", "KiB left"
    );
    let ours = lines[0].nanos.value_at_quantile(0.5) as f64;
    let checksum = lines[0].checksum;
    for mut line in lines {
        let at = |quantile| line.nanos.value_at_quantile(quantile);
        println!(
            "{:<36}{:>26}{:>8.2}{:>8.2}{:>10.1}{:>10.1}{:>8.1}{:>9}",
            line.name,
            format!("{} / {} / {}", at(0.5), at(0.99), at(0.999)),
            ours / at(0.5) as f64,
            line.allocations,
            median(&mut line.stored),
            median(&mut line.removed),
            line.bytes_per_entry,
            line.left_bytes / 1024,
        );
        ensure!(line.checksum == checksum, "{}: other scores than ours", line.name);
    }
    println!("checksum {checksum:#018x}, equal on all sides");
    Ok(())
}
