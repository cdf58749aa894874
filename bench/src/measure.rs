//! Timing helpers.

use std::time::{Duration, Instant};

use clap::Args;
use hdrhistogram::Histogram;

/// Number of rounds of a benchmark that has one.
#[derive(Debug, Clone, Copy, Default, Args)]
pub(crate) struct RoundsArgs {
    /// Rounds of each measurement, of which the median is reported; each benchmark has a default of its own.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    rounds: Option<u32>,
}

impl RoundsArgs {
    pub(crate) fn or(self, default: usize) -> usize {
        self.rounds.map_or(default, |rounds| rounds as usize)
    }
}

/// Times one call.
pub(crate) fn time<T>(work: impl FnOnce() -> T) -> (Duration, T) {
    let started = Instant::now();
    let result = work();
    (started.elapsed(), result)
}

/// The median of an odd number of values.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Latencies in nanoseconds, up to ten seconds, to three digits.
pub(crate) struct Latencies(Histogram<u64>);

impl Latencies {
    pub(crate) fn new() -> anyhow::Result<Self> {
        Ok(Self(Histogram::new_with_bounds(1, 10_000_000_000, 3)?))
    }

    pub(crate) fn record(&mut self, value: Duration) {
        self.0.saturating_record(value.as_nanos() as u64);
    }

    pub(crate) fn add(&mut self, other: &Self) -> anyhow::Result<()> {
        Ok(self.0.add(&other.0)?)
    }

    pub(crate) fn count(&self) -> u64 {
        self.0.len()
    }

    pub(crate) fn at(&self, quantile: f64) -> f64 {
        self.0.value_at_quantile(quantile) as f64
    }

    /// Mean and standard deviation in nanoseconds.
    pub(crate) fn mean_and_deviation(&self) -> (f64, f64) {
        (self.0.mean(), self.0.stdev())
    }

    /// `p50 / p99 / p99.9` in microseconds.
    pub(crate) fn render(&self) -> String {
        let micros = |quantile| self.at(quantile) / 1e3;
        format!("{:.3} / {:.3} / {:.3} us", micros(0.5), micros(0.99), micros(0.999))
    }
}

/// Allocations of this thread so far, if the binary counts them.
pub(crate) fn allocations() -> Option<u64> {
    crate::ALLOCATIONS.get().map(|count| count())
}
