//! Counters of the engine. Written by the engine thread, read by `/metrics`.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Upper bounds of the latency histograms, in seconds.
const BOUNDS: [f64; 14] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];

/// A histogram with fixed bounds.
#[derive(Debug, Default)]
pub(crate) struct Histogram(Mutex<HistogramState>);

#[derive(Debug, Default, Clone)]
struct HistogramState {
    counts: [u64; BOUNDS.len() + 1],
    sum: f64,
}

impl Histogram {
    pub(crate) fn observe(&self, value: Duration) {
        let seconds = value.as_secs_f64();
        let bucket = BOUNDS.iter().position(|&bound| seconds <= bound).unwrap_or(BOUNDS.len());
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.counts[bucket] += 1;
        state.sum += seconds;
    }

    /// Renders the histogram in Prometheus' text form; `labels` without braces.
    pub(crate) fn render(&self, name: &str, help: &str, labels: &str, out: &mut String) {
        use std::fmt::Write;
        let state = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let _infallible = writeln!(out, "# HELP {name} {help}.\n# TYPE {name} histogram");
        let mut total = 0;
        for (count, bound) in
            state.counts.iter().zip(BOUNDS.iter().map(f64::to_string).chain(["+Inf".to_owned()]))
        {
            total += count;
            let _infallible = writeln!(out, "{name}_bucket{{le=\"{bound}\",{labels}}} {total}");
        }
        let _infallible = writeln!(out, "{name}_sum{{{labels}}} {}", state.sum);
        let _infallible = writeln!(out, "{name}_count{{{labels}}} {total}");
    }
}

/// Counters and gauges of the engine.
#[derive(Debug, Default)]
pub struct EngineStats {
    /// Submitted requests that the engine's thread has not taken yet.
    pub(crate) submitted: AtomicU64,
    pub(crate) running: AtomicU64,
    pub(crate) waiting: AtomicU64,
    pub(crate) fetching: AtomicU64,
    pub(crate) slots_cached: AtomicU64,
    /// Cached slots that no request uses, counted every [`EVICTABLE_EVERY`](crate::scheduler::EVICTABLE_EVERY).
    pub(crate) slots_evictable: AtomicU64,
    pub(crate) prompt_tokens: AtomicU64,
    pub(crate) generation_tokens: AtomicU64,
    pub(crate) prefix_queries: AtomicU64,
    pub(crate) prefix_hits: AtomicU64,
    pub(crate) preemptions: AtomicU64,
    pub(crate) recomputed_blocks: AtomicU64,
    pub(crate) finished: AtomicU64,
    pub(crate) cancelled: AtomicU64,
    pub(crate) time_to_first_token: Histogram,
    pub(crate) inter_token: Histogram,
    pub(crate) step: Histogram,
}

impl EngineStats {
    pub(crate) fn add(counter: &AtomicU64, value: usize) {
        counter.fetch_add(value as u64, Ordering::Relaxed);
    }

    pub(crate) fn set(level: &AtomicU64, value: usize) {
        level.store(value as u64, Ordering::Relaxed);
    }

    pub(crate) fn get(counter: &AtomicU64) -> u64 {
        counter.load(Ordering::Relaxed)
    }

    /// Requests in the engine in any state.
    #[must_use]
    pub fn requests_inside(&self) -> u64 {
        Self::get(&self.running) + Self::get(&self.waiting) + Self::get(&self.fetching)
    }
}
