//! Model of the time of a transfer from a tier, learnt from transfers.
//!
//! The model is `latency + (bytes + bytes in front) × seconds per byte`: a tier serves in order, so that
//! queued bytes delay later ones. The store measures one onboarding from one tier as a whole (from the first
//! read posted to the last byte verified), because its blocks overlap in the tier's queue.
//!
//! [`TierSpeeds`] is owned by the thread that polls completions; planning uses a [`SpeedSnapshot`], 200 bytes
//! of plain numbers that are copied. Atomics per field were not taken: latency and slope are fitted together,
//! and a reader that mixes an old latency with a new slope predicts a time that neither fit ever meant.

use std::time::Duration;

use crate::plan::learner::Learner;
use crate::plan::tier::{TIERS, Tier};

/// Estimated speed of a tier.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct TierSpeed {
    /// Seconds before the first byte.
    pub(crate) latency_s: f64,
    /// Seconds for each byte after that.
    pub(crate) seconds_per_byte: f64,
    /// A transfer that takes this many times the expected is at the high quantile.
    pub(crate) tail_factor: f64,
    /// Transfers that finished since the last change of speed and since the last give-up that put the speed in doubt.
    pub(crate) samples: u64,
    /// Largest of these transfers, in bytes.
    pub(crate) largest_bytes: u64,
}

impl TierSpeed {
    /// A tier without measurements.
    #[must_use]
    pub(crate) fn guess(latency: Duration, bytes_per_s: f64) -> Self {
        Self {
            latency_s: latency.as_secs_f64(),
            seconds_per_byte: 1.0 / bytes_per_s.max(1.0),
            tail_factor: 2.0,
            samples: 0,
            largest_bytes: 0,
        }
    }

    /// Expected time of a transfer behind `queued_bytes`.
    #[must_use]
    pub(crate) fn expected(&self, bytes: u64, queued_bytes: u64) -> Duration {
        duration(self.latency_s + (bytes as f64 + queued_bytes as f64) * self.seconds_per_byte)
    }
}

/// A transfer given up after so many times its expected time puts the speed in doubt. Below that it may be the usual spread.
const DOUBTED_AFTER: u32 = 4;

/// A transfer by which speeds are compared.
const TYPICAL_BYTES: u64 = 1 << 20;

/// Estimated speeds of all tiers.
pub(crate) type SpeedSnapshot = [TierSpeed; TIERS];

/// The learner for each tier.
#[derive(Debug, Clone)]
pub(crate) struct TierSpeeds {
    learners: [Learner<2>; TIERS],
    largest_bytes: [u64; TIERS],
    /// Transfers that finished since a give-up put the speed in doubt.
    finished: [u64; TIERS],
    quantile: f64,
}

impl TierSpeeds {
    /// The usual quantile for `tail_factor`. Not 0.99: with a memory of 256 transfers one stall would move it.
    pub(crate) const TAIL_QUANTILE: f64 = 0.97;

    /// Starts from guesses; `quantile` (0.5 … 0.999) is the one that `tail_factor` states.
    #[must_use]
    pub(crate) fn new(guesses: &SpeedSnapshot, quantile: f64) -> Self {
        Self {
            learners: guesses.map(|guess| Learner::new([guess.latency_s, guess.seconds_per_byte])),
            largest_bytes: [0; TIERS],
            finished: [0; TIERS],
            quantile,
        }
    }

    /// Careful guesses: slower than what such tiers usually are, so that an unknown tier has to prove itself.
    #[must_use]
    pub(crate) fn guesses() -> SpeedSnapshot {
        [
            TierSpeed::guess(Duration::from_micros(50), 4e9),
            TierSpeed::guess(Duration::from_millis(1), 5e8),
            TierSpeed::guess(Duration::from_millis(1), 5e8),
            TierSpeed::guess(Duration::from_millis(50), 5e7),
        ]
    }

    /// Starts again from the guess if the tier's estimate is slower than the guess; returns whether it was.
    pub(crate) fn forget_slowness(&mut self, tier: Tier) -> bool {
        let guess = Self::guesses()[tier.index()];
        if self.snapshot_of(tier).expected(TYPICAL_BYTES, 0) <= guess.expected(TYPICAL_BYTES, 0) {
            return false;
        }
        self.learners[tier.index()] = Learner::new([guess.latency_s, guess.seconds_per_byte]);
        self.largest_bytes[tier.index()] = 0;
        self.finished[tier.index()] = 0;
        true
    }

    /// A finished transfer of `bytes` that started behind `queued_bytes`.
    pub(crate) fn observe(&mut self, tier: Tier, bytes: u64, elapsed: Duration, queued_bytes: u64) {
        if bytes == 0 {
            return;
        }
        let ahead = bytes as f64 + queued_bytes as f64;
        self.learners[tier.index()].observe([1.0, ahead], elapsed.as_secs_f64());
        let largest = &mut self.largest_bytes[tier.index()];
        *largest = bytes.max(*largest);
        self.finished[tier.index()] += 1;
    }

    /// An answer that took so long and brought nothing: it shows the latency alone, and no reason to trust larger transfers.
    pub(crate) fn observe_empty(&mut self, tier: Tier, elapsed: Duration) {
        self.learners[tier.index()].observe([1.0, 0.0], elapsed.as_secs_f64());
    }

    /// A transfer of `bytes` that was given up after `elapsed`. It counts as twice that time, unless less time than
    /// expected has passed, which says nothing. If it was far more, the tier is taken in small pieces until some have finished: should
    /// it have become slow, the next ones cost little. After three in a row it is assumed to be that slow until one finishes.
    pub(crate) fn observe_given_up(&mut self, tier: Tier, bytes: u64, elapsed: Duration, queued_bytes: u64) {
        if bytes > 0 {
            self.given_up(tier, bytes, elapsed, queued_bytes);
        }
    }

    /// A question to which there was no answer for so long; like [`Self::observe_given_up`], and says nothing of bytes.
    pub(crate) fn observe_no_answer(&mut self, tier: Tier, elapsed: Duration) {
        self.given_up(tier, 0, elapsed, 0);
    }

    fn given_up(&mut self, tier: Tier, bytes: u64, elapsed: Duration, queued_bytes: u64) {
        let expected = self.snapshot_of(tier).expected(bytes, queued_bytes);
        if elapsed < expected {
            return;
        }
        let ahead = bytes as f64 + queued_bytes as f64;
        self.learners[tier.index()].observe_unfinished([1.0, ahead], elapsed.as_secs_f64());
        if elapsed > expected.saturating_mul(DOUBTED_AFTER) || self.learners[tier.index()].rows() == 0 {
            self.largest_bytes[tier.index()] = 0;
            self.finished[tier.index()] = 0;
        }
    }

    /// Returns the present estimate for a tier.
    #[must_use]
    pub(crate) fn snapshot_of(&self, tier: Tier) -> TierSpeed {
        let learner = &self.learners[tier.index()];
        let [latency_s, seconds_per_byte] = *learner.parameters();
        TierSpeed {
            latency_s,
            seconds_per_byte,
            tail_factor: learner.spread(self.quantile),
            samples: learner.rows().min(self.finished[tier.index()]),
            largest_bytes: self.largest_bytes[tier.index()],
        }
    }

    /// Returns the present estimates for all tiers.
    #[must_use]
    pub(crate) fn snapshot(&self) -> SpeedSnapshot {
        Tier::ALL.map(|tier| self.snapshot_of(tier))
    }

    /// Number of lasting changes of a tier's speed.
    #[cfg(test)]
    #[must_use]
    pub(crate) fn changes(&self, tier: Tier) -> u64 {
        self.learners[tier.index()].changes()
    }
}

/// Seconds as a duration; what no duration can hold becomes the longest.
pub(crate) fn duration(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::testing::Random;

    #[test]
    fn latency_and_bandwidth_are_told_apart_and_the_queue_counts() {
        for (latency, bytes_per_s) in [(1e-5, 5e10), (1e-3, 3e9), (0.1, 1e7)] {
            let mut random = Random::new(11);
            let mut speeds = TierSpeeds::new(&TierSpeeds::guesses(), 0.99);
            for _ in 0..400 {
                let bytes = (2_f64.powf(12.0 + 22.0 * random.uniform())) as u64;
                let queued = bytes * (random.uniform() * 3.0) as u64;
                let seconds = (latency + (bytes + queued) as f64 / bytes_per_s) * random.noise(0.1);
                speeds.observe(Tier::Disk, bytes, duration(seconds), queued);
            }
            let speed = speeds.snapshot_of(Tier::Disk);
            for bytes in [1 << 12, 1 << 20, 1 << 30] {
                let truth = latency + (bytes + 1000) as f64 / bytes_per_s;
                let ratio = speed.expected(bytes, 1000).as_secs_f64() / truth;
                assert!((0.93..1.07).contains(&ratio), "{latency} {bytes_per_s} {bytes}: {ratio}");
            }
            assert!((1.1..1.6).contains(&speed.tail_factor), "{}", speed.tail_factor);
        }
    }

    #[test]
    fn giving_up_early_says_nothing_and_late_says_slow() {
        let mut speeds = TierSpeeds::new(&TierSpeeds::guesses(), 0.99);
        for _ in 0..20 {
            speeds.observe(Tier::Disk, 1 << 20, Duration::from_millis(2), 0);
        }
        let before = speeds.snapshot();
        speeds.observe_given_up(Tier::Disk, 1 << 20, Duration::from_millis(1), 0);
        assert_eq!(before, speeds.snapshot());
        speeds.observe_given_up(Tier::Disk, 1 << 20, Duration::from_millis(100), 0);
        let doubted = speeds.snapshot_of(Tier::Disk);
        assert_eq!((doubted.samples, doubted.largest_bytes), (0, 0), "taken in small pieces");
        assert!(
            doubted.expected(1 << 20, 0) < Duration::from_millis(10),
            "and not yet taken for slow: {doubted:?}"
        );
        for _ in 0..2 {
            speeds.observe_given_up(Tier::Disk, 1 << 20, Duration::from_millis(100), 0);
        }
        let after = speeds.snapshot_of(Tier::Disk);
        assert!(after.expected(1 << 20, 0) > Duration::from_millis(150), "{after:?}");
        assert_eq!((after.samples, after.largest_bytes), (0, 0), "unknown again");
        assert_eq!(speeds.changes(Tier::Disk), 1);
    }
}
