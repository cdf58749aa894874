//! Whether an idle conversation goes on.
//!
//! The gap between two turns is put into one of 48 buckets, two an octave, from a quarter of a second to
//! 24 days. For each bucket two counts are kept: conversations that were still idle when it
//! began, and those of them that returned in it. Their ratio is the hazard; its product over buckets is the
//! chance to stay silent (Kaplan and Meier, "Nonparametric estimation from incomplete observations", 1958).
//! Conversations that were dropped while idle count as long as they were seen, so forgetting them does not
//! make returns look likelier. Counts decay, so habits may change. Keep one for each class of traffic, or one.
//!
//! Pure arithmetic on 448 bytes; one thread owns it.

use std::time::Duration;

const BUCKETS: usize = 48;
const BUCKETS_PER_OCTAVE: f64 = 2.0;
const FIRST_S: f64 = 0.25;
/// A count weighs 1/e after so many further conversations.
const MEMORY: f32 = 4096.0;

/// When blocks of idle conversations are fetched ahead.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ReturnConfig {
    /// Blocks are fetched ahead while the chance of a return within `lead` is at least this (0 … 1).
    pub prefetch_chance: f64,
    /// Time before the expected return at which the blocks should be in host memory (1 ms … 1 hour).
    pub lead: Duration,
}

impl Default for ReturnConfig {
    fn default() -> Self {
        Self {
            prefetch_chance: 0.25,
            // In the Mooncake trace a third of the conversations that have been idle for a minute go on within the next.
            lead: Duration::from_secs(60),
        }
    }
}

/// The distribution of the gaps.
#[derive(Debug, Clone)]
pub(crate) struct ReturnTimes {
    idle: [f32; BUCKETS],
    returned: [f32; BUCKETS],
    config: ReturnConfig,
}

impl ReturnTimes {
    /// Starts from a prior: one return in fifty for each bucket, with the weight of two conversations.
    #[must_use]
    pub(crate) fn new(config: ReturnConfig) -> Self {
        Self { idle: [2.0; BUCKETS], returned: [0.04; BUCKETS], config }
    }

    /// A conversation returned after `gap`.
    pub(crate) fn returned(&mut self, gap: Duration) {
        let bucket = position(gap).0;
        self.count(bucket + 1);
        self.returned[bucket] += 1.0;
    }

    /// A conversation was forgotten, or ended, after it had been idle for `idle`.
    pub(crate) fn dropped(&mut self, idle: Duration) {
        self.count(position(idle).0);
    }

    fn count(&mut self, buckets: usize) {
        let keep = 1.0 - 1.0 / MEMORY;
        for (idle, returned) in self.idle.iter_mut().zip(&mut self.returned) {
            *idle *= keep;
            *returned *= keep;
        }
        for idle in &mut self.idle[..buckets] {
            *idle += 1.0;
        }
    }

    /// The chance that a conversation that has been idle for `idle` returns within `within`.
    #[must_use]
    pub(crate) fn chance(&self, idle: Duration, within: Duration) -> f64 {
        let (first, from) = position(idle);
        let (last, to) = position(idle.saturating_add(within));
        let mut silent = 1.0;
        for bucket in first..=last {
            let low = if bucket == first { from } else { 0.0 };
            let high = if bucket == last { to } else { 1.0 };
            // A bucket that hardly any conversation reached has no hazard of its own.
            let hazard = if self.idle[bucket] > 1e-3 {
                f64::from(self.returned[bucket] / self.idle[bucket]).clamp(0.0, 1.0)
            } else {
                0.0
            };
            // Within a bucket the returns are spread evenly: of those idle at `low`, this part is left.
            let left = (1.0 - hazard * low).max(f64::MIN_POSITIVE);
            silent *= ((1.0 - hazard * high) / left).clamp(0.0, 1.0);
        }
        1.0 - silent
    }

    /// Whether the blocks of a conversation that has been idle for `idle` should be brought up now, because it is about to return.
    #[must_use]
    pub(crate) fn should_prefetch(&self, idle: Duration) -> bool {
        self.chance(idle, self.config.lead) >= self.config.prefetch_chance
    }
}

/// The bucket of a gap and the part of the bucket before it.
fn position(gap: Duration) -> (usize, f64) {
    let seconds = gap.as_secs_f64();
    if seconds < FIRST_S {
        return (0, seconds / FIRST_S);
    }
    let bucket = ((seconds / FIRST_S).log2() * BUCKETS_PER_OCTAVE) as usize + 1;
    if bucket >= BUCKETS {
        return (BUCKETS - 1, 1.0);
    }
    let edge = |number: usize| FIRST_S * (number as f64 / BUCKETS_PER_OCTAVE).exp2();
    let (start, end) = (edge(bucket - 1), edge(bucket));
    (bucket, ((seconds - start) / (end - start)).clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::tests::testing::Random;

    #[test]
    fn the_chance_follows_the_habit_and_its_change() {
        let seed = 61;
        println!("seed {seed}");
        let mut random = Random::new(seed);
        let lead = Duration::from_secs(10);
        let mut times = ReturnTimes::new(ReturnConfig { lead, ..ReturnConfig::default() });
        // 60 % return after 20 … 40 s, the others are dropped after ten minutes.
        for _ in 0..5000 {
            if random.uniform() < 0.6 {
                times.returned(Duration::from_secs_f64(20.0 + 20.0 * random.uniform()));
            } else {
                times.dropped(Duration::from_secs(600));
            }
        }
        let chance = |times: &ReturnTimes, idle, within| {
            times.chance(Duration::from_secs(idle), Duration::from_secs(within))
        };
        assert!((chance(&times, 0, 600) - 0.6).abs() < 0.03, "{}", chance(&times, 0, 600));
        assert!(chance(&times, 0, 10) < 0.02);
        assert!(chance(&times, 25, 20) > 0.3);
        assert!(chance(&times, 100, 400) < 0.02);
        assert!(times.should_prefetch(Duration::from_secs(25)));
        assert!(!times.should_prefetch(Duration::from_secs(1)));
        for _ in 0..20_000 {
            times.dropped(Duration::from_secs(600));
        }
        assert!(chance(&times, 0, 600) < 0.05);
    }

    #[test]
    fn dropping_idle_conversations_early_does_not_raise_the_chance() {
        let mut random = Random::new(62);
        let (mut patient, mut hasty) =
            (ReturnTimes::new(ReturnConfig::default()), ReturnTimes::new(ReturnConfig::default()));
        for _ in 0..5000 {
            let gap = Duration::from_secs_f64(300.0 * random.uniform());
            patient.returned(gap);
            // The hasty one forgets half of the conversations after 32 s.
            if gap.as_secs() >= 32 && random.uniform() < 0.5 {
                hasty.dropped(Duration::from_secs(32));
            } else {
                hasty.returned(gap);
            }
        }
        for (idle, within) in [(0, 30), (10, 60), (40, 100)] {
            let (idle, within) = (Duration::from_secs(idle), Duration::from_secs(within));
            let (one, other) = (patient.chance(idle, within), hasty.chance(idle, within));
            assert!((one - other).abs() < 0.05, "{one} {other}");
        }
    }

    #[test]
    fn every_gap_has_a_place() {
        let times = ReturnTimes::new(ReturnConfig::default());
        for gap in [Duration::ZERO, Duration::from_nanos(1), Duration::from_secs(1 << 40), Duration::MAX] {
            let chance = times.chance(gap, Duration::MAX);
            assert!((0.0..=1.0).contains(&chance), "{chance}");
            let mut times = times.clone();
            times.returned(gap);
            times.dropped(gap);
        }
    }
}
