//! The model's own book of retention: which blocks the store was asked to retain, and which it has promised to.

use std::collections::{HashMap, HashSet};
use std::iter::successors;
use std::time::{Duration, Instant};

use kvstore_block::BlockIdentity;

use crate::store_thread::StoreThread;

/// Times for which blocks are retained.
pub(super) const RETENTIONS: [Duration; 3] =
    [Duration::from_millis(1500), Duration::from_secs(20), Duration::from_secs(3600)];
/// The store counts from when its thread hears of a request, which takes some rounds.
const HEARD_WITHIN: Duration = Duration::from_secs(1);

/// Checks after each round: a block that counts as retained is there, was asked for, and stays until its time is over, or it is forgotten or lost.
#[derive(Debug, Default)]
pub(super) struct RetentionOracle {
    asked: HashMap<BlockIdentity, Instant>,
    /// Of blocks that were retained when the store had heard of it.
    promised: HashMap<BlockIdentity, Instant>,
    /// Blocks that were retained after the last round, each with the one before it.
    retained: HashMap<BlockIdentity, Option<BlockIdentity>>,
    /// Blocks that the store was told to forget, of which it may not have heard yet.
    forgotten: HashSet<BlockIdentity>,
}

fn note(noted: &mut HashMap<BlockIdentity, Instant>, identity: BlockIdentity, until: Instant) {
    let latest = noted.entry(identity).or_insert(until);
    *latest = until.max(*latest);
}

impl RetentionOracle {
    pub(super) fn asked(&mut self, chain: &[BlockIdentity], until: Instant) {
        chain.iter().for_each(|identity| note(&mut self.asked, *identity, until));
    }

    pub(super) fn heard(&mut self, chain: &[BlockIdentity], until: Instant) {
        for identity in chain.iter().filter(|identity| self.retained.contains_key(identity)) {
            note(&mut self.promised, *identity, until);
        }
    }

    pub(super) fn forgotten(&mut self, chain: &[BlockIdentity]) {
        self.forgotten.extend(chain);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.retained.is_empty()
    }

    /// `may_lose`: blocks may be lost that were not forgotten.
    pub(super) fn check(&mut self, store_thread: &StoreThread, now: Instant, may_lose: bool) {
        let tiers = &store_thread.tiers;
        tiers.retained.check(&tiers.shared);
        let (tier, pinned) = tiers.retained.pinned();
        let before_others: HashSet<BlockIdentity> = pinned.values().flatten().copied().collect();
        for identity in pinned.keys() {
            assert!(tiers.shared.holds(tier, identity), "a block that is retained is not there");
            let is_due = self.asked.get(identity).is_some_and(|until| *until + HEARD_WITHIN > now);
            assert!(
                is_due || before_others.contains(identity),
                "a block is retained longer than anybody asked for"
            );
        }
        // A block goes with those before it; and, if its chain was not retained from its root on, when one before it comes that is not.
        let chain =
            |identity: &BlockIdentity| successors(Some(*identity), |block| *self.retained.get(block)?);
        let is_excused = |identity: &BlockIdentity| {
            chain(identity)
                .any(|block| self.forgotten.contains(&block) || !self.retained.contains_key(&block))
        };
        let is_lost = |identity: &BlockIdentity| {
            self.promised.get(identity).is_some_and(|until| *until > now)
                && !pinned.contains_key(identity)
                && !is_excused(identity)
        };
        assert!(may_lose || !self.retained.keys().any(is_lost), "a block is not retained any more");
        self.retained = pinned;
        // A promise ends with its block.
        self.promised.retain(|identity, _| self.retained.contains_key(identity));
        if store_thread.inbox.is_empty() {
            self.forgotten.clear();
        }
    }
}
