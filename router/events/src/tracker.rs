//! One publisher's events in order, translated and applied to the index.
//!
//! An engine names blocks by hashes of its own making, which depend on its version and settings. They are only
//! keys here: for its removals, and to find a block's parent. What the index holds is our own sequence hash,
//! computed from the tokens.

use std::collections::{HashMap, HashSet};

use kvstore_block::SequenceHasher;
use router_radix::{Index, Level, WorkerSlot};

use crate::wire::{EngineHash, EventBatch, KvEvent, Removed, Stored, Tier};

/// What to do about a message's sequence number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sequence {
    /// It is the next one.
    Next,
    /// It has been seen.
    Old,
    /// Messages from here on are missing.
    Gap {
        /// The first missing number.
        from: u64,
    },
    /// The publisher has started anew.
    Restart,
}

/// Numbers for people.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TrackerCounters {
    /// Batches applied.
    pub batches: u64,
    /// Blocks stored.
    pub stored: u64,
    /// Blocks removed.
    pub removed: u64,
    /// Blocks whose parent was unknown, and which were therefore left out.
    pub orphans: u64,
    /// Times that everything of this publisher was forgotten.
    pub resets: u64,
}

#[derive(Debug, Default)]
struct Known {
    sequence_hash: u64,
    /// Copies per tier: the engine stores and removes each physical copy.
    copies: [u32; 2],
}

/// State of one publisher.
#[derive(Debug)]
pub struct Tracker {
    worker: WorkerSlot,
    block_tokens: usize,
    next: Option<u64>,
    known: HashMap<EngineHash, Known>,
    /// Groups of layers whose blocks say nothing about whole prefixes; their removals do not, either.
    other_groups: HashSet<u32>,
    /// What has been done so far.
    pub counters: TrackerCounters,
}

fn level(tier: Tier) -> Option<Level> {
    match tier {
        Tier::Device => Some(Level::Device),
        Tier::Host => Some(Level::Host),
        Tier::Disk | Tier::Remote => None,
    }
}

impl Tracker {
    /// A publisher about which nothing is known.
    #[must_use]
    pub fn new(worker: WorkerSlot, block_tokens: usize) -> Self {
        Self {
            worker,
            block_tokens,
            next: None,
            known: HashMap::new(),
            other_groups: HashSet::new(),
            counters: TrackerCounters::default(),
        }
    }

    /// The number that the next message should have.
    #[must_use]
    pub fn expected(&self) -> u64 {
        self.next.unwrap_or(0)
    }

    /// Judges a sequence number; does not advance.
    #[must_use]
    pub fn judge(&self, sequence: u64) -> Sequence {
        match self.next {
            None if sequence == 0 => Sequence::Next,
            None => Sequence::Gap { from: 0 },
            Some(next) if sequence == next => Sequence::Next,
            Some(next) if sequence > next => Sequence::Gap { from: next },
            Some(_) if sequence == 0 => Sequence::Restart,
            Some(_) => Sequence::Old,
        }
    }

    /// Applies a batch and expects the number after `sequence` next.
    pub fn apply(&mut self, index: &Index, sequence: u64, batch: &EventBatch) {
        self.next = Some(sequence + 1);
        self.counters.batches += 1;
        for event in &batch.events {
            match event {
                KvEvent::Stored(stored) => self.stored(index, stored),
                KvEvent::Removed(removed) => self.removed(index, removed),
                KvEvent::Cleared => self.forget(index),
            }
        }
    }

    /// Forgets all blocks and all numbers; the publisher starts anew.
    pub fn reset(&mut self, index: &Index) {
        self.forget(index);
        self.next = None;
        self.counters.resets += 1;
    }

    /// Gives up on what is missing before `sequence`: forgets all blocks and goes on from there.
    pub fn skip_to(&mut self, index: &Index, sequence: u64) {
        self.reset(index);
        self.next = Some(sequence);
    }

    fn forget(&mut self, index: &Index) {
        self.known.clear();
        index.remove_worker(self.worker);
    }

    fn stored(&mut self, index: &Index, stored: &Stored) {
        if !stored.is_full_attention {
            self.other_groups.extend(stored.group);
            return;
        }
        let Some(level) = level(stored.tier) else { return };
        if stored.block_tokens != self.block_tokens
            || stored.tokens.len() != stored.hashes.len() * stored.block_tokens
        {
            return;
        }
        let mut hasher = match stored.parent {
            None => {
                let extras: Vec<&str> = stored.extras.iter().map(String::as_str).collect();
                SequenceHasher::with_extras(&extras)
            }
            Some(parent) => match self.known.get(&parent) {
                Some(known) => SequenceHasher::after(known.sequence_hash),
                None => {
                    self.counters.orphans += stored.hashes.len() as u64;
                    return;
                }
            },
        };
        for (&hash, tokens) in stored.hashes.iter().zip(stored.tokens.chunks_exact(stored.block_tokens)) {
            let sequence_hash = hasher.next(tokens);
            let known = self.known.entry(hash).or_default();
            known.sequence_hash = sequence_hash;
            known.copies[level as usize] += 1;
            if known.copies[level as usize] == 1 {
                index.insert(self.worker, level, sequence_hash);
            }
            self.counters.stored += 1;
        }
    }

    fn removed(&mut self, index: &Index, removed: &Removed) {
        if removed.group.is_some_and(|group| self.other_groups.contains(&group)) {
            return;
        }
        let Some(level) = level(removed.tier) else { return };
        for hash in &removed.hashes {
            let Some(known) = self.known.get_mut(hash) else { continue };
            let copies = &mut known.copies[level as usize];
            if *copies == 0 {
                continue;
            }
            *copies -= 1;
            self.counters.removed += 1;
            if *copies == 0 {
                index.remove(self.worker, level, known.sequence_hash);
            }
            if known.copies == [0, 0] {
                self.known.remove(hash);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(hashes: &[u64], parent: Option<u64>, tokens: &[u32], tier: Tier) -> KvEvent {
        KvEvent::Stored(Stored {
            hashes: hashes.to_vec(),
            parent,
            tokens: tokens.to_vec(),
            block_tokens: 2,
            tier,
            extras: Vec::new(),
            group: None,
            is_full_attention: true,
        })
    }

    fn removed(hash: u64, tier: Tier) -> KvEvent {
        KvEvent::Removed(Removed { hashes: vec![hash], tier, group: None })
    }

    struct Rig {
        index: Index,
        tracker: Tracker,
        sequence: u64,
    }

    impl Rig {
        fn new() -> Self {
            let index = Index::new(64);
            let worker = index.add_worker().expect("room");
            Self { index, tracker: Tracker::new(worker, 2), sequence: 0 }
        }

        fn apply(&mut self, events: Vec<KvEvent>) {
            let batch = EventBatch { events, ..EventBatch::default() };
            self.tracker.apply(&self.index, self.sequence, &batch);
            self.sequence += 1;
        }

        fn held(&self, tokens: &[u32]) -> (u32, u32) {
            let mut hashes = Vec::new();
            kvstore_block::sequence_hashes(SequenceHasher::new(), tokens, 2, &mut hashes);
            let overlap = self.index.overlaps(&hashes);
            (overlap.device(self.tracker.worker), overlap.any(self.tracker.worker))
        }
    }

    #[test]
    fn copies_are_counted_and_tiers_kept_apart() {
        let mut rig = Rig::new();
        rig.apply(vec![stored(&[10, 11], None, &[1, 2, 3, 4], Tier::Device)]);
        rig.apply(vec![stored(&[12], Some(11), &[5, 6], Tier::Device)]);
        assert_eq!(rig.held(&[1, 2, 3, 4, 5, 6, 7, 8]), (3, 3));
        rig.apply(vec![stored(&[11], Some(10), &[3, 4], Tier::Device)]);
        rig.apply(vec![removed(11, Tier::Device)]);
        assert_eq!(rig.held(&[1, 2, 3, 4, 5, 6]), (3, 3), "a second copy is left");
        rig.apply(vec![stored(&[11], Some(10), &[3, 4], Tier::Host), removed(11, Tier::Device)]);
        assert_eq!(rig.held(&[1, 2, 3, 4, 5, 6]), (1, 3), "now only the host has it");
        rig.apply(vec![removed(99, Tier::Device), KvEvent::Cleared]);
        assert_eq!(rig.held(&[1, 2]), (0, 0));
    }

    #[test]
    fn orphans_are_counted_and_left_out() {
        let mut rig = Rig::new();
        rig.apply(vec![stored(&[12], Some(11), &[5, 6], Tier::Device)]);
        assert_eq!(rig.tracker.counters.orphans, 1);
        assert_eq!(rig.held(&[5, 6]), (0, 0));
    }

    #[test]
    fn sequence_numbers_tell_gaps_from_restarts() {
        let mut rig = Rig::new();
        assert_eq!(rig.tracker.judge(0), Sequence::Next);
        assert_eq!(rig.tracker.judge(4), Sequence::Gap { from: 0 });
        rig.apply(Vec::new());
        rig.apply(Vec::new());
        assert_eq!(rig.tracker.judge(2), Sequence::Next);
        assert_eq!(rig.tracker.judge(5), Sequence::Gap { from: 2 });
        assert_eq!(rig.tracker.judge(1), Sequence::Old);
        assert_eq!(rig.tracker.judge(0), Sequence::Restart);
        rig.tracker.skip_to(&rig.index, 5);
        assert_eq!(rig.tracker.judge(5), Sequence::Next);
    }
}
