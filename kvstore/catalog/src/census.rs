//! Use of the slots of a tier, for metrics and tests. Walks over all of them, without a lock.

use crate::catalog::Catalog;
use crate::config::TierIndex;
use crate::record::State;

/// The slots of a tier by their use, read one after the other while other threads change them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Census {
    /// On the free list.
    pub free: usize,
    /// Holding a block that can be looked up.
    pub registered: usize,
    /// Registered slots that are pinned.
    pub pinned: usize,
    /// Being filled or evicted, or removed while pinned.
    pub under_way: usize,
}

impl Catalog {
    /// Counts the slots of a tier.
    #[must_use]
    pub fn census(&self, tier: TierIndex) -> Census {
        let mut census = Census::default();
        let Some(tier) = self.shared.tiers.get(usize::from(tier.0)) else { return census };
        for record in &tier.records {
            match record.state() {
                State::Free => census.free += 1,
                State::Registered => {
                    census.registered += 1;
                    census.pinned += usize::from(record.pins() > 0);
                }
                State::Reserved | State::Evicting | State::PendingFree => census.under_way += 1,
            }
        }
        census
    }
}
