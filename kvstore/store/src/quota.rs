//! Accounts of blocks: the tenant whose quota each block counts against.
//!
//! The catalog keeps the accounts. Where tenants have a share, every tier of this node tells them apart, so that a block
//! that goes from one to another counts for its own.

use kvstore_block::BlockIdentity;
use kvstore_catalog::{Catalog, TenantId, TenantQuota, TierIndex};

/// Tenant of blocks that no tenant asked for. It has no quota.
pub(crate) const UNOWNED: TenantId = TenantId(u32::MAX);

/// Number of tenants that are told apart where tenants have quotas; further tenants share one account.
pub(crate) const TENANTS_MAX: u16 = 8192;

/// Slots of a tier that the blocks of one tenant may fill; `None`: all of them.
pub(crate) fn of_share(share: f64, slots: u32) -> Option<u32> {
    let share = share.clamp(0.0, 1.0);
    (share < 1.0).then(|| (f64::from(slots) * share).ceil() as u32)
}

/// Returns the unlimited accounts of [`UNOWNED`] in so many tiers.
pub(crate) fn unlimited(tiers: usize) -> Vec<TenantQuota> {
    let unlimited = |tier| TenantQuota { tenant: UNOWNED, tier: TierIndex(tier), slots: u32::MAX };
    (0..tiers as u8).map(unlimited).collect()
}

/// Returns the tenant that the tier's block counts against.
pub(crate) fn owner(catalog: &Catalog, tier: TierIndex, identity: &BlockIdentity) -> TenantId {
    let lease = catalog.pin(tier, identity);
    lease.and_then(|lease| catalog.tenant_of(&lease)).unwrap_or(UNOWNED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_rounded_up_and_all_of_a_tier_is_no_quota() {
        for (share, slots, quota) in
            [(1.0, 16, None), (2.0, 16, None), (0.25, 16, Some(4)), (0.3, 4, Some(2)), (-1.0, 16, Some(0))]
        {
            assert_eq!(of_share(share, slots), quota, "{share} of {slots}");
        }
    }
}
