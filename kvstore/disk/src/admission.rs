//! Admission of writes by frequency, bandwidth and endurance.
//!
//! Everything here is a function of its arguments, time included. [`Usage`] is what the SSD has been made to write:
//! it travels in every page that the log writes, so a restart keeps it. The day's window rolls: the share of the
//! day before that is not yet 24 hours old counts too, taken as even over that day (a sliding window of two
//! counters; 24 counters would be exact and cost 192 bytes in every page). A wall clock that is set back by up to a day
//! grants nothing: bytes then count for the latest day seen. By more, what was wrong is the day that is stored, which
//! would forbid writes until it comes: the present day is taken, and the stored day's bytes count as the day before's.

use std::num::NonZeroU64;
use std::time::Instant;

use kvstore_block::TokenBucket;

use crate::ClockReading;

const DAY_S: u64 = 86_400;

/// Bytes that the device was made to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Usage {
    /// Bytes since the areas were first formatted: formatting them again keeps the count.
    pub total_bytes: u64,
    /// The latest day with a write, in days since 1970.
    pub day: u32,
    /// Bytes on that day.
    pub day_bytes: u64,
    /// Bytes on the day before it.
    pub previous_day_bytes: u64,
}

impl Usage {
    /// Counts a write.
    pub fn add(&mut self, unix_s: u64, bytes: u64) {
        let day = day_of(unix_s);
        if day > self.day {
            self.previous_day_bytes = if day == self.day.saturating_add(1) { self.day_bytes } else { 0 };
            self.day_bytes = 0;
            self.day = day;
        } else if is_impossible(self.day, day) {
            (self.previous_day_bytes, self.day_bytes, self.day) = (self.day_bytes, 0, day);
        }
        self.total_bytes = self.total_bytes.saturating_add(bytes);
        self.day_bytes = self.day_bytes.saturating_add(bytes);
    }

    /// Bytes written in the 24 hours before `unix_s`.
    #[must_use]
    pub fn rolling_bytes(&self, unix_s: u64) -> u64 {
        let left = DAY_S - unix_s % DAY_S;
        let share = |bytes: u64| {
            u64::try_from(u128::from(bytes) * u128::from(left) / u128::from(DAY_S)).unwrap_or(u64::MAX)
        };
        let day = day_of(unix_s);
        match day.checked_sub(self.day) {
            // Counted as `add` would count it.
            None if is_impossible(self.day, day) => share(self.day_bytes),
            // The clock was set back: the bytes of both days count in full.
            None => self.day_bytes.saturating_add(self.previous_day_bytes),
            Some(0) => self.day_bytes.saturating_add(share(self.previous_day_bytes)),
            Some(1) => share(self.day_bytes),
            Some(_) => 0,
        }
    }
}

/// Whether a stored day is so far ahead of the present that the clock must have been wrong then.
fn is_impossible(stored: u32, day: u32) -> bool {
    stored > day.saturating_add(1)
}

fn day_of(unix_s: u64) -> u32 {
    u32::try_from(unix_s / DAY_S).unwrap_or(u32::MAX)
}

/// Returns the bucket of a limit; `None` for a rate of 0, which never limits.
pub(crate) fn bucket(bytes_per_second: u64, burst_bytes: u64, now: Instant) -> Option<TokenBucket> {
    let burst = NonZeroU64::new(burst_bytes).unwrap_or(NonZeroU64::MIN);
    NonZeroU64::new(bytes_per_second).map(|rate| TokenBucket::new(rate, burst, now))
}

/// Returns whether `bytes` may pass now, and charges them if so.
pub(crate) fn passes(bucket: &mut Option<TokenBucket>, now: Instant, bytes: u64) -> bool {
    bucket.as_mut().is_none_or(|bucket| bucket.take(now, bytes, 0).is_ok())
}

/// Limits of writes. 0 switches a limit off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdmissionConfig {
    /// Minimum number of times that a block was seen.
    pub frequency_min: u32,
    /// Bandwidth in bytes per second.
    pub bytes_per_second: u64,
    /// Bytes that may be written at once above that rate.
    pub burst_bytes: u64,
    /// Endurance: bytes per 24 hours, rolling.
    pub bytes_per_day: u64,
}

impl Default for AdmissionConfig {
    fn default() -> Self {
        Self { frequency_min: 2, bytes_per_second: 0, burst_bytes: 256 << 20, bytes_per_day: 0 }
    }
}

/// Decision on the write of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteAdmission {
    /// The block may be written; its bytes are charged to the bandwidth.
    Admit,
    /// The block was seen fewer than `frequency_min` times.
    TooRare,
    /// The bandwidth is used up for now.
    OverBandwidth,
    /// The bytes of the last 24 hours are used up.
    OverEndurance,
}

/// Decides which blocks may be written.
#[derive(Debug, Clone)]
pub struct Admission {
    config: AdmissionConfig,
    bucket: Option<TokenBucket>,
}

impl Admission {
    /// Returns an admission whose bucket holds the full burst.
    #[must_use]
    pub fn new(config: AdmissionConfig, now: ClockReading) -> Self {
        let bucket = bucket(config.bytes_per_second, config.burst_bytes, now.instant);
        Self { config, bucket }
    }

    /// Decides whether a block of `bytes` that was seen `frequency` times may be written now. The endurance is
    /// checked before the bandwidth is charged, so a refusal costs nothing.
    pub fn decide(&mut self, frequency: u32, bytes: u64, usage: &Usage, now: ClockReading) -> WriteAdmission {
        let limit = self.config.bytes_per_day;
        if frequency < self.config.frequency_min {
            WriteAdmission::TooRare
        } else if limit > 0 && usage.rolling_bytes(now.unix_s).saturating_add(bytes) > limit {
            WriteAdmission::OverEndurance
        } else if !passes(&mut self.bucket, now.instant, bytes) {
            WriteAdmission::OverBandwidth
        } else {
            WriteAdmission::Admit
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(start: Instant, ms: u64) -> ClockReading {
        ClockReading { instant: start + Duration::from_millis(ms), unix_s: DAY_S * 20_000 + ms / 1000 }
    }

    #[test]
    fn each_limit_refuses_under_its_own_name() {
        let start = Instant::now();
        let config = AdmissionConfig {
            frequency_min: 2,
            bytes_per_second: 1000,
            burst_bytes: 500,
            bytes_per_day: 1200,
        };
        let mut admission = Admission::new(config, at(start, 0));
        let mut usage = Usage::default();
        let mut decide =
            |frequency, bytes, usage: &Usage, ms| admission.decide(frequency, bytes, usage, at(start, ms));
        assert_eq!(decide(1, 10, &usage, 0), WriteAdmission::TooRare);
        assert_eq!(decide(2, 500, &usage, 0), WriteAdmission::Admit);
        usage.add(at(start, 0).unix_s, 500);
        assert_eq!(decide(2, 100, &usage, 99), WriteAdmission::OverBandwidth);
        assert_eq!(decide(2, 100, &usage, 100), WriteAdmission::Admit);
        usage.add(at(start, 0).unix_s, 100);
        assert_eq!(decide(9, 601, &usage, 10_000), WriteAdmission::OverEndurance);
        assert_eq!(
            decide(9, 600, &usage, 10_000),
            WriteAdmission::Admit,
            "more than the burst, from a full bucket"
        );
        assert_eq!(decide(9, 1, &usage, 10_000), WriteAdmission::OverBandwidth);
        assert_eq!(
            decide(9, 1, &usage, 10_101),
            WriteAdmission::Admit,
            "100 bytes of debt are paid off after 100 ms"
        );
    }

    #[test]
    fn the_day_rolls_and_a_clock_set_back_grants_nothing() {
        let mut usage = Usage::default();
        let noon = DAY_S * 100 + DAY_S / 2;
        usage.add(noon, 1000);
        assert_eq!(usage.rolling_bytes(noon), 1000);
        assert_eq!(usage.rolling_bytes(noon + DAY_S), 500, "half of the day before");
        assert_eq!(usage.rolling_bytes(noon + 2 * DAY_S), 0);
        usage.add(noon + DAY_S, 10);
        assert_eq!(usage, Usage { total_bytes: 1010, day: 101, day_bytes: 10, previous_day_bytes: 1000 });
        assert_eq!(usage.rolling_bytes(noon + DAY_S), 510);
        usage.add(noon, 5);
        assert_eq!(usage.day_bytes, 15);
        assert_eq!(usage.rolling_bytes(noon), 1015);
        usage.add(u64::MAX, u64::MAX);
        assert_eq!(usage.total_bytes, u64::MAX);
    }

    #[test]
    fn a_day_far_ahead_does_not_forbid_writes_for_ever() {
        let start = Instant::now();
        let config = AdmissionConfig { frequency_min: 0, bytes_per_day: 1000, ..AdmissionConfig::default() };
        let mut usage = Usage::default();
        usage.add(DAY_S * 90_000, 1000);
        let mut admission = Admission::new(config, at(start, 0));
        let mut decide = |usage: &Usage, ms| admission.decide(0, 100, usage, at(start, ms));
        assert_eq!(decide(&usage, 0), WriteAdmission::OverEndurance, "the bytes are not forgotten");
        let noon_ms = DAY_S * 500;
        assert_eq!(decide(&usage, noon_ms), WriteAdmission::Admit);
        usage.add(at(start, noon_ms).unix_s, 100);
        let expected = Usage { total_bytes: 1100, day: 20_000, day_bytes: 100, previous_day_bytes: 1000 };
        assert_eq!(usage, expected);
        assert_eq!(usage.rolling_bytes(at(start, noon_ms).unix_s), 600);
    }
}
