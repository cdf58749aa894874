//! Duration of the stages of hand-offs: histograms that one thread writes and any thread reads.
//!
//! Times are those of the rounds in which an event was handled, so a stage that begins and ends within one
//! round counts as zero. Cost per observation: three atomic additions.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Number of bounded buckets: the bound of bucket n is 16 µs × 2^n, up to 67 s. One bucket without a bound
/// follows.
pub const BOUNDS: usize = 23;
const FIRST_BOUND_US: u64 = 16;

/// A stage of a hand-off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Receiver: from the expectation until its sender is told the slots (the connection, and a round of
    /// the thread).
    Reserve,
    /// Receiver: from then until the first layers of blocks have arrived (including the sender's computation).
    FirstPart,
    /// Receiver: from when layers of blocks have landed and are announced until they are verified.
    Verify,
    /// Receiver: from the expectation until every block is verified, for transfers that complete.
    Whole,
    /// Sender: from the push of layers of blocks, or the receiver's reservation if later, until their last
    /// write is posted.
    Write,
    /// Sender: from then until their checksums are announced.
    Sum,
    /// Sender: from its last message until the receiver's side has it: the wire, and the queue there.
    Finish,
}

impl Stage {
    /// Every stage, the receiver's first.
    pub const ALL: [Self; 7] =
        [Self::Reserve, Self::FirstPart, Self::Verify, Self::Whole, Self::Write, Self::Sum, Self::Finish];

    /// Returns the stage's metric label.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Reserve => "reserve",
            Self::FirstPart => "first_part",
            Self::Verify => "verify",
            Self::Whole => "whole",
            Self::Write => "write",
            Self::Sum => "sum",
            Self::Finish => "finish",
        }
    }
}

/// Histogram of one stage.
#[derive(Debug, Default)]
struct Times {
    /// The last bucket counts the times above all bounds.
    buckets: [AtomicU64; BOUNDS + 1],
    sum_us: AtomicU64,
}

/// Histograms of all stages since the node was created.
#[derive(Debug, Default)]
pub struct StageTimes([Times; Stage::ALL.len()]);

/// The time of the current round, and the histograms.
pub(crate) struct StageClock<'a> {
    pub(crate) now: Instant,
    pub(crate) times: &'a StageTimes,
}

impl StageClock<'_> {
    /// Records a stage that began at `since` and ends now.
    pub(crate) fn observe(&self, stage: Stage, since: Instant) {
        self.times.observe(stage, self.now.saturating_duration_since(since));
    }
}

/// Snapshot of one stage's histogram.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StageSnapshot {
    /// The stage.
    pub stage: Stage,
    /// Upper bound in microseconds, and the number of times up to it; the last bound is `None`.
    pub cumulative: Vec<(Option<u64>, u64)>,
    /// Sum of all times, in microseconds.
    pub sum_us: u64,
}

fn bound_us(bucket: usize) -> Option<u64> {
    (bucket < BOUNDS).then(|| FIRST_BOUND_US << bucket)
}

impl StageTimes {
    pub(crate) fn observe(&self, stage: Stage, time: Duration) {
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let bucket = (0..BOUNDS).find(|&bucket| bound_us(bucket).is_some_and(|bound| micros <= bound));
        let times = &self.0[stage as usize];
        times.buckets[bucket.unwrap_or(BOUNDS)].fetch_add(1, Ordering::Relaxed);
        times.sum_us.fetch_add(micros, Ordering::Relaxed);
    }

    /// Returns the histograms of all stages, in the order of [`Stage::ALL`].
    #[must_use]
    pub fn snapshot(&self) -> Vec<StageSnapshot> {
        let of = |stage: Stage| {
            let times = &self.0[stage as usize];
            let mut count = 0;
            let cumulative = times.buckets.iter().enumerate().map(|(bucket, times)| {
                count += times.load(Ordering::Relaxed);
                (bound_us(bucket), count)
            });
            let cumulative = cumulative.collect();
            StageSnapshot { stage, cumulative, sum_us: times.sum_us.load(Ordering::Relaxed) }
        };
        Stage::ALL.map(of).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_fall_into_the_buckets_of_their_lengths() {
        let times = StageTimes::default();
        for micros in [0, 16, 17, 1_000_000, u64::MAX >> 20] {
            times.observe(Stage::Verify, Duration::from_micros(micros));
        }
        let snapshot = times.snapshot();
        assert!(snapshot.iter().map(|stage| stage.stage).eq(Stage::ALL));
        let verify = &snapshot[Stage::Verify as usize];
        let up_to = |bound: Option<u64>| verify.cumulative.iter().find(|(known, _)| *known == bound);
        assert_eq!(up_to(Some(16)), Some(&(Some(16), 2)));
        assert_eq!(up_to(Some(32)), Some(&(Some(32), 3)));
        assert_eq!(up_to(Some(1 << 20)), Some(&(Some(1 << 20), 4)));
        assert_eq!(verify.cumulative.last(), Some(&(None, 5)));
        assert_eq!(verify.sum_us, 33 + 1_000_000 + (u64::MAX >> 20));
        assert_eq!(snapshot[Stage::Sum as usize].cumulative.last(), Some(&(None, 0)));
    }
}
