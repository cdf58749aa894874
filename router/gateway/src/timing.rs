//! Histograms of durations.
//!
//! Hot path: three relaxed additions, no lock (the histogram of `prometheus-client` takes one), no
//! allocation. A concurrent reader may see a count without its sum for a moment.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use serde_json::{Value, json};

/// Bucket bounds in seconds, from half a millisecond to a minute: times that clients wait.
pub(crate) const ANSWERS: &[f64] = &[
    0.0005, 0.001, 0.0015, 0.0025, 0.004, 0.006, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.15, 0.25, 0.4, 0.6,
    1.0, 1.5, 2.5, 4.0, 6.0, 10.0, 15.0, 30.0, 60.0,
];
/// Bucket bounds in seconds, from half a microsecond to twenty milliseconds: times of the gateway's own
/// work.
pub(crate) const DECISIONS: &[f64] = &[
    0.5e-6, 1e-6, 1.5e-6, 2e-6, 3e-6, 4e-6, 5e-6, 7e-6, 10e-6, 15e-6, 20e-6, 50e-6, 100e-6, 500e-6, 2e-3,
    20e-3,
];

/// A histogram of durations. Clones share their counts.
#[derive(Clone)]
pub(crate) struct Timing(Arc<Counts>);

struct Counts {
    /// Upper bounds of the buckets, in seconds.
    bounds: &'static [f64],
    /// One more than bounds: the last bucket has no upper bound.
    counts: Box<[AtomicU64]>,
    nanoseconds: AtomicU64,
}

impl Timing {
    pub(crate) fn new(bounds: &'static [f64]) -> Self {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self(Arc::new(Counts { bounds, counts, nanoseconds: AtomicU64::new(0) }))
    }

    pub(crate) fn observe(&self, took: Duration) {
        let seconds = took.as_secs_f64();
        let bucket = self.0.bounds.partition_point(|&bound| bound < seconds);
        self.0.counts[bucket].fetch_add(1, Ordering::Relaxed);
        self.0.nanoseconds.fetch_add(took.as_nanos() as u64, Ordering::Relaxed);
    }

    fn counts(&self) -> Vec<u64> {
        self.0.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect()
    }

    fn seconds(&self) -> f64 {
        self.0.nanoseconds.load(Ordering::Relaxed) as f64 / 1e9
    }

    /// Returns the form shown in the status: counts by bucket, not cumulative.
    pub(crate) fn to_json(&self) -> Value {
        let counts = self.counts();
        json!({
            "le": self.0.bounds, "count": counts.iter().sum::<u64>(), "sum": self.seconds(), "counts": counts,
        })
    }
}

impl fmt::Debug for Timing {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Timing").field("counts", &self.counts()).finish_non_exhaustive()
    }
}

impl EncodeMetric for Timing {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let counts = self.counts();
        let bounds = self.0.bounds.iter().copied().chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds.zip(counts.iter().copied()).collect();
        encoder.encode_histogram::<NoLabelSet>(self.seconds(), counts.iter().sum(), &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Histogram
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_in_the_bucket_whose_end_they_do_not_pass() {
        let timing = Timing::new(&[0.001, 0.01]);
        for micros in [1, 1000, 1001, 10_000, 10_001, 5_000_000] {
            timing.observe(Duration::from_micros(micros));
        }
        assert_eq!(timing.counts(), [2, 2, 2]);
        let shown = timing.to_json();
        assert_eq!((shown["count"].as_u64(), shown["le"].as_array().map(Vec::len)), (Some(6), Some(2)));
        assert!((shown["sum"].as_f64().expect("a sum") - 5.022_003).abs() < 1e-6);
        let mut registry = prometheus_client::registry::Registry::default();
        registry.register("took_seconds", "How long", timing.clone());
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).expect("text");
        for line in [
            "# TYPE took_seconds histogram",
            "took_seconds_bucket{le=\"0.001\"} 2",
            "took_seconds_bucket{le=\"0.01\"} 4",
            "took_seconds_bucket{le=\"+Inf\"} 6",
            "took_seconds_count 6",
        ] {
            assert!(text.contains(line), "{line}\n{text}");
        }
    }
}
