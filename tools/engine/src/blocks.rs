//! The blocks of a worker: which slots hold them, what goes to the host tier, and what the events say.
//!
//! Owned by the scheduler and used on its thread only. A block leaves the pool when a slot is needed; its
//! removal is told after the host tier has it, so that nobody thinks it gone in between.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_memory::SlotRef;
use kvstore_block::BlockIdentity;
use kvstore_catalog::{Catalog, Registered};
use kvstore_store::{HostStore, Offload};
use router_events::wire::{KvEvent, Removed, Stored};
use router_radix::Tier;

use crate::KvPool;
use crate::sequence::Sequence;

/// How long an eviction waits for the copy into the host tier before blocks are dropped instead: several time
/// slices of a busy machine, so that only a tier that cannot keep up loses blocks.
const OFFLOAD_WAIT_MAX: Duration = Duration::from_millis(100);

/// What the event stream needs to know about a block that is held in some tier.
#[derive(Debug)]
struct Facts {
    parent: Option<u64>,
    tokens: Box<[u32]>,
    extras: Vec<String>,
    on_device: bool,
    on_host: bool,
    /// Copies on their way to the host tier, whose removal is told when they are there.
    removals_owed: u32,
}

/// See the module's documentation.
pub(crate) struct Blocks {
    pub(crate) kv: KvPool,
    pub(crate) catalog: Catalog,
    pub(crate) host: Option<Arc<HostStore>>,
    /// What happened since the last publication.
    pub(crate) events: Vec<KvEvent>,
    facts: HashMap<BlockIdentity, Facts>,
}

impl Blocks {
    pub(crate) fn new(kv: KvPool, host: Option<Arc<HostStore>>) -> Self {
        let catalog = Catalog::with_capacity(kv.slots().slot_count());
        Self { kv, catalog, host, events: Vec::new(), facts: HashMap::new() }
    }

    /// A free slot, made by evicting if need be; the evicted block goes to the host tier.
    pub(crate) fn acquire(&mut self) -> Option<SlotRef> {
        let mut tier_is_slow = false;
        loop {
            if let Some(slot) = self.kv.slots().acquire() {
                return Some(slot);
            }
            let (identity, slot) = self.catalog.evict()?;
            if tier_is_slow {
                // One block lost costs less than the engine standing still.
                self.left_device(identity);
                continue;
            }
            self.offload(identity, slot);
            // The slot comes free when its copy is made: microseconds, on the tier's own thread.
            let started = Instant::now();
            while self.kv.slots().free_count() == 0 && started.elapsed() < OFFLOAD_WAIT_MAX {
                std::thread::yield_now();
            }
            tier_is_slow = self.kv.slots().free_count() == 0;
        }
    }

    fn offload(&mut self, identity: BlockIdentity, slot: SlotRef) {
        let on_host = self.facts.get(&identity).is_some_and(|facts| facts.on_host);
        let queued = match &self.host {
            Some(host) if !on_host => host.offload(Offload { identity, slot }).is_ok(),
            _ => false,
        };
        if !queued {
            self.left_device(identity);
        } else if let Some(facts) = self.facts.get_mut(&identity) {
            // "Removed" is told once "stored" of the host tier has been: nobody shall think it gone.
            facts.on_device = false;
            facts.removals_owed += 1;
        }
    }

    pub(crate) fn acquire_many(&mut self, count: usize) -> Option<Vec<SlotRef>> {
        // Asked first: a request that cannot be met must not empty the cache in trying.
        let free = self.kv.slots().free_count();
        if free + self.catalog.evictable(count.saturating_sub(free)) < count {
            return None;
        }
        (0..count).map(|_| self.acquire()).collect()
    }

    /// Appends complete blocks to a sequence and makes them known.
    pub(crate) fn adopt(&mut self, sequence: &mut Sequence, slots: Vec<SlotRef>) {
        sequence.table.extend(slots);
        sequence.computed = sequence.table.len() * self.kv.block_tokens();
        self.register(sequence);
    }

    /// Makes a sequence's newly completed blocks known. Where somebody else was first, theirs is used: equal
    /// identity means equal bytes, whoever computed them.
    pub(crate) fn register(&mut self, sequence: &mut Sequence) {
        let block_tokens = self.kv.block_tokens();
        let complete = sequence.computed / block_tokens;
        sequence.identify(complete, block_tokens);
        let first = sequence.registered;
        let mut fresh: Vec<usize> = Vec::new();
        for block in first..complete {
            let identity = sequence.identities[block];
            match self.catalog.register(identity, sequence.table[block].clone()) {
                Registered::New => fresh.push(block),
                Registered::Present(slot) => sequence.table[block] = slot,
            }
        }
        sequence.registered = complete.max(first);
        for block in fresh {
            let identity = sequence.identities[block];
            let parent = block.checked_sub(1).map(|parent| sequence.identities[parent].short());
            let tokens = &sequence.tokens[block * block_tokens..(block + 1) * block_tokens];
            let facts = self.facts.entry(identity).or_insert_with(|| Facts {
                parent,
                tokens: tokens.into(),
                extras: if block == 0 { sequence.extras.clone() } else { Vec::new() },
                on_device: false,
                on_host: false,
                removals_owed: 0,
            });
            facts.on_device = true;
            self.events.push(stored_event(&[identity], facts, Tier::Device, tokens));
        }
    }

    /// An offload is over.
    pub(crate) fn offloaded(&mut self, identity: BlockIdentity, stored: bool, evicted: Vec<BlockIdentity>) {
        if let Some(facts) = self.facts.get_mut(&identity) {
            if stored && !std::mem::replace(&mut facts.on_host, true) {
                let event = stored_event(&[identity], facts, Tier::Host, &facts.tokens);
                self.events.push(event);
            }
            facts.removals_owed = facts.removals_owed.saturating_sub(1);
            self.events.push(removed_event(identity, Tier::Device));
        }
        self.forget_if_gone(identity);
        evicted.into_iter().for_each(|identity| self.left_host(identity));
    }

    /// Evicts everything that nobody uses, without keeping it anywhere.
    pub(crate) fn clear(&mut self) {
        while let Some((identity, _slot)) = self.catalog.evict() {
            self.left_device(identity);
        }
    }

    pub(crate) fn left_host(&mut self, identity: BlockIdentity) {
        if let Some(facts) = self.facts.get_mut(&identity) {
            facts.on_host = false;
            self.events.push(removed_event(identity, Tier::Host));
        }
        self.forget_if_gone(identity);
    }

    fn left_device(&mut self, identity: BlockIdentity) {
        if let Some(facts) = self.facts.get_mut(&identity) {
            facts.on_device = false;
            self.events.push(removed_event(identity, Tier::Device));
        }
        self.forget_if_gone(identity);
    }

    fn forget_if_gone(&mut self, identity: BlockIdentity) {
        let is_gone = |facts: &Facts| !facts.on_device && !facts.on_host && facts.removals_owed == 0;
        if self.facts.get(&identity).is_some_and(is_gone) {
            self.facts.remove(&identity);
        }
    }
}

fn stored_event(identities: &[BlockIdentity], facts: &Facts, tier: Tier, tokens: &[u32]) -> KvEvent {
    KvEvent::Stored(Stored {
        hashes: identities.iter().map(BlockIdentity::short).collect(),
        parent: facts.parent,
        tokens: tokens.to_vec(),
        block_tokens: tokens.len() / identities.len(),
        tier,
        // As vLLM does: what keeps a tenant apart is told of the first block of a chain.
        extras: match facts.parent {
            None => facts.extras.iter().map(|extra| (0, extra.clone())).collect(),
            Some(_) => Vec::new(),
        },
        ..Stored::default()
    })
}

fn removed_event(identity: BlockIdentity, tier: Tier) -> KvEvent {
    KvEvent::Removed(Removed { hashes: vec![identity.short()], tier, group: None })
}
