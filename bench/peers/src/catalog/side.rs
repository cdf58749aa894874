//! Interface of a catalog of blocks, with our implementation and `kvbm-logical`'s.

use std::hint::black_box;

use anyhow::{Result, anyhow, ensure};
use dynamo_tokens::TokenBlockSequence;
use kvbm_logical::blocks::{ImmutableBlock, MutableBlock};
use kvbm_logical::manager::{BlockManagerConfigBuilder, FrequencyTrackingCapacity};
use kvbm_logical::{BlockManager, BlockRegistry, KvbmSequenceHashProvider, SequenceHash};
use kvstore_block::{BlockIdentity, IdentityChain};
use kvstore_catalog::{
    BlockSlots, Catalog, CatalogConfig, Evicted, Lease, PolicyKind, Registration, Reserved, TenantId,
    TierConfig, TierIndex,
};

/// Tokens of a block.
const BLOCK_TOKENS: u32 = 16;
const TIER: TierIndex = TierIndex(0);

/// A prompt's whole blocks in the form of each side, made outside of the timed part.
pub struct Chain {
    pub identities: Vec<BlockIdentity>,
    pub hashes: Vec<SequenceHash>,
}

impl Chain {
    /// Creates the chain with this number: each side hashes the same tokens in its own way.
    pub fn new(number: u32, blocks: usize) -> Self {
        let tokens = |block: usize| (0..BLOCK_TOKENS).map(move |at| number ^ (block as u32 * 16 + at) << 8);
        let mut identity = IdentityChain::new(u64::from(number), &[]);
        let identities = (0..blocks).map(|block| identity.next(&tokens(block).collect::<Vec<_>>())).collect();
        let all: Vec<u32> = (0..blocks).flat_map(tokens).collect();
        let sequence = TokenBlockSequence::from_slice(&all, BLOCK_TOKENS, Some(u64::from(number)));
        let hashes = sequence.blocks().iter().map(KvbmSequenceHashProvider::kvbm_sequence_hash).collect();
        Self { identities, hashes }
    }
}

/// A block's name on either side, to identify evicted blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Name {
    Ours(BlockIdentity),
    Theirs(SequenceHash),
}

pub trait Side {
    fn name(&self) -> &str;
    /// Name of a block of a chain on this side.
    fn block(&self, chain: &Chain, index: usize) -> Name;
    /// Stores a chain as one batch, evicting as needed; its blocks are not held afterwards. Returns the number
    /// of new blocks.
    fn register(&mut self, chain: &Chain) -> usize;
    /// Holds the longest stored prefix and releases it at once. Returns its length.
    fn hold(&mut self, chain: &Chain) -> usize;
    /// As [`Side::hold`], but keeps the hold until [`Side::let_go`].
    fn keep(&mut self, chain: &Chain) -> usize;
    fn let_go(&mut self);
    /// Returns the length of the longest stored prefix, without a hold.
    fn ask(&mut self, chain: &Chain) -> usize;
    /// Makes room for `blocks` blocks and keeps the room until [`Side::drain`]. Returns the number.
    fn evict(&mut self, blocks: usize) -> usize;
    /// Frees the room, and names the blocks evicted since the last call.
    fn drain(&mut self) -> Vec<Name>;
}

/// `kvstore-catalog`, one tier.
pub struct Ours {
    name: String,
    catalog: Catalog,
    batch: Vec<Registration>,
    reserved: Vec<Reserved>,
    evicted: Vec<Evicted>,
    leases: Vec<Lease>,
    kept: Vec<Lease>,
    places: Vec<BlockSlots>,
}

impl Ours {
    pub fn new(policy: PolicyKind, blocks: usize, longest: usize) -> Result<Self> {
        let tier = TierConfig::new(u32::try_from(blocks)?, policy);
        Ok(Self {
            name: format!("kvasir, {policy:?}"),
            catalog: Catalog::new(&CatalogConfig::new(vec![tier]))?,
            batch: Vec::with_capacity(longest),
            reserved: Vec::with_capacity(blocks),
            evicted: Vec::with_capacity(blocks * 2),
            leases: Vec::with_capacity(longest),
            kept: Vec::with_capacity(blocks),
            places: Vec::with_capacity(longest),
        })
    }
}

impl Side for Ours {
    fn name(&self) -> &str {
        &self.name
    }

    fn block(&self, chain: &Chain, index: usize) -> Name {
        Name::Ours(chain.identities[index])
    }

    fn register(&mut self, chain: &Chain) -> usize {
        let blocks = chain.identities.len();
        self.catalog.reserve(TIER, blocks, TenantId(0), &mut self.evicted, &mut self.reserved);
        let mut parent = None;
        self.batch.extend(self.reserved.drain(..).zip(&chain.identities).map(|(slot, &identity)| {
            Registration {
                complete: slot.fill().complete(1, 64),
                identity,
                parent: parent.replace(identity),
                recompute_seconds: 0.01,
            }
        }));
        self.catalog.register(&mut self.batch).new
    }

    fn hold(&mut self, chain: &Chain) -> usize {
        let held = self.catalog.lease_prefix(TIER, &chain.identities, &mut self.leases);
        black_box(&self.leases);
        self.leases.clear();
        held
    }

    fn keep(&mut self, chain: &Chain) -> usize {
        self.catalog.lease_prefix(TIER, &chain.identities, &mut self.kept)
    }

    fn let_go(&mut self) {
        self.kept.clear();
    }

    fn ask(&mut self, chain: &Chain) -> usize {
        self.places.clear();
        let found = self.catalog.match_prefix(&chain.identities, &mut self.places);
        black_box(&self.places);
        found
    }

    fn evict(&mut self, blocks: usize) -> usize {
        self.catalog.reserve(TIER, blocks, TenantId(0), &mut self.evicted, &mut self.reserved)
    }

    fn drain(&mut self) -> Vec<Name> {
        self.reserved.clear();
        self.evicted.drain(..).map(|evicted| Name::Ours(evicted.identity)).collect()
    }
}

/// The tier of a `BlockManager`.
#[derive(Clone)]
pub struct Host;

/// Data structure in which a `BlockManager` finds blocks to evict.
#[derive(Clone, Copy)]
pub enum Backend {
    /// Leaves of the prefix tree by age: the default.
    Lineage,
    Lru,
    /// Four lists by frequency, which a TinyLFU sketch counts.
    MultiLru,
}

/// `kvbm-logical`'s block manager.
pub struct Theirs {
    name: &'static str,
    manager: BlockManager<Host>,
    room: Vec<Vec<MutableBlock<Host>>>,
    evicted: Vec<Vec<SequenceHash>>,
    kept: Vec<Vec<ImmutableBlock<Host>>>,
}

impl Theirs {
    pub fn new(backend: Backend, blocks: usize, shortest: usize) -> Result<Self> {
        let registry = match backend {
            Backend::MultiLru => {
                let tracker = FrequencyTrackingCapacity::default().create_tracker();
                BlockRegistry::builder().frequency_tracker(tracker).build()
            }
            Backend::Lineage | Backend::Lru => BlockRegistry::new(),
        };
        let builder: BlockManagerConfigBuilder<Host> =
            BlockManager::builder().block_count(blocks).block_size(BLOCK_TOKENS as usize).registry(registry);
        let (name, builder) = match backend {
            Backend::Lineage => ("kvbm-logical, lineage", builder.with_lineage_backend()),
            Backend::Lru => ("kvbm-logical, LRU", builder.with_lru_backend()),
            Backend::MultiLru => ("kvbm-logical, multi-LRU", builder.with_multi_lru_backend()),
        };
        let batches = blocks.div_ceil(shortest);
        Ok(Self {
            name,
            manager: builder.build().map_err(|error| anyhow!("{error}"))?,
            room: Vec::with_capacity(batches),
            evicted: Vec::with_capacity(batches * 2),
            kept: Vec::with_capacity(batches),
        })
    }
}

impl Side for Theirs {
    fn name(&self) -> &str {
        self.name
    }

    fn block(&self, chain: &Chain, index: usize) -> Name {
        Name::Theirs(chain.hashes[index])
    }

    fn register(&mut self, chain: &Chain) -> usize {
        let Some((room, evicted)) = self.manager.allocate_blocks_with_evictions(chain.hashes.len()) else {
            return 0;
        };
        self.evicted.push(evicted);
        let staged = room.into_iter().zip(&chain.hashes);
        let complete =
            staged.map_while(|(block, &hash)| block.stage(hash, BLOCK_TOKENS as usize).ok()).collect();
        // The call returns a hold on each block; dropped here, so the blocks are stored and idle.
        self.manager.register_blocks(complete).len()
    }

    fn hold(&mut self, chain: &Chain) -> usize {
        black_box(self.manager.match_blocks(&chain.hashes)).len()
    }

    fn keep(&mut self, chain: &Chain) -> usize {
        let held = self.manager.match_blocks(&chain.hashes);
        let count = held.len();
        self.kept.push(held);
        count
    }

    fn let_go(&mut self) {
        self.kept.clear();
    }

    fn ask(&mut self, chain: &Chain) -> usize {
        let found = self.manager.block_registry().check_presence::<Host>(&chain.hashes);
        found.iter().take_while(|(_, is_there)| *is_there).count()
    }

    fn evict(&mut self, blocks: usize) -> usize {
        let Some((room, evicted)) = self.manager.allocate_blocks_with_evictions(blocks) else { return 0 };
        let count = room.len();
        self.room.push(room);
        self.evicted.push(evicted);
        count
    }

    fn drain(&mut self) -> Vec<Name> {
        self.room.clear();
        self.evicted.drain(..).flatten().map(Name::Theirs).collect()
    }
}

/// Creates every side, with room for `blocks` blocks in chains of `length`.
pub fn sides(blocks: usize, length: usize) -> Result<Vec<Box<dyn Side>>> {
    ensure!(blocks.is_multiple_of(length), "{blocks} blocks are no whole chains of {length}");
    let mut sides: Vec<Box<dyn Side>> = Vec::new();
    for policy in [PolicyKind::Lru, PolicyKind::S3Fifo, PolicyKind::Cost] {
        sides.push(Box::new(Ours::new(policy, blocks, length)?));
    }
    for backend in [Backend::Lineage, Backend::Lru, Backend::MultiLru] {
        sides.push(Box::new(Theirs::new(backend, blocks, length)?));
    }
    Ok(sides)
}
