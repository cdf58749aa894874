//! The TCP side of a connection: sockets, and frames read and written without blocking.
//!
//! The socket stays open after the handshake as the channel of liveness: the kernel tells of a killed peer at
//! once, and of a silent one after keepalive probes or unacknowledged bytes have waited for the configured
//! time. Runs a few times per connection; not a hot path.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use crate::VerbsError;
use crate::wire::{HANDSHAKE_BYTES, Handshake};

/// Frames that one side sends at most: its hello and its ready, or its refusal.
const OUTGOING_BYTES_MAX: usize = 2 * HANDSHAKE_BYTES;

/// A nonblocking socket with the frame that is being read and those that are being written.
#[derive(Debug)]
pub(crate) struct Exchange {
    pub(crate) socket: TcpStream,
    incoming: [u8; HANDSHAKE_BYTES],
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
    /// A frame.
    Frame(Handshake),
    /// The end, and why.
    End(String),
}

impl Exchange {
    pub(crate) fn new(socket: TcpStream) -> Self {
        let (incoming, outgoing) = ([0; HANDSHAKE_BYTES], [0; OUTGOING_BYTES_MAX]);
        Self { socket, incoming, received: 0, outgoing, queued: 0, sent: 0 }
    }

    /// Starts a connection.
    pub(crate) fn connect(address: SocketAddr, peer_dead_after: Duration) -> std::io::Result<Self> {
        let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
        match rustix::net::connect(&socket, &address) {
            Ok(()) | Err(Errno::INPROGRESS) => {}
            Err(errno) => return Err(errno.into()),
        }
        let socket = TcpStream::from(socket);
        tune(&socket, peer_dead_after);
        Ok(Self::new(socket))
    }

    /// How connecting ended.
    pub(crate) fn connected(&self) -> Result<(), String> {
        match sockopt::socket_error(&self.socket) {
            Ok(Ok(())) => Ok(()),
            Ok(Err(errno)) | Err(errno) => Err(std::io::Error::from(errno).to_string()),
        }
    }

    /// Queues a frame. There is room for every frame of a handshake.
    pub(crate) fn queue(&mut self, frame: &Handshake) {
        let room = &mut self.outgoing[self.queued..];
        assert!(room.len() >= HANDSHAKE_BYTES, "a handshake has two frames in each direction");
        room[..HANDSHAKE_BYTES].copy_from_slice(&frame.encode());
        self.queued += HANDSHAKE_BYTES;
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

    /// Reads at most one frame.
    pub(crate) fn read(&mut self) -> Incoming {
        loop {
            match self.socket.read(&mut self.incoming[self.received..]) {
                Ok(0) => return Incoming::End("the peer closed the connection".to_owned()),
                Ok(count) => self.received += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Incoming::Nothing,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Incoming::End(error.to_string()),
            }
            if self.received == HANDSHAKE_BYTES {
                self.received = 0;
                return match Handshake::decode(&self.incoming) {
                    Ok(frame) => Incoming::Frame(frame),
                    Err(reason) => Incoming::End(format!("protocol error: {reason}")),
                };
            }
        }
    }
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
