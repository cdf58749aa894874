//! How connections begin: accepting, connecting, and when either takes too long. Joining is in `join`.
//!
//! The side that connects draws the session's number and opens all connections of both lanes. On each, both sides send
//! an opening, then the side that connects sends a hello with the connection's place and its proof
//! (`dataplane_fabric::auth`). The other side groups them and answers each with the same hello and its own proof. A session is open on
//! the accepting side when all answers are sent, on the other when all have come; data is read only then.
//! Strangers (accepted, not greeted) are counted apart, bounded, and timed out. Not a hot path.

use std::net::SocketAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Instant;

use dataplane_fabric::auth::{Authentication, Dialled, OPENING_BYTES, Protocol, Transport, random_bytes};
use dataplane_fabric::{ConnectError, PeerId};
use io_uring::{opcode, types};

use crate::connection::{Connection, Phase};
use crate::fabric::TcpFabric;
use crate::hello::Hello;
use crate::session::{Session, Stage};
use crate::socket;
use crate::token::{OperationKind, Token};

/// Between looks at the deadlines while a handshake is under way, and the rest of accepting when descriptors or
/// memory ran out.
static TICK: types::Timespec = types::Timespec::new().nsec(100_000_000);

/// What is under way.
#[derive(Debug, Default)]
pub(crate) struct Handshakes {
    /// Accepted connections that have not greeted.
    pub(crate) strangers: usize,
    /// Sessions whose connections are not all there.
    pub(crate) joining: usize,
    is_timer_armed: bool,
    is_accept_paused: bool,
    is_accepting: bool,
}

impl TcpFabric {
    fn protocol(&self) -> Protocol {
        Protocol { transport: Transport::Tcp, versions: self.config.versions }
    }

    pub(crate) fn arm_accept(&mut self) {
        let Some(listener) = self.listener.as_ref().filter(|_| !self.handshakes.is_accepting) else { return };
        let listener = types::Fd(listener.as_raw_fd());
        let entry = opcode::Accept::new(listener, std::ptr::null_mut(), std::ptr::null_mut());
        self.handshakes.is_accepting = true;
        let entry = entry.flags(libc::SOCK_CLOEXEC).build();
        // SAFETY: no buffers; the listener is open until the fabric is dropped, which cancels what uses it.
        unsafe { self.ring.push(entry, Token::of(OperationKind::Accept, 0)) };
    }

    fn arm_timer(&mut self) {
        if !std::mem::replace(&mut self.handshakes.is_timer_armed, true) {
            let entry = opcode::Timeout::new(&raw const TICK).build();
            // SAFETY: the time is a static.
            unsafe { self.ring.push(entry, Token::of(OperationKind::Timer, 0)) };
        }
    }

    pub(crate) fn timer_fired(&mut self) {
        self.handshakes.is_timer_armed = false;
        if std::mem::take(&mut self.handshakes.is_accept_paused) {
            self.arm_accept();
        }
        let now = Instant::now();
        let is_late =
            |it: &Connection| it.phase == Phase::Greeting && it.session.is_none() && it.deadline <= now;
        let late = |number: &u32| self.connections.get(*number).is_some_and(is_late);
        for number in self.connections.indices().filter(late).collect::<Vec<u32>>() {
            self.counters.handshake_timeouts.add(1);
            self.refuse(number);
        }
        let is_late = |it: &Session| it.stage == Stage::Joining && it.deadline <= now;
        let late = |index: &u32| self.sessions.get(*index).is_some_and(is_late);
        for index in self.sessions.indices().filter(late).collect::<Vec<u32>>() {
            self.counters.handshake_timeouts.add(1);
            self.close_session(index, "the handshake took too long");
        }
        if self.handshakes.strangers > 0 || self.handshakes.joining > 0 {
            self.arm_timer();
        }
    }

    pub(crate) fn accepted(&mut self, result: i32) {
        self.handshakes.is_accepting = false;
        match -result {
            libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM => {
                self.counters.accept_pauses.add(1);
                self.handshakes.is_accept_paused = true;
                self.arm_timer();
                return;
            }
            _ => self.arm_accept(),
        }
        if result < 0 {
            return;
        }
        // SAFETY: the kernel just made this descriptor for us and nobody else owns it.
        let socket = unsafe { OwnedFd::from_raw_fd(result) };
        if self.listener.is_none() {
            // The node is going down: whoever comes now is not kept.
            return;
        }
        if self.handshakes.strangers >= self.config.handshakes_max {
            self.refuse_oldest();
        }
        socket::tune(&socket, &self.config, socket::is_local(&socket));
        let deadline = Instant::now() + self.config.handshake_timeout;
        let connection = Connection::new(socket, Phase::Greeting, deadline, self.protocol());
        let Some(number) = self.keep(connection) else {
            self.counters.refused_handshakes.add(1);
            return;
        };
        self.handshakes.strangers += 1;
        self.arm_timer();
        self.receive_opening(number);
    }

    fn refuse_oldest(&mut self) {
        let strangers = self.connections.indices().filter_map(|number| {
            let connection = self.connections.get(number)?;
            let is_stranger = connection.phase == Phase::Greeting && connection.session.is_none();
            is_stranger.then_some((connection.deadline, number))
        });
        if let Some((_, oldest)) = strangers.min() {
            self.refuse(oldest);
        }
    }

    /// Gives a connection its place in the table and in the ring.
    fn keep(&mut self, connection: Connection) -> Option<u32> {
        let descriptor = connection.socket.as_raw_fd();
        let number = self.connections.insert(Box::new(connection))?;
        if self.ring.register_file(number, descriptor)
            && let Some(connection) = self.connections.get_mut(number)
        {
            connection.registered = Some(number);
        }
        Some(number)
    }

    fn receive_opening(&mut self, number: u32) {
        let Some(connection) = self.connections.get_mut(number) else { return };
        let entry = connection.receive_opening();
        connection.operations_in_flight += 1;
        // SAFETY: the buffer is in the boxed connection, which lives until the operation is reaped.
        unsafe { self.ring.push(entry, Token::of(OperationKind::OpeningReceive, number)) };
    }

    fn send_opening(&mut self, number: u32, bytes: [u8; OPENING_BYTES]) {
        let Some(connection) = self.connections.get_mut(number) else { return };
        connection.opening_out = bytes;
        let entry = connection.send_opening();
        connection.operations_in_flight += 1;
        // SAFETY: as for the receive; nothing writes to the buffer meanwhile: an opening is sent once.
        unsafe { self.ring.push(entry, Token::of(OperationKind::OpeningSend, number)) };
    }

    pub(crate) fn opening_sent(&mut self, number: u32, result: i32) {
        if result != OPENING_BYTES as i32 {
            self.close(number, "the opening could not be sent");
        }
    }

    /// The other side's nonce is here: the side that accepts answers with its own, the side that connects says hello.
    pub(crate) fn opening_received(&mut self, number: u32, result: i32) {
        let Some(connection) = self.connections.get_mut(number) else { return };
        if result != OPENING_BYTES as i32 {
            self.close(number, "the peer closed the connection instead of greeting");
            return;
        }
        let session = connection.session;
        // The other end of a connection that we made, our own end of one that was accepted.
        let dialled = match session {
            Some(_) => rustix::net::getpeername(&connection.socket).ok().flatten(),
            None => rustix::net::getsockname(&connection.socket).ok(),
        };
        let Some(dialled) = dialled.and_then(|name| SocketAddr::try_from(name).ok()) else {
            self.close(number, "the connection has no address any more");
            return;
        };
        match connection.authentication.opened(&connection.opening_in, Dialled::of(dialled)) {
            Ok(answer) => {
                if let Some(answer) = answer {
                    self.send_opening(number, answer);
                }
                if let Some(session) = session {
                    self.send_hello(number, session);
                }
                self.receive_hello(number);
            }
            Err(error) => self.close(number, &format!("protocol error: {error}")),
        }
    }

    fn receive_hello(&mut self, number: u32) {
        let Some(connection) = self.connections.get_mut(number) else { return };
        let entry = connection.receive_hello();
        connection.operations_in_flight += 1;
        // SAFETY: the buffer is in the boxed connection, which lives until the operation is reaped.
        unsafe { self.ring.push(entry, Token::of(OperationKind::HelloReceive, number)) };
    }

    pub(crate) fn send_hello(&mut self, number: u32, session: u32) {
        let Some(connection) = self.connections.get_mut(number) else { return };
        let Some(session) = self.sessions.get(session) else { return };
        let hello = Hello {
            session: session.id,
            lane: connection.lane as u8,
            index: connection.index as u8,
            connections: session.connections_per_lane as u8,
            reads_max: self.config.reads_max as u32,
        };
        let hello = hello.encode();
        let Ok(proved) = connection.authentication.prove(&self.config.key, &hello) else { return };
        let (frame, proof) = connection.hello_out.split_at_mut(hello.len());
        frame.copy_from_slice(&hello);
        proof.copy_from_slice(&proved);
        let entry = connection.send_hello();
        connection.operations_in_flight += 1;
        // SAFETY: as for the receive.
        unsafe { self.ring.push(entry, Token::of(OperationKind::HelloSend, number)) };
    }

    pub(crate) fn start_session(&mut self, address: &str) -> Result<PeerId, ConnectError> {
        let target: SocketAddr = address.parse().map_err(|_| ConnectError::Address {
            fabric: "tcp",
            address: address.to_owned(),
            reason: "not an ip:port".to_owned(),
        })?;
        let system = |error: std::io::Error| ConnectError::System {
            fabric: "tcp",
            address: address.to_owned(),
            error,
        };
        let too_many = ConnectError::TooMany { fabric: "tcp", limit: self.config.peers_max };
        let per_lane = self.config.connections_per_peer;
        // All sockets first: when one cannot be had, nothing has begun.
        let sockets = (0..2 * per_lane).map(|_| socket::new_socket(&target).map_err(std::io::Error::from));
        let sockets: Vec<OwnedFd> = sockets.collect::<Result<_, _>>().map_err(system)?;
        let random = |_| system(std::io::Error::other("no random bytes"));
        let id = u64::from_ne_bytes(random_bytes().map_err(random)?);
        let deadline = Instant::now() + self.config.handshake_timeout;
        let session = Session::new(id, per_lane, true, deadline);
        let Some(index) = self.sessions.insert(Box::new(session)) else { return Err(too_many) };
        let peer = PeerId(self.sessions.number(index));
        self.handshakes.joining += 1;
        for (place, socket) in sockets.into_iter().enumerate() {
            socket::tune(&socket, &self.config, target.ip().is_loopback());
            let mut connection = Connection::new(socket, Phase::Connecting, deadline, self.protocol());
            (connection.lane, connection.index) = (place / per_lane, place % per_lane);
            connection.session = Some(index);
            let Some(number) = self.keep(connection) else { continue };
            if let Some(session) = self.sessions.get_mut(index) {
                session.peer = peer;
                session.lanes[place / per_lane].connections[place % per_lane] = Some(number);
                session.alive += 1;
            }
            let Some(connection) = self.connections.get_mut(number) else { continue };
            let entry = connection.connect(socket::raw_address(&target));
            connection.operations_in_flight += 1;
            // SAFETY: the address is boxed in the connection, which lives until the operation is reaped.
            unsafe { self.ring.push(entry, Token::of(OperationKind::Connect, number)) };
        }
        self.arm_timer();
        Ok(peer)
    }

    pub(crate) fn connected(&mut self, number: u32, result: i32) {
        let protocol = self.protocol();
        if result < 0 {
            let error = std::io::Error::from_raw_os_error(-result);
            self.close(number, &format!("cannot connect: {error}"));
            return;
        }
        let Some(connection) = self.connections.get_mut(number) else { return };
        connection.phase = Phase::Greeting;
        match Authentication::connecting(protocol) {
            Ok((authentication, bytes)) => {
                connection.authentication = authentication;
                self.send_opening(number, bytes);
                self.receive_opening(number);
            }
            Err(error) => self.close(number, &error.to_string()),
        }
    }
}
