//! Blocks that callers want kept for a time ([`crate::Store::retain`]): the tier that keeps them evicts none of them before.
//!
//! With a disk that tier is the disk, else host memory. A block that is not there yet is kept when it comes. A kept block pins those before
//! it in its chain, so it is kept only if the one before it is kept or is not in the tier: what is pinned is what is counted.
//! [`RetentionConfig::share`](crate::RetentionConfig) bounds it, and one tenant has its share of that.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

use kvstore_block::BlockIdentity;
use kvstore_catalog::{Lease, TenantId, TierIndex};

use super::Tiers;
use crate::held::HeldBlock;
use crate::metrics::StoreCounters;
use crate::planted::{Planted, is_planted};
use crate::quota;
use crate::shared::{DISK, HOST, RETAINING_MAX, Shared};

/// Blocks that are begun or ended in a round of the thread.
const BLOCKS_PER_ROUND: usize = 256;
/// How long a block is waited for that is nowhere on this node.
const AWAITED_MAX: Duration = Duration::from_secs(60);

/// Keeps a block in its tier.
#[derive(Debug)]
enum Hold {
    Host {
        _block: HeldBlock,
    },
    Disk {
        _lease: Lease,
    },
    /// A fault of the model test.
    Planted,
}

#[derive(Debug)]
struct Retained {
    until: Instant,
    /// Its entry in [`RetainedBlocks::wakes`].
    wake: Instant,
    /// Whose share it counts in, while it is kept.
    kept: Option<(TenantId, Hold)>,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct RetainedBlocks {
    /// Where they are kept.
    tier: TierIndex,
    /// Blocks that may be kept, and that may be kept of one tenant.
    most: usize,
    most_of_tenant: usize,
    kept: usize,
    of_tenants: HashMap<TenantId, usize>,
    blocks: HashMap<BlockIdentity, Retained>,
    /// When each is looked at next.
    wakes: BTreeSet<(Instant, BlockIdentity)>,
    /// Chains that were not begun, or not to their ends, and the blocks that are left of them.
    begun: VecDeque<(VecDeque<BlockIdentity>, Instant)>,
    waiting: usize,
}

impl RetainedBlocks {
    pub(crate) fn new(shared: &Shared) -> Self {
        let tier = if shared.has_disk() { DISK } else { HOST };
        let slots = shared.catalog.usage(tier).map_or(0, |usage| usage.slots);
        let part = |share: f64, of: f64| (of * share.clamp(0.0, 1.0)).floor();
        let most = part(shared.config.retention.share, f64::from(slots));
        Self {
            tier,
            most: most as usize,
            most_of_tenant: part(shared.config.tenant_share, most) as usize,
            kept: 0,
            of_tenants: HashMap::new(),
            blocks: HashMap::new(),
            wakes: BTreeSet::new(),
            begun: VecDeque::new(),
            waiting: 0,
        }
    }

    /// When a block is to be looked at.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.wakes.first().map(|(wake, _)| *wake)
    }

    /// Blocks that are kept, by the tier.
    #[cfg(test)]
    pub(crate) fn kept(&self) -> (TierIndex, Vec<BlockIdentity>) {
        let kept = self.blocks.iter().filter(|(_, block)| block.kept.is_some());
        (self.tier, kept.map(|(identity, _)| *identity).collect())
    }

    /// Blocks that may be kept.
    #[cfg(test)]
    pub(crate) fn most(&self) -> usize {
        self.most
    }

    fn is_kept(&self, identity: &BlockIdentity) -> bool {
        self.blocks.get(identity).is_some_and(|block| block.kept.is_some())
    }

    /// A block is wanted until then; false when so many are that it is not taken in.
    fn want(&mut self, identity: BlockIdentity, until: Instant, now: Instant) -> bool {
        if let Some(block) = self.blocks.get_mut(&identity) {
            block.until = block.until.max(until);
            return true;
        }
        if self.blocks.len() >= self.most {
            return false;
        }
        let wake = until.min(now + AWAITED_MAX);
        self.wakes.insert((wake, identity));
        self.blocks.insert(identity, Retained { until, wake, kept: None });
        true
    }

    /// Keeps the block, if it is wanted, is in the tier now and may be kept.
    fn keep(&mut self, identity: &BlockIdentity, shared: &Shared) {
        if self.blocks.get(identity).is_none_or(|block| block.kept.is_some()) {
            return;
        }
        let Some(lease) = shared.catalog.pin(self.tier, identity) else { return };
        let tenant = shared.catalog.tenant_of(&lease).unwrap_or(quota::NOBODY);
        let of_tenant = self.of_tenants.get(&tenant).copied().unwrap_or(0);
        let is_pinning_others =
            lease.parent().is_some_and(|parent| shared.holds(self.tier, &parent) && !self.is_kept(&parent));
        if of_tenant >= self.most_of_tenant || is_pinning_others {
            StoreCounters::add(&shared.counters.retention_refused, 1);
            return self.forget(identity);
        }
        let hold = match self.tier {
            _ if is_planted(Planted::LostRetention) => Hold::Planted,
            HOST => Hold::Host { _block: shared.held.hold(lease) },
            _ => Hold::Disk { _lease: lease },
        };
        let Some(block) = self.blocks.get_mut(identity) else { return };
        block.kept = Some((tenant, hold));
        self.kept += 1;
        *self.of_tenants.entry(tenant).or_default() += 1;
        StoreCounters::add(&shared.counters.retained, 1);
    }

    /// The block is not kept any more.
    fn let_go(&mut self, kept: Option<(TenantId, Hold)>) {
        let Some((tenant, _hold)) = kept else { return };
        self.kept -= 1;
        if let Some(count) = self.of_tenants.get_mut(&tenant) {
            *count -= 1;
            if *count == 0 {
                self.of_tenants.remove(&tenant);
            }
        }
    }

    /// Nobody wants the block kept any more.
    pub(super) fn forget(&mut self, identity: &BlockIdentity) {
        if let Some(block) = self.blocks.remove(identity) {
            self.wakes.remove(&(block.wake, *identity));
            self.let_go(block.kept);
        }
    }

    /// The tier is about to lose the block, which is damaged or given up: what comes instead is kept again.
    pub(super) fn lost(&mut self, tier: TierIndex, identity: &BlockIdentity, now: Instant) {
        if tier != self.tier {
            return;
        }
        let Some(block) = self.blocks.get_mut(identity).filter(|block| block.kept.is_some()) else { return };
        let kept = block.kept.take();
        let wake = block.until.min(now + AWAITED_MAX);
        self.wakes.remove(&(block.wake, *identity));
        self.wakes.insert((wake, *identity));
        block.wake = wake;
        self.let_go(kept);
    }

    /// Ends what is due, some of it.
    fn expire(&mut self, now: Instant, shared: &Shared) {
        for _ in 0..BLOCKS_PER_ROUND {
            let Some(&(wake, identity)) = self.wakes.first().filter(|(wake, _)| *wake <= now) else { return };
            self.wakes.pop_first();
            let Some(block) = self.blocks.get_mut(&identity) else { continue };
            debug_assert_eq!(block.wake, wake);
            let next = match &block.kept {
                Some(_) => block.until,
                // It may still come to the disk.
                None if shared.holds(HOST, &identity) => block.until.min(now + AWAITED_MAX),
                None => now,
            };
            if next > now {
                block.wake = next;
                self.wakes.insert((next, identity));
            } else if let Some(block) = self.blocks.remove(&identity) {
                self.let_go(block.kept);
            }
        }
    }
}

impl Tiers {
    /// Somebody wants these blocks kept for so long. A block is kept if those before it are.
    pub(crate) fn retain(&mut self, chain: Vec<BlockIdentity>, how_long: Duration) {
        let room = RETAINING_MAX.saturating_sub(self.retained.waiting);
        let mut left: VecDeque<BlockIdentity> = chain.into();
        StoreCounters::add(&self.shared.counters.retention_refused, left.len().saturating_sub(room));
        left.truncate(room);
        if !left.is_empty() {
            self.retained.waiting += left.len();
            self.retained.begun.push_back((left, self.now + how_long));
        }
    }

    /// Takes in some of what is wanted, and ends some of what is over; false when there is nothing more to take in.
    pub(crate) fn advance_retained(&mut self) -> bool {
        for _ in 0..BLOCKS_PER_ROUND {
            let Some((left, until)) = self.retained.begun.front_mut() else { break };
            let (identity, until) = (left.pop_front(), *until);
            let Some(identity) = identity else {
                self.retained.begun.pop_front();
                continue;
            };
            self.retained.waiting -= 1;
            if self.retained.want(identity, until, self.now) {
                self.hold_retained(&identity);
            } else {
                StoreCounters::add(&self.shared.counters.retention_refused, 1);
            }
        }
        self.retained.expire(self.now, &self.shared);
        !self.retained.begun.is_empty()
    }

    /// The block has come into a tier: it stays there if somebody wants it kept.
    pub(super) fn hold_retained(&mut self, identity: &BlockIdentity) {
        let Self { retained, shared, .. } = self;
        retained.keep(identity, shared);
    }
}
