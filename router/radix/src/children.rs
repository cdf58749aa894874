//! The children of nodes that have several: (fork, first block hash) → node.
//!
//! An extendible hash table: a directory of pieces of fixed size. A full piece is replaced by two, so growth
//! costs one piece at a time and never pauses for the whole table. Readers probe without lock: a slot is one word,
//! 32 bits of hash and the child's number, and the child's own key confirms the match. Deleted slots are
//! marked and disappear when their piece is replaced.

use crate::arena::Arena;
use crate::limits::TABLE_SLOTS;
use crate::node::{FORK, ForkId, NodeId};
use crate::sync::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

const FREE: u64 = 0;
const DELETED: u64 = 1;

#[derive(Debug)]
pub(crate) struct ChildPage {
    /// Bits of the hash that all its keys share.
    depth: u32,
    /// Slots that are not free. Used by the writer only.
    used: AtomicU32,
    /// Slots with a child. Used by the writer only.
    live: AtomicU32,
    slots: [AtomicU64; TABLE_SLOTS],
}

#[derive(Debug)]
pub(crate) struct Directory {
    bits: u32,
    pages: Box<[AtomicPtr<ChildPage>]>,
}

/// Memory replaced by a change, to be freed when no reader can see it.
#[derive(Debug)]
pub(crate) enum Replaced {
    ChildPage(*mut ChildPage),
    Directory(*mut Directory),
}

// SAFETY: the pointers are owned by this value, whose owner may free them on any thread.
unsafe impl Send for Replaced {}

#[derive(Debug)]
pub(crate) struct Children {
    /// Random seed of the hash, so that colliding blocks cannot be chosen on purpose.
    seed: u64,
    directory: AtomicPtr<Directory>,
}

/// Returns a random seed, different for each index and process.
pub(crate) fn random_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    if cfg!(loom) { 1 } else { RandomState::new().build_hasher().finish() }
}

/// The pieces of a directory, each once.
fn distinct(directory: &Directory) -> Vec<*mut ChildPage> {
    let mut pages: Vec<*mut ChildPage> =
        directory.pages.iter().map(|page| page.load(Ordering::Relaxed)).collect();
    pages.sort_unstable();
    pages.dedup();
    pages
}

/// The spread key of a child that is in the table.
fn key_of(seed: u64, arena: &Arena, child: NodeId) -> u64 {
    let node = arena.node(child);
    spread(seed, node.parent.load(Ordering::Relaxed) & !FORK, node.hash(node.shape().base()))
}

/// Spreads a key over 64 bits, since block hashes are chosen by engines and tests.
#[inline]
fn spread(seed: u64, fork: ForkId, hash: u64) -> u64 {
    let hash = (hash ^ seed).wrapping_mul(0xFF51_AFD7_ED55_8CCD);
    let word = (hash ^ hash >> 33 ^ u64::from(fork).wrapping_mul(0x9E37_79B9_7F4A_7C15))
        .wrapping_mul(0xBF58_476D_1CE4_E5B9);
    (word ^ word >> 29).wrapping_mul(0x94D0_49BB_1331_11EB)
}

/// The high half of the hash with the child's number; never one of the two marks.
#[inline]
fn tagged(spread: u64, child: NodeId) -> u64 {
    (spread | 1 << 63) & 0xFFFF_FFFF_0000_0000 | u64::from(child)
}

#[inline]
fn home(spread: u64) -> usize {
    spread as usize % TABLE_SLOTS
}

/// Bits 9.. of the spread hash choose the piece, the low ones the slot, the high ones are the tag.
#[inline]
fn piece_index(spread: u64, bits: u32) -> usize {
    (spread >> 9) as usize & ((1 << bits) - 1)
}

impl ChildPage {
    fn new(depth: u32) -> Self {
        let slots = std::array::from_fn(|_| AtomicU64::new(FREE));
        Self { depth, used: AtomicU32::new(0), live: AtomicU32::new(0), slots }
    }

    fn insert(&self, spread: u64, child: NodeId) -> bool {
        for step in 0..TABLE_SLOTS {
            let slot = &self.slots[(home(spread) + step) % TABLE_SLOTS];
            if slot.load(Ordering::Relaxed) == FREE {
                // Release: pairs with the acquire in `find`; the child is complete.
                slot.store(tagged(spread, child), Ordering::Release);
                add(&self.used, 1);
                add(&self.live, 1);
                return true;
            }
        }
        false
    }
}

/// Changes a counter that only the writer uses.
fn add(count: &AtomicU32, change: i32) {
    count.store(count.load(Ordering::Relaxed).wrapping_add_signed(change), Ordering::Relaxed);
}

impl Children {
    pub(crate) fn new() -> Self {
        let page = AtomicPtr::new(Box::into_raw(Box::new(ChildPage::new(0))));
        let directory = Directory { bits: 0, pages: [page].into_iter().collect() };
        Self { seed: random_seed(), directory: AtomicPtr::new(Box::into_raw(Box::new(directory))) }
    }

    fn directory(&self) -> &Directory {
        // Acquire: pairs with the release in `double`.
        let directory = self.directory.load(Ordering::Acquire);
        // SAFETY: made by `Box::into_raw`, and freed only after a grace period; the caller is pinned or the writer.
        unsafe { &*directory }
    }

    fn page(directory: &Directory, spread: u64) -> &ChildPage {
        // Acquire: pairs with the release in `replace`.
        let page = directory.pages[piece_index(spread, directory.bits)].load(Ordering::Acquire);
        // SAFETY: as in `directory`.
        unsafe { &*page }
    }

    /// The child of a fork that begins with a block.
    #[inline]
    pub(crate) fn find(&self, arena: &Arena, fork: ForkId, hash: u64) -> Option<NodeId> {
        let spread = spread(self.seed, fork, hash);
        let page = Self::page(self.directory(), spread);
        let tag = tagged(spread, 0);
        for step in 0..TABLE_SLOTS {
            // Acquire: pairs with the release in `insert`.
            let slot = page.slots[(home(spread) + step) % TABLE_SLOTS].load(Ordering::Acquire);
            if slot == FREE {
                return None;
            }
            if slot & 0xFFFF_FFFF_0000_0000 == tag {
                let child = slot as NodeId;
                let node = arena.node(child);
                if node.parent.load(Ordering::Relaxed) == fork | FORK
                    && node.hash(node.shape().base()) == hash
                {
                    return Some(child);
                }
            }
        }
        None
    }

    /// Adds a child; for the writer. Replaced memory is appended to `replaced`.
    pub(crate) fn insert(
        &self,
        arena: &Arena,
        fork: ForkId,
        hash: u64,
        child: NodeId,
        replaced: &mut Vec<Replaced>,
    ) {
        let spread = spread(self.seed, fork, hash);
        loop {
            let page = Self::page(self.directory(), spread);
            if (page.used.load(Ordering::Relaxed) as usize) < TABLE_SLOTS * 3 / 4 {
                let inserted = page.insert(spread, child);
                debug_assert!(inserted, "a quarter is free");
                return;
            }
            self.replace(arena, spread, replaced);
        }
    }

    /// Removes a child; for the writer.
    pub(crate) fn remove(&self, fork: ForkId, hash: u64, child: NodeId) {
        let spread = spread(self.seed, fork, hash);
        let page = Self::page(self.directory(), spread);
        let wanted = tagged(spread, child);
        for step in 0..TABLE_SLOTS {
            let slot = &page.slots[(home(spread) + step) % TABLE_SLOTS];
            match slot.load(Ordering::Relaxed) {
                FREE => return,
                found if found == wanted => {
                    slot.store(DELETED, Ordering::Release);
                    add(&page.live, -1);
                    return;
                }
                _ => {}
            }
        }
    }

    /// Replaces the piece that `spread_hash` falls into by a new one, or by two.
    fn replace(&self, arena: &Arena, spread_hash: u64, replaced: &mut Vec<Replaced>) {
        let page = Self::page(self.directory(), spread_hash);
        let splits = page.live.load(Ordering::Relaxed) as usize * 2 > TABLE_SLOTS;
        if splits && page.depth == self.directory().bits {
            self.double(replaced);
        }
        let directory = self.directory();
        let depth = page.depth + u32::from(splits);
        let parts: Vec<Box<ChildPage>> =
            (0..1 + usize::from(splits)).map(|_| Box::new(ChildPage::new(depth))).collect();
        for slot in &page.slots {
            let slot = slot.load(Ordering::Relaxed);
            if slot > DELETED {
                let child = slot as NodeId;
                let key = key_of(self.seed, arena, child);
                let part = if splits { piece_index(key, depth) >> page.depth & 1 } else { 0 };
                parts[part].insert(key, child);
            }
        }
        // The original pointer, not one derived from the reference.
        let old = directory.pages[piece_index(spread_hash, directory.bits)].load(Ordering::Relaxed);
        let shared = piece_index(spread_hash, page.depth);
        let (old_depth, stride) = (page.depth, 1_usize << page.depth);
        let parts: Vec<*mut ChildPage> = parts.into_iter().map(Box::into_raw).collect();
        for index in (shared..directory.pages.len()).step_by(stride) {
            let part = parts[if splits { index >> old_depth & 1 } else { 0 }];
            // Release: pairs with the acquire in `page`.
            directory.pages[index].store(part, Ordering::Release);
        }
        replaced.push(Replaced::ChildPage(old));
    }

    fn double(&self, replaced: &mut Vec<Replaced>) {
        let old = self.directory();
        let len = old.pages.len();
        let copy = |index: usize| AtomicPtr::new(old.pages[index % len].load(Ordering::Relaxed));
        let directory = Directory { bits: old.bits + 1, pages: (0..2 * len).map(copy).collect() };
        let old = self.directory.load(Ordering::Relaxed);
        // Release: pairs with the acquire in `directory`.
        self.directory.store(Box::into_raw(Box::new(directory)), Ordering::Release);
        replaced.push(Replaced::Directory(old));
    }

    /// Replaces the table by a smaller one for `live` children, at once: at most an eighth remains; for the writer.
    pub(crate) fn shrink(&self, arena: &Arena, live: usize, replaced: &mut Vec<Replaced>) {
        let old = self.directory();
        let bits = (live * 3 / TABLE_SLOTS).next_power_of_two().trailing_zeros();
        let pages: Vec<Box<ChildPage>> =
            (0..1_usize << bits).map(|_| Box::new(ChildPage::new(bits))).collect();
        let old_pieces = distinct(old);
        for &page in &old_pieces {
            // SAFETY: linked, so not freed; the caller is the writer.
            let page = unsafe { &*page };
            for slot in
                page.slots.iter().map(|slot| slot.load(Ordering::Relaxed)).filter(|&slot| slot > DELETED)
            {
                let key = key_of(self.seed, arena, slot as NodeId);
                if !pages[piece_index(key, bits)].insert(key, slot as NodeId) {
                    return; // The keys are spread too unevenly for a smaller table: the old one stays.
                }
            }
        }
        let pages = pages.into_iter().map(|page| AtomicPtr::new(Box::into_raw(page))).collect();
        let directory = Box::into_raw(Box::new(Directory { bits, pages }));
        let old = self.directory.load(Ordering::Relaxed);
        // Release: pairs with the acquire in `directory`.
        self.directory.store(directory, Ordering::Release);
        replaced.push(Replaced::Directory(old));
        replaced.extend(old_pieces.into_iter().map(Replaced::ChildPage));
    }

    /// Number of pieces; for the writer.
    pub(crate) fn pages(&self) -> usize {
        distinct(self.directory()).len()
    }

    /// Bytes of the directory and of this many pieces; for the writer.
    pub(crate) fn bytes(&self, pages: usize) -> usize {
        pages * size_of::<ChildPage>() + self.directory().pages.len() * size_of::<AtomicPtr<ChildPage>>()
    }
}

impl Replaced {
    /// Frees the memory. No reader may be able to see it.
    pub(crate) fn free(self) {
        match self {
            // SAFETY: made by `Box::into_raw`, unlinked before it came here, and its grace period is over.
            Self::ChildPage(page) => drop(unsafe { Box::from_raw(page) }),
            // SAFETY: as above; the pieces live on in the new directory.
            Self::Directory(directory) => drop(unsafe { Box::from_raw(directory) }),
        }
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        let directory = self.directory.load(Ordering::Relaxed);
        // SAFETY: made by `Box::into_raw`; no other thread has access any more.
        let directory = unsafe { Box::from_raw(directory) };
        for page in distinct(&directory) {
            // SAFETY: as above, and each once.
            drop(unsafe { Box::from_raw(page) });
        }
    }
}
