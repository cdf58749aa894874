//! End of connections and sessions. A session ends as a whole: all sockets are aborted, and once the kernel
//! has no operation on any of them, its requests complete and the disconnect is reported.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_fabric::Event;
use io_uring::opcode;
use io_uring::types::{self, CancelBuilder};

use crate::connection::Phase;
use crate::fabric::TcpFabric;
use crate::session::Stage;
use crate::socket;
use crate::table::Table;
use crate::token::{OperationKind, Token};

/// Time limit for the kernel's operations when a node is dropped.
const DROP_PATIENCE: Duration = Duration::from_secs(5);

impl TcpFabric {
    /// Closes a connection and with it its session.
    pub(crate) fn close(&mut self, connection: u32, reason: &str) {
        if let Some(session) = self.connections.get(connection).map(|connection| connection.session) {
            self.close_session(session, reason);
        }
    }

    /// Starts to close a session. `PeerDown` follows when its last operation has been reaped.
    pub(crate) fn close_session(&mut self, index: u32, reason: &str) {
        let Some(session) = self.sessions.get_mut(index) else { return };
        if session.stage == Stage::Closing {
            return;
        }
        if session.stage == Stage::Joining {
            self.joining -= 1;
        }
        session.stage = Stage::Closing;
        reason.clone_into(&mut session.reason);
        session.greetings.drain(..).for_each(|greeting| self.handshakes.close(greeting.socket_id));
        if session.alive == 0 {
            return self.finish_session(index);
        }
        let connections: Vec<u32> = session.connections().collect();
        connections.iter().for_each(|connection| self.abort(*connection));
        connections.into_iter().for_each(|connection| self.finish_close(connection));
    }

    fn abort(&mut self, number: u32) {
        let Some(connection) = self.connections.get_mut(number) else { return };
        connection.phase = Phase::Closing;
        socket::abort(&connection.socket);
        if connection.operations_in_flight == 0 {
            return;
        }
        // The abort ends the operations in the kernel; this cancels one that had not reached the kernel
        // before the abort.
        let all = match connection.registered {
            Some(position) => CancelBuilder::fd(types::Fixed(position)).all(),
            None => CancelBuilder::fd(connection.descriptor()).all(),
        };
        let entry = opcode::AsyncCancel2::new(all);
        connection.operations_in_flight += 1;
        // SAFETY: no buffers; the socket stays open while an operation is counted on its connection.
        unsafe { self.ring.push(entry.build(), Token::of(OperationKind::Cancel, number)) };
    }

    /// Continues to close a connection once its last operation has ended.
    pub(crate) fn finish_close(&mut self, number: u32) {
        let Some(connection) = self.connections.get(number) else { return };
        if connection.phase != Phase::Closing || connection.operations_in_flight > 0 {
            return;
        }
        let index = connection.session;
        let Some(session) = self.sessions.get_mut(index) else { return };
        session.alive -= 1;
        // Runs once per connection: a closed connection has no more operations.
        if session.alive > 0 {
            if let Some(connection) = self.connections.get_mut(number) {
                connection.phase = Phase::Closed;
            }
            return;
        }
        self.finish_session(index);
    }

    fn finish_session(&mut self, index: u32) {
        let Some(mut session) = self.sessions.remove(index) else { return };
        for number in session.connections() {
            if let Some(connection) = self.connections.get_mut(number) {
                connection.halves.sender.abandon(&mut self.events);
            }
            self.forget(number);
        }
        session.lanes.iter_mut().for_each(|lane| lane.abandon(&mut self.events));
        if session.is_announced {
            let reason = std::mem::take(&mut session.reason);
            self.events.push_back(Event::PeerDown { peer: session.peer, reason });
        }
    }

    /// Frees a connection on which the kernel has no more operations.
    fn forget(&mut self, number: u32) {
        let Some(mut connection) = self.connections.remove(number) else { return };
        connection.halves.receiver.end_writes(&self.slab);
        if let Some(position) = connection.registered {
            self.ring.unregister_file(position);
        }
        if connection.is_dirty {
            self.dirty[connection.lane].retain(|dirty| *dirty != number);
        }
    }
}

impl Drop for TcpFabric {
    /// The kernel may hold pointers into connections and slots: ends every operation before they are freed.
    fn drop(&mut self) {
        self.handshakes.stop_listening();
        let sessions: Vec<u32> = self.sessions.indices().collect();
        sessions.into_iter().for_each(|session| self.close_session(session, "the node is going down"));
        let deadline = Instant::now() + DROP_PATIENCE;
        while self.connections.len() > 0 && Instant::now() < deadline {
            if !self.ring.enter() {
                break;
            }
            self.events.clear();
            self.reap(usize::MAX);
            if self.connections.len() > 0 {
                std::thread::yield_now();
            }
        }
        if self.connections.len() > 0 {
            // Leaking memory is safe; freeing memory that the kernel may write to is not.
            std::mem::forget(std::mem::replace(&mut self.connections, Table::new(0)));
            std::mem::forget(std::mem::replace(&mut self.sessions, Table::new(0)));
            std::mem::forget(Arc::clone(&self.slab));
        }
    }
}
