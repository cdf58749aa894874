//! What a store holds (`kvasir store`), as it tells gateways: `GET /kvasir/blocks?instance=I&after=S` at `store.http`.
//!
//! An answer has what changed after the sequence number S, or everything: in the first answer, when the store has begun another
//! run, or when its memory of changes begins later. With nothing to tell, the store answers after a while all the same. A change is a
//! block that some tier of the store has now and none had before, or the other way round.

use std::collections::{HashMap, HashSet, VecDeque};

use router_radix::EngineHash;
use serde::{Deserialize, Serialize};

/// Bytes of the name of a block.
pub const NAME_BYTES: usize = 16;
/// Changes that a store keeps for those who ask.
pub const CHANGES_KEPT: usize = 1 << 16;

/// The name of a block, as stores have it.
pub type BlockName = [u8; NAME_BYTES];

/// The hash by which engines call the block: the end of its name.
#[must_use]
pub fn engine_hash(name: &BlockName) -> EngineHash {
    name[NAME_BYTES - 8..].iter().fold(0, |hash, byte| hash << 8 | u64::from(*byte))
}

/// What tells blocks of one model, layout and rank from others: the beginning of the name.
#[must_use]
pub fn tag(name: &BlockName) -> u16 {
    u16::from_be_bytes([name[0], name[1]])
}

/// The question, as parameters of the path.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub struct Question {
    /// The run of the store that told what is known; 0 at first.
    #[serde(default)]
    pub instance: u64,
    /// How many of its changes are known.
    #[serde(default)]
    pub after: u64,
}

/// An answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreChanges {
    /// The store's name (`store.name`).
    pub store: String,
    /// Identifies the run of its process.
    pub instance: u64,
    /// How many changes there have been.
    pub sequence: u64,
    /// `stored` is all that the store holds.
    pub is_whole: bool,
    /// Blocks that it holds now: their names in hexadecimal digits, one after the other.
    #[serde(with = "names")]
    pub stored: Vec<BlockName>,
    /// Blocks that it holds no more.
    #[serde(with = "names")]
    pub removed: Vec<BlockName>,
}

/// Names of blocks as one text.
mod names {
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    use super::{BlockName, NAME_BYTES};

    pub(super) fn serialize<S: Serializer>(names: &[BlockName], serializer: S) -> Result<S::Ok, S::Error> {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let mut text = String::with_capacity(names.len() * NAME_BYTES * 2);
        for byte in names.iter().flatten() {
            text.push(char::from(DIGITS[usize::from(byte >> 4)]));
            text.push(char::from(DIGITS[usize::from(byte & 15)]));
        }
        serializer.serialize_str(&text)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<BlockName>, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(from)?;
        let digits = text.as_bytes();
        let (names, rest) = digits.as_chunks::<{ NAME_BYTES * 2 }>();
        if !rest.is_empty() {
            return Err(D::Error::custom(format!("{} digits are no whole names of blocks", digits.len())));
        }
        let digit = |digit: u8| char::from(digit).to_digit(16).map(|value| value as u8);
        let name = |digits: &[u8; NAME_BYTES * 2]| {
            let mut name = [0; NAME_BYTES];
            for (byte, pair) in name.iter_mut().zip(digits.as_chunks::<2>().0) {
                *byte = digit(pair[0])? << 4 | digit(pair[1])?;
            }
            Some(name)
        };
        let names: Option<Vec<BlockName>> = names.iter().map(name).collect();
        names.ok_or_else(|| D::Error::custom("a block's name has something else than hexadecimal digits"))
    }
}

/// The store's side: what it holds, and what has changed lately.
#[derive(Debug)]
pub struct StoreLog {
    store: String,
    instance: u64,
    /// The tiers that hold each block, as bits.
    held: HashMap<BlockName, u8>,
    /// The last changes; true: stored.
    changes: VecDeque<(BlockName, bool)>,
    sequence: u64,
}

impl StoreLog {
    /// A store with this name, in a run of its process that no other one has the number of.
    #[must_use]
    pub fn new(store: &str, instance: u64) -> Self {
        let (held, changes) = (HashMap::new(), VecDeque::new());
        Self { store: store.to_owned(), instance, held, changes, sequence: 0 }
    }

    /// A tier, by its number below 8, holds a block from now on, or holds it no more.
    pub fn note(&mut self, name: BlockName, tier: u8, is_stored: bool) {
        let tiers = self.held.get(&name).copied().unwrap_or(0);
        let now = if is_stored { tiers | 1 << tier } else { tiers & !(1 << tier) };
        match now {
            0 => self.held.remove(&name),
            _ => self.held.insert(name, now),
        };
        if (tiers == 0) == (now == 0) {
            return;
        }
        if self.changes.len() == CHANGES_KEPT {
            self.changes.pop_front();
        }
        self.changes.push_back((name, is_stored));
        self.sequence += 1;
    }

    /// How many changes there have been.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Whether there is something to tell.
    #[must_use]
    pub fn has_news(&self, known: Question) -> bool {
        known.instance != self.instance || known.after != self.sequence
    }

    /// What to tell who knows that much.
    #[must_use]
    pub fn changes_after(&self, Question { instance, after }: Question) -> StoreChanges {
        let mut told = StoreChanges {
            store: self.store.clone(),
            instance: self.instance,
            sequence: self.sequence,
            is_whole: false,
            stored: Vec::new(),
            removed: Vec::new(),
        };
        let missed = self.sequence.checked_sub(after).filter(|missed| *missed <= self.changes.len() as u64);
        let Some(missed) = missed.filter(|_| instance == self.instance) else {
            told.is_whole = true;
            told.stored = self.held.keys().copied().collect();
            return told;
        };
        // Of several changes of a block the last one counts.
        let mut seen = HashSet::new();
        for (name, is_stored) in self.changes.iter().rev().take(missed as usize) {
            if seen.insert(name) {
                if *is_stored { &mut told.stored } else { &mut told.removed }.push(*name);
            }
        }
        told
    }
}

/// The asking side: what a store has told so far.
#[derive(Debug, Default)]
pub struct StoreContents {
    store: Option<String>,
    known: Question,
    held: HashSet<BlockName>,
}

/// Blocks that are new to who asks, and blocks that are gone.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Difference {
    /// New ones.
    pub stored: Vec<BlockName>,
    /// Gone ones.
    pub removed: Vec<BlockName>,
}

impl StoreContents {
    /// The store's name, once it has told it.
    #[must_use]
    pub fn store(&self) -> Option<&str> {
        self.store.as_deref()
    }

    /// The path to ask for what comes next.
    #[must_use]
    pub fn next_path(&self) -> String {
        format!("/kvasir/blocks?instance={}&after={}", self.known.instance, self.known.after)
    }

    /// Blocks that it holds.
    pub fn held(&self) -> impl Iterator<Item = &BlockName> {
        self.held.iter()
    }

    /// How many blocks it holds.
    #[must_use]
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Whether it holds nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Takes an answer, and says what is different from before.
    pub fn take(&mut self, told: StoreChanges) -> Difference {
        let mut difference = Difference::default();
        if told.is_whole {
            let now: HashSet<BlockName> = told.stored.iter().copied().collect();
            difference.removed = self.held.difference(&now).copied().collect();
            difference.stored = now.difference(&self.held).copied().collect();
            self.held = now;
        } else {
            difference.removed = told.removed;
            difference.removed.retain(|name| self.held.remove(name));
            difference.stored = told.stored;
            difference.stored.retain(|name| self.held.insert(*name));
        }
        self.store = Some(told.store);
        self.known = Question { instance: told.instance, after: told.sequence };
        difference
    }

    /// The store is gone, with all that it held.
    pub fn forget(&mut self) -> Vec<BlockName> {
        self.known = Question::default();
        self.held.drain().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(number: u64) -> BlockName {
        let mut name = [7; NAME_BYTES];
        name[8..].copy_from_slice(&number.to_be_bytes());
        name
    }

    fn ask(contents: &mut StoreContents, log: &StoreLog) -> Difference {
        let told = log.changes_after(contents.known);
        let text = serde_json::to_string(&told).expect("JSON");
        let read: StoreChanges = serde_json::from_str(&text).expect("its own form");
        assert_eq!(read, told);
        contents.take(read)
    }

    fn sorted(names: &[BlockName]) -> Vec<u64> {
        let mut numbers: Vec<u64> = names.iter().map(engine_hash).collect();
        numbers.sort_unstable();
        numbers
    }

    #[test]
    fn a_block_is_held_while_some_tier_has_it() {
        let (mut log, mut contents) = (StoreLog::new("a", 1), StoreContents::default());
        log.note(name(1), 0, true);
        log.note(name(1), 1, true);
        log.note(name(2), 0, true);
        log.note(name(2), 0, false);
        let first = ask(&mut contents, &log);
        assert_eq!((sorted(&first.stored), first.removed.len(), contents.store()), (vec![1], 0, Some("a")));
        log.note(name(1), 0, false);
        assert_eq!(ask(&mut contents, &log), Difference::default());
        log.note(name(1), 1, false);
        log.note(name(3), 0, true);
        log.note(name(9), 0, false);
        let next = ask(&mut contents, &log);
        assert_eq!((sorted(&next.stored), sorted(&next.removed)), (vec![3], vec![1]));
        assert_eq!(sorted(&contents.forget()), [3]);
        assert_eq!(sorted(&ask(&mut contents, &log).stored), [3], "asked anew from the beginning");
    }

    #[test]
    fn who_asks_knows_what_the_store_holds_however_much_was_missed() {
        let (mut log, mut contents) = (StoreLog::new("a", 1), StoreContents::default());
        let (mut known, mut state, mut whole) = (HashSet::new(), 1_u64, 0);
        for round in 0..400_u64 {
            // Now and then more than the log keeps, and a new run of the store.
            let changes = if round % 40 == 39 { 6 * CHANGES_KEPT } else { 50 };
            for _ in 0..changes {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                log.note(name(state >> 33 & 255), (state >> 42 & 1) as u8, state >> 50 & 1 == 1);
            }
            if round % 100 == 99 {
                log = StoreLog::new("a", round);
            }
            whole += u32::from(log.changes_after(contents.known).is_whole);
            let difference = ask(&mut contents, &log);
            difference.removed.iter().for_each(|name| assert!(known.remove(name), "held before"));
            difference.stored.iter().for_each(|name| assert!(known.insert(*name), "new"));
            let held: HashSet<BlockName> = log.held.keys().copied().collect();
            assert!(known == held && contents.held == held, "round {round}");
        }
        assert!((10..40).contains(&whole), "{whole} whole answers");
    }

    #[test]
    fn names_that_are_none_are_refused() {
        let text = |stored: &str| {
            format!(
                r#"{{"store":"a","instance":1,"sequence":1,"is_whole":true,"stored":"{stored}","removed":""}}"#
            )
        };
        let read = |stored: &str| serde_json::from_str::<StoreChanges>(&text(stored));
        let good = "000102030405060708090a0b0c0d0e0f";
        let names = read(good).expect("a name").stored;
        assert_eq!((tag(&names[0]), engine_hash(&names[0])), (0x0001, 0x08090a0b0c0d0e0f));
        assert!(read(&good[1..]).expect_err("31 digits").to_string().contains("31 digits"));
        assert!(read(&good.replace('f', "g")).is_err());
        assert!(read("äbcdefabcdefabcdefabcdefabcdefa").is_err());
    }
}
