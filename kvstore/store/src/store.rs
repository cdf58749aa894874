//! The store as its callers see it.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use crossbeam_channel::{Sender, TrySendError, bounded, unbounded};
use dataplane_memory::{Copier, PageSize, Slab};
use kvstore_block::BlockIdentity;
use kvstore_catalog::{
    Catalog, CatalogConfig, Contents, FrequencySketch, PolicyKind, SlotOrder, TenantId, TenantQuota,
    TierConfig, TierIndex,
};
use kvstore_disk::{Admission, AdmissionConfig, DiskCounters, Moment, Recovered, Usage};

use crate::Description;
use crate::background::Background;
use crate::bandwidth::Bandwidth;
use crate::config::StoreConfig;
use crate::device::DeviceCopies;
use crate::disk::{DiskLink, NO_PARENT, OpenDisk};
use crate::error::StoreError;
use crate::far::{FarLinks, FarResult, FarTier};
use crate::job::{Destination, Job, Moved, NewBlock, Offload, Onboard, Prepare, Source, Survivor, Throttled};
use crate::memory::{HostBlock, HostMemory};
use crate::metrics::StoreCounters;
use crate::mover::{Message, Mover};
use crate::offload::META_FIXED;
use crate::shared::{DISK, HOST, NOBODY, Plan, Prompt, Shared};

/// Blocks that may wait for the copying thread.
const OFFLOADS_MAX: usize = 1024;
/// Loads, searches and the like that may be inside at a time.
const REQUESTS_MAX: usize = 16_384;
/// Tenants with blocks that are told apart, where they have quotas; those beyond share one.
const TENANTS_MAX: u16 = 8192;
/// Hints about conversations are dropped when so much waits already.
const HINTS_MAX: usize = 64;
/// Requests that the store numbers itself have this bit; callers' numbers must not.
const OWN_REQUEST: u64 = 1 << 63;

/// The disk tier.
pub struct DiskTier {
    /// Opens its log, on the thread that will drive it.
    pub open: OpenDisk,
    /// Operations that may be under way.
    pub depth: usize,
    /// Which block goes when one must.
    pub eviction: PolicyKind,
    /// What is written at all.
    pub admission: AdmissionConfig,
}

/// Host memory that becomes the host tier.
#[derive(Debug, Clone, Copy)]
pub struct HostTier {
    /// Its slots.
    pub slots: u32,
    /// What backs them.
    pub pages: PageSize,
    /// Which block goes when one must.
    pub eviction: PolicyKind,
}

/// A store that is not running yet: its memory exists, so that the tiers of other nodes can register it.
pub struct StoreBuilder {
    config: StoreConfig,
    host: HostTier,
    memory: Arc<HostMemory>,
    disk: Option<DiskTier>,
    copier: Option<Box<dyn Copier>>,
    others: Vec<Box<dyn FarTier>>,
    sender: Sender<Message>,
    inbox: crossbeam_channel::Receiver<Message>,
}

/// The way for the answers of other nodes' tiers into the store.
#[derive(Clone)]
pub struct FarInbox(Sender<Message>);

impl FarInbox {
    /// Hands over an answer.
    pub fn send(&self, result: FarResult) {
        // A store that has stopped needs no answers.
        let _stopped = self.0.send(Message::Far(result));
    }
}

impl StoreBuilder {
    /// Takes the host tier's memory.
    pub fn new(config: StoreConfig, host: HostTier) -> Result<Self, StoreError> {
        let memory = HostMemory::new(config.block_bytes, host.slots, host.pages, config.quantised)?;
        let (sender, inbox) = unbounded();
        Ok(Self {
            config,
            host,
            memory: Arc::new(memory),
            disk: None,
            copier: None,
            others: Vec::new(),
            sender,
            inbox,
        })
    }

    /// The host tier's memory.
    #[must_use]
    pub fn slab(&self) -> &Arc<Slab> {
        self.memory.slab()
    }

    /// The way in for the answers of tiers that are added.
    #[must_use]
    pub fn inbox(&self) -> FarInbox {
        FarInbox(self.sender.clone())
    }

    /// Adds the disk tier.
    #[must_use]
    pub fn disk(mut self, disk: DiskTier) -> Self {
        self.disk = Some(disk);
        self
    }

    /// Lets pools lie in a device's memory: blocks go there and come from there through `copier`, which must reach the
    /// host tier's memory ([`StoreBuilder::slab`]). Blocks of such a pool are kept as they are, not quantised.
    #[must_use]
    pub fn copier(mut self, copier: Box<dyn Copier>) -> Self {
        self.copier = Some(copier);
        self
    }

    /// Adds a tier that is not on this node; they are asked in the order of adding.
    #[must_use]
    pub fn other(mut self, tier: Box<dyn FarTier>) -> Self {
        self.others.push(tier);
        self
    }

    /// Starts the threads. `notify` is called on one of them and must not block. What the disk has kept comes back too,
    /// each block after its parent.
    pub fn start(
        self,
        notify: impl FnMut(Moved) + Send + 'static,
    ) -> Result<(Store, Vec<Survivor>), StoreError> {
        let Self { config, host, memory, disk, copier, others, sender, inbox } = self;
        // With a quota both tiers tell tenants apart, so that a block that comes back counts for its own.
        let quota = |slots: u32| {
            let share = config.tenant_share.clamp(0.0, 1.0);
            (share < 1.0).then(|| (f64::from(slots) * share).ceil() as u32)
        };
        let default_quota = quota(host.slots);
        let mut tiers = vec![TierConfig { default_quota, ..TierConfig::new(host.slots, host.eviction) }];
        let (mut link, mut recovered, mut usage) = (None, Vec::new(), Usage::default());
        let (mut admission, mut disk_counters) = (AdmissionConfig::default(), None);
        if let Some(disk) = disk {
            let results = sender.clone();
            let report = move |result| {
                // A store that has stopped needs no results.
                let _stopped = results.send(Message::Disk(result));
            };
            let slab = Arc::clone(memory.slab());
            let (started, opened) = DiskLink::start(disk.open, slab, disk.depth, report)?;
            let order = SlotOrder::FirstFreed;
            let default_quota = quota(opened.slots);
            tiers.push(TierConfig { order, default_quota, ..TierConfig::new(opened.slots, disk.eviction) });
            (link, recovered, usage) = (Some(started), opened.recovered, opened.usage);
            (admission, disk_counters) = (disk.admission, Some(opened.counters));
        }
        let slots = tiers.iter().map(|tier| tier.slots).collect();
        let unlimited = |tier| TenantQuota { tenant: NOBODY, tier: TierIndex(tier), slots: u32::MAX };
        let quotas = (0..tiers.len() as u8).map(unlimited).collect();
        let catalog = CatalogConfig { quotas, tenants_max: TENANTS_MAX, ..CatalogConfig::new(tiers) };
        let catalog = Arc::new(Catalog::new(&catalog)?);
        let kinds = others.iter().map(|tier| tier.tier()).collect();
        let shared = Arc::new(Shared::new(catalog, memory, config, link.is_some(), kinds));
        let survivors = adopt(&shared, recovered);
        StoreCounters::add(&shared.counters.survivors, survivors.len());
        let (offloads, new_blocks) = bounded(OFFLOADS_MAX);
        let now = Instant::now();
        let mover = Mover {
            shared: Arc::clone(&shared),
            inbox,
            offloads: new_blocks,
            disk: link,
            far: FarLinks::new(others),
            notify: Box::new(notify),
            loads: HashMap::new(),
            next_load: 0,
            in_writing: HashMap::new(),
            unwritten: VecDeque::new(),
            unwritten_held: 0,
            orphans: 0,
            forgotten: HashSet::new(),
            tombstones: BTreeSet::new(),
            reading: HashMap::new(),
            next_read: 0,
            descriptions: vec![None; host.slots as usize],
            held: VecDeque::new(),
            has_room: false,
            has_held_room: false,
            seen: FrequencySketch::new(host.slots.saturating_mul(4)),
            admission: Admission::new(admission, Moment::now()),
            usage,
            admitted: None,
            background: Background::new(shared.config.prefetch, now),
            bandwidth: Bandwidth::new(shared.config.bandwidth, now, Instant::now),
            device: copier.map(DeviceCopies::new),
        };
        let thread =
            std::thread::Builder::new().name("kvasir-store".to_owned()).spawn(move || mover.run())?;
        let store = Store {
            shared,
            messages: sender,
            offloads,
            next_request: AtomicU64::new(OWN_REQUEST),
            slots,
            disk_counters,
            thread: Mutex::new(Some(thread)),
        };
        Ok((store, survivors))
    }
}

/// Makes the recovered blocks known, parents first; a block whose parent is gone is of no use and is left out.
fn adopt(shared: &Shared, recovered: Vec<Recovered>) -> Vec<Survivor> {
    let mut blocks: Vec<(u32, u64, Recovered)> = (recovered.into_iter())
        .filter_map(|block| {
            let (position, rest) = block.meta.split_first_chunk::<4>()?;
            let (checksum, _) = rest.split_first_chunk::<8>()?;
            Some((u32::from_le_bytes(*position), u64::from_le_bytes(*checksum), block))
        })
        .collect();
    blocks.sort_unstable_by_key(|(position, ..)| *position);
    let mut survivors = Vec::with_capacity(blocks.len());
    for (position, checksum, block) in blocks {
        let Recovered { slot, identity, bytes, tenant, .. } = block;
        let tenant = TenantId(tenant);
        let cost = shared.recompute_cost(position);
        let parent = (block.parent != NO_PARENT).then_some(block.parent);
        let parent_is_here = parent.is_none_or(|parent| shared.holds(DISK, &parent));
        let adopted = Contents { identity, parent, checksum, bytes, recompute_seconds: cost };
        if parent_is_here && shared.catalog.adopt(DISK, slot, adopted, tenant).is_ok() {
            let description = Description { parent, position, meta: block.meta[META_FIXED..].into(), tenant };
            survivors.push(Survivor { identity, description });
        }
    }
    survivors
}

/// Blocks in the tiers behind a worker's pool. Dropping it stops the threads; what the disk holds stays.
pub struct Store {
    shared: Arc<Shared>,
    messages: Sender<Message>,
    offloads: Sender<NewBlock>,
    next_request: AtomicU64,
    slots: Vec<u32>,
    disk_counters: Option<Arc<DiskCounters>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Store {
    /// What it has done so far.
    #[must_use]
    pub fn counters(&self) -> &Arc<StoreCounters> {
        &self.shared.counters
    }

    /// What the disk's log has done.
    #[must_use]
    pub fn disk_counters(&self) -> Option<&Arc<DiskCounters>> {
        self.disk_counters.as_ref()
    }

    /// Slots of host memory, and of the disk.
    #[must_use]
    pub fn slots(&self) -> [u64; 2] {
        [0, 1].map(|tier| self.slots.get(tier).copied().map_or(0, u64::from))
    }

    /// Whether its thread runs, which only a panic or `close` ends.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Stops the threads and puts what the disk holds on stable storage. Nothing is answered any more.
    pub fn close(&self) {
        let _stopped = self.messages.send(Message::Stop);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // A panic there has been printed; there is nobody to hand it to.
            let _panicked = thread.join();
        }
    }

    /// Blocks that host memory and the disk hold now.
    #[must_use]
    pub fn blocks(&self) -> [u64; 2] {
        [HOST, DISK].map(|tier| self.shared.catalog.census(tier).registered as u64)
    }

    /// Slots of host memory that somebody uses or fills now: zero when nothing is under way.
    #[must_use]
    pub fn leased_slots(&self) -> usize {
        // Slots that their last readers have handed back are taken in by any change, or by this.
        self.shared.free(HOST);
        let census = self.shared.catalog.census(HOST);
        census.under_way + census.pinned
    }

    /// Whether host memory has the block. Takes no lock.
    #[must_use]
    pub fn is_on_host(&self, identity: &BlockIdentity) -> bool {
        self.shared.holds(HOST, identity)
    }

    /// Length of the longest prefix of `chain` that is on this node. Takes no lock.
    #[must_use]
    pub fn look_up(&self, chain: &[BlockIdentity]) -> usize {
        self.shared.match_count(chain)
    }

    /// What is best done with a prompt; the tiers of other nodes come into question when they `may` be `asked`.
    #[must_use]
    pub fn plan(&self, prompt: &Prompt<'_>, may_ask: bool) -> Plan {
        let (plan, probe) = self.shared.plan(prompt, may_ask);
        if let Some(probe) = probe {
            // What is not known today will be asked again.
            let _full = self.send(Job::Probe(probe));
        }
        plan
    }

    /// A prompt has come. With [`Store::went_idle`] this teaches when conversations go on, so that their blocks can be
    /// fetched ahead; without prefetch it does nothing.
    pub fn came(&self, chain: &[BlockIdentity]) {
        // One that is not counted is no loss.
        if self.shared.config.prefetch.is_some() && self.messages.len() < HINTS_MAX {
            let _full = self.send(Job::Came(chain.to_vec()));
        }
    }

    /// The conversation with these blocks waits for its user.
    pub fn went_idle(&self, chain: &[BlockIdentity]) {
        if self.shared.config.prefetch.is_some() && self.messages.len() < HINTS_MAX {
            let _full = self.send(Job::WentIdle(chain.to_vec()));
        }
    }

    /// Tells how long the worker took to compute so many tokens behind so many.
    pub fn observe_prefill(&self, tokens: usize, context: usize, elapsed: Duration) {
        self.shared.observe_prefill(tokens, context, elapsed);
    }

    /// Queues a block for the copy into host memory; [`Moved::Offloaded`] follows.
    pub fn offload(&self, offload: Offload) -> Result<(), Throttled<Offload>> {
        let Offload { identity, description, slot } = offload;
        let block = NewBlock { identity, description, source: Source::Slot(slot), done: None };
        self.offloads.try_send(block).map_err(|error| {
            StoreCounters::add(&self.shared.counters.throttled, 1);
            let (TrySendError::Full(block) | TrySendError::Disconnected(block)) = error;
            let Source::Slot(slot) = block.source else { unreachable!("it went in with a slot") };
            Throttled(Offload { identity: block.identity, description: block.description, slot })
        })
    }

    /// Stores a block of bytes; `done` is told on the store's thread whether host memory has it.
    pub fn put(
        &self,
        identity: BlockIdentity,
        description: Description,
        bytes: Vec<Bytes>,
        done: impl FnOnce(bool) + Send + 'static,
    ) -> Result<(), Throttled<()>> {
        let length: usize = bytes.iter().map(Bytes::len).sum();
        if length > self.shared.config.block_bytes {
            return Err(Throttled(()));
        }
        let block =
            NewBlock { identity, description, source: Source::Bytes(bytes), done: Some(Box::new(done)) };
        self.offloads.try_send(block).map_err(|_| {
            StoreCounters::add(&self.shared.counters.throttled, 1);
            Throttled(())
        })
    }

    /// Queues the copy of a chain into slots; [`Moved::Onboarded`] with the request's number follows. Blocks that have gone
    /// since the plan was made are simply not counted as verified.
    pub fn onboard(&self, onboard: Onboard) -> Result<(), Throttled<Onboard>> {
        assert_eq!(onboard.chain.len(), onboard.targets.len(), "one slot for each block");
        let Onboard { request, chain, first, targets, deadline } = onboard;
        let job = Job::Load { request, chain, first, destination: Destination::Slots(targets), deadline };
        self.send(job).map_err(|job| match job {
            Job::Load { request, chain, first, destination: Destination::Slots(targets), deadline } => {
                Throttled(Onboard { request, chain, first, targets, deadline })
            }
            _ => unreachable!("it went in as a load into slots"),
        })
    }

    /// Brings a chain, from its root, into host memory and holds it there: `reply` gets the leading blocks, on the store's thread.
    pub fn hold(
        &self,
        chain: Vec<BlockIdentity>,
        deadline: Instant,
        reply: impl FnOnce(Vec<HostBlock>) + Send + 'static,
    ) -> Result<(), Throttled<()>> {
        let request = self.next_request.fetch_add(1, Ordering::Relaxed);
        let destination = Destination::Held(Box::new(reply));
        self.send(Job::Load { request, chain, first: 0, destination, deadline }).map_err(|_| Throttled(()))
    }

    /// The blocks of a chain, if host memory has all of them now. Takes no lock and asks no other thread.
    #[must_use]
    pub fn hold_now(&self, chain: &[BlockIdentity]) -> Option<Vec<HostBlock>> {
        let mut leases = Vec::with_capacity(chain.len());
        let found = self.shared.catalog.lease_prefix(HOST, chain, &mut leases);
        let held = |lease| HostBlock { lease, memory: Arc::clone(&self.shared.memory) };
        (found == chain.len()).then(|| leases.into_iter().map(held).collect())
    }

    /// Starts a search in the tiers of other nodes; [`Moved::Prepared`] follows.
    pub fn prepare(&self, prepare: Prepare) -> Result<(), Throttled<Prepare>> {
        self.send(Job::Prepare(prepare)).map_err(|job| match job {
            Job::Prepare(prepare) => Throttled(prepare),
            _ => unreachable!("it went in as a search"),
        })
    }

    /// Nobody waits for this request any more; nothing follows.
    pub fn cancel(&self, request: u64) {
        // What is inside is bounded already, and a cancellation makes it less.
        let _stopped = self.messages.send(Message::Job(Job::Cancel(request)));
    }

    /// Throws blocks away, in every tier of this node.
    pub fn forget(&self, chain: Vec<BlockIdentity>) {
        let _stopped = self.messages.send(Message::Job(Job::Forget(chain)));
    }

    /// Throws the copies of blocks away that host memory has: those of a block that a reader found damaged there. What the
    /// disk has stays, and is verified when it is read.
    pub fn forget_on_host(&self, chain: Vec<BlockIdentity>) {
        let _stopped = self.messages.send(Message::Job(Job::ForgetOnHost(chain)));
    }

    fn send(&self, job: Job) -> Result<(), Job> {
        let inside = self.shared.loads.load(Ordering::Relaxed);
        if self.messages.len() + inside >= REQUESTS_MAX {
            return Err(job);
        }
        self.messages.send(Message::Job(job)).map_err(|error| match error.into_inner() {
            Message::Job(job) => job,
            _ => unreachable!("it went in as a job"),
        })
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.close();
    }
}
