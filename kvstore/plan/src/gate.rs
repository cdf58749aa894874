//! Bandwidth of a tier, shared between what decoding waits for and background traffic.
//!
//! [`TokenBucket`] counts in byte-nanoseconds as integers, so nothing is lost to rounding: over any time t at
//! most burst + rate × t bytes are granted, and a caller that always asks gets all of them. Onboarding is
//! never held back, but it is charged, so it takes the bandwidth from offload and prefetch; what it takes
//! beyond `debt_max_bytes` is forgiven and counted, so that background work resumes at last.
//!
//! Time is an argument (any monotonic clock). One thread owns a gate; no allocation, no system call.

use std::num::NonZeroU64;
use std::time::Duration;

use crate::tier::{TIERS, Tier};

const NANOS_PER_S: i128 = 1_000_000_000;

/// Bytes that may be moved now, refilled at a rate up to a burst.
#[derive(Debug, Clone)]
pub struct TokenBucket {
    bytes_per_s: i128,
    /// In byte-nanoseconds-per-second: bytes × 10⁹.
    burst: i128,
    level: i128,
    at: Duration,
}

impl TokenBucket {
    /// A full bucket.
    #[must_use]
    pub fn new(bytes_per_s: NonZeroU64, burst_bytes: NonZeroU64, now: Duration) -> Self {
        let burst = i128::from(burst_bytes.get()) * NANOS_PER_S;
        Self { bytes_per_s: i128::from(bytes_per_s.get()), burst, level: burst, at: now }
    }

    fn refill(&mut self, now: Duration) {
        let Some(passed) = now.checked_sub(self.at) else { return };
        let passed = i128::try_from(passed.as_nanos()).unwrap_or(i128::MAX);
        let gained = self.bytes_per_s.saturating_mul(passed);
        self.level = self.level.saturating_add(gained).min(self.burst);
        self.at = now;
    }

    /// Takes `bytes` while `reserve_bytes` remain, or says how long to wait. A request above the burst passes
    /// when the bucket is full and leaves a debt.
    pub fn take(&mut self, now: Duration, bytes: u64, reserve_bytes: u64) -> Result<(), Duration> {
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

    /// Takes `bytes` in any case; the debt stops at `debt_max_bytes`. Returns the bytes that were forgiven,
    /// rounded up.
    pub fn charge(&mut self, now: Duration, bytes: u64, debt_max_bytes: u64) -> u64 {
        self.refill(now);
        let floor = -(i128::from(debt_max_bytes) * NANOS_PER_S);
        let wanted = self.level - i128::from(bytes) * NANOS_PER_S;
        let floor = floor.min(self.level);
        self.level = wanted.max(floor);
        u64::try_from((self.level - wanted + NANOS_PER_S - 1) / NANOS_PER_S).unwrap_or(u64::MAX)
    }

    /// Whole bytes that are left now, negative for a debt.
    pub fn level_bytes(&mut self, now: Duration) -> i128 {
        self.refill(now);
        self.level.div_euclid(NANOS_PER_S)
    }
}

/// Who asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Priority {
    /// A request waits for it: never held back.
    Onboard,
    /// Writing evicted blocks down.
    Offload,
    /// Reading ahead, and probes: leaves half of the burst to offload.
    Prefetch,
}

/// The answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    /// Go on; the bytes are charged.
    Granted,
    /// Come back after this time.
    Throttled(Duration),
}

/// The budget of one tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BandwidthLimit {
    /// Bytes a second for all traffic of the tier.
    pub bytes_per_s: NonZeroU64,
    /// Bytes at once after a pause.
    pub burst_bytes: NonZeroU64,
    /// Onboarding can push background traffic back by so many bytes, no more.
    pub debt_max_bytes: u64,
}

/// One bucket for each limited tier.
#[derive(Debug, Clone)]
pub struct BandwidthGate {
    tiers: [Option<(TokenBucket, BandwidthLimit)>; TIERS],
    forgiven_bytes: [u64; TIERS],
}

impl BandwidthGate {
    /// `None` is a tier without a limit.
    #[must_use]
    pub fn new(limits: [Option<BandwidthLimit>; TIERS], now: Duration) -> Self {
        let bucket =
            |limit: BandwidthLimit| (TokenBucket::new(limit.bytes_per_s, limit.burst_bytes, now), limit);
        Self { tiers: limits.map(|limit| limit.map(bucket)), forgiven_bytes: [0; TIERS] }
    }

    /// Whether the tier has a limit; without one everything is granted at any time.
    #[must_use]
    pub fn is_limited(&self, tier: Tier) -> bool {
        self.tiers[tier.index()].is_some()
    }

    /// Whether `bytes` may move now.
    pub fn admit(&mut self, now: Duration, tier: Tier, priority: Priority, bytes: u64) -> Admission {
        let Some((bucket, limit)) = &mut self.tiers[tier.index()] else { return Admission::Granted };
        let reserve_bytes = match priority {
            Priority::Onboard => {
                let forgiven = bucket.charge(now, bytes, limit.debt_max_bytes);
                let sum = &mut self.forgiven_bytes[tier.index()];
                *sum = sum.saturating_add(forgiven);
                return Admission::Granted;
            }
            Priority::Offload => 0,
            Priority::Prefetch => limit.burst_bytes.get() / 2,
        };
        match bucket.take(now, bytes, reserve_bytes) {
            Ok(()) => Admission::Granted,
            Err(wait) => Admission::Throttled(wait),
        }
    }

    /// Bytes that onboarding moved beyond the debt, for metrics.
    #[must_use]
    pub fn forgiven_bytes(&self, tier: Tier) -> u64 {
        self.forgiven_bytes[tier.index()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Random;

    fn bytes(count: u64) -> NonZeroU64 {
        NonZeroU64::new(count).expect("not zero")
    }

    #[test]
    fn no_byte_is_lost_or_invented_over_a_million_odd_steps() {
        let seed = 51;
        println!("seed {seed}");
        let mut random = Random::new(seed);
        let (rate, burst) = (333_333_337, 1 << 20);
        let mut bucket = TokenBucket::new(bytes(rate), bytes(burst), Duration::ZERO);
        let (mut now, mut granted) = (Duration::ZERO, 0_u128);
        for _ in 0..1_000_000 {
            let size = 1 + random.bits() % 5000;
            match bucket.take(now, size, 0) {
                Ok(()) => granted += u128::from(size),
                Err(wait) => {
                    // Waiting exactly as told is enough, one nanosecond less is not.
                    assert!(bucket.clone().take(now + wait - Duration::from_nanos(1), size, 0).is_err());
                    now += wait;
                    assert_eq!(bucket.take(now, size, 0), Ok(()));
                    granted += u128::from(size);
                }
            }
        }
        let limit = u128::from(burst) + u128::from(rate) * now.as_nanos() / 1_000_000_000;
        let left = bucket.level_bytes(now);
        assert!(granted <= limit);
        assert!(limit - granted <= left as u128 + 1, "{granted} of {limit}, {left} left");
    }

    #[test]
    fn onboarding_comes_first_and_background_resumes() {
        let limit =
            BandwidthLimit { bytes_per_s: bytes(1000), burst_bytes: bytes(1000), debt_max_bytes: 2000 };
        let mut gate = BandwidthGate::new([None, Some(limit), None, None], Duration::ZERO);
        let at = Duration::from_secs;
        assert!(gate.is_limited(Tier::Disk) && !gate.is_limited(Tier::Host));
        assert_eq!(gate.admit(at(0), Tier::Host, Priority::Prefetch, u64::MAX), Admission::Granted);
        assert_eq!(gate.admit(at(0), Tier::Disk, Priority::Prefetch, 400), Admission::Granted);
        assert!(matches!(gate.admit(at(0), Tier::Disk, Priority::Prefetch, 400), Admission::Throttled(_)));
        assert_eq!(gate.admit(at(0), Tier::Disk, Priority::Offload, 400), Admission::Granted);
        assert_eq!(gate.admit(at(0), Tier::Disk, Priority::Onboard, 10_000), Admission::Granted);
        assert_eq!(gate.forgiven_bytes(Tier::Disk), 10_000 - 200 - 2000);
        let wait = gate.admit(at(0), Tier::Disk, Priority::Offload, 500);
        assert_eq!(wait, Admission::Throttled(Duration::from_millis(2500)));
        assert_eq!(
            gate.admit(Duration::from_millis(2500), Tier::Disk, Priority::Offload, 500),
            Admission::Granted
        );
        assert_eq!(
            gate.admit(at(100), Tier::Disk, Priority::Offload, 5000),
            Admission::Granted,
            "above the burst"
        );
        assert_eq!(
            gate.admit(at(100), Tier::Disk, Priority::Offload, 1),
            Admission::Throttled(Duration::from_millis(4001))
        );
    }

    #[test]
    fn clocks_that_go_back_and_huge_numbers_do_no_harm() {
        let mut bucket = TokenBucket::new(bytes(u64::MAX), bytes(u64::MAX), Duration::from_secs(10));
        assert_eq!(bucket.take(Duration::ZERO, u64::MAX, u64::MAX), Ok(()));
        assert!(bucket.take(Duration::ZERO, 1, 0).is_err());
        assert_eq!(bucket.take(Duration::MAX, u64::MAX, 0), Ok(()));
        assert_eq!(bucket.charge(Duration::MAX, u64::MAX, 0), u64::MAX);
    }
}
