//! The public fabric. The steps of connections are in `connections.rs`. One thread drives it.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_fabric::auth::Transport;
use dataplane_fabric::{
    Completion, ConnectError, Event, Fabric, Full, MESSAGE_BYTES_MAX, Operation, PeerAccess, PeerId,
    WorkRequest,
};
use dataplane_memory::{CopyDone, DeviceError, DeviceSharing, EXPORT_BYTES_MAX, Slab, SlabKind, SlabLayout};
use dataplane_shm::{ShmConfig, ShmError, ShmFabric};

use crate::IpcCounters;
use crate::attach::AttachThread;
use crate::peer::{Peer, Stage};
use crate::wire::{Hello, Message};

/// Time limit for attaching a peer's slab, on both sides together.
const ATTACH_WITHIN: Duration = Duration::from_secs(10);
/// Retry interval of a peer whose ring was full: no event reports that it has room again.
const RING_RECHECK: Duration = Duration::from_millis(1);
/// Time limit of a node's drop for its own copies and for those of its peers into its memory.
const DROP_PATIENCE: Duration = Duration::from_millis(500);

/// A failure to create a node.
#[derive(Debug, thiserror::Error)]
pub enum IpcError {
    /// Shared memory failed: the rings and sockets.
    #[error(transparent)]
    Shm(#[from] ShmError),
    /// The driver cannot export the device's memory to other processes.
    #[error("the device's memory cannot be shared between processes: {0}")]
    Export(DeviceError),
    /// The thread that attaches slabs could not be started.
    #[error("the thread that attaches device memory: {0}")]
    Thread(std::io::Error),
}

/// Transport between processes of one host over shared device memory.
pub struct IpcFabric {
    /// First field, so dropped first: joins the thread, after which no peer's slab is attached.
    pub(crate) attaching: AttachThread,
    sharing: Arc<dyn DeviceSharing>,
    pub(crate) shm: ShmFabric,
    pub(crate) hello: Hello,
    access: PeerAccess,
    pub(crate) peers: HashMap<PeerId, Peer>,
    /// Largest number of peers, including those whose end is awaited, which shared memory has forgotten.
    pub(crate) peers_max: usize,
    open_within: Duration,
    /// Peers that have queued requests or are leaving.
    pub(crate) busy: Vec<PeerId>,
    /// Number of peers with a deadline.
    pub(crate) opening: usize,
    pub(crate) orphans: usize,
    from_shm: Vec<Event>,
    pub(crate) events: VecDeque<Event>,
    pub(crate) done: Vec<CopyDone>,
    pub(crate) counters: Arc<IpcCounters>,
}

impl IpcFabric {
    /// Creates a node whose peers may access the slab of `sharing`, unless [`ShmConfig::access`] forbids it.
    /// With an address (a path, or `@name`), peers can connect to the node there.
    ///
    /// Blocks for milliseconds, and starts a thread.
    ///
    /// # Errors
    /// [`IpcError::Export`] when the driver cannot export the memory, [`IpcError::Shm`] when the address
    /// cannot be bound or a setting is out of its range, [`IpcError::Thread`].
    pub fn new(
        sharing: Arc<dyn DeviceSharing>,
        listen: Option<&str>,
        config: ShmConfig,
    ) -> Result<Self, IpcError> {
        let access = config.access;
        let nothing = SlabLayout { slot_bytes: 0, slot_count: 0 };
        let mut hello = Hello { layout: nothing, exported: Vec::new() };
        if access.allows_writes() {
            let exported = sharing.export().map_err(IpcError::Export)?;
            assert!(exported.len() <= EXPORT_BYTES_MAX, "a name of {} bytes", exported.len());
            hello = Hello { layout: sharing.slab().layout(), exported };
        }
        let (peers_max, open_within) = (config.connections_max, config.handshake_timeout + ATTACH_WITHIN);
        let shm = ShmFabric::rings_only(Transport::CudaIpc, listen, config)?;
        Ok(Self {
            attaching: AttachThread::start(Arc::clone(&sharing)).map_err(IpcError::Thread)?,
            sharing,
            shm,
            hello,
            access,
            peers: HashMap::new(),
            peers_max,
            open_within,
            busy: Vec::new(),
            opening: 0,
            orphans: 0,
            from_shm: Vec::new(),
            events: VecDeque::new(),
            done: Vec::new(),
            counters: Arc::default(),
        })
    }

    /// Returns the counters of this node.
    #[must_use]
    pub fn counters(&self) -> &Arc<IpcCounters> {
        &self.counters
    }

    pub(crate) fn insert(&mut self, id: PeerId, is_initiator: bool) {
        let deadline = Instant::now() + self.open_within;
        self.peers.insert(id, Peer::new(id, is_initiator, deadline));
        self.opening += 1;
        self.publish_peer_count();
    }
}

impl Fabric for IpcFabric {
    fn name(&self) -> &'static str {
        "cuda_ipc"
    }

    /// A copy engine does not check generations; ranges are checked here, at the sender.
    fn checks_generations(&self) -> bool {
        false
    }

    fn shown_slab(&self, kind: SlabKind) -> Option<Arc<Slab>> {
        (kind == SlabKind::Device && self.access.allows_writes()).then(|| Arc::clone(self.sharing.slab()))
    }

    fn carries(&self, slab: &Arc<Slab>) -> bool {
        self.sharing.carries(slab)
    }

    fn peer_shows(&self, peer: PeerId, kind: SlabKind) -> bool {
        kind == SlabKind::Device && self.peers.get(&peer).is_some_and(|peer| !peer.slots().is_empty())
    }

    /// One byte less than the rings carry: the kind of the message.
    fn message_bytes_max(&self) -> usize {
        MESSAGE_BYTES_MAX - 1
    }

    fn connect(&mut self, address: &str) -> Result<PeerId, ConnectError> {
        if self.peers.len() >= self.peers_max {
            return Err(ConnectError::TooMany { fabric: "cuda_ipc", limit: self.peers_max });
        }
        let id = self.shm.connect(address)?;
        self.insert(id, true);
        Ok(id)
    }

    fn post(&mut self, request: WorkRequest) -> Result<(), Full> {
        let Some(peer) = self.peers.get_mut(&request.peer) else { return Err(Full(request)) };
        let lane = request.priority.index();
        if peer.stage != Stage::Open || !peer.lanes[lane].has_room() {
            return Err(Full(request));
        }
        if let Err(reason) = peer.allows(&request.operation) {
            if request.id != 0 {
                let (id, completion) = (request.id, Completion::PeerDown);
                self.events.push_back(Event::Completed { id, completion });
            }
            self.leave(request.peer, reason);
            return Ok(());
        }
        let WorkRequest { id, peer: to, operation, .. } = request;
        let operation = match operation {
            Operation::Send { message } => {
                assert!(message.len() < MESSAGE_BYTES_MAX, "a message of {} bytes", message.len());
                Operation::Send { message: Message::User(message).encode() }
            }
            other => other,
        };
        peer.lanes[lane].push(id, operation);
        self.mark_busy(to);
        Ok(())
    }

    fn flush(&mut self) {
        self.advance();
        self.shm.flush();
    }

    fn poll(&mut self, budget: usize, events: &mut Vec<Event>) -> usize {
        let mut from_shm = std::mem::take(&mut self.from_shm);
        // Events that were not handed out yet come first.
        self.shm.poll(budget.saturating_sub(self.events.len()), &mut from_shm);
        from_shm.drain(..).for_each(|event| self.handle_shm_event(event));
        self.from_shm = from_shm;
        self.take_done();
        self.advance();
        self.shm.flush();
        if self.opening > 0 {
            self.expire();
        }
        if self.orphans > 0 {
            self.end_orphans();
        }
        let count = self.events.len().min(budget);
        events.extend(self.events.drain(..count));
        count
    }

    fn disconnect(&mut self, peer: PeerId) {
        self.leave(peer, "disconnected by this node");
        self.advance();
    }

    fn wait_descriptors<'a>(&'a self, descriptors: &mut Vec<BorrowedFd<'a>>) {
        self.shm.wait_descriptors(descriptors);
        descriptors.push(self.attaching.descriptor());
        if self.orphans > 0 {
            let orphans = self.peers.values().filter(|peer| peer.stage == Stage::Orphaned);
            descriptors.extend(orphans.filter_map(|peer| peer.process.as_ref()).map(AsFd::as_fd));
        }
    }

    /// False while copies are in flight: the end of a copy wakes no sleeper.
    fn prepare_wait(&mut self) -> bool {
        self.flush();
        self.attaching.clear();
        self.take_done();
        let has_copies = self.peers.values().any(|peer| peer.copies_in_flight() > 0);
        !has_copies && self.events.is_empty() && self.shm.prepare_wait()
    }

    fn next_deadline(&self) -> Option<Instant> {
        let opening = self.peers.values().filter_map(|peer| peer.deadline);
        let room = (!self.busy.is_empty()).then(|| Instant::now() + RING_RECHECK);
        opening.chain(room).chain(self.shm.next_deadline()).min()
    }
}

impl Drop for IpcFabric {
    /// Waits, for at most half a second, until both sides have said goodbye. Until then this node's copies
    /// write to peers' memory, and peers' copies to its memory, which the owner may free afterwards. A slab
    /// that peers may still write to is never freed.
    fn drop(&mut self) {
        // No further peer is admitted.
        self.peers_max = 0;
        let ids: Vec<PeerId> = self.peers.keys().copied().collect();
        ids.iter().for_each(|&id| self.leave(id, "the node is going down"));
        let deadline = Instant::now() + DROP_PATIENCE;
        while !self.peers.is_empty() && Instant::now() < deadline {
            self.poll(usize::MAX, &mut Vec::new());
            std::thread::yield_now();
        }
        if self.peers.values().any(Peer::may_write) {
            std::mem::forget(Arc::clone(&self.sharing));
        }
    }
}
