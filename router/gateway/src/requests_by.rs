//! Number of answered requests, by surface and status.
//!
//! Hot path: one relaxed addition; the labels are made when the metrics are read.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::http::StatusCode;
use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use router_openai::Surface;

/// Statuses from 100 on.
const STATUSES: usize = 500;

/// Counters by surface and status. Clones share them.
#[derive(Clone)]
pub(crate) struct RequestCounters(Arc<[[AtomicU64; STATUSES]; Surface::ALL.len()]>);

impl Default for RequestCounters {
    fn default() -> Self {
        Self(Arc::new(std::array::from_fn(|_| std::array::from_fn(|_| AtomicU64::new(0)))))
    }
}

impl RequestCounters {
    pub(crate) fn count(&self, surface: Surface, status: StatusCode) {
        // In the order of `Surface::ALL`; a test checks this.
        let surface = surface as usize;
        let status = usize::from(status.as_u16()).saturating_sub(100).min(STATUSES - 1);
        self.0[surface][status].fetch_add(1, Ordering::Relaxed);
    }

    fn counts(&self) -> impl Iterator<Item = (&'static str, usize, u64)> {
        Surface::ALL.iter().zip(self.0.iter()).flat_map(|(surface, statuses)| {
            let counts = statuses.iter().map(|count| count.load(Ordering::Relaxed)).enumerate();
            counts
                .filter(|(_, count)| *count > 0)
                .map(|(status, count)| (surface.name(), status + 100, count))
        })
    }

    /// Returns the count of all requests, and of those that ended with an error of the gateway or the
    /// engines.
    pub(crate) fn sums(&self) -> (u64, u64) {
        self.counts().fold((0, 0), |(all, failed), (_, status, count)| {
            (all + count, failed + if status >= 500 { count } else { 0 })
        })
    }
}

impl fmt::Debug for RequestCounters {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_list().entries(self.counts()).finish()
    }
}

impl EncodeMetric for RequestCounters {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        for (surface, status, count) in self.counts() {
            let labels = [("surface", surface.to_owned()), ("status", status.to_string())];
            encoder.encode_family(&labels)?.encode_counter::<NoLabelSet, _, u64>(&count, None)?;
        }
        Ok(())
    }

    fn metric_type(&self) -> MetricType {
        MetricType::Counter
    }
}
