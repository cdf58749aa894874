//! Fabrics for tests: the simulated one, for one thread, and queues within a process, for two.

use std::collections::{HashMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::{Result, bail};
use dataplane_fabric::sim::{Faults, SimFabric, SimNetwork};
use dataplane_fabric::{
    Completion, ConnectError, Event, Fabric, Full, Operation, PeerId, Source, WorkRequest,
};
use dataplane_memory::{Slab, SlabKind};

use super::{Rails, Unavailable};

/// A simulated fabric whose time advances when it is polled.
struct Ticking {
    inner: SimFabric,
    network: SimNetwork,
}

impl Fabric for Ticking {
    fn name(&self) -> &'static str {
        self.inner.name()
    }
    fn shown_slab(&self, kind: SlabKind) -> Option<Arc<Slab>> {
        self.inner.shown_slab(kind)
    }
    fn carries(&self, slab: &Arc<Slab>) -> bool {
        self.inner.carries(slab)
    }
    fn peer_shows(&self, peer: PeerId, kind: SlabKind) -> bool {
        self.inner.peer_shows(peer, kind)
    }
    fn connect(&mut self, address: &str) -> Result<PeerId, ConnectError> {
        self.inner.connect(address)
    }
    fn post(&mut self, request: WorkRequest) -> Result<(), Full> {
        self.inner.post(request)
    }
    fn flush(&mut self) {
        self.inner.flush();
    }
    fn poll(&mut self, budget: usize, events: &mut Vec<Event>) -> usize {
        self.network.advance(1);
        self.inner.poll(budget, events)
    }
    fn disconnect(&mut self, peer: PeerId) {
        self.inner.disconnect(peer);
    }
    fn wait_descriptors<'a>(&'a self, descriptors: &mut Vec<BorrowedFd<'a>>) {
        self.inner.wait_descriptors(descriptors);
    }
}

thread_local! {
    static NETWORKS: std::cell::RefCell<HashMap<usize, (SimNetwork, usize)>> = std::cell::RefCell::default();
}

/// Simulated networks, one for each rail, of the calling thread: such fabrics cannot leave it.
#[derive(Default)]
pub(super) struct SimRails {
    pub(super) faults: Faults,
}

impl Rails for SimRails {
    fn make(
        &self,
        transport: &str,
        slab: Arc<Slab>,
        _listen: Option<&str>,
        rail: usize,
    ) -> Result<(Box<dyn Fabric>, String)> {
        if transport != "sim" {
            return Err(Unavailable(format!("no {transport} in a simulation")).into());
        }
        NETWORKS.with_borrow_mut(|networks| {
            let fresh = || (SimNetwork::new(rail as u64 + 1, self.faults), 0);
            let (network, nodes) = networks.entry(rail).or_insert_with(fresh);
            let fabric = Ticking { inner: network.add_node(slab), network: network.clone() };
            *nodes += 1;
            Ok((Box::new(fabric) as Box<dyn Fabric>, (*nodes - 1).to_string()))
        })
    }
}

/// Two nodes of one process that copy into each other's slab; they may be on two threads.
#[derive(Default)]
pub(super) struct QueueRails {
    pub(super) addresses: Mutex<HashMap<String, Arc<End>>>,
    next: AtomicU64,
}

#[derive(Default)]
pub(super) struct End {
    slab: Mutex<Option<Arc<Slab>>>,
    events: Mutex<VecDeque<Event>>,
    peer: Mutex<Option<Arc<End>>>,
}

struct Queue<'a> {
    rails: &'a QueueRails,
    end: Arc<End>,
}

const PEER: PeerId = PeerId(1);

impl Drop for Queue<'_> {
    fn drop(&mut self) {
        // The lock is released before the peer's is taken: both may be dropped at the same time.
        let peer = self.end.peer.lock().expect("lock").take();
        if let Some(peer) = peer {
            let down = Event::PeerDown { peer: PEER, reason: "dropped".to_owned() };
            peer.events.lock().expect("lock").push_back(down);
            peer.peer.lock().expect("lock").take();
        }
    }
}

impl Fabric for Queue<'_> {
    fn name(&self) -> &'static str {
        "queue"
    }

    fn shown_slab(&self, kind: SlabKind) -> Option<Arc<Slab>> {
        self.end.slab.lock().expect("lock").clone().filter(|slab| slab.kind() == kind)
    }

    fn carries(&self, slab: &Arc<Slab>) -> bool {
        slab.kind() == SlabKind::Host
    }

    fn peer_shows(&self, _peer: PeerId, kind: SlabKind) -> bool {
        kind == SlabKind::Host
    }

    fn connect(&mut self, address: &str) -> Result<PeerId, ConnectError> {
        let found = self.rails.addresses.lock().expect("lock").get(address).cloned();
        let Some(other) = found else {
            let reason = "nobody listens".to_owned();
            return Err(ConnectError::Address { fabric: "queue", address: address.to_owned(), reason });
        };
        *self.end.peer.lock().expect("lock") = Some(Arc::clone(&other));
        *other.peer.lock().expect("lock") = Some(Arc::clone(&self.end));
        other.events.lock().expect("lock").push_back(Event::Accepted { peer: PEER });
        self.end.events.lock().expect("lock").push_back(Event::Connected { peer: PEER });
        Ok(PEER)
    }

    fn post(&mut self, request: WorkRequest) -> Result<(), Full> {
        let Some(peer) = self.end.peer.lock().expect("lock").clone() else { return Err(Full(request)) };
        let slab = peer.slab.lock().expect("lock").clone().expect("every end has a slab");
        let id = request.id;
        let mut arrived = peer.events.lock().expect("lock");
        if arrived.len() > 100 {
            drop(arrived);
            return Err(Full(request));
        }
        match request.operation {
            Operation::Send { message } => arrived.push_back(Event::Message { peer: PEER, message }),
            Operation::Write { source: Source::Slot { slot, offset, len }, target, rows, immediate } => {
                let rows =
                    rows.map_or((len, len, len), |rows| (rows.bytes, rows.local_stride, rows.remote_stride));
                slab.copy_rows_from(
                    slot.slab(),
                    (slot.slot(), offset as usize),
                    (target.slot, target.offset as usize),
                    (rows.1 as usize, rows.2 as usize),
                    rows.0 as usize,
                    (len / rows.0) as usize,
                );
                arrived.extend(immediate.map(|value| Event::Immediate { peer: PEER, value }));
            }
            Operation::Read { into, from, rows: None } => {
                let to = (into.slot.slot(), into.offset as usize);
                into.slot.slab().copy_from(&slab, (from.slot, from.offset as usize), to, into.len as usize);
            }
            other => panic!("not needed here: {other:?}"),
        }
        drop(arrived);
        if id != 0 {
            let done = Event::Completed { id, completion: Completion::Done };
            self.end.events.lock().expect("lock").push_back(done);
        }
        Ok(())
    }

    fn flush(&mut self) {}

    fn poll(&mut self, budget: usize, events: &mut Vec<Event>) -> usize {
        let mut queue = self.end.events.lock().expect("lock");
        let count = queue.len().min(budget);
        events.extend(queue.drain(..count));
        count
    }

    fn disconnect(&mut self, _peer: PeerId) {}

    fn wait_descriptors<'a>(&'a self, _descriptors: &mut Vec<BorrowedFd<'a>>) {}
}

/// The rails of a test are leaked on purpose, since fabrics need them for `'static`.
impl Rails for &'static QueueRails {
    fn make(
        &self,
        transport: &str,
        slab: Arc<Slab>,
        listen: Option<&str>,
        rail: usize,
    ) -> Result<(Box<dyn Fabric>, String)> {
        if transport == "broken" {
            bail!("this transport never opens");
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let end = Arc::new(End::default());
        *end.slab.lock().expect("lock") = Some(slab);
        let address = match listen {
            Some("any") => format!("queue-{number}-{rail}"),
            Some(given) => given.to_owned(),
            None => String::new(),
        };
        if listen.is_some() {
            self.addresses.lock().expect("lock").insert(address.clone(), Arc::clone(&end));
        }
        Ok((Box::new(Queue { rails: self, end }), address))
    }
}
