//! Connections: one for each address, shared by all transfers. After a failure the next attempt is delayed,
//! so that a node that restarts is not flooded by the nodes that wait for it.

use std::collections::VecDeque;
use std::time::Instant;

use dataplane_fabric::{ConnectError, Fabric, PeerId, WorkRequest};

use super::{GREET_WITHIN, Outcome, TransferNode};
use crate::metrics::TransferCounters;
use crate::negotiation::NegotiatedParameters;
use crate::timers::Timer;
use crate::wire::Message;

/// Most messages that may wait for one peer before the connection is given up.
pub(super) const OUTBOX_MAX: usize = 4096;
/// Most addresses with a remembered failure; the oldest are dropped.
const BACKOFFS_MAX: usize = 1024;
/// Doublings after which the delay has surely reached its maximum.
const DOUBLINGS_MAX: u32 = 16;

#[derive(Debug)]
pub(super) struct Peer {
    /// Address that this node connected to; `None` for a peer that connected to this node.
    pub(super) address: Option<String>,
    pub(super) connected: bool,
    /// Terms agreed with the peer; set by its greeting.
    pub(super) terms: Option<NegotiatedParameters>,
    /// Messages that wait for the connection or for room in its queue.
    pub(super) outbox: VecDeque<Message>,
    /// Blocks that the peer has reserved at this node, over all of its transfers.
    pub(super) blocks_reserved: usize,
}

impl Peer {
    fn new(address: Option<String>) -> Self {
        Self { address, connected: false, terms: None, outbox: VecDeque::new(), blocks_reserved: 0 }
    }
}

/// An address that could not be reached.
#[derive(Debug, Clone, Copy)]
pub(super) struct Backoff {
    failures: u32,
    not_before: Instant,
}

/// Reason that there is no connection to an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unreachable {
    /// The last attempt failed, and the delay before the next has not passed.
    Resting,
    /// The address is not one of this node's transports, or all connections are in use.
    Refused,
}

impl Unreachable {
    pub(super) fn as_arrival(self) -> Outcome {
        match self {
            Self::Resting => Outcome::PeerDown,
            Self::Refused => Outcome::Refused,
        }
    }
}

impl<F: Fabric> TransferNode<F> {
    /// Returns the connection to `address`; starts one if there is none.
    pub(super) fn peer_at(&mut self, address: &str) -> Result<PeerId, Unreachable> {
        if let Some(&id) = self.peers_by_address.get(address) {
            return Ok(id);
        }
        if self.backoff.get(address).is_some_and(|backoff| backoff.not_before > self.now) {
            return Err(Unreachable::Resting);
        }
        match self.fabric.connect(address) {
            Ok(id) => {
                self.peers_by_address.insert(address.to_owned(), id);
                self.peers.insert(id, Peer::new(Some(address.to_owned())));
                Ok(id)
            }
            Err(error) => {
                tracing::warn!(%error, "transfer: cannot reach a peer");
                self.schedule_reconnect(address);
                // An operating-system error concerns the peer; the other errors concern the request.
                Err(match error {
                    ConnectError::System { .. } => Unreachable::Resting,
                    ConnectError::Address { .. } | ConnectError::TooMany { .. } => Unreachable::Refused,
                })
            }
        }
    }

    pub(super) fn peer_up(&mut self, peer: PeerId) {
        let greeting = self.greeting();
        let state = self.peers.entry(peer).or_insert_with(|| Peer::new(None));
        state.connected = true;
        state.outbox.push_front(Message::Hello(greeting));
        if let Some(address) = &state.address {
            self.backoff.remove(address);
        }
        self.peers_with_messages.insert(peer);
        self.timers.set(Timer::Greeting(peer), self.now + GREET_WITHIN);
        self.pump_outbox(peer);
    }

    /// Counts a connection that was never established as a failure. One that was established and ended does
    /// not count: its successor may be tried at once.
    fn note_failure(&mut self, peer: Peer) {
        if let Some(address) = peer.address.filter(|_| !peer.connected) {
            self.schedule_reconnect(&address);
        }
    }

    /// Doubles the delay for `address`, less a random part, so that the nodes that wait for one node do not
    /// all reconnect at the same moment.
    fn schedule_reconnect(&mut self, address: &str) {
        let failures = self.backoff.get(address).map_or(0, |backoff| backoff.failures).min(DOUBLINGS_MAX);
        let whole = self.limits.reconnect_first.saturating_mul(1 << failures).min(self.limits.reconnect_max);
        let half_nanos = (whole.as_nanos() / 2).max(1) as u64;
        let wait = whole - std::time::Duration::from_nanos(self.random.u64(..half_nanos));
        if self.backoff.len() >= BACKOFFS_MAX {
            let oldest = self.backoff.iter().min_by_key(|(_, backoff)| backoff.not_before);
            if let Some(oldest) = oldest.map(|(address, _)| address.clone()) {
                self.backoff.remove(&oldest);
            }
        }
        let backoff = Backoff { failures: failures + 1, not_before: self.now + wait };
        self.backoff.insert(address.to_owned(), backoff);
    }

    pub(super) fn send(&mut self, peer: PeerId, message: Message) {
        let Some(state) = self.peers.get_mut(&peer) else { return };
        if state.outbox.len() >= OUTBOX_MAX {
            // The peer sends requests but does not read the answers.
            return self.give_up(peer);
        }
        state.outbox.push_back(message);
        self.peers_with_messages.insert(peer);
        self.pump_outbox(peer);
    }

    pub(super) fn pump_outbox(&mut self, peer: PeerId) {
        let Some(state) = self.peers.get_mut(&peer).filter(|state| state.connected) else { return };
        while let Some(message) = state.outbox.front_mut() {
            if self.fabric.post(WorkRequest::message(peer, message.encode())).is_err() {
                return;
            }
            if !message.advance() {
                state.outbox.pop_front();
            }
        }
        self.peers_with_messages.remove(&peer);
    }

    /// Sends waiting messages, to each peer as many as it accepts.
    pub(super) fn pump_outboxes(&mut self) {
        let mut peers = std::mem::take(&mut self.peers_scratch);
        peers.extend(&self.peers_with_messages);
        peers.drain(..).for_each(|peer| self.pump_outbox(peer));
        self.peers_scratch = peers;
    }

    /// Removes the peer from the table of addresses.
    fn forget_address(&mut self, peer: PeerId) {
        let address = self.peers.get(&peer).and_then(|state| state.address.as_ref());
        if let Some(address) = address.filter(|&address| self.peers_by_address.get(address) == Some(&peer)) {
            self.peers_by_address.remove(address);
        }
    }

    /// Cancels the timers for the peer's greeting and its acknowledgements.
    fn cancel_timers(&mut self, peer: PeerId) {
        self.timers.cancel(Timer::Greeting(peer));
        for transfer in self.quarantine.transfers_of(peer) {
            self.timers.cancel(Timer::Acknowledgement(peer, transfer));
        }
    }

    /// Disconnects a peer that does not answer; the next transfer connects anew. Its slots stay in
    /// quarantine until the fabric reports that it cannot write any more.
    pub(super) fn give_up(&mut self, peer: PeerId) {
        tracing::warn!(?peer, "transfer: a peer does not acknowledge; disconnecting");
        self.forget_address(peer);
        if let Some(state) = self.peers.get_mut(&peer) {
            state.address = None;
            state.outbox.clear();
            self.peers_with_messages.remove(&peer);
        }
        self.cancel_timers(peer);
        self.fabric.disconnect(peer);
    }

    pub(super) fn peer_down(&mut self, peer: PeerId, reason: &str) {
        tracing::info!(?peer, reason, "transfer: connection ended");
        TransferCounters::add(&self.counters.peers_lost, 1);
        self.forget_address(peer);
        self.peers_with_messages.remove(&peer);
        if let Some(state) = self.peers.remove(&peer) {
            self.note_failure(state);
        }
        self.cancel_timers(peer);
        self.quarantine.peer_down(peer);
        let lost = self.inbound_where(|inbound| inbound.peer == peer);
        lost.into_iter().for_each(|transfer| self.writes_ended(transfer, Outcome::PeerDown));
        for (transfer, lease) in self.outbound.end_owner(&Some(peer)) {
            self.outbound_ended(transfer, lease);
        }
    }
}
