//! One member's blocks by the engine's own hash: the position of each in the tree. Used by the writer only.
//!
//! An extendible hash table: a directory of pieces of fixed size, so that it grows a piece at a time, its
//! memory follows its contents, and no change pauses for a whole table. A piece has 64 buckets of one cache
//! line: five keys, their positions, and the number of keys that passed by because it was full. A look-up touches one line
//! almost always; a removal shifts nothing.
//!
//! Rejected alternative: linear probing over twelve-byte entries on the heap, which has to shift on a removal: 52 to 115 ns a
//! removal where this takes 41 to 91 with warm caches, 97 against 57 to 73 beyond them; stores took as long warm, and
//! beyond the caches 69 against 73.

use crate::pool::{PAGE_BUCKETS, PAGE_BYTES, PageId, Pool};

/// An engine's own hash of a block.
pub type EngineHash = u64;

/// A node's number and a slot in it: 27 and 5 bits. 0 is invalid, since the root has no slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NodeSlot(pub(crate) u32);

impl NodeSlot {
    pub(crate) fn new(node: u32, slot: usize) -> Self {
        Self(node << 5 | slot as u32)
    }

    pub(crate) fn node(self) -> u32 {
        self.0 >> 5
    }

    pub(crate) fn slot(self) -> usize {
        self.0 as usize & 31
    }
}

const BUCKET_KEYS: usize = 5;
/// Number of buckets that a new key may be placed in, from its own on. When all are full the piece is split.
const REACH: usize = 10;

/// One cache line.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C, align(64))]
pub(crate) struct Bucket {
    keys: [EngineHash; BUCKET_KEYS],
    /// Places of the keys; 0: free.
    positions: [u32; BUCKET_KEYS],
    /// Number of keys whose home is this bucket or one before, and which are placed in a later one.
    passed: u16,
    /// Number of hash bits that all keys of the piece share; valid in its first bucket.
    depth: u16,
}

const _: () = assert!(size_of::<Bucket>() == 64);

/// Position of a found key.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Found {
    spread: u64,
    page: PageId,
    bucket: u8,
    entry: u8,
    pub(crate) position: NodeSlot,
}

#[derive(Debug)]
pub(crate) struct Keys {
    /// Random seed of the hash, so that colliding keys cannot be chosen on purpose.
    seed: u64,
    bits: u32,
    directory: Vec<PageId>,
    len: usize,
    pages: usize,
}

#[inline]
fn spread(seed: u64, key: EngineHash) -> u64 {
    let word = (key ^ seed).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (word ^ word >> 32 ^ seed).wrapping_mul(0xD6E8_FEB8_6659_FD93)
}

/// Bucket of a key. The high bits of the hash choose the bucket, the low ones the piece.
#[inline]
fn home(spread: u64) -> usize {
    (spread >> 58) as usize
}

const _: () = assert!(PAGE_BUCKETS == 1 << (64 - 58));

impl Keys {
    pub(crate) fn new(seed: u64) -> Self {
        Self { seed, bits: 0, directory: Vec::new(), len: 0, pages: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Bytes of the directory, in addition to the pool's.
    pub(crate) fn directory_bytes(&self) -> usize {
        self.directory.capacity() * size_of::<PageId>()
    }

    #[inline]
    fn piece_of(&self, spread: u64) -> Option<PageId> {
        self.directory.get(spread as usize & ((1 << self.bits) - 1)).copied()
    }

    #[inline]
    pub(crate) fn locate(&self, pool: &Pool, key: EngineHash) -> Option<Found> {
        let spread = spread(self.seed, key);
        let id = self.piece_of(spread)?;
        let page = pool.page(id);
        let mut at = home(spread);
        // At most once around: after many removals every bucket may have been passed by some key.
        for _ in 0..PAGE_BUCKETS {
            let bucket = &page[at];
            if let Some(entry) = bucket.entry_of(key) {
                let position = NodeSlot(bucket.positions[entry]);
                return Some(Found { spread, page: id, bucket: at as u8, entry: entry as u8, position });
            }
            if bucket.passed == 0 {
                return None;
            }
            at = (at + 1) % PAGE_BUCKETS;
        }
        None
    }

    pub(crate) fn find(&self, pool: &Pool, key: EngineHash) -> Option<NodeSlot> {
        self.locate(pool, key).map(|found| found.position)
    }

    /// Prefetches the memory of a look-up of this key.
    #[inline]
    pub(crate) fn prefetch(&self, pool: &Pool, key: EngineHash) {
        #[cfg(all(target_arch = "x86_64", not(loom)))]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            let spread = spread(self.seed, key);
            if let Some(page) = self.piece_of(spread) {
                let at = &raw const pool.page(page)[home(spread)];
                // SAFETY: a prefetch reads nothing architecturally; any address will do.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast::<i8>()) };
            }
        }
        #[cfg(not(all(target_arch = "x86_64", not(loom))))]
        let _ = (pool, key);
    }

    /// Stores a key's position; returns its previous one.
    #[inline]
    pub(crate) fn insert(
        &mut self,
        pool: &mut Pool,
        key: EngineHash,
        position: NodeSlot,
    ) -> Option<NodeSlot> {
        let spread = spread(self.seed, key);
        loop {
            let Some(id) = self.piece_of(spread) else {
                self.directory.push(pool.allocate());
                self.pages = 1;
                continue;
            };
            let page = pool.piece_mut(id);
            let (mut step, mut free) = (0, None);
            loop {
                let at = (home(spread) + step) % PAGE_BUCKETS;
                let bucket = &mut page[at];
                if let Some(entry) = bucket.entry_of(key) {
                    return Some(NodeSlot(std::mem::replace(&mut bucket.positions[entry], position.0)));
                }
                if free.is_none() {
                    free = bucket.free_entry().map(|entry| (step, at, entry));
                }
                step += 1;
                if step == PAGE_BUCKETS || (bucket.passed == 0 && (free.is_some() || step > REACH)) {
                    break;
                }
            }
            match free {
                Some((step, at, entry)) if step < REACH => {
                    page[at].keys[entry] = key;
                    page[at].positions[entry] = position.0;
                    (0..step).for_each(|passed| page[(home(spread) + passed) % PAGE_BUCKETS].passed += 1);
                    self.len += 1;
                    return None;
                }
                _ => self.split(pool, id),
            }
        }
    }

    pub(crate) fn remove(&mut self, pool: &mut Pool, found: Found) {
        let page = pool.piece_mut(found.page);
        let at = usize::from(found.bucket);
        page[at].positions[usize::from(found.entry)] = 0;
        let mut passed = home(found.spread);
        while passed != at {
            page[passed].passed -= 1;
            passed = (passed + 1) % PAGE_BUCKETS;
        }
        self.len -= 1;
        if self.len == 0 {
            self.clear(pool);
        } else if found.spread >> 32 & 31 == 0 && page[at].positions == [0; BUCKET_KEYS] {
            // Only for an empty bucket, and not each time: the piece may be nearly empty.
            self.merge(pool, found.page, found.spread);
        }
    }

    fn clear(&mut self, pool: &mut Pool) {
        while self.take_piece(pool).is_some() {}
        *self = Self::new(self.seed);
    }

    fn split(&mut self, pool: &mut Pool, old: PageId) {
        let contents = *pool.page(old);
        let depth = u32::from(contents[0].depth);
        if depth == self.bits {
            self.directory.extend_from_within(..);
            self.bits += 1;
        }
        let new = pool.allocate();
        self.pages += 1;
        pool.piece_mut(old).fill(Bucket::default());
        pool.piece_mut(old)[0].depth = depth as u16 + 1;
        pool.piece_mut(new)[0].depth = depth as u16 + 1;
        let shared =
            first_key(&contents).map_or(0, |key| spread(self.seed, key)) as usize & ((1 << depth) - 1);
        for index in ((shared | 1 << depth)..self.directory.len()).step_by(2 << depth) {
            self.directory[index] = new;
        }
        for (key, position) in entries(&contents) {
            let spread = spread(self.seed, key);
            let id = if spread >> depth & 1 == 1 { new } else { old };
            let is_put = put(pool, id, spread, key, position);
            assert!(is_put, "a part of a piece fits a piece");
        }
    }

    /// Merges a piece with its sibling, if both have the same depth and together fill half of a piece at most.
    fn merge(&mut self, pool: &mut Pool, id: PageId, spread_key: u64) {
        let depth = u32::from(pool.page(id)[0].depth);
        if depth == 0 {
            return;
        }
        let index = spread_key as usize & ((1 << self.bits) - 1);
        let sibling = self.directory[index ^ 1 << (depth - 1)];
        if u32::from(pool.page(sibling)[0].depth) != depth {
            return;
        }
        let both = entries(pool.page(id)).count() + entries(pool.page(sibling)).count();
        if both > PAGE_BUCKETS * BUCKET_KEYS / 2 {
            return;
        }
        let contents = *pool.page(id);
        for (key, position) in entries(&contents) {
            let is_put = put(pool, sibling, spread(self.seed, key), key, position);
            assert!(is_put, "half a piece fits a piece");
        }
        pool.piece_mut(sibling)[0].depth = depth as u16 - 1;
        let shared = index & ((1 << (depth - 1)) - 1);
        for index in (shared..self.directory.len()).step_by(1 << (depth - 1)) {
            self.directory[index] = sibling;
        }
        pool.free(id);
        self.pages -= 1;
        while self.bits > 0 && self.pages * 4 <= self.directory.len() && self.is_shallow(pool) {
            self.bits -= 1;
            self.directory.truncate(1 << self.bits);
            self.directory.shrink_to_fit();
        }
    }

    /// Whether no piece needs the last bit of the directory.
    fn is_shallow(&self, pool: &Pool) -> bool {
        self.directory.iter().all(|&page| u32::from(pool.page(page)[0].depth) < self.bits)
    }

    /// Removes a piece and returns its entries, for a member that is being forgotten, which is not looked up any more.
    pub(crate) fn take_piece(&mut self, pool: &mut Pool) -> Option<Vec<(EngineHash, NodeSlot)>> {
        if self.bits > 0 {
            // Each piece once from here on.
            self.directory.sort_unstable();
            self.directory.dedup();
            self.bits = 0;
        }
        let id = self.directory.pop()?;
        let contents = entries(pool.page(id)).collect();
        pool.free(id);
        Some(contents)
    }

    /// Every key and its position.
    pub(crate) fn iter(&self, pool: &Pool) -> impl Iterator<Item = (EngineHash, NodeSlot)> {
        let mut pages = self.directory.clone();
        pages.sort_unstable();
        pages.dedup();
        pages.into_iter().flat_map(|id| entries(pool.page(id)).collect::<Vec<_>>())
    }
}

fn entries(page: &[Bucket; PAGE_BUCKETS]) -> impl Iterator<Item = (EngineHash, NodeSlot)> {
    page.iter().flat_map(|bucket| {
        let used = bucket.keys.iter().zip(bucket.positions).filter(|&(_, position)| position != 0);
        used.map(|(&key, position)| (key, NodeSlot(position)))
    })
}

fn first_key(page: &[Bucket; PAGE_BUCKETS]) -> Option<EngineHash> {
    entries(page).next().map(|entry| entry.0)
}

/// Puts an absent key into a piece; false when the piece is full.
fn put(pool: &mut Pool, id: PageId, spread: u64, key: EngineHash, position: NodeSlot) -> bool {
    let page = pool.piece_mut(id);
    for step in 0..PAGE_BUCKETS {
        let at = (home(spread) + step) % PAGE_BUCKETS;
        let Some(entry) = page[at].free_entry() else { continue };
        page[at].keys[entry] = key;
        page[at].positions[entry] = position.0;
        for passed in 0..step {
            page[(home(spread) + passed) % PAGE_BUCKETS].passed += 1;
        }
        return true;
    }
    false
}

impl Bucket {
    /// Branch-free, since the matching entry is unpredictable.
    #[inline]
    fn entry_of(&self, key: EngineHash) -> Option<usize> {
        let matches = |at: usize| u32::from(self.keys[at] == key && self.positions[at] != 0) << at;
        let found = matches(0) | matches(1) | matches(2) | matches(3) | matches(4);
        (found != 0).then_some(found.trailing_zeros() as usize)
    }

    #[inline]
    fn free_entry(&self) -> Option<usize> {
        let is_free = |at: usize| u32::from(self.positions[at] == 0) << at;
        let found = is_free(0) | is_free(1) | is_free(2) | is_free(3) | is_free(4);
        (found != 0).then_some(found.trailing_zeros() as usize)
    }
}

/// Upper bound of the bytes that storing this many keys takes, when the pool has `spare` free pieces.
pub(crate) fn growth_bytes(keys: usize, spare: usize) -> usize {
    (keys / 100 + 2).saturating_sub(spare).div_ceil(512) * 512 * PAGE_BYTES
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn random_operations_agree_with_a_map() {
        let mut random = fastrand::Rng::with_seed(11);
        let mut next = move || random.u64(..);
        let (mut pool, mut keys, mut model) = (Pool::default(), Keys::new(5), HashMap::new());
        let mut largest = 0;
        for step in 0..600_000_u32 {
            // Grows and shrinks in turn.
            let grows = (step / 100_000) % 2 == 0;
            let key = next() % 60_000;
            if next() % 10 < if grows { 8 } else { 1 } {
                let position = NodeSlot((next() as u32).max(1));
                assert_eq!(
                    keys.insert(&mut pool, key, position).map(|position| position.0),
                    model.insert(key, position.0)
                );
            } else {
                let found = keys.locate(&pool, key);
                assert_eq!(found.map(|found| found.position.0), model.remove(&key));
                if let Some(found) = found {
                    keys.remove(&mut pool, found);
                }
            }
            assert_eq!(keys.len(), model.len());
            let key = next() % 60_000;
            assert_eq!(keys.find(&pool, key).map(|position| position.0), model.get(&key).copied());
            largest = largest.max(keys.pages);
        }
        let mut listed: Vec<(u64, u32)> = keys.iter(&pool).map(|(key, position)| (key, position.0)).collect();
        let mut expected: Vec<(u64, u32)> = model.iter().map(|(&key, &position)| (key, position)).collect();
        listed.sort_unstable();
        expected.sort_unstable();
        assert_eq!(listed, expected);
        let (len, pages) = (keys.len(), keys.pages);
        assert!(pages * 10 < largest * 9, "{pages} pieces for {len} keys, {largest} at most");
        for (key, _) in listed {
            let found = keys.locate(&pool, key).expect("listed");
            keys.remove(&mut pool, found);
        }
        assert_eq!((keys.len(), keys.directory_bytes(), pool.bytes()), (0, 0, 0), "all memory is back");
    }

    /// Every bucket was passed by some key, and one has room again: a look-up for an absent key must end.
    #[test]
    fn look_ups_end_when_every_bucket_was_passed() {
        let (mut pool, mut keys) = (Pool::default(), Keys::new(5));
        let mut with_home: Vec<Vec<u64>> = vec![Vec::new(); PAGE_BUCKETS];
        for key in 0..20_000 {
            with_home[home(spread(5, key))].push(key);
        }
        let mut put = |keys: &mut Keys, home: usize| {
            let key = with_home[home].pop().expect("enough keys");
            keys.insert(&mut pool, key, NodeSlot(7));
            key
        };
        let first = put(&mut keys, 0);
        for (home, count) in [(0, 5)].into_iter().chain((1..63).map(|home| (home, 5))).chain([(63, 4)]) {
            (0..count).for_each(|_| {
                put(&mut keys, home);
            });
        }
        let found = keys.locate(&pool, first).expect("there");
        keys.remove(&mut pool, found);
        let last = with_home[63].pop().expect("enough keys");
        keys.insert(&mut pool, last, NodeSlot(7));
        for key in 30_000..30_500 {
            assert!(keys.locate(&pool, key).is_none());
            keys.insert(&mut pool, key, NodeSlot(9));
            assert_eq!(keys.find(&pool, key), Some(NodeSlot(9)));
        }
    }

    #[test]
    fn pieces_are_well_filled_before_they_are_split() {
        let (mut pool, mut keys) = (Pool::default(), Keys::new(5));
        let mut fill = Vec::new();
        for key in 0..200_000 {
            keys.insert(&mut pool, key * 0x1_0001, NodeSlot(7));
            fill.push(keys.len() as f64 / (keys.pages * PAGE_BUCKETS * BUCKET_KEYS) as f64);
        }
        let mean = fill[50_000..].iter().sum::<f64>() / (fill.len() - 50_000) as f64;
        assert!(mean > 0.55, "{mean}");
    }
}
