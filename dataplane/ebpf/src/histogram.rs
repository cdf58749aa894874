//! A histogram as the kernel fills it: four buckets per octave of nanoseconds, so that a quantile is at most a
//! quarter too high.

use std::time::Duration;

use crate::layout::BUCKETS;

/// Octaves that are exported to Prometheus: 2^10 ns (1 µs) to 2^35 ns (34 s).
const OCTAVES_SHOWN: std::ops::RangeInclusive<u32> = 10..=35;

/// Histogram of durations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram {
    counts: [u64; BUCKETS],
    sum_ns: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: [0; BUCKETS], sum_ns: 0 }
    }
}

impl Histogram {
    pub(crate) fn add(&mut self, counts: &[u64; BUCKETS], sum_ns: u64) {
        for (own, more) in self.counts.iter_mut().zip(counts) {
            *own = own.wrapping_add(*more);
        }
        self.sum_ns = self.sum_ns.wrapping_add(sum_ns);
    }

    /// Returns the counts since an earlier copy of the same histogram.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let mut since = self.clone();
        for (own, before) in since.counts.iter_mut().zip(&before.counts) {
            *own = own.saturating_sub(*before);
        }
        since.sum_ns = since.sum_ns.saturating_sub(before.sum_ns);
        since
    }

    /// Counts one duration.
    pub fn record(&mut self, value: Duration) {
        let ns = u64::try_from(value.as_nanos()).unwrap_or(u64::MAX);
        self.counts[bucket_of(ns)] += 1;
        self.sum_ns = self.sum_ns.wrapping_add(ns);
    }

    /// Returns the number of durations.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Returns the sum of the durations.
    #[must_use]
    pub fn sum(&self) -> Duration {
        Duration::from_nanos(self.sum_ns)
    }

    /// Returns the duration that a share `q` (0 to 1) of all durations does not exceed, rounded up to the end
    /// of its bucket; `None` while the histogram is empty.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
    pub fn quantile(&self, q: f64) -> Option<Duration> {
        let count = self.count();
        let rank = ((count as f64 * q.clamp(0.0, 1.0)).ceil() as u64).max(1);
        let mut seen = 0;
        self.counts.iter().enumerate().find_map(|(index, here)| {
            seen += here;
            (seen >= rank).then(|| Duration::from_nanos(end_ns(index)))
        })
    }

    /// Returns upper bounds in seconds with the number of durations up to each, in Prometheus' format; the
    /// bucket `+Inf` is [`Histogram::count`].
    pub fn buckets(&self) -> impl Iterator<Item = (f64, u64)> + '_ {
        OCTAVES_SHOWN.map(|octave| {
            let upto = self.counts[..octave as usize * 4].iter().sum();
            (Duration::from_nanos(1 << octave).as_secs_f64(), upto)
        })
    }
}

/// Returns the bucket of a duration; `bpf/histogram.h` computes the same.
fn bucket_of(ns: u64) -> usize {
    if ns < 4 {
        return ns as usize;
    }
    let bit = ns.ilog2();
    ((bit * 4) as usize + (ns >> (bit - 2) & 3) as usize).min(BUCKETS - 1)
}

/// Returns the first duration behind a bucket. Buckets 4 to 7 stay empty: durations below 4 ns have one
/// bucket each.
fn end_ns(index: usize) -> u64 {
    if index < 8 {
        return index as u64 + 1;
    }
    (5 + index as u64 % 4) << (index / 4 - 2)
}

#[cfg(test)]
mod tests {
    use super::{Histogram, bucket_of, end_ns};
    use std::time::Duration;

    #[test]
    fn buckets_hold_what_they_say() {
        let mut last = 0;
        for ns in (0..5000).chain((13..40).map(|bit| 1 << bit)).chain((13..41).map(|bit| (1 << bit) - 1)) {
            let index = bucket_of(ns);
            assert!(end_ns(index) > ns, "{ns} in bucket {index}");
            assert!(
                index == 0 || end_ns(index - 1) <= ns || (4..=8).contains(&index),
                "{ns} in bucket {index}"
            );
            last = last.max(index);
        }
        assert_eq!(last, 159);
        assert_eq!(bucket_of(u64::MAX), 159);
    }

    #[test]
    fn quantiles_and_prometheus() {
        let mut histogram = Histogram::default();
        assert_eq!(histogram.quantile(0.5), None);
        for us in 1..=1000 {
            histogram.record(Duration::from_micros(us));
        }
        for (q, exact_us) in [(0.0, 1), (0.5, 500), (0.9, 900), (0.99, 990), (1.0, 1000)] {
            let found = histogram.quantile(q).expect("it has values").as_nanos();
            assert!(found > exact_us * 1000 && found <= exact_us * 1250, "{q}: {found} ns");
        }
        assert_eq!((histogram.count(), histogram.sum()), (1000, Duration::from_micros(500_500)));
        let shown: Vec<(f64, u64)> = histogram.buckets().collect();
        assert!(shown.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1));
        // 2^10 ns = 1.024 µs holds only the first; 2^20 ns = 1.05 ms holds all.
        assert_eq!((shown[0].1, shown[10].1, shown.last().map(|last| last.1)), (1, 1000, Some(1000)));
    }
}
