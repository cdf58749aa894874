//! Bandwidth of each tier: bytes that requests wait for are only counted, all other traffic waits for its
//! turn.
//!
//! One thread. The clock is read for tiers that have a limit, and for no other.

use std::time::{Duration, Instant};

use crate::plan::{Admission, BandwidthGate, BandwidthLimit, Priority, TIERS, Tier};

pub(crate) struct Bandwidth {
    gate: BandwidthGate,
    clock: fn() -> Instant,
    /// Writes wait for bandwidth until this time.
    writes_from: Option<Instant>,
}

impl Bandwidth {
    pub(crate) fn new(limits: [Option<BandwidthLimit>; TIERS], now: Instant, clock: fn() -> Instant) -> Self {
        Self { gate: BandwidthGate::new(limits, now), clock, writes_from: None }
    }

    /// Counts bytes that a request waits for; they are never held back.
    pub(crate) fn charge(&mut self, tier: Tier, bytes: u64) {
        let _granted = self.admit(tier, Priority::Onboard, bytes);
    }

    /// Whether bytes may be moved now; how long they have to wait if not.
    pub(crate) fn admit(&mut self, tier: Tier, priority: Priority, bytes: u64) -> Result<(), Duration> {
        if !self.gate.is_limited(tier) {
            return Ok(());
        }
        match self.gate.admit((self.clock)(), tier, priority, bytes) {
            Admission::Granted => Ok(()),
            Admission::Throttled(wait) => Err(wait),
        }
    }

    /// Whether writes wait for bandwidth.
    pub(crate) fn holds_writes(&self) -> bool {
        self.writes_from.is_some()
    }

    /// Holds writes back for this time.
    pub(crate) fn hold_writes(&mut self, wait: Duration) {
        self.writes_from = Some((self.clock)() + wait);
    }

    /// Whether the wait of the writes is over, and ends it then.
    pub(crate) fn release_writes(&mut self, now: Instant) -> bool {
        self.writes_from.take_if(|from| *from <= now).is_some()
    }

    /// Time at which writes that wait are tried again.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.writes_from
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU64;

    use super::*;

    fn no_clock() -> Instant {
        panic!("the clock was read")
    }

    fn limited_disk() -> [Option<BandwidthLimit>; TIERS] {
        let bytes = |count| NonZeroU64::new(count).expect("not zero");
        let mut limits = [None; TIERS];
        limits[Tier::Disk.index()] =
            Some(BandwidthLimit { bytes_per_s: bytes(1), burst_bytes: bytes(1000), debt_max_bytes: 0 });
        limits
    }

    #[test]
    fn a_tier_without_a_limit_costs_no_look_at_the_clock() {
        let mut bandwidth = Bandwidth::new(limited_disk(), Instant::now(), no_clock);
        for tier in Tier::ALL.into_iter().filter(|tier| *tier != Tier::Disk) {
            bandwidth.charge(tier, 1 << 40);
            assert_eq!(bandwidth.admit(tier, Priority::Offload, 1 << 40), Ok(()));
        }
    }

    #[test]
    fn writes_wait_no_longer_than_they_were_told() {
        let start = Instant::now();
        let mut bandwidth = Bandwidth::new(limited_disk(), start, Instant::now);
        assert_eq!(bandwidth.admit(Tier::Disk, Priority::Offload, 1000), Ok(()));
        let wait = bandwidth.admit(Tier::Disk, Priority::Offload, 1).expect_err("the burst is used up");
        bandwidth.hold_writes(wait);
        assert!(!bandwidth.release_writes(start) && bandwidth.holds_writes());
        let from = bandwidth.next_deadline().expect("writes wait");
        assert!(bandwidth.release_writes(from) && !bandwidth.holds_writes());
        assert!(!bandwidth.release_writes(from), "once");
    }
}
