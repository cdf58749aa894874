//! What can be wrong with a configuration or a recovered slot.

/// Why the catalog refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CatalogError {
    /// A catalog has 1 to 4 tiers.
    #[error("catalog: {0} tiers configured, 1 to 4 are possible")]
    TierCount(usize),
    /// A tier's number of slots is out of range.
    #[error("catalog: tier {tier} has {slots} slots, 1 to 4294967294 are possible")]
    SlotCount {
        /// Which tier.
        tier: u8,
        /// Its slots.
        slots: u32,
    },
    /// No such tier.
    #[error("catalog: there is no tier {0}")]
    UnknownTier(u8),
    /// No such slot.
    #[error("adopt: tier {tier} has no slot {slot}")]
    UnknownSlot {
        /// Which tier.
        tier: u8,
        /// Which slot.
        slot: u32,
    },
    /// The slot is not free.
    #[error("adopt: slot {slot} of tier {tier} is not free")]
    SlotTaken {
        /// Which tier.
        tier: u8,
        /// Which slot.
        slot: u32,
    },
    /// The tier has this block already.
    #[error("adopt: the block of slot {slot} of tier {tier} is in slot {present} already")]
    Duplicate {
        /// Which tier.
        tier: u8,
        /// Which slot was to be adopted.
        slot: u32,
        /// Where the block is.
        present: u32,
    },
    /// The tenant has as many slots as it may.
    #[error("adopt: tenant {tenant} has its quota of tier {tier} already")]
    Quota {
        /// Which tier.
        tier: u8,
        /// Whose quota.
        tenant: u32,
    },
}
