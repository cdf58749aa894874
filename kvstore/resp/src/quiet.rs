//! How long a connection stands still.
//!
//! Time is counted without a clock per operation: an alarm rings at a fixed pace and looks whether anything has moved
//! since. A connection is closed after one to two times its limit of standing still, or of being slow.

use std::time::Duration;

/// Bytes per second that a connection with a part of the common budget must move.
pub(crate) const RATE_MIN: usize = 64 << 10;

/// How long nothing has moved, and how long too little.
#[derive(Debug, Default)]
pub(crate) struct Quiet {
    moved: bool,
    /// Something has happened since the last ring that was not the client's to speed up.
    excused: bool,
    bytes: usize,
    still: Duration,
    slow: Duration,
}

impl Quiet {
    pub(crate) fn moved(&mut self, bytes: usize) {
        self.moved = true;
        self.bytes = self.bytes.saturating_add(bytes);
    }

    pub(crate) fn excuse(&mut self) {
        (self.moved, self.excused) = (true, true);
    }

    /// The alarm rang after `pace`: whether nothing has moved for `limit`, where zero is none, or less than [`RATE_MIN`]
    /// for `slow_limit`, where that is asked for.
    pub(crate) fn rang(&mut self, pace: Duration, limit: Duration, slow_limit: Option<Duration>) -> bool {
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
        let mut quiet = Quiet::default();
        let mut ring = |bytes: Option<usize>, slow: bool| {
            bytes.into_iter().for_each(|bytes| quiet.moved(bytes));
            quiet.rang(pace, limit, slow.then_some(limit))
        };
        assert!(!ring(None, false) && ring(None, false), "nothing has moved for two seconds");
        assert!(!ring(Some(1), false) && !ring(Some(1), false) && !ring(Some(1), false), "slow may be");
        assert!(!ring(Some(1), true) && ring(Some(1), true), "not with a part of the budget");
        assert!(!ring(Some(RATE_MIN), true) && !ring(Some(1), true) && !ring(Some(RATE_MIN), true));
        assert!(!ring(Some(RATE_MIN - 1), true));
        quiet.excuse();
        assert!(!quiet.rang(pace, limit, Some(limit)));
    }
}
