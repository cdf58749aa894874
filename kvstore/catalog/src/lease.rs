//! A block held in its slot.

use std::sync::Arc;

use kvstore_block::BlockIdentity;

use crate::catalog::Anchor;
use crate::config::TierIndex;
use crate::record::Record;

/// A pin: while it lives, the slot holds this block and is not reused. Dropping it takes no lock and may happen
/// on any thread. [`crate::Catalog::lease`] gives one and counts a use, [`crate::Catalog::pin`] gives one alone.
#[derive(Debug)]
pub struct Lease {
    anchor: Arc<Anchor>,
    slot: u32,
    tier: u8,
}

impl Lease {
    /// Takes over a pin that is on the record already.
    pub(crate) fn new(anchor: Arc<Anchor>, tier: u8, slot: u32) -> Self {
        Self { anchor, slot, tier }
    }

    fn record(&self) -> &Record {
        &self.anchor.0.tiers[usize::from(self.tier)].records[self.slot as usize]
    }

    /// The slot.
    #[must_use]
    pub fn slot(&self) -> u32 {
        self.slot
    }

    /// Tier of the block.
    #[must_use]
    pub fn tier(&self) -> TierIndex {
        TierIndex(self.tier)
    }

    /// Identity of the block.
    #[must_use]
    pub fn identity(&self) -> BlockIdentity {
        self.record().identity()
    }

    /// Identity of the block before it in its chain.
    #[must_use]
    pub fn parent(&self) -> Option<BlockIdentity> {
        self.record().parent()
    }

    /// Checksum that the block was registered with.
    #[must_use]
    pub fn checksum(&self) -> u64 {
        self.record().checksum()
    }

    /// Length of the block in bytes.
    #[must_use]
    pub fn bytes(&self) -> u32 {
        self.record().bytes()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let tier = &self.anchor.0.tiers[usize::from(self.tier)];
        if tier.records[self.slot as usize].unpin() {
            tier.returns.push(&tier.records, self.slot);
        }
    }
}
