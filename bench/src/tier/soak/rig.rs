//! The store, the pool in front of it, and the state shared by all conversations.

use std::collections::{HashSet, VecDeque};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use crossbeam_channel::{Receiver, Sender, unbounded};
use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool, SlotRef};
use kvstore_block::{BlockIdentity, IdentityChain};
use kvstore_catalog::PolicyKind;
use kvstore_store::{HostBlock, HostTier, Medium, Store, StoreBuilder, StoreConfig, StoreEvent};

use super::super::files::disk;
use super::SoakArgs;

/// Tokens of a block in plans.
pub(super) const BLOCK_TOKENS: usize = 16;
/// Most blocks of a conversation.
pub(super) const CONVERSATION_BLOCKS_MAX: u32 = 64;
/// Most new blocks of a turn.
pub(super) const TURN_BLOCKS_MAX: usize = 16;
/// Most blocks that are onboarded at a time.
pub(super) const ONBOARD_BLOCKS_MAX: usize = 32;
/// Slots of the pool for each conversation.
const SLOTS_EACH: usize = TURN_BLOCKS_MAX + ONBOARD_BLOCKS_MAX;
/// Time without changes after which the work counts as ended, and longest wait for it.
const IDLE_FOR: Duration = Duration::from_millis(300);
const IDLE_TIMEOUT: Duration = Duration::from_secs(120);
/// Time after that within which all leases must be given back.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// A conversation. Its number determines its blocks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Conversation {
    pub(super) number: u64,
    /// Number of blocks offloaded so far.
    pub(super) blocks: u32,
}

impl Conversation {
    /// Returns the first `blocks` identities of the conversation.
    pub(super) fn chain(&self, blocks: u32) -> Vec<BlockIdentity> {
        let mut chain = IdentityChain::new(self.number, &["soak"]);
        (0..blocks).map(|position| chain.next(&[position; BLOCK_TOKENS])).collect()
    }
}

/// An answer for a conversation's thread.
pub(super) enum Answer {
    Onboarded { request: u64, slots: Vec<SlotRef>, verified: usize },
    Held(Vec<HostBlock>),
}

/// Counts of the work done.
#[derive(Debug, Default)]
pub(super) struct Tally {
    /// Blocks that host memory took for the first time, and blocks that were offloaded again.
    pub(super) distinct: AtomicU64,
    pub(super) again: AtomicU64,
    /// Blocks read back and compared, and their wrong bytes.
    pub(super) verified: AtomicU64,
    pub(super) wrong_bytes: AtomicU64,
    pub(super) cancelled: AtomicU64,
    /// Requests that brought fewer blocks than wanted: late, evicted or deleted meanwhile.
    pub(super) short: AtomicU64,
    pub(super) holds: AtomicU64,
    pub(super) forgets: AtomicU64,
    pub(super) throttled: AtomicU64,
    pub(super) unanswered: AtomicU64,
}

pub(super) fn add(counter: &AtomicU64, count: usize) {
    counter.fetch_add(count as u64, Ordering::Relaxed);
}

pub(super) fn get(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// Locks a mutex under which no code panics.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The store, the pool, and the shared state of a run.
pub(super) struct Rig {
    pub(super) store: Store,
    pub(super) pool: Arc<SlotPool>,
    pub(super) tally: Arc<Tally>,
    /// One inbox per thread.
    pub(super) inboxes: Vec<(Sender<Answer>, Receiver<Answer>)>,
    /// Blocks in transit to host memory for the first time.
    fresh: Arc<Mutex<HashSet<BlockIdentity>>>,
    /// The latest conversations, more than the tiers hold.
    conversations: Mutex<VecDeque<Conversation>>,
    conversations_max: usize,
    slab_bytes: u64,
}

/// Bytes of the slabs of host memory and of the pool.
pub(super) fn slab_bytes(args: &SoakArgs) -> Result<[u64; 2]> {
    let mapped = |slot_count: u64| {
        let layout = SlabLayout { slot_bytes: args.block as usize, slot_count: slot_count as u32 };
        layout.mapped_bytes().map(|bytes| bytes as u64).context("more slots than there can be")
    };
    Ok([mapped(args.host / args.block)?, mapped((args.threads * SLOTS_EACH) as u64)?])
}

impl Rig {
    pub(super) fn new(args: &SoakArgs, folder: &Path) -> Result<Self> {
        let block_bytes = args.block as usize;
        let slots = (args.host / args.block) as u32;
        let slot_count = (args.threads * SLOTS_EACH) as u32;
        let layout = SlabLayout { slot_bytes: block_bytes, slot_count };
        let pool = SlotPool::new(Arc::new(Slab::create("kvasir-soak-pool", layout, PageSize::Standard)?));
        let inboxes: Vec<(Sender<Answer>, Receiver<Answer>)> =
            (0..args.threads).map(|_| unbounded()).collect();
        let (tally, fresh) = (Arc::new(Tally::default()), Arc::new(Mutex::new(HashSet::new())));
        let host = HostTier { slots, pages: PageSize::Standard, eviction: PolicyKind::Lru };
        let config = StoreConfig::new(block_bytes, BLOCK_TOKENS as u32);
        let builder = StoreBuilder::new(config, host)?.disk(disk(folder, block_bytes, args.disk));
        let senders = inboxes.iter().map(|(sender, _)| sender.clone()).collect();
        let (store, _) = builder.start(notify(senders, Arc::clone(&tally), Arc::clone(&fresh)))?;
        // A worker so slow that onboarding is nearly always the better plan.
        for _ in 0..32 {
            store.observe_prefill(BLOCK_TOKENS, 0, Duration::from_millis(500));
        }
        let held = (args.host + args.disk) / args.block / u64::from(CONVERSATION_BLOCKS_MAX / 2);
        let conversations_max = held as usize * 2 + args.threads;
        let conversations = Mutex::new(VecDeque::with_capacity(conversations_max + 1));
        let slab_bytes = slab_bytes(args)?.iter().sum();
        Ok(Self { store, pool, tally, inboxes, fresh, conversations, conversations_max, slab_bytes })
    }

    pub(super) fn slab_bytes(&self) -> u64 {
        self.slab_bytes
    }

    /// Value of the counter with this name, of the store or its disk's log.
    pub(super) fn counted(&self, name: &str) -> u64 {
        let counters = self.store.counters().snapshot();
        let disk = self.store.disk_counters().map(|counters| counters.snapshot());
        let mut all = counters.iter().chain(disk.iter().flatten());
        all.find(|(found, ..)| *found == name).map_or(0, |(.., value)| *value)
    }

    /// Number of blocks copied into host memory and out of it.
    pub(super) fn operations(&self) -> u64 {
        self.counted("offloaded_blocks") + self.counted("onboarded_blocks")
    }

    /// Whether as much data as was wanted has passed through the disk and back.
    pub(super) fn has_turned_over(&self, args: &SoakArgs) -> bool {
        let counted = ["disk_evicted_blocks", "disk_read_blocks"].map(|name| self.counted(name));
        get(&self.tally.distinct) * args.block >= args.data && !counted.contains(&0)
    }

    /// Marks a block as expected for the first time.
    pub(super) fn expect(&self, identity: BlockIdentity) {
        lock(&self.fresh).insert(identity);
    }

    /// Makes a conversation, in its current state, available to all threads.
    pub(super) fn publish(&self, conversation: Conversation) {
        let mut conversations = lock(&self.conversations);
        conversations.retain(|sample_conversation| sample_conversation.number != conversation.number);
        conversations.push_back(conversation);
        if conversations.len() > self.conversations_max {
            conversations.pop_front();
        }
    }

    /// Returns one of the published conversations, chosen by `draw`.
    pub(super) fn sample_conversation(&self, draw: u64) -> Option<Conversation> {
        let conversations = lock(&self.conversations);
        conversations.get((draw % conversations.len().max(1) as u64) as usize).copied()
    }

    /// Waits until no block moves, and then until all leases are given back. Returns the time of the latter.
    pub(super) fn wait_until_idle(&self) -> Result<Duration> {
        let (started, mut last, mut since) = (Instant::now(), [0; 4], Instant::now());
        while since.elapsed() < IDLE_FOR {
            let names = ["offloaded_blocks", "disk_written_blocks", "disk_read_blocks", "tombstones"];
            let now = names.map(|name| self.counted(name));
            if now != last {
                (last, since) = (now, Instant::now());
            }
            ensure!(
                started.elapsed() < IDLE_TIMEOUT,
                "still working {IDLE_TIMEOUT:?} after the last request"
            );
            std::thread::sleep(Duration::from_millis(10));
        }
        let resting = Instant::now();
        while self.in_use() != (0, 0) && resting.elapsed() < RELEASE_TIMEOUT {
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(resting.elapsed())
    }

    /// Slots of host memory and of the pool in use.
    pub(super) fn in_use(&self) -> (usize, usize) {
        (self.store.leased_slots(), self.pool.slot_count() - self.pool.free_count())
    }
}

/// Runs on the store's thread: counts blocks that arrived for the first time, and passes answers to waiting threads.
fn notify(
    inboxes: Vec<Sender<Answer>>,
    tally: Arc<Tally>,
    fresh: Arc<Mutex<HashSet<BlockIdentity>>>,
) -> impl FnMut(StoreEvent) + Send + 'static {
    move |moved| match moved {
        StoreEvent::Stored { identity, medium: Medium::Host } if lock(&fresh).remove(&identity) => {
            add(&tally.distinct, 1);
        }
        // A block that is still there was refused: host memory had no room for it.
        StoreEvent::Offloaded { identity } => {
            lock(&fresh).remove(&identity);
        }
        StoreEvent::Onboarded { request, slots, verified } => {
            if let Some(inbox) = inboxes.get((request >> 32) as usize) {
                // A thread that has ended expects no answer; dropping it releases the slots.
                let _ended = inbox.send(Answer::Onboarded { request, slots, verified });
            }
        }
        StoreEvent::Stored { .. } | StoreEvent::Removed { .. } | StoreEvent::Prepared { .. } => {}
    }
}
