//! A node that serves its memory: look-ups, leases, reservations, verification. See [`leases`] for when a slot may
//! be reused.
//!
//! Driven by one thread, with time as an argument; [`PoolServer::poll`] does a bounded amount of work: a
//! maximum number of events and of bytes verified. Reads and writes of blocks are one-sided and cost this
//! thread nothing over RDMA or shared memory (over TCP its fabric carries them).

mod blocks;
mod leases;
mod sessions;
mod storing;

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use dataplane_fabric::wait::Notifier;
use dataplane_fabric::{Event, Fabric, PeerId};
use dataplane_memory::{LeaseTable, PartialChecksum};
use kvstore_block::BlockIdentity;

use crate::metrics::{add, set};
use crate::wire::{FoundBlock, Message, VERSION};
use crate::{PoolConfig, PoolCounters, RemoteError};
pub use blocks::{Answer, LookUpResult, PoolBlocks, PoolLevels, Readable, Writable};
use leases::{LeaseName, LeasedBlocks, QuarantinedSlot};
use sessions::Session;
use storing::{Job, PendingCommit, PendingRegistration};

/// Minimum interval between two publications of the levels while there is work: reading them takes the
/// catalog's lock.
const LEVELS_EVERY: Duration = Duration::from_millis(1);

/// A look-up whose blocks are being brought into memory.
struct PendingLookUp {
    /// Client of the look-up. `None` once it has disconnected: the store still works on the look-up, so the
    /// entry counts.
    peer: Option<PeerId>,
    request: u64,
    /// Number of blocks in the request.
    wanted: usize,
}

/// The server of a node's blocks.
pub struct PoolServer<F, B: PoolBlocks> {
    fabric: F,
    config: PoolConfig,
    counters: Arc<PoolCounters>,
    blocks: B,
    leases: LeaseTable<LeaseName, PeerId, LeasedBlocks<B>>,
    next_id: u64,
    /// Lower bound of the next lease expiry.
    next_expiry: Option<Instant>,
    /// Blocks that clients are writing, or that wait to be verified.
    pending: HashSet<BlockIdentity>,
    jobs: VecDeque<Job<B>>,
    /// Look-ups that are answered later, by question number. Each counts as a lease of its client.
    pending_look_ups: HashMap<u64, PendingLookUp>,
    /// Blocks whose registration is answered later, by question number.
    registering: HashMap<u64, PendingRegistration>,
    /// Blocks that clients reported as damaged and that wait to be verified.
    suspected: HashSet<BlockIdentity>,
    verifier: PartialChecksum,
    committing: HashMap<u64, PendingCommit>,
    /// Slots of expired leases, until their client's connection has ended.
    fenced: HashMap<PeerId, Vec<QuarantinedSlot<B>>>,
    sessions: HashMap<PeerId, Session>,
    /// Clients with messages that wait for room in the fabric's queue.
    backlog: Vec<PeerId>,
    /// Kept for its capacity.
    events: Vec<Event>,
    /// Time of the last publication of the levels, and whether they may have changed since.
    published: Option<Instant>,
    is_changed: bool,
}

impl<F: Fabric, B: PoolBlocks> PoolServer<F, B> {
    /// Returns a server of these blocks. `fabric` must be one over their slab.
    pub fn new(
        fabric: F,
        blocks: B,
        config: PoolConfig,
        counters: Arc<PoolCounters>,
    ) -> Result<Self, RemoteError> {
        config.check()?;
        set(&counters.slots, blocks.levels().slots);
        Ok(Self {
            fabric,
            config,
            counters,
            blocks,
            leases: LeaseTable::new(config.leases_max),
            next_id: 1,
            next_expiry: None,
            pending: HashSet::new(),
            jobs: VecDeque::new(),
            pending_look_ups: HashMap::new(),
            registering: HashMap::new(),
            suspected: HashSet::new(),
            verifier: PartialChecksum::default(),
            committing: HashMap::new(),
            fenced: HashMap::new(),
            sessions: HashMap::new(),
            backlog: Vec::new(),
            events: Vec::with_capacity(config.poll_budget),
            published: None,
            is_changed: true,
        })
    }

    /// Makes progress. Returns the amount of work done: zero means that the thread may sleep.
    pub fn poll(&mut self, now: Instant) -> usize {
        self.pump_backlog();
        let mut events = std::mem::take(&mut self.events);
        let mut work = self.fabric.poll(self.config.poll_budget, &mut events);
        for event in events.drain(..) {
            self.digest(event, now);
        }
        self.events = events;
        for _ in 0..self.config.poll_budget {
            let Some(answer) = self.blocks.next_answer() else { break };
            work += 1;
            match answer {
                Answer::Found { question, blocks } => self.found_later(question, blocks, now),
                Answer::Registered { question, is_kept } => self.registered_later(question, is_kept),
            }
        }
        work += self.verify();
        self.expire(now);
        self.fabric.flush();
        self.is_changed |= work > 0;
        let is_due = self.published.is_none_or(|last| now.saturating_duration_since(last) >= LEVELS_EVERY);
        if self.is_changed && (work == 0 || is_due) {
            self.publish_levels();
            (self.published, self.is_changed) = (Some(now), false);
        }
        work
    }

    /// The fabric, to wait on its descriptors.
    pub fn fabric(&self) -> &F {
        &self.fabric
    }

    /// The fabric, to prepare it for a wait.
    pub fn fabric_mut(&mut self) -> &mut F {
        &mut self.fabric
    }

    /// Sets the notifier to call when the blocks have an answer ([`PoolServer::has_answers`]).
    pub fn set_notifier(&mut self, notifier: Arc<Notifier>) {
        self.blocks.set_notifier(notifier);
    }

    /// Whether a delayed answer of the blocks is ready.
    #[must_use]
    pub fn has_answers(&self) -> bool {
        self.blocks.has_answers()
    }

    /// Time at which the next timer is due.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        self.next_expiry.into_iter().chain(self.fabric.next_deadline()).min()
    }

    /// Whether messages wait for room: no event is raised when there is room again.
    #[must_use]
    pub fn has_backlog(&self) -> bool {
        !self.backlog.is_empty()
    }

    /// Whether nothing is leased, reserved, fenced or being verified. For leak checks.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.leases.is_empty()
            && self.fenced.is_empty()
            && self.jobs.is_empty()
            && self.pending_look_ups.is_empty()
            && self.registering.is_empty()
            && self.pending.is_empty()
            && self.committing.is_empty()
    }

    /// Number of blocks in memory that can be found.
    #[must_use]
    pub fn block_count(&self) -> usize {
        self.blocks.levels().blocks
    }

    /// Counters of this server.
    pub fn counters(&self) -> &Arc<PoolCounters> {
        &self.counters
    }

    fn digest(&mut self, event: Event, now: Instant) {
        match event {
            Event::Accepted { peer } | Event::Connected { peer } => {
                self.sessions.insert(peer, Session::default());
            }
            Event::Message { peer, message } => {
                if self.sessions.get(&peer).is_none_or(|session| session.ending) {
                    return;
                }
                let understood =
                    Message::decode(&message).is_some_and(|message| self.dispatch(peer, message, now));
                if understood {
                    return;
                }
                if let Some(version) = Message::other_version(&message) {
                    tracing::warn!(
                        ?peer,
                        "pool: a client speaks version {version} of the pool's protocol and this node {VERSION}: run one release on \
                         engines and pools; closing the connection"
                    );
                    add(&self.counters.other_versions, 1);
                } else {
                    tracing::warn!(?peer, "pool: a malformed or unexpected message; closing the connection");
                    add(&self.counters.violations, 1);
                }
                self.end_session(peer);
            }
            Event::PeerDown { peer, reason } => self.peer_down(peer, &reason),
            // Clients send no immediates, and nothing is posted with an id.
            Event::Immediate { .. } | Event::Completed { .. } => {}
        }
    }

    /// Handles a message. False when it violates the protocol.
    fn dispatch(&mut self, peer: PeerId, message: Message, now: Instant) -> bool {
        match message {
            Message::LookUp { request, chain } => self.look_up(peer, request, &chain, now),
            Message::Release { lease } => self.release(peer, lease),
            Message::Reserve { request, offers } => return self.reserve(peer, request, offers, now),
            Message::Commit { request, written } => return self.commit(peer, request, written),
            Message::Retain { seconds, chain } => {
                self.blocks.retain(&chain, Duration::from_secs(seconds.into()));
            }
            Message::ReportDamaged { chain } => {
                chain.iter().for_each(|identity| self.report_damaged(identity))
            }
            Message::Stats { request } => {
                let levels = self.blocks.levels();
                let load = Message::Load {
                    request,
                    slots: levels.slots as u32,
                    free: levels.free as u32,
                    blocks: levels.blocks as u32,
                    leases: self.leases.len() as u32,
                    verifying: self.jobs.len() as u32,
                };
                self.send(peer, &load);
            }
            Message::Found { .. }
            | Message::Granted { .. }
            | Message::Committed { .. }
            | Message::Load { .. }
            | Message::Busy { .. } => return false,
        }
        true
    }

    fn look_up(&mut self, peer: PeerId, request: u64, chain: &[BlockIdentity], now: Instant) {
        if !self.has_room_for_lease(peer) {
            return self.send(peer, &Message::Busy { request });
        }
        let question = self.next_id;
        self.next_id += 1;
        match self.blocks.look_up(question, chain) {
            LookUpResult::Ready(blocks) => self.answer_look_up(peer, request, chain.len(), blocks, now),
            LookUpResult::Pending => {
                let pending = PendingLookUp { peer: Some(peer), request, wanted: chain.len() };
                self.pending_look_ups.insert(question, pending);
                if let Some(session) = self.sessions.get_mut(&peer) {
                    session.leases += 1;
                }
            }
        }
    }

    /// Answers a look-up whose blocks were brought into memory, as far as possible. Drops them if the client
    /// has disconnected.
    fn found_later(&mut self, question: u64, blocks: Vec<Readable<B::Reading>>, now: Instant) {
        let pending = self.pending_look_ups.remove(&question);
        let Some(PendingLookUp { peer: Some(peer), request, wanted }) = pending else { return };
        self.forget_one(peer);
        if self.has_room_for_lease(peer) {
            self.answer_look_up(peer, request, wanted, blocks, now);
        } else {
            self.send(peer, &Message::Busy { request });
        }
    }

    fn answer_look_up(
        &mut self,
        peer: PeerId,
        request: u64,
        wanted: usize,
        blocks: Vec<Readable<B::Reading>>,
        now: Instant,
    ) {
        add(&self.counters.look_ups, 1);
        add(&self.counters.hit_blocks, blocks.len());
        add(&self.counters.missed_blocks, wanted.saturating_sub(blocks.len()));
        let found = |block: &Readable<B::Reading>| FoundBlock {
            slot: block.slot.slot(),
            generation: block.slot.generation(),
            description: block.description,
        };
        let found: Vec<FoundBlock> = blocks.iter().map(found).collect();
        let lease = if found.is_empty() { 0 } else { self.lease_out(peer, blocks, now) };
        let lease_ms = self.config.lease.as_millis() as u32;
        self.send(peer, &Message::Found { request, lease, lease_ms, blocks: found });
    }

    fn publish_levels(&self) {
        let levels = self.blocks.levels();
        set(&self.counters.free_slots, levels.free);
        set(&self.counters.blocks, levels.blocks);
        self.counters.evicted_blocks.store(levels.evicted, Ordering::Relaxed);
        set(&self.counters.leases, self.leases.len());
        set(&self.counters.fenced_slots, self.fenced.values().map(Vec::len).sum());
        set(&self.counters.verifying_blocks, self.jobs.len());
        set(&self.counters.peers, self.sessions.len());
    }
}
