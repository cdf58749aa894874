//! Errors of a configuration or of a recovered slot.

/// The error with which the catalog refused a configuration or a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum CatalogError {
    /// A catalog has 1 to 4 tiers.
    #[error("catalog: {0} tiers configured, 1 to 4 are possible")]
    TierCount(usize),
    /// A tier's number of slots is out of range.
    #[error("catalog: tier {tier} has {slots} slots, 1 to 4294967294 are possible")]
    SlotCount {
        /// Index of the tier.
        tier: u8,
        /// Configured number of slots.
        slots: u32,
    },
    /// No such tier.
    #[error("catalog: there is no tier {0}")]
    UnknownTier(u8),
    /// No such slot.
    #[error("adopt: tier {tier} has no slot {slot}")]
    UnknownSlot {
        /// Index of the tier.
        tier: u8,
        /// Index of the slot.
        slot: u32,
    },
    /// The slot is not free.
    #[error("adopt: slot {slot} of tier {tier} is not free")]
    SlotTaken {
        /// Index of the tier.
        tier: u8,
        /// Index of the slot.
        slot: u32,
    },
    /// The tier has this block already.
    #[error("adopt: the block of slot {slot} of tier {tier} is in slot {present} already")]
    Duplicate {
        /// Index of the tier.
        tier: u8,
        /// Slot that was to be adopted.
        slot: u32,
        /// Slot that has the block already.
        present: u32,
    },
    /// The tenant has as many slots as it may.
    #[error("adopt: tenant {tenant} has its quota of tier {tier} already")]
    Quota {
        /// Index of the tier.
        tier: u8,
        /// Tenant whose quota is used up.
        tenant: u32,
    },
}
