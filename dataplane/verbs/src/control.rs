//! The set-up of connections: sockets, handshakes, commands for queue pairs, and deadlines.
//!
//! An epoll descriptor covers the sockets ([`Handshakes`](dataplane_fabric::handshake::Handshakes)), the
//! completion channel, the asynchronous events and the outcomes of commands; a thread without work sleeps
//! on it. A peer that has proved its identity while all connections are in use is refused with that reason.

use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::time::Instant;

use dataplane_fabric::handshake::{HandshakeEvent, SocketId};
use dataplane_fabric::{ConnectError, Event, PeerId};
use rustix::event::epoll;
use rustix::time::Timespec;

use crate::VerbsError;
use crate::commands::{Command, Outcome, Pairs};
use crate::completion::POLL_BATCH;
use crate::connection::{Connection, Phase};
use crate::fabric::{Route, VerbsFabric};
use crate::lane::{Lane, Pair};
use crate::numbers::NumberMap;
use crate::queue_pair::{Initialised, ReadyToSend};
use crate::sockets;
use crate::teardown::forget_pair;
use crate::watch::{ASYNC, COMMANDS, HANDSHAKES};
use crate::wire::{Handshake, Hello, Refusal};

/// Largest packet sequence number: it has 24 bits.
const PSN_MAX: u32 = 0xFF_FFFF;

/// Most polls of the completion queue before a pair is destroyed.
const DRAIN_POLLS: usize = 64;

impl VerbsFabric {
    /// Handles descriptors that are ready and deadlines that have passed.
    pub(crate) fn check_connections(&mut self) {
        let mut room = [MaybeUninit::<epoll::Event>::uninit(); 4];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let ready = epoll::wait(&self.control.epoll, &mut room[..], Some(&at_once));
        // The channel's events are taken after a sleep, by `poll`.
        let ready: &[epoll::Event] = ready.map_or(&[], |(ready, _)| ready);
        let [commands, sockets, events] =
            [COMMANDS, HANDSHAKES, ASYNC].map(|token| ready.iter().any(|event| event.data.u64() == token));
        // Outcomes first: a new pair may have the address or the number of a destroyed one.
        if commands {
            self.take_outcomes();
        }
        if sockets {
            self.poll_handshakes();
        }
        if events {
            self.take_async_events();
        }
        if self.establishing > 0 {
            self.expire_connections();
        }
    }

    fn poll_handshakes(&mut self) {
        let mut handshake_events = std::mem::take(&mut self.handshake_events);
        let peer_dead_after = self.local.config.peer_dead_after;
        let admit = |socket: &OwnedFd| {
            sockets::tune(socket, peer_dead_after);
            true
        };
        self.handshakes.poll(admit, &mut handshake_events);
        let counts = self.handshakes.take_counts();
        self.metrics.handshakes_failed += counts.refused;
        self.metrics.unproved_handshakes += counts.unproved;
        self.metrics.accept_pauses += counts.accept_pauses;
        if counts.accept_pauses > 0 {
            tracing::warn!("accepting RDMA handshakes pauses: no descriptors or no memory");
        }
        for event in handshake_events.drain(..) {
            match event {
                HandshakeEvent::Opened { socket_id } => self.opened(socket_id.0),
                HandshakeEvent::Frame { socket_id, frame, .. } => self.take_frame(socket_id, &frame),
                // No answer: a proof under this node's key would help a stranger to guess the key.
                HandshakeEvent::Failed { socket_id, error } => {
                    self.start_teardown(socket_id.0, &error.to_string())
                }
                HandshakeEvent::Closed { socket_id, reason } => self.start_teardown(socket_id.0, &reason),
            }
        }
        self.handshake_events = handshake_events;
    }

    fn expire_connections(&mut self) {
        let now = Instant::now();
        let late =
            |connection: &Connection| connection.next_deadline().is_some_and(|deadline| deadline <= now);
        // Ending a connection allocates; it is rare.
        let late: Vec<(u64, Phase)> = self
            .connections
            .iter()
            .filter(|(_, connection)| late(connection))
            .map(|(&number, connection)| (number, connection.phase))
            .collect();
        for (number, phase) in late {
            match phase {
                Phase::Draining => {
                    // Takes the completions of the pair before it is destroyed, also those of receives that
                    // it returns.
                    for _ in 0..DRAIN_POLLS {
                        if self.reap(POLL_BATCH) == 0 {
                            break;
                        }
                    }
                    self.destroy_pairs(number);
                }
                _ => self.start_teardown(number, "the handshake timed out"),
            }
        }
    }

    /// Sets the timer to the next deadline, so that a sleeping thread wakes for it. Returns whether a
    /// deadline has passed.
    pub(crate) fn set_timer(&mut self) -> bool {
        if self.establishing == 0 {
            return false;
        }
        let next = self.connections.values().filter_map(|connection| connection.next_deadline()).min();
        if let Some(next) = next {
            self.handshakes.wake_at(next);
        }
        next.is_some_and(|next| next <= Instant::now())
    }

    fn psns(&mut self) -> [u32; 2] {
        [(); 2].map(|()| self.random.u32(..=PSN_MAX))
    }

    /// Submits a command for a connection's pairs to the command thread.
    pub(crate) fn submit(&mut self, number: u64, command: Command) {
        self.metrics.pair_commands += 1;
        self.commands.submit(number, command);
    }

    pub(crate) fn take_outcomes(&mut self) {
        self.commands.clear();
        while let Some((number, outcome)) = self.commands.next() {
            match outcome {
                Outcome::Made(Ok(pairs)) => self.made(number, pairs),
                Outcome::Connected(Ok(pairs)) => self.connected(number, pairs),
                Outcome::Made(Err(error)) => self.set_up_failed(number, &error, [Pair::Absent, Pair::Absent]),
                Outcome::Connected(Err(failure)) => {
                    let (error, pairs) = *failure;
                    self.set_up_failed(number, &error, pairs);
                }
                Outcome::Stopped(pairs, errors) => self.stopped(number, pairs, &errors),
                Outcome::Destroyed(is_destroyed) => self.destroyed(number, is_destroyed),
            }
        }
        if self.commands.take_thread_panic() {
            self.handle_command_thread_panic();
        }
    }

    /// Handles the creation of the pairs at the initiator: sends the hello that names them.
    fn made(&mut self, number: u64, pairs: Pairs<Initialised>) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        for (lane, pair) in connection.lanes.iter_mut().zip(pairs) {
            self.local.reserve_queues(lane, &pair);
            lane.pair = Pair::Initialised(pair);
        }
        add_routes(&mut self.routes, connection);
        if connection.phase.is_end() {
            return self.stop_pairs(number);
        }
        let hello = connection.hello(&self.local);
        self.say(number, &hello);
    }

    /// Handles pairs that can send to the peer, whose own pairs may not be ready yet.
    fn connected(&mut self, number: u64, pairs: Pairs<ReadyToSend>) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        for (lane, pair) in connection.lanes.iter_mut().zip(pairs) {
            if lane.number().is_none() {
                self.local.reserve_queues(lane, &pair);
            }
            lane.pair = Pair::Ready(pair);
        }
        add_routes(&mut self.routes, connection);
        if connection.phase.is_end() {
            return self.stop_pairs(number);
        }
        connection.phase = Phase::Readying;
        let peer_is_ready = connection.peer_is_ready;
        let hello = (!connection.is_initiator).then(|| connection.hello(&self.local));
        for frame in hello.iter().chain([&Handshake::Ready]) {
            self.say(number, frame);
        }
        if peer_is_ready {
            self.establish_if_readying(number);
        }
    }

    /// Handles a set-up that the device refused or that was abandoned. Pairs that remain are stopped and
    /// drained like all others.
    fn set_up_failed(&mut self, number: u64, error: &VerbsError, pairs: [Pair; 2]) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        for (lane, pair) in connection.lanes.iter_mut().zip(pairs) {
            lane.pair = pair;
            if matches!(lane.pair, Pair::Absent) {
                forget_pair(&mut self.routes, lane, number);
            }
        }
        if connection.phase.is_end() {
            return self.stop_pairs(number);
        }
        self.refuse(number, Refusal::Exhausted);
        self.start_teardown(number, &error.to_string());
    }

    fn insert(&mut self, connection: Connection) {
        self.connections.insert(connection.peer.0, Box::new(connection));
        self.establishing += 1;
    }

    /// Sends a frame with its proof.
    fn say(&mut self, number: u64, frame: &Handshake) {
        if let Err(reason) = self.handshakes.send(SocketId(number), &frame.encode(), &[]) {
            self.start_teardown(number, &reason);
        }
    }

    pub(crate) fn start_connection(&mut self, address: &str) -> Result<PeerId, ConnectError> {
        let limit = self.local.config.connections_max;
        if self.connections.len() >= limit {
            return Err(ConnectError::TooMany { fabric: "rdma", limit });
        }
        let system = |error| ConnectError::System { fabric: "rdma", address: address.to_owned(), error };
        if let Some(reason) = &self.fatal {
            return Err(system(std::io::Error::other(reason.clone())));
        }
        let target: SocketAddr = address.parse().map_err(|_| ConnectError::Address {
            fabric: "rdma",
            address: address.to_owned(),
            reason: "not an ip:port".to_owned(),
        })?;
        let socket = sockets::connect(target, self.local.config.peer_dead_after).map_err(system)?;
        let socket_id = self.handshakes.connect(socket).map_err(system)?;
        let (peer, psns) = (PeerId(socket_id.0), self.psns());
        self.insert(Connection::new(peer, target, psns, &self.local.config, true));
        Ok(peer)
    }

    /// Handles the end of the openings: has the pairs made that the hello will name. Pairs are not made
    /// earlier, so that an unreachable peer costs none.
    fn opened(&mut self, number: u64) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        match self.local.pair_parameters() {
            Ok(parameters) => {
                for lane in &mut connection.lanes {
                    lane.pair = Pair::InCommand;
                }
                let abandoned = connection.abandoned.clone();
                self.submit(number, Command::Make(parameters, abandoned));
            }
            Err(error) => self.start_teardown(number, &error.to_string()),
        }
    }

    /// Handles a frame of an authenticated peer; the first frame of a peer that connected to this node
    /// creates its connection.
    fn take_frame(&mut self, socket_id: SocketId, bytes: &[u8]) {
        let frame = match bytes.first_chunk().map(Handshake::decode) {
            Some(Ok(frame)) => Ok(frame),
            Some(Err(reason)) => Err(format!("protocol error: {reason}")),
            None => Err("protocol error: a short frame".to_owned()),
        };
        if !self.connections.contains_key(&socket_id.0)
            && let Err(reason) = self.accept(socket_id)
        {
            tracing::info!(reason, "an RDMA handshake failed");
            self.metrics.handshakes_failed += 1;
            return self.handshakes.close(socket_id);
        }
        match frame {
            Ok(frame) => self.frame(socket_id.0, &frame),
            Err(reason) => self.start_teardown(socket_id.0, &reason),
        }
    }

    fn accept(&mut self, socket_id: SocketId) -> Result<(), String> {
        if let Some(reason) = &self.fatal {
            return Err(reason.clone());
        }
        if self.connections.len() >= self.local.config.connections_max {
            // The peer may have disconnected already; then only the reason is lost.
            let _gone = self.handshakes.send(socket_id, &Handshake::Refused(Refusal::Busy).encode(), &[]);
            return Err("the connections are used up (rdma.connections_max)".to_owned());
        }
        let socket = self.handshakes.socket(socket_id).ok_or("its socket is gone")?;
        let name = rustix::net::getpeername(socket).ok().flatten();
        let address = name.and_then(|name| SocketAddr::try_from(name).ok()).ok_or("it has hung up")?;
        let psns = self.psns();
        self.insert(Connection::new(PeerId(socket_id.0), address, psns, &self.local.config, false));
        Ok(())
    }

    fn frame(&mut self, number: u64, frame: &Handshake) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        match (frame, connection.phase) {
            // A hello is an error at an initiator that has not sent its own hello.
            (Handshake::Hello(hello), Phase::Greeting)
                if !connection.is_initiator || connection.has_greeted() =>
            {
                self.greeted(number, hello);
            }
            (Handshake::Ready, Phase::Readying) => self.establish_if_readying(number),
            // The peer connected its pairs before this side did; it has this side's hello.
            (Handshake::Ready, Phase::Preparing) if connection.is_initiator => {
                connection.peer_is_ready = true
            }
            // A message of the peer by RDMA arrived before its `ready` and established the connection.
            (Handshake::Ready, Phase::Established) => {}
            (Handshake::Refused(reason), Phase::Greeting | Phase::Preparing | Phase::Readying) => {
                self.start_teardown(number, &format!("the peer refuses: {reason:?}"));
            }
            _ => self.start_teardown(number, "protocol error: an unexpected handshake frame"),
        }
    }

    fn greeted(&mut self, number: u64, hello: &Hello) {
        if hello.link_layer != self.local.port.link_layer {
            self.refuse(number, Refusal::Incompatible);
            return self.start_teardown(number, "the peer's link layer is another one");
        }
        let Some(connection) = self.connections.get_mut(&number) else { return };
        self.handshakes.keep_open(SocketId(number));
        connection.deadline = Some(Instant::now() + self.local.config.handshake_timeout);
        let destination = connection.agree(&self.local, hello);
        let command = match connection.lanes.each_mut().map(Lane::take_for_command) {
            [Pair::Initialised(first), Pair::Initialised(second)] => {
                Command::Connect([first, second], destination, connection.abandoned.clone())
            }
            _ => match self.local.pair_parameters() {
                Ok(parameters) => {
                    Command::MakeConnected(parameters, destination, connection.abandoned.clone())
                }
                Err(error) => return self.set_up_failed(number, &error, [Pair::Absent, Pair::Absent]),
            },
        };
        connection.phase = Phase::Preparing;
        self.submit(number, command);
    }

    fn refuse(&mut self, number: u64, reason: Refusal) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        // After this side's hello, closing the socket is the refusal.
        if connection.is_initiator || !matches!(connection.phase, Phase::Greeting | Phase::Preparing) {
            return;
        }
        let refused = Handshake::Refused(reason).encode();
        let _gone_already = self.handshakes.send(SocketId(number), &refused, &[]);
    }

    /// Establishes the connection: the peer's pairs are ready, as its `ready` or its first message shows.
    pub(crate) fn establish_if_readying(&mut self, number: u64) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        if connection.phase != Phase::Readying {
            return;
        }
        connection.phase = Phase::Established;
        connection.deadline = None;
        connection.is_announced = true;
        self.establishing -= 1;
        let peer = connection.peer;
        let is_initiator = connection.is_initiator;
        self.events.push_back(if is_initiator {
            Event::Connected { peer }
        } else {
            Event::Accepted { peer }
        });
    }
}

/// Adds the routes from the numbers of the connection's pairs to the connection.
fn add_routes(routes: &mut NumberMap<u32, Route>, connection: &Connection) {
    for (lane, state) in connection.lanes.iter().enumerate() {
        if let Some(pair) = state.number() {
            routes.insert(pair, Route { peer: connection.peer.0, lane });
        }
    }
}
