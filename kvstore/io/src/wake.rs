//! Two ways to end an engine's sleep: a condition variable for engines that sleep in user space, and an eventfd
//! for engines that sleep in the kernel.
//!
//! Both remember one wake-up that comes when no thread sleeps. `wake` may be called from any thread, also after
//! the engine was dropped.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Instant;

use rustix::event::EventfdFlags;
use rustix::io::Errno;

use crate::Waker;

/// A thread's sleep that another thread can end.
#[derive(Debug, Default)]
pub struct Parking {
    woken: Mutex<bool>,
    changed: Condvar,
}

impl Parking {
    /// Sleeps until woken or until the given time. Returns at once if it was woken since the last sleep.
    pub fn sleep(&self, until: Option<Instant>) {
        let mut woken = self.woken.lock().unwrap_or_else(PoisonError::into_inner);
        while !*woken {
            match until {
                None => woken = self.changed.wait(woken).unwrap_or_else(PoisonError::into_inner),
                Some(until) => {
                    let left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return;
                    }
                    woken = self.changed.wait_timeout(woken, left).unwrap_or_else(PoisonError::into_inner).0;
                }
            }
        }
        *woken = false;
    }
}

impl Waker for Parking {
    fn wake(&self) {
        *self.woken.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_one();
    }
}

/// An eventfd that is written once for any number of wake-ups until they are seen.
#[derive(Debug)]
pub(crate) struct EventWaker {
    event: OwnedFd,
    pending: AtomicBool,
}

impl EventWaker {
    /// The eventfd blocks its readers: io_uring would report EAGAIN at once for a non-blocking one.
    pub(crate) fn new() -> Result<Self, Errno> {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?;
        Ok(Self { event, pending: AtomicBool::new(false) })
    }

    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Whether a wake-up is unseen. Pairs with the swap in `wake`.
    pub(crate) fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    /// Call after the eventfd was read, before looking for the reason of the wake-up. Pairs with `wake`.
    pub(crate) fn seen(&self) {
        self.pending.swap(false, Ordering::AcqRel);
    }

    /// Writes the eventfd unconditionally: ends a read in flight.
    pub(crate) fn ring(&self) {
        // The counter cannot be full: it is read before it is written again. No other error is possible.
        let _written = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }
}

impl Waker for EventWaker {
    fn wake(&self) {
        // AcqRel: stores before this are visible to the thread that calls `seen` afterwards.
        if !self.pending.swap(true, Ordering::AcqRel) {
            self.ring();
        }
    }
}
