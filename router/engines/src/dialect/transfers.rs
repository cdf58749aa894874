//! Hand-offs of blocks as engines report them: `kvasir_transfer_*` and `kvasir_rail_*` of the reference engine,
//! `vllm:kvasir_handoff_*` and `vllm:kvasir_rail_*` of vLLM with KvasirConnector.

use std::collections::BTreeMap;

use serde::Serialize;

use super::prometheus::{Metrics, Sample};

/// Limits of data-parallel ranks, rails, stages, bounds and name lengths that are read: an engine's text is not trusted.
const RANKS_MAX: usize = 1024;
const RAILS_MAX: usize = 64;
const STAGES_MAX: usize = 16;
const BOUNDS_MAX: usize = 64;
const NAME_BYTES_MAX: usize = 64;

/// Hand-offs of one rank of an engine since it started.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct TransferReport {
    /// Bytes of blocks written to peers.
    pub bytes_sent: u64,
    /// Blocks received and verified.
    pub blocks_received: u64,
    /// Transfers received whole.
    pub completed: u64,
    /// Transfers that ended with blocks missing.
    pub incomplete: u64,
    /// Transfers that either side cancelled.
    pub cancelled: u64,
    /// Transfers that no receiver asked for in time.
    pub leases_expired: u64,
    /// Pieces whose checksum did not match.
    pub checksum_failures: u64,
    /// Connections to peers that ended.
    pub peers_lost: u64,
    /// Transports of the engine, by name.
    pub rails: Vec<RailReport>,
    /// Durations of the parts of hand-offs; empty when the engine does not report them.
    pub stages: Vec<StageReport>,
}

/// One transport of an engine.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct RailReport {
    /// `shm`, `tcp` or `rdma DEVICE`.
    pub name: String,
    /// Bytes of blocks that the rail has written or read.
    pub bytes: u64,
    /// Slices posted again because a connection had failed.
    pub retries: u64,
    /// Connections that ended while their peer continued over others.
    pub failures: u64,
    /// Smoothed time per KiB, queue included; 0 when no peer has several rails.
    pub nanoseconds_per_kib: u64,
    /// Whether the rail takes three times as long as the best one of equal preference.
    pub is_slow: bool,
}

/// Times of one part of hand-offs.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct StageReport {
    /// `reserve`, `first_part`, `verify`, `whole`, `write`, `sum` or `finish`.
    pub stage: String,
    /// Upper bounds in seconds, rising.
    pub le: Vec<f64>,
    /// Counts by bucket, not cumulative; one more than bounds.
    pub counts: Vec<u64>,
    /// Sum of all durations, in seconds.
    pub sum: f64,
}

/// Names of an engine's metrics.
pub(super) struct Names {
    /// Prefix of counters, as `kvasir_transfer_`.
    pub(super) prefix: &'static str,
    /// Suffix of counters.
    pub(super) suffix: &'static str,
    /// Names of the counters of complete, incomplete and cancelled transfers.
    pub(super) ends: [&'static str; 3],
    /// Prefix of rails' counters.
    pub(super) rail_prefix: &'static str,
}

/// Names of the reference engine.
pub(super) const NATIVE: Names = Names {
    prefix: "kvasir_transfer_",
    suffix: "_total",
    ends: ["completed", "incomplete", "cancelled"],
    rail_prefix: "kvasir_rail_",
};

/// Names of vLLM. A process's counts are gauges there, with a label for the process.
pub(super) const VLLM: Names = Names {
    prefix: "vllm:kvasir_handoff_",
    suffix: "",
    ends: ["transfers_completed", "transfers_incomplete", "transfers_cancelled"],
    rail_prefix: "vllm:kvasir_rail_",
};

type SetCount = fn(&mut TransferReport) -> &mut u64;
type SetRail = fn(&mut RailReport, u64);

/// Reports by rank, each the sum over the rank's processes; empty when the engine has no hand-offs.
pub(super) fn reports(metrics: &Metrics<'_>, names: &Names) -> Vec<TransferReport> {
    // Fast path: most engines have no hand-offs.
    if !metrics.has_prefix(names.prefix) && !metrics.has_prefix(names.rail_prefix) {
        return Vec::new();
    }
    let mut reports: Vec<TransferReport> = Vec::new();
    let [completed, incomplete, cancelled] = names.ends;
    let counts: [(&str, SetCount); 8] = [
        ("bytes_sent", |report| &mut report.bytes_sent),
        ("blocks_received", |report| &mut report.blocks_received),
        (completed, |report| &mut report.completed),
        (incomplete, |report| &mut report.incomplete),
        (cancelled, |report| &mut report.cancelled),
        ("leases_expired", |report| &mut report.leases_expired),
        ("checksum_failures", |report| &mut report.checksum_failures),
        ("peers_lost", |report| &mut report.peers_lost),
    ];
    for (name, count) in counts {
        for sample in metrics.samples(&format!("{}{name}{}", names.prefix, names.suffix)) {
            if let Some(report) = of_rank(&mut reports, &sample) {
                let count = count(report);
                *count = count.saturating_add(sample.value as u64);
            }
        }
    }
    let rails: [(&str, &str, SetRail); 5] = [
        ("block_bytes", names.suffix, |rail, value| rail.bytes = rail.bytes.saturating_add(value)),
        ("slices_retried", names.suffix, |rail, value| rail.retries = rail.retries.saturating_add(value)),
        ("links_failed", names.suffix, |rail, value| rail.failures = rail.failures.saturating_add(value)),
        // Maximum over a rank's processes.
        ("nanoseconds_per_kib", "", |rail, value| {
            rail.nanoseconds_per_kib = rail.nanoseconds_per_kib.max(value)
        }),
        ("slow", "", |rail, value| rail.is_slow |= value > 0),
    ];
    for (name, suffix, set) in rails {
        for sample in metrics.samples(&format!("{}{name}{suffix}", names.rail_prefix)) {
            let Some(report) = of_rank(&mut reports, &sample) else { continue };
            if let Some(rail) = sample.label("rail").and_then(|name| of_rail(report, name)) {
                set(rail, sample.value as u64);
            }
        }
    }
    for (rank, stages) in stages(metrics, &format!("{}stage_seconds", names.prefix)) {
        if let Some(report) = reports.get_mut(rank) {
            report.stages = stages;
        }
    }
    reports
}

fn rank_of(sample: &Sample<'_>) -> Option<usize> {
    let rank = sample.label("engine").and_then(|rank| rank.parse().ok()).unwrap_or(0_usize);
    (rank < RANKS_MAX).then_some(rank)
}

fn of_rank<'a>(reports: &'a mut Vec<TransferReport>, sample: &Sample<'_>) -> Option<&'a mut TransferReport> {
    let rank = rank_of(sample)?;
    if reports.len() <= rank {
        reports.resize_with(rank + 1, TransferReport::default);
    }
    reports.get_mut(rank)
}

fn of_rail<'a>(report: &'a mut TransferReport, name: &str) -> Option<&'a mut RailReport> {
    let rails = &mut report.rails;
    if let Some(index) = rails.iter().position(|rail| rail.name == name) {
        return rails.get_mut(index);
    }
    if rails.len() == RAILS_MAX || name.len() > NAME_BYTES_MAX {
        return None;
    }
    rails.push(RailReport { name: name.to_owned(), ..RailReport::default() });
    rails.last_mut()
}

/// Partial histogram of one stage of one rank: cumulative counts by the bits of their bounds, which have the order of the
/// positive numbers.
#[derive(Default)]
struct Buckets {
    cumulative: BTreeMap<u64, u64>,
    sum: f64,
}

/// Histograms by rank and stage from Prometheus' cumulative buckets, each the sum over the rank's processes. A histogram
/// whose counts do not rise, or that has no last bucket, is left out.
fn stages(metrics: &Metrics<'_>, name: &str) -> BTreeMap<usize, Vec<StageReport>> {
    let mut found: BTreeMap<usize, Vec<(&str, Buckets)>> = BTreeMap::new();
    for (suffix, is_bucket) in [("_bucket", true), ("_sum", false)] {
        let sample_name = format!("{name}{suffix}");
        for sample in metrics.samples(&sample_name) {
            let Some((rank, stage)) = rank_of(&sample).zip(sample.label("stage")) else { continue };
            let of_rank = found.entry(rank).or_default();
            let index = of_rank.iter().position(|(known, _)| *known == stage);
            let index = match index {
                Some(index) => index,
                None if of_rank.len() == STAGES_MAX || stage.len() > NAME_BYTES_MAX => continue,
                None => {
                    of_rank.push((stage, Buckets::default()));
                    of_rank.len() - 1
                }
            };
            let buckets = &mut of_rank[index].1;
            if !is_bucket {
                buckets.sum += sample.value;
                continue;
            }
            let le = sample.label("le").and_then(|le| match le {
                "+Inf" => Some(f64::INFINITY),
                le => le.parse().ok(),
            });
            let Some(le) = le.filter(|le: &f64| *le > 0.0).map(f64::to_bits) else { continue };
            if buckets.cumulative.len() <= BOUNDS_MAX || buckets.cumulative.contains_key(&le) {
                let count = buckets.cumulative.entry(le).or_default();
                *count = count.saturating_add(sample.value as u64);
            }
        }
    }
    let histogram = |(stage, Buckets { cumulative, sum }): (&str, Buckets)| {
        let (bounds, totals): (Vec<f64>, Vec<u64>) =
            cumulative.into_iter().map(|(le, count)| (f64::from_bits(le), count)).unzip();
        let (last, le) = bounds.split_last()?;
        if last.is_finite() || !totals.is_sorted() {
            return None;
        }
        let mut before = 0;
        let counts = totals.iter().map(|count| count - std::mem::replace(&mut before, *count)).collect();
        let sum = if sum.is_finite() { sum } else { 0.0 };
        Some(StageReport { stage: stage.to_owned(), le: le.to_vec(), counts, sum })
    };
    found
        .into_iter()
        .map(|(rank, stages)| (rank, stages.into_iter().filter_map(histogram).collect()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_engine_reports_counters_rails_and_stages() {
        let text = "kvasir_transfer_bytes_sent_total 4096\nkvasir_transfer_completed_total 3\n\
                    kvasir_rail_block_bytes_total{rail=\"tcp\"} 96\nkvasir_rail_block_bytes_total{rail=\"rdma mlx5_0\"} 4000\n\
                    kvasir_rail_slow{rail=\"tcp\"} 1\nkvasir_rail_nanoseconds_per_kib{rail=\"tcp\"} 81\n\
                    kvasir_rail_slices_retried_total{rail=\"tcp\"} 2\n\
                    kvasir_transfer_stage_seconds_bucket{stage=\"verify\",le=\"0.1\"} 2\n\
                    kvasir_transfer_stage_seconds_bucket{stage=\"verify\",le=\"0.2\"} 2\n\
                    kvasir_transfer_stage_seconds_bucket{stage=\"verify\",le=\"+Inf\"} 5\n\
                    kvasir_transfer_stage_seconds_sum{stage=\"verify\"} 1.5\n\
                    kvasir_transfer_stage_seconds_bucket{stage=\"odd\",le=\"-Inf\"} 0\n\
                    kvasir_transfer_stage_seconds_bucket{stage=\"odd\",le=\"NaN\"} 0\n\
                    kvasir_transfer_stage_seconds_bucket{stage=\"broken\",le=\"0.2\"} 2\n\
                    kvasir_transfer_stage_seconds_bucket{stage=\"broken\",le=\"0.1\"} 2\n";
        let found = reports(&Metrics::parse(text), &NATIVE);
        let [report] = &found[..] else { panic!("{found:?}") };
        assert_eq!((report.bytes_sent, report.completed, report.incomplete), (4096, 3, 0));
        let [tcp, rdma] = &report.rails[..] else { panic!("{:?}", report.rails) };
        let expected = RailReport {
            name: "tcp".to_owned(),
            bytes: 96,
            retries: 2,
            failures: 0,
            nanoseconds_per_kib: 81,
            is_slow: true,
        };
        assert_eq!(*tcp, expected);
        assert_eq!((rdma.name.as_str(), rdma.bytes, rdma.is_slow), ("rdma mlx5_0", 4000, false));
        let verify =
            StageReport { stage: "verify".to_owned(), le: vec![0.1, 0.2], counts: vec![2, 0, 3], sum: 1.5 };
        assert_eq!(report.stages, [verify]);
    }

    #[test]
    fn processes_of_a_rank_of_vllm_are_summed() {
        let text = "vllm:kvasir_handoff_bytes_sent{engine=\"0\",worker=\"0\"} 10.0\n\
                    vllm:kvasir_handoff_bytes_sent{engine=\"0\",worker=\"1\"} 5.0\n\
                    vllm:kvasir_handoff_bytes_sent{engine=\"1\",worker=\"2\"} 7.0\n\
                    vllm:kvasir_handoff_transfers_completed{engine=\"1\",worker=\"2\"} 1.0\n\
                    vllm:kvasir_rail_block_bytes{engine=\"0\",worker=\"0\",rail=\"shm\"} 10.0\n\
                    vllm:kvasir_rail_block_bytes{engine=\"0\",worker=\"1\",rail=\"shm\"} 5.0\n\
                    vllm:kvasir_handoff_stage_seconds_bucket{engine=\"0\",le=\"+Inf\",stage=\"write\",worker=\"0\"} 3.0\n\
                    vllm:kvasir_handoff_stage_seconds_bucket{engine=\"0\",le=\"1.6e-05\",stage=\"write\",worker=\"0\"} 1.0\n\
                    vllm:kvasir_handoff_stage_seconds_bucket{engine=\"0\",le=\"1.6e-05\",stage=\"write\",worker=\"1\"} 2.0\n\
                    vllm:kvasir_handoff_stage_seconds_bucket{engine=\"0\",le=\"+Inf\",stage=\"write\",worker=\"1\"} 2.0\n\
                    vllm:kvasir_handoff_stage_seconds_sum{engine=\"0\",stage=\"write\",worker=\"0\"} 0.25\n\
                    vllm:kvasir_handoff_stage_seconds_sum{engine=\"0\",stage=\"write\",worker=\"1\"} 0.5\n\
                    vllm:kvasir_handoff_stage_seconds_bucket{engine=\"1\",le=\"+Inf\",stage=\"whole\",worker=\"2\"} 1.0\n";
        let found = reports(&Metrics::parse(text), &VLLM);
        let [first, second] = &found[..] else { panic!("{found:?}") };
        assert_eq!((first.bytes_sent, second.bytes_sent, second.completed), (15, 7, 1));
        assert_eq!((first.rails.len(), first.rails[0].bytes), (1, 15));
        let write =
            StageReport { stage: "write".to_owned(), le: vec![1.6e-5], counts: vec![3, 2], sum: 0.75 };
        assert_eq!(first.stages, [write]);
        assert_eq!((second.stages[0].stage.as_str(), &second.stages[0].counts[..]), ("whole", &[1][..]));
        assert!(reports(&Metrics::parse("vllm:num_requests_running 1\n"), &VLLM).is_empty());
    }

    #[test]
    fn what_an_engine_makes_up_is_bounded() {
        let mut text = "kvasir_transfer_bytes_sent_total{engine=\"4000000000\"} 1\n".to_owned();
        for index in 0..1000 {
            text += &format!("kvasir_rail_slow{{rail=\"{index}\"}} 1\n");
            text += &format!("kvasir_transfer_stage_seconds_bucket{{stage=\"{index}\",le=\"+Inf\"}} 1\n");
        }
        let found = reports(&Metrics::parse(&text), &NATIVE);
        assert_eq!((found[0].rails.len(), found[0].stages.len()), (RAILS_MAX, STAGES_MAX));
        assert_eq!(found[0].bytes_sent, 0);
    }
}
