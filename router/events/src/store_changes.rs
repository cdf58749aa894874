//! Blocks of a store (`kvasir store`), as it reports them to gateways: `GET /kvasir/blocks?instance=I&after=S` at `store.http`.
//!
//! An answer has the changes after sequence number S, or everything: to the first request, when the store has begun another
//! run, or when its log of changes begins later. Without changes the answer comes after [`LONG_POLL_MAX`]. A change is a block
//! that some tier of the store holds now and none held before, or the other way round.
//!
//! Identities of KvasirConnector's blocks have three parts: two bytes that distinguish models, layouts and ranks ([`tag`]),
//! six bytes of a keyed digest, and the last eight bytes of the engine's hash ([`engine_hash`]).

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use kvstore_block::BlockIdentity;
use router_radix::EngineHash;
use serde::{Deserialize, Serialize};

/// Path of the request to a store.
pub const BLOCKS_PATH: &str = "/kvasir/blocks";
/// A request is answered after this time even if nothing has changed.
pub const LONG_POLL_MAX: Duration = Duration::from_secs(10);
/// Number of changes that a store keeps.
pub const CHANGES_KEPT: usize = 1 << 16;
/// Blocks of one store that a gateway tracks; further ones are left out.
pub const BLOCKS_MAX: usize = 1 << 24;

const BYTES: usize = 16;

/// Hash that an engine's events use for the block.
#[must_use]
pub fn engine_hash(identity: &BlockIdentity) -> EngineHash {
    identity.0[BYTES - 8..].iter().fold(0, |hash, byte| hash << 8 | u64::from(*byte))
}

/// Tag that distinguishes blocks of one model, layout and rank. Two of them have the same tag with a chance of 2⁻¹⁶.
#[must_use]
pub fn tag(identity: &BlockIdentity) -> u16 {
    u16::from_be_bytes([identity.0[0], identity.0[1]])
}

/// Parameters of the request: the known state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub struct ChangesSince {
    /// Run of the store that reported the known state; 0 at first.
    #[serde(default)]
    pub instance: u64,
    /// Number of known changes of that run.
    #[serde(default)]
    pub after: u64,
}

/// Answer of a store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreChanges {
    /// The store's name (`store.name`).
    pub store: String,
    /// Run number of the store's process.
    pub instance: u64,
    /// Number of changes since the run began.
    pub sequence: u64,
    /// Whether `stored` lists all blocks of the store.
    pub is_whole: bool,
    /// Blocks that the store has gained, or all of them: their identities in hexadecimal digits, one after the other.
    #[serde(with = "identities")]
    pub stored: Vec<BlockIdentity>,
    /// Blocks that the store has lost.
    #[serde(with = "identities")]
    pub removed: Vec<BlockIdentity>,
}

/// Serialization of block identities as one text.
mod identities {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    use super::{BYTES, BlockIdentity};

    pub(super) fn serialize<S: Serializer>(
        blocks: &[BlockIdentity],
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let mut text = String::with_capacity(blocks.len() * BYTES * 2);
        for byte in blocks.iter().flat_map(|block| block.0) {
            text.push(char::from(DIGITS[usize::from(byte >> 4)]));
            text.push(char::from(DIGITS[usize::from(byte & 15)]));
        }
        serializer.serialize_str(&text)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<BlockIdentity>, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(from)?;
        let digits = text.as_bytes();
        let (blocks, rest) = digits.as_chunks::<{ BYTES * 2 }>();
        if !rest.is_empty() {
            return Err(D::Error::custom(format!("{} digits are not a multiple of 32", digits.len())));
        }
        let digit = |digit: u8| char::from(digit).to_digit(16).map(|value| value as u8);
        let identity = |digits: &[u8; BYTES * 2]| {
            let mut bytes = [0; BYTES];
            for (byte, pair) in bytes.iter_mut().zip(digits.as_chunks::<2>().0) {
                *byte = digit(pair[0])? << 4 | digit(pair[1])?;
            }
            Some(BlockIdentity(bytes))
        };
        let blocks: Option<Vec<BlockIdentity>> = blocks.iter().map(identity).collect();
        blocks.ok_or_else(|| D::Error::custom("an identity has something else than hexadecimal digits"))
    }
}

/// The store's side: its blocks and latest changes.
#[derive(Debug)]
pub struct ChangeLog {
    store: String,
    instance: u64,
    /// The tiers that hold each block, as bits.
    held: HashMap<BlockIdentity, u8>,
    /// The last changes; true: stored.
    changes: VecDeque<(BlockIdentity, bool)>,
    sequence: u64,
}

impl ChangeLog {
    /// Returns the log of an empty store with this name. `instance`: number of this run of its process, not 0.
    #[must_use]
    pub fn new(store: &str, instance: u64) -> Self {
        let (held, changes) = (HashMap::new(), VecDeque::new());
        Self { store: store.to_owned(), instance, held, changes, sequence: 0 }
    }

    /// Sets whether a tier, by its number below 8, holds the block.
    pub fn set_held(&mut self, block: BlockIdentity, tier: u8, is_held: bool) {
        let before = self.held.get(&block).copied().unwrap_or(0);
        let tiers = if is_held { before | 1 << tier } else { before & !(1 << tier) };
        match tiers {
            0 => self.held.remove(&block),
            _ => self.held.insert(block, tiers),
        };
        if (before == 0) == (tiers == 0) {
            return;
        }
        if self.changes.len() == CHANGES_KEPT {
            self.changes.pop_front();
        }
        self.changes.push_back((block, is_held));
        self.sequence += 1;
    }

    /// Number of changes so far.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Whether there are changes beyond the known state.
    #[must_use]
    pub fn has_changes(&self, known: ChangesSince) -> bool {
        known.instance != self.instance || known.after != self.sequence
    }

    /// Returns the changes beyond the known state, or everything.
    #[must_use]
    pub fn changes(&self, known: ChangesSince) -> StoreChanges {
        let mut changes = StoreChanges {
            store: self.store.clone(),
            instance: self.instance,
            sequence: self.sequence,
            is_whole: false,
            stored: Vec::new(),
            removed: Vec::new(),
        };
        let missed = self.sequence.checked_sub(known.after);
        let missed = missed.filter(|missed| *missed <= self.changes.len() as u64);
        let Some(missed) = missed.filter(|_| known.instance == self.instance) else {
            changes.is_whole = true;
            changes.stored = self.held.keys().copied().collect();
            return changes;
        };
        // Only the last of several changes of a block counts.
        let mut seen = HashSet::new();
        for (block, is_stored) in self.changes.iter().rev().take(missed as usize) {
            if seen.insert(block) {
                if *is_stored { &mut changes.stored } else { &mut changes.removed }.push(*block);
            }
        }
        changes
    }
}

/// The gateway's side: a copy of a store's set of blocks.
#[derive(Debug, Default)]
pub struct StoreMirror {
    store: Option<String>,
    known: ChangesSince,
    held: HashSet<BlockIdentity>,
}

/// Changes of the copy.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Difference {
    /// Blocks that were added.
    pub stored: Vec<BlockIdentity>,
    /// Blocks that were removed.
    pub removed: Vec<BlockIdentity>,
}

impl StoreMirror {
    /// Name of the store, once it has reported it.
    #[must_use]
    pub fn store(&self) -> Option<&str> {
        self.store.as_deref()
    }

    /// Path and parameters of the next request.
    #[must_use]
    pub fn next_path(&self) -> String {
        let ChangesSince { instance, after } = self.known;
        format!("{BLOCKS_PATH}?instance={instance}&after={after}")
    }

    /// Blocks of the store.
    pub fn held(&self) -> impl Iterator<Item = &BlockIdentity> {
        self.held.iter()
    }

    /// Number of blocks of the store.
    #[must_use]
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Whether the store has no blocks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Applies an answer of the store.
    pub fn apply(&mut self, changes: StoreChanges) -> Difference {
        let mut difference = Difference::default();
        let continues = changes.instance == self.known.instance && changes.sequence >= self.known.after;
        if !changes.is_whole && !continues {
            // The changes do not continue the known state: everything is requested again.
            difference.removed = self.clear();
            return difference;
        }
        if changes.is_whole {
            let now: HashSet<BlockIdentity> = changes.stored.into_iter().take(BLOCKS_MAX).collect();
            difference.removed = self.held.difference(&now).copied().collect();
            difference.stored = now.difference(&self.held).copied().collect();
            self.held = now;
        } else {
            difference.removed = changes.removed;
            difference.removed.retain(|block| self.held.remove(block));
            difference.stored = changes.stored;
            difference.stored.truncate(BLOCKS_MAX - self.held.len().min(BLOCKS_MAX));
            difference.stored.retain(|block| self.held.insert(*block));
        }
        self.store = Some(changes.store);
        self.known = ChangesSince { instance: changes.instance, after: changes.sequence };
        difference
    }

    /// Removes all blocks and returns them.
    pub fn clear(&mut self) -> Vec<BlockIdentity> {
        self.known = ChangesSince::default();
        self.held.drain().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(number: u64) -> BlockIdentity {
        let mut bytes = [7; BYTES];
        bytes[8..].copy_from_slice(&number.to_be_bytes());
        BlockIdentity(bytes)
    }

    fn poll(mirror: &mut StoreMirror, log: &ChangeLog) -> Difference {
        let changes = log.changes(mirror.known);
        let text = serde_json::to_string(&changes).expect("JSON");
        let read: StoreChanges = serde_json::from_str(&text).expect("its own form");
        assert_eq!(read, changes);
        mirror.apply(read)
    }

    fn sorted(blocks: &[BlockIdentity]) -> Vec<u64> {
        let mut numbers: Vec<u64> = blocks.iter().map(engine_hash).collect();
        numbers.sort_unstable();
        numbers
    }

    #[test]
    fn a_block_is_held_while_some_tier_has_it() {
        let (mut log, mut mirror) = (ChangeLog::new("a", 1), StoreMirror::default());
        log.set_held(block(1), 0, true);
        log.set_held(block(1), 1, true);
        log.set_held(block(2), 0, true);
        log.set_held(block(2), 0, false);
        let first = poll(&mut mirror, &log);
        assert_eq!((sorted(&first.stored), first.removed.len(), mirror.store()), (vec![1], 0, Some("a")));
        log.set_held(block(1), 0, false);
        assert!(!log.has_changes(mirror.known));
        assert_eq!(poll(&mut mirror, &log), Difference::default());
        log.set_held(block(1), 1, false);
        log.set_held(block(3), 0, true);
        log.set_held(block(9), 0, false);
        let next = poll(&mut mirror, &log);
        assert_eq!((sorted(&next.stored), sorted(&next.removed)), (vec![3], vec![1]));
        assert_eq!(sorted(&mirror.clear()), [3]);
        assert_eq!(sorted(&poll(&mut mirror, &log).stored), [3], "asked anew from the beginning");
    }

    #[test]
    fn the_mirror_equals_the_store_however_much_was_missed() {
        let (mut log, mut mirror) = (ChangeLog::new("a", 1), StoreMirror::default());
        let (mut known, mut state, mut whole) = (HashSet::new(), 1_u64, 0);
        for round in 0..200_u64 {
            // Now and then more than the log keeps, and a new run of the store.
            let changes = if round % 40 == 39 { 6 * CHANGES_KEPT } else { 50 };
            for _ in 0..changes {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                log.set_held(block(state >> 33 & 255), (state >> 42 & 1) as u8, state >> 50 & 1 == 1);
            }
            if round % 50 == 49 {
                log = ChangeLog::new("a", round);
            }
            whole += u32::from(log.changes(mirror.known).is_whole);
            let difference = poll(&mut mirror, &log);
            difference.removed.iter().for_each(|block| assert!(known.remove(block), "held before"));
            difference.stored.iter().for_each(|block| assert!(known.insert(*block), "new"));
            let held: HashSet<BlockIdentity> = log.held.keys().copied().collect();
            assert!(known == held && mirror.held == held, "round {round}");
        }
        assert!((8..20).contains(&whole), "{whole} whole answers");
    }

    #[test]
    fn a_block_that_is_told_twice_counts_once() {
        let mut mirror = StoreMirror::default();
        let changes = |is_whole, stored: &[u64], removed: &[u64]| StoreChanges {
            store: "a".to_owned(),
            instance: 1,
            sequence: 1,
            is_whole,
            stored: stored.iter().copied().map(block).collect(),
            removed: removed.iter().copied().map(block).collect(),
        };
        assert_eq!(sorted(&mirror.apply(changes(true, &[1, 1, 2], &[])).stored), [1, 2]);
        let other_run = StoreChanges { instance: 2, ..changes(false, &[5], &[]) };
        let mut asked_again = StoreMirror::default();
        asked_again.apply(changes(true, &[1], &[]));
        assert_eq!((sorted(&asked_again.apply(other_run).removed), asked_again.known.after), (vec![1], 0));
        let difference = mirror.apply(changes(false, &[2, 3, 3], &[1, 1, 9]));
        assert_eq!((sorted(&difference.stored), sorted(&difference.removed)), (vec![3], vec![1]));
        assert_eq!(mirror.len(), 2);
    }

    #[test]
    fn identities_that_are_none_are_refused() {
        let text = |stored: &str| {
            format!(
                r#"{{"store":"a","instance":1,"sequence":1,"is_whole":true,"stored":"{stored}","removed":""}}"#
            )
        };
        let read = |stored: &str| serde_json::from_str::<StoreChanges>(&text(stored));
        let good = "000102030405060708090a0b0c0d0e0f";
        let blocks = read(good).expect("an identity").stored;
        assert_eq!((tag(&blocks[0]), engine_hash(&blocks[0])), (0x0001, 0x08090a0b0c0d0e0f));
        assert!(read(&good[1..]).expect_err("31 digits").to_string().contains("31 digits"));
        assert!(read(&good.replace('f', "g")).is_err());
        assert!(read("äbcdefabcdefabcdefabcdefabcdefa").is_err());
    }
}
