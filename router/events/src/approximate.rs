//! Tracker for engines that publish no events: routed prompts are assumed to stay cached for a time.
//!
//! Index and policy are the same as with events. Each routed block lives for a time from its last use, and a worker has room
//! for a number of blocks; the least recently used go first, the end of a chain before its beginning.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::time::{Duration, Instant};

use kvstore_block::chained_hash;
use router_radix::{EngineHash, IndexWriter, Member, Tier};

/// A prompt that repeats within this share of its blocks' life does not refresh them.
const FRESH_SHARE: u32 = 8;

/// Hasher for keys that are hashes already.
#[derive(Debug, Default)]
struct IdentityHasher(u64);

impl Hasher for IdentityHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

/// Blocks that are remembered and forgotten together: a long prompt costs one hash-table operation per run, not per block.
/// The last blocks of a prompt that fill no run are remembered one by one, since prompts diverge there.
const RUN: usize = 16;

/// A run of blocks, stored under the key of its last block.
#[derive(Debug)]
struct BlockRun {
    /// Last use: the number of the request, which grows.
    turn: u64,
    at: Instant,
    /// Keys of the blocks before the last one; `None` for a single block.
    before: Option<Box<[EngineHash; RUN - 1]>>,
}

impl BlockRun {
    fn len(&self) -> usize {
        if self.before.is_some() { RUN } else { 1 }
    }
}

/// Blocks that one worker is assumed to hold.
#[derive(Debug)]
pub struct ApproximateTracker {
    member: Member,
    ttl: Duration,
    blocks_max: usize,
    runs: HashMap<EngineHash, BlockRun, BuildHasherDefault<IdentityHasher>>,
    /// Number of blocks of all runs. A block at the end of a prompt that became part of a longer prompt's run counts twice for a while.
    blocks: usize,
    /// Runs in order of use; an entry is stale if its run was used again since.
    order: VecDeque<(EngineHash, u64, Instant)>,
    turn: u64,
    /// Buffer, reused by the next request.
    keys: Vec<EngineHash>,
}

impl ApproximateTracker {
    /// Returns a state without blocks.
    #[must_use]
    pub fn new(member: Member, ttl: Duration, blocks_max: usize) -> Self {
        Self {
            member,
            ttl,
            blocks_max,
            runs: HashMap::default(),
            blocks: 0,
            order: VecDeque::new(),
            turn: 0,
            keys: Vec::new(),
        }
    }

    /// Number of blocks that the worker is assumed to hold.
    #[must_use]
    pub fn len(&self) -> usize {
        self.blocks
    }

    /// Whether the worker is assumed to hold no block.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks == 0
    }

    /// Records that a prompt with these block hashes was routed to the worker.
    pub fn routed(&mut self, index: &mut IndexWriter<'_>, block_hashes: &[u64], now: Instant) {
        self.turn += 1;
        let mut keys = std::mem::take(&mut self.keys);
        keys.clear();
        keys.extend(block_hashes.iter().take(self.blocks_max).scan(None, |parent, &block| {
            let key = chained_hash(*parent, block);
            *parent = Some(key);
            Some(key)
        }));
        let fresh = self.ttl / FRESH_SHARE;
        let last = keys.last().and_then(|key| self.runs.get(key));
        if last.is_none_or(|run| now.saturating_duration_since(run.at) >= fresh) {
            self.store(index, &keys, block_hashes);
            self.touch(&keys, now);
            self.expire(index, now);
        }
        self.keys = keys;
    }

    /// Stores the blocks that are not known yet, neighbours together.
    fn store(&mut self, index: &mut IndexWriter<'_>, keys: &[EngineHash], block_hashes: &[u64]) {
        let mut put = |from: usize, until: usize| {
            if from < until {
                let parent = from.checked_sub(1).map(|before| keys[before]);
                index.stored(
                    self.member,
                    Tier::Device,
                    parent,
                    &keys[from..until],
                    &block_hashes[from..until],
                );
            }
        };
        let mut from = 0;
        for end in ends(keys.len()).filter(|end| self.runs.contains_key(&keys[end - 1])) {
            put(from, start_of(end, keys.len()));
            from = end;
        }
        put(from, keys.len());
    }

    /// Marks every run of a prompt as used now, the end first, since it is evicted first.
    fn touch(&mut self, keys: &[EngineHash], now: Instant) {
        let turn = self.turn;
        for end in ends(keys.len()).rev() {
            let key = keys[end - 1];
            let start = start_of(end, keys.len());
            self.runs.entry(key).and_modify(|run| (run.turn, run.at) = (turn, now)).or_insert_with(|| {
                self.blocks += end - start;
                let before = <[EngineHash; RUN - 1]>::try_from(&keys[start..end - 1]);
                BlockRun { turn, at: now, before: before.ok().map(Box::new) }
            });
            self.order.push_back((key, turn, now));
        }
    }

    /// Forgets expired and surplus blocks, and removes stale entries of the order.
    pub fn expire(&mut self, index: &mut IndexWriter<'_>, now: Instant) {
        let mut gone = Vec::new();
        while let Some(&(key, turn, at)) = self.order.front() {
            let is_stale = self.runs.get(&key).is_none_or(|run| run.turn != turn);
            if !is_stale && now.saturating_duration_since(at) < self.ttl && self.blocks <= self.blocks_max {
                break;
            }
            self.order.pop_front();
            if !is_stale && let Some(run) = self.runs.remove(&key) {
                self.blocks -= run.len();
                gone.push(key);
                gone.extend(run.before.iter().flat_map(|before| before.iter().rev()));
            }
        }
        if !gone.is_empty() {
            index.removed(self.member, Tier::Device, &gone);
        }
        if self.order.len() > 4 * self.runs.len() + 1024 {
            self.order.retain(|(key, turn, _)| self.runs.get(key).is_some_and(|run| run.turn == *turn));
        }
    }
}

/// Ends of the runs of a prompt with this many blocks: whole runs, then block by block.
fn ends(blocks: usize) -> impl DoubleEndedIterator<Item = usize> + Clone {
    let whole = blocks / RUN;
    (1..=whole).map(|run| run * RUN).chain(whole * RUN + 1..=blocks)
}

/// Start of the run that ends at `end`.
fn start_of(end: usize, blocks: usize) -> usize {
    if end <= blocks / RUN * RUN { end.saturating_sub(RUN) } else { end - 1 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use router_radix::{Index, IndexConfig};

    #[test]
    fn blocks_live_for_a_while_and_within_a_size() {
        let index = Index::new(IndexConfig::default());
        let member = index.write().join().expect("room");
        let mut reader = index.reader().expect("a reader");
        let mut approximate = ApproximateTracker::new(member, Duration::from_secs(10), 6);
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        approximate.routed(&mut index.write(), &[1, 2, 3, 4], at(0));
        assert_eq!(reader.overlaps(&[1, 2, 3, 4, 5]).device(member), 4);
        approximate.routed(&mut index.write(), &[1, 2, 7], at(6));
        assert_eq!((approximate.len(), reader.overlaps(&[1, 2, 7]).device(member)), (5, 3));
        approximate.expire(&mut index.write(), at(11));
        assert_eq!(reader.overlaps(&[1, 2, 3, 4]).device(member), 2, "3 and 4 are too old");
        assert_eq!(reader.overlaps(&[1, 2, 7]).device(member), 3);
        approximate.routed(&mut index.write(), &[20, 21, 22, 23, 24, 25, 26], at(12));
        assert_eq!(approximate.len(), 6);
        assert_eq!(reader.overlaps(&[20, 21, 22, 23, 24, 25, 26]).device(member), 6, "six is the size");
        assert_eq!(reader.overlaps(&[1, 2, 7]).device(member), 0);
        approximate.expire(&mut index.write(), at(30));
        assert!(approximate.is_empty());
        while index.write().sweep() {}
        assert_eq!(index.write().usage().entries, 0);
    }

    /// For any sequence of prompts the index equals the remembered blocks, and the last prompt is held.
    #[test]
    fn the_index_holds_what_is_remembered() {
        for seed in 0..20_u64 {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut below = |bound: u64| random.u64(..bound);
            let index = Index::new(IndexConfig::default());
            let member = index.write().join().expect("room");
            let mut reader = index.reader().expect("a reader");
            let mut approximate = ApproximateTracker::new(member, Duration::from_secs(40), 300);
            let start = Instant::now();
            for step in 0..400 {
                // Conversations that share beginnings and diverge anywhere.
                let (len, branch) = (1 + below(120), below(120));
                let conversation = below(4);
                let prompt: Vec<u64> = (0..len)
                    .map(|at| if at < branch { at + 1 } else { at + 1000 * (1 + conversation) })
                    .collect();
                let now = start + Duration::from_secs(step);
                approximate.routed(&mut index.write(), &prompt, now);
                assert!(approximate.len() <= 300, "seed {seed}");
                assert_eq!(
                    u64::from(reader.overlaps(&prompt).device(member)),
                    len,
                    "seed {seed}, step {step}"
                );
                let counted = index.write().blocks_of(member)[0] as usize;
                assert!(counted <= approximate.len() && counted * 2 >= approximate.len(), "seed {seed}");
            }
            approximate.expire(&mut index.write(), start + Duration::from_secs(4000));
            assert!(approximate.is_empty());
            assert_eq!(index.write().blocks_of(member), [0; 4], "seed {seed}: every copy was taken back");
        }
    }

    #[test]
    fn the_order_stays_short_when_one_prompt_comes_again_and_again() {
        let index = Index::new(IndexConfig::default());
        let member = index.write().join().expect("room");
        let mut approximate = ApproximateTracker::new(member, Duration::from_secs(3600), 1000);
        let now = Instant::now();
        for _ in 0..10_000 {
            approximate.routed(&mut index.write(), &[1, 2, 3, 4, 5, 6, 7, 8], now);
        }
        assert!(approximate.order.len() < 1200, "{}", approximate.order.len());
        assert_eq!(approximate.len(), 8);
    }
}
