//! The RDMA fabric: posts, polls and flushes. Driven by one thread.
//!
//! Hot path: `post` checks the range and moves the request into a queue; `flush` posts each lane's work
//! with one doorbell; `poll` reads completions from memory. No allocation, no lock, and no system call
//! except one `epoll_wait` every [`CONTROL_EVERY`] polls and after each sleep, which detects events of the
//! sockets.
//!
//! The end of connections is in `teardown.rs`, connections and their handshake in `control.rs`.

use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use dataplane_fabric::auth::{Protocol, Transport};
use dataplane_fabric::handshake::{HandshakeConfig, HandshakeEvent, Handshakes};
use dataplane_fabric::{
    Completion, ConnectError, Event, Fabric, Full, MESSAGE_BYTES_MAX, PeerAccess, PeerId, Priority,
    WorkRequest,
};
use dataplane_memory::{Slab, SlabKind};

use crate::VerbsError;
use crate::commands::CommandThread;
use crate::completion::POLL_BATCH;
use crate::config::VerbsConfig;
use crate::connection::{Connection, Phase};
use crate::device::Device;
use crate::ffi;
use crate::lane::PumpResources;
use crate::local::FabricResources;
use crate::memory_region::Registration;
use crate::metrics::{Metrics, VerbsCounters};
use crate::numbers::NumberMap;
use crate::post::PostArray;
use crate::sockets;
use crate::translate::translate;
use crate::watch::EpollSet;
use crate::wire::{HANDSHAKE_BYTES, SEGMENT_HEADER_BYTES, Segment};

/// Polls between two checks of the sockets.
const CONTROL_EVERY: u32 = 32;
/// Pending events at which no more completions are taken from the device.
const PENDING_EVENTS_MAX: usize = 4096;

/// The peer and the lane that own a queue pair.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Route {
    pub(crate) peer: u64,
    pub(crate) lane: usize,
}

/// RDMA fabric on one device, for the peers that the device's networks reach.
#[derive(Debug)]
pub struct VerbsFabric {
    // Dropped in this order: connections destroy their pairs before the memory that the pairs name is freed.
    pub(crate) connections: NumberMap<u64, Box<Connection>>,
    pub(crate) routes: NumberMap<u32, Route>,
    pub(crate) local: FabricResources,
    pub(crate) array: PostArray,
    pub(crate) commands: CommandThread,
    pub(crate) control: EpollSet,
    pub(crate) handshakes: Handshakes,
    /// Events of the handshakes; empty between two polls.
    pub(crate) handshake_events: Vec<HandshakeEvent>,
    pub(crate) events: VecDeque<Event>,
    /// Peers whose lanes have something to post.
    pub(crate) busy: Vec<u64>,
    pub(crate) metrics: Metrics,
    pub(crate) random: fastrand::Rng,
    counters: Arc<VerbsCounters>,
    /// Number of connections that are not established: only these have deadlines to check.
    pub(crate) establishing: usize,
    /// The error that made the device unusable; every later call returns it.
    pub(crate) fatal: Option<String>,
    pub(crate) polls_until_control: u32,
    /// Whether the completion queue was armed and has not raised its event yet.
    is_armed: bool,
    /// Whether the thread may have slept since the last poll.
    has_slept: bool,
    completions: Box<[ffi::WorkCompletion; POLL_BATCH]>,
}

impl VerbsFabric {
    /// Creates a node on `device` whose peers may read and write the slots of `slab` (as
    /// [`VerbsConfig::access`] says), in this machine's memory or in an accelerator's that the card can
    /// reach ([`VerbsFabric::registration`]). With a `listen` address, peers can connect to the node there
    /// (port 0: see [`VerbsFabric::listening_on`]). The fabric takes the device's asynchronous events: no
    /// two fabrics share an opened device.
    pub fn new(
        device: Arc<Device>,
        slab: &Arc<Slab>,
        listen: Option<SocketAddr>,
        config: VerbsConfig,
    ) -> Result<Self, VerbsError> {
        let local = FabricResources::new(device, slab, config)?;
        let array =
            PostArray::new(local.batch_max(), local.entries_max(), local.config.inline_bytes as usize);
        let commands = CommandThread::start(local.device.name())?;
        let handshakes = HandshakeConfig {
            protocol: Protocol { transport: Transport::Rdma, versions: local.config.versions },
            key: local.config.key.clone(),
            frame_bytes: HANDSHAKE_BYTES,
            descriptors: None,
            timeout: local.config.handshake_timeout,
            unauthenticated_max: local.config.handshakes_max,
        };
        let listener = listen.map(sockets::listen).transpose()?;
        let failed = |error| VerbsError::System { operation: "make handshakes".to_owned(), error };
        let handshakes = Handshakes::new(handshakes, listener).map_err(failed)?;
        let control = EpollSet::new(&local, &commands, &handshakes)?;
        let connections_max = local.config.connections_max;
        let mut connections = NumberMap::default();
        connections.reserve(connections_max);
        let mut routes = NumberMap::default();
        routes.reserve(2 * connections_max);
        Ok(Self {
            connections,
            routes,
            local,
            array,
            commands,
            control,
            handshakes,
            handshake_events: Vec::new(),
            events: VecDeque::with_capacity(2 * PENDING_EVENTS_MAX),
            busy: Vec::with_capacity(connections_max),
            metrics: Metrics::default(),
            // A seed that nobody outside can guess: fastrand's own comes from the time.
            random: fastrand::Rng::with_seed(RandomState::new().hash_one(1)),
            counters: Arc::default(),
            establishing: 0,
            fatal: None,
            polls_until_control: 0,
            is_armed: false,
            has_slept: false,
            completions: Box::new([ffi::WorkCompletion::default(); POLL_BATCH]),
        })
    }

    /// Returns the address that peers connect to.
    #[must_use]
    pub fn listening_on(&self) -> Option<SocketAddr> {
        let name = rustix::net::getsockname(self.handshakes.listener()?).ok()?;
        SocketAddr::try_from(name).ok()
    }

    /// Returns the device of the fabric.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        &self.local.device
    }

    /// Registers another slab, so that its slots can be sources of writes and destinations of reads. Slow,
    /// because pages are pinned: call it at start-up. A request that names a slot of an unregistered slab
    /// ends its connection.
    pub fn register(&mut self, slab: &Arc<Slab>) -> Result<(), VerbsError> {
        self.local.register(slab, PeerAccess::None).map(|_| ())
    }

    /// Registers another slab whose slots peers may read and write, like the slots of the fabric's own
    /// slab. Call it before the first connection: peers learn of a slab when they connect.
    ///
    /// # Panics
    /// If the slab is registered, a slab of its kind is shown already, or there are connections.
    pub fn show(&mut self, slab: &Arc<Slab>) -> Result<(), VerbsError> {
        assert!(self.connections.is_empty(), "peers are told of a slab as they connect");
        let is_new = self.shown_slab(slab.kind()).is_none() && self.registration(slab).is_none();
        assert!(is_new, "peers know a slab by its kind, and one of this kind is shown");
        self.local.register(slab, self.local.config.access).map(|_| ())
    }

    /// Returns the way in which the card reaches a slab; `None` when the slab is not registered here.
    #[must_use]
    pub fn registration(&self, slab: &Arc<Slab>) -> Option<Registration> {
        self.local.region_of(slab).map(|index| self.local.regions[index].registration())
    }

    /// Returns the registered slabs, the fabric's own first, with the way in which the card reaches each.
    pub fn registrations(&self) -> impl Iterator<Item = (&Arc<Slab>, Registration)> {
        self.local.regions.iter().filter_map(|region| region.slab().map(|slab| (slab, region.registration())))
    }

    /// Returns the counters since start and the current gauges.
    #[must_use]
    pub fn metrics(&self) -> Metrics {
        Metrics {
            queue_pairs_open: self.routes.len() as u64,
            registered_bytes: self.local.registered_bytes(),
            dma_buf_bytes: self.local.bytes_by(Registration::DmaBuf),
            peer_memory_bytes: self.local.bytes_by(Registration::PeerMemory),
            ..self.metrics
        }
    }

    /// Returns the counters that other threads can read.
    #[must_use]
    pub fn counters(&self) -> &Arc<VerbsCounters> {
        &self.counters
    }

    /// Returns the number of connections, those in the handshake or draining included.
    #[must_use]
    pub fn connection_count(&self) -> usize {
        self.connections.len()
    }

    /// Posts the pending work of all lanes, urgent before background: one doorbell for each lane with work.
    fn pump(&mut self) {
        if self.busy.is_empty() {
            return;
        }
        let mut busy = std::mem::take(&mut self.busy);
        for lane in Priority::ALL {
            for &peer in &busy {
                self.pump_lane(peer, lane);
            }
        }
        busy.retain(|peer| {
            let Some(connection) = self.connections.get_mut(peer) else { return false };
            connection.is_listed = connection.phase == Phase::Established && connection.has_work();
            connection.is_listed
        });
        // Round robin: the first peer of this pass is last in the next one, since send slots may run out.
        if let Some(first) = (busy.len() > 1).then(|| busy.remove(0)) {
            busy.push(first);
        }
        busy.append(&mut self.busy);
        self.busy = busy;
    }

    fn pump_lane(&mut self, peer: u64, priority: Priority) {
        let Some(connection) = self.connections.get_mut(&peer) else { return };
        let lane = &mut connection.lanes[priority.index()];
        if connection.phase != Phase::Established || !lane.has_work() {
            return;
        }
        // Background lanes leave a quarter of the shared room of the completion queue to urgent lanes.
        let share = if priority == Priority::Background { 4 } else { u64::MAX };
        let most = self.local.outstanding_max - self.local.outstanding_max / share;
        let bounce = &mut self.local.bounce;
        let bounce_count = bounce.slab.layout().slot_count as usize;
        let mut supplies = PumpResources {
            array: &mut self.array,
            regions: &self.local.regions,
            bounce_region: &bounce.region,
            bounce_slab: &bounce.slab,
            bounce_free: &mut bounce.free,
            completion_room: most.saturating_sub(self.metrics.outstanding) as usize,
            bounce_reserve: if priority == Priority::Background { bounce_count / 4 } else { 0 },
            signal_every: self.local.config.signal_every,
            message_bytes_max: connection.message_bytes_max,
            metrics: &mut self.metrics,
        };
        match lane.pump(&mut supplies) {
            Ok(count) => self.metrics.outstanding += count as u64,
            Err(error) => {
                if let VerbsError::Post { accepted, .. } = &error {
                    self.metrics.outstanding += *accepted as u64;
                }
                self.start_teardown(peer, &error.to_string());
            }
        }
    }

    fn take_completion_events(&mut self) {
        if self.is_armed && self.local.completions.take_events() > 0 {
            self.is_armed = false;
        }
    }

    /// Adds a peer to the list of peers with work to post.
    fn list(&mut self, peer: u64) {
        if let Some(connection) = self.connections.get_mut(&peer)
            && !connection.is_listed
        {
            connection.is_listed = true;
            self.busy.push(peer);
        }
    }

    /// Takes about `budget` completions from the device. Returns how many it took.
    pub(crate) fn reap(&mut self, budget: usize) -> usize {
        let mut taken = 0;
        while taken < budget.max(1) && self.events.len() < PENDING_EVENTS_MAX {
            let count = match self.local.completions.poll(&mut self.completions[..]) {
                Ok(count) => count,
                Err(error) => {
                    self.end_all(&error.to_string());
                    break;
                }
            };
            for index in 0..count {
                let completion = self.completions[index];
                self.completed(&completion);
            }
            taken += count;
            if count < POLL_BATCH {
                break;
            }
        }
        match self.local.receives.flush() {
            Ok(posted) => self.metrics.receive_doorbells += u64::from(posted > 0),
            Err(error) => self.end_all(&error.to_string()),
        }
        taken
    }

    fn completed(&mut self, completion: &ffi::WorkCompletion) {
        self.metrics.completions += 1;
        let route = self.routes.get(&completion.queue_pair_number).copied();
        if let Some(buffer) = self.local.receives.buffer_of(completion.id) {
            if let Some(route) = route {
                self.received(route, buffer, completion);
            }
            // The payload of the receive was copied out, or is not needed.
            self.local.receives.repost(buffer);
            return;
        }
        let Some(route) = route else { return };
        let Some(connection) = self.connections.get_mut(&route.peer) else { return };
        let is_done = completion.status == ffi::WC_SUCCESS && !connection.phase.is_end();
        let outcome =
            if completion.status == ffi::WC_SUCCESS { Completion::Done } else { Completion::PeerDown };
        let lane = &mut connection.lanes[route.lane];
        let ended = lane.retire(completion.id, outcome, &mut self.local.bounce.free, &mut self.events);
        self.metrics.outstanding -= ended.unwrap_or(0);
        if !is_done {
            self.send_failed(route.peer, completion);
        }
    }

    fn received(&mut self, route: Route, buffer: u32, completion: &ffi::WorkCompletion) {
        let Route { peer, lane } = route;
        if completion.status != ffi::WC_SUCCESS {
            self.send_failed(peer, completion);
            return;
        }
        // The peer may post as soon as it has this side's `ready`; the peer's own `ready` may still be in
        // transit.
        self.establish_if_readying(peer);
        let Some(connection) = self.connections.get_mut(&peer) else { return };
        if connection.phase != Phase::Established {
            return;
        }
        let id = connection.peer;
        let lane = &mut connection.lanes[lane];
        let event = if completion.opcode == ffi::WC_RECV_RDMA_WITH_IMM {
            lane.count_used_receive()
                .map(|()| Some(Event::Immediate { peer: id, value: u32::from_be(completion.immediate) }))
        } else {
            let mut header = [0; SEGMENT_HEADER_BYTES];
            let receives = &self.local.receives;
            let received = completion.byte_count as usize;
            receives.read(buffer, 0, &mut header);
            Segment::decode(&header, received, MESSAGE_BYTES_MAX).and_then(|segment| {
                lane.earn(segment.credits)?;
                if !segment.carries_message {
                    return Ok(None);
                }
                lane.count_used_receive()?;
                let payload = received - SEGMENT_HEADER_BYTES;
                let copy = |bytes: &mut [u8]| receives.read(buffer, SEGMENT_HEADER_BYTES, bytes);
                let message = lane.assemble(&segment, payload, copy)?;
                Ok(message.map(|message| Event::Message { peer: id, message }))
            })
        };
        match event {
            Ok(event) => self.events.extend(event),
            Err(reason) => self.start_teardown(peer, &format!("protocol error: {reason}")),
        }
        if self.connections.get(&peer).is_some_and(|connection| connection.has_work()) {
            self.list(peer);
        }
    }
}

impl Fabric for VerbsFabric {
    fn name(&self) -> &'static str {
        "rdma"
    }

    fn shown_slab(&self, kind: SlabKind) -> Option<Arc<Slab>> {
        self.local.shown_region(kind)?.slab().cloned()
    }

    fn carries(&self, slab: &Arc<Slab>) -> bool {
        self.local.region_of(slab).is_some()
    }

    fn peer_shows(&self, peer: PeerId, kind: SlabKind) -> bool {
        let slots = self.connections.get(&peer.0).and_then(|connection| connection.slots);
        slots.is_some_and(|slots| slots[kind.index()].slot_count > 0)
    }

    /// A NIC does not know generations; the range is checked at the sender and by the peer's NIC.
    fn checks_generations(&self) -> bool {
        false
    }

    fn connect(&mut self, address: &str) -> Result<PeerId, ConnectError> {
        self.start_connection(address)
    }

    fn post(&mut self, request: WorkRequest) -> Result<(), Full> {
        let peer = request.peer.0;
        let Some(connection) = self.connections.get_mut(&peer) else { return Err(Full(request)) };
        let lane = &mut connection.lanes[request.priority.index()];
        let (Some(slots), true) = (&connection.slots, lane.has_room()) else { return Err(Full(request)) };
        if connection.phase != Phase::Established {
            return Err(Full(request));
        }
        let WorkRequest { id, operation, .. } = request;
        match translate(&self.local, slots, operation) {
            Ok(work) => {
                lane.enqueue(id, work);
                if !std::mem::replace(&mut connection.is_listed, true) {
                    self.busy.push(peer);
                }
            }
            Err(reason) => {
                if id != 0 {
                    self.events.push_back(Event::Completed { id, completion: Completion::PeerDown });
                }
                self.start_teardown(peer, &format!("refused at the sender: {reason}"));
            }
        }
        Ok(())
    }

    fn flush(&mut self) {
        self.pump();
    }

    fn poll(&mut self, budget: usize, events: &mut Vec<Event>) -> usize {
        if std::mem::take(&mut self.has_slept) {
            self.take_completion_events();
        }
        self.reap(budget);
        if self.polls_until_control == 0 {
            self.polls_until_control = CONTROL_EVERY;
            self.check_connections();
        }
        // A connection that began to end meanwhile sets this to 0, so that the next poll handles it.
        self.polls_until_control = self.polls_until_control.saturating_sub(1);
        self.pump();
        if self.polls_until_control == 0 {
            self.counters.show(&self.metrics());
        }
        let count = self.events.len().min(budget);
        events.extend(self.events.drain(..count));
        count
    }

    fn disconnect(&mut self, peer: PeerId) {
        self.start_teardown(peer.0, "disconnected by this node");
    }

    fn wait_descriptors<'a>(&'a self, descriptors: &mut Vec<BorrowedFd<'a>>) {
        descriptors.push(self.control.descriptor());
    }

    /// Arms the completion queue and then polls it once more: a completion that arrived in between would
    /// have raised no event.
    fn prepare_wait(&mut self) -> bool {
        self.pump();
        self.counters.show(&self.metrics());
        self.polls_until_control = 0;
        let is_late = self.set_timer();
        self.has_slept = true;
        self.take_completion_events();
        if !self.is_armed {
            if let Err(error) = self.local.completions.arm() {
                self.end_all(&error.to_string());
            }
            self.is_armed = true;
        }
        let found = self.reap(POLL_BATCH);
        self.pump();
        found == 0 && self.events.is_empty() && !is_late
    }
}
