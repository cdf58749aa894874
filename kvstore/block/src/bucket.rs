//! A token bucket of bytes, refilled at a rate up to a burst.
//!
//! The bucket counts in byte-nanoseconds as integers, so nothing is lost to rounding: over any time t at most
//! burst + rate × t bytes are granted, and a caller that always asks gets all of them. Time is an argument; no
//! allocation, no system call.

use std::num::NonZeroU64;
use std::time::{Duration, Instant};

const NANOS_PER_S: i128 = 1_000_000_000;

/// A token bucket. See the module's documentation.
#[derive(Debug, Clone)]
pub struct TokenBucket {
    bytes_per_s: i128,
    /// In byte-nanoseconds-per-second: bytes × 10⁹.
    burst: i128,
    level: i128,
    at: Instant,
}

impl TokenBucket {
    /// Returns a full bucket.
    #[must_use]
    pub fn new(bytes_per_s: NonZeroU64, burst_bytes: NonZeroU64, now: Instant) -> Self {
        let burst = i128::from(burst_bytes.get()) * NANOS_PER_S;
        Self { bytes_per_s: i128::from(bytes_per_s.get()), burst, level: burst, at: now }
    }

    fn refill(&mut self, now: Instant) {
        let Some(passed) = now.checked_duration_since(self.at) else { return };
        let passed = i128::try_from(passed.as_nanos()).unwrap_or(i128::MAX);
        let gained = self.bytes_per_s.saturating_mul(passed);
        self.level = self.level.saturating_add(gained).min(self.burst);
        self.at = now;
    }

    /// Takes `bytes` while `reserve_bytes` remain, or returns the time to wait. A request above the burst
    /// passes when the bucket is full and leaves a debt.
    pub fn take(&mut self, now: Instant, bytes: u64, reserve_bytes: u64) -> Result<(), Duration> {
        self.refill(now);
        let bytes = i128::from(bytes) * NANOS_PER_S;
        let needed = (bytes + i128::from(reserve_bytes) * NANOS_PER_S).min(self.burst);
        if self.level >= needed {
            self.level -= bytes;
            return Ok(());
        }
        let missing = needed - self.level;
        let nanos = missing / self.bytes_per_s + i128::from(missing % self.bytes_per_s != 0);
        Err(Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)))
    }

    /// Takes `bytes` unconditionally; the debt stops at `debt_max_bytes`, and any excess is forgiven.
    pub fn charge(&mut self, now: Instant, bytes: u64, debt_max_bytes: u64) {
        self.refill(now);
        let floor = -(i128::from(debt_max_bytes) * NANOS_PER_S);
        let wanted = self.level - i128::from(bytes) * NANOS_PER_S;
        self.level = wanted.max(floor.min(self.level));
    }

    /// Returns the whole bytes that are left now, negative for a debt.
    pub fn level_bytes(&mut self, now: Instant) -> i128 {
        self.refill(now);
        self.level.div_euclid(NANOS_PER_S)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(count: u64) -> NonZeroU64 {
        NonZeroU64::new(count).expect("not zero")
    }

    #[test]
    fn no_byte_is_lost_or_invented_over_a_million_odd_steps() {
        let seed = 51;
        println!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        let (rate, burst) = (333_333_337, 1 << 20);
        let start = Instant::now();
        let mut bucket = TokenBucket::new(bytes(rate), bytes(burst), start);
        let (mut now, mut granted) = (start, 0_u128);
        for _ in 0..1_000_000 {
            let size = 1 + random.u64(..5000);
            match bucket.take(now, size, 0) {
                Ok(()) => granted += u128::from(size),
                Err(wait) => {
                    // Waiting for the returned time is enough, one nanosecond less is not.
                    assert!(bucket.clone().take(now + wait - Duration::from_nanos(1), size, 0).is_err());
                    now += wait;
                    assert_eq!(bucket.take(now, size, 0), Ok(()));
                    granted += u128::from(size);
                }
            }
        }
        let limit = u128::from(burst) + u128::from(rate) * (now - start).as_nanos() / 1_000_000_000;
        let left = bucket.level_bytes(now);
        assert!(granted <= limit);
        assert!(limit - granted <= left as u128 + 1, "{granted} of {limit}, {left} left");
    }

    #[test]
    fn a_piece_above_the_burst_passes_a_full_bucket_and_is_paid_off() {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let mut bucket = TokenBucket::new(bytes(1000), bytes(500), start);
        assert_eq!(bucket.take(start, 10_500, 0), Ok(()));
        assert_eq!(bucket.level_bytes(start), -10_000);
        assert_eq!(bucket.take(after(9), 1, 0), Err(Duration::from_millis(1001)));
        assert_eq!(bucket.take(after(10), 1, 0), Err(Duration::from_millis(1)));
        assert_eq!(bucket.take(after(11), 500, 0), Ok(()), "no more than the burst is saved up");
        assert!(bucket.take(after(11), 1, 0).is_err());
    }

    #[test]
    fn what_is_reserved_stays_and_a_charge_stops_at_its_debt() {
        let now = Instant::now();
        let mut bucket = TokenBucket::new(bytes(1000), bytes(1000), now);
        assert_eq!(bucket.take(now, 400, 500), Ok(()));
        assert_eq!(bucket.take(now, 400, 500), Err(Duration::from_millis(300)));
        assert_eq!(bucket.take(now, 400, 0), Ok(()));
        bucket.charge(now, 10_000, 2000);
        assert_eq!(bucket.level_bytes(now), -2000);
    }

    #[test]
    fn clocks_that_go_back_and_huge_numbers_do_no_harm() {
        let early = Instant::now();
        let far = early + Duration::from_secs(u32::MAX.into());
        let late = early + Duration::from_secs(10);
        let mut bucket = TokenBucket::new(bytes(u64::MAX), bytes(u64::MAX), late);
        assert_eq!(bucket.take(early, u64::MAX, u64::MAX), Ok(()));
        assert!(bucket.take(early, 1, 0).is_err());
        assert!(bucket.take(late, 1, 0).is_err(), "the same time does not count twice");
        assert_eq!(bucket.take(far, u64::MAX, 0), Ok(()));
        bucket.charge(far, u64::MAX, 0);
        assert_eq!(bucket.level_bytes(far), 0);
    }
}
