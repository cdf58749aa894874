//! The queues of one ring, its sleep and its waker.
//!
//! Hot path. System calls: one for a batch that is flushed, which also fetches completions when some are
//! known to wait; one for a sleep; none for a poll, whether it finds completions or not.
//!
//! The waker is an eventfd that the ring itself reads, so that one call sleeps for both. A ring that polls its
//! device cannot read an eventfd: it checks a flag between polls, and sleeps on the eventfd only when nothing
//! is in flight.

use std::cell::UnsafeCell;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{EnterFlags, IoUring, cqueue, opcode, squeue};
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use super::setup::{Mode, RingConfig};
use crate::wake::EventWaker;
use crate::{IoError, IoErrorKind};

/// `user_data` of the read of the eventfd; requests have small numbers.
const WAKE: u64 = u64::MAX;
/// Meaning of the kernel's EEXIST: the ring has an issuer, which is another thread.
pub(super) const MISDRIVEN: &str = "driven by another thread than the one that opened it";
/// Number of immediate retries of a submission for which the kernel has no memory.
const SUBMIT_RETRIES: u32 = 100;

/// One ring. `S` and `C` are the entries of the two queues.
pub(crate) struct Ring<S: squeue::EntryMarker, C: cqueue::EntryMarker> {
    engine: &'static str,
    ring: IoUring<S, C>,
    mode: Mode,
    /// Number of entries that were pushed and not handed over.
    queued: u32,
    /// Number of all entries that were ever pushed.
    pushed: u64,
    /// Another thread than the issuer has entered. Permanent: queued requests have been given back, and the
    /// issuer's next call would make the kernel take them.
    is_cross_thread: bool,
    waker: Arc<EventWaker>,
    /// Target of the kernel's read from the eventfd.
    wake_count: Box<UnsafeCell<u64>>,
    /// Whether that read is queued or in flight.
    armed: bool,
    /// Woken, and no sleep has returned for it yet.
    woken: bool,
    enters: u64,
}

// SAFETY: the cell is written by the kernel only, and never read; everything else is `Send`.
unsafe impl<S: squeue::EntryMarker, C: cqueue::EntryMarker> Send for Ring<S, C> {}

fn errno_of(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

impl<S: squeue::EntryMarker, C: cqueue::EntryMarker> Ring<S, C> {
    pub(crate) fn new(engine: &'static str, config: &RingConfig) -> Result<Self, IoError> {
        let (ring, mode) = config.build(engine)?;
        let waker = EventWaker::new()
            .map_err(|errno| IoError::from_errno(engine, "eventfd".to_owned(), errno.raw_os_error()))?;
        Ok(Self {
            engine,
            ring,
            mode,
            queued: 0,
            pushed: 0,
            is_cross_thread: false,
            waker: Arc::new(waker),
            wake_count: Box::new(UnsafeCell::new(0)),
            armed: false,
            woken: false,
            enters: 0,
        })
    }

    /// Submitter, for registering files and buffers.
    pub(crate) fn submitter(&self) -> io_uring::Submitter<'_> {
        self.ring.submitter()
    }

    pub(crate) fn waker(&self) -> &Arc<EventWaker> {
        &self.waker
    }

    /// Number of calls of io_uring_enter(2) so far.
    pub(crate) fn enters(&self) -> u64 {
        self.enters
    }

    /// Pushes an entry into the queue, without a system call.
    ///
    /// # Safety
    /// The memory that the entry points to must stay valid until its completion was taken, and at most as many
    /// entries as the ring was made for may be in flight.
    pub(crate) unsafe fn push(&mut self, entry: &S) {
        // SAFETY: the caller's contract.
        let pushed = unsafe { self.ring.submission().push(entry) };
        assert!(pushed.is_ok(), "more entries than the ring was made for");
        self.queued += 1;
        self.pushed += 1;
    }

    /// Number of entries pushed so far, which is the number of the next one.
    pub(crate) fn pushed(&self) -> u64 {
        self.pushed
    }

    /// Number of entries handed over: those with numbers below it.
    pub(crate) fn handed_over(&self) -> u64 {
        self.pushed - u64::from(self.queued)
    }

    /// Whether the ring is unusable because another thread than its issuer has entered it.
    pub(crate) fn is_cross_thread(&self) -> bool {
        self.is_cross_thread
    }

    /// Returns the error of every call once another thread than the issuer has used the ring.
    #[cold]
    pub(crate) fn wrong_thread_error(&self, operation: &str) -> IoError {
        IoError {
            engine: self.engine,
            operation: operation.to_owned(),
            kind: IoErrorKind::Device,
            reason: MISDRIVEN.to_owned(),
        }
    }

    fn failed(&mut self, operation: &str, errno: Errno) -> IoError {
        if errno == Errno::EXIST {
            self.is_cross_thread = true;
            return self.wrong_thread_error(operation);
        }
        IoError::from_errno(self.engine, operation.to_owned(), errno.raw_os_error())
    }

    /// Enables the ring at its first use. Call before every entry into the kernel.
    fn enable(&mut self) -> Result<(), IoError> {
        if self.is_cross_thread {
            return Err(self.wrong_thread_error("enter the ring"));
        }
        if self.mode.disabled {
            let enabled = self.ring.submitter().register_enable_rings().map_err(|error| errno_of(&error));
            enabled.map_err(|errno| self.failed("enable the ring", errno))?;
            self.mode.disabled = false;
        }
        Ok(())
    }

    /// Hands over pushed entries: one system call, none if there are no entries.
    pub(crate) fn submit(&mut self) -> Result<(), IoError> {
        if self.is_cross_thread {
            return Err(self.wrong_thread_error("io_uring_enter to submit"));
        }
        let mut retries = 0;
        while self.queued > 0 {
            self.enable()?;
            self.enters += 1;
            let taken = self.ring.submit().map_err(|error| errno_of(&error));
            if self.mode.submission_poll {
                // The kernel's thread takes the entries asynchronously.
                self.queued = 0;
                return taken.map(drop).map_err(|errno| self.failed("io_uring_enter to submit", errno));
            }
            self.queued = self.ring.submission().len() as u32;
            match taken {
                Ok(taken) if taken > 0 => {}
                Err(Errno::INTR) => {}
                Ok(_) | Err(Errno::AGAIN | Errno::BUSY) if retries < SUBMIT_RETRIES => {
                    retries += 1;
                    std::thread::yield_now();
                }
                // Entries that were not taken stay in the queue.
                Ok(_) => return Err(self.failed("io_uring_enter to submit", Errno::AGAIN)),
                Err(errno) => return Err(self.failed("io_uring_enter to submit", errno)),
            }
        }
        Ok(())
    }

    /// Passes completions to `take` until it returns false or there are none; enters the kernel only when that
    /// is known to bring some.
    pub(crate) fn reap(&mut self, mut take: impl FnMut(u64, &C) -> bool) {
        if self.ring.completion().is_empty() && (self.mode.io_poll || self.ring.submission().taskrun()) {
            self.fetch();
        }
        for completion in self.ring.completion() {
            if completion.user_data() == WAKE {
                self.armed = false;
                self.woken = true;
                self.waker.seen();
            } else if !take(completion.user_data(), &completion) {
                break;
            }
        }
    }

    /// Lets the kernel post completions, without waiting.
    fn fetch(&mut self) {
        if self.enable().is_err() {
            return;
        }
        self.enters += 1;
        let flags = EnterFlags::GETEVENTS.bits();
        // SAFETY: no argument is passed, so there is nothing to be valid.
        let fetched = unsafe { self.ring.submitter().enter::<libc::sigset_t>(0, 0, flags, None) };
        // EINTR and EBUSY leave the completions for the next call.
        self.is_cross_thread |= fetched.is_err_and(|error| errno_of(&error) == Errno::EXIST);
    }

    /// Sleeps until there is a completion, a wake-up, or the given time; hands over pushed entries. `busy`:
    /// whether requests are in flight.
    pub(crate) fn sleep(&mut self, until: Option<Instant>, busy: bool) -> Result<(), IoError> {
        if self.is_cross_thread {
            return Err(self.wrong_thread_error("io_uring_enter to wait"));
        }
        self.take_idle_wake(busy);
        if self.woken || !self.ring.completion().is_empty() {
            self.woken = false;
            return self.submit();
        }
        self.enable()?;
        if self.mode.io_poll {
            self.submit()?;
            return self.sleep_polling(until, busy);
        }
        self.arm();
        if self.mode.submission_poll {
            self.submit()?;
        }
        self.enters += 1;
        let result = match until {
            None => self.ring.submit_and_wait(1),
            Some(until) => {
                let left = until.saturating_duration_since(Instant::now());
                let limit = Timespec::new().sec(left.as_secs()).nsec(left.subsec_nanos());
                self.ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&limit))
            }
        };
        self.queued = if self.mode.submission_poll { 0 } else { self.ring.submission().len() as u32 };
        self.take_idle_wake(busy);
        // The wake-up has ended this sleep.
        self.woken = false;
        match result.map_err(|error| errno_of(&error)) {
            Ok(_) | Err(Errno::TIME | Errno::INTR | Errno::AGAIN | Errno::BUSY) => Ok(()),
            Err(errno) => Err(self.failed("io_uring_enter to wait", errno)),
        }
    }

    /// Without requests in flight, only the read of the eventfd can have completed, and the caller may never
    /// poll for it.
    fn take_idle_wake(&mut self, busy: bool) {
        if !busy && !self.ring.completion().is_empty() {
            self.reap(|_, _| true);
        }
    }

    fn sleep_polling(&mut self, until: Option<Instant>, busy: bool) -> Result<(), IoError> {
        if !busy && !self.waker.is_pending() {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let limit = left.and_then(|left: Duration| rustix::event::Timespec::try_from(left).ok());
            let mut events = [PollFd::from_borrowed_fd(self.waker.event(), PollFlags::IN)];
            match rustix::event::poll(&mut events, limit.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(self.failed("poll of the eventfd", errno)),
            }
        }
        while busy && !self.waker.is_pending() && self.ring.completion().is_empty() {
            if until.is_some_and(|until| Instant::now() >= until) {
                return Ok(());
            }
            self.fetch();
            if self.is_cross_thread {
                return Err(self.wrong_thread_error("io_uring_enter to poll"));
            }
        }
        if self.waker.is_pending() {
            // `wake` writes the eventfd right after it sets the flag, so this blocks only for that time.
            let mut count = [0; 8];
            let read = rustix::io::read(self.waker.event(), &mut count);
            debug_assert!(read.is_ok(), "read of the eventfd: {read:?}");
            self.waker.seen();
        }
        Ok(())
    }

    /// Queues the read of the eventfd, unless it is queued or in flight.
    fn arm(&mut self) {
        if self.armed {
            return;
        }
        let event = Fd(self.waker.event().as_raw_fd());
        let read = opcode::Read::new(event, self.wake_count.get().cast(), 8).build().user_data(WAKE);
        // SAFETY: the engine's drop keeps cell and eventfd until this read has ended, or leaks the cell; the ring has an
        // entry for it beside those of the requests.
        unsafe { self.push(&S::from(read)) };
        self.armed = true;
    }

    /// Makes the read of the eventfd complete; returns whether it is still in flight.
    pub(crate) fn disarm(&mut self) -> bool {
        if self.armed {
            self.waker.ring();
        }
        self.armed
    }

    /// Whether the read of the eventfd is queued or in flight.
    pub(crate) fn is_armed(&self) -> bool {
        self.armed
    }

    /// Waits for any completion. Call only when something is known to be in flight.
    pub(crate) fn block(&mut self) -> Result<(), IoError> {
        if !self.ring.completion().is_empty() {
            return Ok(());
        }
        if self.mode.io_poll {
            self.fetch();
            return if self.is_cross_thread {
                Err(self.wrong_thread_error("io_uring_enter to drain"))
            } else {
                Ok(())
            };
        }
        self.enable()?;
        self.enters += 1;
        match self.ring.submit_and_wait(1).map_err(|error| errno_of(&error)) {
            Ok(_) | Err(Errno::INTR | Errno::AGAIN | Errno::BUSY) => Ok(()),
            Err(errno) => Err(self.failed("io_uring_enter to drain", errno)),
        }
    }

    /// Leaks the memory that the kernel may still write to.
    pub(crate) fn leak_wake_count(&mut self) {
        if self.armed {
            let cell = std::mem::replace(&mut self.wake_count, Box::new(UnsafeCell::new(0)));
            std::mem::forget(cell);
        }
    }
}
