//! Several rails to one peer as one connection.
//!
//! A peer's address is a list (`rdma:10.0.0.7:7471,rdma:10.0.1.7:7472,tcp:10.0.0.7:7400`), best first. All
//! of its links are made at once; the best transport of those that are up and reach the memory on both
//! sides carries the bytes, cut into slices that go to the rail with the earliest expected completion, by
//! the measured pace of each. The other links stand by. When a rail fails, at submit or at completion, its
//! slices are posted again on another rail, without an effect on the user. The failed rail is tried again
//! in the background, with growing, jittered waits.
//!
//! Two mechanisms make that safe. *Fencing*: a write of a dead link may still be in transit, and must not
//! land after the same bytes came over another link and their slot was reused. So writes are posted again
//! only when the peer has confirmed that nothing can arrive over the old link any more, and only those
//! whose event it has not delivered. *Numbering*: messages and immediates are numbered by lane, follow the
//! writes before them by markers on each link ([`lane`]), are kept until acknowledged and sent again over
//! another link if need be; the receiver delivers each number once, in order, when the markers have
//! arrived.
//!
//! Rails may reach different memory: copy engines a device's, sockets the host's, network cards both. Slots
//! of a kind may be named to a peer once a link that shows this kind is up ([`Fabric::is_shown_to`]).
//! Slices whose memory no link reaches any more block their lane for one second, and then end the peer.
//!
//! A peer with one link needs neither: its requests pass through unchanged, behind one hello.
//!
//! Driven by one thread; time comes from the clock that is passed in. The pass-through allocates nothing;
//! slices and events of a bonded peer do.

mod arrivals;
mod counters;
mod events;
mod lane;
mod link;
mod links;
mod peer;
mod posting;
mod pump;
mod wire;

use std::collections::{HashMap, VecDeque};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_fabric::auth::keyed_sequence;
use dataplane_fabric::{
    ConnectError, Event, Fabric, Full, MESSAGE_BYTES_MAX, Operation, PeerId, WorkRequest,
};
use dataplane_memory::{Slab, SlabKind};

pub use counters::BondCounters;
use counters::{Paces, RailCounts};
use lane::Slice;
use peer::Peer;
use wire::{FRAME_BYTES, Frame};

use crate::pieces::bytes_of;

/// Bit that marks completion ids of the bond's own requests; users' ids do not have it.
const SLICE_BIT: u64 = 1 << 62;
/// Time that a connection has to send its hello, and then to receive its welcome.
const GREET_WITHIN: Duration = Duration::from_secs(5);
/// Time that a peer has to confirm that a link is fenced.
const FENCE_WITHIN: Duration = Duration::from_secs(5);
/// A connection that this node makes is reported once its links reach every kind of memory that this node
/// shows, or this long after the first link is up.
const LINKS_WITHIN: Duration = Duration::from_millis(500);
/// Time that slices wait for a link that reaches their memory, while other links are up.
const REACH_WITHIN: Duration = Duration::from_secs(1);
/// Interval at which the end of a link is sent again to a peer that has not confirmed it.
const LINK_DOWN_RESEND_AFTER: Duration = Duration::from_millis(250);
/// Most accepted connections that have not sent a hello.
const AWAITING_HELLO_MAX: usize = 1024;
/// Most links of one peer.
pub const LINKS_MAX: usize = 16;
/// Delay after which posting to a full rail is retried.
const RETRY_FULL_AFTER: Duration = Duration::from_millis(1);

/// Settings of a bond.
#[derive(Debug, Clone, Copy)]
pub struct BondConfig {
    /// Largest slice of a request, in bytes, for a peer with several links.
    pub slice_bytes: u32,
    /// Most bytes in flight on one link.
    pub link_window_bytes: u64,
    /// First delay before a failed link is tried again, doubled with each failure since a connection lasted
    /// `retry_max`, and shortened by up to a half at random.
    pub retry_first: Duration,
    /// Longest delay before a failed link is tried again.
    pub retry_max: Duration,
    /// Seed of the retry jitter and of session names. Outside tests it must be unguessable.
    pub seed: u64,
}

impl Default for BondConfig {
    fn default() -> Self {
        Self {
            slice_bytes: 256 << 10,
            link_window_bytes: 4 << 20,
            retry_first: Duration::from_millis(100),
            retry_max: Duration::from_secs(5),
            seed: 1,
        }
    }
}

/// One transport of this node.
pub struct Rail<F> {
    /// The transport.
    pub fabric: F,
    /// Rank of the transport, lower is better: of the links that are up, those with the lowest rank carry
    /// the bytes.
    pub rank: u8,
}

/// A slice that is posted to a rail.
#[derive(Debug)]
struct InFlightSlice {
    peer: PeerId,
    lane: usize,
    inner: (usize, PeerId),
    link: usize,
    slice: Slice,
    bytes: u64,
    /// Bytes in flight on the link when the slice was posted, its own included.
    ahead: u64,
    posted_at: Instant,
}

/// The posted slices, and the completion id of the next one.
struct PostedSlices<'a> {
    in_flight: &'a mut HashMap<u64, InFlightSlice>,
    next: &'a mut u64,
}

/// A connection of a rail that belongs to a peer.
#[derive(Debug)]
struct RailConnection {
    peer: PeerId,
    link: usize,
    connection: u32,
    /// Slices that failed when the connection ended.
    failed: Vec<(usize, Slice)>,
}

/// Several transports used as one. See the module's documentation.
pub struct Bond<F> {
    rails: Vec<Rail<F>>,
    config: BondConfig,
    clock: Box<dyn Fn() -> Instant + Send>,
    peers: HashMap<PeerId, Peer>,
    inners: HashMap<(usize, PeerId), RailConnection>,
    /// Accepted connections without a hello, with the time of their acceptance.
    awaiting_hello: HashMap<(usize, PeerId), Instant>,
    sessions: HashMap<u64, PeerId>,
    in_flight: HashMap<u64, InFlightSlice>,
    next_peer: u64,
    next_slice: u64,
    random: fastrand::Rng,
    counters: Arc<BondCounters>,
    paces: Paces,
    out: VecDeque<Event>,
    scratch: Vec<Event>,
    /// Peers with requests to post.
    dirty: Vec<PeerId>,
    has_backlog: bool,
    /// Time at which [`Self::expire`] must check all peers: a deadline passes, or state that deadlines
    /// depend on has changed.
    expires_at: Option<Instant>,
    /// Index of the rail that the next poll serves first.
    first_rail: usize,
    names_drawn: u64,
}

impl<F: Fabric> Bond<F> {
    /// Creates a bond over these rails, at most 255. `clock` returns the time.
    ///
    /// # Panics
    ///
    /// If two rails let peers write into different slabs of one kind: a slot that is named to a peer may be
    /// written over either.
    pub fn new(rails: Vec<Rail<F>>, config: BondConfig, clock: Box<dyn Fn() -> Instant + Send>) -> Self {
        assert!(rails.len() < 256, "the rail index is one byte");
        for kind in SlabKind::ALL {
            let mut shown = rails.iter().filter_map(|rail| Some(Arc::as_ptr(&rail.fabric.shown_slab(kind)?)));
            let first = shown.next();
            assert!(shown.all(|slab| Some(slab) == first), "rails show their peers one slab of a kind");
        }
        let counters = Arc::new(BondCounters::new(rails.len()));
        let paces = Paces::new(rails.iter().map(|rail| rail.rank).collect());
        Self {
            rails,
            config,
            clock,
            peers: HashMap::new(),
            inners: HashMap::new(),
            awaiting_hello: HashMap::new(),
            sessions: HashMap::new(),
            in_flight: HashMap::new(),
            next_peer: 1,
            next_slice: SLICE_BIT,
            // Retries show these numbers, and the seed is the key of sessions' names.
            random: fastrand::Rng::with_seed(keyed_sequence(config.seed, u64::MAX)),
            counters,
            paces,
            out: VecDeque::new(),
            scratch: Vec::new(),
            dirty: Vec::new(),
            has_backlog: false,
            expires_at: None,
            first_rail: 0,
            names_drawn: 0,
        }
    }

    /// Returns the counters since start.
    #[must_use]
    pub fn counters(&self) -> &Arc<BondCounters> {
        &self.counters
    }

    fn draw(&mut self) -> u64 {
        self.random.u64(..)
    }

    /// Draws the name of a session or of an accepting node. Knowing its session authenticates a peer, so a
    /// name must not be computable from earlier ones.
    fn draw_name(&mut self) -> u64 {
        self.names_drawn += 1;
        keyed_sequence(self.config.seed, self.names_drawn)
    }

    fn new_peer(&mut self, peer: Peer) -> PeerId {
        let id = PeerId(self.next_peer);
        self.next_peer += 1;
        self.peers.insert(id, peer);
        id
    }

    fn emit(&mut self, event: Event) {
        self.out.push_back(event);
    }

    /// Schedules a check of deadlines after state that they depend on has changed.
    fn deadlines_changed(&mut self, now: Instant) {
        // Never moved later: each poll reads the time before it takes events, so a later `now` would
        // postpone the check each time.
        self.expires_at = Some(self.expires_at.map_or(now, |at| at.min(now)));
    }

    /// Returns the earliest deadline of all peers and of connections without a hello.
    fn earliest_deadline(&self, now: Instant) -> Option<Instant> {
        let awaiting_hello = self.awaiting_hello.values().map(|since| *since + GREET_WITHIN);
        awaiting_hello.chain(self.peers.values().filter_map(|peer| peer.next_deadline(now))).min()
    }

    /// Whether a link of this peer is up that satisfies `fits`.
    fn has_link(&self, id: PeerId, fits: impl Fn(&F, PeerId) -> bool) -> bool {
        let mut links = self.peers.get(&id).into_iter().flat_map(Peer::up_links);
        links.any(|link| fits(&self.rails[link.rail].fabric, link.inner))
    }

    fn mark_dirty(&mut self, id: PeerId) {
        if !self.dirty.contains(&id) {
            self.dirty.push(id);
        }
    }

    fn post_frame(&mut self, rail: usize, inner: PeerId, frame: &Frame<'_>) -> bool {
        self.rails[rail].fabric.post(WorkRequest::message(inner, frame.encode())).is_ok()
    }
}

impl<F: Fabric> Fabric for Bond<F> {
    fn name(&self) -> &'static str {
        "bond"
    }

    fn checks_generations(&self) -> bool {
        self.rails.iter().all(|rail| rail.fabric.checks_generations())
    }

    /// Returns the slab of this kind that rails show; all rails that show one show the same
    /// ([`Bond::new`]). [`Fabric::is_shown_to`] tells whether a link to a given peer is among them.
    fn shown_slab(&self, kind: SlabKind) -> Option<Arc<Slab>> {
        self.rails.iter().find_map(|rail| rail.fabric.shown_slab(kind))
    }

    /// Whether a rail carries the slab. [`Fabric::reaches`] tells whether a link to a given peer does.
    fn carries(&self, slab: &Arc<Slab>) -> bool {
        self.rails.iter().any(|rail| rail.fabric.carries(slab))
    }

    fn is_shown_to(&self, id: PeerId, kind: SlabKind) -> bool {
        self.has_link(id, |fabric, inner| fabric.is_shown_to(inner, kind))
    }

    fn peer_shows(&self, id: PeerId, kind: SlabKind) -> bool {
        self.has_link(id, |fabric, inner| fabric.peer_shows(inner, kind))
    }

    fn mapped_slab(&self, id: PeerId) -> Option<Arc<Slab>> {
        let mut links = self.peers.get(&id).into_iter().flat_map(Peer::up_links);
        links.find_map(|link| self.rails[link.rail].fabric.mapped_slab(link.inner))
    }

    fn reaches(&self, id: PeerId, here: Option<&Arc<Slab>>, there: SlabKind) -> bool {
        self.has_link(id, |fabric, inner| fabric.reaches(inner, here, there))
    }

    fn message_bytes_max(&self) -> usize {
        let rails = self.rails.iter().map(|rail| rail.fabric.message_bytes_max());
        rails.min().unwrap_or(MESSAGE_BYTES_MAX) - FRAME_BYTES
    }

    fn connect(&mut self, address: &str) -> Result<PeerId, ConnectError> {
        let links = self.links_of(address)?;
        let count = links.len();
        let session = self.draw_name();
        let id = self.new_peer(Peer::new(session, None, links));
        let mut first_error = None;
        let now = (self.clock)();
        self.deadlines_changed(now);
        for index in 0..count {
            if let Err(error) = self.connect_link(id, index) {
                self.retry_link(id, index, now);
                first_error.get_or_insert(error);
            }
        }
        let is_begun =
            self.peers.get(&id).is_some_and(|peer| peer.links.iter().any(|link| link.inner.is_some()));
        match first_error {
            Some(error) if !is_begun => {
                self.peers.remove(&id);
                Err(error)
            }
            _ => Ok(id),
        }
    }

    fn post(&mut self, mut request: WorkRequest) -> Result<(), Full> {
        let outside = request.peer;
        let Some(peer) = self.peers.get_mut(&outside).filter(|peer| peer.announced && peer.ending.is_none())
        else {
            return Err(Full(request));
        };
        if peer.is_framed() {
            assert!(request.id & SLICE_BIT == 0, "completion id {:#x} is one of the bond's own", request.id);
            peer.enqueue(request).map_err(Full)?;
            self.mark_dirty(outside);
            return Ok(());
        }
        let Some((rail, inner)) = peer.links.first().and_then(|link| Some((link.rail, link.inner?))) else {
            return Err(Full(request));
        };
        let bytes = match &request.operation {
            Operation::Send { .. } => 0,
            moved => u64::from(bytes_of(moved)),
        };
        request.peer = inner;
        self.rails[rail].fabric.post(request).map_err(|Full(mut request)| {
            request.peer = outside;
            Full(request)
        })?;
        RailCounts::add(&self.counters.rail(rail).bytes, bytes);
        Ok(())
    }

    fn flush(&mut self) {
        if !self.dirty.is_empty() {
            let now = (self.clock)();
            self.pump(now);
        }
        self.rails.iter_mut().for_each(|rail| rail.fabric.flush());
    }

    fn poll(&mut self, budget: usize, events: &mut Vec<Event>) -> usize {
        let mut scratch = std::mem::take(&mut self.scratch);
        let now = (self.clock)();
        let rails = self.rails.len();
        // Round robin: a peer that floods one rail delays the other rails by one poll at most.
        self.first_rail = (self.first_rail + 1) % rails.max(1);
        let first = self.first_rail;
        for rail in (first..rails).chain(0..first) {
            // Takes no more events than this call can return, so that `out` does not grow.
            let room = budget.saturating_sub(self.out.len());
            if room == 0 {
                break;
            }
            self.rails[rail].fabric.poll(room, &mut scratch);
            for event in scratch.drain(..) {
                self.digest(rail, event, now);
            }
        }
        self.scratch = scratch;
        self.expire(now);
        if !self.dirty.is_empty() {
            self.pump(now);
            self.rails.iter_mut().for_each(|rail| rail.fabric.flush());
        }
        let count = self.out.len().min(budget);
        events.extend(self.out.drain(..count));
        count
    }

    fn disconnect(&mut self, id: PeerId) {
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.ending.get_or_insert_with(|| "disconnected by this node".to_owned());
            self.end(id);
            let now = (self.clock)();
            self.deadlines_changed(now);
        }
    }

    fn wait_descriptors<'a>(&'a self, descriptors: &mut Vec<BorrowedFd<'a>>) {
        self.rails.iter().for_each(|rail| rail.fabric.wait_descriptors(descriptors));
    }

    fn prepare_wait(&mut self) -> bool {
        self.flush();
        // Every rail must be prepared, also those after a rail that has work.
        let busy =
            self.rails.iter_mut().filter_map(|rail| (!rail.fabric.prepare_wait()).then_some(())).count();
        busy == 0 && self.out.is_empty()
    }

    fn next_deadline(&self) -> Option<Instant> {
        let rails = self.rails.iter().filter_map(|rail| rail.fabric.next_deadline());
        let backlog = self.has_backlog.then(|| (self.clock)() + RETRY_FULL_AFTER);
        rails.chain(self.expires_at).chain(backlog).min()
    }
}

#[cfg(any(test, feature = "testing"))]
pub(crate) fn fuzz_frame(bytes: &[u8]) {
    if let Some(frame) = Frame::decode(bytes) {
        assert_eq!(&*frame.encode(), bytes, "{frame:?}");
    }
}

#[cfg(test)]
mod tests;
