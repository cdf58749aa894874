//! For engines that publish no events: what was routed to a worker is taken to be there for a while.
//!
//! Same index, same policy. Each routed block lives for a time from its last use, and a worker has room for a
//! number of blocks; the least recently used go first, the end of a chain before its beginning.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::time::{Duration, Instant};

use kvstore_block::chained_hash;
use router_radix::{EngineHash, IndexWriter, Member, Tier};

/// A prompt that comes again within this share of its blocks' life changes nothing that matters.
const FRESH_SHARE: u32 = 8;

/// Keys are hashes already.
#[derive(Debug, Default)]
struct AsItIs(u64);

impl Hasher for AsItIs {
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

/// Blocks that are remembered, and forgotten, together: what a long prompt costs here is a hash table's work for each run of
/// it, not for each block. The end of a prompt that makes no whole run is remembered block by block, since prompts part there.
const RUN: usize = 16;

/// A run, under the key of its last block.
#[derive(Debug)]
struct Run {
    /// Last use: a number that grows with each request.
    turn: u64,
    at: Instant,
    /// Keys of the blocks before the last one; none for a single block.
    before: Option<Box<[EngineHash; RUN - 1]>>,
}

impl Run {
    fn len(&self) -> usize {
        if self.before.is_some() { RUN } else { 1 }
    }
}

/// What one worker is believed to hold.
#[derive(Debug)]
pub struct Approximate {
    member: Member,
    ttl: Duration,
    blocks_max: usize,
    runs: HashMap<EngineHash, Run, BuildHasherDefault<AsItIs>>,
    /// Blocks of all runs. One at the end of a prompt that became a run of a longer one counts twice for a while.
    blocks: usize,
    /// In order of use; entries whose run was used again since are stale.
    order: VecDeque<(EngineHash, u64, Instant)>,
    turn: u64,
    /// Kept for the next request.
    keys: Vec<EngineHash>,
}

impl Approximate {
    /// Nothing is believed yet.
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

    /// Blocks that the worker is believed to hold.
    #[must_use]
    pub fn len(&self) -> usize {
        self.blocks
    }

    /// Whether none is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks == 0
    }

    /// A prompt with these block hashes was routed to the worker.
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

    /// Stores what is not known yet, neighbours together.
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

    /// Every run of a prompt has been used now. The end first: it is the first to go.
    fn touch(&mut self, keys: &[EngineHash], now: Instant) {
        let turn = self.turn;
        for end in ends(keys.len()).rev() {
            let key = keys[end - 1];
            let start = start_of(end, keys.len());
            self.runs.entry(key).and_modify(|run| (run.turn, run.at) = (turn, now)).or_insert_with(|| {
                self.blocks += end - start;
                let before = <[EngineHash; RUN - 1]>::try_from(&keys[start..end - 1]);
                Run { turn, at: now, before: before.ok().map(Box::new) }
            });
            self.order.push_back((key, turn, now));
        }
    }

    /// Forgets what is too old or too much, and keeps the order short.
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

/// Where the runs of a prompt of so many blocks end: whole runs, then block by block.
fn ends(blocks: usize) -> impl DoubleEndedIterator<Item = usize> + Clone {
    let whole = blocks / RUN;
    (1..=whole).map(|run| run * RUN).chain(whole * RUN + 1..=blocks)
}

/// Where the run that ends there begins.
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
        let mut approximate = Approximate::new(member, Duration::from_secs(10), 6);
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

    /// Whatever is routed, what the index holds is what is remembered, and the prompt routed last is held.
    #[test]
    fn the_index_holds_what_is_remembered() {
        for seed in 0..20_u64 {
            let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
            let mut below = |bound: u64| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state >> 8) % bound
            };
            let index = Index::new(IndexConfig::default());
            let member = index.write().join().expect("room");
            let mut reader = index.reader().expect("a reader");
            let mut approximate = Approximate::new(member, Duration::from_secs(40), 300);
            let start = Instant::now();
            for step in 0..400 {
                // Conversations that share beginnings and part anywhere.
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
        let mut approximate = Approximate::new(member, Duration::from_secs(3600), 1000);
        let now = Instant::now();
        for _ in 0..10_000 {
            approximate.routed(&mut index.write(), &[1, 2, 3, 4, 5, 6, 7, 8], now);
        }
        assert!(approximate.order.len() < 1200, "{}", approximate.order.len());
        assert_eq!(approximate.len(), 8);
    }
}
