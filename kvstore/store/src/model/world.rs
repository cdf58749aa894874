//! A store with everything around it: requests and answers of its clients, and the invariants.

use std::collections::{HashMap, HashSet};
use std::ops::AddAssign;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::plan::{ReturnConfig, TIERS, Tier};
use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool};
use kvstore_block::BlockIdentity;
use kvstore_catalog::{Catalog, CatalogConfig, PolicyKind, SlotOrder, TenantId, TierConfig};
use kvstore_disk::{AdmissionConfig, Usage};

use super::disk::{Faults, ModelDisk};
use super::far::OtherNodes;
use super::pool::ModelPool;
use super::retained::{RETENTIONS, RetentionOracle};
use super::{BLOCK, QUIET_EVERY, Random, content};
use crate::background::Background;
use crate::bandwidth::Bandwidth;
use crate::device::DeviceCopies;
use crate::disk::{DiskLink, LocalDisk};
use crate::far::{SecondaryTierInbox, SecondaryTiers};
use crate::load::Loads;
use crate::memory::HostMemory;
use crate::offload::Offloads;
use crate::quota;
use crate::shared::{DISK, HOST, MAPPED, Shared};
use crate::store_thread::{Round, StoreThread};
use crate::tiers::Tiers;
use crate::{
    Description, HostBlock, Medium, NewSlot, Offload, Onboard, Prepare, Store, StoreConfig, StoreEvent,
    WriteMode,
};

/// Slots of the worker's pool.
const POOL_SLOTS: u32 = 24;
const CONVERSATIONS: usize = 6;
/// Blocks of the longest conversation.
const CHAIN_MAX: usize = 9;
/// Blocks that two conversations have in common.
const SHARED_BLOCKS: usize = 3;
/// Rounds after which a store that is not idle never will be.
const ROUNDS_MAX: usize = 100_000;
/// Longer than anything in the store waits.
const HOUR: Duration = Duration::from_secs(3600);

/// Number of occurrences of each event.
#[derive(Debug, Default)]
pub(super) struct Totals {
    pub(super) offloaded: u64,
    pub(super) onboarded_blocks: u64,
    pub(super) held_blocks: u64,
    pub(super) searches: u64,
    pub(super) disk_answers: u64,
    pub(super) rotten_reads: u64,
    pub(super) far_reads: u64,
    pub(super) far_mapped: u64,
    pub(super) far_offers: u64,
    pub(super) forgotten: u64,
    pub(super) prefetched: u64,
    pub(super) evicted: u64,
    pub(super) pool_reads: u64,
    pub(super) pool_writes: u64,
    pub(super) retained: u64,
}

impl Totals {
    fn all(&mut self) -> [&mut u64; 15] {
        [
            &mut self.offloaded,
            &mut self.onboarded_blocks,
            &mut self.held_blocks,
            &mut self.searches,
            &mut self.disk_answers,
            &mut self.rotten_reads,
            &mut self.far_reads,
            &mut self.far_mapped,
            &mut self.far_offers,
            &mut self.forgotten,
            &mut self.prefetched,
            &mut self.evicted,
            &mut self.pool_reads,
            &mut self.pool_writes,
            &mut self.retained,
        ]
    }

    pub(super) fn is_everything_used(&mut self) -> bool {
        self.all().iter().all(|count| **count > 0)
    }
}

impl AddAssign for Totals {
    fn add_assign(&mut self, mut other: Self) {
        self.all().into_iter().zip(other.all()).for_each(|(sum, count)| *sum += *count);
    }
}

/// Requests, by what they wait for.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Asked {
    Onboard(Vec<BlockIdentity>),
    Prepare,
}

pub(super) struct World {
    random: Random,
    now: Instant,
    store_thread: StoreThread,
    store: Arc<Store>,
    /// Clients of a pool over the store. Its events have no listener then.
    pool_clients: Option<ModelPool>,
    moved: Receiver<StoreEvent>,
    disk: Option<ModelDisk>,
    nodes: Vec<OtherNodes>,
    pool: Arc<SlotPool>,
    /// Requests that have not ended, by number; those that were cancelled may end or not.
    requests: HashMap<u64, Asked>,
    cancelled: HashSet<u64>,
    next_request: u64,
    /// New blocks that the store has and has not answered.
    offloads: HashMap<BlockIdentity, usize>,
    /// Answers to those that are told by a call.
    stored: (Sender<BlockIdentity>, Receiver<BlockIdentity>),
    /// Blocks that were held, with the chain that was asked for; `holds`: those of which it is to come.
    held: (Sender<Held>, Receiver<Held>),
    holds: usize,
    in_hand: Vec<HostBlock>,
    names: Vec<BlockIdentity>,
    slots_in_hand: Vec<(BlockIdentity, Description, NewSlot)>,
    /// Tiers of each block by the events that listeners got.
    published: HashSet<(BlockIdentity, Medium)>,
    /// Blocks that were forgotten and not given since.
    absent: HashSet<BlockIdentity>,
    retention: RetentionOracle,
    /// Whether host memory is damaged now and then.
    rots: bool,
    /// Whether blocks in host memory may be damaged, there or before they came.
    may_damage: bool,
    /// Whether a block may be lost that was not forgotten: it is damaged, a read of the disk fails, or a
    /// client of the pool takes it for damaged.
    may_lose: bool,
    totals: Totals,
}

type Held = (Vec<BlockIdentity>, Vec<HostBlock>);

/// The block at this place of a conversation.
fn identity(conversation: usize, position: usize) -> BlockIdentity {
    let number = match position < SHARED_BLOCKS {
        true => (conversation / 2) * 100 + position,
        false => 10_000 + conversation * 100 + position,
    };
    BlockIdentity((number as u128 + 1).to_le_bytes())
}

fn chain(conversation: usize, blocks: usize) -> Vec<BlockIdentity> {
    (0..blocks).map(|position| identity(conversation, position)).collect()
}

impl World {
    pub(super) fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let now = Instant::now();
        let host_slots = 6 + random.below(24) as u32;
        let mut config = StoreConfig::new(BLOCK, 16);
        config.disk_write = if random.percent(50) { WriteMode::Through } else { WriteMode::Back };
        config.tenant_share = *random.of(&[1.0, 1.0, 0.5]);
        config.retention.share = *random.of(&[0.25, 0.25, 0.6]);
        config.prefetch =
            random.percent(50).then(|| ReturnConfig { prefetch_chance: 0.0, ..ReturnConfig::default() });
        let policies = [PolicyKind::Lru, PolicyKind::S3Fifo, PolicyKind::Cost];
        let default_quota = quota::of_share(config.tenant_share, host_slots);
        let mut tiers =
            vec![TierConfig { default_quota, ..TierConfig::new(host_slots, *random.of(&policies)) }];
        let (sender, inbox) = unbounded();
        let (mut local, mut disk) = (None, None);
        if random.percent(80) {
            let slots = 6 + random.below(48) as u32;
            let default_quota = quota::of_share(config.tenant_share, slots);
            let order = SlotOrder::FirstFreed;
            tiers.push(TierConfig { order, default_quota, ..TierConfig::new(slots, *random.of(&policies)) });
            let (link, commands) = DiskLink::without_thread(4 + random.below(12));
            let frequency_min = 1 + random.below(2) as u32;
            let admission = AdmissionConfig { frequency_min, ..AdmissionConfig::default() };
            local = Some(LocalDisk::new(link, admission, Usage::default(), host_slots));
            let mut chance = |most| if random.percent(50) { random.below(most) } else { 0 };
            let faults = Faults { failed: chance(20), stuck: chance(10), rotten: chance(20) };
            disk = Some(ModelDisk::new(commands, sender.clone(), faults));
        }
        let (mut links, mut nodes) = (Vec::new(), Vec::new());
        for tier in [Tier::Remote, Tier::Object] {
            if random.percent(40) {
                let patience = *random.of(&[Duration::ZERO, Duration::from_millis(100), HOUR]);
                let (link, node) = OtherNodes::new(tier, patience, SecondaryTierInbox(sender.clone()));
                links.push(link);
                nodes.push(node);
            }
        }
        let slots = tiers.iter().map(|tier| tier.slots).collect();
        tiers.resize(usize::from(MAPPED.0), TierConfig::new(1, PolicyKind::Lru));
        tiers.push(TierConfig::new(2 + random.below(24) as u32, PolicyKind::Lru));
        let quotas = quota::unlimited(tiers.len());
        let catalog = CatalogConfig { quotas, tenants_max: quota::TENANTS_MAX, ..CatalogConfig::new(tiers) };
        let catalog = Arc::new(Catalog::new(&catalog).expect("a catalog"));
        let memory = HostMemory::new(BLOCK, host_slots, PageSize::Standard, None).expect("memory");
        let kinds = links.iter().map(|link| link.tier()).collect();
        let has_disk = local.is_some();
        let shared = Arc::new(Shared::new(catalog, Arc::new(memory), config, has_disk, kinds));
        let (events, moved) = unbounded();
        let notify = move |event| {
            let _over = events.send(event);
        };
        let (offloads, new_blocks) = bounded(64);
        let bandwidth = Bandwidth::new([None; TIERS], now, Instant::now);
        let store_thread = StoreThread {
            inbox,
            offloads: Offloads::new(new_blocks),
            tiers: Tiers::new(Arc::clone(&shared), Box::new(notify), local, bandwidth),
            loads: Loads::default(),
            far: SecondaryTiers::new(links),
            background: Background::new(shared.config.prefetch, now),
            device: DeviceCopies::new(None),
            busy_rounds: 0,
        };
        // This thread is the store's.
        let serves_pool = shared.config.disk_write == WriteMode::Through && random.percent(40);
        let store = Store::new(shared, sender, offloads, slots, None, std::thread::spawn(|| ()));
        let store = Arc::new(store);
        let pool_clients = serves_pool.then(|| ModelPool::new(Arc::clone(&store)));
        let layout = SlabLayout { slot_bytes: BLOCK, slot_count: POOL_SLOTS };
        let slab = Slab::create("kvasir-model", layout, PageSize::Standard).expect("memory");
        let names = (0..CONVERSATIONS).flat_map(|conversation| chain(conversation, CHAIN_MAX)).collect();
        let rots = random.percent(30);
        let may_damage = rots || !nodes.is_empty() || disk.as_ref().is_some_and(ModelDisk::may_rot);
        let disk_fails = disk.as_ref().is_some_and(ModelDisk::may_fail);
        let may_lose = may_damage || disk_fails || pool_clients.is_some();
        Self {
            random,
            now,
            store_thread,
            store,
            pool_clients,
            moved,
            disk,
            nodes,
            pool: SlotPool::new(Arc::new(slab)),
            requests: HashMap::new(),
            cancelled: HashSet::new(),
            next_request: 1,
            offloads: HashMap::new(),
            stored: unbounded(),
            held: unbounded(),
            holds: 0,
            in_hand: Vec::new(),
            names,
            slots_in_hand: Vec::new(),
            published: HashSet::new(),
            absent: HashSet::new(),
            retention: RetentionOracle::default(),
            rots,
            may_damage,
            may_lose,
            totals: Totals::default(),
        }
    }

    pub(super) fn run(mut self, steps: u64) -> Totals {
        for step in 1..=steps {
            self.step();
            if step.is_multiple_of(QUIET_EVERY) {
                self.be_quiet();
            }
        }
        let counters = self.store.counters();
        let of = |count: &std::sync::atomic::AtomicU64| count.load(std::sync::atomic::Ordering::Relaxed);
        self.totals.prefetched = of(&counters.prefetched);
        self.totals.evicted = of(&counters.evicted);
        self.totals.retained = of(&counters.retention_pinned);
        if let Some(disk) = &self.disk {
            (self.totals.disk_answers, self.totals.rotten_reads) = (disk.answered, disk.found_rotten);
        }
        if let Some(pool) = &self.pool_clients {
            (self.totals.pool_reads, self.totals.pool_writes) = (pool.read, pool.registered);
        }
        self.totals.far_reads = self.nodes.iter().map(|node| node.delivered).sum();
        self.totals.far_mapped = self.nodes.iter().map(|node| node.mapped).sum();
        self.totals.far_offers = self.nodes.iter().map(|node| node.offered).sum();
        self.totals
    }

    fn step(&mut self) {
        self.now += Duration::from_micros(self.random.below(20_000) as u64);
        match self.random.below(100) {
            0..22 => self.offload(),
            22..40 => self.onboard(),
            40..48 => self.hold(),
            48..54 => self.prepare(),
            54..57 => self.cancel(),
            57..60 => self.forget(),
            60..64 => self.conversation(),
            64..68 => self.release_held(),
            68..70 => self.retain(),
            70..72 => self.rot(),
            72..74 => {
                let is_refusing = self.random.percent(30);
                self.nodes.iter().for_each(|node| node.refuse(is_refusing));
            }
            74..90 if self.pool_clients.is_some() => self.pool_step(),
            _ => self.answer(false),
        }
        if let Some(disk) = &mut self.disk
            && self.random.percent(70)
        {
            disk.take_command();
        }
        for _ in 0..self.random.below(3) {
            self.round();
        }
    }

    /// Something outside answers.
    fn answer(&mut self, is_honest: bool) {
        if let Some(disk) = &mut self.disk {
            disk.answer(&mut self.random, is_honest);
        }
        for node in &mut self.nodes {
            node.answer(self.now, &mut self.random, is_honest);
        }
    }

    fn round(&mut self) -> Round {
        let round = self.store_thread.round(self.now);
        assert_ne!(round, Round::Stopped);
        self.take_in();
        if let Some(pool) = &mut self.pool_clients {
            pool.take_answers(self.may_damage);
        }
        self.check_round();
        self.retention.check(&self.store_thread, self.now, self.may_lose);
        if round == Round::Idle {
            self.store_thread.timeout();
        }
        round
    }

    /// A client of the pool does something.
    fn pool_step(&mut self) {
        let prefix = self.prefix();
        if let Some(pool) = &mut self.pool_clients {
            pool.step(prefix, &mut self.random, self.may_damage);
            pool.registering().for_each(|identity| {
                self.absent.remove(identity);
            });
        }
    }

    /// A conversation, and the length of a prefix of it.
    fn prefix(&mut self) -> Vec<BlockIdentity> {
        let (conversation, blocks) = (self.random.below(CONVERSATIONS), 1 + self.random.below(CHAIN_MAX));
        chain(conversation, blocks)
    }

    /// The blocks of a prefix are new, or some of them.
    fn offload(&mut self) {
        let prefix = self.prefix();
        let first = if self.random.percent(50) { 0 } else { self.random.below(prefix.len()) };
        for position in first..prefix.len() {
            let identity = prefix[position];
            let parent = position.checked_sub(1).map(|before| prefix[before]);
            let tenant = TenantId(self.random.below(2) as u32);
            let meta: Arc<[u8]> = [position as u8; 5].into();
            let description = Description { parent, position: position as u32, meta, tenant };
            match self.random.below(3) {
                0 => self.offload_slot(identity, description),
                1 => self.put(identity, description),
                _ => self.put_slot(identity, description),
            }
        }
    }

    fn offload_slot(&mut self, identity: BlockIdentity, description: Description) {
        let Some(slot) = self.pool.acquire() else { return };
        slot.slab().write(slot.slot(), 0, &content(&identity));
        if self.store.offload(Offload { identity, description, slot }).is_ok() {
            self.offloads_one(identity);
        }
    }

    fn put(&mut self, identity: BlockIdentity, description: Description) {
        let bytes = bytes::Bytes::copy_from_slice(&content(&identity));
        let (at, stored) = (self.random.below(BLOCK), self.stored.0.clone());
        let pieces = vec![bytes.slice(..at), bytes.slice(at..)];
        let done = move |_| stored.send(identity).expect("the test is there");
        if self.store.put(identity, description, pieces, done).is_ok() {
            self.offloads_one(identity);
        }
    }

    /// Fills a free slot, and hands it over now or later or never.
    fn put_slot(&mut self, identity: BlockIdentity, description: Description) {
        let Some(mut slot) = self.store.reserve(description.tenant) else { return };
        let bytes = content(&identity);
        let (start, end) = bytes.split_at(self.random.below(BLOCK));
        assert!(slot.fill([start, end].into_iter()), "it has room for a block");
        self.slots_in_hand.push((identity, description, slot));
        while self.slots_in_hand.len() > 2 || !self.slots_in_hand.is_empty() && self.random.percent(60) {
            let at = self.random.below(self.slots_in_hand.len());
            let (identity, description, slot) = self.slots_in_hand.swap_remove(at);
            let stored = self.stored.0.clone();
            let done = move |_| stored.send(identity).expect("the test is there");
            if self.random.percent(90) && self.store.put_slot(identity, description, slot, done).is_ok() {
                self.offloads_one(identity);
            }
        }
    }

    fn offloads_one(&mut self, identity: BlockIdentity) {
        *self.offloads.entry(identity).or_default() += 1;
        self.absent.remove(&identity);
    }

    fn deadline(&mut self) -> Instant {
        match self.random.below(10) {
            0 => self.now,
            1 => self.now + Duration::from_millis(20),
            _ => self.now + HOUR,
        }
    }

    fn request(&mut self, asked: Asked) -> u64 {
        let request = self.next_request;
        self.next_request += 1;
        self.requests.insert(request, asked);
        request
    }

    fn onboard(&mut self) {
        let prefix = self.prefix();
        let first = if self.random.percent(70) { 0 } else { self.random.below(prefix.len()) };
        let chain = prefix[first..].to_vec();
        let targets: Vec<_> = chain.iter().map_while(|_| self.pool.acquire()).collect();
        if targets.len() < chain.len() {
            return;
        }
        targets.iter().for_each(|target| target.slab().write(target.slot(), 0, &[0; BLOCK]));
        let deadline = self.deadline();
        let request = self.request(Asked::Onboard(chain.clone()));
        let onboard = Onboard { request, chain, first: first as u32, targets, deadline };
        self.store.onboard(onboard).expect("few are inside");
    }

    fn hold(&mut self) {
        let (chain, deadline, held) = (self.prefix(), self.deadline(), self.held.0.clone());
        let asked = chain.clone();
        let reply = move |blocks| held.send((asked, blocks)).expect("the test is there");
        self.store.hold(chain, deadline, reply).expect("few are inside");
        self.holds += 1;
    }

    fn prepare(&mut self) {
        let (chain, deadline) = (self.prefix(), self.deadline());
        let device_blocks = if self.random.percent(70) { 0 } else { self.random.below(chain.len()) };
        let metas = (device_blocks..chain.len()).map(|position| [position as u8; 5].into()).collect();
        let request = self.request(Asked::Prepare);
        let prepare = Prepare { request, chain, device_blocks, metas, tenant: TenantId(0), deadline };
        self.store.prepare(prepare).expect("few are inside");
        self.totals.searches += 1;
    }

    fn cancel(&mut self) {
        let mut numbers: Vec<u64> = self.requests.keys().copied().collect();
        numbers.sort_unstable();
        if let Some(&request) = (!numbers.is_empty()).then(|| self.random.of(&numbers)) {
            self.store.cancel(request);
            self.cancelled.insert(request);
        }
    }

    fn forget(&mut self) {
        let prefix = self.prefix();
        let chain = prefix[self.random.below(prefix.len())..].to_vec();
        self.totals.forgotten += 1;
        self.retention.forgotten(&chain);
        if self.random.percent(30) {
            return self.store.forget_on_host(chain);
        }
        // A search may bring a block back, and so may a new block that is in the queue.
        let of_pool: Vec<BlockIdentity> =
            self.pool_clients.iter().flat_map(ModelPool::registering).copied().collect();
        let is_offloaded =
            |identity: &BlockIdentity| self.offloads.contains_key(identity) || of_pool.contains(identity);
        let gone: Vec<_> = chain.iter().copied().filter(|identity| !is_offloaded(identity)).collect();
        self.store.forget(chain);
        self.round();
        if self.nodes.is_empty() {
            self.absent.extend(gone);
        }
    }

    fn conversation(&mut self) {
        let prefix = self.prefix();
        if self.random.percent(50) {
            self.store.prompt_arrived(&prefix);
        } else {
            self.store.mark_conversation_idle(&prefix);
        }
    }

    /// The blocks of a prefix are to be retained for a while.
    fn retain(&mut self) {
        let mut prefix = self.prefix();
        if self.random.percent(30) {
            // Without the blocks before it.
            prefix.drain(..self.random.below(prefix.len()));
        }
        let how_long = *self.random.of(&RETENTIONS);
        let until = self.now + how_long;
        self.retention.asked(&prefix, until);
        self.store.retain(&prefix, how_long).expect("few are inside");
        while !self.store_thread.inbox.is_empty() {
            self.round();
        }
        self.retention.heard(&prefix, until);
    }

    /// Clients let go of blocks that they hold.
    fn release_held(&mut self) {
        let count = self.random.below(self.in_hand.len() + 1);
        self.in_hand.truncate(count);
        if self.random.percent(30) {
            self.slots_in_hand.pop();
        }
    }

    /// A bit of host memory flips.
    fn rot(&mut self) {
        if self.rots {
            let memory = &self.store_thread.tiers.shared.memory;
            let slot = memory.slot(self.random.below(memory.slot_count()) as u32);
            let (mut byte, at) = ([0], self.random.below(BLOCK));
            slot.slab().read(slot.slot(), at, &mut byte);
            slot.slab().write(slot.slot(), at, &[byte[0] ^ 1]);
        }
    }

    /// Takes in what the store tells.
    fn take_in(&mut self) {
        let moved: Vec<StoreEvent> = self.moved.try_iter().collect();
        for moved in moved {
            match moved {
                StoreEvent::Stored { identity, medium } => {
                    let is_new = self.published.insert((identity, medium));
                    assert!(is_new || self.is_told_again(medium), "stored twice in {medium:?}");
                }
                StoreEvent::Removed { identity, medium } => {
                    let was_there = self.published.remove(&(identity, medium));
                    assert!(was_there || self.is_told_again(medium), "removed twice from {medium:?}");
                }
                StoreEvent::Offloaded { identity } => self.offload_ended(identity),
                StoreEvent::Onboarded { request, slots, verified } => {
                    let Some(Asked::Onboard(chain)) = self.requests.remove(&request) else {
                        panic!("request {request} has ended already")
                    };
                    for (slot, identity) in slots.iter().zip(&chain).take(verified) {
                        let mut bytes = [0; BLOCK];
                        slot.slab().read(slot.slot(), 0, &mut bytes);
                        assert!(bytes == content(identity), "another block was brought in");
                    }
                    self.totals.onboarded_blocks += verified as u64;
                }
                StoreEvent::Prepared { request, .. } => {
                    let asked = self.requests.remove(&request);
                    assert_eq!(asked, Some(Asked::Prepare), "request {request} has ended already");
                }
            }
        }
        let stored: Vec<BlockIdentity> = self.stored.1.try_iter().collect();
        stored.into_iter().for_each(|identity| self.offload_ended(identity));
        while let Ok((chain, blocks)) = self.held.1.try_recv() {
            self.holds -= 1;
            self.totals.held_blocks += blocks.len() as u64;
            for (block, identity) in blocks.iter().zip(&chain) {
                let is_right = block.to_bytes().is_none_or(|bytes| bytes == content(identity));
                assert!(is_right, "another block is held");
            }
            self.in_hand.extend(blocks);
        }
    }

    /// Evictions by a pool are published later, when the block may be there again.
    fn is_told_again(&self, medium: Medium) -> bool {
        self.pool_clients.is_some() && medium == Medium::Host
    }

    fn offload_ended(&mut self, identity: BlockIdentity) {
        self.totals.offloaded += 1;
        let count = self.offloads.get_mut(&identity).expect("a new block ends once");
        *count -= 1;
        if *count == 0 {
            self.offloads.remove(&identity);
        }
    }

    /// Invariants after each round.
    fn check_round(&self) {
        for identity in &self.absent {
            let shared = &self.store_thread.tiers.shared;
            let is_there = [HOST, DISK, MAPPED].into_iter().any(|tier| shared.holds(tier, identity));
            assert!(!is_there, "a block that was forgotten is there");
        }
        let Some(disk) = &self.store_thread.tiers.disk else { return };
        disk.unwritten.check();
        let waiting: HashSet<_> =
            disk.reads.waiters().map(|(identity, waiter)| (*identity, *waiter)).collect();
        for load in self.store_thread.loads.waiting() {
            assert!(waiting.contains(&load), "a load waits for a read that does not know of it");
        }
    }

    fn is_answered(&self) -> bool {
        self.disk.as_ref().is_none_or(ModelDisk::is_idle) && self.nodes.iter().all(OtherNodes::is_idle)
    }

    /// Everything is answered and let go of: nothing may be left.
    fn be_quiet(&mut self) {
        self.nodes.iter().for_each(|node| node.refuse(false));
        let mut rounds = 0;
        // The loads first: none needs a deadline to end.
        for wait in [Duration::ZERO, HOUR, HOUR, HOUR] {
            self.now += wait;
            let mut idle_rounds = 0;
            loop {
                self.in_hand.clear();
                self.slots_in_hand.clear();
                if let Some(pool) = &mut self.pool_clients {
                    pool.release_held();
                }
                if let Some(disk) = &mut self.disk {
                    disk.take_command();
                }
                self.answer(true);
                let is_idle = self.round() == Round::Idle;
                rounds += 1;
                assert!(
                    rounds < ROUNDS_MAX,
                    "the store does not become idle: {} requests",
                    self.requests.len()
                );
                let is_quiet = self.pool_clients.as_ref().is_none_or(ModelPool::is_quiet);
                let is_over =
                    is_idle && is_quiet && self.is_answered() && !self.store_thread.tiers.has_tombstones();
                idle_rounds = if is_over && self.in_hand.is_empty() { idle_rounds + 1 } else { 0 };
                // Work that waits for room is tried again after an idle round.
                if idle_rounds == 3 {
                    break;
                }
            }
            if wait.is_zero() {
                assert_eq!(self.store_thread.loads.len(), 0, "loads wait although everything was answered");
                assert_eq!(self.holds, 0, "holds were not answered");
            }
        }
        // Leases of what was looked for in the last of these rounds end, too; a whole round would look for more.
        self.now += HOUR;
        self.store_thread.tiers.now = self.now;
        self.store_thread.tiers.expire_mapped();
        self.take_in();
        self.check_quiet();
    }

    fn check_quiet(&mut self) {
        self.requests.retain(|request, _| !self.cancelled.contains(request));
        self.cancelled.clear();
        assert!(self.requests.is_empty(), "requests that were never answered: {:?}", self.requests);
        assert!(self.offloads.is_empty(), "new blocks that were never answered: {:?}", self.offloads);
        assert_eq!(self.pool.used_count(), 0, "slots of the pool that never came back");
        assert!(self.retention.is_empty(), "the longest retention, an hour, is over");
        // Blocks fetched ahead stay held until their conversations go on, a quarter of host memory at most.
        let ahead = self.store_thread.background.held();
        assert!(ahead <= self.store_thread.tiers.host_slots() / 4, "{ahead} blocks are fetched ahead");
        assert_eq!(self.store.leased_slots(), 0, "slots of host memory that never came back");
        let leases: usize = self.nodes.iter_mut().map(OtherNodes::leases).sum();
        assert_eq!(leases, 0, "leases at pools that never end");
        let shared = &self.store_thread.tiers.shared;
        shared.catalog.debug_check();
        let published: HashSet<_> = (self.names.iter())
            .flat_map(|&identity| [(identity, HOST, Medium::Host), (identity, DISK, Medium::Disk)])
            .filter(|(identity, tier, _)| shared.holds(*tier, identity))
            .map(|(identity, _, medium)| (identity, medium))
            .collect();
        assert_eq!(self.published, published, "what listeners believe (left) is not so (right)");
        let (Some(disk), Some(local)) = (&self.disk, &self.store_thread.tiers.disk) else { return };
        let census = shared.catalog.census(DISK);
        assert_eq!(census.under_way + census.pinned, 0, "slots of the disk that never came back");
        assert_eq!(
            (local.writes.len(), local.reads.len()),
            (0, 0),
            "of the disk's operations all have ended"
        );
        for (slot, identity) in disk.kept() {
            let known = shared.catalog.places(&identity).and_then(|places| places.slot(DISK));
            assert_eq!(known, Some(slot), "after a restart the disk would give back a block that is gone");
        }
        for (identity, _) in published.iter().filter(|(_, medium)| *medium == Medium::Disk) {
            assert!(
                disk.kept().any(|(_, kept)| kept == *identity),
                "the disk does not have a block of its tier"
            );
        }
    }
}
