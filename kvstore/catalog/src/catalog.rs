//! The catalog, and the types of its queries and changes. Look-ups are in `lookup`, changes in `changes`.
//!
//! A lease keeps the shared part alive through one of [`ANCHORS`] reference counts, picked by slot: with a
//! single one, all threads would pull the same cache line for every block.

use std::sync::Arc;

use kvstore_block::BlockIdentity;

use crate::config::{CatalogConfig, PolicyKind, TIERS_MAX, TierIndex};
use crate::error::CatalogError;
use crate::index::Index;
use crate::list::Node;
use crate::policy;
use crate::record::Record;
use crate::states::{Claim, Complete};
use crate::tier::{LockedTier, Tier};

const ANCHORS: usize = 32;
pub(crate) const NOWHERE: u32 = u32::MAX;

/// Slots of one block, by tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockSlots(pub(crate) [u32; TIERS_MAX]);

impl BlockSlots {
    /// Returns the block's slot in a tier.
    #[must_use]
    pub fn slot(&self, tier: TierIndex) -> Option<u32> {
        self.0.get(usize::from(tier.0)).copied().filter(|&slot| slot != NOWHERE)
    }

    /// Returns the fastest tier that has the block.
    #[must_use]
    pub fn fastest(&self) -> Option<TierIndex> {
        self.0.iter().position(|&slot| slot != NOWHERE).map(|tier| TierIndex(tier as u8))
    }
}

/// One block of a batch to register.
#[derive(Debug)]
pub struct Registration {
    /// The slot, filled.
    pub complete: Complete,
    /// Identity of the block.
    pub identity: BlockIdentity,
    /// Identity of the block before it in its chain; `None` for a chain's first block.
    pub parent: Option<BlockIdentity>,
    /// Seconds that a worker needs to compute the block again; used only by [`PolicyKind::Cost`].
    pub recompute_seconds: f32,
}

/// Result of registering a batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Blocks that are new here.
    pub new: usize,
    /// Blocks that were here already; their slots are free again.
    pub present: usize,
}

/// A tier in numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TierUsage {
    /// Number of slots.
    pub slots: u32,
    /// Number of free slots.
    pub free: u32,
    /// Blocks that can be found, and blocks that are being evicted.
    pub blocks: u32,
    /// Blocks that the policy could pick now.
    pub candidates: u32,
    /// Blocks evicted so far.
    pub evicted_total: u64,
    /// Blocks registered so far.
    pub registered_total: u64,
}

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) index: Index,
    pub(crate) tiers: Vec<Tier>,
}

/// A reference count of its own line for the shared part.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Anchor(pub(crate) Arc<Shared>);

impl Shared {
    pub(crate) fn lock(&self, tier: u8) -> LockedTier<'_> {
        self.tiers[usize::from(tier)].lock(&self.index)
    }
}

/// Map from blocks to their slots in each tier.
#[derive(Debug)]
pub struct Catalog {
    pub(crate) shared: Arc<Shared>,
    anchors: Box<[Arc<Anchor>]>,
}

impl Catalog {
    /// An empty catalog; takes all the memory that it will ever use ([`Catalog::bytes_per_slot`]).
    pub fn new(config: &CatalogConfig) -> Result<Self, CatalogError> {
        if !(1..=TIERS_MAX).contains(&config.tiers.len()) {
            return Err(CatalogError::TierCount(config.tiers.len()));
        }
        for (tier, of) in config.tiers.iter().enumerate() {
            if matches!(of.slots, 0 | u32::MAX) {
                return Err(CatalogError::SlotCount { tier: tier as u8, slots: of.slots });
            }
        }
        if let Some(quota) =
            config.quotas.iter().find(|quota| usize::from(quota.tier.0) >= config.tiers.len())
        {
            return Err(CatalogError::UnknownTier(quota.tier.0));
        }
        let shared = Arc::new(Shared {
            index: Index::new(config.tiers.iter().map(|tier| u64::from(tier.slots)).sum()),
            tiers: (0..config.tiers.len()).map(|tier| Tier::new(tier as u8, config)).collect(),
        });
        let anchors = (0..ANCHORS).map(|_| Arc::new(Anchor(Arc::clone(&shared)))).collect();
        Ok(Self { shared, anchors })
    }

    /// Bytes that a slot costs: record 64, node 48, index 12.8, and the policy's share.
    #[must_use]
    pub fn bytes_per_slot(policy: PolicyKind) -> usize {
        size_of::<Record>() + size_of::<Node>() + 13 + policy::bytes_per_slot(policy)
    }

    /// Bytes taken at construction.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        let tier = |tier: &Tier| {
            let per_slot = size_of::<Record>() + size_of::<Node>() + policy::bytes_per_slot(tier.policy_kind);
            tier.records.len() * per_slot
        };
        self.shared.index.memory_bytes() + self.shared.tiers.iter().map(tier).sum::<usize>()
    }

    pub(crate) fn tier(&self, tier: TierIndex) -> Option<&Tier> {
        self.shared.tiers.get(usize::from(tier.0))
    }

    pub(crate) fn lock(&self, tier: TierIndex) -> Option<LockedTier<'_>> {
        Some(self.tier(tier)?.lock(&self.shared.index))
    }

    /// One of the reference counts that keep the shared part alive.
    pub(crate) fn anchor(&self, slot: u32) -> Arc<Anchor> {
        Arc::clone(&self.anchors[slot as usize % ANCHORS])
    }

    pub(crate) fn claim(&self, tier: u8, slot: u32) -> Claim {
        Claim::new(self.anchor(slot), tier, slot)
    }
}
