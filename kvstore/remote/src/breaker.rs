//! The circuit breaker of one node: after some failures in a row no requests go to the node, and it is probed
//! at intervals until it answers.
//!
//! Waits double up to a maximum and are shortened by up to half at random, so that the clients of a node that
//! restarts do not all come at once. The wait returns to its first value after an answered request, and when
//! the breaker was closed for at least as long as the next wait: a node that restarts now and then is found
//! again at once, also by a client without requests for it. A probe is a separate message, so that no request
//! pays for it.

use std::time::{Duration, Instant};

/// State of a breaker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BreakerState {
    /// Requests go to the node.
    Closed,
    /// No requests go to the node before `until`.
    Open {
        /// Time of the next probe.
        until: Instant,
    },
    /// Half open: the connection is being made, or the probe is in flight.
    Probing {
        /// Deadline of the probe.
        until: Instant,
    },
}

#[derive(Debug)]
pub(crate) struct Breaker {
    state: BreakerState,
    failures_in_row: u32,
    opened_in_row: u32,
    /// Time at which the breaker last closed.
    closed_at: Instant,
}

/// Number of doublings after which the wait has reached its maximum.
const DOUBLINGS_MAX: u32 = 16;

impl Breaker {
    /// Returns a breaker that is open until `now`: a new node is probed at once.
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            state: BreakerState::Open { until: now },
            failures_in_row: 0,
            opened_in_row: 0,
            closed_at: now,
        }
    }

    pub(crate) fn state(&self) -> BreakerState {
        self.state
    }

    /// Time at which the breaker has to be looked at: the next probe, or the deadline of one.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        match self.state {
            BreakerState::Closed => None,
            BreakerState::Open { until } | BreakerState::Probing { until } => Some(until),
        }
    }

    pub(crate) fn success(&mut self) {
        self.failures_in_row = 0;
        self.opened_in_row = 0;
    }

    /// Counts a failure; true when `enough` have occurred in a row.
    pub(crate) fn failure(&mut self, enough: u32) -> bool {
        self.failures_in_row += 1;
        self.failures_in_row >= enough
    }

    pub(crate) fn open(&mut self, now: Instant, wait: (Duration, Duration), random: u64) {
        let (first, most) = wait;
        let wait_after = |opened: u32| first.saturating_mul(1 << opened.min(DOUBLINGS_MAX)).min(most);
        let was_asked = self.state == BreakerState::Closed;
        if was_asked && now.saturating_duration_since(self.closed_at) >= wait_after(self.opened_in_row) {
            self.opened_in_row = 0;
        }
        let whole = wait_after(self.opened_in_row);
        let half_nanos = (whole.as_nanos() / 2).max(1) as u64;
        let until = now + whole - Duration::from_nanos(random % half_nanos);
        self.opened_in_row = self.opened_in_row.saturating_add(1);
        self.failures_in_row = 0;
        self.state = BreakerState::Open { until };
    }

    pub(crate) fn probe(&mut self, until: Instant) {
        self.state = BreakerState::Probing { until };
    }

    pub(crate) fn close(&mut self, now: Instant) {
        self.failures_in_row = 0;
        if self.state != BreakerState::Closed {
            self.closed_at = now;
        }
        self.state = BreakerState::Closed;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_to_their_maximum_and_differ() {
        let now = Instant::now();
        let wait = (Duration::from_millis(100), Duration::from_secs(1));
        let mut breaker = Breaker::new(now);
        for whole_ms in [100, 200, 400, 800, 1000, 1000] {
            let mut other = Breaker { opened_in_row: breaker.opened_in_row, ..Breaker::new(now) };
            breaker.open(now, wait, 0);
            assert_eq!(breaker.deadline(), Some(now + Duration::from_millis(whole_ms)));
            other.open(now, wait, u64::MAX / 3);
            let until = other.deadline().expect("open");
            assert!(until >= now + Duration::from_millis(whole_ms / 2) && Some(until) < breaker.deadline());
        }
        breaker.probe(now);
        breaker.close(now);
        assert!(!breaker.failure(3) && !breaker.failure(3));
        breaker.success();
        assert!(!breaker.failure(3) && !breaker.failure(3) && breaker.failure(3));
        breaker.open(now, wait, 0);
        assert_eq!(breaker.deadline(), Some(now + wait.0), "a success starts the waits anew");
    }

    #[test]
    fn a_node_that_was_there_for_long_is_left_alone_for_the_first_wait_only() {
        let start = Instant::now();
        let wait = (Duration::from_millis(100), Duration::from_secs(10));
        let mut breaker = Breaker::new(start);
        (0..4).for_each(|_| breaker.open(start, wait, 0));
        breaker.close(start);
        // An answer while the breaker is closed: `closed_at` stays that of the first answer.
        let soon = start + Duration::from_millis(1599);
        breaker.close(soon);
        breaker.open(soon, wait, 0);
        assert_eq!(breaker.deadline(), Some(soon + Duration::from_millis(1600)), "gone again too soon");
        breaker.close(soon);
        let later = soon + Duration::from_millis(3200);
        breaker.open(later, wait, 0);
        assert_eq!(
            breaker.deadline(),
            Some(later + wait.0),
            "there as long as it would have been left alone"
        );
        breaker.open(later, wait, 0);
        assert_eq!(
            breaker.deadline(),
            Some(later + 2 * wait.0),
            "time in which it was not asked does not count"
        );
    }
}
