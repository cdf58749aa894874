//! A node that serves its memory: look-ups, leases, reservations, verification. See [`leases`] for when a slot may
//! be reused.
//!
//! Driven by one thread, with time as an argument; [`PoolServer::poll`] does a bounded amount of work: so many
//! events and so many bytes verified. Reads and writes of blocks are one-sided and cost this thread nothing over
//! RDMA or shared memory (over TCP its fabric carries them).

mod leases;
mod sessions;
mod storing;

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use dataplane_fabric::{Event, Fabric, PeerId};
use dataplane_memory::{LeaseTable, SlotPool, SlotRef};
use kvstore_block::BlockIdentity;
use kvstore_catalog::PoolCatalog as Catalog;

use crate::checksum::Verifier;
use crate::metrics::{add, set};
use crate::wire::{Description, FoundBlock, Message};
use crate::{PoolConfig, PoolCounters, RemoteError};
use leases::{Held, LeaseName};
use sessions::Session;
use storing::{Committing, Job};

/// One node's slots, blocks and clients.
pub struct PoolServer<F> {
    fabric: F,
    config: PoolConfig,
    counters: Arc<PoolCounters>,
    pool: Arc<SlotPool>,
    catalog: Catalog,
    /// What is in each slot, by its index; of use only for slots that the catalog names.
    described: Vec<Description>,
    leases: LeaseTable<LeaseName, PeerId, Held>,
    next_id: u64,
    /// No lease expires before this.
    next_expiry: Option<Instant>,
    /// Blocks that somebody is writing, or that wait to be verified.
    pending: HashSet<BlockIdentity>,
    jobs: VecDeque<Job>,
    suspects: usize,
    verifier: Verifier,
    committing: HashMap<u64, Committing>,
    /// Slots of expired leases, until their client's connection has ended.
    fenced: HashMap<PeerId, Vec<SlotRef>>,
    sessions: HashMap<PeerId, Session>,
    /// Clients with messages that found no room.
    backlog: Vec<PeerId>,
    /// Kept for its capacity.
    events: Vec<Event>,
}

impl<F: Fabric> PoolServer<F> {
    /// A node without blocks. `fabric` must be one over the slab of `pool`.
    pub fn new(
        fabric: F,
        pool: Arc<SlotPool>,
        config: PoolConfig,
        counters: Arc<PoolCounters>,
    ) -> Result<Self, RemoteError> {
        config.check()?;
        let nothing = Description { parent: BlockIdentity([0; 16]), bytes: 0, checksum: 0, meta: 0 };
        let slots = pool.slot_count();
        set(&counters.slots, slots);
        Ok(Self {
            fabric,
            config,
            counters,
            catalog: Catalog::with_capacity(slots),
            described: vec![nothing; slots],
            pool,
            leases: LeaseTable::new(config.leases_max),
            next_id: 1,
            next_expiry: None,
            pending: HashSet::new(),
            jobs: VecDeque::new(),
            suspects: 0,
            verifier: Verifier::default(),
            committing: HashMap::new(),
            fenced: HashMap::new(),
            sessions: HashMap::new(),
            backlog: Vec::new(),
            events: Vec::with_capacity(config.poll_budget),
        })
    }

    /// Makes progress. Returns how much was done: zero means that the thread may sleep.
    pub fn poll(&mut self, now: Instant) -> usize {
        self.pump_backlog();
        let mut events = std::mem::take(&mut self.events);
        let mut work = self.fabric.poll(self.config.poll_budget, &mut events);
        for event in events.drain(..) {
            self.digest(event, now);
        }
        self.events = events;
        work += self.verify();
        self.expire(now);
        self.fabric.flush();
        self.publish_levels();
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

    /// When something happens by itself next.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        self.next_expiry.into_iter().chain(self.fabric.next_deadline()).min()
    }

    /// Whether messages wait for room: nobody rings when there is room again.
    #[must_use]
    pub fn has_backlog(&self) -> bool {
        !self.backlog.is_empty()
    }

    /// Whether nothing is leased, reserved, fenced or being verified: what a leak check asserts.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.leases.is_empty()
            && self.fenced.is_empty()
            && self.jobs.is_empty()
            && self.pending.is_empty()
            && self.committing.is_empty()
    }

    /// Blocks that can be found.
    #[must_use]
    pub fn block_count(&self) -> usize {
        self.catalog.len()
    }

    /// What has happened so far.
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
                    Message::decode(&message).is_some_and(|message| self.understand(peer, message, now));
                if !understood {
                    tracing::warn!(?peer, "pool: a message that makes no sense; closing the connection");
                    add(&self.counters.violations, 1);
                    self.end_session(peer);
                }
            }
            Event::PeerDown { peer, reason } => self.peer_down(peer, &reason),
            // Clients send no immediates, and nothing is posted with an id.
            Event::Immediate { .. } | Event::Completed { .. } => {}
        }
    }

    /// False when the client breaks the protocol.
    fn understand(&mut self, peer: PeerId, message: Message, now: Instant) -> bool {
        match message {
            Message::LookUp { request, chain } => self.look_up(peer, request, &chain, now),
            Message::Release { lease } => self.release(peer, lease),
            Message::Reserve { request, offers } => return self.reserve(peer, request, offers, now),
            Message::Commit { request, written } => return self.commit(peer, request, written),
            Message::Suspect { chain } => chain.iter().for_each(|identity| self.suspect(identity)),
            Message::Stats { request } => {
                let load = Message::Load {
                    request,
                    slots: self.pool.slot_count() as u32,
                    free: self.pool.free_count() as u32,
                    blocks: self.catalog.len() as u32,
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
        let mut slots = Vec::new();
        let found = self.catalog.match_prefix(chain, &mut slots);
        add(&self.counters.look_ups, 1);
        add(&self.counters.hit_blocks, found);
        add(&self.counters.missed_blocks, chain.len() - found);
        let blocks: Vec<FoundBlock> = slots
            .iter()
            .map(|slot| FoundBlock {
                slot: slot.slot(),
                generation: slot.generation(),
                description: self.described[slot.slot() as usize],
            })
            .collect();
        let lease = if found > 0 { self.lease_out(peer, slots, now) } else { 0 };
        let lease_ms = self.config.lease.as_millis() as u32;
        self.send(peer, &Message::Found { request, lease, lease_ms, blocks });
    }

    fn publish_levels(&self) {
        set(&self.counters.free_slots, self.pool.free_count());
        set(&self.counters.blocks, self.catalog.len());
        set(&self.counters.leases, self.leases.len());
        set(&self.counters.fenced_slots, self.fenced.values().map(Vec::len).sum());
        set(&self.counters.verifying_blocks, self.jobs.len());
        set(&self.counters.peers, self.sessions.len());
    }
}
