//! The descriptors that a fabric watches, behind one epoll descriptor.

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};

use crate::VerbsError;
use crate::commands::CommandThread;
use crate::handshake::listen;
use crate::local::Local;

pub(crate) const LISTENER: u64 = 0;
pub(crate) const ASYNC: u64 = 1;
pub(crate) const CHANNEL: u64 = 2;
pub(crate) const TIMER: u64 = 3;
pub(crate) const COMMANDS: u64 = 4;
/// Peers' numbers are added to this.
pub(crate) const PEERS: u64 = 16;
/// What one look at the descriptors uses.
#[derive(Debug)]
pub(crate) struct Control {
    pub(crate) epoll: OwnedFd,
    pub(crate) timer: OwnedFd,
    pub(crate) listener: Option<TcpListener>,
    /// Whether the listener is watched.
    is_accepting: bool,
    pub(crate) paused_until: Option<Instant>,
    timer_is_set: bool,
}

impl Control {
    pub(crate) fn new(
        local: &Local,
        commands: &CommandThread,
        address: Option<SocketAddr>,
    ) -> Result<Self, VerbsError> {
        let failed = |operation: &str| {
            let operation = operation.to_owned();
            move |errno: Errno| VerbsError::System { operation, error: errno.into() }
        };
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed("epoll_create1"))?;
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags)
            .map_err(failed("timerfd_create"))?;
        let events = local.device.async_descriptor();
        rustix::io::ioctl_fionbio(events, true).map_err(failed("ioctl(FIONBIO) of the async descriptor"))?;
        let listener = address.map(listen).transpose()?;
        let watched: [(BorrowedFd<'_>, u64); 4] = [
            (events, ASYNC),
            (local.completions.descriptor(), CHANNEL),
            (timer.as_fd(), TIMER),
            (commands.descriptor(), COMMANDS),
        ];
        for (descriptor, token) in watched {
            epoll::add(&epoll, descriptor, EventData::new_u64(token), EventFlags::IN)
                .map_err(failed("epoll_ctl"))?;
        }
        let mut this =
            Self { epoll, timer, listener, is_accepting: false, paused_until: None, timer_is_set: false };
        this.set_accepting(true);
        Ok(this)
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }

    pub(crate) fn set_accepting(&mut self, accept: bool) {
        let Some(listener) = &self.listener else { return };
        if self.is_accepting == accept {
            return;
        }
        let changed = if accept {
            epoll::add(&self.epoll, listener, EventData::new_u64(LISTENER), EventFlags::IN)
        } else {
            epoll::delete(&self.epoll, listener)
        };
        match changed {
            Ok(()) => self.is_accepting = accept,
            Err(errno) => tracing::warn!(%errno, "epoll_ctl of the RDMA listener"),
        }
    }

    pub(crate) fn watch(
        &self,
        socket: &TcpStream,
        peer: u64,
        wants_to_write: bool,
        is_new: bool,
    ) -> Result<(), Errno> {
        let data = EventData::new_u64(PEERS + peer);
        let flags = if wants_to_write { EventFlags::IN | EventFlags::OUT } else { EventFlags::IN };
        if is_new {
            epoll::add(&self.epoll, socket, data, flags)
        } else {
            epoll::modify(&self.epoll, socket, data, flags)
        }
    }

    pub(crate) fn set_timer(&mut self, after: Option<Duration>) {
        if after.is_none() && !self.timer_is_set {
            return;
        }
        // Zero would disarm it.
        let after = after.map_or(Duration::ZERO, |after| after.max(Duration::from_micros(1)));
        let value = Timespec {
            tv_sec: i64::try_from(after.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(after.subsec_nanos()),
        };
        let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: value };
        match rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &once) {
            Ok(_) => self.timer_is_set = !after.is_zero(),
            Err(errno) => tracing::warn!(%errno, "timerfd_settime"),
        }
    }
}
