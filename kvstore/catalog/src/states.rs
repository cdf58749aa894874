//! The states of a block as types, each the sole owner of its slot: none can be skipped, and dropping one on the
//! way gives the slot back.

use std::sync::Arc;

use kvstore_block::BlockIdentity;

use crate::catalog::{Anchor, Shared};
use crate::config::TierIndex;
use crate::record::Record;
use crate::tier::Contents;

/// Sole ownership of a slot that is not registered.
#[derive(Debug)]
pub(crate) struct Claim {
    anchor: Arc<Anchor>,
    tier: u8,
    /// Cleared once the slot has gone on to its next state.
    owned: bool,
    slot: u32,
}

impl Claim {
    pub(crate) fn new(anchor: Arc<Anchor>, tier: u8, slot: u32) -> Self {
        Self { anchor, tier, owned: true, slot }
    }

    /// Catalog and tier.
    pub(crate) fn home(&self) -> (&Arc<Shared>, u8) {
        (&self.anchor.0, self.tier)
    }

    fn record(&self) -> &Record {
        &self.anchor.0.tiers[usize::from(self.tier)].records[self.slot as usize]
    }

    /// The slot, which is the caller's to look after from now on.
    pub(crate) fn into_slot(mut self) -> u32 {
        self.owned = false;
        self.slot
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if self.owned {
            self.anchor.0.lock(self.tier).give_back(self.slot);
        }
    }
}

/// A free slot that is reserved for the caller.
#[derive(Debug)]
pub struct Reserved(pub(crate) Claim);

/// A slot that is being written.
#[derive(Debug)]
pub struct Filling(Claim);

/// A slot whose bytes are all there and have a checksum.
#[derive(Debug)]
pub struct Complete {
    claim: Claim,
    checksum: u64,
    bytes: u32,
}

/// Result of registering a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Registered {
    /// The block is new here.
    New,
    /// The tier has the block already; this slot is free again.
    Present,
}

/// A block that was evicted to make room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Evicted {
    /// Identity of the block.
    pub identity: BlockIdentity,
    /// Tier that the block was evicted from.
    pub tier: TierIndex,
    /// Slot that the block was evicted from; it may hold another block by now.
    pub slot: u32,
}

/// A block that is being evicted: look-ups do not find it, its bytes are still there. Dropped, it is put
/// back.
#[derive(Debug)]
pub struct Evicting(pub(crate) Claim);

impl Reserved {
    /// The slot.
    #[must_use]
    pub fn slot(&self) -> u32 {
        self.0.slot
    }

    /// Tier of the slot.
    #[must_use]
    pub fn tier(&self) -> TierIndex {
        TierIndex(self.0.tier)
    }

    /// Begins to write the slot.
    #[must_use]
    pub fn fill(self) -> Filling {
        Filling(self.0)
    }
}

impl Filling {
    /// The slot.
    #[must_use]
    pub fn slot(&self) -> u32 {
        self.0.slot
    }

    /// Tier of the slot.
    #[must_use]
    pub fn tier(&self) -> TierIndex {
        TierIndex(self.0.tier)
    }

    /// All `bytes` are written and have this checksum.
    #[must_use]
    pub fn complete(self, checksum: u64, bytes: u32) -> Complete {
        Complete { claim: self.0, checksum, bytes }
    }
}

impl Complete {
    /// The slot.
    #[must_use]
    pub fn slot(&self) -> u32 {
        self.claim.slot
    }

    /// Tier of the slot.
    #[must_use]
    pub fn tier(&self) -> TierIndex {
        TierIndex(self.claim.tier)
    }

    pub(crate) fn home(&self) -> (&Arc<Shared>, u8) {
        self.claim.home()
    }

    pub(crate) fn into_parts(self) -> (u32, u64, u32) {
        (self.claim.into_slot(), self.checksum, self.bytes)
    }

    /// Registers the block, so that look-ups find it. A batch is cheaper: [`crate::Catalog::register`].
    pub fn register(
        self,
        identity: BlockIdentity,
        parent: Option<BlockIdentity>,
        recompute_seconds: f32,
    ) -> Registered {
        let (shared, tier) = (Arc::clone(self.home().0), self.claim.tier);
        let (slot, checksum, bytes) = self.into_parts();
        match shared
            .lock(tier)
            .register(slot, &Contents { identity, parent, checksum, bytes, recompute_seconds })
        {
            Ok(()) => Registered::New,
            Err(_) => Registered::Present,
        }
    }
}

impl Evicting {
    /// The slot, readable until [`Evicting::finish`].
    #[must_use]
    pub fn slot(&self) -> u32 {
        self.0.slot
    }

    /// Tier of the block.
    #[must_use]
    pub fn tier(&self) -> TierIndex {
        TierIndex(self.0.tier)
    }

    /// Identity of the block.
    #[must_use]
    pub fn identity(&self) -> BlockIdentity {
        self.0.record().identity()
    }

    /// Identity of the block before it in its chain.
    #[must_use]
    pub fn parent(&self) -> Option<BlockIdentity> {
        self.0.record().parent()
    }

    /// The checksum of its bytes.
    #[must_use]
    pub fn checksum(&self) -> u64 {
        self.0.record().checksum()
    }

    /// Length of the block in bytes.
    #[must_use]
    pub fn bytes(&self) -> u32 {
        self.0.record().bytes()
    }

    /// Frees the slot. `false`: a child of the block was put back, so the block stays too.
    pub fn finish(self) -> bool {
        let (shared, tier) = (Arc::clone(self.0.home().0), self.0.tier);
        shared.lock(tier).finish(self.0.into_slot())
    }
}
