//! Sockets: listening, accepting, exchanging openings and hellos, noticing ends and lateness. Not a hot path.
//!
//! An accepted socket that has not said hello is a *greeting*: it takes no place in the table and has no rings,
//! only a descriptor and a deadline, and there are at most [`GREETINGS_MAX`]; one more ends the oldest, so that
//! silent connections keep nobody out. A process of another user is turned away before that.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use dataplane_fabric::auth::{AuthError, Authentication, Dialled, Protocol, Transport};
use dataplane_fabric::{Event, PeerId};
use rustix::io::Errno;

use crate::connection::{Connection, Remote, State};
use crate::fabric::{ShmFabric, TOKEN_DOORBELL, TOKEN_LISTENER, TOKEN_TIMER};
use crate::handshake::{self, Credentials};
use crate::ring::Inbound;
use crate::table::Table;
use crate::{ShmCounters, ShmError, address, watch};

/// Connections that have not said hello.
pub(crate) const GREETINGS_MAX: usize = 64;
/// Marks the token of a greeting.
const GREETING: u64 = 1 << 63;
/// Connections accepted in one look.
const ACCEPTS_MAX: usize = 16;
/// How long nothing is accepted after the system has run out of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub(crate) struct Listener {
    pub(crate) socket: OwnedFd,
    address: String,
    /// Until then it is not in the epoll set.
    paused_until: Option<Instant>,
}

impl Listener {
    pub(crate) fn bind(address: &str) -> Result<Self, ShmError> {
        Ok(Self { socket: address::listen(address)?, address: address.to_owned(), paused_until: None })
    }

    pub(crate) fn remove(&self) {
        address::remove(&self.address);
    }
}

#[derive(Debug)]
pub(crate) struct Greeting {
    token: u64,
    socket: OwnedFd,
    from: Credentials,
    deadline: Instant,
    authentication: Authentication,
}

impl ShmFabric {
    /// Our half of a handshake, from `connect`.
    pub(crate) fn start_connection(&mut self, address: &str) -> Result<PeerId, ShmError> {
        let socket = address::connect(address)?;
        let from = self.admit(&socket)?;
        let deadline = Instant::now() + self.config.handshake_timeout;
        let (authentication, opening) =
            Authentication::connecting(self.protocol()).map_err(ShmError::Auth)?;
        handshake::send_opening(&socket, &opening)?;
        let peer = self.add_connection(socket, from, State::Greeting(deadline), None, authentication)?;
        self.watch.arm(deadline);
        Ok(peer)
    }

    fn protocol(&self) -> Protocol {
        Protocol { transport: Transport::Shm, versions: self.config.versions }
    }

    fn admit(&self, socket: &OwnedFd) -> Result<Credentials, ShmError> {
        handshake::admit(socket, self.config.same_user_only).inspect_err(|error| {
            if matches!(error, ShmError::OtherUser { .. }) {
                ShmCounters::count(&self.counters.other_users_refused);
            }
        })
    }

    /// Makes our rings, says hello once both openings are here, and takes a place in the table.
    fn add_connection(
        &mut self,
        socket: OwnedFd,
        from: Credentials,
        state: State,
        remote: Option<Remote>,
        authentication: Authentication,
    ) -> Result<PeerId, ShmError> {
        let inbound = Inbound::create(self.config.ring_bytes)?;
        if authentication.is_agreed() {
            let ours =
                [self.shown.memory(), inbound.memory(), self.doorbell.word_memory(), self.doorbell.eventfd()];
            handshake::send(&socket, ours, &authentication, &self.config.key)?;
        }
        let reason = String::new();
        let pid = from.pid;
        let added = self.table.insert(|peer| Connection {
            peer,
            socket,
            pid,
            state,
            authentication,
            inbound,
            remote,
            reason,
        });
        let peer = added.ok_or(ShmError::Handshake("the table of connections is full"))?;
        if let Some(connection) = self.table.get_mut(peer)
            && let Err(error) = watch::add(self.doorbell.epoll(), &connection.socket, peer.0)
        {
            self.table.remove(peer);
            return Err(error);
        }
        self.level_connections();
        Ok(peer)
    }

    /// Looks at the sockets: new peers, hellos, ends, and what takes too long.
    pub(crate) fn check_sockets(&mut self) {
        let found = self.watch.look(self.doorbell.epoll());
        for number in 0..found {
            match self.watch.token(number) {
                Some(TOKEN_DOORBELL) => self.doorbell.drain(),
                Some(TOKEN_LISTENER) => self.accept(),
                Some(TOKEN_TIMER) => self.expire(),
                Some(token) if token & GREETING != 0 => self.greeted(token),
                Some(peer) => self.peer_spoke(PeerId(peer)),
                None => {}
            }
        }
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTS_MAX {
            let Some(listener) = &mut self.listener else { return };
            match address::accept(&listener.socket) {
                Ok(socket) => self.greet(socket),
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                // Out of descriptors or memory. The socket stays readable: without a pause we would never sleep.
                Err(_) => {
                    let until = Instant::now() + ACCEPT_PAUSE;
                    listener.paused_until = Some(until);
                    watch::remove(self.doorbell.epoll(), &listener.socket);
                    self.watch.arm(until);
                    ShmCounters::count(&self.counters.accept_pauses);
                    return;
                }
            }
        }
    }

    fn greet(&mut self, socket: OwnedFd) {
        let Ok(from) = self.admit(&socket) else { return };
        if self.greetings.len() == GREETINGS_MAX {
            let oldest = self.greetings.remove(0);
            watch::remove(self.doorbell.epoll(), &oldest.socket);
            ShmCounters::count(&self.counters.handshake_timeouts);
        }
        let token = GREETING | self.next_greeting;
        self.next_greeting = (self.next_greeting + 1) & !GREETING;
        let deadline = Instant::now() + self.config.handshake_timeout;
        if watch::add(self.doorbell.epoll(), &socket, token).is_ok() {
            let authentication = Authentication::accepting(self.protocol());
            self.greetings.push(Greeting { token, socket, from, deadline, authentication });
            self.watch.arm(deadline);
            // Its opening is often here already: it speaks before we accept.
            self.greeted(token);
        }
    }

    /// An accepted socket may have sent its opening or its hello.
    fn greeted(&mut self, token: u64) {
        let Some(at) = self.greetings.iter().position(|greeting| greeting.token == token) else { return };
        let greeting = &mut self.greetings[at];
        let received = if greeting.authentication.is_agreed() {
            handshake::receive(&greeting.socket, &greeting.authentication, &self.config.key)
        } else {
            answer_opening(greeting).map(|()| None)
        };
        if matches!(received, Ok(None)) {
            return;
        }
        let Greeting { socket, from, authentication, .. } = self.greetings.remove(at);
        watch::remove(self.doorbell.epoll(), &socket);
        if matches!(received, Err(ShmError::Auth(AuthError::Secret))) {
            ShmCounters::count(&self.counters.unproved_handshakes);
        }
        // A peer that speaks nonsense, vanishes or finds no room learns it from its closed socket.
        let Ok(Some(hello)) = received else { return };
        if self.table.is_full() {
            return;
        }
        let Ok(remote) = Remote::attach(hello, &self.config) else { return };
        if let Ok(peer) = self.add_connection(socket, from, State::Open, Some(remote), authentication) {
            self.notices.push_back(Event::Accepted { peer });
        }
    }

    /// The socket of a connection has something: what we wait for in its handshake, or the end.
    fn peer_spoke(&mut self, peer: PeerId) {
        let Some(connection) = self.table.get_mut(peer) else { return };
        if let State::Greeting(_) = connection.state {
            if let Err(error) = self.answered(peer) {
                if matches!(error, ShmError::Auth(AuthError::Secret)) {
                    ShmCounters::count(&self.counters.unproved_handshakes);
                }
                self.drop_connection(peer, &error.to_string());
            }
            return;
        }
        match rustix::io::read(&connection.socket, &mut [0_u8; 16]) {
            Ok(0) => self.hang_up(peer, "it closed the connection or died"),
            Ok(_) => connection.start_closing("it spoke after its hello"),
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(_) => self.hang_up(peer, "its socket failed"),
        }
    }

    /// The side that we connected to has answered with its opening or its hello.
    fn answered(&mut self, peer: PeerId) -> Result<(), ShmError> {
        let Some(connection) = self.table.get_mut(peer) else { return Ok(()) };
        let (socket, key) = (&connection.socket, &self.config.key);
        if connection.authentication.is_agreed() {
            let Some(hello) = handshake::receive(socket, &connection.authentication, key)? else {
                return Ok(());
            };
            connection.remote = Some(Remote::attach(hello, &self.config)?);
            connection.state = State::Open;
            self.notices.push_back(Event::Connected { peer });
        } else if let Some(opening) = handshake::receive_opening(socket)? {
            connection.authentication.opened(&opening, Dialled::LOCAL).map_err(ShmError::Auth)?;
            let inbound = connection.inbound.memory();
            let ours = [self.shown.memory(), inbound, self.doorbell.word_memory(), self.doorbell.eventfd()];
            handshake::send(socket, ours, &connection.authentication, key)?;
        }
        Ok(())
    }

    /// The peer is gone. What it had published is delivered before the end is reported.
    fn hang_up(&mut self, peer: PeerId, reason: &str) {
        let Some(connection) = self.table.get_mut(peer) else { return };
        watch::remove(self.doorbell.epoll(), connection.socket.as_fd());
        match connection.state {
            State::Open => {
                connection.reason = connection.named(reason);
                connection.inbound.close();
                connection.remote = None;
                connection.state = State::Ended;
                self.ended += 1;
                if connection.inbound.is_empty() {
                    self.drop_connection(peer, "");
                }
            }
            State::Closing => self.drop_connection(peer, ""),
            State::Greeting(_) | State::Ended => {}
        }
    }

    /// Forgets a connection and reports it, with its own reason if it has one.
    pub(crate) fn drop_connection(&mut self, peer: PeerId, reason: &str) {
        let Some(connection) = self.table.remove(peer) else { return };
        watch::remove(self.doorbell.epoll(), connection.socket.as_fd());
        self.ended -= usize::from(connection.state == State::Ended);
        let reason = match connection.reason.is_empty() {
            true => connection.named(reason),
            false => connection.reason,
        };
        self.notices.push_back(Event::PeerDown { peer, reason });
        self.level_connections();
    }

    /// The timer has rung: ends what took too long, accepts again.
    fn expire(&mut self) {
        self.watch.rung();
        let now = Instant::now();
        let late = self.greetings.iter().take_while(|greeting| greeting.deadline <= now).count();
        for greeting in self.greetings.drain(..late) {
            watch::remove(self.doorbell.epoll(), &greeting.socket);
            ShmCounters::count(&self.counters.handshake_timeouts);
        }
        let late = |connection: &Connection| matches!(connection.state, State::Greeting(at) if at <= now);
        let next_late = |table: &Table| table.iter().find(|one| late(one)).map(|one| one.peer);
        while let Some(peer) = next_late(&self.table) {
            ShmCounters::count(&self.counters.handshake_timeouts);
            self.drop_connection(peer, "it did not say hello in time");
        }
        if let Some(listener) = &mut self.listener
            && listener.paused_until.is_some_and(|until| until <= now)
        {
            listener.paused_until = None;
            if watch::add(self.doorbell.epoll(), &listener.socket, TOKEN_LISTENER).is_err() {
                listener.paused_until = Some(now + ACCEPT_PAUSE);
            }
        }
        self.arm_next();
    }

    fn arm_next(&mut self) {
        let greeting = self.greetings.first().map(|greeting| greeting.deadline);
        let paused = self.listener.as_ref().and_then(|listener| listener.paused_until);
        let connecting = self.table.iter().filter_map(|connection| match connection.state {
            State::Greeting(deadline) => Some(deadline),
            _ => None,
        });
        if let Some(next) = connecting.chain(greeting).chain(paused).min() {
            self.watch.arm(next);
        }
    }
}

/// Answers the opening of an accepted socket, if it has come.
fn answer_opening(greeting: &mut Greeting) -> Result<(), ShmError> {
    let Some(opening) = handshake::receive_opening(&greeting.socket)? else { return Ok(()) };
    let answer = greeting.authentication.opened(&opening, Dialled::LOCAL).map_err(ShmError::Auth)?;
    answer.map_or(Ok(()), |answer| handshake::send_opening(&greeting.socket, &answer))
}
