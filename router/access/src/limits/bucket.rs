//! One token bucket as a single atomic number, by the generic cell rate algorithm (ITU-T I.371, annex A.1).
//!
//! The bucket holds a minute's allowance and refills evenly. Instead of a level and a time it stores the
//! time at which it will be full again (the "theoretical arrival time"): taking n units moves that time
//! n/rate later, and is allowed if the bucket would be full again within a minute. Giving back moves it
//! earlier; a time in the past is a full bucket. That is exactly a token bucket whose level may fall below
//! zero when more was used than was taken: [`Bucket::take_into_debt`] makes that debt, and later requests wait
//! until it is paid.
//!
//! The clock is any nanosecond counter that all callers share. It need not be monotone between threads: a
//! caller that is late by some nanoseconds sees the bucket that much emptier.
//!
//! Orderings are relaxed: the number guards no other memory.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The window of all limits, in nanoseconds: a minute.
pub(super) const WINDOW_NS: u64 = 60_000_000_000;
/// Largest change by one report of a peer, in nanoseconds of refilling: a faulty peer blocks no client for
/// long.
const FROM_PEER_MAX: i64 = 10 * WINDOW_NS.cast_signed();

/// A token bucket; without a limit every take succeeds.
#[derive(Debug, Default)]
pub(super) struct Bucket {
    /// Units per minute, 0 for no limit.
    per_minute: AtomicU64,
    /// Time at which the bucket will be full, in nanoseconds.
    full_at: AtomicU64,
    /// Units taken here and not given back, in nanoseconds of refilling; wraps. Peers' charges do not
    /// count.
    spent: AtomicU64,
}

/// Result of a take that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BucketRefusal {
    /// The bucket will have enough after this time, if no other request takes from it.
    RetryAfter(Duration),
    /// The bucket never holds so much.
    ExceedsCapacity,
}

impl Bucket {
    pub(super) fn new(per_minute: Option<u64>) -> Self {
        Self { per_minute: AtomicU64::new(per_minute.unwrap_or(0)), ..Self::default() }
    }

    /// Changes the limit. Taken units are kept as a time: a bucket that was half empty stays half empty.
    pub(super) fn set(&self, per_minute: Option<u64>) {
        self.per_minute.store(per_minute.unwrap_or(0), Ordering::Relaxed);
    }

    pub(super) fn per_minute(&self) -> Option<u64> {
        Some(self.per_minute.load(Ordering::Relaxed)).filter(|&limit| limit > 0)
    }

    /// Returns the cost of `units` in nanoseconds of refilling; rounded down, so that a whole minute's
    /// units fit a minute.
    fn cost(units: u64, per_minute: u64) -> u64 {
        let cost = u128::from(units) * u128::from(WINDOW_NS) / u128::from(per_minute);
        u64::try_from(cost).unwrap_or(u64::MAX)
    }

    /// Takes units, or returns why not. Returns their cost in nanoseconds, for [`Bucket::give_back`].
    pub(super) fn take(&self, units: u64, now: u64) -> Result<u64, BucketRefusal> {
        let Some(limit) = self.per_minute() else { return Ok(0) };
        let cost = Self::cost(units, limit);
        let latest = now.saturating_add(WINDOW_NS);
        let mut full_at = self.full_at.load(Ordering::Relaxed);
        loop {
            let next = full_at.max(now).saturating_add(cost);
            if next > latest {
                return Err(if cost > WINDOW_NS {
                    BucketRefusal::ExceedsCapacity
                } else {
                    BucketRefusal::RetryAfter(Duration::from_nanos(next - latest))
                });
            }
            match self.full_at.compare_exchange_weak(full_at, next, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => {
                    self.spent.fetch_add(cost, Ordering::Relaxed);
                    return Ok(cost);
                }
                Err(seen) => full_at = seen,
            }
        }
    }

    /// Takes units that were used already, into debt if necessary. Returns their cost.
    pub(super) fn take_into_debt(&self, units: u64, now: u64) -> u64 {
        let Some(limit) = self.per_minute() else { return 0 };
        let cost = Self::cost(units, limit);
        self.update(|full_at| full_at.max(now).saturating_add(cost));
        self.spent.fetch_add(cost, Ordering::Relaxed);
        cost
    }

    /// Gives back the cost of a [`Bucket::take`], or a part of it.
    pub(super) fn give_back(&self, cost: u64) {
        if cost > 0 {
            self.update(|full_at| full_at.saturating_sub(cost));
            self.spent.fetch_sub(cost, Ordering::Relaxed);
        }
    }

    pub(super) fn spent(&self) -> u64 {
        self.spent.load(Ordering::Relaxed)
    }

    /// Returns the nanoseconds until the bucket is full.
    pub(super) fn missing(&self, now: u64) -> u64 {
        self.full_at.load(Ordering::Relaxed).saturating_sub(now)
    }

    /// Counts the units that a peer has taken, or given back, since its last report.
    pub(super) fn take_for_peer(&self, before: u64, after: u64, now: u64) {
        let change = after.wrapping_sub(before).cast_signed().clamp(-FROM_PEER_MAX, FROM_PEER_MAX);
        if self.per_minute().is_some() {
            self.update(|full_at| match change {
                0.. => full_at.max(now).saturating_add(change.unsigned_abs()),
                _ => full_at.saturating_sub(change.unsigned_abs()),
            });
        }
    }

    /// Lowers the level so that at least `missing` nanoseconds of refilling are missing.
    pub(super) fn raise(&self, missing: u64, now: u64) {
        if self.per_minute().is_some() {
            let missing = missing.min(FROM_PEER_MAX.unsigned_abs());
            self.update(|full_at| full_at.max(now.saturating_add(missing)));
        }
    }

    fn update(&self, change: impl Fn(u64) -> u64) {
        let mut full_at = self.full_at.load(Ordering::Relaxed);
        while let Err(seen) =
            self.full_at.compare_exchange_weak(full_at, change(full_at), Ordering::Relaxed, Ordering::Relaxed)
        {
            full_at = seen;
        }
    }

    /// Returns the units that can be taken now, 0 in debt, and the time until the bucket is full.
    pub(super) fn level(&self, now: u64) -> Option<(u64, Duration)> {
        let limit = self.per_minute()?;
        let missing = self.full_at.load(Ordering::Relaxed).saturating_sub(now);
        let left = WINDOW_NS.saturating_sub(missing);
        let units = u128::from(left) * u128::from(limit) / u128::from(WINDOW_NS);
        Some((u64::try_from(units).unwrap_or(u64::MAX), Duration::from_nanos(missing)))
    }

    /// Whether the bucket is full, and so equal to a new one.
    pub(super) fn is_full(&self, now: u64) -> bool {
        self.full_at.load(Ordering::Relaxed) <= now
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::testing::Random;

    /// The same bucket with a level and a time, in exact units of 1/WINDOW_NS.
    struct Oracle {
        limit: i128,
        level: i128,
        at: u64,
    }

    impl Oracle {
        const ONE: i128 = WINDOW_NS as i128;

        fn refill(&mut self, now: u64) {
            self.level = (self.level + i128::from(now - self.at) * self.limit).min(self.limit * Self::ONE);
            self.at = now;
        }

        fn take(&mut self, units: i128, now: u64, is_forced: bool) -> bool {
            self.refill(now);
            let may = is_forced || self.level >= units * Self::ONE;
            self.level -= if may { units * Self::ONE } else { 0 };
            may
        }
    }

    #[test]
    fn it_is_a_token_bucket() {
        // Limits that divide the minute, so that both are exact.
        for (seed, limit) in [(1, 60), (2, 1), (3, 1000), (4, 6_000_000), (5, 1_000_000_000)] {
            let mut random = Random(seed);
            let bucket = Bucket::new(Some(limit));
            let mut oracle = Oracle { limit: limit.into(), level: i128::from(limit) * Oracle::ONE, at: 0 };
            let (mut now, mut taken) = (0, Vec::new());
            for step in 0..20_000 {
                now += random.below(WINDOW_NS / 20);
                let units = 1 + random.below(limit.div_ceil(7));
                match random.below(8) {
                    0 => {
                        bucket.take_into_debt(units, now);
                        oracle.take(units.into(), now, true);
                    }
                    1 if !taken.is_empty() => {
                        let (cost, units): (u64, u64) =
                            taken.swap_remove(random.below(taken.len() as u64) as usize);
                        bucket.give_back(cost);
                        oracle.refill(now);
                        oracle.level =
                            (oracle.level + i128::from(units) * Oracle::ONE).min(oracle.limit * Oracle::ONE);
                    }
                    _ => {
                        let result = bucket.take(units, now);
                        assert_eq!(
                            result.is_ok(),
                            oracle.take(units.into(), now, false),
                            "seed {seed}, step {step}"
                        );
                        match result {
                            Ok(cost) => taken.push((cost, units)),
                            Err(BucketRefusal::RetryAfter(wait)) => {
                                // One nanosecond earlier the take would fail; at the reported time it
                                // succeeds.
                                let wait = wait.as_nanos() as i128;
                                assert!(
                                    oracle.level + wait * oracle.limit >= i128::from(units) * Oracle::ONE
                                );
                                assert!(
                                    oracle.level + (wait - 1) * oracle.limit
                                        < i128::from(units) * Oracle::ONE
                                );
                            }
                            Err(BucketRefusal::ExceedsCapacity) => {
                                panic!("seed {seed}: units are below the limit")
                            }
                        }
                    }
                }
                oracle.refill(now);
                let level = u64::try_from(oracle.level / Oracle::ONE).unwrap_or(0);
                assert_eq!(bucket.level(now).expect("limited").0, level, "seed {seed}, step {step}");
            }
        }
    }

    #[test]
    fn a_whole_minute_fits_whatever_the_limit() {
        for limit in [1, 7, 59, 61, 999, 123_457] {
            let bucket = Bucket::new(Some(limit));
            assert!((0..limit).all(|_| bucket.take(1, 5).is_ok()), "{limit}");
            assert!(bucket.take(1, 5).is_err(), "{limit}");
            assert_eq!(bucket.take(limit + 1, 5), Err(BucketRefusal::ExceedsCapacity));
        }
    }

    #[test]
    fn threads_together_take_no_more_than_there_is() {
        let bucket = Bucket::new(Some(6000));
        let taken: usize = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..4)
                .map(|_| scope.spawn(|| (0..4000).filter(|_| bucket.take(1, 9).is_ok()).count()))
                .collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).sum()
        });
        assert_eq!(taken, 6000);
    }

    #[test]
    fn no_limit_gives_always() {
        let bucket = Bucket::new(None);
        assert_eq!(bucket.take(u64::MAX, 0), Ok(0));
        assert_eq!(bucket.level(0), None);
    }
}
