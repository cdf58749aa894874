//! Tables for RESULTS.md.

use std::fmt;

use anyhow::Result;
use hdrhistogram::Histogram;

use crate::side::{Found, Setup, Spent};
use crate::{CONCURRENCY, histogram};

const GIB: f64 = (1 << 30) as f64;

/// Figures of a phase.
#[derive(Debug, Clone, Copy)]
pub struct Written {
    /// GiB per second of blocks kept, or read.
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

/// The rounds of one side.
pub struct Line {
    name: &'static str,
    /// The writes, flooded and paced.
    pub written: [Vec<Written>; 2],
    /// The reads, for each concurrency.
    pub read: [Vec<Written>; CONCURRENCY.len()],
    pub latency: [Histogram<u64>; CONCURRENCY.len()],
    /// The mixed phases, writing to the disk on insertion and on eviction.
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

/// Spread of a figure over the rounds.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Spread {
    /// Of an even number of rounds, the mean of the two in the middle.
    median: f64,
    least: f64,
    most: f64,
}

impl Spread {
    fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        let at = |at: usize| values.get(at).copied().unwrap_or(f64::NAN);
        let last = values.len().saturating_sub(1);
        Self { median: at(last / 2).midpoint(at(last.div_ceil(2))), least: at(0), most: at(last) }
    }
}

/// Median, and least and most in brackets, with the precision of the formatter.
impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = f.precision().unwrap_or(2);
        write!(f, "{:.digits$} ({:.digits$} to {:.digits$})", self.median, self.least, self.most)
    }
}

fn of(rounds: &[Written], value: impl Fn(&Written) -> f64) -> Spread {
    Spread::of(rounds.iter().map(value))
}

pub fn print(setup: &Setup, rounds: usize, lines: &mut [Line]) {
    println!(
        "\nBlocks of {} KiB, {} MiB of memory, {} MiB of disk; medians (least to most) of {rounds} rounds. GiB/s of what was kept, processor \
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
                of(written, |of| of.kept_share * 100.0)
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
        "\n| mixed, Zipf | written on insertion: hits: memory + disk, GiB/s asked, s/GiB | written on eviction |"
    );
    println!("| --- | --- | --- |");
    for line in &*lines {
        print!("| {} |", line.name);
        for rounds in &line.mixed {
            let share = |value: fn(&Found) -> usize| {
                Spread::of(rounds.iter().map(|(_, found)| {
                    let all = found.memory + found.disk + found.missed;
                    value(found) as f64 / all as f64 * 100.0
                }))
            };
            print!(
                " {:.1} %: {:.1} + {:.1}, {:.2}, {:.2} |",
                share(|found| found.memory + found.disk),
                share(|found| found.memory),
                share(|found| found.disk),
                Spread::of(rounds.iter().map(|(of, _)| of.gib_per_second)),
                Spread::of(rounds.iter().map(|(of, _)| of.processor_seconds_per_gib))
            );
        }
        println!();
    }
}

#[cfg(test)]
mod tests {
    use super::Spread;

    #[test]
    fn the_median_of_an_even_number_lies_between_the_middles() {
        let of = |values: &[f64]| Spread::of(values.iter().copied());
        assert_eq!(of(&[9.0, 1.0, 2.0]), Spread { median: 2.0, least: 1.0, most: 9.0 });
        assert_eq!(of(&[9.0, 1.0, 2.0, 4.0]), Spread { median: 3.0, least: 1.0, most: 9.0 });
        assert_eq!(of(&[5.0]).to_string(), "5.00 (5.00 to 5.00)");
    }
}
