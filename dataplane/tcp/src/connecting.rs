//! Start of sessions: their connections are dialled or accepted, complete the handshake ([`Handshakes`]), and
//! join.
//!
//! The connecting side draws the session's number and opens all connections of both lanes. On each it sends a
//! hello with the connection's lane and index; the other side groups them and answers each with the same
//! hello. A session is open on the accepting side when all answers are sent, and on the connecting side when
//! all have arrived; data is read only then. Not a hot path.

use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Instant;

use dataplane_fabric::auth::{Protocol, Transport, random_bytes};
use dataplane_fabric::handshake::{HandshakeConfig, HandshakeEvent, Handshakes, SocketId};
use dataplane_fabric::{ConnectError, Event, PeerId};
use io_uring::{opcode, types};
use rustix::io::Errno;

use crate::TcpConfig;
use crate::connection::Connection;
use crate::fabric::TcpFabric;
use crate::hello::Hello;
use crate::reads::Reads;
use crate::session::{Greeting, Session, Stage};
use crate::socket;
use crate::token::{OperationKind, Token};
use crate::wire::HEADER_BYTES;

/// Creates the handshakes of a node's connections.
pub(crate) fn handshakes(config: &TcpConfig, listener: Option<OwnedFd>) -> std::io::Result<Handshakes> {
    let handshakes = HandshakeConfig {
        protocol: Protocol { transport: Transport::Tcp, versions: config.versions },
        key: config.key.clone(),
        frame_bytes: HEADER_BYTES,
        descriptors: None,
        timeout: config.handshake_timeout,
        unauthenticated_max: config.handshakes_max,
    };
    Handshakes::new(handshakes, listener)
}

impl TcpFabric {
    /// Polls the handshakes' descriptor through the ring, so that `poll` needs no system call for them.
    pub(crate) fn watch_handshakes(&mut self) {
        let descriptor = types::Fd(self.handshakes.descriptor().as_raw_fd());
        let entry = opcode::PollAdd::new(descriptor, libc::POLLIN as u32).build();
        // SAFETY: no buffers; the kernel holds the descriptor's file until the operation is over.
        unsafe { self.ring.push(entry, Token::of(OperationKind::Handshakes, 0)) };
    }

    pub(crate) fn poll_handshakes(&mut self) {
        let mut handshake_events = std::mem::take(&mut self.handshake_events);
        let config = &self.config;
        let admit = |socket: &OwnedFd| {
            socket::tune(socket, config, socket::is_local(socket));
            true
        };
        self.handshakes.poll(admit, &mut handshake_events);
        let counts = self.handshakes.take_counts();
        self.counters.refused_handshakes.add(counts.refused);
        self.counters.handshake_timeouts.add(counts.late);
        self.counters.unproved_handshakes.add(counts.unproved);
        self.counters.accept_pauses.add(counts.accept_pauses);
        for event in handshake_events.drain(..) {
            match event {
                HandshakeEvent::Opened { socket_id } => self.say_hello(socket_id),
                HandshakeEvent::Frame { socket_id, frame, .. } => self.hello(socket_id, &frame),
                HandshakeEvent::Failed { socket_id, error } => {
                    self.handshake_failed(socket_id, &error.to_string());
                }
                HandshakeEvent::Closed { socket_id, reason } => self.handshake_failed(socket_id, &reason),
            }
        }
        self.handshake_events = handshake_events;
        self.expire_joining();
        self.watch_handshakes();
    }

    /// Closes accepted sessions whose other connections have not arrived in time.
    fn expire_joining(&mut self) {
        if self.joining == 0 {
            return;
        }
        let now = Instant::now();
        let is_late = |session: &Session| session.stage == Stage::Joining && session.deadline <= now;
        let late = |index: &u32| self.sessions.get(*index).is_some_and(is_late);
        for index in self.sessions.indices().filter(late).collect::<Vec<u32>>() {
            self.counters.handshake_timeouts.add(1);
            self.close_session(index, "the handshake timed out");
        }
        let joining = self.sessions.indices().filter_map(|index| self.sessions.get(index));
        let joining = joining.filter(|session| session.stage == Stage::Joining);
        if let Some(next) = joining.map(|session| session.deadline).min() {
            self.handshakes.wake_at(next);
        }
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
        let random = |_| system(std::io::Error::other("no random bytes"));
        let id = u64::from_ne_bytes(random_bytes().map_err(random)?);
        // The time limit of each handshake is shorter.
        let deadline = Instant::now() + 2 * self.config.handshake_timeout;
        let mut session = Session::new(id, per_lane, true, deadline);
        for place in 0..2 * per_lane {
            match self.dial(&target) {
                Ok(socket_id) => session.greetings.push(Greeting {
                    socket_id,
                    lane: place / per_lane,
                    index: place % per_lane,
                }),
                Err(error) => {
                    session.greetings.iter().for_each(|greeting| self.handshakes.close(greeting.socket_id));
                    return Err(system(error));
                }
            }
        }
        let socket_ids: Vec<SocketId> = session.greetings.iter().map(|greeting| greeting.socket_id).collect();
        let Some(index) = self.sessions.insert(Box::new(session)) else {
            socket_ids.into_iter().for_each(|socket_id| self.handshakes.close(socket_id));
            return Err(too_many);
        };
        let peer = PeerId(self.sessions.number(index));
        if let Some(session) = self.sessions.get_mut(index) {
            session.peer = peer;
        }
        self.joining += 1;
        Ok(peer)
    }

    fn dial(&mut self, target: &SocketAddr) -> std::io::Result<SocketId> {
        let socket = socket::new_socket(target)?;
        socket::tune(&socket, &self.config, target.ip().is_loopback());
        match rustix::net::connect(&socket, target) {
            Ok(()) | Err(Errno::INPROGRESS) => self.handshakes.connect(socket),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Returns the session that this node began with this socket, and the socket's position in it.
    fn greeting(&self, socket_id: SocketId) -> Option<(u32, Greeting)> {
        self.sessions.indices().find_map(|index| {
            let greetings = &self.sessions.get(index)?.greetings;
            greetings
                .iter()
                .find(|greeting| greeting.socket_id == socket_id)
                .map(|&greeting| (index, greeting))
        })
    }

    fn say_hello(&mut self, socket_id: SocketId) {
        let Some((index, greeting)) = self.greeting(socket_id) else { return };
        let Some(session) = self.sessions.get(index) else { return };
        let hello = self.own_hello(session, greeting.lane, greeting.index);
        if let Err(reason) = self.handshakes.send(socket_id, &hello, &[]) {
            self.close_session(index, &reason);
        }
    }

    fn own_hello(&self, session: &Session, lane: usize, index: usize) -> [u8; HEADER_BYTES] {
        let hello = Hello {
            session: session.id,
            lane: lane as u8,
            index: index as u8,
            connections: session.connections_per_lane as u8,
            reads_max: self.config.reads_max as u32,
        };
        hello.encode()
    }

    fn handshake_failed(&mut self, socket_id: SocketId, reason: &str) {
        match self.greeting(socket_id) {
            Some((index, _)) => self.close_session(index, reason),
            None => self.handshakes.close(socket_id),
        }
    }

    /// Handles the hello of a peer that has proved that it holds the secret.
    fn hello(&mut self, socket_id: SocketId, frame: &[u8]) {
        let hello = frame.first_chunk().ok_or("a short hello").and_then(Hello::decode);
        let Some((index, greeting)) = self.greeting(socket_id) else {
            if hello.and_then(|hello| self.join(socket_id, hello)).is_err() {
                self.counters.refused_handshakes.add(1);
                self.handshakes.close(socket_id);
            }
            return;
        };
        if let Err(reason) = hello.and_then(|hello| self.answered(index, greeting, hello)) {
            self.close_session(index, &format!("protocol error: {reason}"));
        }
    }

    /// Connecting side: handles the answer by which the peer accepts this connection.
    fn answered(&mut self, index: u32, greeting: Greeting, hello: Hello) -> Result<(), &'static str> {
        let Some(session) = self.sessions.get_mut(index) else { return Ok(()) };
        let place = (usize::from(hello.lane), usize::from(hello.index), usize::from(hello.connections));
        let ours = (greeting.lane, greeting.index, session.connections_per_lane);
        if hello.session != session.id || place != ours {
            return Err("the hello of another connection");
        }
        session.peer_reads_max = session.peer_reads_max.min(hello.reads_max as usize);
        session.greetings.retain(|other| other.socket_id != greeting.socket_id);
        self.greeted(index, greeting)
    }

    /// Accepting side: puts a connection into its session, which the first connection creates.
    fn join(&mut self, socket_id: SocketId, hello: Hello) -> Result<(), &'static str> {
        let is_it = |index: &u32| {
            self.sessions.get(*index).is_some_and(|it| it.id == hello.session && !it.we_connected)
        };
        let known = self.sessions.indices().find(is_it);
        let index = match known {
            Some(index) => index,
            None => self.begin_accepted(hello)?,
        };
        let Some(session) = self.sessions.get_mut(index) else { return Ok(()) };
        if session.stage != Stage::Joining || session.connections_per_lane != usize::from(hello.connections) {
            return Err(
                "a connection for a session that is complete, or that has another number of connections",
            );
        }
        let greeting = Greeting { socket_id, lane: usize::from(hello.lane), index: usize::from(hello.index) };
        if session.lanes[greeting.lane].connections[greeting.index].is_some() {
            return Err("a second connection with the same number in its session");
        }
        session.peer_reads_max = session.peer_reads_max.min(hello.reads_max as usize);
        let Some(session) = self.sessions.get(index) else { return Ok(()) };
        let answer = self.own_hello(session, greeting.lane, greeting.index);
        let said = self.handshakes.send(socket_id, &answer, &[]).map_err(|_| "the peer went away");
        let joined = said.and_then(|()| self.greeted(index, greeting));
        if let Err(reason) = joined {
            self.close_session(index, reason);
        }
        joined
    }

    fn begin_accepted(&mut self, hello: Hello) -> Result<u32, &'static str> {
        let deadline = Instant::now() + self.config.handshake_timeout;
        let session = Session::new(hello.session, usize::from(hello.connections), false, deadline);
        let index = self.sessions.insert(Box::new(session)).ok_or("no room for another peer")?;
        let peer = PeerId(self.sessions.number(index));
        if let Some(session) = self.sessions.get_mut(index) {
            session.peer = peer;
        }
        self.joining += 1;
        self.handshakes.wake_at(deadline);
        Ok(index)
    }

    /// Puts a connection whose handshake is complete into its position; the last one opens the session.
    fn greeted(&mut self, index: u32, greeting: Greeting) -> Result<(), &'static str> {
        let Greeting { socket_id, lane, index: place } = greeting;
        let socket = self.handshakes.release(socket_id).ok_or("its socket is gone")?;
        let descriptor = socket.as_raw_fd();
        let connection = Connection::new(socket, index, (lane, place), &self.config);
        let number = self.connections.insert(Box::new(connection)).ok_or("no room for a connection")?;
        if self.ring.register_file(number, descriptor)
            && let Some(connection) = self.connections.get_mut(number)
        {
            connection.registered = Some(number);
        }
        let Some(session) = self.sessions.get_mut(index) else { return Ok(()) };
        session.lanes[lane].connections[place] = Some(number);
        session.alive += 1;
        if session.alive < session.connections_per_lane * session.lanes.len() {
            return Ok(());
        }
        session.stage = Stage::Open;
        session.is_announced = true;
        self.joining -= 1;
        let reads_max = session.peer_reads_max.min(self.config.reads_max);
        for lane in &mut session.lanes {
            lane.open(Reads::new(reads_max), self.config.reads_max);
        }
        let peer = session.peer;
        self.events.push_back(match session.we_connected {
            true => Event::Connected { peer },
            false => Event::Accepted { peer },
        });
        let connections: Vec<u32> = session.connections().collect();
        for lane in &mut self.dirty {
            lane.reserve(self.connections.len());
        }
        connections.into_iter().for_each(|connection| self.arm_receive(connection));
        Ok(())
    }
}
