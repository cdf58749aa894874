//! After a number of failures in a row, requests are refused at once; one per pause is admitted, and its
//! success closes the breaker. There is no state "probing" that a dropped future could leave behind.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

#[derive(Debug)]
pub(crate) struct Breaker {
    failures_max: u32,
    pause: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    failures: u32,
    open_until: Option<Instant>,
}

impl Breaker {
    pub(crate) fn new(failures_max: u32, pause: Duration) -> Self {
        Self { failures_max, pause, state: Mutex::default() }
    }

    /// Whether a request may be made now. An open breaker admits one request per pause.
    pub(crate) fn admits(&self, now: Instant) -> bool {
        let mut state = self.state();
        match state.open_until {
            Some(until) if now < until => false,
            Some(_) => {
                state.open_until = Some(now + self.pause);
                true
            }
            None => true,
        }
    }

    pub(crate) fn succeeded(&self) {
        *self.state() = State::default();
    }

    /// Counts a failure; returns whether the breaker opened.
    pub(crate) fn failed(&self, now: Instant) -> bool {
        let mut state = self.state();
        state.failures = state.failures.saturating_add(1);
        let opens = state.open_until.is_none() && state.failures >= self.failures_max;
        if opens {
            state.open_until = Some(now + self.pause);
        }
        opens
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        // Every update is one assignment, so a poisoned state is a valid one.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opens_lets_one_through_per_pause_and_closes() {
        let pause = Duration::from_secs(5);
        let breaker = Breaker::new(3, pause);
        let start = Instant::now();
        assert!(!breaker.failed(start) && !breaker.failed(start));
        assert!(breaker.admits(start));
        assert!(breaker.failed(start), "the third in a row");
        assert!(!breaker.admits(start) && !breaker.admits(start + pause / 2));
        assert!(breaker.admits(start + pause), "one");
        assert!(!breaker.admits(start + pause), "only one");
        assert!(!breaker.failed(start + pause), "it is open already");
        assert!(breaker.admits(start + pause * 2));
        breaker.succeeded();
        assert!(breaker.admits(start + pause * 2) && breaker.admits(start + pause * 2));
    }
}
