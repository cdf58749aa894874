//! New blocks of host memory, offered to the tiers of other nodes in the portions that these take, when they take some.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use crate::plan::{Priority, Tier};
use kvstore_block::BlockIdentity;
use kvstore_catalog::{Catalog, Lease};

use super::{OfferBatch, OfferedBlock, SecondaryTiers};
use crate::shared::HOST;
use crate::tiers::Tiers;

/// Blocks offered to a tier in a round, found and not found.
const OFFERS_PER_ROUND: usize = 32;
/// Pauses after a tier could not take a block: the first one, and the longest.
const PAUSE_FIRST: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(10);
/// Blocks that wait for one before them in their chain.
const ORPHANS_MAX: usize = 4096;
/// Offers of a block to nodes that are full.
const ATTEMPTS_MAX: u8 = 4;
/// Blocks whose refusals are counted.
const REFUSALS_MAX: usize = 4096;

/// The part of host memory that all backlogs together hold, as a divisor.
const HELD_SHARE: usize = 8;
/// Blocks whose group is remembered after they were offered.
const GROUPS_MAX: usize = 4096;

/// Blocks that a tier is to be offered, in the order in which they came into host memory. The next ones are held there: new blocks are
/// the first to be evicted from a full tier. The others are names only, and one that host memory has lost by its turn is passed over; so
/// are all of them while the tier is out of reach.
#[derive(Debug, Default)]
pub(super) struct Backlog {
    waiting: VecDeque<(BlockIdentity, Option<Lease>)>,
    /// Number of leading entries of `waiting` that have been held, or whose blocks have gone.
    held: usize,
    pub(super) groups: Groups,
    orphans: Orphans,
    /// No block is offered before this time: the tier could not take a block, or its bandwidth is used up.
    paused_until: Option<Instant>,
    /// Consecutive offers that the tier could not take.
    failures: u32,
    /// Number of refusals of each block by full nodes.
    refusals: HashMap<BlockIdentity, u8>,
}

/// The first block of the group of each block that was offered lately. Blocks of a group are offered one by
/// one, and the first may have left host memory by the turn of the last.
#[derive(Debug, Default)]
pub(super) struct Groups {
    first: HashMap<BlockIdentity, BlockIdentity>,
    order: VecDeque<BlockIdentity>,
}

impl Groups {
    pub(super) fn remember(&mut self, identity: BlockIdentity, first: BlockIdentity) {
        if self.first.insert(identity, first).is_some() {
            return;
        }
        self.order.push_back(identity);
        if self.order.len() > GROUPS_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.first.remove(&oldest);
        }
    }
}

/// Blocks whose group or run begins with a block that host memory has not, by that block: several threads save a chain, and its
/// blocks become known in any order. Of more than [`ORPHANS_MAX`] the oldest are forgotten.
#[derive(Debug, Default)]
struct Orphans {
    by_missing: HashMap<BlockIdentity, Vec<BlockIdentity>>,
    /// Each with the block that it waits for, in their order.
    order: VecDeque<(BlockIdentity, BlockIdentity)>,
}

impl Orphans {
    fn push(&mut self, identity: BlockIdentity, missing: BlockIdentity) {
        if self.order.len() == ORPHANS_MAX
            && let Some((missing, oldest)) = self.order.pop_front()
            && let Some(waiting) = self.by_missing.get_mut(&missing)
        {
            waiting.retain(|waiting| *waiting != oldest);
            if waiting.is_empty() {
                self.by_missing.remove(&missing);
            }
        }
        self.by_missing.entry(missing).or_default().push(identity);
        self.order.push_back((missing, identity));
    }

    /// Removes the blocks that waited for `identity`.
    fn take(&mut self, identity: &BlockIdentity) -> Vec<BlockIdentity> {
        let Some(waiting) = self.by_missing.remove(identity) else { return Vec::new() };
        self.order.retain(|(missing, _)| missing != identity);
        waiting
    }
}

impl Backlog {
    /// A block is new in host memory.
    fn offer(&mut self, identity: BlockIdentity, blocks_max: usize) {
        self.push(identity, blocks_max);
        for waiting in self.orphans.take(&identity) {
            self.push(waiting, blocks_max);
        }
    }

    /// Drops the oldest name at `blocks_max`: host memory has evicted it.
    fn push(&mut self, identity: BlockIdentity, blocks_max: usize) {
        if self.waiting.len() >= blocks_max.max(1) {
            self.waiting.pop_front();
            self.held = self.held.saturating_sub(1);
        }
        self.waiting.push_back((identity, None));
    }

    /// Holds the next blocks, so many of them, while the tier is within reach.
    fn hold(&mut self, catalog: &Catalog, blocks_max: usize) {
        let is_reached = self.failures == 0;
        let end = self.waiting.len().min(if is_reached { blocks_max } else { 0 });
        for (identity, lease) in self.waiting.iter_mut().take(end).skip(self.held) {
            *lease = catalog.pin(HOST, identity);
        }
        self.held = self.held.max(end);
    }

    fn release_held(&mut self) {
        self.waiting.iter_mut().take(self.held).for_each(|(_, lease)| *lease = None);
        self.held = 0;
    }

    /// A block that has no turn yet comes first again.
    fn put_back(&mut self, identity: BlockIdentity, lease: Option<Lease>) {
        self.waiting.push_front((identity, lease));
        self.held += 1;
    }

    /// Time at which waiting blocks are offered again, if no event comes before.
    pub(super) fn resumes_at(&self) -> Option<Instant> {
        self.paused_until.filter(|_| !self.waiting.is_empty())
    }

    /// Returns the next block, unless the tier is paused.
    fn next(&mut self, now: Instant) -> Option<(BlockIdentity, Option<Lease>)> {
        if self.paused_until.is_some_and(|until| now < until) {
            return None;
        }
        self.paused_until = None;
        self.held = self.held.saturating_sub(1);
        self.waiting.pop_front()
    }

    /// Whether a block that was refused is offered again.
    fn may_try_again(&mut self, identity: &BlockIdentity) -> bool {
        if self.refusals.len() >= REFUSALS_MAX {
            // Counting begins anew: some are offered a few times more.
            self.refusals.clear();
        }
        let refusals = self.refusals.entry(*identity).or_default();
        *refusals = refusals.saturating_add(1);
        *refusals < ATTEMPTS_MAX
    }

    fn failed(&mut self, now: Instant) {
        let pause = PAUSE_FIRST.saturating_mul(1 << self.failures.min(16)).min(PAUSE_MAX);
        self.failures = self.failures.saturating_add(1);
        self.paused_until = Some(now + pause);
        self.release_held();
    }
}

impl SecondaryTiers {
    /// A block that is new in host memory is to be offered to all tiers.
    pub(crate) fn offer(&mut self, identity: BlockIdentity, tiers: &Tiers) {
        self.offer_to_first(self.links.len(), identity, tiers);
    }

    /// The same for the tiers that are asked first, so many of them.
    pub(super) fn offer_to_first(&mut self, count: usize, identity: BlockIdentity, tiers: &Tiers) {
        let count = count.min(self.backlogs.len());
        let held_max = self.held_max(tiers);
        for backlog in &mut self.backlogs[..count] {
            backlog.offer(identity, tiers.host_slots());
            backlog.hold(&tiers.shared.catalog, held_max);
        }
    }

    /// Blocks that the backlog of each tier may hold.
    fn held_max(&self, tiers: &Tiers) -> usize {
        tiers.host_slots() / HELD_SHARE / self.backlogs.len().max(1)
    }

    /// Offers the blocks that waited for this one, which has come back from the disk.
    pub(crate) fn offer_orphans_of(&mut self, identity: &BlockIdentity, tiers: &Tiers) {
        for backlog in &mut self.backlogs {
            for waiting in backlog.orphans.take(identity) {
                backlog.push(waiting, tiers.host_slots());
            }
        }
    }

    /// Handles the end of an offer. Blocks that the tier could not take are offered again: without end while
    /// the tier is out of reach, a few times where it was full.
    pub(super) fn offered(
        &mut self,
        tier: Tier,
        failed: Vec<BlockIdentity>,
        refused: Vec<BlockIdentity>,
        now: Instant,
        blocks_max: usize,
    ) {
        let Some(at) = self.links.iter().position(|link| link.tier() == tier) else { return };
        let backlog = &mut self.backlogs[at];
        if failed.is_empty() && refused.is_empty() {
            backlog.failures = 0;
        } else if backlog.paused_until.is_none_or(|until| until <= now) {
            // Of several failures in flight together the first counts.
            backlog.failed(now);
        }
        let again: Vec<BlockIdentity> =
            refused.into_iter().filter(|identity| backlog.may_try_again(identity)).collect();
        failed.into_iter().chain(again).for_each(|identity| backlog.push(identity, blocks_max));
    }

    /// Handles that a node of a tier can be reached again. Until then new blocks were not held for it, and
    /// the next try may have been seconds away.
    pub(super) fn reached(&mut self, tier: Tier, tiers: &Tiers) {
        let held_max = self.held_max(tiers);
        let Some(at) = self.links.iter().position(|link| link.tier() == tier) else { return };
        let backlog = &mut self.backlogs[at];
        if backlog.failures > 0 {
            (backlog.failures, backlog.paused_until) = (0, None);
            backlog.hold(&tiers.shared.catalog, held_max);
        }
    }

    /// Offers waiting blocks, as far as the tiers take them; false when nothing changed.
    pub(crate) fn advance_offers(&mut self, now: Instant, tiers: &mut Tiers) -> bool {
        let (mut has_offered, held_max) = (false, self.held_max(tiers));
        for (link, backlog) in self.links.iter_mut().zip(&mut self.backlogs) {
            for _ in 0..OFFERS_PER_ROUND {
                if !link.has_room(0) {
                    break;
                }
                let Some((identity, lease)) = backlog.next(now) else { break };
                backlog.hold(&tiers.shared.catalog, held_max);
                let (blocks, head) =
                    match offer_batch_from(identity, link.offer_batch(), &backlog.groups, tiers) {
                        Found::OfferBatch(blocks, head) => (blocks, head),
                        Found::Missing(missing) => {
                            backlog.orphans.push(identity, missing);
                            has_offered = true;
                            continue;
                        }
                        Found::Nothing => {
                            has_offered = true;
                            continue;
                        }
                    };
                let bytes = blocks.iter().map(|block| block.block.len() as u64).sum();
                if !link.has_room(bytes) {
                    backlog.put_back(identity, lease);
                    break;
                }
                if let Err(wait) = tiers.bandwidth.admit(link.tier(), Priority::Offload, bytes) {
                    backlog.put_back(identity, lease);
                    backlog.paused_until = Some(now + wait);
                    break;
                }
                if !link.offer(blocks, head) {
                    // The tier's thread takes no commands now, and no event reports when it does.
                    backlog.put_back(identity, lease);
                    backlog.failed(now);
                    break;
                }
                backlog.groups.remember(identity, head);
                has_offered = true;
            }
        }
        has_offered
    }
}

/// Result of the search for the portion that a block completes.
enum Found {
    /// A portion, and the first block of its group or run.
    OfferBatch(Vec<OfferedBlock>, BlockIdentity),
    /// The chain is not in host memory as far as the tier needs it: this block is not.
    Missing(BlockIdentity),
    /// The block has gone, or is not the last of a run.
    Nothing,
}

/// The portion of a tier that this block is the last one of.
fn offer_batch_from(
    identity: BlockIdentity,
    offer_batch: OfferBatch,
    groups: &Groups,
    tiers: &Tiers,
) -> Found {
    let Some(last) = outgoing(identity, tiers) else { return Found::Nothing };
    let position = last.description.position;
    let (steps, is_run) = match offer_batch {
        OfferBatch::Single { group } => (position % group.max(1), false),
        OfferBatch::Run(run) if (position + 1).is_multiple_of(run.max(1)) => (run.max(1) - 1, true),
        OfferBatch::Run(_) => return Found::Nothing,
    };
    let mut head = last.identity;
    let mut parent = last.description.parent;
    let mut blocks = vec![last];
    for _ in 0..steps {
        // A block without a parent that is not the first of its chain has no group.
        let Some(wanted) = parent else { return Found::Nothing };
        if let Some(first) = groups.first.get(&wanted).filter(|_| !is_run) {
            head = *first;
            break;
        }
        let Some(before) = outgoing(wanted, tiers) else { return Found::Missing(wanted) };
        (head, parent) = (before.identity, before.description.parent);
        if is_run {
            blocks.push(before);
        }
    }
    blocks.reverse();
    Found::OfferBatch(blocks, head)
}

/// Returns the block for an offer; `None`: host memory does not have the block, or its description is
/// unknown.
pub(super) fn outgoing(identity: BlockIdentity, tiers: &Tiers) -> Option<OfferedBlock> {
    let lease = tiers.shared.catalog.pin(HOST, &identity)?;
    let description = tiers.description(lease.slot())?.clone();
    let memory = &tiers.shared.memory;
    let slot = memory.slot(lease.slot()).clone();
    Some(OfferedBlock { identity, description, slot, block: memory.held(lease)? })
}
