//! Results as text lines and as rows.

use serde::Serialize;

use super::sizes::human;
use crate::results::{self, Better};

/// One result. Fields that do not apply to a test are `None` and left out of the JSON.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Record {
    /// `bw`, `rate`, `lat` or `post`.
    pub test: &'static str,
    /// Name of the transport, as the fabric reports it.
    pub transport: String,
    /// `write`, `read`, `send`, `write-imm`.
    pub op: &'static str,
    /// Bytes of a piece.
    pub bytes: u64,
    /// Pieces of a batch.
    pub batch: u32,
    /// Batches in flight.
    pub depth: u32,
    /// Number of connections.
    pub rails: u32,
    /// Number of rounds, or of round trips.
    pub rounds: u64,
    /// Figure of each round: bytes per second, or nanoseconds of a descriptor. None for latencies.
    #[serde(skip)]
    pub values: Vec<f64>,
    /// Median bytes per second over rounds, both directions together.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_per_s: Option<f64>,
    /// Bytes per second of the best round.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best_bytes_per_s: Option<f64>,
    /// Median messages per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub messages_per_s: Option<f64>,
    /// Bytes per second of arrivals at the target, by its own clock.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_bytes_per_s: Option<f64>,
    /// Median latency in microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p50_us: Option<f64>,
    /// 99th percentile of the latency.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p99_us: Option<f64>,
    /// 99.9th percentile of the latency.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p99_9_us: Option<f64>,
    /// Shortest latency.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_us: Option<f64>,
    /// Mean latency.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mean_us: Option<f64>,
    /// Standard deviation of the latency.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deviation_us: Option<f64>,
    /// Longest latency.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_us: Option<f64>,
    /// Sends per second under open-loop load. The latency is then a whole round trip from the scheduled time.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub load_per_s: Option<u32>,
    /// Nanoseconds for posting a descriptor, its doorbells included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub post_ns: Option<f64>,
    /// Nanoseconds for building a request, before it is posted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub make_ns: Option<f64>,
    /// Number of doorbells for all descriptors.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub doorbells: Option<u64>,
    /// Allocations of the posting thread for all descriptors, if the program counts them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allocations: Option<u64>,
    /// Name of the peer measured in the same run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<&'static str>,
    /// The peer's figure: bytes per second, or microseconds at the median.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer_figure: Option<f64>,
    /// Our figure divided by the peer's: above 1 is faster for bandwidth, slower for latency.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
    /// Number of wrong bytes, if they were compared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wrong_bytes: Option<u64>,
}

impl Record {
    /// Renders the result as one line.
    #[must_use]
    pub fn line(&self) -> String {
        let mut line =
            format!("{:<5} {:<4} {:<9} {:>8}", self.transport, self.test, self.op, human(self.bytes));
        if let Some(rate) = self.bytes_per_s {
            line += &format!("  {:>8.3} GB/s", rate / 1e9);
        }
        if let Some(rate) = self.messages_per_s {
            line += &format!("  {:>8.3} Mmsg/s", rate / 1e6);
        }
        if let Some(rate) = self.target_bytes_per_s {
            line += &format!("  at target {:>8.3} GB/s", rate / 1e9);
        }
        if let (Some(p50), Some(p99), Some(p99_9), Some(max)) =
            (self.p50_us, self.p99_us, self.p99_9_us, self.max_us)
        {
            line += &format!("  p50 {p50:.2} p99 {p99:.2} p99.9 {p99_9:.2} max {max:.2} us");
        }
        if let Some(load) = self.load_per_s {
            line += &format!("  round trip at {load}/s");
        }
        if let (Some(post), Some(make)) = (self.post_ns, self.make_ns) {
            line += &format!("  post {post:.1} ns, make {make:.1} ns a descriptor");
            line += &format!(", {} doorbells", self.doorbells.unwrap_or(0));
            line += &self.allocations.map_or(String::new(), |count| format!(", {count} allocations"));
        }
        if let (Some(peer), Some(ratio)) = (self.peer, self.ratio) {
            let unit = if self.bytes_per_s.is_some() { 1e9 } else { 1.0 };
            line += &format!("  {peer} {:>8.3}  ratio {ratio:.3}", self.peer_figure.unwrap_or(0.0) / unit);
        }
        match self.wrong_bytes {
            Some(0) => line += "  bytes right",
            Some(wrong) => line += &format!("  {wrong} BYTES WRONG"),
            None => {}
        }
        line
    }

    /// Adds the result to those of the run.
    pub(super) fn add(&self) {
        let shape =
            format!("{} x {}, depth {}, {} rails", human(self.bytes), self.batch, self.depth, self.rails);
        let load = self.load_per_s.map_or(String::new(), |load| format!(", {load}/s"));
        let name = format!("{} {} {}, {shape}{load}", self.transport, self.test, self.op);
        let details = serde_json::to_value(self).unwrap_or_default();
        match (self.bytes_per_s, self.min_us, self.mean_us, self.deviation_us) {
            (Some(_), ..) => {
                let values: Vec<f64> = self.values.iter().map(|value| value / 1e9).collect();
                results::add_with("transfer", &name, ("GB/s", Better::Higher), &values, details);
            }
            (_, Some(min), Some(mean), Some(deviation)) => {
                let at = |value: Option<f64>| value.unwrap_or(0.0);
                results::add_summary(
                    ("transfer", &name),
                    results::Summary {
                        samples: self.rounds,
                        min,
                        mean,
                        deviation,
                        p50: at(self.p50_us),
                        p99: at(self.p99_us),
                        p99_9: at(self.p99_9_us),
                        max: at(self.max_us),
                    },
                    details,
                );
            }
            _ => results::add_with(
                "transfer",
                &name,
                ("ns a descriptor", Better::Lower),
                &self.values,
                details,
            ),
        }
    }
}
