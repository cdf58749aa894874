//! The sockets over which connections are made: one [`Handshakes`] in each transport between processes.
//!
//! ```text
//! accept ─▶ stranger ─ openings ─▶ hello with its proof ─▶ News::Frame ─▶ the transport's own
//! connect ────────── openings ─▶ News::Opened ─ say(hello) ─▶ hello with its proof ─▶ News::Frame
//! ```
//!
//! What openings and proofs are is told in [`auth`](crate::auth). An accepted socket is a *stranger* until its first frame has
//! proved itself: the transport hears nothing of it and makes nothing for it, it costs a descriptor and a deadline, and there are
//! at most [`HandshakeConfig::strangers_max`]; one more ends the oldest, so that silent sockets keep nobody out. When descriptors
//! run out, accepting pauses: connections wait in the listener's backlog, and no thread turns around a listener that stays
//! readable.
//!
//! A socket of which the transport knows is its own to end ([`Handshakes::forget`]). Two ways to go on with it:
//! [`Handshakes::settle`] leaves it here, where it tells of the peer's end; [`Handshakes::release`] gives it to the transport.
//!
//! Costs: a few system calls for each connection, none without news: [`Handshakes::descriptor`] is readable when there is some. Not
//! a hot path.

mod poller;
mod socket;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::SocketFlags;

use crate::auth::{AuthError, Protocol, SharedKey};
use poller::{Poller, Ready};
use socket::{Incoming, Socket};

/// Most descriptors that come with a frame.
pub const DESCRIPTORS_MAX: usize = 4;
/// Sockets accepted at one look.
const ACCEPTS_MAX: usize = 16;
/// How long nothing is accepted after the system has run out of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How connections are made.
#[derive(Debug, Clone)]
pub struct HandshakeConfig {
    /// The transport and its versions.
    pub protocol: Protocol,
    /// The secret that peers share.
    pub key: SharedKey,
    /// Bytes of a frame without its proof.
    pub frame_bytes: usize,
    /// What comes with each frame besides its bytes.
    pub descriptors: Option<Descriptors>,
    /// How long a socket may take to be settled or released.
    pub timeout: Duration,
    /// Most accepted sockets that have not proved themselves.
    pub strangers_max: usize,
}

/// Descriptors that come with each frame (`SCM_RIGHTS`, unix(7)).
#[derive(Debug, Clone, Copy)]
pub struct Descriptors {
    /// How many, at most [`DESCRIPTORS_MAX`].
    pub count: usize,
    /// Appends what the proof of a frame covers of them: whoever passes a frame on shall not put others into it. An error is the
    /// reason why they are refused.
    pub identify: fn(&[BorrowedFd<'_>], &mut Vec<u8>) -> Result<(), String>,
}

/// A socket's number: never given twice, and never zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// What a socket brought.
#[derive(Debug)]
pub enum News {
    /// On the side that connects: both openings are here, and it is to say its hello.
    Opened {
        /// The socket.
        ticket: Ticket,
    },
    /// A frame of a peer that holds the secret. With the first one of an accepted socket, the transport learns of it.
    Frame {
        /// The socket.
        ticket: Ticket,
        /// [`HandshakeConfig::frame_bytes`] bytes.
        frame: Vec<u8>,
        /// As many as [`Descriptors::count`].
        descriptors: Vec<OwnedFd>,
    },
    /// The handshake failed, or the peer broke the protocol; its end of the socket may be open. Nothing but its
    /// [`News::Closed`] follows.
    Failed {
        /// The socket.
        ticket: Ticket,
        /// Why.
        failure: Failure,
    },
    /// The peer has closed the socket or died. Nothing follows.
    Closed {
        /// The socket.
        ticket: Ticket,
        /// How.
        reason: String,
    },
}

/// Why a handshake failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The address did not answer in time.
    #[error("cannot connect: timed out")]
    Unreachable,
    /// The peer did not greet in time.
    #[error("the handshake timed out")]
    Late,
    /// The peer is not one of ours.
    #[error("the peer is refused: {0}")]
    Auth(#[from] AuthError),
    /// The descriptors that came with a frame.
    #[error("the peer is refused: {0}")]
    Descriptors(String),
}

/// What became of strangers, of whom the transport hears nothing else; since the last [`Handshakes::take_counts`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Ended without a proof, for whatever reason.
    pub refused: u64,
    /// Of those, the ones that took too long.
    pub late: u64,
    /// Of those, the ones that made room for others.
    pub displaced: u64,
    /// Of those, the ones with a wrong proof.
    pub unproved: u64,
    /// Pauses in accepting.
    pub accept_pauses: u64,
}

/// The sockets of a transport, driven by its thread.
#[derive(Debug)]
pub struct Handshakes {
    config: HandshakeConfig,
    poller: Poller,
    listener: Option<OwnedFd>,
    /// Until then the listener is not looked at.
    paused_until: Option<Instant>,
    sockets: BTreeMap<Ticket, Box<Socket>>,
    strangers: usize,
    next: u64,
    counts: Counts,
}

impl Handshakes {
    /// With a nonblocking listener, if others can connect.
    ///
    /// # Errors
    /// When the system gives no epoll descriptor or timer.
    pub fn new(config: HandshakeConfig, listener: Option<OwnedFd>) -> std::io::Result<Self> {
        let poller = Poller::new()?;
        if let Some(listener) = &listener {
            rustix::io::ioctl_fionbio(listener, true)?;
            poller.add_listener(listener.as_fd())?;
        }
        let (sockets, counts) = (BTreeMap::new(), Counts::default());
        Ok(Self { config, poller, listener, paused_until: None, sockets, strangers: 0, next: 1, counts })
    }

    /// Readable when [`Self::look`] would find something.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.poller.descriptor()
    }

    /// The socket that listens.
    #[must_use]
    pub fn listener(&self) -> Option<BorrowedFd<'_>> {
        self.listener.as_ref().map(AsFd::as_fd)
    }

    /// Closes the listener and all strangers: nobody is accepted any more.
    pub fn stop_listening(&mut self) {
        if let Some(listener) = self.listener.take() {
            self.poller.remove_listener(listener.as_fd());
        }
        self.paused_until = None;
        let strangers = self.sockets.iter().filter(|(_, socket)| socket.is_stranger);
        let strangers: Vec<Ticket> = strangers.map(|(&ticket, _)| ticket).collect();
        strangers.into_iter().for_each(|ticket| self.refuse(ticket));
    }

    /// What became of strangers since the last call.
    pub fn take_counts(&mut self) -> Counts {
        std::mem::take(&mut self.counts)
    }

    /// Has a look come at `at`, or earlier.
    pub fn wake_at(&mut self, at: Instant) {
        self.poller.arm(at);
    }

    /// Takes a nonblocking socket on which `connect(2)` was called. [`News::Opened`], [`News::Failed`] or [`News::Closed`] follows.
    ///
    /// # Errors
    /// When the system has no random bytes, the socket cannot be watched, or connecting has failed already.
    pub fn connect(&mut self, socket: OwnedFd) -> std::io::Result<Ticket> {
        let deadline = Instant::now() + self.config.timeout;
        let mut socket = Socket::connecting(socket, self.config.protocol, deadline)?;
        // One to a process of this host is often connected at once.
        socket.finish_connecting().map_err(std::io::Error::other)?;
        self.insert(socket)
    }

    fn insert(&mut self, mut socket: Socket) -> std::io::Result<Ticket> {
        let ticket = Ticket(self.next);
        self.poller.add(&mut socket, ticket)?;
        self.next += 1;
        if let Some(deadline) = socket.deadline {
            self.poller.arm(deadline);
        }
        self.strangers += usize::from(socket.is_stranger);
        self.sockets.insert(ticket, Box::new(socket));
        Ok(ticket)
    }

    /// The socket with this number, while it is here.
    #[must_use]
    pub fn socket(&self, ticket: Ticket) -> Option<BorrowedFd<'_>> {
        self.sockets.get(&ticket).map(|socket| socket.descriptor.as_fd())
    }

    /// Sends a frame with its proof, and descriptors. A socket takes the few frames of a handshake at once.
    ///
    /// # Errors
    /// Why it could not be sent: the connection is lost.
    pub fn say(
        &mut self,
        ticket: Ticket,
        frame: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), String> {
        assert_eq!(frame.len(), self.config.frame_bytes, "every frame of a transport is equally long");
        let Some(socket) = self.sockets.get_mut(&ticket) else { return Err("its socket is gone".to_owned()) };
        socket.say(&self.config, frame, descriptors)
    }

    /// The handshake is over. The socket stays here and tells of the peer's end; further frames are told as well.
    pub fn settle(&mut self, ticket: Ticket) {
        if let Some(socket) = self.sockets.get_mut(&ticket) {
            socket.deadline = None;
        }
    }

    /// The handshake is over, and the socket is the caller's; it blocks, and nothing after the last frame was read from it.
    pub fn release(&mut self, ticket: Ticket) -> Option<OwnedFd> {
        let socket = self.remove(ticket)?;
        rustix::io::ioctl_fionbio(&socket.descriptor, false).ok()?;
        Some(socket.descriptor)
    }

    /// Closes the socket, without news.
    pub fn forget(&mut self, ticket: Ticket) {
        drop(self.remove(ticket));
    }

    fn remove(&mut self, ticket: Ticket) -> Option<Box<Socket>> {
        let socket = self.sockets.remove(&ticket)?;
        self.strangers -= usize::from(socket.is_stranger);
        self.poller.remove(&socket);
        Some(socket)
    }

    /// One look at all sockets that have something, and at deadlines. `admit` sets options of an accepted socket, or turns it
    /// away.
    pub fn look(&mut self, mut admit: impl FnMut(&OwnedFd) -> bool, news: &mut Vec<News>) {
        let ready = self.poller.look();
        for found in ready.iter() {
            match found {
                Ready::Listener => self.accept(&mut admit, news),
                Ready::Timer => self.expire(news),
                Ready::Socket(ticket) => self.progress(ticket, news),
            }
        }
    }

    fn accept(&mut self, admit: &mut impl FnMut(&OwnedFd) -> bool, news: &mut Vec<News>) {
        for _ in 0..ACCEPTS_MAX {
            let Some(listener) = &self.listener else { return };
            match rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) if admit(&socket) => self.accepted(socket, news),
                Ok(_) => {}
                Err(Errno::AGAIN) => return,
                Err(errno) if is_of_one_socket(errno) => {}
                Err(_) => return self.pause(),
            }
        }
    }

    /// Nothing is accepted for a moment: the listener stays readable, and a thread would turn around it.
    fn pause(&mut self) {
        let Some(listener) = &self.listener else { return };
        self.poller.remove_listener(listener.as_fd());
        let until = Instant::now() + ACCEPT_PAUSE;
        self.paused_until = Some(until);
        self.poller.arm(until);
        self.counts.accept_pauses += 1;
    }

    fn accepted(&mut self, socket: OwnedFd, news: &mut Vec<News>) {
        if self.strangers >= self.config.strangers_max {
            let oldest =
                self.sockets.iter().find(|(_, socket)| socket.is_stranger).map(|(&ticket, _)| ticket);
            if let Some(oldest) = oldest {
                self.counts.displaced += 1;
                self.refuse(oldest);
            }
        }
        let deadline = Instant::now() + self.config.timeout;
        match self.insert(Socket::accepted(socket, self.config.protocol, deadline)) {
            // Its opening is often here already: it speaks before it is accepted.
            Ok(ticket) => self.progress(ticket, news),
            Err(_) => self.counts.refused += 1,
        }
    }

    /// Ends a stranger.
    fn refuse(&mut self, ticket: Ticket) {
        self.counts.refused += 1;
        drop(self.remove(ticket));
    }

    /// Reads what a socket has: at most an opening and a frame, the rest at the next look.
    fn progress(&mut self, ticket: Ticket, news: &mut Vec<News>) {
        let Some(socket) = self.sockets.get_mut(&ticket) else { return };
        match socket.finish_connecting() {
            Ok(true) => {}
            Ok(false) => return,
            Err(reason) => return self.closed(ticket, reason, news),
        }
        self.poller.watch_input(socket, ticket);
        match socket.read(&self.config) {
            Incoming::Nothing => {}
            Incoming::Opened if socket.is_initiator => news.push(News::Opened { ticket }),
            // Its hello is often here as well.
            Incoming::Opened => match socket.read(&self.config) {
                Incoming::Nothing | Incoming::Opened => {}
                other => self.arrived(ticket, other, news),
            },
            other => self.arrived(ticket, other, news),
        }
    }

    fn arrived(&mut self, ticket: Ticket, incoming: Incoming, news: &mut Vec<News>) {
        match incoming {
            Incoming::Nothing | Incoming::Opened => {}
            Incoming::Frame(frame, descriptors) => {
                let Some(socket) = self.sockets.get_mut(&ticket) else { return };
                self.strangers -= usize::from(std::mem::take(&mut socket.is_stranger));
                // Whoever hears of it has time to answer: it does not fail in this look.
                if let Some(deadline) = &mut socket.deadline {
                    *deadline = Instant::now() + self.config.timeout;
                }
                news.push(News::Frame { ticket, frame, descriptors });
            }
            Incoming::Failed(failure) => self.failed(ticket, failure, news),
            Incoming::Closed(reason) => self.closed(ticket, reason, news),
        }
    }

    fn failed(&mut self, ticket: Ticket, failure: Failure, news: &mut Vec<News>) {
        let Some(socket) = self.sockets.get_mut(&ticket) else { return };
        if socket.is_stranger {
            self.counts.unproved += u64::from(failure == Failure::Auth(AuthError::Secret));
            self.counts.late += u64::from(failure == Failure::Late);
            return self.refuse(ticket);
        }
        socket.has_failed = true;
        socket.deadline = None;
        news.push(News::Failed { ticket, failure });
    }

    fn closed(&mut self, ticket: Ticket, reason: String, news: &mut Vec<News>) {
        let Some(socket) = self.sockets.get_mut(&ticket) else { return };
        if socket.is_stranger {
            return self.refuse(ticket);
        }
        // It stays readable, and whoever owns it may want to keep it for a while.
        self.poller.remove(socket);
        socket.deadline = None;
        news.push(News::Closed { ticket, reason });
    }

    /// The timer has rung: ends what took too long, accepts again.
    fn expire(&mut self, news: &mut Vec<News>) {
        self.poller.rung();
        let now = Instant::now();
        let is_late = |socket: &Socket| socket.deadline.is_some_and(|deadline| deadline <= now);
        let late: Vec<Ticket> =
            self.sockets.iter().filter(|(_, socket)| is_late(socket)).map(|(&ticket, _)| ticket).collect();
        for ticket in late {
            let is_connecting = self.sockets.get(&ticket).is_some_and(|socket| socket.is_connecting());
            let failure = if is_connecting { Failure::Unreachable } else { Failure::Late };
            self.failed(ticket, failure, news);
        }
        if let (Some(until), Some(listener)) = (self.paused_until, &self.listener)
            && until <= now
        {
            let is_watched = self.poller.add_listener(listener.as_fd()).is_ok();
            self.paused_until = (!is_watched).then_some(now + ACCEPT_PAUSE);
        }
        let deadlines = self.sockets.values().filter_map(|socket| socket.deadline);
        if let Some(next) = deadlines.chain(self.paused_until).min() {
            self.poller.arm(next);
        }
    }
}

/// Whether `accept(2)` failed because of the socket that it was about to return: the next one may be fine.
fn is_of_one_socket(errno: Errno) -> bool {
    let passing = [
        Errno::INTR,
        Errno::CONNABORTED,
        Errno::PROTO,
        Errno::NETDOWN,
        Errno::NETUNREACH,
        Errno::HOSTDOWN,
        Errno::HOSTUNREACH,
        Errno::NOPROTOOPT,
        Errno::OPNOTSUPP,
        Errno::PERM,
    ];
    passing.contains(&errno)
}

#[cfg(test)]
mod tests;
