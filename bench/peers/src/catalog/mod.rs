//! The catalog of blocks beside `kvbm-logical` 1.6.1, which does the same work in Dynamo's block manager.
//!
//! A catalog full of chains of 8, 64 or 512 blocks; each step goes over all of them in the same shuffled order, so
//! that large catalogs are cold. What one operation is:
//!
//! - *match*: hold the longest prefix of a whole chain, then release it. Both sides pin each block by a value of
//!   their own whose drop unpins it. `idle`: the blocks have no other hold; `held`: they have one.
//! - *miss*: the same for a chain of which nothing is there.
//! - *ask*: the length of that prefix, nothing held: `match_prefix` here, `check_presence` there, which does not
//!   stop at a miss and is said to lag behind.
//! - *register*: store a chain as one batch in free slots, through all the states that a block goes through on
//!   its side, until it can be found and has no hold. There the result is a hold on each block, whose drop is
//!   timed; here registering gives no hold.
//! - *replace*: the same into a full catalog, so that each batch evicts as many blocks.
//! - *evict*: make room for a batch in a full catalog of idle blocks, and name those that leave.
//!
//! Not equal: ours moves a block in the order of eviction when it evicts, theirs when a hold ends, so *match*
//! holds that cost there and *evict* here. Ours keeps checksum, length, parent and quota of each block, theirs
//! counts metrics and may keep attachments. Ours keeps the bookkeeping of holds in vectors that the caller gives and
//! uses again, theirs returns a new vector each time. Neither side hashes tokens in what is timed. One thread.

mod side;

use std::collections::HashSet;
use std::hint::black_box;
use std::time::Instant;

use anyhow::{Result, ensure};
use clap::Args;
use hdrhistogram::Histogram;

use crate::{ALLOCATOR, median, time};
use side::{Chain, Name, Side, sides};

const LENGTHS: [usize; 3] = [8, 64, 512];
/// In the order of [`Step`].
const STEPS: [&str; 7] = ["match idle", "match held", "miss", "ask", "register", "replace", "evict"];

/// Timed step; the discriminant is the column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    MatchIdle,
    MatchHeld,
    Miss,
    Ask,
    Register,
    Replace,
    Evict,
}

impl Step {
    fn name(self) -> &'static str {
        STEPS[self as usize]
    }

    /// Whether the step is counted per operation instead of per block: a miss looks at one block.
    fn is_per_operation(self) -> bool {
        self == Self::Miss
    }
}

#[derive(Args)]
pub struct Options {
    /// Tiny catalogs and one round, to check that everything runs; the numbers mean nothing.
    #[arg(long)]
    quick: bool,
    /// Sizes in blocks, multiples of 512.
    #[arg(long, value_delimiter = ',', default_values_t = [16_384, 131_072, 524_288])]
    blocks: Vec<usize>,
    /// Rounds; the median is shown.
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Seed of the order.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

pub fn run(options: &Options) -> Result<()> {
    let (blocks, rounds) =
        if options.quick { (vec![1024], 1) } else { (options.blocks.clone(), options.rounds) };
    let longest = LENGTHS[LENGTHS.len() - 1];
    for &blocks in &blocks {
        ensure!(
            blocks > 0 && blocks.is_multiple_of(longest),
            "--blocks {blocks}: it has to be a multiple of {longest}, and not 0"
        );
    }
    for blocks in blocks {
        compare(blocks, rounds.max(1), options.seed)?;
    }
    Ok(())
}

/// Costs of one side for each step, in nanoseconds and allocations per block or operation.
struct Line {
    name: String,
    nanos: [Vec<f64>; STEPS.len()],
    allocations: [f64; STEPS.len()],
    /// Latency of one match and release.
    latency: Histogram<u64>,
}

fn compare(blocks: usize, rounds: usize, seed: u64) -> Result<()> {
    let mut tables = Vec::new();
    for length in LENGTHS {
        let count = blocks / length;
        let make = |from: usize| -> Vec<Chain> {
            (from..from + count).map(|number| Chain::new(number as u32, length)).collect()
        };
        let work = Work { first: make(0), second: make(count), absent: make(2 * count), length };
        let mut pools = sides(blocks, length)?;
        let mut lines = Vec::new();
        for pool in &mut pools {
            // Not counted: in the first round each side allocates the memory that it needs as it runs.
            lines.push(Line::new(pool.name())?);
            let mut unused = Line::new("")?;
            round(pool.as_mut(), &work, &order(count, seed), &mut unused)?;
        }
        for number in 0..rounds {
            let order = order(count, seed + number as u64);
            for (pool, line) in pools.iter_mut().zip(&mut lines) {
                round(pool.as_mut(), &work, &order, line)?;
            }
        }
        tables.push(lines);
    }
    report(blocks, rounds, &mut tables);
    Ok(())
}

/// Three sets of chains, each of which fills the catalog; the last one is never stored.
struct Work {
    first: Vec<Chain>,
    second: Vec<Chain>,
    absent: Vec<Chain>,
    length: usize,
}

impl Line {
    fn new(name: &str) -> Result<Self> {
        let latency = Histogram::new_with_bounds(1, 10_000_000_000, 3)?;
        Ok(Self { name: name.to_owned(), nanos: Default::default(), allocations: [0.0; _], latency })
    }

    /// Times a step over all chains and checks its result.
    fn step(&mut self, step: Step, chains: usize, wanted: usize, work: impl FnOnce() -> usize) -> Result<()> {
        let before = ALLOCATOR.allocations();
        let (spent, done) = time(work);
        let allocations = ALLOCATOR.allocations() - before;
        ensure!(done == wanted, "{}: {}: {done} blocks, not {wanted}", self.name, step.name());
        let share = if step.is_per_operation() { chains } else { wanted };
        self.nanos[step as usize].push(spent.as_nanos() as f64 / share as f64);
        self.allocations[step as usize] = allocations as f64 / chains as f64;
        Ok(())
    }
}

/// Runs one round, from an empty catalog to an empty one.
fn round(pool: &mut dyn Side, work: &Work, order: &[usize], line: &mut Line) -> Result<()> {
    let Work { first, second, absent, length } = work;
    let (chains, blocks) = (first.len(), first.len() * length);
    line.step(Step::Register, chains, blocks, || first.iter().map(|chain| pool.register(chain)).sum())?;
    ensure!(pool.drain().is_empty(), "{}: something was evicted from a catalog with room", line.name);
    line.step(Step::MatchIdle, chains, blocks, || order.iter().map(|&at| pool.hold(&first[at])).sum())?;
    for &at in order {
        let started = Instant::now();
        black_box(pool.hold(&first[at]));
        line.latency.saturating_record(started.elapsed().as_nanos() as u64);
    }
    let kept: usize = first.iter().map(|chain| pool.keep(chain)).sum();
    ensure!(kept == blocks, "{}: {kept} blocks kept, not {blocks}", line.name);
    line.step(Step::MatchHeld, chains, blocks, || order.iter().map(|&at| pool.hold(&first[at])).sum())?;
    pool.let_go();
    // The release just before makes the next allocation clean up, whose time does not belong to the miss.
    black_box(pool.hold(&absent[0]));
    line.step(Step::Miss, chains, 0, || order.iter().map(|&at| pool.hold(&absent[at])).sum())?;
    line.step(Step::Ask, chains, blocks, || order.iter().map(|&at| pool.ask(&first[at])).sum())?;
    line.step(Step::Replace, chains, blocks, || order.iter().map(|&at| pool.register(&second[at])).sum())?;
    let mut left = pool.drain();
    line.step(Step::Evict, chains, blocks, || (0..chains).map(|_| pool.evict(*length)).sum())?;
    left.extend(pool.drain());
    // Under every policy, all blocks that came in have left, each once.
    let left_count = left.len();
    let left: HashSet<Name> = left.into_iter().collect();
    let all = first.iter().chain(second);
    let are_gone =
        all.flat_map(|chain| (0..*length).map(|at| pool.block(chain, at))).all(|of| left.contains(&of));
    ensure!(
        left_count == 2 * blocks && left.len() == left_count && are_gone,
        "{}: wrong evictions",
        line.name
    );
    let found: usize = first.iter().chain(second).map(|chain| pool.ask(chain) + pool.hold(chain)).sum();
    ensure!(found == 0, "{}: {found} evicted blocks are still found", line.name);
    Ok(())
}

/// A shuffle by xorshift.
fn order(count: usize, seed: u64) -> Vec<usize> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut order: Vec<usize> = (0..count).collect();
    for at in (1..count).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        order.swap(at, (state % (at as u64 + 1)) as usize);
    }
    order
}

/// Tables for RESULTS.md; the three values of a cell are those of chains of 8, 64 and 512 blocks.
fn report(blocks: usize, rounds: usize, tables: &mut [Vec<Line>]) {
    println!(
        "\n{blocks} blocks, chains of 8 / 64 / 512; medians of {rounds} rounds, ns a block (miss: ns an operation):\n"
    );
    nanoseconds(tables, median);
    println!("\nThe best round:\n");
    nanoseconds(tables, |values| values.iter().copied().fold(f64::INFINITY, f64::min));
    println!(
        "\nAllocations an operation; one match of idle blocks and its release in us, p50 / p99 / p99.9:\n"
    );
    counts_and_latencies(tables);
}

fn nanoseconds(tables: &mut [Vec<Line>], choose: impl Fn(&mut [f64]) -> f64) {
    println!("| | {} |", STEPS.join(" | "));
    println!("| --- {}|", "| --- ".repeat(STEPS.len()));
    for side in 0..tables[0].len() {
        print!("| {} |", tables[0][side].name);
        for step in 0..STEPS.len() {
            let cell = |table: &mut Vec<Line>| format!("{:.0}", choose(&mut table[side].nanos[step]));
            print!(" {} |", tables.iter_mut().map(cell).collect::<Vec<_>>().join(" / "));
        }
        println!();
    }
}

fn counts_and_latencies(tables: &[Vec<Line>]) {
    println!(
        "| | {} | {} |",
        STEPS.join(" | "),
        LENGTHS.map(|length| format!("{length} blocks")).join(" | ")
    );
    println!("| --- {}|", "| --- ".repeat(STEPS.len() + LENGTHS.len()));
    for side in 0..tables[0].len() {
        print!("| {} |", tables[0][side].name);
        for step in 0..STEPS.len() {
            let cell = |table: &Vec<Line>| count(table[side].allocations[step]);
            print!(" {} |", tables.iter().map(cell).collect::<Vec<_>>().join(" / "));
        }
        for table in tables {
            let at = |quantile| table[side].latency.value_at_quantile(quantile) as f64 / 1e3;
            print!(" {:.2} / {:.2} / {:.2} |", at(0.5), at(0.99), at(0.999));
        }
        println!();
    }
}

fn count(allocations: f64) -> String {
    if allocations.fract() == 0.0 { format!("{allocations:.0}") } else { format!("{allocations:.1}") }
}
