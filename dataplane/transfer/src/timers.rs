//! Deadlines of a node in one queue, so that no round scans its tables for them, and the recently cancelled
//! transfers. Used by the transfer thread; time arrives as an argument. Leases have their own order
//! ([`dataplane_memory::LeaseTable`]).

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

use dataplane_fabric::PeerId;

use crate::node::TransferId;

/// Identifies a deadline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Timer {
    /// Deadline of a transfer that is received: it ends with the blocks received by then.
    Arrival(TransferId),
    /// Deadline of a peer to acknowledge that a transfer was cancelled.
    Acknowledgement(PeerId, TransferId),
    /// Deadline of a connected peer to send its greeting.
    Greeting(PeerId),
}

/// Deadlines, at most one for each [`Timer`]. Setting, cancelling and taking are logarithmic in their number.
#[derive(Debug, Default)]
pub(crate) struct TimerQueue {
    due: BTreeSet<(Instant, Timer)>,
    at: HashMap<Timer, Instant>,
}

impl TimerQueue {
    /// Sets a deadline; replaces an earlier one of the same timer.
    pub(crate) fn set(&mut self, timer: Timer, at: Instant) {
        self.cancel(timer);
        self.at.insert(timer, at);
        self.due.insert((at, timer));
    }

    pub(crate) fn cancel(&mut self, timer: Timer) {
        if let Some(at) = self.at.remove(&timer) {
            self.due.remove(&(at, timer));
        }
    }

    /// Returns the next deadline.
    pub(crate) fn next(&self) -> Option<Instant> {
        self.due.first().map(|&(at, _)| at)
    }

    /// Takes the first expired deadline, in a deterministic order.
    pub(crate) fn take_due(&mut self, now: Instant) -> Option<Timer> {
        let (_, timer) = *self.due.first().filter(|(at, _)| *at <= now)?;
        self.cancel(timer);
        Some(timer)
    }
}

/// Recently cancelled transfers: their other half may still be in transit, and must not start them anew.
/// Beyond `capacity` the oldest are dropped, since the other half of those has most likely arrived.
#[derive(Debug)]
pub(crate) struct Cancelled {
    until: HashMap<TransferId, Instant>,
    /// In the order of expiry; a transfer that was cancelled again has a later entry too.
    order: VecDeque<(Instant, TransferId)>,
    capacity: usize,
    remember: Duration,
}

impl Cancelled {
    /// Makes a table that remembers each transfer for `remember`.
    pub(crate) fn new(capacity: usize, remember: Duration) -> Self {
        Self { until: HashMap::new(), order: VecDeque::new(), capacity, remember }
    }

    pub(crate) fn insert(&mut self, transfer: TransferId, now: Instant) {
        let until = now + self.remember;
        self.until.insert(transfer, until);
        self.order.push_back((until, transfer));
        while self.order.len() > self.capacity {
            self.forget_first();
        }
    }

    pub(crate) fn contains(&self, transfer: TransferId) -> bool {
        self.until.contains_key(&transfer)
    }

    /// Drops the expired entries.
    pub(crate) fn expire(&mut self, now: Instant) {
        while self.order.front().is_some_and(|&(until, _)| until <= now) {
            self.forget_first();
        }
    }

    fn forget_first(&mut self) {
        let Some((until, transfer)) = self.order.pop_front() else { return };
        if self.until.get(&transfer) == Some(&until) {
            self.until.remove(&transfer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_that_was_moved_or_cancelled_comes_once_or_never() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut timers = TimerQueue::default();
        timers.set(Timer::Arrival(1), at(1));
        timers.set(Timer::Greeting(PeerId(1)), at(2));
        timers.set(Timer::Arrival(1), at(3));
        timers.set(Timer::Acknowledgement(PeerId(1), 1), at(2));
        timers.cancel(Timer::Greeting(PeerId(1)));
        timers.cancel(Timer::Arrival(9));
        assert_eq!((timers.next(), timers.take_due(at(1))), (Some(at(2)), None));
        assert_eq!(timers.take_due(at(9)), Some(Timer::Acknowledgement(PeerId(1), 1)));
        assert_eq!(timers.take_due(at(9)), Some(Timer::Arrival(1)));
        assert_eq!((timers.take_due(at(9)), timers.next()), (None, None));
        assert!(timers.at.is_empty());
    }

    #[test]
    fn what_was_cancelled_is_remembered_for_its_time_and_the_oldest_is_forgotten_first() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut cancelled = Cancelled::new(3, Duration::from_secs(10));
        (0..3).for_each(|transfer| cancelled.insert(transfer, at(transfer)));
        cancelled.insert(0, at(5));
        assert!(cancelled.contains(0), "its later entry counts");
        cancelled.expire(at(11));
        assert!(cancelled.contains(0) && !cancelled.contains(1) && cancelled.contains(2));
        cancelled.insert(7, at(12));
        cancelled.insert(8, at(12));
        assert!(!cancelled.contains(2) && cancelled.contains(0), "three are remembered");
        cancelled.expire(at(15));
        assert!(!cancelled.contains(0) && cancelled.contains(7));
        cancelled.expire(at(22));
        assert!(cancelled.until.is_empty() && cancelled.order.is_empty());
    }
}
