//! Medians, ratios taken round by round, and latencies.

use std::time::Duration;

use anyhow::Result;
use hdrhistogram::Histogram;

const LATENCY_NS_MAX: u64 = 60_000_000_000;

/// The median; of an even number of values the upper one. Zero without values.
pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// Rounds of ours and of a peer, in turn. The ratio is the median of the rounds' ratios, so that a slowdown of
/// both at the same time cancels out.
#[derive(Debug, Default)]
pub(super) struct Rounds {
    ours: Vec<f64>,
    peer: Vec<f64>,
}

impl Rounds {
    pub(super) fn push(&mut self, ours: f64, peer: Option<f64>) {
        self.ours.push(ours);
        self.peer.extend(peer);
    }

    pub(super) fn count(&self) -> usize {
        self.ours.len()
    }

    /// Our figure of each round.
    pub(super) fn values(&self) -> Vec<f64> {
        self.ours.clone()
    }

    pub(super) fn ours(&self) -> f64 {
        median(self.ours.clone())
    }

    /// Our best round.
    pub(super) fn best(&self) -> f64 {
        self.ours.iter().copied().fold(0.0, f64::max)
    }

    pub(super) fn peer(&self) -> Option<f64> {
        (!self.peer.is_empty()).then(|| median(self.peer.clone()))
    }

    pub(super) fn ratio(&self) -> Option<f64> {
        let ratios = self.ours.iter().zip(&self.peer).map(|(ours, peer)| ours / peer).collect::<Vec<_>>();
        (!ratios.is_empty() && ratios.len() == self.ours.len()).then(|| median(ratios))
    }
}

/// Latencies to three digits, up to a minute.
pub(super) struct Latencies(Histogram<u64>);

/// Percentiles of a distribution, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Percentiles {
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
    pub(super) p99_9_us: f64,
    pub(super) max_us: f64,
    pub(super) min_us: f64,
    pub(super) mean_us: f64,
    /// Standard deviation.
    pub(super) deviation_us: f64,
}

impl Latencies {
    pub(super) fn new() -> Result<Self> {
        Ok(Self(Histogram::new_with_bounds(1, LATENCY_NS_MAX, 3)?))
    }

    pub(super) fn record(&mut self, latency: Duration) {
        self.0.saturating_record(latency.as_nanos() as u64);
    }

    pub(super) fn count(&self) -> u64 {
        self.0.len()
    }

    pub(super) fn percentiles(&self) -> Percentiles {
        let at = |quantile| self.0.value_at_quantile(quantile) as f64 / 1e3;
        Percentiles {
            p50_us: at(0.5),
            p99_us: at(0.99),
            p99_9_us: at(0.999),
            max_us: self.0.max() as f64 / 1e3,
            min_us: self.0.min() as f64 / 1e3,
            mean_us: self.0.mean() / 1e3,
            deviation_us: self.0.stdev() / 1e3,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_does_not_care_for_outliers_or_order() {
        for (values, expected) in
            [(vec![], 0.0), (vec![3.0], 3.0), (vec![9.0, 1.0, 2.0], 2.0), (vec![4.0, 1.0, 3.0, 1000.0], 4.0)]
        {
            assert_eq!(median(values.clone()), expected, "{values:?}");
        }
    }

    #[test]
    fn ratios_are_taken_round_by_round() {
        let mut rounds = Rounds::default();
        // The machine is ten times as slow in two rounds, for both sides: the quotient of the medians would be 5.
        for (ours, peer) in [(10.0, 20.0), (1.0, 2.0), (10.0, 2.0), (1.0, 2.0), (11.0, 22.0)] {
            rounds.push(ours, Some(peer));
        }
        assert_eq!((rounds.ratio(), rounds.best()), (Some(0.5), 11.0));
        assert_eq!(rounds.ours() / rounds.peer().expect("a peer"), 5.0);
        let mut alone = Rounds::default();
        alone.push(1.0, None);
        assert_eq!((alone.peer(), alone.ratio(), alone.count()), (None, None, 1));
    }

    #[test]
    fn percentiles_of_a_known_distribution() {
        let mut latencies = Latencies::new().expect("bounds");
        (1..=1000).for_each(|us| latencies.record(Duration::from_micros(us)));
        let found = latencies.percentiles();
        for (found, expected) in
            [(found.p50_us, 500.0), (found.p99_us, 990.0), (found.p99_9_us, 999.0), (found.max_us, 1000.0)]
        {
            assert!((found / expected - 1.0).abs() < 0.002, "{found} is not {expected}");
        }
        latencies.record(Duration::from_secs(3600));
        assert_eq!(latencies.count(), 1001);
    }
}
