//! The epoll descriptor over the listener, the sockets and a timer.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags};

use super::SocketId;
use super::socket::Socket;

/// Largest number of sources that one call returns.
const READY_MAX: usize = 64;
const LISTENER: u64 = u64::MAX;
const TIMER: u64 = u64::MAX - 1;

#[derive(Debug)]
pub(super) struct Poller {
    epoll: OwnedFd,
    timer: OwnedFd,
    /// Time at which the timer fires next.
    armed: Option<Instant>,
}

/// A source that is ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ready {
    Listener,
    Timer,
    Socket(SocketId),
}

/// Ready sources, at most [`READY_MAX`]; the rest is returned by the next call.
pub(super) struct Found {
    tokens: [u64; READY_MAX],
    count: usize,
}

impl Found {
    pub(super) fn iter(&self) -> impl Iterator<Item = Ready> {
        self.tokens[..self.count].iter().map(|&token| match token {
            LISTENER => Ready::Listener,
            TIMER => Ready::Timer,
            number => Ready::Socket(SocketId(number)),
        })
    }
}

impl Poller {
    pub(super) fn new() -> Result<Self, Errno> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)?;
        epoll::add(&epoll, &timer, EventData::new_u64(TIMER), EventFlags::IN)?;
        Ok(Self { epoll, timer, armed: None })
    }

    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    pub(super) fn look(&self) -> Found {
        let mut events = [MaybeUninit::uninit(); READY_MAX];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        // An interrupted call returns no source; the next call follows soon.
        let ready = epoll::wait(&self.epoll, &mut events, Some(&at_once)).map_or(&[][..], |(ready, _)| ready);
        let (mut tokens, count) = ([0; READY_MAX], ready.len());
        tokens.iter_mut().zip(ready).for_each(|(token, event)| *token = event.data.u64());
        Found { tokens, count }
    }

    pub(super) fn add_listener(&self, listener: BorrowedFd<'_>) -> Result<(), Errno> {
        epoll::add(&self.epoll, listener, EventData::new_u64(LISTENER), EventFlags::IN)
    }

    pub(super) fn remove_listener(&self, listener: BorrowedFd<'_>) {
        // Deleting fails when the listener is not watched, which is the desired state.
        let _absent = epoll::delete(&self.epoll, listener);
    }

    /// Adds a socket. A connecting socket becomes writable when connecting has succeeded or failed.
    pub(super) fn add(&self, socket: &mut Socket, socket_id: SocketId) -> Result<(), Errno> {
        socket.is_watched_for_output = socket.is_connecting();
        let flags = if socket.is_watched_for_output { EventFlags::OUT } else { EventFlags::IN };
        epoll::add(&self.epoll, &socket.descriptor, EventData::new_u64(socket_id.0), flags)
    }

    /// Watches input only, once the socket has finished connecting.
    pub(super) fn watch_input(&self, socket: &mut Socket, socket_id: SocketId) {
        if std::mem::take(&mut socket.is_watched_for_output) {
            // The socket is in the set already, so this cannot fail for lack of memory.
            let _changed = epoll::modify(
                &self.epoll,
                &socket.descriptor,
                EventData::new_u64(socket_id.0),
                EventFlags::IN,
            );
        }
    }

    /// Removes a socket. Closing it is not enough if a forked child has the socket too.
    pub(super) fn remove(&self, socket: &Socket) {
        // Deleting fails when the socket is not in the set, which is the desired state.
        let _absent = epoll::delete(&self.epoll, &socket.descriptor);
    }

    /// Sets the timer to `at`, unless it fires earlier.
    pub(super) fn arm(&mut self, at: Instant) {
        if self.armed.is_some_and(|armed| armed <= at) {
            return;
        }
        // Zero would disarm the timer.
        let left = at.saturating_duration_since(Instant::now()).max(Duration::from_nanos(1));
        let it_value = Timespec {
            tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(left.subsec_nanos()),
        };
        let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value };
        let set = rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once);
        self.armed = set.is_ok().then_some(at);
    }

    /// Handles the timer's expiry.
    pub(super) fn timer_expired(&mut self) {
        self.armed = None;
        // A timer that was set again in the meantime reads as EAGAIN.
        let _empty = rustix::io::read(&self.timer, &mut [0_u8; 8]);
    }
}
