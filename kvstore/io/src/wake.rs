//! Two ways to end an engine's sleep: a condition variable for engines that sleep in user space, and an eventfd for those
//! that sleep in the kernel.
//!
//! Both remember one wake-up that comes when nobody sleeps. `wake` may be called from any thread, also after the engine is
//! gone.

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
    /// Sleeps until woken or until the moment given. Returns at once when it was woken since the last sleep.
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

/// An eventfd that is written once for any number of wake-ups until somebody has seen them.
#[derive(Debug)]
pub(crate) struct EventWaker {
    event: OwnedFd,
    pending: AtomicBool,
}

impl EventWaker {
    /// Blocking for readers: io_uring reads it, and would report EAGAIN at once for one that is not.
    pub(crate) fn new() -> Result<Self, Errno> {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?;
        Ok(Self { event, pending: AtomicBool::new(false) })
    }

    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Whether somebody has woken and nobody has seen it. Pairs with the swap in `wake`.
    pub(crate) fn is_pending(&self) -> bool {
        self.pending.load(Ordering::Acquire)
    }

    /// To be called after the eventfd was read, before looking for what the wake-up was about. Pairs with `wake`.
    pub(crate) fn seen(&self) {
        self.pending.swap(false, Ordering::AcqRel);
    }

    /// Writes the eventfd without condition: ends a read that is under way.
    pub(crate) fn ring(&self) {
        // The counter cannot be full: it is read before it is written again. Nothing else can fail here.
        let _written = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }
}

impl Waker for EventWaker {
    fn wake(&self) {
        // AcqRel: what was done before is seen by whoever calls `seen` after this.
        if !self.pending.swap(true, Ordering::AcqRel) {
            self.ring();
        }
    }
}
