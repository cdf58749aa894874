//! A worker's block pool: held prefixes, blocks in use, and the order of eviction.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};

#[derive(Debug, Clone, Copy)]
struct Held {
    users: u32,
    used: u64,
    depth: u32,
}

/// Change of the pool, for the index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Change {
    /// Blocks after a parent.
    Stored { parent: Option<u64>, keys: Vec<u64>, blocks: Vec<u64> },
    /// Blocks were evicted.
    Removed(Vec<u64>),
}

/// A pool of blocks.
#[derive(Debug)]
pub(crate) struct Pool {
    capacity: usize,
    held: HashMap<u64, Held>,
    /// Blocks in use without a prefix: the rest of a prompt and its answer.
    private: usize,
    /// Unused blocks in the order of eviction: oldest first, the end of a chain before its beginning.
    idle: BTreeSet<(u64, Reverse<u32>, u64)>,
    turn: u64,
}

impl Pool {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { capacity, held: HashMap::new(), private: 0, idle: BTreeSet::new(), turn: 0 }
    }

    /// Number of leading blocks of a prompt that are held.
    pub(crate) fn leading(&self, keys: &[u64]) -> usize {
        keys.iter().take_while(|key| self.held.contains_key(key)).count()
    }

    /// Marks the leading blocks as used and makes room for `private` more; evicted blocks are added to `gone`. False, with nothing
    /// changed, when there is not enough room.
    pub(crate) fn admit(&mut self, leading: &[u64], private: usize, gone: &mut Vec<u64>) -> bool {
        let idle_kept = leading.iter().filter(|key| self.held[key].users == 0).count();
        if self.held.len() - (self.idle.len() - idle_kept) + self.private + private > self.capacity {
            return false;
        }
        self.turn += 1;
        for key in leading {
            self.take(*key);
        }
        while self.held.len() + self.private + private > self.capacity {
            let Some((_, _, key)) = self.idle.pop_first() else { break };
            self.held.remove(&key);
            gone.push(key);
        }
        self.private += private;
        true
    }

    fn take(&mut self, key: u64) {
        if let Some(held) = self.held.get_mut(&key) {
            if held.users == 0 {
                self.idle.remove(&(held.used, Reverse(held.depth), key));
            }
            held.users += 1;
        }
    }

    /// Registers a prompt's computed blocks from `from` on: they are held from now on, and still in use.
    pub(crate) fn register(&mut self, keys: &[u64], from: usize) -> usize {
        let mut new = 0;
        for (depth, &key) in keys.iter().enumerate().skip(from) {
            self.private -= 1;
            let entry = self.held.entry(key).or_insert(Held { users: 0, used: 0, depth: depth as u32 });
            if entry.users == 0 && entry.used > 0 {
                self.idle.remove(&(entry.used, Reverse(entry.depth), key));
            }
            new += usize::from(entry.used == 0 && entry.users == 0);
            entry.users += 1;
        }
        new
    }

    /// Releases the blocks of a request that has ended.
    pub(crate) fn release(&mut self, keys: &[u64], private: usize) {
        self.turn += 1;
        for &key in keys {
            if let Some(held) = self.held.get_mut(&key) {
                held.users -= 1;
                held.used = self.turn;
                if held.users == 0 {
                    self.idle.insert((self.turn, Reverse(held.depth), key));
                }
            }
        }
        self.private -= private;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_shared_kept_and_evicted_from_the_end() {
        let mut pool = Pool::new(6);
        let mut gone = Vec::new();
        assert!(pool.admit(&[], 4, &mut gone));
        assert_eq!(pool.register(&[1, 2, 3], 0), 3);
        pool.release(&[1, 2, 3], 1);
        assert_eq!(pool.leading(&[1, 2, 9]), 2);
        assert!(pool.admit(&[1, 2], 3, &mut gone), "3 may stay");
        assert!(gone.is_empty());
        assert!(!pool.admit(&[], 2, &mut gone), "only one could go");
        assert!(pool.admit(&[], 1, &mut gone));
        assert_eq!(gone, [3]);
        pool.release(&[], 1);
        assert_eq!(pool.register(&[1, 2, 4, 5], 2), 2);
        pool.release(&[1, 2, 4, 5], 1);
        gone.clear();
        assert!(pool.admit(&[], 5, &mut gone));
        assert_eq!(gone, [5, 4, 2], "the end first");
    }
}
