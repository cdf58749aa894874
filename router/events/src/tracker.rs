//! One publisher's events, translated and applied to the index.
//!
//! An engine names blocks by its own hashes, which depend on its version and settings. They are only keys here: for its
//! removals, and to find a block's parent. The index compares Kvasir's block hashes, computed from the tokens and from the
//! extra keys that the engine mixed in, or by Kvasir's own workers ([`Stored::routing_hashes`]), which then send no tokens.

use std::collections::HashSet;
use std::sync::Arc;

use kvstore_block::{block_hash, block_hash_with_extras};
use router_radix::{EngineHash, IndexWriter, Member, Outcome, Tier};

use crate::shared_blocks::SharedBlocks;
use crate::wire::{EventBatch, KvEvent, Removed, Stored};

/// Counters of one publisher.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TrackerCounters {
    /// Batches applied.
    pub batches: u64,
    /// Blocks stored.
    pub stored: u64,
    /// Blocks removed.
    pub removed: u64,
    /// Blocks that arrived before their parent, and wait for it.
    pub orphans: u64,
    /// Blocks left out because of the index's limits, or of another size than the worker's.
    pub left_out: u64,
    /// Events that could not be read.
    pub broken: u64,
    /// Times that all blocks of this publisher were forgotten.
    pub resets: u64,
}

impl std::ops::AddAssign for TrackerCounters {
    fn add_assign(&mut self, other: Self) {
        self.batches += other.batches;
        self.stored += other.stored;
        self.removed += other.removed;
        self.orphans += other.orphans;
        self.left_out += other.left_out;
        self.broken += other.broken;
        self.resets += other.resets;
    }
}

/// Result of applying a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Applied {
    /// Every event is in the index.
    Whole,
    /// A removal may have been lost: the index may hold too many blocks of the publisher.
    Doubtful,
}

/// State of one publisher.
#[derive(Debug)]
pub struct Tracker {
    member: Member,
    block_tokens: usize,
    /// Groups of layers whose blocks do not cover whole prefixes (sliding windows, linear attention); their removals do not,
    /// either.
    non_prefix_groups: HashSet<u32>,
    /// Blocks in the stores that the publisher shares with others.
    shared: Option<Arc<SharedBlocks>>,
    /// Counters so far.
    pub counters: TrackerCounters,
    blocks: Vec<u64>,
    removals: Vec<EngineHash>,
}

impl Tracker {
    /// Starts with a publisher about which nothing is known.
    #[must_use]
    pub fn new(member: Member, block_tokens: usize) -> Self {
        Self {
            member,
            block_tokens,
            non_prefix_groups: HashSet::new(),
            shared: None,
            counters: TrackerCounters::default(),
            blocks: Vec::new(),
            removals: Vec::new(),
        }
    }

    /// Member of the index.
    #[must_use]
    pub fn member(&self) -> Member {
        self.member
    }

    /// Tokens of a block.
    #[must_use]
    pub fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    /// Sets the blocks in stores that the publisher shares with others; `None`: it shares none.
    pub fn share(&mut self, shared: Option<Arc<SharedBlocks>>) {
        self.shared = shared;
    }

    pub(crate) fn non_prefix_groups(&self) -> impl Iterator<Item = u32> {
        self.non_prefix_groups.iter().copied()
    }

    pub(crate) fn restore_groups(&mut self, groups: impl IntoIterator<Item = u32>) {
        self.non_prefix_groups.extend(groups);
    }

    /// Applies a batch.
    pub fn apply(&mut self, index: &mut IndexWriter<'_>, batch: &EventBatch) -> Applied {
        self.counters.batches += 1;
        self.counters.broken += batch.broken.len() as u64;
        // Under eviction a batch has thousands of removals of one block each: adjacent ones are applied together.
        let mut tier = Tier::Device;
        for event in &batch.events {
            match event {
                KvEvent::Removed(removed) if self.counts(removed) => {
                    if removed.tier != tier {
                        self.flush(index, tier);
                        tier = removed.tier;
                    }
                    self.removals.extend_from_slice(&removed.hashes);
                }
                KvEvent::Removed(_) => {}
                KvEvent::Moved(moved) => {
                    self.flush(index, tier);
                    index.moved(self.member, &moved.hashes, moved.from, moved.to);
                }
                KvEvent::Stored(stored) => {
                    self.flush(index, tier);
                    self.stored(index, stored);
                }
                KvEvent::Cleared => {
                    self.removals.clear();
                    index.clear(self.member);
                }
            }
        }
        self.flush(index, tier);
        if batch.broken.iter().any(|broken| broken.may_remove) { Applied::Doubtful } else { Applied::Whole }
    }

    /// Forgets all blocks.
    pub fn forget(&mut self, index: &mut IndexWriter<'_>) {
        index.clear(self.member);
        self.counters.resets += 1;
    }

    fn counts(&self, removed: &Removed) -> bool {
        removed.group.is_none_or(|group| !self.non_prefix_groups.contains(&group))
    }

    fn flush(&mut self, index: &mut IndexWriter<'_>, tier: Tier) {
        if self.removals.is_empty() {
            return;
        }
        let outcome = index.removed(self.member, tier, &self.removals);
        self.counters.removed += outcome.changed + outcome.copies;
        self.removals.clear();
    }

    fn stored(&mut self, index: &mut IndexWriter<'_>, stored: &Stored) {
        if !stored.is_full_attention {
            self.non_prefix_groups.extend(stored.group);
            return;
        }
        let has_hashes = !stored.routing_hashes.is_empty();
        if !has_hashes && stored.tokens.is_empty() && stored.tier != Tier::Device {
            // vLLM reports blocks that a connector's tiers have gained by hashes alone; their tokens were sent when they were computed.
            let outcome = index.stored_known(self.member, stored.tier, &stored.hashes);
            self.counters.stored += outcome.changed + outcome.copies;
            self.counters.left_out += outcome.unknown + outcome.refused;
            return;
        }
        let is_whole = match has_hashes {
            true => stored.routing_hashes.len() == stored.hashes.len(),
            false => stored.tokens.len() == stored.hashes.len() * stored.block_tokens,
        };
        if stored.block_tokens != self.block_tokens || !is_whole {
            self.counters.left_out += stored.hashes.len() as u64;
            return;
        }
        self.blocks.clear();
        if has_hashes {
            self.blocks.extend_from_slice(&stored.routing_hashes);
        } else {
            self.blocks.extend(stored.tokens.chunks_exact(self.block_tokens).map(block_hash));
            mix_in_extras(stored, &mut self.blocks);
        }
        let outcome: Outcome =
            index.stored(self.member, stored.tier, stored.parent, &stored.hashes, &self.blocks);
        self.counters.stored += outcome.changed + outcome.copies;
        self.counters.orphans += outcome.parked;
        self.counters.left_out += outcome.refused;
        if let Some(shared) = &self.shared {
            shared.resolve(index, self.member, &stored.hashes);
        }
    }
}

/// Rehashes the blocks with extra keys, in the form of `kvstore_block::PromptExtras`: the adapter and the salt count at the
/// start of a chain only, images at their positions.
fn mix_in_extras(stored: &Stored, blocks: &mut [u64]) {
    if stored.extras.is_empty() && stored.lora.is_none() && stored.cache_salt.is_none() {
        return;
    }
    let (lora, salt) = (stored.lora.as_deref(), stored.cache_salt.as_deref());
    let chunks = stored.tokens.chunks_exact(stored.block_tokens);
    // Extras are in the order of their blocks.
    let mut left = &stored.extras[..];
    for (number, (block, tokens)) in blocks.iter_mut().zip(chunks).enumerate() {
        let here = left.iter().take_while(|extra| extra.0 as usize <= number).count();
        let (own_extras, rest) = left.split_at(here);
        left = rest;
        let own = || own_extras.iter().map(|extra| extra.1.as_str());
        let is_whole_chain = |text: &&str| Some(*text) == lora || Some(*text) == salt;
        let mut extras: Vec<&str> = Vec::new();
        if number == 0 && stored.parent.is_none() {
            // Engines publish [adapter, images …, salt] without distinguishing them, or fields of their own.
            extras.extend(lora);
            extras.extend(own().filter(|text| !is_whole_chain(text)));
            extras.extend(salt);
        } else {
            extras.extend(own().filter(|text| !is_whole_chain(text)));
        }
        *block = block_hash_with_extras(tokens, &extras);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvstore_block::{Multimodal, PromptExtras, block_hashes};
    use router_radix::{Index, IndexConfig};

    fn stored(hashes: &[u64], parent: Option<u64>, tokens: &[u32], tier: Tier) -> Stored {
        Stored {
            hashes: hashes.to_vec(),
            parent,
            tokens: tokens.to_vec(),
            block_tokens: 2,
            tier,
            ..Stored::default()
        }
    }

    fn removed(hash: u64, tier: Tier) -> KvEvent {
        KvEvent::Removed(Removed { hashes: vec![hash], tier, group: None })
    }

    struct Rig {
        index: Index,
        tracker: Tracker,
    }

    impl Rig {
        fn new() -> Self {
            let index = Index::new(IndexConfig::default());
            let member = index.write().join().expect("room");
            Self { index, tracker: Tracker::new(member, 2) }
        }

        fn apply(&mut self, events: Vec<KvEvent>) {
            let batch = EventBatch { events, ..EventBatch::default() };
            assert_eq!(self.tracker.apply(&mut self.index.write(), &batch), Applied::Whole);
        }

        fn held_with(&self, tokens: &[u32], extras: PromptExtras<'_>) -> (u32, u32) {
            let mut hashes = Vec::new();
            block_hashes(tokens, 2, &extras, &mut hashes);
            let mut reader = self.index.reader().expect("a reader");
            let overlaps = reader.overlaps(&hashes);
            (overlaps.device(self.tracker.member), overlaps.any(self.tracker.member))
        }

        fn held(&self, tokens: &[u32]) -> (u32, u32) {
            self.held_with(tokens, PromptExtras::default())
        }
    }

    /// vLLM reports blocks that a connector's tiers have gained by hashes alone.
    #[test]
    fn blocks_that_a_lower_tier_gains_are_told_by_their_names() {
        let mut rig = Rig::new();
        let tokens = [1, 2, 3, 4, 5, 6];
        let lower = |hashes: &[u64], tier| {
            KvEvent::Stored(Stored { block_tokens: 0, ..stored(hashes, None, &[], tier) })
        };
        rig.apply(vec![KvEvent::Stored(stored(&[10, 11, 12], None, &tokens, Tier::Device))]);
        rig.apply(vec![lower(&[10, 12, 99], Tier::Host), lower(&[10, 11], Tier::Disk)]);
        assert_eq!((rig.held(&tokens), rig.tracker.counters.left_out), ((3, 3), 1));
        // Blocks evicted from the engine's own pool are still held below it, whatever the order of the hashes.
        rig.apply([10, 11, 12].map(|hash| removed(hash, Tier::Device)).to_vec());
        assert_eq!(rig.held(&tokens), (0, 3));
        rig.apply(vec![removed(10, Tier::Host)]);
        assert_eq!(rig.held(&tokens), (0, 3), "the disk has it, too");
        rig.apply(vec![removed(11, Tier::Disk)]);
        assert_eq!(rig.held(&tokens), (0, 1));
        rig.apply(vec![lower(&[11], Tier::Host)]);
        assert_eq!(rig.held(&tokens), (0, 1), "nobody knows any more what that was");
    }

    #[test]
    fn copies_are_counted_and_tiers_kept_apart() {
        let mut rig = Rig::new();
        rig.apply(vec![KvEvent::Stored(stored(&[10, 11], None, &[1, 2, 3, 4], Tier::Device))]);
        rig.apply(vec![KvEvent::Stored(stored(&[12], Some(11), &[5, 6], Tier::Device))]);
        assert_eq!(rig.held(&[1, 2, 3, 4, 5, 6, 7, 8]), (3, 3));
        rig.apply(vec![KvEvent::Stored(stored(&[11], Some(10), &[3, 4], Tier::Device))]);
        rig.apply(vec![removed(11, Tier::Device)]);
        assert_eq!(rig.held(&[1, 2, 3, 4, 5, 6]), (3, 3), "a second copy is left");
        rig.apply(vec![
            KvEvent::Stored(stored(&[11], Some(10), &[3, 4], Tier::Disk)),
            removed(11, Tier::Device),
        ]);
        assert_eq!(rig.held(&[1, 2, 3, 4, 5, 6]), (1, 3), "now only the disk has it");
        rig.apply(vec![removed(99, Tier::Device), KvEvent::Cleared]);
        assert_eq!(rig.held(&[1, 2]), (0, 0));
    }

    #[test]
    fn hashes_in_place_of_tokens_are_indexed_exactly() {
        let mut rig = Rig::new();
        let tokens = [1, 2, 3, 4, 5, 6];
        let salted = PromptExtras { cache_salt: Some("salt"), ..PromptExtras::default() };
        let mut routing_hashes = Vec::new();
        block_hashes(&tokens, 2, &salted, &mut routing_hashes);
        let hashed = |hashes: &[u64], parent, routing_hashes: &[u64]| Stored {
            routing_hashes: routing_hashes.to_vec(),
            ..stored(hashes, parent, &[], Tier::Device)
        };
        let first = hashed(&[10, 11], None, &routing_hashes[..2]);
        rig.apply(vec![
            KvEvent::Stored(first),
            KvEvent::Stored(hashed(&[12], Some(11), &routing_hashes[2..])),
        ]);
        assert_eq!(rig.held_with(&tokens, salted), (3, 3));
        assert_eq!(rig.held(&tokens), (0, 0), "another tenant's");
        rig.apply(vec![removed(12, Tier::Device)]);
        assert_eq!(rig.held_with(&tokens, salted), (2, 2));
        // A block with neither tokens nor a hash.
        rig.apply(vec![
            KvEvent::Stored(hashed(&[13, 14], None, &[1])),
            KvEvent::Stored(hashed(&[15], None, &[])),
        ]);
        assert_eq!(rig.tracker.counters.left_out, 3);
    }

    #[test]
    fn blocks_that_come_before_their_parent_wait_for_it() {
        let mut rig = Rig::new();
        rig.apply(vec![KvEvent::Stored(stored(&[12], Some(11), &[5, 6], Tier::Device))]);
        assert_eq!(rig.tracker.counters.orphans, 1);
        assert_eq!(rig.held(&[5, 6]), (0, 0));
        rig.apply(vec![KvEvent::Stored(stored(&[10, 11], None, &[1, 2, 3, 4], Tier::Device))]);
        assert_eq!(rig.held(&[1, 2, 3, 4, 5, 6]), (3, 3));
    }

    #[test]
    fn only_full_attention_counts() {
        let mut rig = Rig::new();
        let window = Stored {
            is_full_attention: false,
            group: Some(1),
            ..stored(&[10, 11], None, &[1, 2, 3, 4], Tier::Device)
        };
        let full = Stored { group: Some(0), ..stored(&[10, 11], None, &[1, 2, 3, 4], Tier::Device) };
        rig.apply(vec![KvEvent::Stored(window), KvEvent::Stored(full)]);
        let gone = Removed { hashes: vec![10, 11], tier: Tier::Device, group: Some(1) };
        rig.apply(vec![KvEvent::Removed(gone.clone())]);
        assert_eq!(rig.held(&[1, 2, 3, 4]), (2, 2), "the window's removal says nothing");
        rig.apply(vec![KvEvent::Removed(Removed { group: Some(0), ..gone })]);
        assert_eq!(rig.held(&[1, 2, 3, 4]), (0, 0));
    }

    #[test]
    fn extras_are_hashed_as_the_gateway_hashes_them() {
        let mut rig = Rig::new();
        let tokens = [1, 2, 3, 4, 5, 6];
        // vLLM's form: untagged, per block.
        let first = Stored {
            extras: vec![(0, "tuned".into()), (0, "salt".into()), (1, "tuned".into()), (1, "cat".into())],
            lora: Some("tuned".into()),
            ..stored(&[10, 11], None, &tokens[..4], Tier::Device)
        };
        let later = Stored {
            extras: vec![(0, "tuned".into())],
            lora: Some("tuned".into()),
            ..stored(&[12], Some(11), &tokens[4..], Tier::Device)
        };
        rig.apply(vec![KvEvent::Stored(first), KvEvent::Stored(later)]);
        let cat = [Multimodal { start: 2, tokens: 2, identity: "cat" }];
        let all = PromptExtras { lora: Some("tuned"), cache_salt: Some("salt"), multimodal: &cat };
        assert_eq!(rig.held_with(&tokens, all), (3, 3));
        assert_eq!(rig.held_with(&tokens, PromptExtras { multimodal: &[], ..all }), (1, 1));
        assert_eq!(rig.held_with(&tokens, PromptExtras { cache_salt: None, ..all }), (0, 0));
        assert_eq!(rig.held_with(&tokens, PromptExtras { lora: None, ..all }), (0, 0));
        assert_eq!(rig.held(&tokens), (0, 0));
        // SGLang's form: separate fields.
        let mut rig = Rig::new();
        let fields = Stored {
            lora: Some("tuned".into()),
            cache_salt: Some("salt".into()),
            ..stored(&[10, 11], None, &tokens[..4], Tier::Device)
        };
        rig.apply(vec![KvEvent::Stored(fields)]);
        assert_eq!(rig.held_with(&tokens, PromptExtras { multimodal: &[], ..all }), (2, 2));
    }
}
