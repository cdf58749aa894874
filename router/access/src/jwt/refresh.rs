//! Schedule for fetching the key set again. An unknown key id may be a new key of the provider, or an
//! invention of a client; so it triggers a fetch, but one at a time and at most one per interval, whatever
//! clients send.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Decides when to fetch; holds no key and makes no connection.
#[derive(Debug)]
pub struct Refresh {
    interval_min_ns: u64,
    age_max_ns: u64,
    is_running: AtomicBool,
    /// Start of the last fetch, plus one; 0 for never.
    began: AtomicU64,
    /// End of the last successful fetch, plus one; 0 for never.
    succeeded: AtomicU64,
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl Refresh {
    /// Allows at most one fetch every `interval_min`, and requests one when the keys are `age_max` old.
    #[must_use]
    pub fn new(interval_min: Duration, age_max: Duration) -> Arc<Self> {
        Arc::new(Self {
            interval_min_ns: nanoseconds(interval_min),
            age_max_ns: nanoseconds(age_max),
            is_running: AtomicBool::new(false),
            began: AtomicU64::new(0),
            succeeded: AtomicU64::new(0),
        })
    }

    /// Whether the keys are too old, or were never fetched. For a timer; `now` is in nanoseconds.
    #[must_use]
    pub fn is_due(&self, now: u64) -> bool {
        match self.succeeded.load(Ordering::Relaxed) {
            0 => true,
            succeeded => now.saturating_sub(succeeded - 1) >= self.age_max_ns,
        }
    }

    /// Returns permission to fetch now; `None` when a fetch is running or the last one began too recently.
    /// Other requests need not wait for it: the caller decides whether they wait or are answered with 401.
    pub fn begin(self: &Arc<Self>, now: u64) -> Option<RefreshTicket> {
        let is_too_early = || match self.began.load(Ordering::Relaxed) {
            0 => false,
            began => now.saturating_sub(began - 1) < self.interval_min_ns,
        };
        // Acquire: pairs with the release of the last ticket's drop, so that the start of its fetch is
        // visible.
        if is_too_early() || self.is_running.swap(true, Ordering::Acquire) {
            return None;
        }
        let ticket = RefreshTicket(Arc::clone(self));
        if is_too_early() {
            return None;
        }
        self.began.store(now.saturating_add(1), Ordering::Relaxed);
        Some(ticket)
    }
}

/// A fetch in progress. Dropping it ends the fetch as failed.
#[derive(Debug)]
#[must_use]
pub struct RefreshTicket(Arc<Refresh>);

impl RefreshTicket {
    /// Records that the keys were fetched and are in force.
    pub fn succeeded(self, now: u64) {
        self.0.succeeded.store(now.saturating_add(1), Ordering::Relaxed);
    }
}

impl Drop for RefreshTicket {
    fn drop(&mut self) {
        // Release: pairs with the acquire of `begin`.
        self.0.is_running.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_and_not_too_often() {
        let refresh = Refresh::new(Duration::from_nanos(10), Duration::from_nanos(100));
        assert!(refresh.is_due(0));
        let ticket = refresh.begin(0).expect("the first");
        assert!(refresh.begin(50).is_none(), "one runs");
        drop(ticket);
        assert!(refresh.is_due(1), "it failed");
        assert!(refresh.begin(9).is_none());
        refresh.begin(10).expect("in time").succeeded(12);
        assert!(!refresh.is_due(111) && refresh.is_due(112));
        assert!(refresh.begin(19).is_none() && refresh.begin(20).is_some());
    }

    #[test]
    fn threads_get_one_ticket_together() {
        let refresh = Refresh::new(Duration::from_secs(1), Duration::from_secs(1));
        let tickets: usize = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|_| scope.spawn(|| (0..100).filter(|&now| refresh.begin(now).is_some()).count()))
                .collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).sum()
        });
        assert_eq!(tickets, 1);
    }
}
