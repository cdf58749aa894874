//! Counters and pace of each rail of a bond. The thread that drives the bond writes them, any thread reads
//! the counters.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::link::Pace;

/// A rail is slow when it takes this many times as long per KiB as the best rail of its rank.
const SLOW_FACTOR: f64 = 3.0;
/// Number of slices from which a rail's pace is meaningful.
const SLICES_MIN: u64 = 32;
/// Age from which a rail's pace is no longer compared with others.
const FRESH: Duration = Duration::from_secs(5);

/// Counters of one rail. They only grow, except the two gauges. All but the first cover only peers with
/// several links.
#[derive(Debug, Default)]
pub(crate) struct RailCounts {
    pub(crate) bytes: AtomicU64,
    pub(crate) slices: AtomicU64,
    pub(crate) slices_retried: AtomicU64,
    pub(crate) links_failed: AtomicU64,
    pub(crate) links_restored: AtomicU64,
    pub(crate) markers_sent: AtomicU64,
    pub(crate) markers_received: AtomicU64,
    /// Gauge: pace of the rail.
    pace: AtomicU64,
    /// Gauge: 1 when the rail is slow.
    slow: AtomicU64,
}

impl RailCounts {
    /// Adds with a load and a store: the thread that drives the bond is the only writer.
    pub(crate) fn add(counter: &AtomicU64, value: u64) {
        counter.store(counter.load(Ordering::Relaxed) + value, Ordering::Relaxed);
    }
}

/// Counters of a bond's rails.
#[derive(Debug)]
pub struct BondCounters {
    rails: Box<[RailCounts]>,
}

impl BondCounters {
    pub(super) fn new(rails: usize) -> Self {
        Self { rails: (0..rails).map(|_| RailCounts::default()).collect() }
    }

    pub(super) fn rail(&self, rail: usize) -> &RailCounts {
        &self.rails[rail]
    }

    fn sum(&self, counter: impl Fn(&RailCounts) -> &AtomicU64) -> u64 {
        self.rails.iter().map(|rail| counter(rail).load(Ordering::Relaxed)).sum()
    }

    /// Returns the number of links that ended while their peer continued over others, over all rails.
    #[must_use]
    pub fn links_failed(&self) -> u64 {
        self.sum(|rail| &rail.links_failed)
    }

    /// Returns the number of links that were made again, over all rails.
    #[must_use]
    pub fn links_restored(&self) -> u64 {
        self.sum(|rail| &rail.links_restored)
    }

    /// Returns the number of slices posted again on another link, over all rails.
    #[must_use]
    pub fn slices_retried(&self) -> u64 {
        self.sum(|rail| &rail.slices_retried)
    }

    /// Returns the number of peers' markers received behind their writes, over all rails.
    #[must_use]
    pub fn markers_received(&self) -> u64 {
        self.sum(|rail| &rail.markers_received)
    }

    /// Returns name, help text and value of each counter of the rail with this index in
    /// [`super::Bond::new`]; the last two are gauges.
    ///
    /// # Panics
    ///
    /// If the bond has no such rail.
    #[must_use]
    pub fn snapshot(&self, rail: usize) -> [(&'static str, &'static str, u64); 9] {
        let rail = &self.rails[rail];
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        [
            ("block_bytes", "Bytes of blocks that this rail was given to write or read", read(&rail.bytes)),
            ("slices", "Slices into which blocks were cut for peers with several links", read(&rail.slices)),
            (
                "slices_retried",
                "Slices posted again because their link had failed",
                read(&rail.slices_retried),
            ),
            (
                "links_failed",
                "Links that ended while their peer went on over others",
                read(&rail.links_failed),
            ),
            ("links_restored", "Links that were made again", read(&rail.links_restored)),
            (
                "markers_sent",
                "Markers sent behind the writes that this rail took, for an event on another",
                read(&rail.markers_sent),
            ),
            ("markers_received", "Such markers that peers sent", read(&rail.markers_received)),
            (
                "nanoseconds_per_kib",
                "Time that a KiB takes on this rail, queue included, smoothed (level)",
                read(&rail.pace),
            ),
            (
                "slow",
                "1 while this rail takes 3 times as long for a KiB as the best of its rank (level)",
                read(&rail.slow),
            ),
        ]
    }
}

/// The pace of one rail over all its links.
#[derive(Debug, Default)]
pub(super) struct RailPace {
    pace: Pace,
    slices: u64,
    measured_at: Option<Instant>,
    is_slow: bool,
}

impl RailPace {
    /// Returns the nanoseconds per KiB, if measured often enough and recently.
    fn known(&self, now: Instant) -> Option<f64> {
        let is_fresh = self.measured_at.is_some_and(|at| now.saturating_duration_since(at) < FRESH);
        (is_fresh && self.slices >= SLICES_MIN).then(|| self.pace.nanos_per_kib())
    }
}

/// The paces of all rails, compared within each rank to find slow ones.
#[derive(Debug)]
pub(super) struct Paces {
    rails: Vec<RailPace>,
    ranks: Vec<u8>,
}

impl Paces {
    pub(super) fn new(ranks: Vec<u8>) -> Self {
        Self { rails: ranks.iter().map(|_| RailPace::default()).collect(), ranks }
    }

    /// Records a slice that completed `elapsed` after it was posted, with `bytes` before and in it. Logs
    /// when the rail becomes slow, or is no longer slow.
    pub(super) fn measured(
        &mut self,
        rail: usize,
        bytes: u64,
        elapsed: Duration,
        now: Instant,
        counts: &RailCounts,
    ) {
        let own = &mut self.rails[rail];
        own.pace.measured(bytes, elapsed);
        own.slices += 1;
        own.measured_at = Some(now);
        let pace = own.pace.nanos_per_kib();
        counts.pace.store(pace as u64, Ordering::Relaxed);
        let rank = self.ranks[rail];
        let others = (0..self.rails.len()).filter(|&other| other != rail && self.ranks[other] == rank);
        let best = others.filter_map(|other| self.rails[other].known(now)).min_by(f64::total_cmp);
        let own = &mut self.rails[rail];
        // Hysteresis: a slow rail must become clearly faster, since one at the border would flood the log.
        // A rail without a comparable one is not slow.
        let factor = if own.is_slow { SLOW_FACTOR / 2.0 } else { SLOW_FACTOR };
        let is_slow = own.slices >= SLICES_MIN && best.is_some_and(|best| pace > best * factor);
        if is_slow != own.is_slow {
            own.is_slow = is_slow;
            counts.slow.store(is_slow.into(), Ordering::Relaxed);
            let (pace, best) = (pace as u64, best.map(|best| best as u64));
            if is_slow {
                tracing::warn!(
                    rail,
                    pace,
                    best,
                    "bond: a rail is slow: nanoseconds for a KiB, its own and the best rail's"
                );
            } else {
                tracing::info!(rail, pace, best, "bond: a rail is not slow any more");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rail_is_slow_beside_those_of_its_rank_until_it_is_not() {
        let counters = BondCounters::new(3);
        let mut paces = Paces::new(vec![0, 0, 1]);
        let mut now = Instant::now();
        let mut measure = |rail: usize, micros: u64, times: u64| {
            for _ in 0..times {
                now += Duration::from_millis(1);
                let elapsed = Duration::from_micros(micros);
                paces.measured(rail, 100 << 10, elapsed, now, counters.rail(rail));
            }
            let [.., (pace, _, nanos), (slow, _, is_slow)] = counters.snapshot(rail);
            assert_eq!((pace, slow), ("nanoseconds_per_kib", "slow"));
            (nanos, is_slow)
        };
        assert_eq!(measure(0, 10, 100), (100, 0), "alone");
        assert_eq!(measure(1, 1000, 20).1, 0, "too few slices to tell");
        let (nanos, is_slow) = measure(1, 1000, 80);
        assert!((9_900..=10_000).contains(&nanos) && is_slow == 1, "{nanos} ns");
        assert_eq!(measure(2, 9000, 100).1, 0, "another rank");
        assert_eq!(measure(0, 10, 10).1, 0, "the fast one beside it");
        assert_eq!(measure(1, 20, 100).1, 1, "still twice as slow");
        assert_eq!(measure(1, 11, 100).1, 0);
        assert_eq!(measure(0, 10, 10).1, 0);
        assert_eq!(measure(1, 1000, 100).1, 1);
        assert_eq!(measure(1, 1000, 6000).1, 0, "nothing was measured beside it for a while");
    }
}
