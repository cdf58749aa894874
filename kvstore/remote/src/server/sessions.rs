//! Connected clients and the messages to them.

use std::collections::VecDeque;

use dataplane_fabric::{Fabric, Full, Operation, PeerId, Priority, WorkRequest};

use super::{PoolBlocks, PoolServer};
use crate::wire::Message;

#[derive(Debug, Default)]
pub(super) struct Session {
    /// Messages that wait for room in the fabric's queue.
    outbox: VecDeque<(Priority, Box<[u8]>)>,
    /// Number of leases and reservations.
    pub(super) leases: usize,
    /// Number of slots reserved and not committed.
    pub(super) reserved_slots: usize,
    /// Disconnected by this node; the end is not reported by the fabric yet.
    pub(super) ending: bool,
}

impl<F: Fabric, B: PoolBlocks> PoolServer<F, B> {
    pub(super) fn send(&mut self, peer: PeerId, message: &Message) {
        let Some(session) = self.sessions.get_mut(&peer).filter(|session| !session.ending) else { return };
        if session.outbox.len() >= self.config.outbox_max {
            tracing::warn!(?peer, "pool: a client does not read its replies; closing its connection");
            return self.end_session(peer);
        }
        session.outbox.push_back((message.priority(), message.encode()));
        if session.outbox.len() == 1 && !pump(&mut self.fabric, peer, &mut session.outbox) {
            self.backlog.push(peer);
        }
    }

    /// Posts queued messages as far as there is room.
    pub(super) fn pump_backlog(&mut self) {
        let (sessions, fabric) = (&mut self.sessions, &mut self.fabric);
        self.backlog.retain(|peer| {
            sessions.get_mut(peer).is_some_and(|session| !pump(fabric, *peer, &mut session.outbox))
        });
    }

    /// Disconnects a client. Its leases and slots stay as they are until the fabric reports the end of the
    /// connection.
    pub(super) fn end_session(&mut self, peer: PeerId) {
        if let Some(session) = self.sessions.get_mut(&peer) {
            session.ending = true;
            session.outbox.clear();
        }
        self.fabric.disconnect(peer);
    }
}

/// Posts queued messages as far as there is room; returns whether the queue is empty.
fn pump<F: Fabric>(fabric: &mut F, peer: PeerId, outbox: &mut VecDeque<(Priority, Box<[u8]>)>) -> bool {
    while let Some((priority, message)) = outbox.pop_front() {
        let request = WorkRequest { id: 0, peer, priority, operation: Operation::Send { message } };
        if let Err(Full(WorkRequest { operation: Operation::Send { message }, .. })) = fabric.post(request) {
            outbox.push_front((priority, message));
            return false;
        }
    }
    true
}
