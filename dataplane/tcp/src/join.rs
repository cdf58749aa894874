//! The second half of a handshake: hellos arrive, connections join their session, the session opens.

use std::time::Instant;

use dataplane_fabric::auth::{AuthError, PROOF_BYTES, SharedKey};
use dataplane_fabric::{Event, PeerId, Priority};

use crate::connection::{Connection, Halves, Phase};
use crate::fabric::TcpFabric;
use crate::hello::{HELLO_BYTES, Hello};
use crate::reads::Reads;
use crate::receive::Receiver;
use crate::send::Sender;
use crate::session::{Session, Stage};
use crate::wire::HEADER_BYTES;

/// Most bytes of one send and of one receive, by lane. The kernel copies so many before this thread does anything
/// else, so the background's turn is short.
pub(crate) const TURN_BYTES_MAX: [usize; Priority::ALL.len()] = [4 << 20, 256 << 10];

impl TcpFabric {
    pub(crate) fn hello_received(&mut self, number: u32, result: i32) {
        let Some(connection) = self.connections.get(number) else { return };
        if result != HELLO_BYTES as i32 {
            let reason =
                "the peer closed the connection instead of greeting; a peer with another secret does so";
            self.close(number, reason);
            return;
        }
        if let Err(error) = check_proof(connection, &self.config.key) {
            self.counters.unproved_handshakes.add(u64::from(error == AuthError::Secret));
            self.close(number, &format!("the peer is refused: {error}"));
            return;
        }
        let Some(frame) = connection.hello_in.first_chunk::<HEADER_BYTES>() else { return };
        let (hello, session) = (Hello::decode(frame), connection.session);
        let joined = hello.and_then(|hello| match session {
            Some(session) => self.answered(number, session, hello),
            None => self.join(number, hello),
        });
        if let Err(reason) = joined {
            self.close(number, &format!("protocol error: {reason}"));
        }
    }

    /// On the side that connected: the other has accepted this connection.
    fn answered(&mut self, number: u32, index: u32, hello: Hello) -> Result<(), &'static str> {
        let Some(connection) = self.connections.get_mut(number) else { return Ok(()) };
        let Some(session) = self.sessions.get_mut(index) else { return Ok(()) };
        let place = (usize::from(hello.lane), usize::from(hello.index), usize::from(hello.connections));
        let ours = (connection.lane, connection.index, session.connections_per_lane);
        if hello.session != session.id || place != ours {
            return Err("the hello of another connection");
        }
        session.peer_reads_max = session.peer_reads_max.min(hello.reads_max as usize);
        self.greeted(number, index);
        Ok(())
    }

    /// On the side that accepted: puts a connection into its session, the first one's own making.
    fn join(&mut self, number: u32, hello: Hello) -> Result<(), &'static str> {
        let is_it = |index: &u32| {
            self.sessions.get(*index).is_some_and(|it| it.id == hello.session && !it.we_connected)
        };
        let known = self.sessions.indices().find(is_it);
        let index = match known {
            Some(index) => index,
            None => self.begin_accepted(hello)?,
        };
        let Some(connection) = self.connections.get_mut(number) else { return Ok(()) };
        let Some(session) = self.sessions.get_mut(index) else { return Ok(()) };
        if session.stage != Stage::Joining || session.connections_per_lane != usize::from(hello.connections) {
            return Err("a connection for a session that is complete, or other than it");
        }
        let place = &mut session.lanes[usize::from(hello.lane)].connections[usize::from(hello.index)];
        if place.is_some() {
            return Err("a second connection for one place");
        }
        *place = Some(number);
        session.alive += 1;
        session.peer_reads_max = session.peer_reads_max.min(hello.reads_max as usize);
        (connection.lane, connection.index) = (usize::from(hello.lane), usize::from(hello.index));
        connection.session = Some(index);
        self.handshakes.strangers -= 1;
        self.send_hello(number, index);
        Ok(())
    }

    fn begin_accepted(&mut self, hello: Hello) -> Result<u32, &'static str> {
        let deadline = Instant::now() + self.config.handshake_timeout;
        let session = Session::new(hello.session, usize::from(hello.connections), false, deadline);
        let index = self.sessions.insert(Box::new(session)).ok_or("no room for another peer")?;
        let peer = PeerId(self.sessions.number(index));
        if let Some(session) = self.sessions.get_mut(index) {
            session.peer = peer;
        }
        self.handshakes.joining += 1;
        Ok(index)
    }

    pub(crate) fn hello_sent(&mut self, number: u32, result: i32) {
        let Some(connection) = self.connections.get(number) else { return };
        let Some(index) = connection.session else { return };
        if result != HELLO_BYTES as i32 {
            self.close(number, "the hello could not be sent");
        } else if self.sessions.get(index).is_some_and(|session| !session.we_connected) {
            self.greeted(number, index);
        }
    }

    /// A connection is greeted both ways; the last one opens the session.
    fn greeted(&mut self, number: u32, index: u32) {
        let Some(connection) = self.connections.get_mut(number) else { return };
        let turn = TURN_BYTES_MAX[connection.lane];
        let sender = Sender::new(self.config.queue_depth, self.config.zero_copy_from, turn);
        connection.halves = Some(Box::new(Halves { sender, receiver: Receiver::new(turn) }));
        connection.phase = Phase::Greeted;
        let Some(session) = self.sessions.get_mut(index) else { return };
        session.greeted += 1;
        if !session.is_complete() || session.stage != Stage::Joining {
            return;
        }
        session.stage = Stage::Open;
        session.is_announced = true;
        self.handshakes.joining -= 1;
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
    }
}

/// Whether the sender of the hello holds this node's secret.
fn check_proof(connection: &Connection, key: &SharedKey) -> Result<(), AuthError> {
    let hello = connection.hello_in.first_chunk::<HEADER_BYTES>();
    let proof = connection.hello_in.last_chunk::<PROOF_BYTES>();
    match (hello, proof) {
        (Some(hello), Some(proof)) => connection.authentication.check(key, hello, proof),
        _ => Err(AuthError::Secret),
    }
}
