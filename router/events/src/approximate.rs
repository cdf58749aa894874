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

/// What one worker is believed to hold.
#[derive(Debug)]
pub struct Approximate {
    member: Member,
    ttl: Duration,
    blocks_max: usize,
    /// Last use of each block: a number that grows with each request, and the time.
    used: HashMap<EngineHash, (u64, Instant), BuildHasherDefault<AsItIs>>,
    /// In order of use; entries whose block was used again since are stale.
    order: VecDeque<(EngineHash, u64, Instant)>,
    turn: u64,
}

impl Approximate {
    /// Nothing is believed yet.
    #[must_use]
    pub fn new(member: Member, ttl: Duration, blocks_max: usize) -> Self {
        Self { member, ttl, blocks_max, used: HashMap::default(), order: VecDeque::new(), turn: 0 }
    }

    /// Blocks that the worker is believed to hold.
    #[must_use]
    pub fn len(&self) -> usize {
        self.used.len()
    }

    /// Whether none is.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.used.is_empty()
    }

    /// A prompt with these block hashes was routed to the worker.
    pub fn routed(&mut self, index: &mut IndexWriter<'_>, block_hashes: &[u64], now: Instant) {
        self.turn += 1;
        let mut parent = None;
        let keys: Vec<EngineHash> = block_hashes
            .iter()
            .take(self.blocks_max)
            .map(|&block| {
                let key = chained_hash(parent, block);
                parent = Some(key);
                key
            })
            .collect();
        let fresh = self.ttl / FRESH_SHARE;
        let last = keys.last().and_then(|key| self.used.get(key));
        if last.is_some_and(|(_, at)| now.saturating_duration_since(*at) < fresh) {
            return;
        }
        let known = keys.iter().take_while(|key| self.used.contains_key(key)).count();
        // The end first: it is the first to go.
        for &key in keys.iter().rev() {
            self.used.insert(key, (self.turn, now));
            self.order.push_back((key, self.turn, now));
        }
        let before = known.checked_sub(1).map(|last| keys[last]);
        // Counted once each: what is known is not stored again.
        index.stored(self.member, Tier::Device, before, &keys[known..], &block_hashes[known..keys.len()]);
        self.expire(index, now);
    }

    /// Forgets what is too old or too much, and keeps the order short.
    pub fn expire(&mut self, index: &mut IndexWriter<'_>, now: Instant) {
        let mut gone = Vec::new();
        while let Some(&(key, turn, at)) = self.order.front() {
            let is_stale = self.used.get(&key).is_none_or(|(used, _)| *used != turn);
            if !is_stale && now.saturating_duration_since(at) < self.ttl && self.used.len() <= self.blocks_max
            {
                break;
            }
            self.order.pop_front();
            if !is_stale {
                self.used.remove(&key);
                gone.push(key);
            }
        }
        if !gone.is_empty() {
            index.removed(self.member, Tier::Device, &gone);
        }
        if self.order.len() > 4 * self.used.len() + 1024 {
            self.order.retain(|(key, turn, _)| self.used.get(key).is_some_and(|(used, _)| used == turn));
        }
    }
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
