//! Second homes for groups that are often requested, written in the background by the client that has just read
//! them.
//!
//! Each client counts by itself and remembers the groups it has copied; copying a group that another client has
//! copied costs one round trip, as the node answers that the blocks are present. Stores always go to the first
//! node of the ranking; a second home that has dropped blocks is forgotten as soon as a look-up shows it.

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

use dataplane_fabric::Fabric;
use kvstore_block::{BlockIdentity, TokenBucket};

use super::RemotePool;
use super::operation::{Operation, StoreBlock, Verified};
use super::storing::Store;
use crate::NodeId;
use crate::metrics::add;
use crate::sketch::Sketch;

/// Delay before a copy is tried again that the rate did not allow.
const RETRY_AFTER: Duration = Duration::from_millis(10);

pub(super) struct Replication {
    pub(super) sketch: Sketch,
    /// Rate limit of copies; `None`: nothing is copied.
    pub(super) bucket: Option<TokenBucket>,
    pub(super) waiting: VecDeque<PendingCopy>,
    pub(super) done: Replicated,
}

/// Groups with a second home, up to a limit; the oldest is forgotten first.
#[derive(Default)]
pub(super) struct Replicated {
    groups: BTreeMap<BlockIdentity, u64>,
    by_age: BTreeMap<u64, BlockIdentity>,
    next: u64,
}

impl Replicated {
    pub(super) fn contains(&self, group: &BlockIdentity) -> bool {
        self.groups.contains_key(group)
    }

    pub(super) fn remember(&mut self, group: BlockIdentity, most: usize) {
        if self.contains(&group) {
            return;
        }
        while self.groups.len() >= most
            && let Some((_, oldest)) = self.by_age.pop_first()
        {
            self.groups.remove(&oldest);
        }
        self.groups.insert(group, self.next);
        self.by_age.insert(self.next, group);
        self.next += 1;
    }

    pub(super) fn forget(&mut self, group: &BlockIdentity) {
        if let Some(age) = self.groups.remove(group) {
            self.by_age.remove(&age);
        }
    }
}

/// A group to copy, with the slots that it was read into.
pub(super) struct PendingCopy {
    group: BlockIdentity,
    to: NodeId,
    blocks: Vec<StoreBlock>,
    since: Instant,
}

/// Returns a bucket with this rate and a burst of one second; `None` for a rate of 0.
pub(super) fn one_second_of(bytes_per_second: u64, now: Instant) -> Option<TokenBucket> {
    NonZeroU64::new(bytes_per_second).map(|rate| TokenBucket::new(rate, rate, now))
}

impl Replication {
    /// Whether the rate allows a copy of `bytes` now; charges them if so.
    fn may_copy(&mut self, bytes: u64, now: Instant) -> bool {
        self.bucket.as_mut().is_some_and(|bucket| bucket.take(now, bytes, 0).is_ok())
    }

    /// Called when the ranking has changed.
    pub(super) fn forget_all(&mut self) {
        self.done = Replicated::default();
        self.waiting.clear();
    }
}

impl<F: Fabric> RemotePool<F> {
    /// Queues the groups of a fetch that are requested often enough for a second home. Groups that are read in
    /// place are not copied by this client, which has no slots of them.
    pub(super) fn queue_hot_groups(&mut self, ticket: u64, blocks: &[Verified], now: Instant) {
        if self.config.hot_count == 0 || self.config.replicate_bytes_per_second == 0 {
            return;
        }
        let Some(Operation::Fetch(fetch)) = self.operations.get(&ticket) else { return };
        let first = fetch.mapped;
        let is_read = |start: usize| (first..first + blocks.len()).contains(&start);
        for group in fetch.groups.iter().filter(|group| is_read(group.blocks.start)) {
            let is_hot = self.replication.sketch.estimate(&group.name) >= self.config.hot_count;
            let is_known = self.replication.done.contains(&group.name)
                || self.replication.waiting.iter().any(|waiting| waiting.group == group.name)
                || self.operations.values().any(|operation| operation.copies(&group.name));
            if !is_hot || is_known {
                continue;
            }
            let usable = |id| self.nodes.get(&id).is_some_and(|node| node.is_usable());
            let Some(to) = self.placement.best_two(&group.name, usable)[1] else { continue };
            if self.replication.waiting.len() >= self.config.replications_max {
                add(&self.counters.totals.dropped_replications, 1);
                continue;
            }
            let range = group.blocks.start..group.blocks.end.min(first + blocks.len());
            let blocks = range
                .map(|index| StoreBlock {
                    identity: fetch.blocks[index].identity,
                    group: group.name,
                    slot: blocks[index - first].slot.clone(),
                    description: blocks[index - first].description,
                })
                .collect();
            self.replication.waiting.push_back(PendingCopy { group: group.name, to, blocks, since: now });
        }
    }

    /// Starts as many copies as the rate allows.
    pub(super) fn replicate(&mut self, now: Instant) {
        while let Some(waiting) = self.replication.waiting.front() {
            let bytes = waiting.blocks.iter().map(|block| u64::from(block.description.bytes)).sum();
            let is_late = now.saturating_duration_since(waiting.since) > self.config.hot_window;
            if !is_late {
                let has_room = self.operations.len() < self.config.operations_max;
                if !has_room || !self.replication.may_copy(bytes, now) {
                    return self.due_at(now + RETRY_AFTER);
                }
            }
            let Some(PendingCopy { group, to, blocks, .. }) = self.replication.waiting.pop_front() else {
                return;
            };
            if is_late {
                add(&self.counters.totals.dropped_replications, 1);
                continue;
            }
            let deadline = now + self.config.request_timeout + self.config.transfer_timeout;
            let store = Store { replicates: Some(group), ..Store::new(blocks.len(), deadline) };
            self.start_store(store, blocks, Some(to), now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_that_was_forgotten_and_remembered_again_is_the_youngest() {
        let group = |number: u8| BlockIdentity([number; 16]);
        let mut replicated = Replicated::default();
        (0..3).for_each(|number| replicated.remember(group(number), 3));
        replicated.forget(&group(0));
        replicated.remember(group(0), 3);
        replicated.remember(group(3), 3);
        let known = [0, 1, 2, 3].map(|number| replicated.contains(&group(number)));
        assert_eq!(known, [true, false, true, true]);
        replicated.remember(group(2), 3);
        assert_eq!((replicated.groups.len(), replicated.by_age.len()), (3, 3));
    }
}
