//! The holders of a node that a list of four members that hold all of it cannot represent: many members, members that
//! hold part of it, or tiers below the device.
//!
//! *Full sets*, one per tier: a bit per member that holds all blocks of the node in that tier. *Entries*: a mask of slots
//! for a (member, tier) that holds some. A full bit may exist beside an entry; then the entry's mask covers everything. The
//! writer keeps to an order, so that a reader that loads the bit first and the entries after it always finds the blocks that
//! a member has held all along:
//!
//! * becoming full: the entry's mask first, the bit after it, and the entry stays;
//! * no longer full: the entry's mask first, then the bit goes.
//!
//! A mask in an entry may include slots that a split has moved to another node: readers use only those in use.

use crate::limits::IDS_MAX;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// Tiers that the index distinguishes, fastest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    /// The worker's own pool.
    Device = 0,
    /// Host memory.
    Host = 1,
    /// A local disk.
    Disk = 2,
    /// Any slower place: stores on other nodes, objects, media that are not known.
    Remote = 3,
}

impl Tier {
    /// All tiers, fastest first.
    pub const ALL: [Self; 4] = [Self::Device, Self::Host, Self::Disk, Self::Remote];
}

pub(crate) const TIERS: usize = Tier::ALL.len();

#[derive(Debug)]
pub(crate) struct HolderSets {
    /// Number of words of a full set.
    width: usize,
    /// Number of tiers: 1 for the device alone, else [`TIERS`].
    tiers: usize,
    /// Tiers in which a block was ever stored, as bits.
    present: AtomicU32,
    /// Number of entries in use, from the first on.
    len: AtomicU32,
    /// Number of (member, tier) pairs that hold a block. Used by the writer only.
    pub(crate) count: AtomicU32,
    /// Full sets, then entries.
    cells: Box<[AtomicU64]>,
}

/// A (member, tier) and the slots that it holds: 13, 2 and 28 bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Entry(u64);

impl Entry {
    fn new(id: u16, tier: Tier, mask: u32) -> Self {
        Self(u64::from(id) << 48 | (tier as u64) << 40 | u64::from(mask))
    }

    pub(crate) fn id(self) -> u16 {
        (self.0 >> 48) as u16
    }

    pub(crate) fn tier(self) -> usize {
        (self.0 >> 40 & 3) as usize
    }

    pub(crate) fn mask(self) -> u32 {
        self.0 as u32
    }

    fn is_of(self, id: u16, tier: Tier) -> bool {
        self.id() == id && self.tier() == tier as usize
    }
}

const _: () = assert!(IDS_MAX <= 1 << 13);

impl HolderSets {
    pub(crate) fn new(width: usize, tiers: usize, entries: usize) -> Self {
        let cells = (0..width * tiers + entries).map(|_| AtomicU64::new(0)).collect();
        Self {
            width,
            tiers,
            present: AtomicU32::new(1),
            len: AtomicU32::new(0),
            count: AtomicU32::new(0),
            cells,
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        size_of::<Self>() + self.cells.len() * 8
    }

    pub(crate) fn has_lower_tiers(&self) -> bool {
        self.tiers > 1
    }

    /// Tiers in which some member may hold blocks of the node, as bits; the device is always included.
    pub(crate) fn present(&self) -> u32 {
        // Acquire: pairs with the release in `set`.
        self.present.load(Ordering::Acquire)
    }

    /// A word of the set of members that hold all of the node in tier `level` or a faster one.
    #[inline]
    pub(crate) fn full_word(&self, level: usize, word: usize) -> u64 {
        if word >= self.width {
            return 0;
        }
        // Acquire: pairs with the release in `set` and `clear`: a cleared bit left an entry behind.
        let of = |tier: usize| self.cells[tier * self.width + word].load(Ordering::Acquire);
        (0..self.tiers.min(level + 1)).fold(0, |sum, tier| sum | of(tier))
    }

    #[inline]
    pub(crate) fn entries(&self) -> impl Iterator<Item = Entry> {
        // Acquire: pairs with the release of `len` in `set`.
        let len = self.len.load(Ordering::Acquire) as usize;
        self.cells[self.width * self.tiers..][..len].iter().map(|cell| Entry(cell.load(Ordering::Acquire)))
    }

    fn is_full(&self, id: u16, tier: Tier) -> bool {
        self.tier_word(tier, usize::from(id) / 64) >> (id % 64) & 1 == 1
    }

    fn tier_word(&self, tier: Tier, word: usize) -> u64 {
        if word >= self.width || tier as usize >= self.tiers {
            return 0;
        }
        self.cells[tier as usize * self.width + word].load(Ordering::Acquire)
    }

    /// Slots of a node with slots `all` that a member holds in a tier.
    pub(crate) fn mask(&self, id: u16, tier: Tier, all: u32) -> u32 {
        if self.is_full(id, tier) {
            return all;
        }
        self.entries().find(|entry| entry.is_of(id, tier)).map_or(0, |entry| entry.mask() & all)
    }

    /// Slots held in `level` or a faster tier by a member that has no full bit there.
    #[inline]
    pub(crate) fn partial_mask(&self, id: u16, level: usize) -> u32 {
        let own = self.entries().filter(|entry| entry.id() == id && entry.tier() <= level);
        own.fold(0, |mask, entry| mask | entry.mask())
    }

    /// Whether [`Self::set`] can store this without growing. This and the following methods are for the writer.
    fn has_room(&self, id: u16, tier: Tier) -> bool {
        let fits = usize::from(id) / 64 < self.width && (tier as usize) < self.tiers;
        let is_spare = |entry: Entry| entry.is_of(id, tier) || entry.mask() == 0;
        let used = self.len.load(Ordering::Relaxed) as usize;
        fits && (self.width * self.tiers + used < self.cells.len() || self.entries().any(is_spare))
    }

    /// Stores the slots of `all` that a (member, tier) holds. There must be room.
    fn set(&self, id: u16, tier: Tier, mask: u32, all: u32) {
        let before = self.mask(id, tier, all);
        let count = self.count.load(Ordering::Relaxed);
        let count = count + u32::from(before == 0 && mask != 0) - u32::from(before != 0 && mask == 0);
        self.count.store(count, Ordering::Relaxed);
        let present = self.present.load(Ordering::Relaxed) | 1 << tier as u32;
        self.present.store(present, Ordering::Release);
        let bit = 1_u64 << (id % 64);
        let full = &self.cells[tier as usize * self.width + usize::from(id) / 64];
        let word = full.load(Ordering::Relaxed);
        let entries = &self.cells[self.width * self.tiers..];
        let used = self.len.load(Ordering::Relaxed) as usize;
        let entry_at = |at: &usize| Entry(entries[*at].load(Ordering::Relaxed));
        let own = (0..used).find(|at| entry_at(at).is_of(id, tier) && entry_at(at).mask() != 0);
        let entry = Entry::new(id, tier, mask).0;
        match own {
            // Release, here and below: pairs with the acquires of readers, in the order of the module's header.
            Some(at) => entries[at].store(entry, Ordering::Release),
            // Full without having been partial: the bit alone is enough.
            None if mask == all || mask == 0 => {}
            None => match (0..used).find(|at| entry_at(at).mask() == 0) {
                Some(at) => entries[at].store(entry, Ordering::Release),
                None => {
                    entries[used].store(entry, Ordering::Release);
                    self.len.store(used as u32 + 1, Ordering::Release);
                }
            },
        }
        let word = if mask == all { word | bit } else { word & !bit };
        full.store(word, Ordering::Release);
    }

    /// Sets the slots of a (member, tier) to `mask` of `all`: in place, or in a larger copy, which is returned.
    #[must_use]
    pub(crate) fn stored(&self, id: u16, tier: Tier, mask: u32, all: u32) -> Option<Box<Self>> {
        if self.has_room(id, tier) {
            self.set(id, tier, mask, all);
            return None;
        }
        let width = self.width.max(usize::from(id) / 64 + 1);
        let copy = self.copied(width, self.tiers.max(tiers_for(tier)), all, 2);
        copy.set(id, tier, mask, all);
        Some(copy)
    }

    /// Copies for a node with slots `all`, with room for `spare` more entries than needed. Entries that cover all slots become
    /// bits.
    pub(crate) fn copied(&self, width: usize, tiers: usize, all: u32, spare: usize) -> Box<Self> {
        let partial = |entry: &Entry| entry.mask() & all != 0 && entry.mask() & all != all;
        let needed = self.entries().filter(partial).count();
        let copy = Box::new(Self::new(width, tiers, needed + spare + needed / 2));
        for (id, tier, mask) in self.held(all) {
            copy.set(id, tier, mask, all);
        }
        copy
    }

    /// A copy of the same width.
    pub(crate) fn copied_for(&self, all: u32) -> Box<Self> {
        self.copied(self.width, self.tiers, all, 1)
    }

    /// Every (member, tier) that holds some of `all`, with its slots.
    pub(crate) fn held(&self, all: u32) -> impl Iterator<Item = (u16, Tier, u32)> {
        let full = Tier::ALL.into_iter().take(self.tiers).flat_map(move |tier| {
            (0..self.width)
                .flat_map(move |word| {
                    let set = self.tier_word(tier, word);
                    (0..64).filter(move |bit| set >> bit & 1 == 1).map(move |bit| (word * 64 + bit) as u16)
                })
                .map(move |id| (id, tier, all))
        });
        let is_partial = move |entry: &Entry| {
            entry.mask() & all != 0 && !self.is_full(entry.id(), Tier::ALL[entry.tier()])
        };
        let partial = self.entries().filter(is_partial);
        full.chain(partial.map(move |entry| (entry.id(), Tier::ALL[entry.tier()], entry.mask() & all)))
    }

    /// Number of entries with some, but not all, of the slots.
    pub(crate) fn partial_count(&self, all: u32) -> usize {
        self.entries().filter(|entry| entry.mask() & all != 0 && entry.mask() & all != all).count()
    }
}

/// Number of full sets that a [`HolderSets`] needs for a tier.
pub(crate) fn tiers_for(tier: Tier) -> usize {
    if tier == Tier::Device { 1 } else { TIERS }
}
