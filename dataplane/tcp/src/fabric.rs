//! The fabric of one node, driven by one thread. `connecting` makes sessions, `post` takes requests, `reap`
//! handles completions, `close` ends sessions.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use dataplane_fabric::handshake::{HandshakeEvent, Handshakes};
use dataplane_fabric::{ConnectError, Event, Fabric, Full, PeerId, Priority, WorkRequest};
use dataplane_memory::{Slab, SlabKind};

use crate::connecting::handshakes;
use crate::connection::Connection;
use crate::ring::Ring;
use crate::session::Session;
use crate::table::Table;
use crate::{TcpConfig, TcpCounters, TcpError, socket};

/// Capacity of the event queue; `reap` stops earlier, so that the queue does not grow.
const EVENTS_CAPACITY: usize = 8192;

/// Transport between hosts over TCP.
pub struct TcpFabric {
    // The ring is dropped before the memory that its operations name.
    pub(crate) ring: Ring,
    pub(crate) slab: Arc<Slab>,
    pub(crate) config: TcpConfig,
    pub(crate) counters: Arc<TcpCounters>,
    pub(crate) listening_on: Option<SocketAddr>,
    pub(crate) connections: Table<Connection>,
    pub(crate) sessions: Table<Session>,
    /// Connections that may have frames to send, by lane.
    pub(crate) dirty: [Vec<u32>; Priority::ALL.len()],
    pub(crate) events: VecDeque<Event>,
    pub(crate) handshakes: Handshakes,
    /// Buffer for events of the handshakes; empty between two polls.
    pub(crate) handshake_events: Vec<HandshakeEvent>,
    /// Number of sessions of which some connections are missing.
    pub(crate) joining: usize,
}

impl TcpFabric {
    /// Creates a node. Peers may write into and read from `slab`, which lies in host memory, as
    /// [`TcpConfig::access`] allows. With an address, peers can connect to it there (port 0: see
    /// [`TcpFabric::listening_on`]). The thread that first flushes or polls the fabric must also be the one
    /// that drives and drops it.
    pub fn new(slab: Arc<Slab>, listen: Option<SocketAddr>, config: TcpConfig) -> Result<Self, TcpError> {
        let problems = config.problems();
        if !problems.is_empty() {
            return Err(TcpError::Config { problems });
        }
        if slab.device().is_some() {
            return Err(TcpError::DeviceMemory);
        }
        let counters = Arc::new(TcpCounters::default());
        let mut ring = Ring::new(Arc::clone(&counters))?;
        ring.register(config.zero_copy_from.map(|_| &*slab), config.connections_max());
        let system = |operation: String| move |error| TcpError::System { operation, error };
        let listener = listen.map(|address| {
            let failed = |errno: rustix::io::Errno| system(format!("listen on {address}"))(errno.into());
            socket::listener(&address, &config).map_err(failed)
        });
        let listener = listener.transpose()?;
        let name = listener.as_ref().and_then(|listener| rustix::net::getsockname(listener).ok());
        let listening_on = name.and_then(|name| SocketAddr::try_from(name).ok());
        let handshakes = handshakes(&config, listener).map_err(system("make handshakes".to_owned()))?;
        let mut fabric = Self {
            ring,
            slab,
            counters,
            listening_on,
            connections: Table::new(config.connections_max()),
            sessions: Table::new(config.peers_max),
            dirty: [Vec::new(), Vec::new()],
            events: VecDeque::with_capacity(EVENTS_CAPACITY),
            handshakes,
            handshake_events: Vec::new(),
            joining: 0,
            config,
        };
        fabric.watch_handshakes();
        Ok(fabric)
    }

    /// Returns the address that peers connect to.
    #[must_use]
    pub fn listening_on(&self) -> Option<SocketAddr> {
        self.listening_on
    }

    /// Returns the counters, which another thread may keep and read.
    #[must_use]
    pub fn counters(&self) -> Arc<TcpCounters> {
        Arc::clone(&self.counters)
    }

    fn enter(&mut self) {
        assert!(self.ring.enter(), "the thread that first drove this fabric must drive it always");
    }
}

impl Fabric for TcpFabric {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn shown_slab(&self, kind: SlabKind) -> Option<Arc<Slab>> {
        (kind == SlabKind::Host && self.config.access.allows_writes()).then(|| Arc::clone(&self.slab))
    }

    fn carries(&self, slab: &Arc<Slab>) -> bool {
        slab.kind() == SlabKind::Host
    }

    fn peer_shows(&self, _peer: PeerId, kind: SlabKind) -> bool {
        kind == SlabKind::Host
    }

    fn connect(&mut self, address: &str) -> Result<PeerId, ConnectError> {
        self.start_session(address)
    }

    fn post(&mut self, request: WorkRequest) -> Result<(), Full> {
        self.take_request(request)
    }

    fn flush(&mut self) {
        self.arm_sends();
        if self.ring.has_work() {
            self.enter();
        }
    }

    /// Enters the kernel at most once per call.
    fn poll(&mut self, budget: usize, events: &mut Vec<Event>) -> usize {
        self.reap(budget);
        self.arm_sends();
        if self.ring.has_work() {
            self.enter();
            self.reap(budget);
        }
        let count = self.events.len().min(budget);
        events.extend(self.events.drain(..count));
        count
    }

    fn disconnect(&mut self, peer: PeerId) {
        if let Some(session) = self.sessions.find(peer.0) {
            self.close_session(session, "disconnected by this node");
        }
    }

    fn wait_descriptors<'a>(&'a self, descriptors: &mut Vec<BorrowedFd<'a>>) {
        descriptors.push(self.ring.descriptor());
    }

    fn prepare_wait(&mut self) -> bool {
        self.flush();
        self.events.is_empty() && self.ring.prepare_sleep()
    }
}
