//! Bandwidth of a tier, shared between transfers that decoding waits for and background traffic.
//!
//! Onboarding is never held back, but it is charged, so it takes the bandwidth from offload and prefetch; what it takes
//! beyond `debt_max_bytes` is forgiven, so that background work resumes at last.
//!
//! Time is an argument. One thread owns a gate; no allocation, no system call.

use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use kvstore_block::TokenBucket;

use crate::plan::tier::{TIERS, Tier};

/// Class of the traffic that asks for bandwidth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Priority {
    /// A request waits for it: never held back.
    Onboard,
    /// Writing evicted blocks down.
    Offload,
    /// Reading ahead, and probes: leaves half of the burst to offload.
    Prefetch,
}

/// Answer of the gate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Admission {
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
    /// Most bytes by which onboarding can push background traffic back.
    pub debt_max_bytes: u64,
}

impl BandwidthLimit {
    /// A limit of `bytes` per second with a burst and a debt of one second each; a block of `block_bytes` always fits. Zero is no
    /// limit.
    #[must_use]
    pub fn per_second(bytes: u64, block_bytes: usize) -> Option<Self> {
        NonZeroU64::new(bytes).map(|bytes_per_s| Self {
            bytes_per_s,
            burst_bytes: bytes_per_s.max(NonZeroU64::new(block_bytes as u64).unwrap_or(NonZeroU64::MIN)),
            debt_max_bytes: bytes,
        })
    }

    /// Returns such limits in the order of all tiers; tiers that are not named have none.
    #[must_use]
    pub fn of_tiers(limits: &[(Tier, u64)], block_bytes: usize) -> [Option<Self>; TIERS] {
        let mut all = [None; TIERS];
        for &(tier, bytes) in limits {
            all[tier.index()] = Self::per_second(bytes, block_bytes);
        }
        all
    }
}

/// One bucket for each limited tier.
#[derive(Debug, Clone)]
pub(crate) struct BandwidthGate {
    tiers: [Option<(TokenBucket, BandwidthLimit)>; TIERS],
}

impl BandwidthGate {
    /// `None` is a tier without a limit.
    #[must_use]
    pub(crate) fn new(limits: [Option<BandwidthLimit>; TIERS], now: Instant) -> Self {
        let bucket =
            |limit: BandwidthLimit| (TokenBucket::new(limit.bytes_per_s, limit.burst_bytes, now), limit);
        Self { tiers: limits.map(|limit| limit.map(bucket)) }
    }

    /// Whether the tier has a limit; without one everything is granted at any time.
    #[must_use]
    pub(crate) fn is_limited(&self, tier: Tier) -> bool {
        self.tiers[tier.index()].is_some()
    }

    /// Whether `bytes` may move now.
    pub(crate) fn admit(&mut self, now: Instant, tier: Tier, priority: Priority, bytes: u64) -> Admission {
        let Some((bucket, limit)) = &mut self.tiers[tier.index()] else { return Admission::Granted };
        let reserve_bytes = match priority {
            Priority::Onboard => {
                bucket.charge(now, bytes, limit.debt_max_bytes);
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
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(count: u64) -> NonZeroU64 {
        NonZeroU64::new(count).expect("not zero")
    }

    #[test]
    fn onboarding_comes_first_and_background_resumes() {
        let start = Instant::now();
        let limit =
            BandwidthLimit { bytes_per_s: bytes(1000), burst_bytes: bytes(1000), debt_max_bytes: 2000 };
        let mut gate = BandwidthGate::new([None, Some(limit), None, None], start);
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(gate.is_limited(Tier::Disk) && !gate.is_limited(Tier::Host));
        assert_eq!(gate.admit(at(0), Tier::Host, Priority::Prefetch, u64::MAX), Admission::Granted);
        assert_eq!(gate.admit(at(0), Tier::Disk, Priority::Prefetch, 400), Admission::Granted);
        assert!(matches!(gate.admit(at(0), Tier::Disk, Priority::Prefetch, 400), Admission::Throttled(_)));
        assert_eq!(gate.admit(at(0), Tier::Disk, Priority::Offload, 400), Admission::Granted);
        assert_eq!(gate.admit(at(0), Tier::Disk, Priority::Onboard, 10_000), Admission::Granted);
        let wait = gate.admit(at(0), Tier::Disk, Priority::Offload, 500);
        assert_eq!(wait, Admission::Throttled(Duration::from_millis(2500)));
        assert_eq!(
            gate.admit(start + Duration::from_millis(2500), Tier::Disk, Priority::Offload, 500),
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
}
