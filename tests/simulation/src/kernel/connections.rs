//! The two ends of a connection and the packets between them.
//!
//! Bytes arrive in order, as over TCP: a lost packet is a late one. A connection ends by a close, by a reset,
//! or silently.

use std::collections::VecDeque;
use std::ffi::c_int;

use super::network::HostId;
use super::objects::{Kind, ObjectId};
use super::sockets::{Address, Socket, SocketState, UNACKNOWLEDGED_MAX};
use super::{Due, Kernel, Nanos, SECOND};

/// Most bytes between a sender and a reader that has not set `SO_RCVBUF`.
pub(super) const WINDOW: usize = 256 << 10;

/// One end of a connection.
#[derive(Debug)]
pub(super) struct End {
    /// The other end, if it exists.
    pub(super) peer: Option<ObjectId>,
    /// Most bytes that were sent to this end and not read.
    window: usize,
    pub(super) peer_host: HostId,
    /// Reason for which this end is not notified that the other end is gone; `None`: it is notified.
    pub(super) unreported_close: Option<UnreportedClose>,
    /// Bytes that were sent to an end that is gone.
    pub(super) bytes_to_closed_peer: usize,
    pub(super) inbox: VecDeque<u8>,
    /// Packets in flight to this end, with their arrival times.
    pub(super) flight: VecDeque<(Nanos, Packet)>,
    pub(super) flight_bytes: usize,
    pub(super) has_end: bool,
    pub(super) is_reset: bool,
    pub(super) write_shut: bool,
    pub(super) read_shut: bool,
    /// Time at which the link has transmitted the last byte that this end sent.
    pub(super) busy_until: Nanos,
}

/// Reason for which the end of a peer is not notified.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum UnreportedClose {
    /// The peer's machine lost power: after its restart it answers with a reset.
    Power,
    /// A device between the ends has dropped the connection's state.
    Forgotten,
}

#[derive(Debug)]
pub(super) enum Packet {
    Bytes(Vec<u8>),
    End,
    Reset,
}

impl End {
    pub(super) fn new(peer: ObjectId, peer_host: HostId, window: usize) -> Self {
        Self {
            peer: Some(peer),
            window,
            peer_host,
            unreported_close: None,
            bytes_to_closed_peer: 0,
            inbox: VecDeque::new(),
            flight: VecDeque::new(),
            flight_bytes: 0,
            has_end: false,
            is_reset: false,
            write_shut: false,
            read_shut: false,
            busy_until: 0,
        }
    }

    /// Marks the end as closed; returns the other end, if it exists.
    pub(super) fn abort(&mut self) -> Option<ObjectId> {
        self.is_reset = true;
        self.inbox.clear();
        self.peer.take()
    }

    fn room(&self) -> usize {
        self.window.saturating_sub(self.flight_bytes + self.inbox.len())
    }
}

impl Kernel {
    /// Schedules the failure of a connection whose other end stays silent, according to its options.
    pub(super) fn schedule_give_up(&mut self, id: ObjectId) {
        let now = self.now;
        let Some(socket) = self.socket(id) else { return };
        let (keep_alive, limit) = (socket.keep_alive, socket.user_timeout);
        if keep_alive.is_on
            && matches!(&socket.state, SocketState::Open(end) if end.unreported_close.is_some())
        {
            // With a user timeout, Linux gives up at the first unanswered probe after it
            // (`tcp_keepalive_timer`).
            let silent = match limit {
                UNACKNOWLEDGED_MAX => keep_alive.idle + keep_alive.interval * keep_alive.probes,
                limit => {
                    let probes = limit.saturating_sub(keep_alive.idle).div_ceil(keep_alive.interval).max(1);
                    keep_alive.idle + keep_alive.interval * probes
                }
            };
            self.schedule(now + silent, Due::GiveUp(id));
        }
    }

    /// Fails a connection that had no sign of its peer for too long.
    pub(super) fn give_up(&mut self, id: ObjectId) {
        let now = self.now;
        let Some(socket) = self.socket(id) else { return };
        let (host, limit) = (socket.host, socket.user_timeout);
        let SocketState::Open(end) = &socket.state else { return };
        let (peer, peer_host, is_close_unreported, was_reset) =
            (end.peer, end.peer_host, end.unreported_close.is_some(), end.is_reset);
        let is_unacknowledged = self.link(host, peer_host).is_down
            && peer.is_some_and(|peer| match self.socket(peer) {
                Some(Socket { state: SocketState::Open(end), .. }) => {
                    end.flight.front().is_some_and(|(at, _)| at + limit <= now + SECOND)
                }
                _ => false,
            });
        if was_reset || !(is_close_unreported || is_unacknowledged) {
            return;
        }
        if let Some(Socket { state: SocketState::Open(end), error, .. }) = self.socket(id) {
            end.is_reset = true;
            *error = libc::ETIMEDOUT;
            self.changed(id);
        }
    }

    /// Returns the bytes that an end may send now.
    pub(super) fn room_towards(&self, end: &End) -> usize {
        let Some(peer) = end.peer else { return WINDOW.saturating_sub(end.bytes_to_closed_peer) };
        match self.objects.get(&peer).map(|object| &object.kind) {
            Some(Kind::Socket(socket)) => match &socket.state {
                SocketState::Open(end) => end.room(),
                _ => WINDOW,
            },
            _ => WINDOW,
        }
    }

    /// Reads bytes that have arrived; 0 bytes mean the end of the stream.
    pub(super) fn receive(
        &mut self,
        id: ObjectId,
        room: &mut [&mut [u8]],
        peek: bool,
    ) -> Result<usize, c_int> {
        let Some(socket) = self.socket(id) else { return Err(libc::ENOTSOCK) };
        let end = match &mut socket.state {
            SocketState::Open(end) => end,
            SocketState::Failed => return Err(std::mem::replace(&mut socket.error, 0).max(libc::ENOTCONN)),
            _ => return Err(libc::ENOTCONN),
        };
        if end.inbox.is_empty() {
            if end.is_reset {
                socket.error = 0;
                return Err(libc::ECONNRESET);
            }
            return if end.has_end || end.read_shut { Ok(0) } else { Err(libc::EAGAIN) };
        }
        let wanted: usize = room.iter().map(|part| part.len()).sum();
        let count = wanted.min(end.inbox.len());
        let mut done = 0;
        for part in room {
            let take = part.len().min(count - done);
            let (first, second) = end.inbox.as_slices();
            let from_first = first.len().saturating_sub(done).min(take);
            part[..from_first].copy_from_slice(&first[done.min(first.len())..][..from_first]);
            let begin = (done + from_first).saturating_sub(first.len());
            part[from_first..take].copy_from_slice(&second[begin..][..take - from_first]);
            done += take;
        }
        if !peek {
            let was_full = end.room() == 0;
            end.inbox.drain(..count);
            let peer = end.peer;
            if was_full && let Some(peer) = peer {
                self.changed(peer);
            }
        }
        Ok(count)
    }

    /// Sends as many bytes as the window allows.
    pub(super) fn transmit(&mut self, id: ObjectId, parts: &[&[u8]]) -> Result<usize, c_int> {
        let now = self.now;
        let Some(socket) = self.socket(id) else { return Err(libc::ENOTSOCK) };
        let host = socket.host;
        let end = match &mut socket.state {
            SocketState::Open(end) => end,
            SocketState::Failed => return Err(libc::EPIPE),
            _ => return Err(libc::ENOTCONN),
        };
        if end.is_reset || end.write_shut {
            return Err(if std::mem::replace(&mut socket.error, 0) == 0 {
                libc::EPIPE
            } else {
                libc::ECONNRESET
            });
        }
        let (peer, peer_host, unreported_close, busy_until) =
            (end.peer, end.peer_host, end.unreported_close, end.busy_until);
        let total: usize = parts.iter().map(|part| part.len()).sum();
        if total == 0 {
            return Ok(0);
        }
        let Some(peer) = peer else {
            return self.send_to_closed_peer(id, total, host, peer_host, unreported_close);
        };
        let room = match self.socket(peer) {
            Some(Socket { state: SocketState::Open(end), .. }) => end.room(),
            _ => WINDOW,
        };
        if room == 0 {
            self.network_counts.full_windows += 1;
            return Err(libc::EAGAIN);
        }
        let count = total.min(room);
        let mut bytes = Vec::with_capacity(count);
        for part in parts {
            bytes.extend_from_slice(&part[..part.len().min(count - bytes.len())]);
        }
        let link = self.link(host, peer_host);
        let takes = (count as u64 * SECOND).checked_div(link.rate).unwrap_or(0);
        let leaves = now.max(busy_until) + takes;
        if let Some(Socket { state: SocketState::Open(end), .. }) = self.socket(id) {
            end.busy_until = leaves;
        }
        self.trace.step("send", now, u64::from(host.0) << 16 | u64::from(peer_host.0), count as u64);
        self.trace.add_bytes(&bytes);
        // Split bytes arrive in several packets. A reader always gets all bytes that have arrived, and a
        // writer fills the whole window: event loops rely on this.
        while bytes.len() > 1 && self.random.one_in(link.split_one_in) {
            let rest = bytes.split_off(self.random.between(1, bytes.len() as u64 - 1) as usize);
            let at = leaves + self.draw_delay(host, peer_host);
            self.send_packet(peer, at, Packet::Bytes(std::mem::replace(&mut bytes, rest)));
        }
        let at = leaves + self.draw_delay(host, peer_host);
        self.send_packet(peer, at, Packet::Bytes(bytes));
        if link.is_down
            && let Some(limit) = self.socket(id).map(|socket| socket.user_timeout)
        {
            self.schedule(now + limit, Due::GiveUp(id));
        }
        Ok(count)
    }

    /// Sends to an end that is gone.
    fn send_to_closed_peer(
        &mut self,
        id: ObjectId,
        total: usize,
        host: HostId,
        peer_host: HostId,
        unreported_close: Option<UnreportedClose>,
    ) -> Result<usize, c_int> {
        let now = self.now;
        let answers = match unreported_close {
            None => true,
            Some(UnreportedClose::Power) => !self.is_powered_off(peer_host),
            Some(UnreportedClose::Forgotten) => false,
        };
        if answers {
            let at = now + 2 * self.draw_delay(host, peer_host);
            self.send_packet(id, at, Packet::Reset);
            return Ok(total);
        }
        let Some(Socket { state: SocketState::Open(end), user_timeout, .. }) = self.socket(id) else {
            return Err(libc::EPIPE);
        };
        let count = total.min(WINDOW.saturating_sub(end.bytes_to_closed_peer));
        if count == 0 {
            return Err(libc::EAGAIN);
        }
        let (is_first, limit) = (end.bytes_to_closed_peer == 0, *user_timeout);
        end.bytes_to_closed_peer += count;
        if is_first {
            self.schedule(now + limit, Due::GiveUp(id));
        }
        Ok(count)
    }

    /// Sends a reset to an end whose other end no longer exists.
    pub(super) fn send_reset(&mut self, to: ObjectId, now: Nanos, host: HostId, peer_host: HostId) {
        let at = now + self.draw_delay(host, peer_host);
        if let Some(Socket { state: SocketState::Open(end), .. }) = self.socket(to) {
            end.peer = None;
        }
        self.send_packet(to, at, Packet::Reset);
    }

    /// Sends a packet to an end; packets are never reordered.
    fn send_packet(&mut self, to: ObjectId, at: Nanos, packet: Packet) {
        let Some(Socket { state: SocketState::Open(end), .. }) = self.socket(to) else { return };
        let at = end.flight.back().map_or(at, |(last, _)| at.max(*last));
        if let Packet::Bytes(bytes) = &packet {
            end.flight_bytes += bytes.len();
        }
        end.flight.push_back((at, packet));
        self.schedule(at, Due::Arrival(to));
    }

    pub(super) fn arrive(&mut self, id: ObjectId) {
        let now = self.now;
        let Some(Socket { state: SocketState::Open(end), host, .. }) = self.socket(id) else { return };
        let (host, peer_host) = (*host, end.peer_host);
        if self.link(host, peer_host).is_down {
            return;
        }
        let Some(Socket { state: SocketState::Open(end), error, .. }) = self.socket(id) else { return };
        let mut changed = false;
        while end.flight.front().is_some_and(|(at, _)| *at <= now) {
            let Some((_, packet)) = end.flight.pop_front() else { break };
            changed = true;
            match packet {
                Packet::Bytes(bytes) => {
                    end.flight_bytes -= bytes.len();
                    end.inbox.extend(bytes);
                }
                Packet::End => end.has_end = true,
                Packet::Reset => {
                    end.is_reset = true;
                    end.inbox.clear();
                    *error = libc::ECONNRESET;
                }
            }
        }
        if changed {
            self.changed(id);
        }
    }

    /// Shuts down one direction of a connection, or both.
    pub(super) fn shut(&mut self, id: ObjectId, reads: bool, writes: bool) -> Result<(), c_int> {
        let now = self.now;
        let Some(Socket { state: SocketState::Open(end), host, .. }) = self.socket(id) else {
            return Err(libc::ENOTCONN);
        };
        end.read_shut |= reads;
        let ends = writes && !end.write_shut;
        end.write_shut |= writes;
        let (peer, host, peer_host) = (end.peer, *host, end.peer_host);
        if ends && let Some(peer) = peer {
            let at = now + self.draw_delay(host, peer_host);
            self.send_packet(peer, at, Packet::End);
        }
        self.changed(id);
        Ok(())
    }

    /// Closes a socket when its last descriptor is closed.
    pub(super) fn hang_up(&mut self, id: ObjectId, silently: bool) {
        let now = self.now;
        let Some(socket) = self.socket(id) else { return };
        let (host, local) = (socket.host, socket.local.clone());
        match &mut socket.state {
            SocketState::Listening { waiting, .. } => {
                let waiting = std::mem::take(waiting);
                for accepted in waiting {
                    self.hang_up(accepted, silently);
                    self.objects.remove(&accepted);
                }
            }
            SocketState::Open(end) => {
                let has_unread = !end.inbox.is_empty() || end.flight_bytes > 0;
                let (peer, peer_host, was_shut) = (end.peer, end.peer_host, end.write_shut);
                let Some(peer) = peer else { return };
                let at = now + self.draw_delay(host, peer_host);
                if let Some(Socket { state: SocketState::Open(end), .. }) = self.socket(peer) {
                    end.peer = None;
                    end.unreported_close = silently.then_some(UnreportedClose::Power);
                }
                self.schedule_give_up(peer);
                if !silently && has_unread {
                    self.send_packet(peer, at, Packet::Reset);
                } else if !silently && !was_shut {
                    self.send_packet(peer, at, Packet::End);
                }
            }
            _ => {}
        }
        match local {
            Some(Address::Inet(_, port)) => {
                if let Some(listeners) = self.network.listeners.get_mut(&(host, port)) {
                    listeners.retain(|listener| *listener != id);
                    if listeners.is_empty() {
                        self.network.listeners.remove(&(host, port));
                    }
                }
            }
            Some(Address::Path(path)) if self.network.paths.get(&path) == Some(&id) => {
                self.network.paths.remove(&path);
            }
            _ => {}
        }
    }

    /// Returns the bytes that were sent and have not arrived.
    pub(super) fn in_flight_to_peer(&mut self, id: ObjectId) -> usize {
        let Some(Socket { state: SocketState::Open(end), .. }) = self.socket(id) else { return 0 };
        let Some(peer) = end.peer else { return 0 };
        match self.socket(peer) {
            Some(Socket { state: SocketState::Open(end), .. }) => end.flight_bytes,
            _ => 0,
        }
    }

    /// Returns the bytes that can be read at once.
    pub(super) fn unread(&mut self, id: ObjectId) -> usize {
        match self.socket(id) {
            Some(Socket { state: SocketState::Open(end), .. }) => end.inbox.len(),
            _ => 0,
        }
    }
}
