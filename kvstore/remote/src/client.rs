//! A client of many pool nodes, as a state machine: calls and fabric events in, outcomes out.
//!
//! A fetch asks the nodes of all its groups at once, starts to read as soon as a node has answered, and counts
//! a block when the checksum of the bytes here was right. Each operation ends at its deadline with the blocks
//! it has by then; slots whose reads are still in flight follow later as [`Outcome::Returned`], for the fabric
//! may write them until it has completed the read (clause 3 of its contract).
//!
//! Driven by one thread, with time as an argument and one seed, so that a simulation replays exactly:
//! collections that are iterated are ordered. Not allocation free: a few allocations per operation, none per
//! byte.

mod events;
mod fetch;
mod mapped;
mod node;
mod operation;
mod replicate;
mod retain;
mod storing;
mod sweep;
mod transfer;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use dataplane_fabric::{Event, Fabric, PeerId};
use dataplane_memory::{PartialChecksum, SlotRef};
use kvstore_block::BlockIdentity;

use crate::metrics::set;
use crate::placement::Placement;
use crate::sketch::Sketch;
use crate::{NodeId, RemoteConfig, RemoteCounters, RemoteError};
use fetch::{Fetch, Stage};
pub use mapped::{MappedBlock, MappedGroup, PoolLease};
use node::Node;
pub use node::PoolNode;
use operation::{Operation, Request};
pub use operation::{Outcome, Refusal, RefusedFetch, StoreBlock, StoreResult, Ticket, Verified};
use replicate::{Replicated, Replication, one_second_of};
use storing::Store;
use transfer::{Check, Transfer};

/// A client of the memory of other nodes.
pub struct RemotePool<F> {
    fabric: F,
    config: RemoteConfig,
    counters: Arc<RemoteCounters>,
    nodes: BTreeMap<NodeId, Node>,
    /// The node whose queues are pumped first in the next poll.
    pump_first: NodeId,
    /// Kept for its capacity.
    pump_order: Vec<NodeId>,
    placement: Placement,
    operations: BTreeMap<u64, Operation>,
    /// Requests without an answer, by the id that the answer carries.
    requests: BTreeMap<u64, Request>,
    /// Reads and writes in flight, by the id that the completion carries.
    transfers: BTreeMap<u64, Transfer>,
    /// Blocks that were read and wait for their checksum.
    checks: VecDeque<Check>,
    verifier: PartialChecksum,
    /// Number of blocks that are read in place, by the connection to their node.
    mapped: HashMap<PeerId, usize>,
    /// Operations with events in this poll.
    touched: BTreeSet<u64>,
    replication: Replication,
    next_id: u64,
    random: fastrand::Rng,
    /// No timer is due before this time.
    next_due: Option<Instant>,
    outcomes: Vec<Outcome>,
    /// Kept for its capacity.
    events: Vec<Event>,
}

impl<F: Fabric> RemotePool<F> {
    /// Returns a client without nodes. `fabric` must be one over the slab that holds targets and stored blocks.
    pub fn new(
        fabric: F,
        config: RemoteConfig,
        counters: Arc<RemoteCounters>,
        now: Instant,
    ) -> Result<Self, RemoteError> {
        config.check()?;
        let replication = Replication {
            sketch: Sketch::new(config.sketch_width, config.hot_window, now),
            bucket: one_second_of(config.replicate_bytes_per_second, now),
            waiting: VecDeque::new(),
            done: Replicated::default(),
        };
        Ok(Self {
            fabric,
            config,
            counters,
            nodes: BTreeMap::new(),
            pump_first: NodeId(0),
            pump_order: Vec::new(),
            placement: Placement::default(),
            operations: BTreeMap::new(),
            requests: BTreeMap::new(),
            transfers: BTreeMap::new(),
            checks: VecDeque::new(),
            verifier: PartialChecksum::default(),
            mapped: HashMap::new(),
            touched: BTreeSet::new(),
            replication,
            next_id: 1,
            random: fastrand::Rng::with_seed(config.seed),
            next_due: None,
            outcomes: Vec::new(),
            events: Vec::with_capacity(config.poll_budget),
        })
    }

    /// Looks up which of `chain[first..]` the nodes have, from `first` on without a gap. `chain` starts at the
    /// root: groups are counted from there. Ends as [`Outcome::Found`]; the blocks then stay leased for
    /// [`RemotePool::read`], until they are cancelled or three quarters of the lease are over.
    pub fn look_up(
        &mut self,
        chain: &[BlockIdentity],
        first: usize,
        deadline: Instant,
        now: Instant,
    ) -> Result<Ticket, Refusal> {
        let count = chain.len().saturating_sub(first);
        self.check_room(count)?;
        let fetch = Fetch::new(chain, first, count, self.config.group_blocks, deadline);
        Ok(self.start_fetch(fetch, now))
    }

    /// Reads the blocks of a look-up into `targets`, one slot each from the first block on that is not mapped;
    /// as many blocks as there are targets. Ends as [`Outcome::Fetched`] under the same ticket. The targets are
    /// handed back while the look-up is in progress, and after its leases are over.
    pub fn read(
        &mut self,
        found: Ticket,
        targets: Vec<SlotRef>,
        deadline: Instant,
        now: Instant,
    ) -> Result<(), RefusedFetch> {
        let Some(Operation::Fetch(fetch)) = self.operations.get_mut(&found.0) else {
            return Err(RefusedFetch { reason: Refusal::Gone, targets });
        };
        if !matches!(fetch.stage, Stage::Held { .. })
            || targets.is_empty()
            || targets.len() > fetch.usable - fetch.mapped
        {
            return Err(RefusedFetch { reason: Refusal::Gone, targets });
        }
        fetch.attach(targets, deadline);
        self.queue_found(found.0, 0, usize::MAX);
        self.touched.insert(found.0);
        self.due_at(deadline);
        self.pump_all(now);
        Ok(())
    }

    /// Look-up and read in one: `chain[first..][..targets.len()]` into `targets`. Ends as [`Outcome::Fetched`].
    /// The targets are handed back when too many operations are in flight.
    pub fn fetch(
        &mut self,
        chain: &[BlockIdentity],
        first: usize,
        targets: Vec<SlotRef>,
        deadline: Instant,
        now: Instant,
    ) -> Result<Ticket, RefusedFetch> {
        let count = targets.len().min(chain.len().saturating_sub(first));
        let room = self.check_room(targets.len().max(1));
        let reason = match room {
            Ok(()) if count == targets.len() => None,
            Ok(()) => Some(Refusal::TooLong),
            Err(reason) => Some(reason),
        };
        if let Some(reason) = reason {
            return Err(RefusedFetch { reason, targets });
        }
        let mut fetch = Fetch::new(chain, first, count, self.config.group_blocks, deadline);
        fetch.attach(targets, deadline);
        Ok(self.start_fetch(fetch, now))
    }

    /// Offers blocks to their nodes and writes those that are accepted. Ends as [`Outcome::Stored`]. The
    /// blocks' bytes must not change meanwhile (if they do, the node refuses them).
    pub fn store(
        &mut self,
        blocks: Vec<StoreBlock>,
        deadline: Instant,
        now: Instant,
    ) -> Result<Ticket, (Refusal, Vec<StoreBlock>)> {
        if let Err(reason) = self.check_room(blocks.len()) {
            return Err((reason, blocks));
        }
        Ok(self.start_store(Store::new(blocks.len(), deadline), blocks, None, now))
    }

    /// Ends an operation now, as its deadline would: its outcome follows. A look-up that has ended releases its
    /// leases. No effect for a ticket that is over.
    pub fn cancel(&mut self, ticket: Ticket, now: Instant) {
        match self.operations.get(&ticket.0) {
            Some(Operation::Fetch(fetch)) if fetch.stage == Stage::LookingUp => {
                self.end_look_up(ticket.0, 0, now);
            }
            Some(Operation::Fetch(_)) => self.end_fetch(ticket.0, now),
            Some(Operation::Store(_)) => self.end_store(ticket.0, now),
            None => {}
        }
    }

    /// Makes progress: posts, polls, verifies, expires. Returns the amount of work done; outcomes are appended.
    pub fn poll(&mut self, now: Instant, outcomes: &mut Vec<Outcome>) -> usize {
        let mut events = std::mem::take(&mut self.events);
        let mut work = self.fabric.poll(self.config.poll_budget, &mut events);
        for event in events.drain(..) {
            self.digest(event, now);
        }
        self.events = events;
        work += self.verify();
        self.sweep(now);
        self.replicate(now);
        self.pump_all(now);
        while let Some(ticket) = self.touched.pop_first() {
            self.advance(ticket, now);
        }
        self.pump_all(now);
        self.fabric.flush();
        self.publish_levels();
        work += self.outcomes.len();
        outcomes.append(&mut self.outcomes);
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

    /// Time at which the next timer is due.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Instant> {
        self.next_due.into_iter().chain(self.fabric.next_deadline()).min()
    }

    /// Whether requests wait for room in a queue: no event is raised when there is room again.
    #[must_use]
    pub fn has_backlog(&self) -> bool {
        self.nodes.values().any(Node::has_backlog)
    }

    /// Whether the client is idle: no operation, no request, no transfer, no copy that waits. Leases that
    /// [`RemotePool::map`] took over are not counted.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.operations.is_empty()
            && self.requests.is_empty()
            && self.transfers.is_empty()
            && self.replication.waiting.is_empty()
    }

    /// Number of nodes that requests go to at present.
    #[must_use]
    pub fn usable_nodes(&self) -> usize {
        self.nodes.values().filter(|node| node.is_usable()).count()
    }

    /// Counters of this client.
    pub fn counters(&self) -> &Arc<RemoteCounters> {
        &self.counters
    }

    fn check_room(&self, blocks: usize) -> Result<(), Refusal> {
        if blocks == 0 || blocks > self.config.blocks_max {
            return Err(Refusal::TooLong);
        }
        if self.operations.len() >= self.config.operations_max {
            return Err(Refusal::Full);
        }
        Ok(())
    }

    fn fresh_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn draw(&mut self) -> u64 {
        self.random.u64(..)
    }

    /// Schedules the next sweep for `moment` at the latest.
    fn due_at(&mut self, moment: Instant) {
        self.next_due = Some(self.next_due.map_or(moment, |due| due.min(moment)));
    }

    fn publish_levels(&self) {
        let totals = &self.counters.totals;
        set(&totals.operations, self.operations.len());
        set(&totals.usable_nodes, self.usable_nodes());
    }
}
