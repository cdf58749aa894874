//! The nodes: membership, connections, messages to them, and the loss of a node.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_fabric::{Fabric, Full, Operation as Post, PeerId, Priority, WorkRequest};

use super::RemotePool;
use super::operation::{Purpose, Request};
use crate::breaker::{Breaker, BreakerState};
use crate::metrics::{NodeCounters, add, set};
use crate::wire::Message;
use crate::{NodeId, RemoteError};

/// A node of the pool, as configured or discovered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolNode {
    /// Permanent name of the node, which determines the blocks that are placed on it.
    pub name: String,
    /// Address of the node in the transport's notation.
    pub address: String,
}

impl PoolNode {
    /// Prefixes of addresses, one for each transport.
    const TRANSPORTS: [&str; 3] = ["tcp:", "rdma:", "shm:"];

    /// Parses `name=address`. The error describes the fault in the text.
    pub fn parse(text: &str) -> Result<Self, String> {
        let Some((name, address)) = text.split_once('=').filter(|(name, _)| !name.is_empty()) else {
            return Err(format!(
                "\"{text}\" is not like `name=tcp:10.0.0.2:7400`; the name decides which blocks are its"
            ));
        };
        if !address.split(',').all(|rail| Self::TRANSPORTS.iter().any(|kind| rail.starts_with(kind))) {
            return Err(format!("\"{address}\" of {name} is not like `tcp:10.0.0.2:7400` (or rdma:, shm:)"));
        }
        Ok(Self { name: name.to_owned(), address: address.to_owned() })
    }

    /// Returns the transport (`tcp`, `rdma` or `shm`) of these nodes, if all have the same.
    #[must_use]
    pub fn only_transport(nodes: &[Self]) -> Option<&'static str> {
        let is_named = |kind: &&&str| {
            nodes.iter().any(|node| node.address.split(',').any(|rail| rail.starts_with(**kind)))
        };
        let mut named = Self::TRANSPORTS.iter().filter(is_named);
        let first = named.next()?;
        named.next().is_none().then(|| first.trim_end_matches(':'))
    }
}

pub(super) struct Node {
    pub(super) name: String,
    pub(super) address: String,
    pub(super) breaker: Breaker,
    pub(super) peer: Option<PeerId>,
    pub(super) connected: bool,
    /// Messages that wait for room in the fabric's queue, by lane.
    outbox: [VecDeque<Box<[u8]>>; Priority::ALL.len()],
    /// Blocks to read: ticket and index.
    pub(super) reads: VecDeque<(u64, usize)>,
    /// Blocks to write: request and bit.
    pub(super) writes: VecDeque<(u64, usize)>,
    pub(super) reads_in_flight: usize,
    pub(super) writes_in_flight: usize,
    /// Number of requests without an answer.
    pub(super) outstanding: usize,
    pub(super) leases: usize,
    /// Moving average of the time to answer a look-up.
    pub(super) latency: Duration,
    pub(super) counters: Arc<NodeCounters>,
}

impl Node {
    pub(super) fn is_usable(&self) -> bool {
        self.connected && self.breaker.state() == BreakerState::Closed
    }

    pub(super) fn has_backlog(&self) -> bool {
        self.connected
            && (self.outbox.iter().any(|lane| !lane.is_empty())
                || (!self.reads.is_empty() && self.reads_in_flight == 0)
                || (!self.writes.is_empty() && self.writes_in_flight == 0))
    }

    pub(super) fn note_latency(&mut self, sample: Duration) {
        self.latency = if self.latency.is_zero() { sample } else { (self.latency * 7 + sample) / 8 };
        set(&self.counters.latency_us, self.latency.as_micros() as usize);
    }

    /// Expected wait of one more request, to compare nodes by.
    pub(super) fn expected_wait(&self) -> Duration {
        self.latency * (1 + self.outstanding + self.reads_in_flight) as u32
    }

    pub(super) fn publish(&self) {
        let state = match self.breaker.state() {
            BreakerState::Closed => 0,
            BreakerState::Open { .. } => 1,
            BreakerState::Probing { .. } => 2,
        };
        set(&self.counters.usable, usize::from(self.is_usable()));
        set(&self.counters.breaker, state);
        set(&self.counters.leases, self.leases);
        set(&self.counters.transfers, self.reads_in_flight + self.writes_in_flight);
    }

    pub(super) fn pump_outbox(&mut self, fabric: &mut impl Fabric) {
        let Some(peer) = self.peer.filter(|_| self.connected) else { return };
        for priority in Priority::ALL {
            let lane = &mut self.outbox[priority.index()];
            while let Some(message) = lane.pop_front() {
                let request = WorkRequest { id: 0, peer, priority, operation: Post::Send { message } };
                if let Err(Full(back)) = fabric.post(request) {
                    if let Post::Send { message } = back.operation {
                        lane.push_front(message);
                    }
                    break;
                }
            }
        }
    }
}

impl<F: Fabric> RemotePool<F> {
    /// Replaces the list of nodes. A node that keeps name and address keeps its connection; a removed node is
    /// disconnected, and requests to it count as misses.
    pub fn set_nodes(&mut self, nodes: &[PoolNode], now: Instant) -> Result<(), RemoteError> {
        if nodes.len() > self.config.nodes_max {
            return Err(RemoteError::TooManyNodes { count: nodes.len(), limit: self.config.nodes_max });
        }
        for (at, node) in nodes.iter().enumerate() {
            if nodes[..at].iter().any(|other| other.name == node.name) {
                return Err(RemoteError::DuplicateNode { name: node.name.clone() });
            }
        }
        let is_kept =
            |node: &Node| nodes.iter().any(|new| new.name == node.name && new.address == node.address);
        let gone: Vec<NodeId> =
            self.nodes.iter().filter(|(_, node)| !is_kept(node)).map(|(&id, _)| id).collect();
        for id in gone {
            self.give_up(id, now);
            self.nodes.remove(&id);
            self.placement.remove(id);
        }
        for node in nodes {
            if !self.nodes.values().any(|known| known.name == node.name) {
                self.add_node(node, now);
            }
        }
        self.replication.forget_all();
        let named = self.nodes.values().map(|node| (node.name.clone(), Arc::clone(&node.counters)));
        self.counters.set_nodes(named.collect());
        Ok(())
    }

    fn add_node(&mut self, node: &PoolNode, now: Instant) {
        let id = NodeId(self.fresh_id() as u32);
        self.placement.add(id, &node.name);
        let node = Node {
            name: node.name.clone(),
            address: node.address.clone(),
            breaker: Breaker::new(now),
            peer: None,
            connected: false,
            outbox: [VecDeque::new(), VecDeque::new()],
            reads: VecDeque::new(),
            writes: VecDeque::new(),
            reads_in_flight: 0,
            writes_in_flight: 0,
            outstanding: 0,
            leases: 0,
            latency: Duration::ZERO,
            counters: Arc::new(NodeCounters::default()),
        };
        self.nodes.insert(id, node);
        self.due_at(now);
    }

    /// Returns the node whose present connection this is.
    pub(super) fn node_of(&self, peer: PeerId) -> Option<NodeId> {
        self.nodes.iter().find(|(_, node)| node.peer == Some(peer)).map(|(&id, _)| id)
    }

    /// Begins to connect; the probe follows once the connection is up.
    pub(super) fn connect(&mut self, id: NodeId, now: Instant) {
        let until = now + self.config.probe_timeout;
        let Some(node) = self.nodes.get_mut(&id) else { return };
        match self.fabric.connect(&node.address) {
            Ok(peer) => {
                node.peer = Some(peer);
                node.connected = false;
                node.breaker.probe(until);
                node.publish();
                self.due_at(until);
            }
            Err(error) => {
                tracing::warn!(node = node.name, %error, "remote tier: cannot reach a node");
                self.open_breaker(id, now);
            }
        }
    }

    pub(super) fn connected(&mut self, peer: PeerId, now: Instant) {
        let Some(id) = self.node_of(peer) else { return };
        if let Some(node) = self.nodes.get_mut(&id) {
            node.connected = true;
        }
        let request = self.fresh_id();
        let until = now + self.config.probe_timeout;
        self.ask_node(id, request, &Message::Stats { request }, Purpose::Probe, (now, until));
    }

    /// Sends a request and records it until its answer; false when it cannot be sent.
    pub(super) fn ask_node(
        &mut self,
        id: NodeId,
        request: u64,
        message: &Message,
        purpose: Purpose,
        (now, timeout_at): (Instant, Instant),
    ) -> bool {
        let Some(peer) = self.nodes.get(&id).and_then(|node| node.peer) else { return false };
        if !self.send(id, message) {
            return false;
        }
        if let Some(node) = self.nodes.get_mut(&id) {
            node.outstanding += 1;
            add(&node.counters.requests, 1);
        }
        let timeout = Some(timeout_at);
        self.requests.insert(request, Request { node: id, peer, sent_at: now, timeout_at: timeout, purpose });
        self.due_at(timeout_at);
        true
    }

    /// Removes a request that was answered or has timed out. `None` when it is unknown, or was sent on
    /// another connection.
    pub(super) fn answered(&mut self, request: u64, peer: PeerId) -> Option<Request> {
        let known = *self.requests.get(&request).filter(|known| known.peer == peer)?;
        self.requests.remove(&request);
        if let Some(node) = self.nodes.get_mut(&known.node).filter(|node| node.peer == Some(peer)) {
            node.outstanding = node.outstanding.saturating_sub(1);
        }
        Some(known)
    }

    /// Queues a message on its lane; false when there is no connection or no room.
    pub(super) fn send(&mut self, id: NodeId, message: &Message) -> bool {
        let Some(node) = self.nodes.get_mut(&id).filter(|node| node.connected) else { return false };
        let lane = &mut node.outbox[message.priority().index()];
        if lane.len() >= self.config.outbox_max {
            return false;
        }
        lane.push_back(message.encode());
        node.pump_outbox(&mut self.fabric);
        true
    }

    /// Like `send`, for messages that must not be lost: without room, the connection ends, which has the same
    /// effect at the node.
    pub(super) fn send_or_disconnect(&mut self, id: NodeId, message: &Message, now: Instant) {
        let is_connected = self.nodes.get(&id).is_some_and(|node| node.connected);
        if is_connected && !self.send(id, message) {
            self.give_up(id, now);
        }
    }

    /// Counts a failure; the connection ends when enough have occurred in a row.
    pub(super) fn failed(&mut self, id: NodeId, now: Instant) {
        let enough = self.config.failures_to_open;
        if self.nodes.get_mut(&id).is_some_and(|node| node.breaker.failure(enough)) {
            self.give_up(id, now);
        }
    }

    /// Ends a connection. Reads in flight complete later, one by one.
    pub(super) fn give_up(&mut self, id: NodeId, now: Instant) {
        if let Some(peer) = self.nodes.get(&id).and_then(|node| node.peer) {
            self.fabric.disconnect(peer);
            self.lost(id, peer, now);
        }
    }

    /// Handles the end of a connection: its requests fail, and the breaker opens.
    pub(super) fn lost(&mut self, id: NodeId, peer: PeerId, now: Instant) {
        let Some(node) = self.nodes.get_mut(&id) else { return };
        tracing::debug!(node = node.name, "remote tier: connection lost");
        node.peer = None;
        node.connected = false;
        node.outbox.iter_mut().for_each(VecDeque::clear);
        node.outstanding = 0;
        node.writes.clear();
        add(&self.counters.totals.lost_leases, node.leases);
        node.leases = 0;
        for (ticket, index) in std::mem::take(&mut node.reads) {
            self.unreadable(ticket, index);
        }
        self.open_breaker(id, now);
        let waiting: Vec<u64> = self
            .requests
            .iter()
            .filter(|(_, request)| request.peer == peer)
            .map(|(&request, _)| request)
            .collect();
        for request in waiting {
            if let Some(request) = self.requests.remove(&request) {
                self.unanswered(request.purpose, now);
            }
        }
    }

    /// Handles a request that will not be answered.
    pub(super) fn unanswered(&mut self, purpose: Purpose, now: Instant) {
        match purpose {
            Purpose::LookUp { ticket, group } => self.ask_other(ticket, group, now),
            Purpose::Store { ticket, part } => self.fail_part(ticket, part),
            Purpose::Probe => {}
        }
    }

    fn open_breaker(&mut self, id: NodeId, now: Instant) {
        let random = self.draw();
        let wait = (self.config.open_first, self.config.open_max);
        let Some(node) = self.nodes.get_mut(&id) else { return };
        node.breaker.open(now, wait, random);
        add(&node.counters.failures, 1);
        node.publish();
        if let Some(until) = node.breaker.deadline() {
            self.due_at(until);
        }
    }
}
