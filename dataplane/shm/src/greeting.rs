//! Creation and end of connections, as their sockets report them
//! ([`Handshakes`](dataplane_fabric::handshake::Handshakes)). Not a hot path.
//!
//! A socket that is not authenticated takes no place in the table and has no rings. A process of another
//! user is refused even earlier.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};

use dataplane_fabric::handshake::{HandshakeError, HandshakeEvent, SocketId};
use dataplane_fabric::{Event, PeerId};

use crate::connection::{Connection, Remote, State};
use crate::fabric::ShmFabric;
use crate::hello::{self, Hello};
use crate::peer::{self, PeerProcess};
use crate::ring::Inbound;
use crate::{ShmCounters, ShmError, address};

impl ShmFabric {
    /// Starts a handshake, from `connect`.
    pub(crate) fn start_connection(&mut self, address: &str) -> Result<PeerId, ShmError> {
        let socket = address::connect(address)?;
        let process = peer::admit(&socket, self.config.same_user_only)
            .inspect_err(|error| count_other_user(&self.counters, error))?;
        let socket_id = self.handshakes.connect(socket).map_err(ShmError::Socket)?;
        self.add_connection(socket_id, process, State::Greeting, None)
            .inspect_err(|_| self.handshakes.close(socket_id))
    }

    /// Makes this side's rings, and adds a connection to the table.
    fn add_connection(
        &mut self,
        socket_id: SocketId,
        process: PeerProcess,
        state: State,
        remote: Option<Remote>,
    ) -> Result<PeerId, ShmError> {
        let inbound = Inbound::create(self.config.ring_bytes)?;
        let (reason, pid) = (String::new(), process.pid);
        let added =
            self.table.insert(|peer| Connection { peer, socket_id, pid, state, inbound, remote, reason });
        let peer = added.ok_or(ShmError::Handshake("the table of connections is full"))?;
        self.level_connections();
        Ok(peer)
    }

    /// Checks the sockets: new peers, hellos, ends, and timeouts.
    pub(crate) fn check_sockets(&mut self) {
        let mut handshake_events = std::mem::take(&mut self.handshake_events);
        let (same_user_only, counters) = (self.config.same_user_only, &self.counters);
        let admit = |socket: &OwnedFd| {
            let process = peer::admit(socket, same_user_only);
            process.inspect_err(|error| count_other_user(counters, error)).is_ok()
        };
        self.handshakes.poll(admit, &mut handshake_events);
        let counts = self.handshakes.take_counts();
        let add = |counter: &AtomicU64, count: u64| counter.fetch_add(count, Ordering::Relaxed);
        add(&counters.handshake_timeouts, counts.late + counts.displaced);
        add(&counters.unproved_handshakes, counts.unproved);
        add(&counters.accept_pauses, counts.accept_pauses);
        for event in handshake_events.drain(..) {
            match event {
                HandshakeEvent::Opened { socket_id } => {
                    if let Some(peer) = self.peer_of(socket_id)
                        && let Err(error) = self.say_hello(peer)
                    {
                        self.drop_connection(peer, &error.to_string());
                    }
                }
                HandshakeEvent::Frame { socket_id, frame, descriptors } => {
                    self.greeted(socket_id, &frame, descriptors)
                }
                HandshakeEvent::Failed { socket_id, error } => self.failed(socket_id, &error),
                HandshakeEvent::Closed { socket_id, reason } => self.close_with_reason(socket_id, &reason),
            }
        }
        self.handshake_events = handshake_events;
    }

    fn peer_of(&self, socket_id: SocketId) -> Option<PeerId> {
        self.table
            .iter()
            .find(|connection| connection.socket_id == socket_id)
            .map(|connection| connection.peer)
    }

    fn say_hello(&mut self, peer: PeerId) -> Result<(), ShmError> {
        let Some(connection) = self.table.get_mut(peer) else { return Ok(()) };
        let inbound = connection.inbound.memory();
        let ours = [self.shown.memory(), inbound, self.doorbell.word_memory(), self.doorbell.eventfd()];
        let said = self.handshakes.send(connection.socket_id, &hello::MAGIC, &ours);
        said.map_err(ShmError::Hello)
    }

    /// Handles the hello of an authenticated peer.
    fn greeted(&mut self, socket_id: SocketId, frame: &[u8], descriptors: Vec<OwnedFd>) {
        let hello = Hello::take(frame, descriptors);
        let remote = |hello| Remote::attach(hello, &self.config);
        let Some(peer) = self.peer_of(socket_id) else {
            // An invalid hello, a peer that disconnects, or a full table closes the socket without an answer.
            if !self.table.is_full()
                && let Ok(remote) = hello.and_then(remote)
                && self.accept(socket_id, remote).is_ok()
            {
                return;
            }
            return self.handshakes.close(socket_id);
        };
        let Some(connection) = self.table.get_mut(peer) else { return };
        if connection.state != State::Greeting {
            connection.start_closing(&self.handshakes, "the peer sent bytes after its hello");
            return;
        }
        match hello.and_then(remote) {
            Ok(remote) => {
                connection.remote = Some(remote);
                connection.state = State::Open;
                self.handshakes.keep_open(socket_id);
                self.notices.push_back(Event::Connected { peer });
            }
            Err(error) => self.drop_connection(peer, &error.to_string()),
        }
    }

    fn accept(&mut self, socket_id: SocketId, remote: Remote) -> Result<(), ShmError> {
        let socket = self.handshakes.socket(socket_id).ok_or(ShmError::Handshake("the peer went away"))?;
        let process = peer::process(socket)?;
        let peer = self.add_connection(socket_id, process, State::Open, Some(remote))?;
        if let Err(error) = self.say_hello(peer) {
            self.table.remove(peer);
            self.level_connections();
            return Err(error);
        }
        self.handshakes.keep_open(socket_id);
        self.notices.push_back(Event::Accepted { peer });
        Ok(())
    }

    /// Handles a failed handshake, or a later protocol error: the peer may then be in the middle of a copy
    /// into the slab.
    fn failed(&mut self, socket_id: SocketId, error: &HandshakeError) {
        let Some(peer) = self.peer_of(socket_id) else { return self.handshakes.close(socket_id) };
        let Some(connection) = self.table.get_mut(peer) else { return };
        if connection.state != State::Greeting {
            connection.start_closing(&self.handshakes, "the peer sent bytes after its hello");
            return;
        }
        self.drop_connection(peer, &error.to_string());
    }

    /// Handles the end of a peer. Its published records are delivered before the end is reported.
    fn close_with_reason(&mut self, socket_id: SocketId, reason: &str) {
        let Some(peer) = self.peer_of(socket_id) else { return self.handshakes.close(socket_id) };
        let Some(connection) = self.table.get_mut(peer) else { return };
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
            State::Greeting => self.drop_connection(peer, reason),
            State::Closing => self.drop_connection(peer, ""),
            State::Ended => {}
        }
    }

    /// Removes a connection and reports its end, with its own reason if it has one.
    pub(crate) fn drop_connection(&mut self, peer: PeerId, reason: &str) {
        let Some(connection) = self.table.remove(peer) else { return };
        self.handshakes.close(connection.socket_id);
        self.ended -= usize::from(connection.state == State::Ended);
        let reason = match connection.reason.is_empty() {
            true => connection.named(reason),
            false => connection.reason,
        };
        self.notices.push_back(Event::PeerDown { peer, reason });
        self.level_connections();
    }
}

fn count_other_user(counters: &ShmCounters, error: &ShmError) {
    if matches!(error, ShmError::OtherUser { .. }) {
        ShmCounters::count(&counters.other_users_refused);
    }
}
