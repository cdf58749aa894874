//! The verdicts on a run, as functions of the samples and totals.
//!
//! The first quarter warms up: allocators, the store's tables and the first round of the disk fill. After it no
//! figure may grow: memory is judged by the slope of a straight line through the samples, over time and over
//! blocks, the rest by its largest value.

use super::watch::Sample;

const MIB: f64 = (1_u64 << 20) as f64;
/// Memory may grow by this or by [`GROWTH_SHARE`], whichever is more.
const GROWTH_BYTES: f64 = 16.0 * MIB;
const GROWTH_SHARE: f64 = 0.02;
/// Most growth of memory per block copied in or out, judged once there are enough blocks that noise is smaller.
const GROWTH_BYTES_PER_BLOCK: f64 = 96.0;
const BLOCKS_MIN: u64 = 10_000;
/// Shared memory besides the slabs.
const SHARED_SLACK_BYTES: u64 = 1 << 20;
/// The folder's lock, and the file system's metadata of a large file.
pub(super) const FOLDER_SLACK_BYTES: u64 = 1 << 20;

/// Facts that the judge needs besides the samples.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RunTotals {
    /// Most bytes that the disk tier may use, its log's tables included.
    pub(super) disk_bytes: u64,
    /// Bytes of these that are not slots.
    pub(super) table_bytes: u64,
    /// Bytes of all slabs.
    pub(super) slab_bytes: u64,
    /// Bytes that should pass.
    pub(super) data_bytes: u64,
    /// Distinct bytes that passed.
    pub(super) distinct_bytes: u64,
    /// Blocks evicted from the disk, and blocks read from it.
    pub(super) disk_evicted: u64,
    pub(super) disk_read: u64,
    /// Blocks whose every byte was compared.
    pub(super) verified: u64,
    pub(super) wrong_bytes: u64,
    /// Blocks that the store itself found damaged.
    pub(super) damaged: u64,
    /// Requests that were never answered.
    pub(super) unanswered: u64,
    /// Leases and slots still in use at the end.
    pub(super) leased: u64,
    pub(super) slots_used: u64,
    /// Seconds until no lease and no slot was in use.
    pub(super) rest_s: f64,
}

/// One verdict.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Verdict {
    pub(super) name: &'static str,
    pub(super) is_ok: bool,
    pub(super) text: String,
}

impl Verdict {
    pub(super) fn line(&self) -> String {
        format!("{:<6} {}: {}", if self.is_ok { "ok" } else { "FAILED" }, self.name, self.text)
    }
}

/// Judges a run. `samples` are in the order of time, and not empty.
pub(super) fn judge(samples: &[Sample], totals: &RunTotals) -> Vec<Verdict> {
    let end = samples.last().map_or(0.0, |sample| sample.at.as_secs_f64());
    let warm = samples.iter().position(|sample| sample.at.as_secs_f64() >= end / 4.0).unwrap_or(0);
    let warm = &samples[warm..];
    vec![
        memory(warm),
        memory_per_block(warm),
        shared(samples, totals),
        leases(totals),
        files(samples, totals),
        flat("descriptors", warm, |sample| sample.descriptors),
        flat("threads", warm, |sample| sample.threads),
        bytes(totals),
        turnover(totals),
    ]
}

fn memory(warm: &[Sample]) -> Verdict {
    let points: Vec<(f64, f64)> =
        warm.iter().map(|sample| (sample.at.as_secs_f64(), sample.anonymous_bytes as f64)).collect();
    let (start, slope) = line_through(&points);
    let span = match (points.first(), points.last()) {
        (Some(first), Some(last)) => last.0 - first.0,
        _ => 0.0,
    };
    let growth = slope * span;
    let most = GROWTH_BYTES.max(start * GROWTH_SHARE);
    Verdict {
        name: "memory",
        is_ok: points.len() >= 3 && growth <= most,
        text: format!(
            "own memory {:.1} MiB after the warm-up, {:+.1} MiB since ({:+.1} KiB/s over {} \
             samples); up to {:.1} are allowed",
            start / MIB,
            growth / MIB,
            slope / 1024.0,
            points.len(),
            most / MIB
        ),
    }
}

fn memory_per_block(warm: &[Sample]) -> Verdict {
    let name = "memory per block";
    let of = |sample: Option<&Sample>| sample.map_or(0, |sample| sample.operations);
    let blocks = of(warm.last()) - of(warm.first());
    if blocks < BLOCKS_MIN {
        let text = format!("skipped: {blocks} blocks after the warm-up, and {BLOCKS_MIN} are needed");
        return Verdict { name, is_ok: true, text };
    }
    let points: Vec<(f64, f64)> =
        warm.iter().map(|sample| (sample.operations as f64, sample.anonymous_bytes as f64)).collect();
    let (_, slope) = line_through(&points);
    Verdict {
        name,
        is_ok: slope <= GROWTH_BYTES_PER_BLOCK,
        text: format!(
            "own memory {slope:+.1} bytes for each of {blocks} blocks copied in or out after the warm-up; up to \
             {GROWTH_BYTES_PER_BLOCK} are allowed"
        ),
    }
}

/// Value at the first point, and slope, of the least-squares line.
fn line_through(points: &[(f64, f64)]) -> (f64, f64) {
    let count = points.len().max(1) as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let over: f64 = points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum();
    let under: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
    let slope = if under > 0.0 { over / under } else { 0.0 };
    (y + slope * (points.first().map_or(x, |first| first.0) - x), slope)
}

fn shared(samples: &[Sample], totals: &RunTotals) -> Verdict {
    let most = largest(samples, |sample| sample.shared_bytes);
    Verdict {
        name: "shared memory",
        is_ok: most <= totals.slab_bytes + SHARED_SLACK_BYTES,
        text: format!(
            "at most {:.1} MiB; the slabs have {:.1}",
            most as f64 / MIB,
            totals.slab_bytes as f64 / MIB
        ),
    }
}

fn leases(totals: &RunTotals) -> Verdict {
    Verdict {
        name: "leases",
        is_ok: totals.leased == 0 && totals.slots_used == 0,
        text: format!(
            "{} slots of host memory leased and {} of the pool used, {:.1} s after the work ended",
            totals.leased, totals.slots_used, totals.rest_s
        ),
    }
}

fn files(samples: &[Sample], totals: &RunTotals) -> Verdict {
    let (length, allocated) =
        (largest(samples, |sample| sample.file_bytes), largest(samples, |sample| sample.allocated_bytes));
    let most = totals.disk_bytes + FOLDER_SLACK_BYTES;
    Verdict {
        name: "files",
        is_ok: length <= most && allocated <= most,
        text: format!(
            "at most {length} bytes long and {allocated} allocated; {} are the tier's, {} of them not its \
             slots: the log's tables, and the rest",
            totals.disk_bytes, totals.table_bytes
        ),
    }
}

fn flat(name: &'static str, warm: &[Sample], of: fn(&Sample) -> u64) -> Verdict {
    let (first, most) = (warm.first().map_or(0, of), largest(warm, of));
    Verdict { name, is_ok: most <= first, text: format!("{first} after the warm-up, at most {most} since") }
}

fn bytes(totals: &RunTotals) -> Verdict {
    let RunTotals { verified, wrong_bytes, damaged, unanswered, .. } = *totals;
    Verdict {
        name: "bytes",
        is_ok: verified > 0 && wrong_bytes + damaged + unanswered == 0,
        text: format!(
            "{wrong_bytes} wrong in {verified} blocks that were compared; {damaged} found damaged by the store, \
             {unanswered} requests without an answer"
        ),
    }
}

fn turnover(totals: &RunTotals) -> Verdict {
    let RunTotals { data_bytes, distinct_bytes, disk_evicted, disk_read, .. } = *totals;
    Verdict {
        name: "turnover",
        is_ok: distinct_bytes >= data_bytes && disk_evicted > 0 && disk_read > 0,
        text: format!(
            "{distinct_bytes} distinct bytes passed of {data_bytes} wanted; {disk_evicted} blocks left the disk, \
             {disk_read} came back from it"
        ),
    }
}

fn largest(samples: &[Sample], of: fn(&Sample) -> u64) -> u64 {
    samples.iter().map(of).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const GOOD: RunTotals = RunTotals {
        disk_bytes: 10 << 30,
        table_bytes: 1 << 20,
        slab_bytes: 2 << 30,
        data_bytes: 24 << 30,
        distinct_bytes: 24 << 30,
        disk_evicted: 1,
        disk_read: 1,
        verified: 1,
        wrong_bytes: 0,
        damaged: 0,
        unanswered: 0,
        leased: 0,
        slots_used: 0,
        rest_s: 0.1,
    };

    fn samples(change: impl Fn(f64, &mut Sample)) -> Vec<Sample> {
        let sample = |number: u64| {
            let mut sample = Sample {
                at: Duration::from_secs(number),
                operations: number * 10_000,
                // Noise of 4 MiB.
                anonymous_bytes: (100 << 20) + ((number % 5) << 20),
                shared_bytes: 2 << 30,
                descriptors: 20,
                threads: 9,
                file_bytes: 10 << 30,
                allocated_bytes: 10 << 30,
            };
            change(number as f64 / 100.0, &mut sample);
            sample
        };
        (0..=100).map(sample).collect()
    }

    fn failed(samples: &[Sample], totals: &RunTotals) -> Vec<&'static str> {
        judge(samples, totals)
            .into_iter()
            .filter(|verdict| !verdict.is_ok)
            .map(|verdict| verdict.name)
            .collect()
    }

    #[test]
    fn what_is_flat_passes_and_so_does_what_grew_while_it_warmed_up() {
        assert_eq!(failed(&samples(|_, _| {}), &GOOD), [""; 0]);
        let warming = samples(|at, sample| {
            sample.anonymous_bytes -= ((0.25 - at).max(0.0) * 200.0 * MIB) as u64;
            sample.descriptors -= u64::from(at < 0.2);
        });
        assert_eq!(failed(&warming, &GOOD), [""; 0]);
    }

    #[test]
    fn each_growth_is_found_and_named() {
        type Change = fn(f64, &mut Sample);
        let cases: [(&str, Change); 6] = [
            // 32 MiB in all, 24 of them after the warm-up: hidden from first and last by the noise, not from a line.
            ("memory", |at, sample| sample.anonymous_bytes += (at * 32.0 * MIB) as u64),
            ("shared memory", |at, sample| sample.shared_bytes += (at * 2.0 * MIB) as u64),
            ("files", |at, sample| sample.file_bytes += (at * 2.0 * MIB) as u64),
            ("files", |at, sample| sample.allocated_bytes += (at * 2.0 * MIB) as u64),
            ("descriptors", |at, sample| sample.descriptors += u64::from(at > 0.9)),
            ("threads", |at, sample| sample.threads += u64::from(at == 0.5)),
        ];
        for (name, change) in cases {
            assert_eq!(failed(&samples(change), &GOOD), [name]);
        }
        // 15 MiB in 100,000 blocks: no more than may be in all.
        let dripping = samples(|at, sample| {
            sample.operations = (at * 1e5) as u64;
            sample.anonymous_bytes += (at * 15.0 * MIB) as u64;
        });
        assert_eq!(failed(&dripping, &GOOD), ["memory per block"]);
        // The same growth over too few blocks to judge.
        let few = samples(|at, sample| {
            sample.operations = (at * 1e4) as u64;
            sample.anonymous_bytes += (at * 15.0 * MIB) as u64;
        });
        assert_eq!(failed(&few, &GOOD), [""; 0]);
        let verdicts = judge(&few, &GOOD);
        assert!(verdicts.iter().any(|of| of.name == "memory per block" && of.text.starts_with("skipped: ")));
        assert_eq!(failed(&samples(|_, _| {})[..2], &GOOD), ["memory"], "two samples show nothing");
    }

    #[test]
    fn each_bad_fact_is_found_and_named() {
        let flat = samples(|_, _| {});
        for (name, totals) in [
            ("leases", RunTotals { leased: 1, ..GOOD }),
            ("leases", RunTotals { slots_used: 1, ..GOOD }),
            ("bytes", RunTotals { wrong_bytes: 1, ..GOOD }),
            ("bytes", RunTotals { damaged: 1, ..GOOD }),
            ("bytes", RunTotals { unanswered: 1, ..GOOD }),
            ("bytes", RunTotals { verified: 0, ..GOOD }),
            ("turnover", RunTotals { distinct_bytes: GOOD.data_bytes - 1, ..GOOD }),
            ("turnover", RunTotals { disk_evicted: 0, ..GOOD }),
            ("turnover", RunTotals { disk_read: 0, ..GOOD }),
        ] {
            assert_eq!(failed(&flat, &totals), [name], "{totals:?}");
        }
    }
}
