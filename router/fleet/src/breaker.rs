//! Failures of workers that answer their health checks: a circuit breaker for each worker, and a budget for retries over all
//! of them.
//!
//! Hot path: a success is one load when nothing failed before; everything is relaxed, since a decision may use a state that
//! is a moment old.

use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Failures in a row that open the breaker.
const FAILURES_MAX: u32 = 5;
/// First time for which the breaker is open; it doubles with each further opening.
const OPEN_FOR: Duration = Duration::from_secs(1);
/// Longest time for which the breaker is open.
const OPEN_FOR_MAX: Duration = Duration::from_secs(30);

/// Takes a worker out of routing for a time after failures in a row. After that it gets requests again; the first failure
/// takes it out for longer, the first success resets the breaker.
#[derive(Debug)]
pub struct Breaker {
    start: Instant,
    failures: AtomicU32,
    openings: AtomicU32,
    /// Time until which the worker is out, in milliseconds since `start`.
    open_until: AtomicU64,
    /// Number of times that the worker was taken out.
    pub ejections: AtomicU64,
}

impl Breaker {
    /// Returns a closed breaker; its times are counted from `start`.
    pub fn new(start: Instant) -> Self {
        Self {
            start,
            failures: AtomicU32::new(0),
            openings: AtomicU32::new(0),
            open_until: AtomicU64::new(0),
            ejections: AtomicU64::new(0),
        }
    }

    fn since_start(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.start).as_millis() as u64
    }

    /// Whether the worker is out of routing.
    pub fn is_open(&self, now: Instant) -> bool {
        let until = self.open_until.load(Ordering::Relaxed);
        until > 0 && self.since_start(now) < until
    }

    /// Records a success: closes the breaker and forgets earlier failures.
    pub fn succeeded(&self) {
        if self.failures.load(Ordering::Relaxed) > 0 {
            self.failures.store(0, Ordering::Relaxed);
            self.openings.store(0, Ordering::Relaxed);
            self.open_until.store(0, Ordering::Relaxed);
        }
    }

    /// Resets the breaker for a new process of the worker.
    pub(crate) fn reset(&self) {
        self.succeeded();
    }

    /// Records a failure; true when it takes the worker out.
    pub fn failed(&self, now: Instant) -> bool {
        let failures = self.failures.fetch_add(1, Ordering::Relaxed) + 1;
        if failures < FAILURES_MAX || self.is_open(now) {
            return false;
        }
        let openings = self.openings.fetch_add(1, Ordering::Relaxed);
        let open_for = OPEN_FOR.saturating_mul(1 << openings.min(8)).min(OPEN_FOR_MAX);
        self.open_until.store(self.since_start(now) + open_for.as_millis() as u64, Ordering::Relaxed);
        self.ejections.fetch_add(1, Ordering::Relaxed);
        true
    }
}

/// Each request earns a share of a retry, so that retries cannot multiply an overload.
#[derive(Debug)]
pub struct RetryBudget {
    /// Balance in hundredths of a retry.
    balance: AtomicI64,
}

/// Hundredths of a retry that a request earns.
const EARNED: i64 = 20;
/// Least limit of saved retries; the limit is one per request in flight if that is more. A worker that dies with many streams
/// needs a retry for each of them at once.
const SAVED_MIN: i64 = 100;

impl Default for RetryBudget {
    fn default() -> Self {
        Self { balance: AtomicI64::new(SAVED_MIN * 100) }
    }
}

impl RetryBudget {
    /// Adds a request's share of a retry, a fifth; `inside` is the number of requests in flight.
    pub fn deposit(&self, inside: usize) {
        let most = SAVED_MIN.max(i64::try_from(inside).unwrap_or(i64::MAX / 100)).saturating_mul(100);
        if self.balance.load(Ordering::Relaxed) < most {
            self.balance.fetch_add(EARNED, Ordering::Relaxed);
        }
    }

    /// Takes a retry; false when none is left.
    pub fn withdraw(&self) -> bool {
        if self.balance.fetch_sub(100, Ordering::Relaxed) >= 100 {
            return true;
        }
        self.refund();
        false
    }

    /// Returns a retry that was taken for a hedge and not made.
    pub fn refund(&self) {
        self.balance.fetch_add(100, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_breaker_opens_longer_each_time_and_closes_with_a_success() {
        let start = Instant::now();
        let breaker = Breaker::new(start);
        let at = |seconds: f64| start + Duration::from_secs_f64(seconds);
        for _ in 1..FAILURES_MAX {
            assert!(!breaker.failed(at(0.1)));
        }
        assert!(!breaker.is_open(at(0.1)));
        assert!(breaker.failed(at(0.1)));
        assert!(breaker.is_open(at(1.0)) && !breaker.is_open(at(1.2)));
        assert!(breaker.failed(at(1.2)), "the first failure afterwards opens it again");
        assert!(breaker.is_open(at(3.1)) && !breaker.is_open(at(3.3)));
        for turn in 0..20 {
            breaker.failed(at(4.0 + 31.0 * f64::from(turn)));
        }
        assert!(!breaker.is_open(at(4.0 + 31.0 * 19.0 + 30.1)), "never longer than the maximum");
        breaker.succeeded();
        assert!(!breaker.failed(at(1000.0)));
    }

    #[test]
    fn retries_are_a_share_of_requests() {
        let budget = RetryBudget::default();
        let mut spent = 0;
        for _ in 0..1000 {
            budget.deposit(64);
            spent += i64::from(budget.withdraw());
        }
        assert!((SAVED_MIN + 195..=SAVED_MIN + 205).contains(&spent), "{spent}");
    }

    #[test]
    fn as_many_retries_are_saved_as_requests_are_inside() {
        let budget = RetryBudget::default();
        (0..10_000).for_each(|_| budget.deposit(1000));
        assert_eq!((0..2000).filter(|_| budget.withdraw()).count(), 1000);
        (0..10_000).for_each(|_| budget.deposit(3));
        assert_eq!((0..2000).filter(|_| budget.withdraw()).count(), 100);
    }

    #[test]
    fn a_refund_gives_one_retry_back() {
        let budget = RetryBudget::default();
        while budget.withdraw() {}
        budget.refund();
        assert_eq!([budget.withdraw(), budget.withdraw()], [true, false]);
    }
}
