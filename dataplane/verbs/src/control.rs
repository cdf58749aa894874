//! The set-up of connections: sockets, handshakes, commands for queue pairs, and deadlines.
//!
//! One epoll descriptor covers the listener, all sockets, the completion channel, the asynchronous events and
//! a timer; it is what a sleeper waits on. Bounds: connections, and those among them that a peer asked for and
//! that have not finished the handshake. Of these the oldest that has not proved itself makes room for the next, so that
//! strangers keep nobody out. When there is no room even so, or descriptors run out, accepting pauses: connections wait
//! in the listener's backlog, and a full loop over a descriptor that stays readable is avoided. A silent peer loses its
//! place at the handshake's deadline at the latest.

use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use dataplane_fabric::auth::AuthError;
use dataplane_fabric::{ConnectError, Event, PeerId};
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::time::Timespec;

use crate::VerbsError;
use crate::commands::{Command, Outcome, Pairs};
use crate::completion::POLL_BATCH;
use crate::connection::{Connection, Phase};
use crate::ends::forget_pair;
use crate::fabric::{Route, VerbsFabric};
use crate::handshake::{Exchange, Incoming, tune};
use crate::lane::{Lane, Pair};
use crate::numbers::NumberMap;
use crate::queue_pair::{Initialised, ReadyToSend};
use crate::watch::{ASYNC, CHANNEL, COMMANDS, LISTENER, PEERS, TIMER};
use crate::wire::{Handshake, Hello, Refusal};

/// Connections accepted at one look.
const ACCEPTS_MAX: usize = 32;
/// How long accepting pauses when the system has no descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Peers' packet numbers have 24 bits.
const PSN_MASK: u64 = 0xFF_FFFF;

/// Looks at the completion queue before a pair is destroyed, at most.
const DRAIN_POLLS: usize = 64;

impl VerbsFabric {
    /// One look at the descriptors and at deadlines that have passed.
    pub(crate) fn look_after_connections(&mut self) {
        let mut room = [MaybeUninit::<epoll::Event>::uninit(); 64];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        let tokens: ([u64; 64], usize) = match epoll::wait(&self.control.epoll, &mut room[..], Some(&at_once))
        {
            Ok((ready, _)) => {
                let mut tokens = [0; 64];
                ready.iter().zip(&mut tokens).for_each(|(event, token)| *token = event.data.u64());
                (tokens, ready.len())
            }
            Err(_) => ([0; 64], 0),
        };
        let tokens = &tokens.0[..tokens.1];
        // First: a new pair may have the address or the number of one that is gone.
        if tokens.contains(&COMMANDS) {
            self.take_outcomes();
        }
        for &token in tokens {
            match token {
                LISTENER => self.accept(),
                ASYNC => self.take_async_events(),
                CHANNEL | COMMANDS => {}
                TIMER => {
                    let mut count = [0; 8];
                    let _spurious = rustix::io::read(&self.control.timer, &mut count);
                }
                token => self.progress(token.wrapping_sub(PEERS)),
            }
        }
        if self.unsettled > 0 || self.control.paused_until.is_some() {
            self.look_at_deadlines();
        }
    }

    fn look_at_deadlines(&mut self) {
        let now = Instant::now();
        if self.control.paused_until.is_some_and(|until| until <= now) {
            self.control.paused_until = None;
        }
        let late = |connection: &Connection| connection.next_look().is_some_and(|deadline| deadline <= now);
        // Ends allocate; they are rare.
        let late: Vec<(u64, Phase)> = self
            .connections
            .iter()
            .filter(|(_, connection)| late(connection))
            .map(|(&number, connection)| (number, connection.phase))
            .collect();
        for (number, phase) in late {
            match phase {
                Phase::Draining => {
                    // Completions of the pair are taken before it goes, receives that it returns among them.
                    for _ in 0..DRAIN_POLLS {
                        if self.reap(POLL_BATCH) == 0 {
                            break;
                        }
                    }
                    self.destroy_pairs(number);
                }
                Phase::Connecting => self.begin_end(number, "cannot connect: timed out"),
                _ => self.begin_end(number, "the handshake timed out"),
            }
        }
        self.resume_accepting();
    }

    fn resume_accepting(&mut self) {
        let is_paused = self.control.paused_until.is_some();
        let accept = !is_paused && self.has_place() && self.fatal.is_none();
        self.control.set_accepting(accept);
    }

    fn has_place(&self) -> bool {
        self.connections.len() < self.local.config.connections_max
            && (self.callers < self.local.config.handshakes_max || self.oldest_stranger().is_some())
    }

    /// The caller that has waited longest without a proof; it has no queue pairs.
    fn oldest_stranger(&self) -> Option<u64> {
        let is_stranger =
            |connection: &Connection| connection.is_caller && connection.phase == Phase::Greeting;
        let strangers = self.connections.iter().filter(|(_, connection)| is_stranger(connection));
        strangers.map(|(&number, _)| number).min()
    }

    fn make_room_for_caller(&mut self) {
        if self.callers < self.local.config.handshakes_max {
            return;
        }
        if let Some(oldest) = self.oldest_stranger() {
            self.begin_end(oldest, "it makes room for another caller");
            self.finish_end(oldest);
        }
    }

    /// Sets the timer to the next deadline: a sleeper shall notice it. Returns whether one has passed.
    pub(crate) fn set_timer(&mut self) -> bool {
        let next = if self.unsettled > 0 {
            self.connections.values().filter_map(|connection| connection.next_look()).min()
        } else {
            None
        };
        let next = next.into_iter().chain(self.control.paused_until).min();
        let after = next.map(|next| next.saturating_duration_since(Instant::now()));
        self.control.set_timer(after);
        after.is_some_and(|after| after.is_zero())
    }

    fn psns(&mut self) -> [u32; 2] {
        [(); 2].map(|()| {
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            (self.random >> 20 & PSN_MASK) as u32
        })
    }

    /// Hands a command for a connection's pairs to the thread that carries them out.
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
        if self.commands.take_death() {
            self.commands_lost();
        }
    }

    /// The pairs of a connection that this side makes are there: the peer is told of them.
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
        connection.greet(&self.local);
        self.write(number);
    }

    /// The pairs can send to the peer, which may not be so far yet.
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
        if !connection.is_initiator {
            connection.greet(&self.local);
        }
        if let Some(exchange) = &mut connection.exchange {
            exchange.queue(&Handshake::Ready);
        }
        let peer_is_ready = connection.peer_is_ready;
        self.write(number);
        if peer_is_ready {
            self.establish_if_readying(number);
        }
    }

    /// The device refused, or the connection had ended. Pairs that are left are stopped and drained as others are.
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
        self.begin_end(number, &error.to_string());
    }

    fn insert(&mut self, connection: Connection) -> Result<(), VerbsError> {
        let number = connection.peer.0;
        if let Some(exchange) = &connection.exchange {
            self.control.watch(&exchange.socket, number, connection.is_initiator, true).map_err(|errno| {
                VerbsError::System { operation: "epoll_ctl of a handshake".to_owned(), error: errno.into() }
            })?;
        }
        self.callers += usize::from(connection.is_caller);
        self.connections.insert(number, Box::new(connection));
        self.unsettled += 1;
        Ok(())
    }

    fn new_peer(&mut self) -> PeerId {
        let peer = PeerId(self.next_peer);
        self.next_peer += 1;
        peer
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
        let exchange = {
            let config = &self.local.config;
            Exchange::connect(target, config.peer_dead_after, config.key.clone(), config.versions)
        };
        let exchange = exchange.map_err(system)?;
        let (peer, psns) = (self.new_peer(), self.psns());
        let connection = Connection::new(peer, target, exchange, psns, &self.local.config, true);
        self.insert(connection).map_err(|error| system(std::io::Error::other(error.to_string())))?;
        Ok(peer)
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPTS_MAX {
            if !self.has_place() {
                break;
            }
            let Some(listener) = &self.control.listener else { return };
            match listener.accept() {
                Ok((socket, address)) => {
                    self.make_room_for_caller();
                    tune(&socket, self.local.config.peer_dead_after);
                    let (peer, psns) = (self.new_peer(), self.psns());
                    let exchange =
                        Exchange::accepted(socket, self.local.config.key.clone(), self.local.config.versions);
                    let connection =
                        Connection::new(peer, address, exchange, psns, &self.local.config, false);
                    if let Err(error) = self.insert(connection) {
                        tracing::warn!(%address, %error, "an RDMA handshake is dropped");
                    }
                }
                Err(error) if is_exhaustion(&error) => {
                    tracing::warn!(%error, "accepting RDMA handshakes pauses");
                    self.metrics.accept_pauses += 1;
                    self.control.paused_until = Some(Instant::now() + ACCEPT_PAUSE);
                    break;
                }
                // Nobody more, or one that is gone already.
                Err(_) => break,
            }
        }
        self.resume_accepting();
    }

    /// Moves the handshake of one peer on, or notices its end.
    fn progress(&mut self, number: u64) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        let Some(exchange) = &mut connection.exchange else { return };
        if connection.phase == Phase::Connecting {
            match exchange.connected() {
                Ok(()) => connection.phase = Phase::Greeting,
                Err(error) => return self.begin_end(number, &format!("cannot connect: {error}")),
            }
        }
        match exchange.read() {
            Incoming::Nothing => {}
            Incoming::End(reason) => return self.begin_end(number, &reason),
            Incoming::Opened => {
                if connection.is_initiator {
                    // Not before: a peer that cannot be reached costs no pairs.
                    match self.local.pair_parameters() {
                        Ok(parameters) => {
                            for lane in &mut connection.lanes {
                                lane.pair = Pair::InCommand;
                            }
                            let abandoned = connection.abandoned.clone();
                            self.submit(number, Command::Make(parameters, abandoned));
                        }
                        Err(error) => return self.begin_end(number, &error.to_string()),
                    }
                }
            }
            Incoming::Frame(frame) => self.frame(number, &frame),
            Incoming::Refused(error) => {
                // No answer: a proof under our key would help a stranger to guess it.
                self.metrics.unproved_handshakes += u64::from(error == AuthError::Secret);
                return self.begin_end(number, &format!("the peer is refused: {error}"));
            }
        }
        self.write(number);
    }

    /// Writes what the socket takes of what is queued, and has it watched for the rest.
    fn write(&mut self, number: u64) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        let Some(exchange) = &mut connection.exchange else { return };
        if let Err(error) = exchange.write() {
            return self.begin_end(number, &error);
        }
        let wants_to_write = exchange.wants_to_write();
        if self.control.watch(&exchange.socket, number, wants_to_write, false).is_err() {
            self.begin_end(number, "its socket cannot be watched");
        }
    }

    fn frame(&mut self, number: u64, frame: &Handshake) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        match (frame, connection.phase) {
            // A hello is an error at an initiator that has not sent its own.
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
            // Its first bytes by RDMA were faster.
            (Handshake::Ready, Phase::Established) => {}
            (Handshake::Refused(reason), Phase::Greeting | Phase::Preparing | Phase::Readying) => {
                self.begin_end(number, &format!("the peer refuses: {reason:?}"));
            }
            _ => self.begin_end(number, "protocol error: an unexpected handshake frame"),
        }
    }

    fn greeted(&mut self, number: u64, hello: &Hello) {
        if hello.link_layer != self.local.port.link_layer {
            self.refuse(number, Refusal::Incompatible);
            return self.begin_end(number, "the peer's link layer is another one");
        }
        let Some(connection) = self.connections.get_mut(&number) else { return };
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
        // Before our hello was queued: else there is no room, and the end of the socket says it all.
        if connection.is_initiator || !matches!(connection.phase, Phase::Greeting | Phase::Preparing) {
            return;
        }
        if let Some(exchange) = &mut connection.exchange {
            exchange.queue(&Handshake::Refused(reason));
            let _gone_already = exchange.write();
        }
    }

    /// The peer's pairs are ready, as it said or as its first bytes show.
    pub(crate) fn establish_if_readying(&mut self, number: u64) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        if connection.phase != Phase::Readying {
            return;
        }
        self.callers -= usize::from(connection.leave_callers());
        connection.phase = Phase::Established;
        connection.deadline = None;
        connection.is_announced = true;
        self.unsettled -= 1;
        let peer = connection.peer;
        let is_initiator = connection.is_initiator;
        self.events.push_back(if is_initiator {
            Event::Connected { peer }
        } else {
            Event::Accepted { peer }
        });
    }
}

/// Completions of the connection's pairs shall find it.
fn add_routes(routes: &mut NumberMap<u32, Route>, connection: &Connection) {
    for (lane, state) in connection.lanes.iter().enumerate() {
        if let Some(pair) = state.number() {
            routes.insert(pair, Route { peer: connection.peer.0, lane });
        }
    }
}

/// Whether accepting failed because the system has no more descriptors or memory.
fn is_exhaustion(error: &std::io::Error) -> bool {
    let exhausted = [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];
    exhausted.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}
