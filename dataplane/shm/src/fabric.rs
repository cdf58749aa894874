//! The shared-memory fabric and its interface to the owner. Driven by one thread.
//!
//! Hot path: `post`, `flush` and `poll` with open connections. A one-sided operation takes effect in
//! `post`; its completion waits for `poll`. Unsignalled operations leave no state behind. No allocation, no
//! lock; one system call for a flush to a sleeping peer. Connections are made and ended in `greeting.rs`,
//! receiving is in `poll.rs`.

use std::collections::VecDeque;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use dataplane_fabric::auth::{Protocol, Transport};
use dataplane_fabric::handshake::{HandshakeConfig, HandshakeEvent, Handshakes};
use dataplane_fabric::{
    Completion, ConnectError, Event, Fabric, Full, HOST_MEMORY_ONLY, MESSAGE_BYTES_MAX, Operation,
    PeerAccess, PeerId, Priority, WorkRequest,
};
use dataplane_memory::{PageSize, Slab, SlabKind, SlabLayout};

use crate::connection::{Access, State};
use crate::doorbell::Doorbell;
use crate::metrics::Sums;
use crate::table::Table;
use crate::{ShmConfig, ShmCounters, ShmError, address, hello, peer};

/// Most completions that wait for `poll`; beyond it `post` returns full.
const COMPLETIONS_MAX: usize = 4096;
/// Bytes copied between two polls after which `post` returns `Full`. The last request is copied whole, so
/// the excess is at most its length: without this limit, one caller with many writes would keep the thread
/// from polling.
const COPIED_BYTES_MAX: usize = 192 << 10;

/// Most accepted sockets that are not authenticated yet.
const UNAUTHENTICATED_MAX: usize = 64;

/// Fabric over memory that the processes of one host share.
pub struct ShmFabric {
    pub(crate) config: ShmConfig,
    /// Slab handed to peers: the node's own, or an empty one.
    pub(crate) shown: Arc<Slab>,
    pub(crate) doorbell: Doorbell,
    pub(crate) handshakes: Handshakes,
    /// Events of the handshakes; empty between two polls.
    pub(crate) handshake_events: Vec<HandshakeEvent>,
    listening_at: Option<String>,
    pub(crate) table: Table,
    /// Connections with records to publish.
    dirty: Vec<PeerId>,
    pub(crate) completions: VecDeque<(u64, Completion)>,
    /// Bytes copied since the last poll.
    pub(crate) copied_bytes: usize,
    /// Reports of connections made and ended: at most two for each.
    pub(crate) notices: VecDeque<Event>,
    /// Connections in [`State::Ended`].
    pub(crate) ended: usize,
    pub(crate) polls: u32,
    /// Whether `prepare_wait` has announced a sleep and no `poll` has followed.
    pub(crate) announced: bool,
    pub(crate) sums: Sums,
    pub(crate) counters: Arc<ShmCounters>,
}

/// Makes the slab of a node that shows its peers no memory: the handshake requires one.
fn empty_slab() -> Result<Slab, ShmError> {
    Ok(Slab::create("nothing", SlabLayout { slot_bytes: 64, slot_count: 1 }, PageSize::Standard)?)
}

impl ShmFabric {
    /// Creates a node whose peers may write into and read from `slab`, which lies in host memory, unless
    /// [`ShmConfig::access`] restricts it. With a `listen` address (a path, or `@name`), peers can connect
    /// to the node there.
    ///
    /// # Errors
    /// [`ShmError`].
    pub fn new(slab: Arc<Slab>, listen: Option<&str>, config: ShmConfig) -> Result<Self, ShmError> {
        if slab.device().is_some() {
            return Err(ShmError::DeviceMemory);
        }
        let shown = if config.access.allows_writes() { slab } else { Arc::new(empty_slab()?) };
        Self::over(shown, Transport::Shm, listen, config)
    }

    /// Creates a node without slots, for a transport that moves blocks in another way: messages and
    /// immediates only. Its peers are of the same transport.
    ///
    /// # Errors
    /// [`ShmError`].
    pub fn rings_only(
        transport: Transport,
        listen: Option<&str>,
        config: ShmConfig,
    ) -> Result<Self, ShmError> {
        let config = ShmConfig { access: PeerAccess::None, ..config };
        Self::over(Arc::new(empty_slab()?), transport, listen, config)
    }

    fn over(
        shown: Arc<Slab>,
        transport: Transport,
        listen: Option<&str>,
        config: ShmConfig,
    ) -> Result<Self, ShmError> {
        config.validate()?;
        let counters = Arc::<ShmCounters>::default();
        let doorbell = Doorbell::create()?;
        let handshakes = HandshakeConfig {
            protocol: Protocol { transport, versions: config.versions },
            key: config.key.clone(),
            frame_bytes: hello::MAGIC.len(),
            descriptors: Some(hello::DESCRIPTORS),
            timeout: config.handshake_timeout,
            unauthenticated_max: UNAUTHENTICATED_MAX,
        };
        let listener = listen.map(address::listen).transpose()?;
        let handshakes = Handshakes::new(handshakes, listener).map_err(ShmError::Socket)?;
        Ok(Self {
            shown,
            doorbell,
            handshakes,
            handshake_events: Vec::new(),
            listening_at: listen.map(str::to_owned),
            table: Table::new(config.connections_max),
            dirty: Vec::with_capacity(config.connections_max),
            completions: VecDeque::with_capacity(COMPLETIONS_MAX),
            copied_bytes: 0,
            notices: VecDeque::with_capacity(2 * config.connections_max),
            ended: 0,
            polls: 0,
            announced: false,
            sums: Sums::default(),
            counters,
            config,
        })
    }

    /// Returns the counters of this node.
    #[must_use]
    pub fn counters(&self) -> &Arc<ShmCounters> {
        &self.counters
    }

    /// Returns a descriptor that becomes readable when the peer's process has ended and all its descriptors
    /// are closed; `None` when the connection is over or the system provides none.
    #[must_use]
    pub fn peer_pidfd(&self, peer: PeerId) -> Option<OwnedFd> {
        let connection = self.table.iter().find(|connection| connection.peer == peer)?;
        peer::pidfd(self.handshakes.socket(connection.socket_id)?, connection.pid)
    }

    /// Queues an immediate without a write; false when the queue to that peer is full or the peer is gone.
    /// Delivered in the order of posting, like every other request.
    pub fn post_immediate(&mut self, peer: PeerId, priority: Priority, value: u32) -> bool {
        let Some(remote) = self.table.get_mut(peer).and_then(|connection| connection.remote.as_mut()) else {
            return false;
        };
        let is_pushed = remote.outbound.push_immediate(priority.index(), value);
        if is_pushed && !std::mem::replace(&mut remote.dirty, true) {
            self.dirty.push(peer);
        }
        is_pushed
    }

    pub(crate) fn level_connections(&self) {
        self.counters.connections.store(self.table.len() as u64, Ordering::Relaxed);
    }

    /// Refuses a request that the peer's memory does not allow: nothing is copied, and the connection ends.
    #[cold]
    fn refuse(&mut self, request: &WorkRequest, reason: &str) {
        // Earlier requests are reported as done, so they must be published to the peer first.
        self.flush();
        if request.id != 0 {
            self.completions.push_back((request.id, Completion::PeerDown));
        }
        if let Some(connection) = self.table.get_mut(request.peer) {
            connection.start_closing(&self.handshakes, reason);
        }
    }
}

impl Fabric for ShmFabric {
    fn name(&self) -> &'static str {
        "shm"
    }

    fn shown_slab(&self, kind: SlabKind) -> Option<Arc<Slab>> {
        (kind == SlabKind::Host && self.config.access.allows_writes()).then(|| Arc::clone(&self.shown))
    }

    fn carries(&self, slab: &Arc<Slab>) -> bool {
        slab.kind() == SlabKind::Host
    }

    fn peer_shows(&self, _peer: PeerId, kind: SlabKind) -> bool {
        kind == SlabKind::Host
    }

    fn mapped_slab(&self, peer: PeerId) -> Option<Arc<Slab>> {
        self.table.get(peer)?.remote.as_ref().map(|remote| Arc::clone(&remote.slab))
    }

    fn connect(&mut self, address: &str) -> Result<PeerId, ConnectError> {
        if self.table.is_full() {
            return Err(ConnectError::TooMany { fabric: "shm", limit: self.config.connections_max });
        }
        self.start_connection(address).map_err(|error| ConnectError::System {
            fabric: "shm",
            address: address.to_owned(),
            error: match error {
                ShmError::System { errno, .. } => errno.into(),
                other => std::io::Error::other(other),
            },
        })
    }

    fn post(&mut self, request: WorkRequest) -> Result<(), Full> {
        if self.completions.len() >= COMPLETIONS_MAX {
            return Err(Full(request));
        }
        let Some(connection) = self.table.get_mut(request.peer) else { return Err(Full(request)) };
        let Some(remote) = &mut connection.remote else { return Err(Full(request)) };
        let lane = request.priority.index();
        let bytes = match &request.operation {
            Operation::Write { source, .. } => source.len(),
            Operation::Read { into, .. } => into.len as usize,
            Operation::Send { .. } => 0,
        };
        if !request.operation.is_between_hosts() {
            self.refuse(&request, HOST_MEMORY_ONLY);
            return Ok(());
        }
        if bytes > 0 && self.copied_bytes >= COPIED_BYTES_MAX {
            return Err(Full(request));
        }
        let access = match &request.operation {
            Operation::Write { source, target, rows, immediate } => {
                if immediate.is_some() && !remote.outbound.has_room(lane, 0) {
                    return Err(Full(request));
                }
                self.copied_bytes += bytes;
                let access = remote.write(source, target, rows.as_ref());
                self.sums.writes += 1;
                self.sums.bytes += source.len() as u64;
                if let (Access::Done, Some(value)) = (access, *immediate) {
                    let pushed = remote.outbound.push_immediate(lane, value);
                    assert!(pushed, "room was checked and we are the only producer");
                    if !std::mem::replace(&mut remote.dirty, true) {
                        self.dirty.push(request.peer);
                    }
                }
                access
            }
            Operation::Read { into, from, rows } => {
                self.copied_bytes += bytes;
                self.sums.reads += 1;
                self.sums.bytes += u64::from(into.len);
                remote.read(into, from, rows.as_ref())
            }
            Operation::Send { message } => {
                assert!(message.len() <= MESSAGE_BYTES_MAX, "a message of {} bytes", message.len());
                if !remote.outbound.push_message(lane, message) {
                    return Err(Full(request));
                }
                self.sums.messages += 1;
                if !std::mem::replace(&mut remote.dirty, true) {
                    self.dirty.push(request.peer);
                }
                Access::Done
            }
        };
        match access {
            Access::Done if request.id == 0 => {}
            Access::Done => self.completions.push_back((request.id, Completion::Done)),
            Access::Stale => {
                self.refuse(&request, "remote access error: a slot that was reused since it was named");
            }
            Access::Outside => {
                self.refuse(&request, "remote access error: bytes outside of a slot, or rows that overlap");
            }
        }
        Ok(())
    }

    fn flush(&mut self) {
        for peer in self.dirty.drain(..) {
            let remote = self.table.get_mut(peer).and_then(|connection| connection.remote.as_mut());
            if let Some(remote) = remote {
                remote.dirty = false;
                if remote.outbound.publish() {
                    remote.doorbell.ring(&self.counters);
                }
            }
        }
        self.sums.publish(&self.counters);
    }

    fn poll(&mut self, budget: usize, events: &mut Vec<Event>) -> usize {
        self.receive(budget, events)
    }

    fn disconnect(&mut self, peer: PeerId) {
        const REASON: &str = "disconnected by this node";
        let Some(connection) = self.table.get_mut(peer) else { return };
        match connection.state {
            // The peer was not told of a slot yet, so it cannot write.
            State::Greeting => self.drop_connection(peer, REASON),
            State::Open => {
                // Earlier requests must arrive before the end.
                self.flush();
                if let Some(connection) = self.table.get_mut(peer) {
                    connection.start_closing(&self.handshakes, REASON);
                }
            }
            State::Closing | State::Ended => {}
        }
    }

    fn wait_descriptors<'a>(&'a self, descriptors: &mut Vec<BorrowedFd<'a>>) {
        descriptors.extend([self.doorbell.eventfd(), self.handshakes.descriptor()]);
    }

    fn prepare_wait(&mut self) -> bool {
        self.doorbell.announce();
        // The check of the rings must follow the announcement: see `word.rs`.
        let idle = self.copied_bytes < COPIED_BYTES_MAX
            && self.completions.is_empty()
            && self.notices.is_empty()
            && self.table.iter().all(|connection| !connection.delivers() || connection.inbound.is_empty());
        if !idle {
            self.doorbell.retract();
        }
        self.announced = idle;
        idle
    }
}

impl Drop for ShmFabric {
    fn drop(&mut self) {
        if let Some(address) = &self.listening_at {
            address::remove(address);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use dataplane_fabric::testing::{Pair, conformance, pool};

    use super::*;

    fn conforms(address: impl Fn(u32) -> String) {
        static ROUND: AtomicU32 = AtomicU32::new(0);
        conformance(&mut || {
            let address = address(ROUND.fetch_add(1, Ordering::Relaxed));
            let (pool_a, pool_b) = (pool("a"), pool("b"));
            let config = ShmConfig { ring_bytes: 256 << 10, ..ShmConfig::default() };
            let a = ShmFabric::new(Arc::clone(pool_a.slab()), None, config).expect("a");
            let b =
                ShmFabric::new(Arc::clone(pool_b.slab()), Some(&address), ShmConfig::default()).expect("b");
            Pair {
                a: Some(Box::new(a)),
                b: Some(Box::new(b)),
                pool_a,
                pool_b,
                address_of_b: address,
                tick: Box::new(|| {}),
            }
        });
    }

    #[test]
    fn conforms_to_the_contract_at_a_path() {
        let folder = std::env::temp_dir();
        conforms(|round| {
            folder.join(format!("kvasir-shm-{}-{round}", std::process::id())).display().to_string()
        });
    }

    #[test]
    fn conforms_to_the_contract_at_an_abstract_name() {
        conforms(|round| format!("@kvasir-shm-{}-{round}", std::process::id()));
    }
}
