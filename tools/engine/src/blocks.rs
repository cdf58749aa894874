//! The blocks of a worker: their slots, their copies in the store behind the pool, and the KV events about them.
//!
//! Owned by the scheduler and used on its thread only. With `offload_at_once` a block is copied to the store as soon
//! as it is complete, so that its slot is free the moment that it is needed; otherwise it is copied when a slot is needed,
//! and the pool waits for the copy. A block's removal is published after the store has it, so that a subscriber never sees
//! it as gone in between.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_memory::SlotRef;
use kvstore_block::{BlockIdentity, block_hash_with_extras};
use kvstore_catalog::{PoolCatalog, PoolRegistered as Registered};
use kvstore_store::{Description, Medium, Offload, RecoveredBlock, Store, TenantId};
use router_events::wire::{KvEvent, Removed, Stored};
use router_radix::Tier;

use crate::KvPool;
use crate::sequence::Sequence;

/// Longest wait of an eviction for the copy into the store, before blocks are dropped instead: several time slices of a
/// busy machine, so that only a store that cannot keep up loses blocks.
const OFFLOAD_WAIT_MAX: Duration = Duration::from_millis(100);
/// Time for which a store that could not keep up is not waited for again.
const SLOW_FOR: Duration = Duration::from_secs(1);

/// Data for the events of a block that is held in the pool or in host memory. The store has the data of blocks that are only
/// on disk.
#[derive(Debug)]
struct BlockRecord {
    parent: Option<BlockIdentity>,
    position: u32,
    tokens: Box<[u32]>,
    extras: Vec<String>,
    on_device: bool,
    on_host: bool,
    /// Whether the block was published as stored.
    is_published: bool,
    /// Whether the block is being copied to the store while it stays in the pool.
    is_copied: bool,
    /// Copies to the store that are in flight and whose removal from the pool is published when they are complete.
    pending_removals: u32,
    tenant: TenantId,
}

/// Blocks of a worker; see the module's documentation.
pub(crate) struct Blocks {
    pub(crate) kv: KvPool,
    pub(crate) catalog: PoolCatalog,
    pub(crate) store: Option<Arc<Store>>,
    offload_at_once: bool,
    /// Whether events carry token ids instead of routing hashes.
    event_tokens: bool,
    /// Events since the last publication.
    pub(crate) events: Vec<KvEvent>,
    facts: HashMap<BlockIdentity, BlockRecord>,
    /// Time before which evictions do not wait for the store, because it could not keep up.
    slow_until: Option<Instant>,
}

impl Blocks {
    pub(crate) fn new(
        kv: KvPool,
        store: Option<Arc<Store>>,
        offload_at_once: bool,
        event_tokens: bool,
    ) -> Self {
        let catalog = PoolCatalog::with_capacity(kv.slots().slot_count());
        Self {
            kv,
            catalog,
            store,
            offload_at_once,
            event_tokens,
            events: Vec::new(),
            facts: HashMap::new(),
            slow_until: None,
        }
    }

    /// Publishes the blocks that the disk has kept from an earlier process, each after its parent.
    pub(crate) fn publish_recovered(&mut self, survivors: Vec<RecoveredBlock>) {
        for RecoveredBlock { identity, description } in survivors {
            let Some((tokens, extras)) = decode_meta(&description.meta) else { continue };
            let facts = BlockRecord {
                parent: description.parent,
                position: description.position,
                tokens: tokens.into(),
                extras,
                on_device: false,
                on_host: false,
                is_published: false,
                is_copied: false,
                pending_removals: 0,
                tenant: description.tenant,
            };
            self.events.push(stored_event(identity, &facts, Tier::Disk, self.event_tokens));
        }
    }

    /// Returns a free slot, made by evicting if necessary; the evicted block moves to the host tier.
    pub(crate) fn acquire(&mut self) -> Option<SlotRef> {
        let mut tier_is_slow = self.slow_until.is_some_and(|until| Instant::now() < until);
        loop {
            if let Some(slot) = self.kv.slots().acquire() {
                return Some(slot);
            }
            let (identity, slot) = self.catalog.evict()?;
            if tier_is_slow {
                // Losing one block costs less than stalling the engine.
                self.left_device(identity);
                continue;
            }
            self.offload(identity, slot);
            // The slot becomes free when the copy is complete: microseconds, on the tier's own thread.
            let started = Instant::now();
            while self.kv.slots().free_count() == 0 && started.elapsed() < OFFLOAD_WAIT_MAX {
                std::thread::yield_now();
            }
            tier_is_slow = self.kv.slots().free_count() == 0;
            if tier_is_slow {
                self.slow_until = Some(Instant::now() + SLOW_FOR);
            }
        }
    }

    fn offload(&mut self, identity: BlockIdentity, slot: SlotRef) {
        let on_host = self.facts.get(&identity).is_some_and(|facts| facts.on_host);
        if on_host || !self.queue_offload(identity, slot) {
            self.left_device(identity);
        } else if let Some(facts) = self.facts.get_mut(&identity) {
            // "Removed" is published after the host tier's "stored", so that the block never seems to be gone.
            facts.on_device = false;
            facts.pending_removals += 1;
        }
    }

    /// Queues a block's copy to the store. Returns whether the store accepted it.
    fn queue_offload(&self, identity: BlockIdentity, slot: SlotRef) -> bool {
        let (Some(store), Some(facts)) = (&self.store, self.facts.get(&identity)) else { return false };
        let description = Description {
            parent: facts.parent,
            position: facts.position,
            meta: encode_meta(&facts.tokens, &facts.extras).into(),
            tenant: facts.tenant,
        };
        store.offload(Offload { identity, description, slot }).is_ok()
    }

    /// Metadata that the store keeps with these blocks of a sequence, so that copies on other nodes have the same description.
    pub(crate) fn metas(&self, sequence: &Sequence, blocks: Range<usize>) -> Vec<Arc<[u8]>> {
        let block_tokens = self.kv.block_tokens();
        let meta = |block: usize| {
            let tokens = &sequence.tokens[block * block_tokens..(block + 1) * block_tokens];
            let extras: &[String] = if block == 0 { &sequence.extras } else { &[] };
            encode_meta(tokens, extras).into()
        };
        blocks.map(meta).collect()
    }

    pub(crate) fn acquire_many(&mut self, count: usize) -> Option<Vec<SlotRef>> {
        // Checked first: a request that cannot be met must not empty the cache.
        let free = self.kv.slots().free_count();
        if free + self.catalog.evictable(count.saturating_sub(free)) < count {
            return None;
        }
        (0..count).map(|_| self.acquire()).collect()
    }

    /// Appends complete blocks to a sequence and registers them.
    pub(crate) fn adopt(&mut self, sequence: &mut Sequence, slots: Vec<SlotRef>) {
        sequence.table.extend(slots);
        sequence.computed = sequence.table.len() * self.kv.block_tokens();
        self.register(sequence);
    }

    /// Registers a sequence's newly completed blocks in the catalog. A block that is registered already replaces the sequence's
    /// copy: equal identity means equal bytes, whichever request computed them.
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
        let tenant = sequence.tenant();
        for block in fresh {
            let identity = sequence.identities[block];
            let parent = block.checked_sub(1).map(|parent| sequence.identities[parent]);
            let tokens = &sequence.tokens[block * block_tokens..(block + 1) * block_tokens];
            let facts = self.facts.entry(identity).or_insert_with(|| BlockRecord {
                parent,
                position: block as u32,
                tokens: tokens.into(),
                extras: if block == 0 { sequence.extras.clone() } else { Vec::new() },
                on_device: false,
                // The block may have just come from host memory, known to the store alone.
                on_host: self.store.as_ref().is_some_and(|store| store.is_on_host(&identity)),
                is_published: false,
                is_copied: false,
                pending_removals: 0,
                tenant,
            });
            if !facts.on_device && !facts.is_published && facts.on_host {
                self.events.push(stored_event(identity, facts, Tier::Host, self.event_tokens));
                facts.is_published = true;
            }
            facts.on_device = true;
            self.events.push(stored_event(identity, facts, Tier::Device, self.event_tokens));
            let wanted = self.offload_at_once && !facts.on_host && !facts.is_copied;
            if wanted && self.queue_offload(identity, sequence.table[block].clone()) {
                self.facts.entry(identity).and_modify(|facts| facts.is_copied = true);
            }
        }
    }

    /// Records that the store has the block in one more tier.
    pub(crate) fn stored(&mut self, identity: BlockIdentity, medium: Medium) {
        let Some(facts) = self.facts.get_mut(&identity) else { return };
        match medium {
            Medium::Host => {
                facts.on_host = true;
                if !std::mem::replace(&mut facts.is_published, true) {
                    self.events.push(stored_event(identity, facts, Tier::Host, self.event_tokens));
                }
            }
            Medium::Disk => self.events.push(stored_event(identity, facts, Tier::Disk, self.event_tokens)),
        }
    }

    /// Records that an offload has ended, whether it succeeded or not.
    pub(crate) fn offloaded(&mut self, identity: BlockIdentity) {
        if let Some(facts) = self.facts.get_mut(&identity) {
            if facts.pending_removals > 0 {
                // The pool's copy is gone; the block may have been computed again meanwhile.
                facts.pending_removals -= 1;
                self.events.push(removed_event(identity, Tier::Device));
            }
            facts.is_copied = false;
        }
        self.forget_if_gone(identity);
    }

    /// Records that a tier of the store no longer holds the block.
    pub(crate) fn removed(&mut self, identity: BlockIdentity, medium: Medium) {
        match medium {
            Medium::Host => {
                let Some(facts) = self.facts.get_mut(&identity) else { return };
                facts.on_host = false;
                if std::mem::replace(&mut facts.is_published, false) {
                    self.events.push(removed_event(identity, Tier::Host));
                }
                self.forget_if_gone(identity);
            }
            Medium::Disk => self.events.push(removed_event(identity, Tier::Disk)),
        }
    }

    /// Evicts every unused block without offloading it.
    pub(crate) fn clear(&mut self) {
        while let Some((identity, _slot)) = self.catalog.evict() {
            self.left_device(identity);
        }
    }

    fn left_device(&mut self, identity: BlockIdentity) {
        if let Some(facts) = self.facts.get_mut(&identity) {
            facts.on_device = false;
            self.events.push(removed_event(identity, Tier::Device));
        }
        self.forget_if_gone(identity);
    }

    fn forget_if_gone(&mut self, identity: BlockIdentity) {
        let is_gone = |facts: &BlockRecord| {
            !facts.on_device && !facts.on_host && !facts.is_copied && facts.pending_removals == 0
        };
        if self.facts.get(&identity).is_some_and(is_gone) {
            self.facts.remove(&identity);
        }
    }
}

/// Event of a stored block with its tokens and its tenant's extra keys, or with the hash of both that the gateway looks up:
/// the event then contains neither text nor a tenant's salt.
fn stored_event(identity: BlockIdentity, facts: &BlockRecord, tier: Tier, with_tokens: bool) -> KvEvent {
    let stored = Stored {
        hashes: vec![identity.short()],
        parent: facts.parent.map(|parent| parent.short()),
        block_tokens: facts.tokens.len(),
        tier,
        ..Stored::default()
    };
    // As in vLLM, the extra keys belong to the first block of a chain.
    let extras = if facts.parent.is_none() { &facts.extras[..] } else { &[] };
    if with_tokens {
        let extras = extras.iter().map(|extra| (0, extra.clone())).collect();
        return KvEvent::Stored(Stored { tokens: facts.tokens.to_vec(), extras, ..stored });
    }
    let routing_hashes = vec![block_hash_with_extras(&facts.tokens, extras)];
    KvEvent::Stored(Stored { routing_hashes, ..stored })
}

fn removed_event(identity: BlockIdentity, tier: Tier) -> KvEvent {
    KvEvent::Removed(Removed { hashes: vec![identity.short()], tier, group: None })
}

/// Encodes the metadata that the store keeps with a block, for events after a restart: the number of tokens, the tokens, and
/// each extra with its length; numbers are little-endian u32.
fn encode_meta(tokens: &[u32], extras: &[String]) -> Vec<u8> {
    let mut meta = Vec::with_capacity(4 + tokens.len() * 4);
    meta.extend((tokens.len() as u32).to_le_bytes());
    tokens.iter().for_each(|token| meta.extend(token.to_le_bytes()));
    for extra in extras {
        meta.extend((extra.len() as u32).to_le_bytes());
        meta.extend(extra.as_bytes());
    }
    meta
}

fn decode_meta(mut meta: &[u8]) -> Option<(Vec<u32>, Vec<String>)> {
    let number = |meta: &mut &[u8]| {
        let (number, rest) = meta.split_first_chunk::<4>()?;
        *meta = rest;
        Some(u32::from_le_bytes(*number))
    };
    let count = number(&mut meta)? as usize;
    if meta.len() / 4 < count {
        return None;
    }
    let tokens = (0..count).map(|_| number(&mut meta)).collect::<Option<Vec<u32>>>()?;
    let mut extras = Vec::new();
    while !meta.is_empty() {
        let length = number(&mut meta)? as usize;
        let (extra, rest) = meta.split_at_checked(length)?;
        extras.push(String::from_utf8(extra.to_vec()).ok()?);
        meta = rest;
    }
    Some((tokens, extras))
}

#[cfg(test)]
mod tests {
    use router_events::wire::{EventBatch, decode, encode};

    use super::*;

    #[test]
    fn events_tell_neither_tokens_nor_salts_unless_they_are_to() {
        use kvstore_block::{PromptExtras, block_hashes};
        let tokens: Vec<u32> = (0x1000..0x1020).collect();
        let facts = |block: usize| BlockRecord {
            parent: block.checked_sub(1).map(|_| BlockIdentity([1; 16])),
            position: block as u32,
            tokens: tokens[block * 16..(block + 1) * 16].into(),
            extras: if block == 0 { vec!["tenants-salt".to_owned()] } else { Vec::new() },
            on_device: true,
            on_host: false,
            is_published: false,
            is_copied: false,
            pending_removals: 0,
            tenant: TenantId(0),
        };
        let told = |with_tokens: bool| {
            let event = |block: usize| {
                stored_event(BlockIdentity([block as u8 + 1; 16]), &facts(block), Tier::Device, with_tokens)
            };
            let events = vec![event(0), event(1)];
            let bytes = encode(&EventBatch { events, ..EventBatch::default() });
            let batch = decode(&bytes).expect("a batch");
            let stored = batch.events.into_iter().map(|event| match event {
                KvEvent::Stored(stored) => stored,
                other => panic!("{other:?}"),
            });
            (bytes, stored.collect::<Vec<_>>())
        };
        let has = |bytes: &[u8], part: &[u8]| bytes.windows(part.len()).any(|window| window == part);
        let a_token = [0xCD, 0x10, 0x05];

        let (bytes, stored) = told(false);
        assert!(!has(&bytes, b"tenants-salt") && !has(&bytes, &a_token));
        let mut expected = Vec::new();
        let salted = PromptExtras { cache_salt: Some("tenants-salt"), ..PromptExtras::default() };
        block_hashes(&tokens, 16, &salted, &mut expected);
        let hashes: Vec<u64> = stored.iter().flat_map(|stored| stored.routing_hashes.clone()).collect();
        assert_eq!(hashes, expected, "what the gateway looks for");
        assert!(stored.iter().all(|stored| stored.tokens.is_empty() && stored.block_tokens == 16));

        let (bytes, stored) = told(true);
        assert!(has(&bytes, b"tenants-salt") && has(&bytes, &a_token));
        assert!(stored.iter().all(|stored| stored.tokens.len() == 16 && stored.routing_hashes.is_empty()));
    }

    #[test]
    fn what_is_kept_with_a_block_comes_back_and_nonsense_is_refused() {
        let (tokens, extras) = (vec![1, 2, u32::MAX], vec!["salt".to_owned(), String::new()]);
        let meta = encode_meta(&tokens, &extras);
        assert_eq!(decode_meta(&meta), Some((tokens, extras)));
        assert_eq!(decode_meta(&encode_meta(&[], &[])), Some((Vec::new(), Vec::new())));
        for len in 0..meta.len() {
            let cut = decode_meta(&meta[..len]);
            assert!(cut.is_none_or(|(tokens, extras)| tokens.len() == 3 && extras.len() < 2), "{len} bytes");
        }
        assert_eq!(decode_meta(&[0xFF; 12]), None);
    }
}
