//! The sockets over which connections are made: one [`Handshakes`] in each transport between processes.
//!
//! ```text
//! accept ─▶ stranger ─ openings ─▶ peer's hello with its proof ─▶ Frame ─ send(hello) ─▶ kept open, or released
//! connect ──────────── openings ─▶ Opened ─ send(hello) ─▶ peer's hello with its proof ─▶ Frame ─▶ the same
//! ```
//!
//! Openings and proofs are described in [`auth`](crate::auth). An accepted socket is a *stranger* until its first frame has
//! proved itself: the transport hears nothing of it and makes nothing for it, it costs a descriptor and a deadline, and there are
//! at most [`HandshakeConfig::strangers_max`]; one more ends the oldest, so that silent sockets keep nobody out. When descriptors
//! run out, accepting pauses: connections wait in the listener's backlog, and no thread turns around a listener that stays
//! readable.
//!
//! A socket of which the transport knows is its own to end ([`Handshakes::close`]). Two ways to go on with it:
//! [`Handshakes::keep_open`] leaves it here, where it tells of the peer's end; [`Handshakes::release`] gives it to the transport.
//!
//! Costs: a few system calls for each connection, none without events: [`Handshakes::descriptor`] is readable when there is some. Not
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
    /// Descriptors that come with each frame.
    pub descriptors: Option<FrameDescriptors>,
    /// How long a socket may take to be kept open or released.
    pub timeout: Duration,
    /// Most accepted sockets that have not proved themselves.
    pub strangers_max: usize,
}

/// Descriptors that come with each frame (`SCM_RIGHTS`, unix(7)).
#[derive(Debug, Clone, Copy)]
pub struct FrameDescriptors {
    /// How many, at most [`DESCRIPTORS_MAX`].
    pub count: usize,
    /// Appends what the proof of a frame covers of them: whoever passes a frame on shall not put others into it. An error is the
    /// reason why they are refused.
    pub identify: fn(&[BorrowedFd<'_>], &mut Vec<u8>) -> Result<(), String>,
}

/// A socket's number: never given twice, and never zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SocketId(pub u64);

/// An event of one socket.
#[derive(Debug)]
pub enum HandshakeEvent {
    /// On the side that connects: both openings are here, and it is to say its hello.
    Opened {
        /// The socket.
        socket_id: SocketId,
    },
    /// A frame of a peer that holds the secret. With the first one of an accepted socket, the transport learns of it.
    Frame {
        /// The socket.
        socket_id: SocketId,
        /// [`HandshakeConfig::frame_bytes`] bytes.
        frame: Vec<u8>,
        /// As many as [`FrameDescriptors::count`].
        descriptors: Vec<OwnedFd>,
    },
    /// The handshake failed, or the peer broke the protocol; its end of the socket may be open. Nothing but its
    /// [`HandshakeEvent::Closed`] follows.
    Failed {
        /// The socket.
        socket_id: SocketId,
        /// Why.
        error: HandshakeError,
    },
    /// The peer has closed the socket or died. Nothing follows.
    Closed {
        /// The socket.
        socket_id: SocketId,
        /// How.
        reason: String,
    },
}

/// Why a handshake failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// The address did not answer in time.
    #[error("cannot connect: timed out")]
    Unreachable,
    /// The peer did not greet in time.
    #[error("the handshake timed out")]
    Late,
    /// The peer's opening or proof was refused.
    #[error("the peer is refused: {0}")]
    Auth(#[from] AuthError),
    /// The descriptors that came with a frame.
    #[error("the peer is refused: {0}")]
    Descriptors(String),
}

/// Counts of events since the last [`Handshakes::take_counts`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HandshakeCounts {
    /// Accepted ones that ended before they proved themselves: the transport hears nothing else of them.
    pub refused: u64,
    /// Refused sockets that made room for others.
    pub displaced: u64,
    /// All whose handshake took too long.
    pub late: u64,
    /// All whose proof was wrong.
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
    /// While set, the listener is not polled.
    paused_until: Option<Instant>,
    sockets: BTreeMap<SocketId, Box<Socket>>,
    strangers: usize,
    next: u64,
    counts: HandshakeCounts,
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
        let (sockets, counts) = (BTreeMap::new(), HandshakeCounts::default());
        Ok(Self { config, poller, listener, paused_until: None, sockets, strangers: 0, next: 1, counts })
    }

    /// Readable when [`Self::poll`] would find something.
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
        let strangers: Vec<SocketId> = strangers.map(|(&socket_id, _)| socket_id).collect();
        strangers.into_iter().for_each(|socket_id| self.refuse(socket_id));
    }

    /// Returns the counts since the last call.
    pub fn take_counts(&mut self) -> HandshakeCounts {
        std::mem::take(&mut self.counts)
    }

    /// Has a look come at `at`, or earlier.
    pub fn wake_at(&mut self, at: Instant) {
        self.poller.arm(at);
    }

    /// Takes a nonblocking socket on which `connect(2)` was called. [`HandshakeEvent::Opened`], [`HandshakeEvent::Failed`] or [`HandshakeEvent::Closed`] follows.
    ///
    /// # Errors
    /// When the system has no random bytes, the socket cannot be watched, or connecting has failed already.
    pub fn connect(&mut self, socket: OwnedFd) -> std::io::Result<SocketId> {
        let deadline = Instant::now() + self.config.timeout;
        let mut socket = Socket::connecting(socket, self.config.protocol, deadline)?;
        // A socket to a process of this host is often connected at once.
        socket.finish_connecting().map_err(std::io::Error::other)?;
        self.insert(socket)
    }

    fn insert(&mut self, mut socket: Socket) -> std::io::Result<SocketId> {
        let socket_id = SocketId(self.next);
        self.poller.add(&mut socket, socket_id)?;
        self.next += 1;
        if let Some(deadline) = socket.deadline {
            self.poller.arm(deadline);
        }
        self.strangers += usize::from(socket.is_stranger);
        self.sockets.insert(socket_id, Box::new(socket));
        Ok(socket_id)
    }

    /// The socket with this number, while it is here.
    #[must_use]
    pub fn socket(&self, socket_id: SocketId) -> Option<BorrowedFd<'_>> {
        self.sockets.get(&socket_id).map(|socket| socket.descriptor.as_fd())
    }

    /// Sends a frame with its proof, and descriptors. A socket takes the few frames of a handshake at once.
    ///
    /// # Errors
    /// Why it could not be sent: the connection is lost.
    pub fn send(
        &mut self,
        socket_id: SocketId,
        frame: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), String> {
        assert_eq!(frame.len(), self.config.frame_bytes, "every frame of a transport is equally long");
        let Some(socket) = self.sockets.get_mut(&socket_id) else {
            return Err("its socket is gone".to_owned());
        };
        socket.send(&self.config, frame, descriptors)
    }

    /// The handshake is over. The socket stays here and tells of the peer's end; further frames are told as well.
    pub fn keep_open(&mut self, socket_id: SocketId) {
        if let Some(socket) = self.sockets.get_mut(&socket_id) {
            socket.deadline = None;
        }
    }

    /// Takes the socket out, in blocking mode; bytes after the last frame are unread. `None` when there is no such socket any more, or
    /// its mode could not be set, and then it is closed.
    pub fn release(&mut self, socket_id: SocketId) -> Option<OwnedFd> {
        let socket = self.remove(socket_id)?;
        rustix::io::ioctl_fionbio(&socket.descriptor, false).ok()?;
        Some(socket.descriptor)
    }

    /// Closes the socket, without events.
    pub fn close(&mut self, socket_id: SocketId) {
        drop(self.remove(socket_id));
    }

    fn remove(&mut self, socket_id: SocketId) -> Option<Box<Socket>> {
        let socket = self.sockets.remove(&socket_id)?;
        self.strangers -= usize::from(socket.is_stranger);
        self.poller.remove(&socket);
        Some(socket)
    }

    /// Takes what sockets have, and looks at deadlines: at most 64 sockets and 16 accepts; there is more while
    /// [`Self::descriptor`] is readable. Does not block. `admit` sets options of an accepted socket, or turns it away.
    pub fn poll(&mut self, mut admit: impl FnMut(&OwnedFd) -> bool, events: &mut Vec<HandshakeEvent>) {
        let ready = self.poller.look();
        for found in ready.iter() {
            match found {
                Ready::Listener => self.accept(&mut admit, events),
                Ready::Timer => self.expire(events),
                Ready::Socket(socket_id) => self.progress(socket_id, events),
            }
        }
    }

    fn accept(&mut self, admit: &mut impl FnMut(&OwnedFd) -> bool, events: &mut Vec<HandshakeEvent>) {
        for _ in 0..ACCEPTS_MAX {
            let Some(listener) = &self.listener else { return };
            match rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) if admit(&socket) => self.accepted(socket, events),
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

    fn accepted(&mut self, socket: OwnedFd, events: &mut Vec<HandshakeEvent>) {
        if self.strangers >= self.config.strangers_max {
            let oldest =
                self.sockets.iter().find(|(_, socket)| socket.is_stranger).map(|(&socket_id, _)| socket_id);
            if let Some(oldest) = oldest {
                self.counts.displaced += 1;
                self.refuse(oldest);
            }
        }
        let deadline = Instant::now() + self.config.timeout;
        match self.insert(Socket::accepted(socket, self.config.protocol, deadline)) {
            // The peer's opening is often here already: a peer speaks before it is accepted.
            Ok(socket_id) => self.progress(socket_id, events),
            Err(_) => self.counts.refused += 1,
        }
    }

    /// Ends a stranger.
    fn refuse(&mut self, socket_id: SocketId) {
        self.counts.refused += 1;
        drop(self.remove(socket_id));
    }

    /// Reads what a socket has: at most an opening and a frame, the rest at the next look.
    fn progress(&mut self, socket_id: SocketId, events: &mut Vec<HandshakeEvent>) {
        let Some(socket) = self.sockets.get_mut(&socket_id) else { return };
        match socket.finish_connecting() {
            Ok(true) => {}
            Ok(false) => return,
            Err(reason) => return self.closed(socket_id, reason, events),
        }
        self.poller.watch_input(socket, socket_id);
        match socket.read(&self.config) {
            Incoming::Nothing => {}
            Incoming::Opened if socket.is_initiator => events.push(HandshakeEvent::Opened { socket_id }),
            // The peer's hello is often here as well.
            Incoming::Opened => match socket.read(&self.config) {
                Incoming::Nothing | Incoming::Opened => {}
                other => self.arrived(socket_id, other, events),
            },
            other => self.arrived(socket_id, other, events),
        }
    }

    fn arrived(&mut self, socket_id: SocketId, incoming: Incoming, events: &mut Vec<HandshakeEvent>) {
        match incoming {
            Incoming::Nothing | Incoming::Opened => {}
            Incoming::Frame(frame, descriptors) => {
                let Some(socket) = self.sockets.get_mut(&socket_id) else { return };
                self.strangers -= usize::from(std::mem::take(&mut socket.is_stranger));
                // The transport gets time to answer: the socket does not fail in this poll.
                if let Some(deadline) = &mut socket.deadline {
                    *deadline = Instant::now() + self.config.timeout;
                }
                events.push(HandshakeEvent::Frame { socket_id, frame, descriptors });
            }
            Incoming::Failed(failure) => self.failed(socket_id, failure, events),
            Incoming::Closed(reason) => self.closed(socket_id, reason, events),
        }
    }

    fn failed(&mut self, socket_id: SocketId, failure: HandshakeError, events: &mut Vec<HandshakeEvent>) {
        let Some(socket) = self.sockets.get_mut(&socket_id) else { return };
        self.counts.unproved += u64::from(failure == HandshakeError::Auth(AuthError::Secret));
        self.counts.late += u64::from(matches!(failure, HandshakeError::Late | HandshakeError::Unreachable));
        if socket.is_stranger {
            return self.refuse(socket_id);
        }
        socket.has_failed = true;
        socket.deadline = None;
        events.push(HandshakeEvent::Failed { socket_id, error: failure });
    }

    fn closed(&mut self, socket_id: SocketId, reason: String, events: &mut Vec<HandshakeEvent>) {
        let Some(socket) = self.sockets.get_mut(&socket_id) else { return };
        if socket.is_stranger {
            return self.refuse(socket_id);
        }
        // A closed socket stays readable, and the transport may keep it for a while.
        self.poller.remove(socket);
        socket.deadline = None;
        events.push(HandshakeEvent::Closed { socket_id, reason });
    }

    /// The timer has rung: ends what took too long, accepts again.
    fn expire(&mut self, events: &mut Vec<HandshakeEvent>) {
        self.poller.rung();
        let now = Instant::now();
        let is_late = |socket: &Socket| socket.deadline.is_some_and(|deadline| deadline <= now);
        let late: Vec<SocketId> = self
            .sockets
            .iter()
            .filter(|(_, socket)| is_late(socket))
            .map(|(&socket_id, _)| socket_id)
            .collect();
        for socket_id in late {
            let is_connecting = self.sockets.get(&socket_id).is_some_and(|socket| socket.is_connecting());
            let failure = if is_connecting { HandshakeError::Unreachable } else { HandshakeError::Late };
            self.failed(socket_id, failure, events);
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
