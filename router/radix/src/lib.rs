//! The prefix index: which worker holds how long a prefix, and in which tier.
//!
//! First form. A sequence hash names a whole prefix, so a trie is not needed: one open-addressed table maps
//! each hash to two sets of workers, as bits (who has it on the device, who in host memory). A reader walks a
//! prompt's hashes, ANDs the sets, and notes for each worker where it dropped out. Its cost depends on the
//! prompt's length and not on the number of workers; a map per worker would cost a look-up for each.
//!
//! *Readers* take no lock, allocate nothing and never wait: three atomic loads per block. *Writers* are
//! serialised by a mutex that readers never touch. A writer makes an entry visible by storing its bits after
//! its key; it never reuses a key's place, so a reader that found a key reads that key's bits. When half of the
//! table is used, live entries move to a new table, which replaces the old one in one step; a reader in the
//! old table sees the index as it was a moment ago.
//!
//! Bounds: [`WORKERS_MAX`] workers, memory 24 B × 2–4 per live entry plus the writer's own per-worker sets.
//! Larger fleets, a compressed layout and a bound on memory are the next form's business.

#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arc_swap::ArcSwap;

/// Workers of one index: the width of a set.
pub const WORKERS_MAX: usize = 64;

/// Number of a worker in this index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerSlot(u8);

impl WorkerSlot {
    /// As an array index below [`WORKERS_MAX`].
    #[must_use]
    pub fn index(self) -> usize {
        usize::from(self.0)
    }

    fn bit(self) -> u64 {
        1 << self.0
    }
}

/// Which of the two sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// The worker's own pool.
    Device = 0,
    /// Its host tier.
    Host = 1,
}

#[derive(Debug, Default)]
struct Entry {
    /// 0: free. Written once in the life of a table.
    key: AtomicU64,
    holders: [AtomicU64; 2],
}

#[derive(Debug)]
struct Table {
    entries: Box<[Entry]>,
}

impl Table {
    fn new(capacity: usize) -> Self {
        let entries = capacity.next_power_of_two().max(64);
        Self { entries: (0..entries).map(|_| Entry::default()).collect() }
    }

    /// Entries that somebody holds.
    fn live_count(&self) -> usize {
        let live = |entry: &&Entry| entry.holders.iter().any(|set| set.load(Ordering::Relaxed) != 0);
        self.entries.iter().filter(live).count()
    }

    fn find(&self, hash: u64) -> Option<&Entry> {
        let mask = self.entries.len() - 1;
        let mut at = home(hash) & mask;
        loop {
            let entry = &self.entries[at];
            // Acquire: pairs with the release of the key in `Writer::entry`.
            match entry.key.load(Ordering::Acquire) {
                0 => return None,
                key if key == hash => return Some(entry),
                _ => at = (at + 1) & mask,
            }
        }
    }
}

/// Sequence hashes are uniform; the high bits choose the place, so that chains of equal low bits do not matter.
fn home(hash: u64) -> usize {
    (hash.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20) as usize
}

/// Zero marks a free entry, so the one hash in 2^64 that is zero shares a place with 1.
fn stored_key(hash: u64) -> u64 {
    hash.max(1)
}

/// Leading blocks per worker.
#[derive(Debug, Clone)]
pub struct Overlaps {
    device: [u32; WORKERS_MAX],
    any: [u32; WORKERS_MAX],
}

impl Overlaps {
    /// Leading blocks in the worker's own pool.
    #[must_use]
    pub fn device(&self, worker: WorkerSlot) -> u32 {
        self.device[worker.index()]
    }

    /// Leading blocks in its pool or its host tier.
    #[must_use]
    pub fn any(&self, worker: WorkerSlot) -> u32 {
        self.any[worker.index()]
    }
}

struct Writer {
    /// Places of the current table that carry a key.
    used: usize,
    /// Per worker and level: what it holds. Needed to forget a worker, and to grow.
    held: Vec<Option<[HashSet<u64>; 2]>>,
}

/// The index. Share it by `Arc`.
pub struct Index {
    table: ArcSwap<Table>,
    writer: Mutex<Writer>,
}

impl Index {
    /// An empty index with room for `capacity` blocks before it grows.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self {
            table: ArcSwap::from_pointee(Table::new(capacity * 2)),
            writer: Mutex::new(Writer { used: 0, held: (0..WORKERS_MAX).map(|_| None).collect() }),
        }
    }

    fn writer(&self) -> MutexGuard<'_, Writer> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a worker; `None` when there are [`WORKERS_MAX`].
    pub fn add_worker(&self) -> Option<WorkerSlot> {
        let mut writer = self.writer();
        let free = writer.held.iter().position(Option::is_none)?;
        writer.held[free] = Some(Default::default());
        Some(WorkerSlot(free as u8))
    }

    /// Forgets what a worker holds and gives its place back.
    pub fn retire_worker(&self, worker: WorkerSlot) {
        let mut writer = self.writer();
        self.forget(&mut writer, worker);
        writer.held[worker.index()] = None;
    }

    /// Forgets what a worker holds.
    pub fn remove_worker(&self, worker: WorkerSlot) {
        self.forget(&mut self.writer(), worker);
    }

    fn forget(&self, writer: &mut Writer, worker: WorkerSlot) {
        let table = self.table.load();
        let Some(held) = &mut writer.held[worker.index()] else { return };
        for (level, hashes) in held.iter_mut().enumerate() {
            for hash in hashes.drain() {
                if let Some(entry) = table.find(hash) {
                    entry.holders[level].fetch_and(!worker.bit(), Ordering::Release);
                }
            }
        }
    }

    /// The worker now holds this prefix's last block.
    pub fn insert(&self, worker: WorkerSlot, level: Level, sequence_hash: u64) {
        let hash = stored_key(sequence_hash);
        let mut writer = self.writer();
        let Some(held) = &mut writer.held[worker.index()] else { return };
        if !held[level as usize].insert(hash) {
            return;
        }
        let mut table = self.table.load_full();
        if table.find(hash).is_none() && (writer.used + 1) * 2 > table.entries.len() {
            table = writer.rebuilt(&table);
            self.table.store(Arc::clone(&table));
        }
        writer.entry(&table, hash).holders[level as usize].fetch_or(worker.bit(), Ordering::Release);
    }

    /// The worker no longer holds it.
    pub fn remove(&self, worker: WorkerSlot, level: Level, sequence_hash: u64) {
        let hash = stored_key(sequence_hash);
        let mut writer = self.writer();
        let Some(held) = &mut writer.held[worker.index()] else { return };
        let was_held = held[level as usize].remove(&hash);
        if let Some(entry) = self.table.load().find(hash).filter(|_| was_held) {
            // Release: who sees it gone from here also sees what was stored elsewhere before.
            entry.holders[level as usize].fetch_and(!worker.bit(), Ordering::Release);
        }
    }

    /// For each worker, how many leading blocks of a prompt it holds.
    #[must_use]
    pub fn overlaps(&self, sequence_hashes: &[u64]) -> Overlaps {
        let table = self.table.load();
        let mut overlaps = Overlaps { device: [0; WORKERS_MAX], any: [0; WORKERS_MAX] };
        let (mut on_device, mut anywhere) = (u64::MAX, u64::MAX);
        for (block, &hash) in sequence_hashes.iter().enumerate() {
            let (device, host) = match table.find(stored_key(hash)) {
                None => (0, 0),
                // Acquire: pairs with the release in `insert`.
                Some(entry) => {
                    (entry.holders[0].load(Ordering::Acquire), entry.holders[1].load(Ordering::Acquire))
                }
            };
            note_dropped(on_device & !device, block, &mut overlaps.device);
            note_dropped(anywhere & !(device | host), block, &mut overlaps.any);
            on_device &= device;
            anywhere &= device | host;
            if anywhere == 0 {
                return overlaps;
            }
        }
        note_dropped(on_device, sequence_hashes.len(), &mut overlaps.device);
        note_dropped(anywhere, sequence_hashes.len(), &mut overlaps.any);
        overlaps
    }

    /// Number of distinct blocks that somebody holds.
    #[must_use]
    pub fn len(&self) -> usize {
        self.table.load().live_count()
    }

    /// Whether nobody holds anything.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of the table.
    #[must_use]
    pub fn table_bytes(&self) -> usize {
        self.table.load().entries.len() * size_of::<Entry>()
    }
}

impl std::fmt::Debug for Index {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Index").field("table_bytes", &self.table_bytes()).finish_non_exhaustive()
    }
}

/// Workers in `dropped` hold exactly `blocks` leading blocks.
fn note_dropped(mut dropped: u64, blocks: usize, counts: &mut [u32; WORKERS_MAX]) {
    while dropped != 0 {
        counts[dropped.trailing_zeros() as usize] = blocks as u32;
        dropped &= dropped - 1;
    }
}

impl Writer {
    /// The entry of `hash`, made if there is none. There must be room.
    fn entry<'a>(&mut self, table: &'a Table, hash: u64) -> &'a Entry {
        let mask = table.entries.len() - 1;
        let mut at = home(hash) & mask;
        loop {
            let entry = &table.entries[at];
            match entry.key.load(Ordering::Relaxed) {
                0 => {
                    self.used += 1;
                    // Release: pairs with the acquire in `find`; the sets are zero by then.
                    entry.key.store(hash, Ordering::Release);
                    return entry;
                }
                key if key == hash => return entry,
                _ => at = (at + 1) & mask,
            }
        }
    }

    /// A new table of what is held now, with room to grow: dead keys stay behind.
    fn rebuilt(&mut self, before: &Table) -> Arc<Table> {
        let held = std::mem::take(&mut self.held);
        let live = before.live_count();
        let table = Table::new(live * 4);
        self.used = 0;
        for (worker, levels) in held.iter().enumerate() {
            for (level, hashes) in levels.iter().flatten().enumerate() {
                for &hash in hashes {
                    self.entry(&table, hash).holders[level].fetch_or(1 << worker, Ordering::Relaxed);
                }
            }
        }
        self.held = held;
        Arc::new(table)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Random(u64);

    impl Random {
        fn below(&mut self, bound: u64) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 >> 8) % bound
        }
    }

    /// Model test: a naive set per worker and level.
    #[test]
    fn random_operations_agree_with_plain_sets() {
        for seed in 1..=3 {
            let mut random = Random(seed);
            let index = Index::new(4);
            let workers: Vec<WorkerSlot> = (0..5).map(|_| index.add_worker().expect("room")).collect();
            let mut model: Vec<[HashSet<u64>; 2]> = (0..5).map(|_| Default::default()).collect();
            for step in 0..60_000_u64 {
                let who = random.below(5) as usize;
                let hash = random.below(if step < 30_000 { 3000 } else { 200 });
                let (level, at) = if random.below(2) == 0 { (Level::Device, 0) } else { (Level::Host, 1) };
                match random.below(20) {
                    0..=8 => {
                        index.insert(workers[who], level, hash);
                        model[who][at].insert(hash.max(1));
                    }
                    9..=14 => {
                        index.remove(workers[who], level, hash);
                        model[who][at].remove(&hash.max(1));
                    }
                    15 if random.below(500) == 0 => {
                        index.remove_worker(workers[who]);
                        model[who] = Default::default();
                    }
                    _ => {
                        let prompt: Vec<u64> = (0..8).map(|_| random.below(12)).collect();
                        let overlaps = index.overlaps(&prompt);
                        for (who, sets) in model.iter().enumerate() {
                            let count = |held: &dyn Fn(&u64) -> bool| {
                                prompt.iter().take_while(|hash| held(&(**hash).max(1))).count() as u32
                            };
                            assert_eq!(overlaps.device(workers[who]), count(&|hash| sets[0].contains(hash)));
                            let any = count(&|hash| sets[0].contains(hash) || sets[1].contains(hash));
                            assert_eq!(overlaps.any(workers[who]), any, "seed {seed} step {step}");
                        }
                    }
                }
            }
            let live: HashSet<u64> = model.iter().flatten().flatten().copied().collect();
            assert_eq!(index.len(), live.len());
        }
    }

    #[test]
    fn churn_does_not_grow_the_table() {
        let index = Index::new(64);
        let worker = index.add_worker().expect("room");
        let mut largest = 0;
        for hash in 0..200_000_u64 {
            index.insert(worker, Level::Device, hash + 1);
            if hash >= 1000 {
                index.remove(worker, Level::Device, hash + 1 - 1000);
            }
            largest = largest.max(index.table_bytes());
        }
        assert!(largest <= 8192 * size_of::<Entry>(), "{largest} bytes for 1000 live blocks");
    }

    /// While a writer adds and removes other prefixes, a reader always sees one that is wholly stored.
    #[test]
    fn readers_see_what_was_stored_before_they_began() {
        let index = Index::new(16);
        let (steady, busy) = (index.add_worker().expect("room"), index.add_worker().expect("room"));
        let prompt: Vec<u64> = (1..=32).collect();
        prompt.iter().for_each(|&hash| index.insert(steady, Level::Device, hash));
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                for _ in 0..20_000 {
                    assert_eq!(index.overlaps(&prompt).device(steady), 32);
                }
            });
            let mut random = Random(7);
            while !reader.is_finished() {
                let hash = random.below(5000);
                index.insert(busy, Level::Device, hash);
                index.remove(busy, Level::Device, random.below(5000));
            }
        });
    }

    #[test]
    fn worker_places_are_bounded_and_reused() {
        let index = Index::new(16);
        let workers: Vec<WorkerSlot> = std::iter::from_fn(|| index.add_worker()).collect();
        assert_eq!(workers.len(), WORKERS_MAX);
        index.insert(workers[9], Level::Device, 5);
        index.retire_worker(workers[9]);
        assert_eq!(index.add_worker(), Some(workers[9]));
        assert_eq!(index.overlaps(&[5]).any(workers[9]), 0);
    }
}
