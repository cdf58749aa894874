//! Detection of connections that stall or are slow.
//!
//! Time is counted without reading a clock per operation: at a fixed pace an alarm checks whether bytes have
//! moved since. A connection is closed after one to two times its limit of stalling, or of being slow.

use std::time::Duration;

/// Minimum rate, in bytes per second, of a connection that holds a share of the common budget.
pub(crate) const RATE_MIN: usize = 64 << 10;

/// Time for which a connection has stalled, and has been slow.
#[derive(Debug, Default)]
pub(crate) struct StallDetector {
    moved: bool,
    /// A delay since the last alarm was not the client's fault.
    excused: bool,
    bytes: usize,
    still: Duration,
    slow: Duration,
}

impl StallDetector {
    pub(crate) fn moved(&mut self, bytes: usize) {
        self.moved = true;
        self.bytes = self.bytes.saturating_add(bytes);
    }

    pub(crate) fn mark_server_delay(&mut self) {
        (self.moved, self.excused) = (true, true);
    }

    /// Counts `pace` since the last alarm. Returns whether no byte has moved for `limit`, where zero is no
    /// limit, or less than [`RATE_MIN`] for `slow_limit`, if there is one.
    pub(crate) fn tick(&mut self, pace: Duration, limit: Duration, slow_limit: Option<Duration>) -> bool {
        let was = std::mem::take(self);
        if !was.moved {
            self.still = was.still + pace;
        }
        let is_slow = (was.bytes as u128) * 1000 < RATE_MIN as u128 * pace.as_millis();
        if slow_limit.is_some() && is_slow && !was.excused {
            self.slow = was.slow + pace;
        }
        (!limit.is_zero() && self.still >= limit) || slow_limit.is_some_and(|limit| self.slow >= limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn standing_still_and_being_slow_are_told_apart() {
        let (pace, limit) = (Duration::from_secs(1), Duration::from_secs(2));
        let mut quiet = StallDetector::default();
        let mut ring = |bytes: Option<usize>, slow: bool| {
            bytes.into_iter().for_each(|bytes| quiet.moved(bytes));
            quiet.tick(pace, limit, slow.then_some(limit))
        };
        assert!(!ring(None, false) && ring(None, false), "nothing has moved for two seconds");
        assert!(!ring(Some(1), false) && !ring(Some(1), false) && !ring(Some(1), false), "slow may be");
        assert!(!ring(Some(1), true) && ring(Some(1), true), "not with a part of the budget");
        assert!(!ring(Some(RATE_MIN), true) && !ring(Some(1), true) && !ring(Some(RATE_MIN), true));
        assert!(!ring(Some(RATE_MIN - 1), true));
        quiet.mark_server_delay();
        assert!(!quiet.tick(pace, limit, Some(limit)));
    }
}
