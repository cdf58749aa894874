//! Tables for RESULTS.md.

use anyhow::Result;
use hdrhistogram::Histogram;

use crate::side::{Found, Setup, Spent};
use crate::{CONCURRENCY, histogram};

const GIB: f64 = (1 << 30) as f64;

/// A phase in numbers.
#[derive(Debug, Clone, Copy)]
pub struct Written {
    /// Of what was kept, or read.
    gib_per_second: f64,
    processor_seconds_per_gib: f64,
    kept_share: f64,
}

impl Written {
    pub fn new(spent: Spent, kept: usize, offered: usize, block_bytes: usize) -> Self {
        let gib = (kept * block_bytes) as f64 / GIB;
        Self {
            gib_per_second: gib / spent.elapsed.as_secs_f64(),
            processor_seconds_per_gib: spent.processor.as_secs_f64() / gib.max(f64::MIN_POSITIVE),
            kept_share: kept as f64 / offered as f64,
        }
    }
}

/// One side's rounds.
pub struct Line {
    name: &'static str,
    /// Flooded, and paced.
    pub written: [Vec<Written>; 2],
    /// For each concurrency.
    pub read: [Vec<Written>; CONCURRENCY.len()],
    pub latency: [Histogram<u64>; CONCURRENCY.len()],
    /// Writing to the disk on insertion, and on eviction.
    pub mixed: [Vec<(Written, Found)>; 2],
}

impl Line {
    pub fn new(name: &'static str) -> Result<Self> {
        Ok(Self {
            name,
            written: Default::default(),
            read: Default::default(),
            latency: [histogram()?, histogram()?],
            mixed: Default::default(),
        })
    }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn of(rounds: &[Written], value: impl Fn(&Written) -> f64) -> f64 {
    median(rounds.iter().map(value))
}

pub fn print(setup: &Setup, rounds: usize, lines: &mut [Line]) {
    println!(
        "\nBlocks of {} KiB, {} MiB of memory, {} MiB of disk; medians of {rounds} rounds. GiB/s of what was kept, processor \
         seconds a GiB:\n",
        setup.block_bytes >> 10,
        setup.memory_bytes >> 20,
        setup.disk_bytes >> 20
    );
    println!("| | write, flood: GiB/s, s/GiB, kept | write, paced: GiB/s, s/GiB, kept |");
    println!("| --- | --- | --- |");
    for line in &*lines {
        print!("| {} |", line.name);
        for written in &line.written {
            print!(
                " {:.2}, {:.2}, {:.1} % |",
                of(written, |of| of.gib_per_second),
                of(written, |of| of.processor_seconds_per_gib),
                of(written, |of| of.kept_share) * 100.0
            );
        }
        println!();
    }
    println!(
        "\n| read from the disk | {} |",
        CONCURRENCY.map(|at| format!("{at} at a time: GiB/s, s/GiB | p50 / p99 / p99.9 us")).join(" | ")
    );
    println!("| --- {}|", "| --- | --- ".repeat(CONCURRENCY.len()));
    for line in &*lines {
        print!("| {} |", line.name);
        for (read, latency) in line.read.iter().zip(&line.latency) {
            let at = |quantile| latency.value_at_quantile(quantile) as f64 / 1e3;
            print!(
                " {:.2}, {:.2} | {:.0} / {:.0} / {:.0} |",
                of(read, |of| of.gib_per_second),
                of(read, |of| of.processor_seconds_per_gib),
                at(0.5),
                at(0.99),
                at(0.999)
            );
        }
        println!();
    }
    println!(
        "\n| mixed, Zipf | written on insertion: hits (memory + disk), GiB/s asked, s/GiB | written on eviction |"
    );
    println!("| --- | --- | --- |");
    for line in &*lines {
        print!("| {} |", line.name);
        for rounds in &line.mixed {
            let share = |value: fn(&Found) -> usize| {
                median(rounds.iter().map(|(_, found)| {
                    let all = found.memory + found.disk + found.missed;
                    value(found) as f64 / all as f64 * 100.0
                }))
            };
            print!(
                " {:.1} % ({:.1} + {:.1}), {:.2}, {:.2} |",
                share(|found| found.memory + found.disk),
                share(|found| found.memory),
                share(|found| found.disk),
                median(rounds.iter().map(|(of, _)| of.gib_per_second)),
                median(rounds.iter().map(|(of, _)| of.processor_seconds_per_gib))
            );
        }
        println!();
    }
}
