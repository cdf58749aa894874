//! Configuration of a catalog: tiers, their slots and policies, quotas.

/// Tiers that one catalog can have.
pub const TIERS_MAX: usize = 4;

/// A tier of one catalog, counted from the fastest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TierIndex(pub u8);

/// Tenant that a block is stored for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct TenantId(pub u32);

/// Policy that chooses the block to evict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PolicyKind {
    /// The least recently used, to a 64th of the tier's turnover.
    Lru,
    /// S3-FIFO: a small queue that filters what is used once, a main queue, a memory of what was evicted.
    #[default]
    S3Fifo,
    /// The least recompute time saved per byte × frequency of use, among a sample.
    Cost,
}

/// Order in which free slots are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum SlotOrder {
    /// The one freed last, whose memory is warm.
    #[default]
    LastFreed,
    /// The one freed first: slots take turns, which wears flash evenly.
    FirstFreed,
}

/// One tier.
#[derive(Debug, Clone, Copy)]
pub struct TierConfig {
    /// Number of slots, 1 to `u32::MAX - 1`.
    pub slots: u32,
    /// Policy that chooses the block to evict.
    pub policy: PolicyKind,
    /// Order in which free slots are taken.
    pub order: SlotOrder,
    /// Slots that a tenant may take here unless it has a quota of its own; `None`: all.
    pub default_quota: Option<u32>,
}

impl TierConfig {
    /// A tier without quotas.
    #[must_use]
    pub fn new(slots: u32, policy: PolicyKind) -> Self {
        Self { slots, policy, order: SlotOrder::default(), default_quota: None }
    }
}

/// The slots that one tenant may take of one tier.
#[derive(Debug, Clone, Copy)]
pub struct TenantQuota {
    /// Tenant that the quota applies to.
    pub tenant: TenantId,
    /// Tier that the quota applies to.
    pub tier: TierIndex,
    /// Most slots that the tenant may take.
    pub slots: u32,
}

/// A catalog.
#[derive(Debug, Clone)]
pub struct CatalogConfig {
    /// 1 to [`TIERS_MAX`] tiers, the fastest first.
    pub tiers: Vec<TierConfig>,
    /// Quotas other than the tiers' default.
    pub quotas: Vec<TenantQuota>,
    /// Tenants with a quota that are told apart in a tier; further tenants share one account under the
    /// default.
    pub tenants_max: u16,
    /// Seed of the sampling of [`PolicyKind::Cost`].
    pub seed: u64,
}

impl CatalogConfig {
    /// A catalog of these tiers, without quotas.
    #[must_use]
    pub fn new(tiers: Vec<TierConfig>) -> Self {
        Self { tiers, quotas: Vec::new(), tenants_max: 256, seed: 1 }
    }
}
