//! An in-memory fabric with seeded faults, for simulation: equal seed, equal run.
//!
//! Time is a tick counter that the test advances. Each operation is a packet with a delivery time drawn from
//! [`Faults`]. Bytes are read from the source slot at delivery, as a NIC would, so that a slot that is reused
//! too early shows; the same holds for slots in a device's memory, which only some nodes move. Faults: delay,
//! loss, corruption, reordering (which breaks the ordering clause of the contract on purpose) and the death
//! of a node.
//!
//! Not a hot path; single-threaded by construction.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;

use dataplane_memory::{Slab, SlabKind};

use crate::{
    Completion, ConnectError, Event, Fabric, Full, Operation, PeerId, Priority, Source, Target, WorkRequest,
};

/// Kinds and rates of the injected faults.
#[derive(Debug, Clone, Copy)]
pub struct Faults {
    /// Longest delay of one packet, in ticks (at least 1).
    pub delay_ticks_max: u64,
    /// One in so many data packets is not delivered; 0: none is lost.
    pub lose_one_in: u64,
    /// One in so many writes lands with a flipped bit; 0: none is corrupted.
    pub corrupt_one_in: u64,
    /// Whether later packets may overtake earlier ones.
    pub reorder: bool,
    /// Largest number of requests in flight per connection; `post` returns full beyond it.
    pub queue_depth_max: usize,
}

impl Default for Faults {
    fn default() -> Self {
        Self { delay_ticks_max: 1, lose_one_in: 0, corrupt_one_in: 0, reorder: false, queue_depth_max: 64 }
    }
}

#[derive(Debug)]
enum Packet {
    Connect,
    Request(WorkRequest),
    Down(&'static str),
}

#[derive(Debug)]
struct Link {
    remote: (usize, PeerId),
    in_flight: BTreeSet<u64>,
    posted: usize,
    last_delivery: [u64; Priority::ALL.len()],
}

#[derive(Debug)]
struct SimNode {
    /// The slabs that the node's peers write into, at most one of each kind.
    slabs: Vec<Arc<Slab>>,
    /// Whether the node moves slots in a device's memory.
    is_direct: bool,
    alive: bool,
    events: VecDeque<Event>,
    /// Ordered, as is everything that the simulation iterates over: equal seeds must give equal runs.
    links: BTreeMap<PeerId, Link>,
}

impl SimNode {
    fn slab_of(&self, kind: SlabKind) -> Option<&Arc<Slab>> {
        self.slabs.iter().find(|slab| slab.kind() == kind)
    }
}

#[derive(Debug)]
struct State {
    now: u64,
    random: fastrand::Rng,
    faults: Faults,
    nodes: Vec<SimNode>,
    packets: BTreeMap<(u64, u64), (usize, PeerId, Packet)>,
    /// Connections that one end has given up while its packets are still in transit: that end to the other.
    half_closed: HashMap<(usize, PeerId), (usize, PeerId)>,
    sequence: u64,
    next_peer: u64,
}

/// The wire between simulated nodes.
#[derive(Debug, Clone)]
pub struct SimNetwork(Rc<RefCell<State>>);

/// One node's end of a [`SimNetwork`].
#[derive(Debug)]
pub struct SimFabric {
    state: Rc<RefCell<State>>,
    node: usize,
    name: &'static str,
}

impl SimNetwork {
    /// Creates a network in which every choice comes from `seed`.
    #[must_use]
    pub fn new(seed: u64, faults: Faults) -> Self {
        // A stream of its own beside that of a test with the same seed.
        let random = fastrand::Rng::with_seed(seed ^ 0x51A1);
        Self(Rc::new(RefCell::new(State {
            now: 0,
            random,
            faults,
            nodes: Vec::new(),
            packets: BTreeMap::new(),
            half_closed: HashMap::new(),
            sequence: 0,
            next_peer: 1,
        })))
    }

    /// Adds a node that lets its peers write into `slab`, which lies in host memory. The node's address is
    /// its number: `0`, `1`, …
    pub fn add_node(&self, slab: Arc<Slab>) -> SimFabric {
        self.add_node_named(slab, "sim")
    }

    /// Like [`Self::add_node`] with another fabric name: a node with several rails tells them apart by name.
    pub fn add_node_named(&self, slab: Arc<Slab>, name: &'static str) -> SimFabric {
        assert!(slab.device().is_none(), "this node of the simulated fabric reaches host memory only");
        self.add(vec![slab], name, false)
    }

    /// Adds a node that moves slots in any memory: both `slab`, which its peers write into, and the sources
    /// of its own operations may lie in a device's memory.
    pub fn add_direct_node(&self, slab: Arc<Slab>) -> SimFabric {
        self.add_direct_node_named(slab, "sim")
    }

    /// Like [`Self::add_direct_node`] with another fabric name.
    pub fn add_direct_node_named(&self, slab: Arc<Slab>, name: &'static str) -> SimFabric {
        self.add(vec![slab], name, true)
    }

    /// Adds a node that moves slots in any memory, and whose peers write into slabs of both kinds.
    pub fn add_node_showing(&self, slabs: [Arc<Slab>; 2], name: &'static str) -> SimFabric {
        assert!(slabs[0].kind() != slabs[1].kind(), "peers know a slab by its kind");
        self.add(slabs.into(), name, true)
    }

    fn add(&self, slabs: Vec<Arc<Slab>>, name: &'static str, is_direct: bool) -> SimFabric {
        let mut state = self.0.borrow_mut();
        let (events, links) = (VecDeque::new(), BTreeMap::new());
        state.nodes.push(SimNode { slabs, is_direct, alive: true, events, links });
        SimFabric { state: Rc::clone(&self.0), node: state.nodes.len() - 1, name }
    }

    /// Changes the faults from now on.
    pub fn set_faults(&self, faults: Faults) {
        self.0.borrow_mut().faults = faults;
    }

    /// Advances the time and delivers the packets that are due.
    pub fn advance(&self, ticks: u64) {
        let mut state = self.0.borrow_mut();
        state.now += ticks;
        let now = state.now;
        while state.packets.first_key_value().is_some_and(|(&(due, _), _)| due <= now) {
            let Some((_, (from, peer, packet))) = state.packets.pop_first() else { break };
            state.deliver(from, peer, packet);
        }
    }

    /// Kills a node: it answers no packet, and its peers learn of its death after a delay.
    pub fn kill(&self, node: usize) {
        self.0.borrow_mut().kill(node);
    }

    /// Cuts every link of a node, as a pulled cable would: both ends of a link get the event of its end, and
    /// can connect anew unless one of them is dead.
    pub fn cut(&self, node: usize) {
        let mut state = self.0.borrow_mut();
        let peers: Vec<PeerId> = state.nodes[node].links.keys().copied().collect();
        for peer in peers {
            let Some(remote) = state.nodes[node].links.get(&peer).map(|link| link.remote) else { continue };
            state.end_link((node, peer), "the cable was pulled");
            state.end_link(remote, "the cable was pulled");
        }
    }

    /// Ends the connections of `node` at its end alone. Packets that the node has sent are still delivered,
    /// until the other end disconnects: a queue pair whose retries ran out while its packets are in a switch.
    pub fn cut_one_end(&self, node: usize) {
        let mut state = self.0.borrow_mut();
        let peers: Vec<PeerId> = state.nodes[node].links.keys().copied().collect();
        for peer in peers {
            let Some(link) = state.nodes[node].links.remove(&peer) else { continue };
            state.half_closed.insert((node, peer), link.remote);
            state.tell_end((node, peer), link, "retries exceeded");
        }
    }

    /// Makes a dead node reachable again, without connections.
    pub fn revive(&self, node: usize) {
        self.0.borrow_mut().nodes[node].alive = true;
    }
}

impl State {
    fn kill(&mut self, node: usize) {
        self.nodes[node].alive = false;
        self.nodes[node].events.clear();
        let peers: Vec<PeerId> = self.nodes[node].links.keys().copied().collect();
        for peer in peers {
            self.send(node, peer, Packet::Down("the peer died"));
        }
    }

    fn draw(&mut self) -> u64 {
        self.random.u64(..)
    }

    fn one_in(&mut self, period: u64) -> bool {
        period > 0 && self.draw().is_multiple_of(period)
    }

    fn send(&mut self, from: usize, peer: PeerId, packet: Packet) {
        let delay = 1 + self.draw() % self.faults.delay_ticks_max.max(1);
        let reorder = self.faults.reorder && matches!(packet, Packet::Request(_));
        let mut due = self.now + delay;
        let now_sequence = self.sequence;
        self.sequence += 1;
        let lane = match &packet {
            Packet::Request(request) => Some(request.priority.index()),
            Packet::Connect | Packet::Down(_) => None,
        };
        if let Some(link) = self.nodes[from].links.get_mut(&peer).filter(|_| !reorder) {
            // The end of a connection overtakes no request of either lane.
            let last = lane.map_or(link.last_delivery.iter().max(), |lane| link.last_delivery.get(lane));
            due = due.max(last.copied().unwrap_or(0));
            match lane {
                Some(lane) => link.last_delivery[lane] = due,
                None => link.last_delivery = [due; Priority::ALL.len()],
            }
        }
        self.packets.insert((due, now_sequence), (from, peer, packet));
    }

    fn deliver(&mut self, from: usize, peer: PeerId, packet: Packet) {
        let link = self.nodes[from].links.get(&peer).map(|link| link.remote);
        let Some(remote) = link.or_else(|| self.half_closed.get(&(from, peer)).copied()) else { return };
        match packet {
            Packet::Connect => self.deliver_connect(from, peer, remote.0),
            Packet::Down(reason) => {
                self.nodes[from].links.remove(&peer);
                self.end_link(remote, reason);
            }
            Packet::Request(request) => self.deliver_request(from, peer, remote, request),
        }
    }

    fn deliver_connect(&mut self, from: usize, peer: PeerId, to: usize) {
        if self.nodes.get(to).is_none_or(|node| !node.alive) {
            self.end_link((from, peer), "nobody answers");
            return;
        }
        let accepted = PeerId(self.next_peer);
        self.next_peer += 1;
        let link = Link {
            remote: (from, peer),
            in_flight: BTreeSet::new(),
            posted: 0,
            last_delivery: [self.now; 2],
        };
        self.nodes[to].links.insert(accepted, link);
        if let Some(link) = self.nodes[from].links.get_mut(&peer) {
            link.remote = (to, accepted);
        }
        self.nodes[to].events.push_back(Event::Accepted { peer: accepted });
        self.nodes[from].events.push_back(Event::Connected { peer });
    }

    fn deliver_request(&mut self, from: usize, peer: PeerId, remote: (usize, PeerId), request: WorkRequest) {
        let (to, at) = remote;
        if !self.nodes[to].alive || !self.nodes[to].links.contains_key(&at) {
            return;
        }
        if self.one_in(self.faults.lose_one_in) {
            return;
        }
        let event = match request.operation {
            Operation::Send { message } => Some(Event::Message { peer: at, message }),
            Operation::Read { into, from: target, rows } => {
                let rows_there = rows.map(|rows| (rows.bytes, rows.remote_stride));
                let slab = self.nodes[to].slab_of(target.slab).cloned();
                let Some(bytes) = slab.and_then(|slab| gather_checked(&slab, target, into.len, rows_there))
                else {
                    self.end_link((from, peer), "remote access error");
                    self.end_link(remote, "a peer named memory that it may not read");
                    return;
                };
                let rows = rows.map(|rows| (rows.bytes, rows.local_stride));
                scatter(into.slot.slab(), into.slot.slot(), into.offset, &bytes, rows);
                None
            }
            Operation::Write { source, target, rows, immediate } => {
                let bytes = match &source {
                    Source::Inline { bytes, len } => Some(bytes[..usize::from(*len)].to_vec()),
                    Source::Slot { slot, offset, len } => {
                        let rows = rows.map(|rows| (rows.bytes, rows.local_stride));
                        gather(slot.slab(), slot.slot(), *offset, *len, rows)
                    }
                };
                let Some(mut bytes) = bytes else {
                    self.end_link((from, peer), "local access error");
                    self.end_link(remote, "the peer disconnected");
                    return;
                };
                let slab = self.nodes[to].slab_of(target.slab).cloned();
                let span = span_of(bytes.len() as u32, rows.map(|rows| (rows.bytes, rows.remote_stride)));
                let is_named = |slab: &Arc<Slab>| {
                    slab.contains(target.slot, target.offset as usize, span)
                        && slab.generation(target.slot) == target.generation
                };
                let Some(slab) = slab.filter(is_named) else {
                    self.end_link((from, peer), "remote access error");
                    self.end_link(remote, "a peer named memory that it may not write");
                    return;
                };
                if !bytes.is_empty() && self.one_in(self.faults.corrupt_one_in) {
                    let at = self.draw() as usize % bytes.len();
                    bytes[at] ^= 0x10;
                }
                let rows = rows.map(|rows| (rows.bytes, rows.remote_stride));
                scatter(&slab, target.slot, target.offset, &bytes, rows);
                immediate.map(|value| Event::Immediate { peer: at, value })
            }
        };
        self.nodes[to].events.extend(event);
        let Some(link) = self.nodes[from].links.get_mut(&peer) else { return };
        link.posted -= 1;
        if link.in_flight.remove(&request.id) {
            let done = Event::Completed { id: request.id, completion: Completion::Done };
            self.nodes[from].events.push_back(done);
        }
    }

    /// Removes a connection; its requests complete as down, and the node gets an event.
    fn end_link(&mut self, (node, peer): (usize, PeerId), reason: &str) {
        let Some(link) = self.nodes[node].links.remove(&peer) else { return };
        let half_closed: Vec<_> = self.half_closed.extract_if(|_, remote| *remote == (node, peer)).collect();
        let is_of =
            |end: (usize, PeerId)| end == (node, peer) || half_closed.iter().any(|(ghost, _)| *ghost == end);
        self.packets
            .retain(|_, (from, at, packet)| !is_of((*from, *at)) || matches!(packet, Packet::Down(_)));
        self.tell_end((node, peer), link, reason);
    }

    fn tell_end(&mut self, (node, peer): (usize, PeerId), link: Link, reason: &str) {
        let events = &mut self.nodes[node].events;
        events.extend(
            link.in_flight.into_iter().map(|id| Event::Completed { id, completion: Completion::PeerDown }),
        );
        events.push_back(Event::PeerDown { peer, reason: reason.to_owned() });
    }
}

/// Returns the distance from the first to the last byte that `len` bytes in rows of (bytes, stride) touch.
fn span_of(len: u32, rows: Option<(u32, u32)>) -> usize {
    match rows {
        Some((bytes, stride)) if len > 0 => ((len / bytes - 1) * stride + bytes) as usize,
        _ => len as usize,
    }
}

/// Reads the bytes of a slot; `None` when they lie in the memory of a device that is gone.
fn gather(slab: &Slab, slot: u32, offset: u32, len: u32, rows: Option<(u32, u32)>) -> Option<Vec<u8>> {
    let (row, stride) = rows.unwrap_or((len.max(1), len));
    let mut bytes = vec![0; len as usize];
    for (number, chunk) in bytes.chunks_mut(row as usize).enumerate() {
        let at = offset as usize + number * stride as usize;
        match slab.device() {
            Some(device) => device.read(slot as usize * slab.layout().stride() + at, chunk).ok()?,
            None => slab.read(slot, at, chunk),
        }
    }
    Some(bytes)
}

fn gather_checked(slab: &Slab, from: Target, len: u32, rows: Option<(u32, u32)>) -> Option<Vec<u8>> {
    let fits = slab.contains(from.slot, from.offset as usize, span_of(len, rows));
    (fits && slab.generation(from.slot) == from.generation)
        .then(|| gather(slab, from.slot, from.offset, len, rows))
        .flatten()
}

/// Writes the bytes of a slot. A write to the memory of a device that is gone is lost.
fn scatter(slab: &Slab, slot: u32, offset: u32, bytes: &[u8], rows: Option<(u32, u32)>) {
    let (row, stride) = rows.unwrap_or((bytes.len().max(1) as u32, bytes.len() as u32));
    for (number, chunk) in bytes.chunks(row as usize).enumerate() {
        let at = offset as usize + number * stride as usize;
        match slab.device() {
            Some(device) => _ = device.write(slot as usize * slab.layout().stride() + at, chunk),
            None => slab.write(slot, at, chunk),
        }
    }
}

impl Fabric for SimFabric {
    fn name(&self) -> &'static str {
        self.name
    }

    fn shown_slab(&self, kind: SlabKind) -> Option<Arc<Slab>> {
        self.state.borrow().nodes[self.node].slab_of(kind).cloned()
    }

    fn carries(&self, slab: &Arc<Slab>) -> bool {
        slab.kind() == SlabKind::Host || self.state.borrow().nodes[self.node].is_direct
    }

    fn peer_shows(&self, peer: PeerId, kind: SlabKind) -> bool {
        let state = self.state.borrow();
        let remote = state.nodes[self.node].links.get(&peer).map(|link| link.remote.0);
        remote.and_then(|node| state.nodes.get(node)).is_some_and(|node| node.slab_of(kind).is_some())
    }

    fn connect(&mut self, address: &str) -> Result<PeerId, ConnectError> {
        let bad = |reason: &str| ConnectError::Address {
            fabric: "sim",
            address: address.to_owned(),
            reason: reason.to_owned(),
        };
        let to: usize = address.parse().map_err(|_| bad("not a node number"))?;
        let mut state = self.state.borrow_mut();
        let peer = PeerId(state.next_peer);
        state.next_peer += 1;
        let link =
            Link { remote: (to, PeerId(0)), in_flight: BTreeSet::new(), posted: 0, last_delivery: [0; 2] };
        state.nodes[self.node].links.insert(peer, link);
        state.send(self.node, peer, Packet::Connect);
        Ok(peer)
    }

    fn post(&mut self, request: WorkRequest) -> Result<(), Full> {
        let mut state = self.state.borrow_mut();
        let depth = state.faults.queue_depth_max;
        if !state.nodes[self.node].alive {
            return Err(Full(request));
        }
        let Some(link) = state.nodes[self.node].links.get_mut(&request.peer) else {
            return Err(Full(request));
        };
        if link.posted >= depth {
            return Err(Full(request));
        }
        link.posted += 1;
        if request.id != 0 {
            link.in_flight.insert(request.id);
        }
        let peer = request.peer;
        state.send(self.node, peer, Packet::Request(request));
        Ok(())
    }

    fn flush(&mut self) {}

    fn poll(&mut self, budget: usize, events: &mut Vec<Event>) -> usize {
        let mut state = self.state.borrow_mut();
        let queue = &mut state.nodes[self.node].events;
        let count = queue.len().min(budget);
        events.extend(queue.drain(..count));
        count
    }

    fn disconnect(&mut self, peer: PeerId) {
        let mut state = self.state.borrow_mut();
        let Some(remote) = state.nodes[self.node].links.get(&peer).map(|link| link.remote) else { return };
        state.end_link((self.node, peer), "disconnected by this node");
        state.end_link(remote, "the peer disconnected");
    }

    fn wait_descriptors<'a>(&'a self, _descriptors: &mut Vec<BorrowedFd<'a>>) {}
}

impl Drop for SimFabric {
    fn drop(&mut self) {
        self.state.borrow_mut().kill(self.node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Pair, conformance, pool};

    #[test]
    fn conforms_to_the_contract() {
        conformance(&mut || {
            let network = SimNetwork::new(11, Faults { delay_ticks_max: 5, ..Faults::default() });
            let (pool_a, pool_b) = (pool("a"), pool("b"));
            let a = network.add_node(Arc::clone(pool_a.slab()));
            let b = network.add_node(Arc::clone(pool_b.slab()));
            Pair {
                a: Some(Box::new(a)),
                b: Some(Box::new(b)),
                pool_a,
                pool_b,
                address_of_b: "1".to_owned(),
                tick: Box::new(move || network.advance(1)),
            }
        });
    }

    #[test]
    fn equal_seeds_give_equal_runs() {
        let run = |seed| {
            let network = SimNetwork::new(
                seed,
                Faults { delay_ticks_max: 9, lose_one_in: 3, reorder: true, ..Faults::default() },
            );
            let (pool_a, pool_b) = (pool("a"), pool("b"));
            let mut a = network.add_node(Arc::clone(pool_a.slab()));
            let mut b = network.add_node(Arc::clone(pool_b.slab()));
            let peer = a.connect("1").expect("address");
            network.advance(20);
            for id in 1..40_u8 {
                let message = vec![id].into_boxed_slice();
                let operation = Operation::Send { message };
                let request = WorkRequest { id: id.into(), peer, priority: Priority::Urgent, operation };
                a.post(request).expect("room");
            }
            network.advance(40);
            let mut events = Vec::new();
            b.poll(100, &mut events);
            events
        };
        assert_eq!(run(5), run(5));
        assert_ne!(run(5), run(6), "the seed must matter");
        assert!(run(5).len() < 40, "something was lost");
    }
}
