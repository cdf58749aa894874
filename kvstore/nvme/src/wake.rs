//! The sleep of a polled engine.
//!
//! Only the driver looks at the completion queues, so a sleep while commands are in flight must be short: a
//! completion may wait for its whole length. `wait` spins first ([`SPIN`], about the latency of a fast read,
//! yielding the core in between), then sleeps from [`SLEEP_MIN`] doubling to [`SLEEP_MAX`]: a long command then
//! costs 1 % of a core, and a completion is at most 1 ms late. With no command in flight it sleeps until it is
//! woken.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use kvstore_io::Waker;
use rustix::thread::futex;

/// Time for which `wait` spins before its first sleep.
const SPIN: Duration = Duration::from_micros(100);
/// Length of the first sleep.
const SLEEP_MIN: Duration = Duration::from_micros(20);
/// The longest sleep while commands are in flight.
const SLEEP_MAX: Duration = Duration::from_millis(1);

/// A flag to sleep on. `wake` sets it, the sleeper takes it.
#[derive(Debug, Default)]
pub(crate) struct WakeFlag {
    is_set: AtomicU32,
}

impl WakeFlag {
    /// Whether `wake` was called since the last call. Acquire pairs with the release in `wake`.
    pub(crate) fn take(&self) -> bool {
        self.is_set.load(Ordering::Relaxed) != 0 && self.is_set.swap(0, Ordering::Acquire) != 0
    }

    /// Sleeps until woken, or for at most `limit`; may return early.
    pub(crate) fn sleep(&self, limit: Option<Duration>) {
        let limit = limit.and_then(|limit| rustix::time::Timespec::try_from(limit).ok());
        // Each error means that the time is over or the flag is set: `wait` may return early.
        let _ = futex::wait(&self.is_set, futex::Flags::PRIVATE, 0, limit.as_ref());
    }
}

impl Waker for WakeFlag {
    fn wake(&self) {
        if self.is_set.swap(1, Ordering::Release) == 0 {
            let _ = futex::wake(&self.is_set, futex::Flags::PRIVATE, 1);
        }
    }
}

/// Backoff for callers that may block: spinning, then sleeps that double.
pub(crate) struct Backoff {
    started: Instant,
    length: Duration,
}

impl Backoff {
    pub(crate) fn new() -> Self {
        Self { started: Instant::now(), length: SLEEP_MIN }
    }

    /// Length of the next sleep; `None` after a yield, when the caller is to look again at once.
    pub(crate) fn next(&mut self, now: Instant) -> Option<Duration> {
        if now.duration_since(self.started) < SPIN {
            std::thread::yield_now();
            return None;
        }
        let length = self.length;
        self.length = (length * 2).min(SLEEP_MAX);
        Some(length)
    }

    pub(crate) fn back_off(&mut self) {
        if let Some(length) = self.next(Instant::now()) {
            std::thread::sleep(length);
        }
    }
}
