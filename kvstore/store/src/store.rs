//! The store as its callers see it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;
use crossbeam_channel::{Sender, TrySendError};
use dataplane_memory::Slab;
use kvstore_block::BlockIdentity;
use kvstore_catalog::{Lease, TenantId};
use kvstore_disk::DiskCounters;

use crate::Description;
use crate::config::WriteMode;
use crate::job::{
    Destination, Job, LoadRequest, NewBlock, Offload, Onboard, Prepare, RetentionRequest, Source, Throttled,
};
use crate::memory::{HostBlock, NewSlot};
use crate::metrics::StoreCounters;
use crate::quota;
use crate::shared::{DISK, HOST, LoadTimes, MAPPED, Plan, Prompt, RemoteCoverage, Shared};
use crate::store_thread::Message;

/// Loads, searches and the like that may be inside at a time.
const REQUESTS_MAX: usize = 16_384;
/// Hints about conversations are dropped when so much waits already.
const HINTS_MAX: usize = 64;
/// Blocks of retention requests that may wait: 4 MiB of identities. A request counts as 64 more.
const RETAINING_MAX: usize = 1 << 18;
/// The part of host memory that may wait to be written before no slots are given out by evicting, as a divisor.
const UNWRITTEN_SHARE: usize = 4;
/// Requests that the store numbers itself have this bit; callers' numbers must not.
const OWN_REQUEST: u64 = 1 << 63;

/// Blocks in the tiers behind a worker's pool. Dropping the store stops its threads; blocks on the disk stay.
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
    /// Creates the handle of a store whose thread runs.
    pub(crate) fn new(
        shared: Arc<Shared>,
        messages: Sender<Message>,
        offloads: Sender<NewBlock>,
        slots: Vec<u32>,
        disk_counters: Option<Arc<DiskCounters>>,
        thread: JoinHandle<()>,
    ) -> Self {
        let next_request = AtomicU64::new(OWN_REQUEST);
        let thread = Mutex::new(Some(thread));
        Self { shared, messages, offloads, next_request, slots, disk_counters, thread }
    }

    /// Counters of the store.
    #[must_use]
    pub fn counters(&self) -> &Arc<StoreCounters> {
        &self.shared.counters
    }

    /// Counters of the disk's log; `None` without a disk.
    #[must_use]
    pub fn disk_counters(&self) -> Option<&Arc<DiskCounters>> {
        self.disk_counters.as_ref()
    }

    /// Slots of host memory, and of the disk.
    #[must_use]
    pub fn slots(&self) -> [u64; 2] {
        [0, 1].map(|tier| self.slots.get(tier).copied().map_or(0, u64::from))
    }

    /// Whether the store's thread runs. Only a panic or `close` ends it.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Stops the threads and flushes the disk's blocks to stable storage. No request is answered any more.
    pub fn close(&self) {
        let _stopped = self.messages.send(Message::Stop);
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            // A panic of the thread has been printed already.
            let _panicked = thread.join();
        }
    }

    /// Blocks that host memory and the disk hold now.
    #[must_use]
    pub fn blocks(&self) -> [u64; 2] {
        [HOST, DISK].map(|tier| self.shared.catalog.census(tier).registered as u64)
    }

    /// Blocks that are retained ([`Store::retain`]) on this node.
    #[must_use]
    pub fn retained_blocks(&self) -> usize {
        self.shared.retained.load(Ordering::Relaxed)
    }

    /// Slots of host memory that are in use or being filled, except those that the store itself holds for
    /// idle conversations and for retention. 0 when nothing is in flight.
    #[must_use]
    pub fn leased_slots(&self) -> usize {
        // Slots that their last readers have handed back are taken in by any change, or by this.
        self.shared.free(HOST);
        let census = self.shared.catalog.census(HOST);
        (census.under_way + census.pinned).saturating_sub(self.shared.held.slots())
    }

    /// Whether host memory has the block. Takes no lock.
    #[must_use]
    pub fn is_on_host(&self, identity: &BlockIdentity) -> bool {
        self.shared.holds(HOST, identity)
    }

    /// Whether host memory or the disk has the block; one that is known to lie in a pool's memory does not count. Takes no lock.
    #[must_use]
    pub fn is_kept(&self, identity: &BlockIdentity) -> bool {
        [HOST, DISK].into_iter().any(|tier| self.shared.holds(tier, identity))
    }

    /// Reports that a block that was known to lie in a pool's memory has gone from there.
    pub fn forget_gone(&self, identity: BlockIdentity) {
        let _stopped = self.messages.send(Message::Job(Job::ForgetGone(identity)));
    }

    /// Length of the longest prefix of `chain` that is on this node. Takes no lock.
    #[must_use]
    pub fn look_up(&self, chain: &[BlockIdentity]) -> usize {
        self.shared.match_count(chain)
    }

    /// Returns the plan for a prompt, given the knowledge of its blocks in the tiers of other nodes.
    #[must_use]
    pub fn plan(&self, prompt: &Prompt<'_>, others: RemoteCoverage) -> Plan {
        let (plan, probe) = self.shared.plan(prompt, others);
        if let Some(probe) = probe {
            // A full queue drops the probe; a later plan names it again.
            let _full = self.send(Job::Probe(probe));
        }
        plan
    }

    /// Reports that a prompt has come. Together with [`Store::mark_conversation_idle`] this teaches when conversations
    /// continue, so that their blocks can be fetched ahead; without prefetch it does nothing.
    pub fn prompt_arrived(&self, chain: &[BlockIdentity]) {
        // A dropped hint costs nothing but a measurement.
        if self.shared.config.prefetch.is_some() && self.messages.len() < HINTS_MAX {
            let _full = self.send(Job::PromptStarted(chain.to_vec()));
        }
    }

    /// Reports that the conversation with these blocks is idle: it waits for its user.
    pub fn mark_conversation_idle(&self, chain: &[BlockIdentity]) {
        if self.shared.config.prefetch.is_some() && self.messages.len() < HINTS_MAX {
            let _full = self.send(Job::ConversationIdle(chain.to_vec()));
        }
    }

    /// Retains blocks for so long, counted from now, on the disk or, without one, in host memory, and asks the pools of other nodes for the
    /// same: no such block is evicted before. A hint: a block is refused when as many are retained as may be
    /// ([`crate::RetentionConfig`]), or when the one before it is in that tier and not retained. Blocks that come within a minute are retained
    /// from then on. For other nodes the chain begins with its prompt's first block; for this one any consecutive blocks will do.
    pub fn retain(&self, chain: &[BlockIdentity], how_long: Duration) -> Result<(), Throttled<()>> {
        if chain.is_empty() {
            return Ok(());
        }
        let sent = RetentionRequest::new(chain, &self.shared.retaining, RETAINING_MAX)
            .and_then(|request| self.send(Job::Retain { request, how_long }).ok());
        sent.ok_or_else(|| {
            StoreCounters::add(&self.shared.counters.retention_refused, chain.len());
            Throttled(())
        })
    }

    /// Tells how long the worker took to compute so many tokens behind so many.
    pub fn observe_prefill(&self, tokens: usize, context: usize, elapsed: Duration) {
        self.shared.observe_prefill(tokens, context, elapsed);
    }

    /// Tells how long a load took that was made of holds ([`Store::hold`], [`Store::hold_now`]), which are not measured one by one:
    /// of many that are asked for at a time each would seem to take as long as all.
    pub fn observe_load(&self, times: &LoadTimes) {
        self.shared.observe_load(times);
    }

    /// Queues a block for the copy into host memory; [`crate::StoreEvent::Offloaded`] follows.
    pub fn offload(&self, offload: Offload) -> Result<(), Throttled<Offload>> {
        self.queue_offload(offload, None)
    }

    /// The same of a block whose checksum ([`dataplane_checksum::checksum`] of the slot's bytes) is known: one in a device's
    /// memory, which the device has summed. It is not taken again of what arrives, so that damage on the way shows when the block
    /// is read.
    pub fn offload_summed(&self, offload: Offload, checksum: u64) -> Result<(), Throttled<Offload>> {
        self.queue_offload(offload, Some(checksum))
    }

    fn queue_offload(&self, offload: Offload, checksum: Option<u64>) -> Result<(), Throttled<Offload>> {
        let Offload { identity, description, slot } = offload;
        let block = NewBlock { identity, description, source: Source::Slot(slot), checksum, done: None };
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
        let (source, done) = (Source::Bytes(bytes), Some(Box::new(done) as _));
        let block = NewBlock { identity, description, source, checksum: None, done };
        self.offloads.try_send(block).map_err(|_| {
            StoreCounters::add(&self.shared.counters.throttled, 1);
            Throttled(())
        })
    }

    /// Reserves a free slot of host memory for a caller that copies a block there itself; [`Store::put_slot`]
    /// follows. `None` when no slot is free now, or the tenant has used its quota: [`Store::put`] makes room.
    /// The store's thread evicts ahead for such callers.
    #[must_use]
    pub fn reserve(&self, tenant: TenantId) -> Option<NewSlot> {
        self.shared.wants_free_slots.store(true, Ordering::Relaxed);
        let reserved = self.shared.catalog.reserve_free(HOST, tenant)?;
        Some(NewSlot::new(reserved.fill(), Arc::clone(&self.shared.memory)))
    }

    /// When blocks are written to the disk, if there is one.
    pub(crate) fn disk_write(&self) -> Option<WriteMode> {
        (self.slots.len() > 1).then_some(self.shared.config.disk_write)
    }

    /// The slab with all slots of host memory.
    #[must_use]
    pub fn slab(&self) -> &Arc<Slab> {
        self.shared.memory.slab()
    }

    /// Blocks in host memory, and its free slots. Takes the catalog's lock.
    pub(crate) fn host_usage(&self) -> (usize, usize) {
        let usage = self.shared.catalog.usage(HOST);
        usage.map_or((0, 0), |usage| (usage.blocks as usize, usage.free as usize))
    }

    /// Whether the disk has the block.
    pub(crate) fn is_on_disk(&self, identity: &BlockIdentity) -> bool {
        self.shared.holds(DISK, identity)
    }

    /// The leading blocks of a chain that host memory has now. Takes no lock and asks no other thread.
    pub(crate) fn hold_prefix(&self, chain: &[BlockIdentity]) -> Vec<HostBlock> {
        let mut leases = Vec::with_capacity(chain.len());
        self.shared.catalog.lease_prefix(HOST, chain, &mut leases);
        leases.into_iter().map_while(|lease| self.shared.memory.held(lease)).collect()
    }

    /// Reserves a slot of host memory, by evicting on this thread if need be. `None` while no slot is free
    /// and the disk is behind: blocks that it has not written yet would be lost. The store's thread publishes
    /// the evictions; a disk must be written through.
    pub(crate) fn reserve_evicting(&self) -> Option<NewSlot> {
        if let Some(free) = self.shared.catalog.reserve_free(HOST, quota::UNOWNED) {
            return Some(NewSlot::new(free.fill(), Arc::clone(&self.shared.memory)));
        }
        let slots = self.shared.memory.slot_count();
        if self.shared.unwritten.load(Ordering::Relaxed) > slots / UNWRITTEN_SHARE {
            return None;
        }
        let (mut evicted, mut reserved) = (Vec::new(), Vec::new());
        self.shared.catalog.reserve(HOST, 1, quota::UNOWNED, &mut evicted, &mut reserved);
        StoreCounters::add(&self.shared.counters.evicted, evicted.len());
        evicted.into_iter().for_each(|evicted| self.shared.evicted_elsewhere.push(evicted.identity));
        let filling = reserved.pop()?.fill();
        Some(NewSlot::new(filling, Arc::clone(&self.shared.memory)))
    }

    /// Stores the block in a slot that was filled and verified; `done` is told on the store's thread whether host memory has it.
    pub(crate) fn put_verified(
        &self,
        identity: BlockIdentity,
        description: Description,
        slot: NewSlot,
        (bytes, checksum): (usize, u64),
        done: impl FnOnce(bool) + Send + 'static,
    ) -> Result<(), Throttled<()>> {
        self.put_filling(
            identity,
            description,
            Source::Filled { filling: slot.into_filling(), bytes, checksum },
            done,
        )
    }

    /// Stores the block in a slot that the caller has filled; `done` is told on the store's thread whether host memory has it.
    pub fn put_slot(
        &self,
        identity: BlockIdentity,
        description: Description,
        slot: NewSlot,
        done: impl FnOnce(bool) + Send + 'static,
    ) -> Result<(), Throttled<()>> {
        let (filling, bytes, checksum) = slot.into_parts();
        if bytes > self.shared.config.block_bytes {
            return Err(Throttled(()));
        }
        self.put_filling(identity, description, Source::Filled { filling, bytes, checksum }, done)
    }

    fn put_filling(
        &self,
        identity: BlockIdentity,
        description: Description,
        source: Source,
        done: impl FnOnce(bool) + Send + 'static,
    ) -> Result<(), Throttled<()>> {
        let done = Some(Box::new(done) as _);
        let block = NewBlock { identity, description, source, checksum: None, done };
        self.offloads.try_send(block).map_err(|_| {
            StoreCounters::add(&self.shared.counters.throttled, 1);
            Throttled(())
        })
    }

    /// Queues the copy of a chain into slots; [`crate::StoreEvent::Onboarded`] with the request's number follows. Blocks that
    /// have gone since the plan was made are simply not counted as verified.
    pub fn onboard(&self, onboard: Onboard) -> Result<(), Throttled<Onboard>> {
        self.queue_onboard(onboard, false)
    }

    /// The same into slots of a device's memory, for a caller who verifies there what arrived: blocks count as verified when
    /// they were copied. The caller holds the blocks, and so knows their checksums ([`HostBlock::checksum`]).
    pub fn onboard_unverified(&self, onboard: Onboard) -> Result<(), Throttled<Onboard>> {
        self.queue_onboard(onboard, true)
    }

    fn queue_onboard(&self, onboard: Onboard, verified_by_caller: bool) -> Result<(), Throttled<Onboard>> {
        assert_eq!(onboard.chain.len(), onboard.targets.len(), "one slot for each block");
        let Onboard { request, chain, first, targets, deadline } = onboard;
        let destination = Destination::Slots(targets);
        let wanted = LoadRequest { request, chain, first, destination, verified_by_caller, deadline };
        self.send(Job::Load(wanted)).map_err(|job| match job {
            Job::Load(LoadRequest { chain, destination: Destination::Slots(targets), .. }) => {
                Throttled(Onboard { request, chain, first, targets, deadline })
            }
            _ => unreachable!("it went in as a load into slots"),
        })
    }

    /// Brings a chain, from its root, into host memory and holds it there: `reply` gets the leading blocks, on the store's
    /// thread.
    pub fn hold(
        &self,
        chain: Vec<BlockIdentity>,
        deadline: Instant,
        reply: impl FnOnce(Vec<HostBlock>) + Send + 'static,
    ) -> Result<(), Throttled<()>> {
        let request = self.next_request.fetch_add(1, Ordering::Relaxed);
        let destination = Destination::Held(Box::new(reply));
        let wanted =
            LoadRequest { request, chain, first: 0, destination, verified_by_caller: false, deadline };
        self.send(Job::Load(wanted)).map_err(|_| Throttled(()))
    }

    /// The blocks of a chain, if host memory has all of them now. Takes no lock and asks no other thread.
    #[must_use]
    pub fn hold_now(&self, chain: &[BlockIdentity]) -> Option<Vec<HostBlock>> {
        let catalog = &self.shared.catalog;
        let mut leases = Vec::with_capacity(chain.len());
        catalog.lease_prefix(HOST, chain, &mut leases);
        self.all_held(chain, leases, |identity| {
            catalog.lease(HOST, identity).or_else(|| catalog.lease(MAPPED, identity))
        })
    }

    /// The same without counting as a use, for callers that look at blocks before or after a load, which
    /// counts. The eviction policies do not see it.
    #[must_use]
    pub fn pin_now(&self, chain: &[BlockIdentity]) -> Option<Vec<HostBlock>> {
        let catalog = &self.shared.catalog;
        let mut pins = Vec::with_capacity(chain.len());
        catalog.pin_prefix(HOST, chain, &mut pins);
        self.all_held(chain, pins, |identity| {
            catalog.pin(HOST, identity).or_else(|| catalog.pin(MAPPED, identity))
        })
    }

    /// Returns the blocks of a chain of which `leases` are the first, if each of the others can be leased.
    fn all_held(
        &self,
        chain: &[BlockIdentity],
        mut leases: Vec<Lease>,
        lease: impl Fn(&BlockIdentity) -> Option<Lease>,
    ) -> Option<Vec<HostBlock>> {
        for identity in &chain[leases.len()..] {
            leases.push(lease(identity)?);
        }
        leases.into_iter().map(|lease| self.shared.memory.held(lease)).collect()
    }

    /// Counts a use of the blocks of a chain that host memory or the disk has, for a caller that needs no
    /// copy of them.
    pub fn touch(&self, chain: &[BlockIdentity]) {
        [HOST, DISK].into_iter().for_each(|tier| self.shared.catalog.touch(tier, chain));
    }

    /// Starts a search in the tiers of other nodes; [`crate::StoreEvent::Prepared`] follows.
    pub fn prepare(&self, prepare: Prepare) -> Result<(), Throttled<Prepare>> {
        self.send(Job::Prepare(prepare)).map_err(|job| match job {
            Job::Prepare(prepare) => Throttled(prepare),
            _ => unreachable!("it went in as a search"),
        })
    }

    /// Cancels a request; no event of it follows.
    pub fn cancel(&self, request: u64) {
        // No bound is checked: the work inside is bounded already, and a cancellation reduces it.
        let _stopped = self.messages.send(Message::Job(Job::Cancel(request)));
    }

    /// Discards blocks in every tier of this node.
    pub fn forget(&self, chain: Vec<BlockIdentity>) {
        let _stopped = self.messages.send(Message::Job(Job::Forget(chain)));
    }

    /// Discards the host memory copies of blocks that a reader found damaged there. The disk's copies stay,
    /// and are verified when they are read.
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
