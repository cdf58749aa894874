//! The sockets over which connections are made: one [`Handshakes`] in each transport between processes.
//!
//! ```text
//! accept ─▶ stranger ─ openings ─▶ peer's hello with its proof ─▶ Frame ─ send(hello) ─▶ kept open, or released
//! connect ──────────── openings ─▶ Opened ─ send(hello) ─▶ peer's hello with its proof ─▶ Frame ─▶ the same
//! ```
//!
//! Openings and proofs are described in [`auth`](crate::auth). An accepted socket is a *stranger* until the
//! proof of its first frame has been verified. Until then the transport gets no event for it and allocates
//! nothing for it; it costs a descriptor and a deadline. There are at most [`HandshakeConfig::unauthenticated_max`]
//! strangers. One more closes the oldest, so that silent sockets do not block other peers. When descriptors
//! run out, accepting pauses: connections wait in the listener's backlog, and no thread spins on a listener
//! that stays readable.
//!
//! The transport closes the sockets that were reported to it ([`Handshakes::close`]). After the handshake
//! there are two ways to go on: [`Handshakes::keep_open`] leaves the socket here, where it reports the peer's
//! disconnect; [`Handshakes::release`] hands it to the transport.
//!
//! Costs: a few system calls for each connection and none without events: [`Handshakes::descriptor`] is
//! readable when there are events. Not a hot path.

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

/// Largest number of descriptors that a frame carries.
pub const DESCRIPTORS_MAX: usize = 4;
/// Sockets accepted by one [`Handshakes::poll`].
const ACCEPTS_MAX: usize = 16;
/// Time without accepting after the system has run out of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Parameters of the handshakes of one transport.
#[derive(Debug, Clone)]
pub struct HandshakeConfig {
    /// The transport and its versions.
    pub protocol: Protocol,
    /// The secret that all peers share.
    pub key: SharedKey,
    /// Bytes of a frame without its proof.
    pub frame_bytes: usize,
    /// Descriptors that come with each frame.
    pub descriptors: Option<FrameDescriptors>,
    /// Time limit from `connect(2)` or `accept(2)`, renewed by each frame, until the socket is kept open or
    /// released.
    pub timeout: Duration,
    /// Largest number of accepted sockets whose proof has not been verified.
    pub unauthenticated_max: usize,
}

/// Descriptors that each frame carries (`SCM_RIGHTS`, unix(7)).
#[derive(Debug, Clone, Copy)]
pub struct FrameDescriptors {
    /// Number of descriptors, at most [`DESCRIPTORS_MAX`].
    pub count: usize,
    /// Appends the identity of the descriptors, which the proof of the frame covers, so that a relay cannot
    /// exchange them. An error is the reason why the descriptors are refused.
    pub identify: fn(&[BorrowedFd<'_>], &mut Vec<u8>) -> Result<(), String>,
}

/// Number of a socket: never 0 and never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SocketId(pub u64);

/// An event of one socket.
#[derive(Debug)]
pub enum HandshakeEvent {
    /// Connecting side: both openings are exchanged; the hello is to be sent now.
    Opened {
        /// The socket.
        socket_id: SocketId,
    },
    /// A frame of a peer that holds the secret. The first frame of an accepted socket makes it known to the
    /// transport.
    Frame {
        /// The socket.
        socket_id: SocketId,
        /// [`HandshakeConfig::frame_bytes`] bytes, without the proof.
        frame: Vec<u8>,
        /// [`FrameDescriptors::count`] descriptors.
        descriptors: Vec<OwnedFd>,
    },
    /// The handshake failed, or the peer broke the protocol. The peer's end of the socket may still be open.
    /// The only event that can follow is [`HandshakeEvent::Closed`].
    Failed {
        /// The socket.
        socket_id: SocketId,
        /// Cause of the failure.
        error: HandshakeError,
    },
    /// The peer closed the socket or died. No event follows.
    Closed {
        /// The socket.
        socket_id: SocketId,
        /// Cause, as text for an operator.
        reason: String,
    },
}

/// Cause of a failed handshake.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HandshakeError {
    /// The address did not answer within the time limit.
    #[error("cannot connect: timed out")]
    Unreachable,
    /// The peer sent no hello within the time limit.
    #[error("the handshake timed out")]
    Late,
    /// The peer's opening or proof was refused.
    #[error("the peer is refused: {0}")]
    Auth(#[from] AuthError),
    /// The descriptors of a frame were refused, for this reason.
    #[error("the peer is refused: {0}")]
    Descriptors(String),
}

/// Counts of events since the last [`Handshakes::take_counts`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HandshakeCounts {
    /// Accepted sockets that ended before their proof was verified. The transport gets no event for them.
    pub refused: u64,
    /// Refused sockets that were closed to make room for a newer one.
    pub displaced: u64,
    /// Handshakes that exceeded the time limit.
    pub late: u64,
    /// Handshakes in which the proof was wrong.
    pub unproved: u64,
    /// Times that accepting was paused.
    pub accept_pauses: u64,
}

/// The sockets of one transport, driven by the transport's thread.
#[derive(Debug)]
pub struct Handshakes {
    config: HandshakeConfig,
    poller: Poller,
    listener: Option<OwnedFd>,
    /// End of the pause in accepting. While set, the listener is not polled.
    paused_until: Option<Instant>,
    sockets: BTreeMap<SocketId, Box<Socket>>,
    unauthenticated: usize,
    next: u64,
    counts: HandshakeCounts,
}

impl Handshakes {
    /// Creates the handshakes, with a nonblocking listener if peers can connect to this node.
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
        Ok(Self {
            config,
            poller,
            listener,
            paused_until: None,
            sockets,
            unauthenticated: 0,
            next: 1,
            counts,
        })
    }

    /// Returns a descriptor that is readable when [`Self::poll`] has work.
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        self.poller.descriptor()
    }

    /// Returns the listening socket.
    #[must_use]
    pub fn listener(&self) -> Option<BorrowedFd<'_>> {
        self.listener.as_ref().map(AsFd::as_fd)
    }

    /// Closes the listener and all strangers. No connection is accepted afterwards.
    pub fn stop_listening(&mut self) {
        if let Some(listener) = self.listener.take() {
            self.poller.remove_listener(listener.as_fd());
        }
        self.paused_until = None;
        let unauthenticated = self.sockets.iter().filter(|(_, socket)| socket.is_unauthenticated);
        let unauthenticated: Vec<SocketId> = unauthenticated.map(|(&socket_id, _)| socket_id).collect();
        unauthenticated.into_iter().for_each(|socket_id| self.refuse(socket_id));
    }

    /// Returns the counts since the last call.
    pub fn take_counts(&mut self) -> HandshakeCounts {
        std::mem::take(&mut self.counts)
    }

    /// Makes [`Self::descriptor`] readable at `at` or earlier.
    pub fn wake_at(&mut self, at: Instant) {
        self.poller.arm(at);
    }

    /// Adds a nonblocking socket on which `connect(2)` was called. [`HandshakeEvent::Opened`],
    /// [`HandshakeEvent::Failed`] or [`HandshakeEvent::Closed`] follows.
    ///
    /// # Errors
    /// When the system has no random bytes, the socket cannot be watched, or connecting has failed already.
    pub fn connect(&mut self, socket: OwnedFd) -> std::io::Result<SocketId> {
        let deadline = Instant::now() + self.config.timeout;
        let mut socket = Socket::connecting(socket, self.config.protocol, deadline)?;
        // A connection to a process of this host is often complete at once.
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
        self.unauthenticated += usize::from(socket.is_unauthenticated);
        self.sockets.insert(socket_id, Box::new(socket));
        Ok(socket_id)
    }

    /// Returns the socket with this number; `None` when it was closed or released.
    #[must_use]
    pub fn socket(&self, socket_id: SocketId) -> Option<BorrowedFd<'_>> {
        self.sockets.get(&socket_id).map(|socket| socket.descriptor.as_fd())
    }

    /// Sends a frame with its proof and descriptors. A socket buffer holds the few frames of a handshake, so
    /// nothing is queued.
    ///
    /// # Errors
    /// The reason why the frame could not be sent; the connection is lost.
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

    /// Ends the handshake and keeps the socket here: the peer's disconnect and further frames are reported.
    pub fn keep_open(&mut self, socket_id: SocketId) {
        if let Some(socket) = self.sockets.get_mut(&socket_id) {
            socket.deadline = None;
        }
    }

    /// Removes the socket and returns it in blocking mode; bytes after the last frame are unread. `None` when
    /// there is no such socket, or when its mode could not be set and it was closed.
    pub fn release(&mut self, socket_id: SocketId) -> Option<OwnedFd> {
        let socket = self.remove(socket_id)?;
        rustix::io::ioctl_fionbio(&socket.descriptor, false).ok()?;
        Some(socket.descriptor)
    }

    /// Closes the socket. No event is reported for it.
    pub fn close(&mut self, socket_id: SocketId) {
        drop(self.remove(socket_id));
    }

    fn remove(&mut self, socket_id: SocketId) -> Option<Box<Socket>> {
        let socket = self.sockets.remove(&socket_id)?;
        self.unauthenticated -= usize::from(socket.is_unauthenticated);
        self.poller.remove(&socket);
        Some(socket)
    }

    /// Reads the ready sockets and checks the deadlines: at most 64 sockets and 16 accepts per call. While
    /// [`Self::descriptor`] stays readable there is more. Does not block. `admit` sets options of an accepted
    /// socket or rejects it.
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

    /// Pauses accepting for [`ACCEPT_PAUSE`]: without descriptors the listener stays readable, and its thread
    /// would spin.
    fn pause(&mut self) {
        let Some(listener) = &self.listener else { return };
        self.poller.remove_listener(listener.as_fd());
        let until = Instant::now() + ACCEPT_PAUSE;
        self.paused_until = Some(until);
        self.poller.arm(until);
        self.counts.accept_pauses += 1;
    }

    fn accepted(&mut self, socket: OwnedFd, events: &mut Vec<HandshakeEvent>) {
        if self.unauthenticated >= self.config.unauthenticated_max {
            let oldest = self
                .sockets
                .iter()
                .find(|(_, socket)| socket.is_unauthenticated)
                .map(|(&socket_id, _)| socket_id);
            if let Some(oldest) = oldest {
                self.counts.displaced += 1;
                self.refuse(oldest);
            }
        }
        let deadline = Instant::now() + self.config.timeout;
        match self.insert(Socket::accepted(socket, self.config.protocol, deadline)) {
            // The peer's opening has often arrived already: a peer sends it before it is accepted.
            Ok(socket_id) => self.progress(socket_id, events),
            Err(_) => self.counts.refused += 1,
        }
    }

    /// Closes a stranger and counts it as refused.
    fn refuse(&mut self, socket_id: SocketId) {
        self.counts.refused += 1;
        drop(self.remove(socket_id));
    }

    /// Reads one socket: at most an opening and a frame; the rest is left for the next poll.
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
            // The peer's hello has often arrived as well.
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
                self.unauthenticated -= usize::from(std::mem::take(&mut socket.is_unauthenticated));
                // Renews the deadline, so that the socket does not time out in this poll before the transport
                // can answer.
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
        if socket.is_unauthenticated {
            return self.refuse(socket_id);
        }
        socket.has_failed = true;
        socket.deadline = None;
        events.push(HandshakeEvent::Failed { socket_id, error: failure });
    }

    fn closed(&mut self, socket_id: SocketId, reason: String, events: &mut Vec<HandshakeEvent>) {
        let Some(socket) = self.sockets.get_mut(&socket_id) else { return };
        if socket.is_unauthenticated {
            return self.refuse(socket_id);
        }
        // A closed socket stays readable, and the transport may keep it for a while: stop polling it.
        self.poller.remove(socket);
        socket.deadline = None;
        events.push(HandshakeEvent::Closed { socket_id, reason });
    }

    /// Handles the timer: fails the handshakes whose deadline has passed and ends the pause in accepting.
    fn expire(&mut self, events: &mut Vec<HandshakeEvent>) {
        self.poller.timer_expired();
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

/// Whether `accept(2)` failed because of the one socket that it was about to return; the next call may
/// succeed.
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
