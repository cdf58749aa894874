//! The epoll set of a node and its timer.
//!
//! One descriptor to sleep on, however many connections there are, and one system call to look at all of them.
//! The timer stands in the set too: a node that sleeps without a deadline of its own still wakes for a
//! handshake that takes too long.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use rustix::event::Timespec;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags};

use crate::ShmError;

/// Sockets looked at in one call.
const READY_MAX: usize = 64;

pub(crate) struct Watch {
    timer: OwnedFd,
    /// When the timer rings next.
    armed: Option<Instant>,
    /// Tokens of what was ready at the last look.
    ready: [u64; READY_MAX],
    found: usize,
}

impl Watch {
    pub(crate) fn create() -> Result<Self, ShmError> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)
            .map_err(ShmError::system("timerfd_create"))?;
        Ok(Self { timer, armed: None, ready: [0; READY_MAX], found: 0 })
    }

    pub(crate) fn timer(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }

    /// Tokens of the sockets that have something; at most [`READY_MAX`] of them, the others next time.
    pub(crate) fn look(&mut self, epoll: BorrowedFd<'_>) -> usize {
        // The kernel's events stay here: they hold pointers, which would tie the fabric to one thread.
        let mut events = [MaybeUninit::uninit(); READY_MAX];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        // An interrupted look finds nothing; the next one is not far.
        let found = epoll::wait(epoll, &mut events, Some(&now)).map_or(&[][..], |(found, _)| found);
        self.found = found.len();
        self.ready.iter_mut().zip(found).for_each(|(token, event)| *token = event.data.u64());
        self.found
    }

    pub(crate) fn token(&self, number: usize) -> Option<u64> {
        self.ready[..self.found].get(number).copied()
    }

    /// Rings at `at`, or earlier if it was to ring earlier.
    pub(crate) fn arm(&mut self, at: Instant) {
        if self.armed.is_some_and(|armed| armed <= at) {
            return;
        }
        // Zero would disarm it.
        let left = at.saturating_duration_since(Instant::now()).max(std::time::Duration::from_nanos(1));
        let it_value = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        let it_interval = Timespec { tv_sec: 0, tv_nsec: 0 };
        let value = Itimerspec { it_interval, it_value };
        let set = rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &value);
        self.armed = set.is_ok().then_some(at);
    }

    /// The timer has rung.
    pub(crate) fn rung(&mut self) {
        self.armed = None;
        // One that was set anew meanwhile reads as EAGAIN.
        let _empty = rustix::io::read(&self.timer, &mut [0_u8; 8]);
    }
}

/// Adds a descriptor that is looked at for input and hang-up.
pub(crate) fn add(epoll: BorrowedFd<'_>, fd: impl AsFd, token: u64) -> Result<(), ShmError> {
    epoll::add(epoll, fd, EventData::new_u64(token), EventFlags::IN | EventFlags::RDHUP)
        .map_err(ShmError::system("epoll_ctl(ADD)"))
}

/// Takes a descriptor out. Closing it would do, unless a forked child has it too.
pub(crate) fn remove(epoll: BorrowedFd<'_>, fd: impl AsFd) {
    // It fails when the descriptor is not in the set, which is what we want.
    let _absent = epoll::delete(epoll, fd);
}
