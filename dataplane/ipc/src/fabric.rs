//! The fabric: what its owner calls, and the steps of connections. Driven by one thread.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use dataplane_fabric::{
    Completion, ConnectError, DeviceReach, Event, Fabric, Full, MESSAGE_BYTES_MAX, Operation, PeerAccess,
    PeerId, WorkRequest,
};
use dataplane_memory::{
    AttachedSlab, CopyDone, DeviceError, DeviceSharing, EXPORT_BYTES_MAX, MemoryError, PageSize, Slab,
    SlabLayout,
};
use dataplane_shm::{ShmConfig, ShmError, ShmFabric};
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::IpcCounters;
use crate::attach::AttachThread;
use crate::lane::Means;
use crate::peer::{Peer, Stage};
use crate::wire::{Hello, Message};

/// How long a node that goes down waits for its copies.
const DROP_PATIENCE: Duration = Duration::from_secs(5);

/// Why a node cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum IpcError {
    /// The rings and sockets.
    #[error(transparent)]
    Shm(#[from] ShmError),
    /// The slab of nothing that the rings' handshake wants.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The device's memory cannot be given to other processes.
    #[error("the device's memory cannot be shared between processes: {0}")]
    Export(DeviceError),
    /// The thread that attaches slabs.
    #[error("the thread that attaches device memory: {0}")]
    Thread(std::io::Error),
}

/// Device memory of the processes of one host.
pub struct IpcFabric {
    /// Dropped first: it joins its thread, which has nobody's slab then.
    attaching: AttachThread,
    sharing: Arc<dyn DeviceSharing>,
    shm: ShmFabric,
    hello: Hello,
    access: PeerAccess,
    peers: HashMap<PeerId, Peer>,
    /// Peers whose lanes have something, or that leave.
    busy: Vec<PeerId>,
    orphans: usize,
    attachments: usize,
    from_shm: Vec<Event>,
    events: VecDeque<Event>,
    done: Vec<CopyDone>,
    counters: Arc<IpcCounters>,
}

impl IpcFabric {
    /// A node whose peers may reach the slab that `sharing` gives, unless [`ShmConfig::access`] says otherwise. With an address (a
    /// path, or `@name`), others can connect to it there.
    ///
    /// # Errors
    /// [`IpcError`].
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
        let layout = SlabLayout { slot_bytes: 64, slot_count: 1 };
        let rings_only = Arc::new(Slab::create("nothing", layout, PageSize::Standard)?);
        let shm = ShmFabric::new(rings_only, listen, ShmConfig { access: PeerAccess::None, ..config })?;
        Ok(Self {
            attaching: AttachThread::start(Arc::clone(&sharing)).map_err(IpcError::Thread)?,
            sharing,
            shm,
            hello,
            access,
            peers: HashMap::new(),
            busy: Vec::new(),
            orphans: 0,
            attachments: 0,
            from_shm: Vec::new(),
            events: VecDeque::new(),
            done: Vec::new(),
            counters: Arc::default(),
        })
    }

    /// What this node has done so far.
    #[must_use]
    pub fn counters(&self) -> &Arc<IpcCounters> {
        &self.counters
    }

    fn list(&mut self, id: PeerId) {
        if let Some(peer) = self.peers.get_mut(&id)
            && !std::mem::replace(&mut peer.is_listed, true)
        {
            self.busy.push(id);
        }
    }

    /// Tells the peer something; false when its ring is full.
    fn say(&mut self, id: PeerId, message: Message) -> bool {
        let request = WorkRequest::message(id, message.encode());
        let is_said = self.shm.post(request).is_ok();
        self.shm.flush();
        is_said
    }

    /// Begins the end of a connection: nothing more is begun.
    fn leave(&mut self, id: PeerId, reason: &str) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        if peer.stage.is_end() {
            return;
        }
        if peer.stage == Stage::Connecting {
            // Its end is told by shared memory.
            return self.shm.disconnect(id);
        }
        reason.clone_into(&mut peer.reason);
        peer.stage = Stage::Leaving;
        for lane in &mut peer.lanes {
            lane.give_up(&mut self.events);
        }
        self.list(id);
    }

    fn refuse(&mut self, id: PeerId, reason: &str) {
        IpcCounters::add(&self.counters.refused_peers, 1);
        tracing::info!(reason, "a peer's device memory is out of reach");
        self.leave(id, reason);
    }

    /// A connection whose copies are over says goodbye.
    fn go_on_leaving(&mut self, id: PeerId) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        if peer.stage != Stage::Leaving || peer.copies_in_flight() > 0 {
            return;
        }
        for lane in &mut peer.lanes {
            lane.end(&mut self.events);
        }
        if !self.say(id, Message::Goodbye) {
            return;
        }
        let Some(peer) = self.peers.get_mut(&id) else { return };
        peer.stage = Stage::Left;
        self.close_if_both_left(id);
    }

    fn close_if_both_left(&mut self, id: PeerId) {
        if let Some(peer) = self.peers.get_mut(&id)
            && peer.stage == Stage::Left
            && peer.has_said_goodbye
        {
            peer.stage = Stage::Closing;
            self.shm.disconnect(id);
        }
    }

    fn take_from_shm(&mut self, event: Event) {
        match event {
            Event::Connected { peer } => self.greet(peer),
            Event::Accepted { peer } => {
                self.peers.insert(peer, Peer::new(peer, false));
                self.level_peers();
                self.greet(peer);
            }
            Event::Completed { .. } => self.events.push_back(event),
            Event::Immediate { peer, .. } => {
                self.open_if_waiting(peer);
                if self.is_open(peer) {
                    self.events.push_back(event);
                }
            }
            Event::Message { peer, message } => match Message::decode(message) {
                Ok(message) => self.heard(peer, message),
                Err(reason) => self.leave(peer, &format!("protocol error: {reason}")),
            },
            Event::PeerDown { peer, reason } => self.shm_is_down(peer, &reason),
        }
    }

    fn is_open(&self, id: PeerId) -> bool {
        self.peers.get(&id).is_some_and(|peer| peer.stage == Stage::Open)
    }

    /// Shared memory is connected: this side says what it gives.
    fn greet(&mut self, id: PeerId) {
        let process = self.shm.peer_pidfd(id);
        let Some(peer) = self.peers.get_mut(&id) else { return };
        if peer.stage.is_end() {
            return;
        }
        peer.stage = Stage::Greeting;
        peer.process = process;
        if peer.process.is_none() {
            return self
                .refuse(id, "the end of its process could not be awaited (Linux 6.5, or one PID namespace)");
        }
        let hello = self.hello.clone();
        if !self.say(id, Message::Hello(hello)) {
            self.leave(id, "its ring has no room for a hello");
        }
    }

    fn heard(&mut self, id: PeerId, message: Message) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        match (message, peer.stage) {
            (Message::Goodbye, _) => {
                peer.has_said_goodbye = true;
                self.leave(id, "the peer closed the connection");
                self.close_if_both_left(id);
            }
            // What comes late, of a peer that does not know yet.
            (_, stage) if stage.is_end() => {}
            (Message::Hello(hello), Stage::Greeting) if hello.exported.is_empty() => {
                peer.stage = Stage::Waiting;
                self.say_ready(id);
            }
            (Message::Hello(hello), Stage::Greeting) => {
                peer.stage = Stage::Attaching;
                self.attachments += 1;
                self.attaching.attach(id, hello);
            }
            (Message::Ready, Stage::Waiting) => self.open_if_waiting(id),
            // The peer was faster.
            (Message::Ready, Stage::Attaching) => peer.is_ready = true,
            (Message::Ready, Stage::Open) => {}
            (Message::User(message), Stage::Waiting | Stage::Open) => {
                self.open_if_waiting(id);
                self.events.push_back(Event::Message { peer: id, message });
            }
            _ => self.leave(id, "protocol error: a message out of its order"),
        }
    }

    fn say_ready(&mut self, id: PeerId) {
        if !self.say(id, Message::Ready) {
            self.leave(id, "its ring has no room");
        }
    }

    /// The peer has attached our slab, as it said or as what it sends shows.
    fn open_if_waiting(&mut self, id: PeerId) {
        let Some(peer) = self.peers.get_mut(&id).filter(|peer| peer.stage == Stage::Waiting) else { return };
        peer.stage = Stage::Open;
        peer.is_announced = true;
        let is_initiator = peer.is_initiator;
        self.events.push_back(match is_initiator {
            true => Event::Connected { peer: id },
            false => Event::Accepted { peer: id },
        });
    }

    /// Shared memory has ended. Without a goodbye, a copy of the peer may be under way until its process has ended.
    fn shm_is_down(&mut self, id: PeerId, reason: &str) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        if peer.reason.is_empty() {
            reason.clone_into(&mut peer.reason);
        }
        for lane in &mut peer.lanes {
            lane.give_up(&mut self.events);
        }
        let was_attached = !matches!(peer.stage, Stage::Connecting);
        let may_write = was_attached && !peer.has_said_goodbye && !self.hello.exported.is_empty();
        peer.stage = Stage::Orphaned;
        if !may_write {
            peer.process = None;
        }
        self.orphans += 1;
        self.end_orphans();
    }

    /// Ends the connections of peers that are gone, when nothing is under way in either direction.
    fn end_orphans(&mut self) {
        let is_over = |peer: &Peer| {
            let is_gone = peer.process.as_ref().is_none_or(has_ended);
            peer.stage == Stage::Orphaned && peer.copies_in_flight() == 0 && is_gone
        };
        let over: Vec<PeerId> =
            self.peers.iter().filter(|(_, peer)| is_over(peer)).map(|(&id, _)| id).collect();
        for id in over {
            self.orphans -= 1;
            let Some(mut peer) = self.peers.remove(&id) else { continue };
            for lane in &mut peer.lanes {
                lane.end(&mut self.events);
            }
            peer.slots.clear();
            if let Some(attached) = peer.attached.take() {
                self.attaching.detach(attached);
            }
            if peer.is_announced {
                self.events.push_back(Event::PeerDown { peer: id, reason: peer.reason });
            }
            self.level_peers();
        }
    }

    fn level_peers(&self) {
        self.counters.peers.store(self.peers.len() as u64, Ordering::Relaxed);
    }

    fn take_attached(&mut self) {
        if self.attachments == 0 {
            return;
        }
        let is_dead = self.attaching.is_dead();
        let attached: Vec<_> = self.attaching.take().collect();
        self.attachments -= attached.len();
        for (id, result) in attached {
            self.attached(id, result);
        }
        if is_dead && self.attachments > 0 {
            self.attachments = 0;
            let waiting = self.peers.iter().filter(|(_, peer)| peer.stage == Stage::Attaching);
            let waiting: Vec<PeerId> = waiting.map(|(&id, _)| id).collect();
            waiting.into_iter().for_each(|id| self.refuse(id, "the thread that attaches memory has ended"));
        }
    }

    fn attached(&mut self, id: PeerId, result: Result<AttachedSlab, DeviceError>) {
        let peer = self.peers.get_mut(&id).filter(|peer| peer.stage == Stage::Attaching);
        match (peer, result) {
            (Some(peer), Ok(attached)) => {
                peer.take_slab(attached);
                peer.stage = Stage::Waiting;
                let is_ready = peer.is_ready;
                self.say_ready(id);
                if is_ready {
                    self.open_if_waiting(id);
                }
            }
            (Some(_), Err(error)) => {
                self.refuse(id, &format!("its device's memory cannot be attached: {error}"));
            }
            // The connection ended meanwhile.
            (None, Ok(attached)) => self.attaching.detach(attached),
            (None, Err(_)) => {}
        }
    }

    /// One look at every peer with requests, or that leaves.
    fn advance(&mut self) {
        let busy = std::mem::take(&mut self.busy);
        for id in busy {
            let Some(peer) = self.peers.get_mut(&id) else { continue };
            peer.is_listed = false;
            peer.poll_copies(&mut self.done);
            if peer.stage.is_end() {
                self.go_on_leaving(id);
            } else if let Err(reason) = self.advance_lanes(id) {
                IpcCounters::add(&self.counters.failed_copies, 1);
                self.leave(id, &reason);
            }
            let is_busy = |peer: &Peer| peer.has_requests() || peer.stage == Stage::Leaving;
            if self.peers.get(&id).is_some_and(is_busy) {
                self.list(id);
            }
        }
    }

    fn advance_lanes(&mut self, id: PeerId) -> Result<(), String> {
        let Some(peer) = self.peers.get_mut(&id) else { return Ok(()) };
        for lane in &mut peer.lanes {
            let mut means = Means { shm: &mut self.shm, events: &mut self.events, slots: &peer.slots };
            let progress = lane.advance(&mut means)?;
            IpcCounters::add(&self.counters.copies, progress.copies);
            IpcCounters::add(&self.counters.bytes, progress.bytes);
            if let Some(attached) = &mut peer.attached {
                lane.begin(attached, &peer.slots)?;
            }
        }
        Ok(())
    }
}

fn has_ended(process: impl AsFd) -> bool {
    let mut polled = [PollFd::new(&process, PollFlags::IN)];
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut polled, Some(&at_once)).is_ok_and(|ready| ready > 0)
}

impl Fabric for IpcFabric {
    fn name(&self) -> &'static str {
        "cuda_ipc"
    }

    /// A copy engine knows no generations; ranges are checked here, at the sender.
    fn checks_generations(&self) -> bool {
        false
    }

    fn reaches_device_memory(&self) -> bool {
        true
    }

    fn shown_slab(&self) -> Option<Arc<Slab>> {
        self.access.allows_writes().then(|| Arc::clone(self.sharing.slab()))
    }

    fn device_reach(&self, slab: &Arc<Slab>) -> DeviceReach {
        match (Arc::ptr_eq(slab, self.sharing.slab()), self.access.allows_writes()) {
            (true, true) => DeviceReach::Peers,
            (true, false) => DeviceReach::Local,
            (false, _) => DeviceReach::None,
        }
    }

    /// A byte less than the rings take: the kind of the message.
    fn message_bytes_max(&self) -> usize {
        MESSAGE_BYTES_MAX - 1
    }

    fn connect(&mut self, address: &str) -> Result<PeerId, ConnectError> {
        let id = self.shm.connect(address)?;
        self.peers.insert(id, Peer::new(id, true));
        self.level_peers();
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
        self.list(to);
        Ok(())
    }

    fn flush(&mut self) {
        self.advance();
        self.shm.flush();
    }

    fn poll(&mut self, budget: usize, events: &mut Vec<Event>) -> usize {
        let mut from_shm = std::mem::take(&mut self.from_shm);
        self.shm.poll(budget, &mut from_shm);
        from_shm.drain(..).for_each(|event| self.take_from_shm(event));
        self.from_shm = from_shm;
        self.take_attached();
        self.advance();
        self.shm.flush();
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

    /// Nobody rings when a copy ends, or when a peer's ring has room again.
    fn prepare_wait(&mut self) -> bool {
        self.flush();
        let has_copies = self.peers.values().any(|peer| peer.copies_in_flight() > 0);
        self.busy.is_empty() && !has_copies && self.events.is_empty() && self.shm.prepare_wait()
    }

    fn next_deadline(&self) -> Option<Instant> {
        self.shm.next_deadline()
    }
}

impl Drop for IpcFabric {
    /// Copies that are under way write to peers: each hears of the end when its last is over.
    fn drop(&mut self) {
        let ids: Vec<PeerId> = self.peers.keys().copied().collect();
        ids.iter().for_each(|&id| self.leave(id, "the node is going down"));
        let deadline = Instant::now() + DROP_PATIENCE;
        while !self.busy.is_empty() && Instant::now() < deadline {
            self.advance();
            self.shm.flush();
            std::thread::yield_now();
        }
        for (_, mut peer) in self.peers.drain() {
            peer.slots.clear();
            if let Some(attached) = peer.attached.take() {
                self.attaching.detach(attached);
            }
        }
    }
}
