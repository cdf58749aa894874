//! Completions: dispatch of each one, and the operations that follow from it. The hot loop of a node.

use std::mem;

use dataplane_fabric::Priority;

use crate::connection::{Halves, Phase};
use crate::fabric::TcpFabric;
use crate::inbound::Inbound;
use crate::ring::Reaped;
use crate::session::Stage;
use crate::token::{OperationKind, Token};

/// Largest number of events that wait for `poll`; beyond it no completion is reaped.
const PENDING_EVENTS_MAX: usize = 4096;
/// `IORING_NOTIF_USAGE_ZC_COPIED` of io_uring.h.
const ZERO_COPY_COPIED: u32 = 1 << 31;

/// Cause for which a receiver has bytes to process.
#[derive(Clone, Copy)]
enum Arrival {
    Bytes(usize),
    Released,
}

impl TcpFabric {
    pub(crate) fn reap(&mut self, budget: usize) {
        for _ in 0..budget {
            // One receive can hold hundreds of small frames: the next one is taken only after their events
            // were handed out.
            if self.events.len() >= PENDING_EVENTS_MAX {
                return;
            }
            let Some(reaped) = self.ring.reap() else { return };
            let number = reaped.token.connection;
            if reaped.token.kind == OperationKind::Handshakes {
                self.poll_handshakes();
                continue;
            }
            let Some(connection) = self.connections.get_mut(number) else { continue };
            if !reaped.has_more {
                connection.operations_in_flight -= 1;
            }
            if connection.phase != Phase::Closing || reaped.is_notification {
                self.completed(reaped);
            }
            self.finish_close(number);
        }
    }

    fn completed(&mut self, reaped: Reaped) {
        let (number, result) = (reaped.token.connection, reaped.result);
        match reaped.token.kind {
            OperationKind::Receive => self.received(number, result),
            OperationKind::Send if reaped.is_notification => {
                self.notified(number, reaped.token.sequence, result)
            }
            OperationKind::Send => self.sent(number, result, reaped.has_more),
            OperationKind::Handshakes | OperationKind::Cancel => {}
        }
    }

    /// Submits the next receive of a connection, unless one is in flight or connection 0 of the lane is held
    /// at a fence.
    pub(crate) fn arm_receive(&mut self, number: u32) {
        let Some(connection) = self.connections.get_mut(number) else { return };
        let session = self.sessions.get(connection.session);
        let Some(session) = session.filter(|session| session.stage == Stage::Open) else { return };
        let lane = &session.lanes[connection.lane];
        if connection.is_receiving || (lane.is_held && connection.index == 0) {
            return;
        }
        connection.halves.receiver.plan(&self.slab, lane);
        let entry = connection.receive();
        connection.is_receiving = true;
        connection.operations_in_flight += 1;
        // SAFETY: the pieces lie in the connection's boxed receiver, in our slab, or in slots that the lane's reads
        // keep; all of them outlive the operation, because a session is freed only when none is in flight.
        unsafe { self.ring.push(entry, Token::of(OperationKind::Receive, number)) };
    }

    fn received(&mut self, number: u32, result: i32) {
        if let Some(connection) = self.connections.get_mut(number) {
            connection.is_receiving = false;
        }
        match result {
            0 => self.close(number, "the peer closed the connection"),
            1.. => self.digest(number, Arrival::Bytes(result as usize)),
            code if -code == libc::EINTR || -code == libc::EAGAIN => self.arm_receive(number),
            code => self.close(number, &std::io::Error::from_raw_os_error(-code).to_string()),
        }
    }

    fn digest(&mut self, number: u32, arrival: Arrival) {
        let Some(connection) = self.connections.get_mut(number) else { return };
        let Some(session) = self.sessions.get_mut(connection.session) else { return };
        let Halves { sender, receiver } = &mut connection.halves;
        let lane = &mut session.lanes[connection.lane];
        let (index, lane_index) = (connection.index, connection.lane);
        let mut inbound = Inbound {
            slab: &self.slab,
            lane,
            sender,
            events: &mut self.events,
            peer: session.peer,
            index,
            access: self.config.access,
            releases: false,
            frames: 0,
        };
        let digested = match arrival {
            Arrival::Bytes(bytes) => {
                self.counters.received_bytes.add(bytes as u64);
                receiver.received(bytes, &mut inbound)
            }
            Arrival::Released => receiver.resume(&mut inbound),
        };
        self.counters.received_frames.add(inbound.frames);
        let (releases, reports) = (inbound.releases, inbound.sender.to_report > 0);
        let (connections, is_asked) =
            (lane.connections, !lane.serving.is_empty() || !lane.verified.is_empty());
        if let Err(reason) = digested {
            self.close(number, &format!("protocol error: {reason}"));
            return;
        }
        if reports {
            self.mark(lane_index, number);
        }
        if is_asked {
            connections.into_iter().flatten().for_each(|connection| self.mark(lane_index, connection));
        }
        self.arm_receive(number);
        if let Some(first) = connections[0].filter(|_| releases) {
            self.digest(first, Arrival::Released);
        }
    }

    /// Adds a connection to the list of those that may have frames to send.
    fn mark(&mut self, lane: usize, number: u32) {
        let Some(connection) = self.connections.get_mut(number) else { return };
        if !mem::replace(&mut connection.is_dirty, true) {
            self.dirty[lane].push(number);
        }
    }

    /// Submits the next sends, those of the urgent lane first.
    pub(crate) fn arm_sends(&mut self) {
        for lane in Priority::ALL.map(Priority::index) {
            while let Some(number) = self.dirty[lane].pop() {
                self.arm_send(number);
            }
        }
    }

    fn arm_send(&mut self, number: u32) {
        let Some(connection) = self.connections.get_mut(number) else { return };
        connection.is_dirty = false;
        let Some(session) = self.sessions.get_mut(connection.session) else { return };
        if session.stage != Stage::Open {
            return;
        }
        let (descriptor, lane) = (connection.descriptor(), &mut session.lanes[connection.lane]);
        let sender = &mut connection.halves.sender;
        sender.put_served(lane);
        match sender.next_send(descriptor, &self.slab, &self.ring, lane) {
            Ok(None) => {}
            Ok(Some(next)) => {
                connection.operations_in_flight += 1;
                let token = Token { kind: OperationKind::Send, connection: number, sequence: next.sequence };
                let entry = connection.named(next.entry);
                // SAFETY: the pieces lie in the boxed sender, in its queued frames, which keep messages and slots,
                // or in our slab; frames stay until `sent` and their notification, or until nothing is in flight.
                unsafe { self.ring.push(entry, token) };
            }
            Err(reason) => self.close(number, reason),
        }
    }

    fn sent(&mut self, number: u32, result: i32, has_more: bool) {
        let Some(connection) = self.connections.get_mut(number) else { return };
        let Some(session) = self.sessions.get_mut(connection.session) else { return };
        let lane_index = connection.lane;
        let lane = &mut session.lanes[lane_index];
        let sender = &mut connection.halves.sender;
        let bytes = match result {
            0.. => result as usize,
            code if -code == libc::EINTR || -code == libc::EAGAIN => 0,
            _ if sender.give_up_zero_copy() => 0,
            code => {
                self.close(number, &std::io::Error::from_raw_os_error(-code).to_string());
                return;
            }
        };
        self.counters.sent_bytes.add(bytes as u64);
        match sender.sent(bytes, has_more, &self.slab, lane, &mut self.events) {
            Ok(frames) => self.counters.sent_frames.add(frames),
            Err(reason) => {
                self.close(number, reason);
                return;
            }
        }
        if !sender.is_idle() || !lane.verified.is_empty() || !lane.serving.is_empty() {
            self.mark(lane_index, number);
        }
    }

    fn notified(&mut self, number: u32, sequence: u32, result: i32) {
        let was_copied = result as u32 & ZERO_COPY_COPIED != 0;
        let counter = if was_copied { &self.counters.copied_sends } else { &self.counters.zero_copy_sends };
        counter.add(1);
        let Some(connection) = self.connections.get_mut(number) else { return };
        let Some(session) = self.sessions.get_mut(connection.session) else { return };
        let lane = &mut session.lanes[connection.lane];
        connection.halves.sender.notified(sequence, was_copied, lane, &mut self.events);
    }
}
