//! Blocks that requests want kept for a time ([`crate::Store::retain`]): the tier that keeps them does not
//! evict them before.
//!
//! With a disk that tier is the disk, else host memory. A block that is not there yet is awaited for
//! [`AWAITED_MAX`], and pinned when it comes. A pinned block keeps the blocks before it in its chain from
//! being evicted, too. So a block is pinned only while the one before it is pinned for as long, or is not in
//! the tier: the blocks that cannot be evicted are those that are counted.
//! [`RetentionConfig::share`](crate::RetentionConfig) bounds their number, and a tenant with a quota has its
//! share of that.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvstore_block::BlockIdentity;
use kvstore_catalog::{Lease, TenantId, TierIndex};

use super::Tiers;
use crate::config::WriteMode;
use crate::fault_injection::{Planted, is_planted};
use crate::held::HeldBlock;
use crate::job::RetentionRequest;
use crate::metrics::StoreCounters;
use crate::quota;
use crate::shared::{DISK, HOST, Shared};

/// Blocks that are taken in, and blocks whose retention ends, in a round of the thread.
const BLOCKS_PER_ROUND: usize = 256;
/// Longest time for which a block is awaited that is nowhere on this node.
const AWAITED_MAX: Duration = Duration::from_secs(60);
/// Longest time for which a block is awaited that may still come to the disk.
const COMING_MAX: Duration = Duration::from_secs(600);

/// Keeps a block in its tier.
#[derive(Debug)]
enum Pin {
    Host {
        _block: HeldBlock,
    },
    Disk {
        _lease: Lease,
    },
    /// A fault of the model test.
    Planted,
}

/// The retention of one block.
#[derive(Debug)]
struct Retention {
    until: Instant,
    /// When the block was asked for last.
    noted: Instant,
    /// The entry of this retention in [`RetainedBlocks::wakes`].
    wake: Instant,
    /// The block before it, as the tier knows it; `None`: it has none, or was not in the tier yet.
    parent: Option<BlockIdentity>,
    /// Pinned blocks directly behind it.
    pinned_children: usize,
    /// The tenant that the block counts against, and its pin; `None` while the block is awaited.
    pin: Option<(TenantId, Pin)>,
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct RetainedBlocks {
    tier: TierIndex,
    /// Blocks that may be pinned, and as many that may be awaited.
    blocks_max: usize,
    /// Blocks that may be pinned of one tenant that has a quota.
    tenant_max: Option<usize>,
    pinned: usize,
    of_tenants: HashMap<TenantId, usize>,
    retentions: HashMap<BlockIdentity, Retention>,
    /// Retentions by the blocks before theirs.
    children: HashMap<BlockIdentity, HashSet<BlockIdentity>>,
    /// When each is looked at next.
    wakes: BTreeSet<(Instant, BlockIdentity)>,
    /// Requests that have not been taken in to their ends: the number of the next block, and when their retention ends.
    queue: VecDeque<(Arc<RetentionRequest>, usize, Instant)>,
}

impl RetainedBlocks {
    pub(crate) fn new(shared: &Shared) -> Self {
        let tier = if shared.has_disk() { DISK } else { HOST };
        let slots = shared.catalog.usage(tier).map_or(0, |usage| usage.slots);
        let blocks_max = (f64::from(slots) * shared.config.retention.share.clamp(0.0, 1.0)).floor() as u32;
        Self {
            tier,
            blocks_max: blocks_max as usize,
            tenant_max: quota::of_share(shared.config.tenant_share, blocks_max).map(|blocks| blocks as usize),
            pinned: 0,
            of_tenants: HashMap::new(),
            retentions: HashMap::new(),
            children: HashMap::new(),
            wakes: BTreeSet::new(),
            queue: VecDeque::new(),
        }
    }

    /// Time at which the next block is to be checked.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.wakes.first().map(|(wake, _)| *wake)
    }

    /// The tier, and the blocks that are pinned in it, each with the one before it.
    #[cfg(test)]
    pub(crate) fn pinned(&self) -> (TierIndex, HashMap<BlockIdentity, Option<BlockIdentity>>) {
        let pinned = self.retentions.iter().filter(|(_, retention)| retention.pin.is_some());
        (self.tier, pinned.map(|(identity, retention)| (*identity, retention.parent)).collect())
    }

    /// Panics when counts and tables disagree, or more is pinned than may be.
    #[cfg(test)]
    pub(crate) fn check(&self, shared: &Shared) {
        let mut of_tenants: HashMap<TenantId, usize> = HashMap::new();
        for (identity, retention) in &self.retentions {
            if let Some((tenant, _)) = &retention.pin {
                *of_tenants.entry(*tenant).or_default() += 1;
                let parent = retention.parent;
                assert!(
                    parent.is_none_or(|parent| self.is_pinned(&parent) || !shared.holds(self.tier, &parent)),
                    "a block before a retained one is not"
                );
            }
            let children = self.children.get(identity).into_iter().flatten();
            let pinned = children.filter(|child| self.is_pinned(child)).count();
            assert_eq!(pinned, retention.pinned_children, "pinned blocks behind one");
            if let Some(parent) = &retention.parent {
                assert!(
                    self.children[parent].contains(identity),
                    "a retention that its parent's does not know"
                );
            }
        }
        let linked: usize = self.children.values().map(HashSet::len).sum();
        let with_parents = self.retentions.values().filter(|retention| retention.parent.is_some()).count();
        assert_eq!(linked, with_parents, "children of retentions");
        assert_eq!(of_tenants, self.of_tenants, "blocks that are retained for each tenant");
        assert_eq!(of_tenants.values().sum::<usize>(), self.pinned, "blocks that are retained");
        assert!(self.pinned <= self.blocks_max, "more blocks are retained than may be");
        let limited = of_tenants.iter().filter(|(tenant, _)| **tenant != quota::UNOWNED);
        let most = self.tenant_max.unwrap_or(usize::MAX);
        assert!(
            limited.map(|(_, count)| *count).all(|count| count <= most),
            "a tenant has more than its share"
        );
        assert_eq!(self.wakes.len(), self.retentions.len(), "one wake for each retention");
    }

    fn is_wanted(&self, identity: &BlockIdentity) -> bool {
        self.retentions.contains_key(identity)
    }

    /// Whether the block is to be retained, and there is room for it.
    pub(super) fn wants_written(&self, identity: &BlockIdentity) -> bool {
        self.pinned < self.blocks_max && self.is_wanted(identity)
    }

    fn awaited(&self) -> usize {
        self.retentions.len() - self.pinned
    }

    fn is_pinned(&self, identity: &BlockIdentity) -> bool {
        self.retentions.get(identity).is_some_and(|retention| retention.pin.is_some())
    }

    fn set_wake(&mut self, identity: BlockIdentity, wake: Instant) {
        if let Some(retention) = self.retentions.get_mut(&identity) {
            self.wakes.remove(&(retention.wake, identity));
            self.wakes.insert((wake, identity));
            retention.wake = wake;
        }
    }

    /// Notes until when a block is to be retained; false when it is not there and as many are awaited as may be.
    fn note(&mut self, identity: BlockIdentity, until: Instant, now: Instant, shared: &Shared) -> bool {
        let Some(retention) = self.retentions.get_mut(&identity) else {
            if self.awaited() >= self.blocks_max && !shared.holds(self.tier, &identity) {
                return false;
            }
            let wake = until.min(now + AWAITED_MAX);
            self.wakes.insert((wake, identity));
            let children = self.children.get(&identity).into_iter().flatten();
            let pinned_children = children.filter(|child| self.is_pinned(child)).count();
            let retention = Retention { until, noted: now, wake, parent: None, pinned_children, pin: None };
            self.retentions.insert(identity, retention);
            return true;
        };
        (retention.until, retention.noted) = (retention.until.max(until), now);
        if retention.pin.is_none() {
            let wake = retention.until.min(now + AWAITED_MAX);
            self.set_wake(identity, wake);
        }
        true
    }

    /// Pins the block, if it is awaited, is in the tier now and may be pinned; then the blocks that waited
    /// for it.
    fn pin(&mut self, identity: &BlockIdentity, shared: &Shared) {
        if !self.pin_one(identity, shared) {
            return;
        }
        let mut pinned = vec![*identity];
        while let Some(parent) = pinned.pop() {
            for child in self.children.get(&parent).cloned().unwrap_or_default() {
                if self.pin_one(&child, shared) {
                    pinned.push(child);
                }
            }
        }
    }

    /// Whether the block is pinned now and was not before.
    fn pin_one(&mut self, identity: &BlockIdentity, shared: &Shared) -> bool {
        if self.retentions.get(identity).is_none_or(|retention| retention.pin.is_some()) {
            return false;
        }
        let Some(lease) = shared.catalog.pin(self.tier, identity) else { return false };
        let parent = lease.parent();
        self.set_parent(identity, parent);
        let unpinned = parent.filter(|parent| !self.is_pinned(parent) && shared.holds(self.tier, parent));
        if unpinned.is_some_and(|parent| self.is_wanted(&parent)) {
            // The turn of this block comes with the one before it.
            return false;
        }
        let tenant = shared.catalog.tenant_of(&lease).unwrap_or(quota::UNOWNED);
        let of_tenant = self.of_tenants.get(&tenant).copied().unwrap_or(0);
        let is_over = tenant != quota::UNOWNED && self.tenant_max.is_some_and(|most| of_tenant >= most);
        if unpinned.is_some() || self.pinned >= self.blocks_max || is_over {
            StoreCounters::add(&shared.counters.retention_refused, 1);
            self.remove(identity, shared);
            return false;
        }
        let pin = match self.tier {
            _ if is_planted(Planted::LostRetention) => Pin::Planted,
            HOST => Pin::Host { _block: shared.held.hold(lease) },
            _ => Pin::Disk { _lease: lease },
        };
        let Some(retention) = self.retentions.get_mut(identity) else { return false };
        retention.pin = Some((tenant, pin));
        self.pinned += 1;
        *self.of_tenants.entry(tenant).or_default() += 1;
        if let Some(parent) = parent.and_then(|parent| self.retentions.get_mut(&parent)) {
            parent.pinned_children += 1;
        }
        shared.retained.store(self.pinned, Ordering::Relaxed);
        StoreCounters::add(&shared.counters.retention_pinned, 1);
        true
    }

    fn set_parent(&mut self, identity: &BlockIdentity, parent: Option<BlockIdentity>) {
        let Some(retention) = self.retentions.get_mut(identity) else { return };
        let before = std::mem::replace(&mut retention.parent, parent);
        if before == parent {
            return;
        }
        if let Some(parent) = parent {
            self.children.entry(parent).or_default().insert(*identity);
        }
        if let Some(before) = before {
            self.forget_child(&before, identity);
        }
    }

    fn forget_child(&mut self, parent: &BlockIdentity, identity: &BlockIdentity) {
        if let Some(children) = self.children.get_mut(parent) {
            children.remove(identity);
            if children.is_empty() {
                self.children.remove(parent);
            }
        }
    }

    /// Ends the pin of a block without pinned ones behind it, if it has one.
    fn unpin(&mut self, identity: &BlockIdentity, shared: &Shared) {
        let Some(retention) = self.retentions.get_mut(identity) else { return };
        let (pin, parent) = (retention.pin.take(), retention.parent);
        let Some((tenant, _pin)) = pin else { return };
        self.pinned -= 1;
        if let Some(count) = self.of_tenants.get_mut(&tenant) {
            *count -= 1;
            if *count == 0 {
                self.of_tenants.remove(&tenant);
            }
        }
        shared.retained.store(self.pinned, Ordering::Relaxed);
        let Some(parent) = parent else { return };
        let Some(retention) = self.retentions.get_mut(&parent) else { return };
        retention.pinned_children -= 1;
        // The retention of the parent may have been over before this one.
        if retention.pinned_children == 0 && retention.pin.is_some() {
            let until = retention.until;
            self.set_wake(parent, until);
        }
    }

    /// Takes out a retention behind which nothing is pinned.
    fn remove(&mut self, identity: &BlockIdentity, shared: &Shared) {
        self.unpin(identity, shared);
        if let Some(retention) = self.retentions.remove(identity) {
            self.wakes.remove(&(retention.wake, *identity));
            if let Some(parent) = retention.parent {
                self.forget_child(&parent, identity);
            }
        }
    }

    /// Ends the pins of a block and of those behind it: they are awaited again.
    fn unpin_all(&mut self, identity: &BlockIdentity, now: Instant, shared: &Shared) {
        let mut chain = vec![*identity];
        let mut at = 0;
        while let Some(parent) = chain.get(at) {
            let children = self.children.get(parent).into_iter().flatten();
            let pinned: Vec<BlockIdentity> =
                children.filter(|child| self.is_pinned(child)).copied().collect();
            chain.extend(pinned);
            at += 1;
        }
        for identity in chain.iter().rev() {
            self.unpin(identity, shared);
            if let Some(retention) = self.retentions.get(identity) {
                let wake = retention.until.min(now + AWAITED_MAX);
                self.set_wake(*identity, wake);
            }
        }
    }

    /// Ends the retention of a block that is forgotten.
    pub(super) fn cancel(&mut self, identity: &BlockIdentity, now: Instant, shared: &Shared) {
        if self.is_wanted(identity) {
            self.unpin_all(identity, now, shared);
            self.remove(identity, shared);
        }
    }

    /// The tier drops its copy; retention goes on with the next copy.
    pub(super) fn copy_lost(
        &mut self,
        tier: TierIndex,
        identity: &BlockIdentity,
        now: Instant,
        shared: &Shared,
    ) {
        if tier == self.tier && self.is_pinned(identity) {
            self.unpin_all(identity, now, shared);
        }
    }

    /// Handles a block that has come into the tier. If it is not pinned, the blocks behind it must not be:
    /// they would keep it there.
    fn arrived(&mut self, tier: TierIndex, identity: &BlockIdentity, now: Instant, shared: &Shared) {
        if tier != self.tier {
            return;
        }
        self.pin(identity, shared);
        if self.children.contains_key(identity) && !self.is_pinned(identity) {
            self.unpin_all(identity, now, shared);
        }
    }

    /// Ends retentions that are due, some of them. `is_coming`: the block may still come to the tier.
    fn expire(&mut self, now: Instant, shared: &Shared, is_coming: impl Fn(&BlockIdentity) -> bool) {
        for _ in 0..BLOCKS_PER_ROUND {
            let Some(&(_, identity)) = self.wakes.first().filter(|(wake, _)| *wake <= now) else { return };
            let Some(retention) = self.retentions.get(&identity) else { return };
            let Retention { until, noted, pinned_children, .. } = *retention;
            let was_pinned = retention.pin.is_some();
            if !was_pinned && until > now {
                self.pin(&identity, shared);
            }
            let is_pinned = self.is_pinned(&identity);
            let is_awaited = now < noted + COMING_MAX && is_coming(&identity);
            let next = match is_pinned {
                true if until > now => until,
                // `unpin` of the last of them wakes it.
                true if pinned_children > 0 => now + AWAITED_MAX,
                false if is_awaited => until.min(now + AWAITED_MAX),
                _ => now,
            };
            if next > now {
                self.set_wake(identity, next);
            } else if self.is_wanted(&identity) {
                StoreCounters::add(&shared.counters.retention_unmet, usize::from(!is_pinned));
                self.unpin_all(&identity, now, shared);
                self.remove(&identity, shared);
            }
        }
    }
}

impl Tiers {
    /// Queues a retention request.
    pub(crate) fn retain(&mut self, request: Arc<RetentionRequest>, how_long: Duration) {
        if self.retained.blocks_max == 0 {
            return StoreCounters::add(&self.shared.counters.retention_refused, request.chain().len());
        }
        self.retained.queue.push_back((request, 0, self.now + how_long));
    }

    /// Takes in some blocks of the queued requests, and ends some retentions that are over; false when
    /// nothing more is queued.
    pub(crate) fn advance_retained(&mut self) -> bool {
        for _ in 0..BLOCKS_PER_ROUND {
            let Some((request, next, until)) = self.retained.queue.front_mut() else { break };
            let (identity, until) = (request.chain().get(*next).copied(), *until);
            *next += 1;
            let Some(identity) = identity else {
                self.retained.queue.pop_front();
                continue;
            };
            let Self { retained, shared, .. } = self;
            if !retained.note(identity, until, self.now, shared) {
                StoreCounters::add(&shared.counters.retention_refused, 1);
                continue;
            }
            retained.pin(&identity, shared);
            if retained.awaited() > retained.blocks_max && !retained.is_pinned(&identity) {
                StoreCounters::add(&shared.counters.retention_refused, 1);
                retained.cancel(&identity, self.now, shared);
            }
            self.write_if_retained(identity);
        }
        let Self { retained, shared, disk, .. } = self;
        let is_coming = |identity: &BlockIdentity| {
            let is_on_host_alone = shared.holds(HOST, identity) && !shared.holds(DISK, identity);
            disk.as_ref().is_some_and(|disk| disk.writes.contains(identity) || is_on_host_alone)
        };
        retained.expire(self.now, shared, is_coming);
        !retained.queue.is_empty()
    }

    /// A block that was offered too rarely to be written is written now.
    fn write_if_retained(&mut self, identity: BlockIdentity) {
        let is_through = self.shared.config.disk_write == WriteMode::Through;
        let Some(disk) = self.disk.as_ref().filter(|disk| is_through && disk.gate.is_selective()) else {
            return;
        };
        let is_here_alone = self.shared.holds(HOST, &identity) && !self.shared.holds(DISK, &identity);
        if is_here_alone && !disk.writes.contains(&identity) && self.retained.wants_written(&identity) {
            self.write_through(identity);
        }
    }

    /// The block has come into a tier: it is pinned there if it is to be retained.
    pub(super) fn pin_if_retained(&mut self, tier: TierIndex, identity: &BlockIdentity) {
        let Self { retained, shared, now, .. } = self;
        retained.arrived(tier, identity, *now, shared);
    }
}
