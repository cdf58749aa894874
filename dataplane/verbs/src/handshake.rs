//! The TCP side of a connection: sockets, and frames read and written without blocking.
//!
//! Both sides send an opening first; every frame after it is followed by its proof (`dataplane_fabric::auth`).
//!
//! The socket stays open after the handshake as the channel of liveness: the kernel tells of a killed peer at
//! once, and of a silent one after keepalive probes or unacknowledged bytes have waited for the configured
//! time. Runs a few times per connection; not a hot path.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use dataplane_fabric::auth::{
    AuthError, Authentication, Dialled, OPENING_BYTES, PROOF_BYTES, Protocol, SharedKey, Transport, Versions,
};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use crate::VerbsError;
use crate::wire::{HANDSHAKE_BYTES, Handshake};

/// Bytes of a frame with its proof.
const PROVED_BYTES: usize = HANDSHAKE_BYTES + PROOF_BYTES;
/// What one side sends at most: its opening, and its hello and its ready, or its refusal.
const OUTGOING_BYTES_MAX: usize = OPENING_BYTES + 2 * PROVED_BYTES;

/// A nonblocking socket with the frame that is being read and those that are being written.
#[derive(Debug)]
pub(crate) struct Exchange {
    pub(crate) socket: TcpStream,
    is_initiator: bool,
    key: SharedKey,
    authentication: Authentication,
    incoming: [u8; PROVED_BYTES],
    received: usize,
    outgoing: [u8; OUTGOING_BYTES_MAX],
    queued: usize,
    sent: usize,
}

/// What reading found.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Incoming {
    /// Nothing complete yet.
    Nothing,
    /// The openings are exchanged: frames may follow.
    Opened,
    /// A frame of a peer that holds our secret.
    Frame(Handshake),
    /// A frame without the proof of that, or of a peer without a common version.
    Refused(AuthError),
    /// The end, and why.
    End(String),
}

impl Exchange {
    /// For a connection that was accepted.
    pub(crate) fn accepted(socket: TcpStream, key: SharedKey, versions: Versions) -> Self {
        let (incoming, outgoing) = ([0; PROVED_BYTES], [0; OUTGOING_BYTES_MAX]);
        let authentication = Authentication::accepting(protocol(versions));
        let is_initiator = false;
        Self {
            socket,
            is_initiator,
            key,
            authentication,
            incoming,
            received: 0,
            outgoing,
            queued: 0,
            sent: 0,
        }
    }

    /// Starts a connection.
    pub(crate) fn connect(
        address: SocketAddr,
        peer_dead_after: Duration,
        key: SharedKey,
        versions: Versions,
    ) -> std::io::Result<Self> {
        let (authentication, opening) =
            Authentication::connecting(protocol(versions)).map_err(std::io::Error::other)?;
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
        match rustix::net::connect(&socket, &address) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(errno) => return Err(errno.into()),
        }
        let socket = TcpStream::from(socket);
        tune(&socket, peer_dead_after);
        let mut exchange =
            Self { is_initiator: true, authentication, ..Self::accepted(socket, key, versions) };
        exchange.queue_bytes(&opening);
        Ok(exchange)
    }

    /// How connecting ended.
    pub(crate) fn connected(&self) -> Result<(), String> {
        match sockopt::socket_error(&self.socket) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(errno)) | Err(errno) => Err(std::io::Error::from(errno).to_string()),
        }
    }

    /// Queues a frame and its proof. There is room for every frame of a handshake.
    pub(crate) fn queue(&mut self, frame: &Handshake) {
        let frame = frame.encode();
        let Ok(proof) = self.authentication.prove(&self.key, &frame) else { return };
        self.queue_bytes(&frame);
        self.queue_bytes(&proof);
    }

    fn queue_bytes(&mut self, bytes: &[u8]) {
        let end = self.queued + bytes.len();
        assert!(end <= OUTGOING_BYTES_MAX, "a handshake has an opening and two frames in each direction");
        self.outgoing[self.queued..end].copy_from_slice(bytes);
        self.queued = end;
    }

    /// Whether bytes wait to be written.
    pub(crate) fn wants_to_write(&self) -> bool {
        self.sent < self.queued
    }

    /// Writes what the socket takes.
    pub(crate) fn write(&mut self) -> Result<(), String> {
        while self.wants_to_write() {
            match self.socket.write(&self.outgoing[self.sent..self.queued]) {
                Ok(0) => return Err("the peer takes no bytes".to_owned()),
                Ok(count) => self.sent += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(())
    }

    /// Reads at most one opening or frame.
    pub(crate) fn read(&mut self) -> Incoming {
        loop {
            let awaited = if self.authentication.is_agreed() { PROVED_BYTES } else { OPENING_BYTES };
            match self.socket.read(&mut self.incoming[self.received..awaited]) {
                Ok(0) => {
                    let reason = "the peer closed the connection; one with another secret does so";
                    return Incoming::End(reason.to_owned());
                }
                Ok(count) => self.received += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Incoming::Nothing,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Incoming::End(error.to_string()),
            }
            if self.received == awaited {
                self.received = 0;
                return self.received_whole();
            }
        }
    }

    fn received_whole(&mut self) -> Incoming {
        if self.authentication.is_agreed() {
            return self.received_frame();
        }
        let Some(opening) = self.incoming.first_chunk() else { return Incoming::Nothing };
        // The other end of a connection that we made, our own end of one that was accepted.
        let dialled = if self.is_initiator { self.socket.peer_addr() } else { self.socket.local_addr() };
        let dialled = match dialled {
            Ok(address) => Dialled::of(address),
            Err(error) => return Incoming::End(error.to_string()),
        };
        match self.authentication.opened(opening, dialled) {
            Ok(answer) => {
                if let Some(answer) = answer {
                    self.queue_bytes(&answer);
                }
                Incoming::Opened
            }
            Err(error) => Incoming::End(format!("protocol error: {error}")),
        }
    }

    fn received_frame(&self) -> Incoming {
        let (frame, proof) = (self.incoming.first_chunk(), self.incoming.last_chunk());
        let (Some(frame), Some(proof)) = (frame, proof) else { return Incoming::Nothing };
        if let Err(error) = self.authentication.check(&self.key, frame, proof) {
            return Incoming::Refused(error);
        }
        match Handshake::decode(frame) {
            Ok(frame) => Incoming::Frame(frame),
            Err(reason) => Incoming::End(format!("protocol error: {reason}")),
        }
    }
}

fn protocol(versions: Versions) -> Protocol {
    Protocol { transport: Transport::Rdma, versions }
}

/// A listener that does not block.
pub(crate) fn listen(address: SocketAddr) -> Result<TcpListener, VerbsError> {
    let failed = |error| VerbsError::System { operation: format!("listen on {address}"), error };
    let listener = TcpListener::bind(address).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok(listener)
}

/// Options of every connection. A kernel without one of them notices a dead peer later, or never by itself.
pub(crate) fn tune(socket: &TcpStream, peer_dead_after: Duration) {
    let probe_every = (peer_dead_after / 4).max(Duration::from_secs(1));
    let millis = u32::try_from(peer_dead_after.as_millis()).unwrap_or(u32::MAX);
    let results = [
        socket.set_nonblocking(true).map_err(|_| "nonblocking"),
        sockopt::set_tcp_nodelay(socket, true).map_err(|_| "TCP_NODELAY"),
        sockopt::set_tcp_user_timeout(socket, millis).map_err(|_| "TCP_USER_TIMEOUT"),
        sockopt::set_socket_keepalive(socket, true).map_err(|_| "SO_KEEPALIVE"),
        sockopt::set_tcp_keepidle(socket, probe_every).map_err(|_| "TCP_KEEPIDLE"),
        sockopt::set_tcp_keepintvl(socket, probe_every).map_err(|_| "TCP_KEEPINTVL"),
        sockopt::set_tcp_keepcnt(socket, 3).map_err(|_| "TCP_KEEPCNT"),
    ];
    for option in results.into_iter().filter_map(Result::err) {
        tracing::warn!(option, "the kernel refuses a socket option of the RDMA handshake");
    }
}
