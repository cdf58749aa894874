//! Host memory of other nodes, over the data plane: the thread that drives the client.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::plan::Tier;
use crossbeam_channel::{Receiver, Sender, TryRecvError, bounded, unbounded};
use dataplane_fabric::Fabric;
use dataplane_fabric::wait::{Notifier, ThreadPolicy, Waiter};
use kvstore_block::BlockIdentity;
use kvstore_remote::{
    MappedGroup, Outcome, PoolLease, PoolNode, RemoteConfig, RemoteCounters, RemotePool, StoreBlock,
    StoreResult, Ticket, Verified,
};

use crate::StoreBuilder;
use crate::error::StoreError;
use crate::far::in_flight_reads::RemoteReads;
use crate::far::offer_queue::{InFlightOffer, Offer, OfferQueue};
use crate::far::{
    FetchRequest, LeaseEvent, LeaseGuard, MappedBlock, OfferBatch, OfferedBlock, SecondaryTier,
    SecondaryTierEvent, SecondaryTierInbox,
};
use crate::job::RetentionRequest;

/// Commands that may wait for the thread.
const COMMANDS_MAX: usize = 4096;
/// Most blocks on their way to other nodes; further blocks wait in the store's backlog.
const OFFERS_MAX: usize = 256;
/// The same limit as a part of host memory, as a divisor.
const OFFERS_SHARE: usize = 8;
/// Age at which a look-up's result that was not read is dropped, when there are many: its lease is over by
/// then.
const FOUND_AGE_MAX: Duration = Duration::from_secs(60);
const FOUND_MAX: usize = 1024;
/// Groups of blocks that nodes are asked to retain in a turn.
const RETAINED_GROUPS_PER_TURN: usize = 64;
/// Commands taken in before the rest of a turn.
const COMMANDS_PER_TURN: usize = 256;
/// Bytes of blocks on their way out that are read in a turn: look-ups, reads and deadlines come in between.
const OFFER_BYTES_PER_TURN: usize = 1 << 20;
/// Longest time that a block may take to reach another node.
const OFFER_MAX: Duration = Duration::from_secs(5);
/// Interval of the retries while a queue of the fabric is full: no event reports that it has room again.
const RETRY_FULL_AFTER: Duration = Duration::from_millis(1);

enum Command {
    LookUp { request: u64, chain: Vec<BlockIdentity>, first: usize, deadline: Instant },
    Read(FetchRequest),
    Offer(Box<Offer>),
    Leave(u64),
    Retain { request: Arc<RetentionRequest>, how_long: Duration },
}

/// The pools of other nodes, as a configuration names them (`[remote_tier]`).
#[derive(Debug, Clone)]
pub struct RemoteTierConfig {
    /// The nodes; all clients of a pool name the same ones.
    pub nodes: Vec<PoolNode>,
    /// Blocks of a chain that are kept on one node; equal at all clients.
    pub group: u32,
    /// Nodes that keep a group of blocks that is asked for often: 1 or 2.
    pub replicas: u64,
    /// Longest time that a look-up and the reads that follow may take.
    pub deadline: Duration,
    /// Fingerprint of the blocks' format; blocks with another fingerprint are not used.
    pub fingerprint: u64,
    /// Whether blocks of pools on this host are read where they lie, and not copied into host memory. Not for stores with tiers below host
    /// memory, which such blocks do not reach, or with a device, which does not reach them.
    pub maps: bool,
}

impl RemoteTierConfig {
    /// Reads the nodes of `remote_tier.nodes`, each `name=address`.
    pub fn parse_nodes(texts: &[String]) -> Result<Vec<PoolNode>, StoreError> {
        let parsed = texts.iter().map(|text| PoolNode::parse(text)).collect::<Result<_, _>>();
        parsed.map_err(|reason| StoreError::Setting { key: "remote_tier.nodes", reason })
    }
}

/// Connection to the thread.
pub struct RemoteTier {
    commands: Option<Sender<Command>>,
    notifier: Arc<Notifier>,
    group: u32,
    patience: Duration,
    /// Number of blocks on their way out, and its limit. Each block stays in host memory until it has
    /// arrived.
    offers: Arc<AtomicUsize>,
    offers_max: usize,
    thread: Option<JoinHandle<()>>,
}

impl RemoteTier {
    /// Opens the tier over a fabric that has registered the memory of the store that is being built.
    pub fn open<F: Fabric + Send + 'static>(
        config: &RemoteTierConfig,
        fabric: F,
        store: &StoreBuilder,
        policy: ThreadPolicy,
    ) -> Result<(Self, Arc<RemoteCounters>), StoreError> {
        let of_client = RemoteConfig::default();
        let of_client = RemoteConfig {
            group_blocks: config.group as usize,
            hot_count: if config.replicas > 1 { of_client.hot_count } else { 0 },
            request_timeout: config.deadline,
            ..of_client
        };
        let counters = Arc::new(RemoteCounters::default());
        let mut pool = RemotePool::new(fabric, of_client, Arc::clone(&counters), Instant::now())?;
        pool.set_nodes(&config.nodes, Instant::now())?;
        let tier = Self::start(pool, config, store.host_slots(), store.inbox(), policy)?;
        Ok((tier, counters))
    }

    /// Starts the thread over a client that knows the configuration's nodes and whose fabric has registered the store's memory. Of
    /// `host_slots` a part is used for blocks on their way out.
    fn start<F: Fabric + Send + 'static>(
        pool: RemotePool<F>,
        config: &RemoteTierConfig,
        host_slots: usize,
        inbox: SecondaryTierInbox,
        policy: ThreadPolicy,
    ) -> std::io::Result<Self> {
        let (commands, receiver) = bounded(COMMANDS_MAX);
        let notifier = Notifier::new()?;
        let RemoteTierConfig { group, fingerprint, deadline: patience, maps, .. } = *config;
        let (events, lease_events) = unbounded();
        let mut driver = Driver {
            pool,
            receiver,
            inbox,
            fingerprint,
            leases: maps.then(|| Leases { events, notifier: Arc::clone(&notifier) }),
            lease_events,
            looking: HashMap::new(),
            found: HashMap::new(),
            reads: RemoteReads::default(),
            offers: OfferQueue::default(),
            retentions: VecDeque::new(),
            usable_nodes: 0,
            sent: HashMap::new(),
        };
        let thread = policy.spawn("kvasir-remote-tier", &notifier, move |waiter| driver.run(waiter))?;
        let offers_max = OFFERS_MAX.min(host_slots / OFFERS_SHARE).max(1);
        let offers = Arc::default();
        Ok(Self {
            commands: Some(commands),
            notifier,
            group,
            patience,
            offers,
            offers_max,
            thread: Some(thread),
        })
    }

    fn send(&self, command: Command) -> Result<(), Command> {
        let Some(commands) = &self.commands else { return Err(command) };
        commands.try_send(command).map_err(crossbeam_channel::TrySendError::into_inner)?;
        self.notifier.notify();
        Ok(())
    }
}

impl SecondaryTier for RemoteTier {
    fn tier(&self) -> Tier {
        Tier::Remote
    }

    fn patience(&self) -> Duration {
        self.patience
    }

    fn look_up(&mut self, request: u64, chain: &[BlockIdentity], first: usize, deadline: Instant) -> bool {
        self.send(Command::LookUp { request, chain: chain.to_vec(), first, deadline }).is_ok()
    }

    fn read(&mut self, incoming: FetchRequest) -> Result<(), FetchRequest> {
        self.send(Command::Read(incoming)).map_err(|command| match command {
            Command::Read(incoming) => incoming,
            _ => unreachable!("a refused command comes back as it was"),
        })
    }

    fn retain(&mut self, request: &Arc<RetentionRequest>, how_long: Duration) {
        // A hint: without room it is lost.
        let _full = self.send(Command::Retain { request: Arc::clone(request), how_long });
    }

    fn leave(&mut self, request: u64) {
        // The lease ends by itself if this does not fit.
        let _full = self.send(Command::Leave(request));
    }

    fn offer_batch(&self) -> OfferBatch {
        OfferBatch::Single { group: self.group }
    }

    fn has_room(&self, _bytes: u64) -> bool {
        // Relaxed: one that has just ended is counted by the next look, which its answer brings about.
        self.offers.load(Ordering::Relaxed) < self.offers_max
    }

    fn offer(&mut self, blocks: Vec<OfferedBlock>, head: BlockIdentity) -> bool {
        // Portions are single blocks.
        blocks.into_iter().all(|block| {
            let Some(counted) = InFlightOffer::one_of(&self.offers, self.offers_max) else { return false };
            let offer = Offer { block, group: head, _counted: counted };
            self.send(Command::Offer(Box::new(offer))).is_ok()
        })
    }
}

impl Drop for RemoteTier {
    fn drop(&mut self) {
        self.commands = None;
        self.notifier.notify();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been printed already.
            let _panicked = thread.join();
        }
    }
}

struct Driver<F> {
    pool: RemotePool<F>,
    receiver: Receiver<Command>,
    inbox: SecondaryTierInbox,
    fingerprint: u64,
    /// Sender of lease events; `None`: blocks of pools on this host are copied, not read in place.
    leases: Option<Leases>,
    lease_events: Receiver<(PoolLease, LeaseEvent)>,
    /// Look-ups in flight, with the store's numbers of their requests.
    looking: HashMap<Ticket, u64>,
    /// Look-ups that have found something, by request, until it is read.
    found: HashMap<u64, (Ticket, Instant)>,
    reads: RemoteReads,
    /// Blocks on their way out whose checksums are not known yet.
    offers: OfferQueue,
    /// Number of nodes that were usable after the last turn.
    usable_nodes: usize,
    /// Retention requests, with the next block that nodes are to be asked for, and the time. Each counts among those that may wait in a
    /// store until it is dropped, which bounds them.
    retentions: VecDeque<(Arc<RetentionRequest>, usize, Duration)>,
    /// Blocks that have been sent; each stays in host memory until it has arrived.
    sent: HashMap<Ticket, Box<Offer>>,
}

/// Channel for the ends of leases on blocks that are read in place. A lease ends with its guard, on any
/// thread.
struct Leases {
    events: Sender<(PoolLease, LeaseEvent)>,
    notifier: Arc<Notifier>,
}

impl Leases {
    fn blocks(&self, group: MappedGroup) -> impl Iterator<Item = MappedBlock> + use<> {
        let MappedGroup { lease, until, blocks } = group;
        let (events, notifier) = (self.events.clone(), Arc::clone(&self.notifier));
        let guard = Arc::new(LeaseGuard::new(move |event| {
            // When the thread has ended, its leases have.
            let _ended = events.send((lease, event));
            notifier.notify();
        }));
        blocks.into_iter().map(move |block| MappedBlock {
            slab: block.slab,
            slot: block.slot,
            generation: block.generation,
            bytes: block.description.bytes,
            wire_checksum: block.description.checksum,
            lease: Arc::clone(&guard),
            until,
        })
    }
}

impl<F: Fabric> Driver<F> {
    fn run(&mut self, mut waiter: Waiter) {
        let mut outcomes = Vec::new();
        while self.take_commands() {
            self.take_lease_events();
            let is_asking = self.send_retentions();
            let work = self.pool.poll(Instant::now(), &mut outcomes);
            let is_idle = work == 0 && outcomes.is_empty();
            for outcome in outcomes.drain(..) {
                self.ended(outcome);
            }
            let usable_before = std::mem::replace(&mut self.usable_nodes, self.pool.usable_nodes());
            if self.usable_nodes > usable_before {
                self.inbox.send(SecondaryTierEvent::Reached(Tier::Remote));
            }
            let is_idle = !self.send_offers() && !is_asking && is_idle;
            if self.found.len() > FOUND_MAX {
                self.found.retain(|_, (_, since)| since.elapsed() < FOUND_AGE_MAX);
            }
            if !is_idle {
                waiter.worked();
            } else if !waiter.should_poll() {
                waiter.announce();
                match self.receiver.try_recv() {
                    Ok(command) => self.start(command),
                    Err(TryRecvError::Disconnected) => return,
                    Err(TryRecvError::Empty)
                        if self.lease_events.is_empty() && self.pool.fabric_mut().prepare_wait() =>
                    {
                        self.sleep(&waiter);
                    }
                    Err(TryRecvError::Empty) => {}
                }
                waiter.retract();
            }
        }
    }

    /// Starts queued commands; false when every sender is gone.
    fn take_commands(&mut self) -> bool {
        for _ in 0..COMMANDS_PER_TURN {
            match self.receiver.try_recv() {
                Ok(command) => self.start(command),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
        true
    }

    /// Asks nodes to retain some groups of the queued requests; false when none is queued.
    fn send_retentions(&mut self) -> bool {
        let Some((request, next, how_long)) = self.retentions.front_mut() else { return false };
        *next = self.pool.retain(request.chain(), *next, RETAINED_GROUPS_PER_TURN, *how_long);
        if *next >= request.chain().len() {
            self.retentions.pop_front();
        }
        true
    }

    fn take_lease_events(&mut self) {
        while let Ok((lease, event)) = self.lease_events.try_recv() {
            match event {
                LeaseEvent::Damaged(identity) => self.pool.report_damaged(lease, identity),
                LeaseEvent::Ended => self.pool.release(lease, Instant::now()),
            }
        }
    }

    /// Hands over the found blocks that lie in mapped memory; returns their number.
    fn map(&mut self, request: u64, ticket: Ticket, count: usize) -> usize {
        let Some(leases) = &self.leases else { return 0 };
        let groups = self.pool.map(ticket, count, Instant::now());
        let blocks: Vec<MappedBlock> = groups.into_iter().flat_map(|group| leases.blocks(group)).collect();
        let count = blocks.len();
        if count > 0 {
            self.inbox.send(SecondaryTierEvent::Mapped { request, blocks });
        }
        count
    }

    /// Sends queued offers, as far as their part of a turn goes; false when there were none.
    fn send_offers(&mut self) -> bool {
        if self.offers.is_empty() {
            return false;
        }
        let mut budget = OFFER_BYTES_PER_TURN;
        while let Some((offer, checksum)) = self.offers.advance(&mut budget) {
            match checksum {
                Some(checksum) => self.store(offer, checksum),
                // Damaged: the block is dropped and not offered again.
                None => self.offered(offer, None),
            }
        }
        true
    }

    fn store(&mut self, offer: Box<Offer>, checksum: u64) {
        let (block, now) = (&offer.block, Instant::now());
        let description = kvstore_remote::Description {
            parent: block.description.parent.unwrap_or(BlockIdentity([0; 16])),
            bytes: block.block.len() as u32,
            checksum,
            meta: self.fingerprint,
        };
        let (identity, group, slot) = (block.identity, offer.group, block.slot.clone());
        let stored = StoreBlock { identity, group, slot, description };
        match self.pool.store(vec![stored], now + OFFER_MAX, now) {
            Ok(ticket) => drop(self.sent.insert(ticket, offer)),
            Err(_) => self.offered(offer, Some(StoreResult::Failed)),
        }
    }

    /// Reports the end of an offer; `None`: the block was damaged before it was sent.
    fn offered(&self, offer: Box<Offer>, result: Option<StoreResult>) {
        let (mut kept, mut too_large, mut failed, mut refused) = (0, 0, Vec::new(), Vec::new());
        match result {
            Some(StoreResult::Stored) => kept = 1,
            Some(StoreResult::TooLarge) => too_large = 1,
            Some(StoreResult::Failed) => failed.push(offer.block.identity),
            Some(StoreResult::Full) => refused.push(offer.block.identity),
            // Not tried again: a node with bad memory would be sent the block for ever.
            Some(StoreResult::Present | StoreResult::Pending | StoreResult::Damaged) | None => {}
        }
        // Dropped before the answer, so that the next block finds room.
        drop(offer);
        self.inbox.send(SecondaryTierEvent::Offered { tier: Tier::Remote, kept, too_large, failed, refused });
    }

    fn start(&mut self, command: Command) {
        let now = Instant::now();
        match command {
            Command::LookUp { request, chain, first, deadline } => {
                match self.pool.look_up(&chain, first, deadline, now) {
                    Ok(ticket) => drop(self.looking.insert(ticket, request)),
                    Err(_) => self.inbox.send(SecondaryTierEvent::Found { request, blocks: 0 }),
                }
            }
            Command::Read(mut incoming) => {
                let targets = std::mem::take(&mut incoming.targets);
                let Some((ticket, _)) = self.found.remove(&incoming.request) else {
                    return self.inbox.send(SecondaryTierEvent::Arrived { incoming, blocks: Vec::new() });
                };
                match self.pool.read(ticket, targets, incoming.deadline, now) {
                    Ok(()) => self.reads.begin(ticket, incoming),
                    Err(_) => self.inbox.send(SecondaryTierEvent::Arrived { incoming, blocks: Vec::new() }),
                }
            }
            Command::Leave(request) => {
                if let Some((ticket, _)) = self.found.remove(&request) {
                    self.pool.cancel(ticket, now);
                }
            }
            Command::Offer(offer) => self.offers.push(offer),
            Command::Retain { request, how_long } => self.retentions.push_back((request, 0, how_long)),
        }
    }

    fn ended(&mut self, outcome: Outcome) {
        match outcome {
            Outcome::Found { ticket, blocks } => {
                let Some(request) = self.looking.remove(&ticket) else { return };
                let ours = blocks.iter().take_while(|block| block.meta == self.fingerprint).count();
                let mapped = self.map(request, ticket, ours);
                if mapped < blocks.len() {
                    self.found.insert(request, (ticket, Instant::now()));
                }
                self.inbox.send(SecondaryTierEvent::Found { request, blocks: ours - mapped });
            }
            Outcome::Fetched { ticket, blocks, held, .. } => {
                let sum = |block: &Verified| (block.description.bytes, block.description.checksum);
                let sums: Vec<(u32, u64)> = blocks.iter().map(sum).collect();
                if let Some(arrived) = self.reads.fetched(ticket, &sums, held > 0) {
                    self.inbox.send(arrived);
                }
            }
            Outcome::Returned { ticket, .. } => {
                if let Some(returned) = self.reads.returned(ticket) {
                    self.inbox.send(returned);
                }
            }
            Outcome::Stored { ticket, results } => {
                if let (Some(offer), Some(result)) = (self.sent.remove(&ticket), results.first()) {
                    self.offered(offer, Some(*result));
                }
            }
        }
    }

    fn sleep(&self, waiter: &Waiter) {
        let now = Instant::now();
        let retry = self.pool.has_backlog().then(|| now + RETRY_FULL_AFTER);
        let until = self.pool.next_deadline().into_iter().chain(retry).min();
        waiter.sleep(self.pool.fabric(), until);
    }
}
