//! Budget of retries: each request earns a share of a retry, each retry costs a whole one (*Site Reliability
//! Engineering*, chapter 21, "Per-client retry budget"). When a server fails every request, its load grows by
//! that share and not by a factor. Pauses are exponential with full jitter.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Cost of a retry, in hundredths.
const RETRY: u64 = 100;

/// A token bucket of retries.
#[derive(Debug)]
pub(crate) struct RetryBudget {
    hundredths: AtomicU64,
    earned: u64,
    limit: u64,
}

impl RetryBudget {
    pub(crate) fn new(percent: u32, burst: u32) -> Self {
        let limit = u64::from(burst) * RETRY;
        Self { hundredths: AtomicU64::new(limit), earned: u64::from(percent), limit }
    }

    /// Credits the share of one request.
    pub(crate) fn deposit(&self) {
        self.update(|level| Some((level + self.earned).min(self.limit.max(RETRY))));
    }

    /// Takes one retry from the budget; false when there is none.
    pub(crate) fn withdraw(&self) -> bool {
        self.update(|level| level.checked_sub(RETRY))
    }

    // Relaxed: the level guards no other memory.
    fn update(&self, change: impl Fn(u64) -> Option<u64>) -> bool {
        self.hundredths.fetch_update(Ordering::Relaxed, Ordering::Relaxed, change).is_ok()
    }
}

/// Seeded random numbers (SplitMix64), shared by all requests.
#[derive(Debug)]
pub(crate) struct Jitter(AtomicU64);

impl Jitter {
    pub(crate) fn new(seed: u64) -> Self {
        Self(AtomicU64::new(seed))
    }

    /// Returns a number below `bound`, which must not be 0.
    pub(crate) fn below(&self, bound: u64) -> u64 {
        const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
        let mut state = self.0.fetch_add(STEP, Ordering::Relaxed).wrapping_add(STEP);
        state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (state ^ (state >> 31)) % bound
    }

    /// Returns the pause before attempt `attempt` (1 is the first retry).
    pub(crate) fn pause(&self, first: Duration, limit: Duration, attempt: u32) -> Duration {
        let upper = first.saturating_mul(1 << (attempt - 1).min(20)).min(limit);
        Duration::from_micros(self.below(upper.as_micros() as u64 + 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retries_stay_a_share_of_requests() {
        let budget = RetryBudget::new(10, 5);
        let mut retries = 0;
        for _ in 0..1000 {
            budget.deposit();
            while budget.withdraw() {
                retries += 1;
            }
        }
        assert!((100..=105).contains(&retries), "{retries} retries for 1000 requests");
        let none = RetryBudget::new(0, 0);
        none.deposit();
        assert!(!none.withdraw());
    }

    #[test]
    fn pauses_grow_to_their_limit_and_depend_on_the_seed() {
        let pauses = |seed| {
            let jitter = Jitter::new(seed);
            (1..40)
                .map(|attempt| jitter.pause(Duration::from_millis(10), Duration::from_millis(80), attempt))
                .collect::<Vec<_>>()
        };
        assert_eq!(pauses(1), pauses(1));
        assert_ne!(pauses(1), pauses(2));
        assert!(pauses(1).iter().all(|pause| *pause <= Duration::from_millis(80)));
        assert!(pauses(1)[0] <= Duration::from_millis(10));
    }
}
