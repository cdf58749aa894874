//! The look-up: hot path. No lock, no allocation, no system call, no waiting.
//!
//! Walks down the tree along the prompt's block hashes, with the set of members that hold all blocks so far. At each node:
//! compare the run at memory speed, drop members that do not hold the node, follow the only child or look the next one up.
//! The cost is that of the nodes passed, 28 blocks each, plus one pass over the set's words where it changes, plus one store
//! for each member with any block: a map per worker would cost a look-up for each worker and block.
//!
//! A node may change between two loads. A reader takes values from it (shape, holders, children) between two loads of its
//! shape that agree; if they do not, it tries again. Only a completed change causes that; a stalled writer does not.

use std::sync::Arc;

use crate::holders::{HolderSets, TIERS, Tier};
use crate::index::{Member, Shared};
use crate::limits::{IDS_MAX, WORDS_MAX};
use crate::node::{Children, LIST_MAX, List, Node, NodeId, ROOT, Shape};
use crate::sync::{Ordering, fence};

/// Number of leading blocks of the last prompt that each member holds.
#[derive(Debug)]
pub struct Overlaps {
    shared: Arc<Shared>,
    /// One array per tier, by internal number; only the first `ids` are valid.
    leading: [Box<[u32]>; TIERS],
    /// Index of the array for each tier: a tier that holds no block shares the array of the faster one.
    answers: [usize; TIERS],
    ids: usize,
    /// Number of assignments when the look-up began: a number that was assigned later held no block then.
    since: u64,
}

impl Overlaps {
    fn new(shared: Arc<Shared>) -> Self {
        let leading = std::array::from_fn(|_| vec![0; IDS_MAX].into_boxed_slice());
        Self { shared, leading, answers: [0; TIERS], ids: 0, since: 0 }
    }

    /// Leading blocks that a member holds in `tier` or a faster one.
    #[must_use]
    pub fn leading(&self, member: Member, tier: Tier) -> u32 {
        let id = self.shared.id_of(member);
        if self.is_valid(id) { self.leading[self.answers[tier as usize]][id] } else { 0 }
    }

    #[inline]
    fn is_valid(&self, id: usize) -> bool {
        id < self.ids && self.shared.is_same_owner(id, self.since)
    }

    /// Leading blocks that a member holds in each tier or a faster one.
    #[must_use]
    #[inline]
    pub fn tiers(&self, member: Member) -> [u32; TIERS] {
        let id = self.shared.id_of(member);
        if !self.is_valid(id) {
            return [0; TIERS];
        }
        self.answers.map(|answer| self.leading[answer][id])
    }

    /// Leading blocks on the worker's device.
    #[must_use]
    pub fn device(&self, member: Member) -> u32 {
        self.leading(member, Tier::Device)
    }

    /// Leading blocks that a member holds in any tier.
    #[must_use]
    pub fn any(&self, member: Member) -> u32 {
        self.leading(member, Tier::Remote)
    }

    /// Writes the members with the most leading blocks in any tier to `found`, as many as fit, in no order, and returns their
    /// number. Among members that hold equally many, `turn` selects the first one. One pass over all members, 16 at a time; no
    /// allocation.
    pub fn deepest(&self, turn: usize, found: &mut [(Member, u32)]) -> usize {
        const LANES: usize = 16;
        let leading = &self.leading[self.answers[Tier::Remote as usize]][..self.ids];
        let chunks = leading.len() / LANES;
        let (mut count, mut least) = (0, 0);
        for chunk in (0..chunks).map(|at| (at + turn) % chunks) {
            let blocks = &leading[chunk * LANES..][..LANES];
            if blocks.iter().copied().fold(0, u32::max) <= least {
                continue;
            }
            for (at, &blocks) in blocks.iter().enumerate().filter(|(_, blocks)| **blocks > 0) {
                let id = chunk * LANES + at;
                let is_full = count == found.len();
                if (is_full && blocks <= least) || !self.is_valid(id) {
                    continue;
                }
                let Some(member) = self.shared.owner_of(id) else { continue };
                if !is_full {
                    found[count] = (member, blocks);
                    count += 1;
                } else if let Some(shallowest) = found.iter_mut().min_by_key(|(_, blocks)| *blocks) {
                    *shallowest = (member, blocks);
                }
                if count == found.len() {
                    least = found.iter().map(|(_, blocks)| *blocks).min().unwrap_or(0);
                }
            }
        }
        count
    }

    /// Sum over all members of their leading blocks on the device.
    #[must_use]
    pub fn device_sum(&self) -> u64 {
        self.leading[0][..self.ids].iter().map(|&blocks| u64::from(blocks)).sum()
    }
}

/// Looks prompts up. Each reader has its own buffers: make one per thread and keep it.
#[derive(Debug)]
pub struct Reader {
    shared: Arc<Shared>,
    cell: usize,
    overlaps: Overlaps,
}

impl Reader {
    /// Returns `None` when there are [`crate::READERS_MAX`].
    pub(crate) fn new(shared: &Arc<Shared>) -> Option<Self> {
        let cell = shared.grace.enlist()?;
        Some(Self { shared: Arc::clone(shared), cell, overlaps: Overlaps::new(Arc::clone(shared)) })
    }

    /// Number of leading blocks of a prompt that each member holds: every prefix that was wholly stored before the call and still
    /// is counts in full.
    pub fn overlaps(&mut self, block_hashes: &[u64]) -> &Overlaps {
        let shared = &*self.shared;
        let pin = shared.grace.pin(self.cell);
        let overlaps = &mut self.overlaps;
        overlaps.since = shared.assignments();
        let words = shared.words();
        overlaps.ids = words * 64;
        overlaps.answers = [0; TIERS];
        let mut seen = 1_u32;
        for level in 0..TIERS {
            if seen >> level & 1 == 0 {
                overlaps.answers[level] = overlaps.answers[level.max(1) - 1];
                continue;
            }
            overlaps.answers[level] = level;
            let leading = &mut overlaps.leading[level][..];
            // Set sizes in a few steps, so that a small fleet does not pay for clearing the largest.
            seen |= match words {
                1 => Walk::<1>::new(shared, words, level, leading).run(block_hashes),
                2..=8 => Walk::<8>::new(shared, words, level, leading).run(block_hashes),
                9..=64 => Walk::<64>::new(shared, words, level, leading).run(block_hashes),
                _ => Walk::<WORDS_MAX>::new(shared, words, level, leading).run(block_hashes),
            };
        }
        drop(pin);
        &self.overlaps
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.shared.grace.leave(self.cell);
    }
}

/// Members that hold all blocks so far.
enum Active {
    /// Bits in `Walk::set`.
    Set,
    /// A list of up to `LIST_MAX` members; `Walk::set` is not updated.
    Few([u16; LIST_MAX], usize),
}

/// One walk down the tree, for one tier and the faster ones, with sets of up to `WORDS` words.
struct Walk<'a, const WORDS: usize> {
    shared: &'a Shared,
    words: usize,
    level: usize,
    leading: &'a mut [u32],
    set: [u64; WORDS],
    active: Active,
    /// Number of blocks passed.
    depth: usize,
    /// Tiers in which some node on the way holds blocks, as bits.
    tiers_seen: u32,
}

/// Consistent values read from a node.
struct NodeView<'a> {
    shape: Shape,
    agreeing: usize,
    list: List,
    holder_sets: Option<&'a HolderSets>,
}

impl<'a, const WORDS: usize> Walk<'a, WORDS> {
    fn new(shared: &'a Shared, words: usize, level: usize, leading: &'a mut [u32]) -> Self {
        leading[..words * 64].fill(0);
        let words = words.min(WORDS);
        let mut set = [0; WORDS];
        for (word, live) in set.iter_mut().zip(&shared.live[..words]) {
            // Acquire: pairs with the release in `Writer::join`; a number in use again was swept before.
            *word = live.load(Ordering::Acquire);
        }
        Self { shared, words, level, leading, set, active: Active::Set, depth: 0, tiers_seen: 0 }
    }

    fn run(mut self, hashes: &[u64]) -> u32 {
        let mut next = self.child(ROOT, Shape(0), hashes.first().copied());
        while let Some(id) = next {
            let node = self.shared.arena.node(id);
            let rest = &hashes[self.depth..];
            let seen = self.look(node, rest);
            if seen.agreeing == 0 {
                break;
            }
            let is_whole = seen.agreeing == seen.shape.len();
            match seen.holder_sets {
                None => self.keep_list(seen.list),
                Some(holder_sets) => self.keep_holder_sets(holder_sets, &seen),
            }
            if matches!(self.active, Active::Few(_, 0)) {
                return self.tiers_seen;
            }
            self.depth += seen.agreeing;
            if !is_whole {
                break;
            }
            next = self.child(id, seen.shape, hashes.get(self.depth).copied());
        }
        self.finish();
        self.tiers_seen
    }

    fn child(&self, id: NodeId, shape: Shape, hash: Option<u64>) -> Option<NodeId> {
        let hash = hash?;
        if id == ROOT {
            return self.shared.children.find(&self.shared.arena, ROOT, hash);
        }
        match shape.children() {
            Children::None => None,
            Children::One(child) => Some(child),
            Children::Many(fork) => self.shared.children.find(&self.shared.arena, fork, hash),
        }
    }

    fn look(&self, node: &'a Node, rest: &[u64]) -> NodeView<'a> {
        let mut shape = node.shape();
        loop {
            if let Children::One(child) = shape.children() {
                self.shared.arena.prefetch(child);
            }
            let agreeing = node.agreement(shape, rest);
            // Acquire: pairs with the releases in the writer's `set_holder_sets`, `set_bits` and `tidy`.
            let holder_sets = node.holder_sets.load(Ordering::Acquire);
            let list = List(node.list.load(Ordering::Acquire));
            // The hashes were read before the shape is read again. Pairs with the fence in `Writer::append`.
            fence(Ordering::Acquire);
            let again = node.shape();
            #[cfg(loom)]
            let again = if crate::broken(crate::PlantedFault::NoSecondLook) { shape } else { again };
            if again == shape {
                // SAFETY: either null or a box that the writer frees only after a grace period; this thread is
                // pinned while the walk lives.
                let holder_sets = unsafe { holder_sets.as_ref() };
                return NodeView { shape, agreeing, list, holder_sets };
            }
            shape = again;
        }
    }

    /// Keeps only members of the list.
    fn keep_list(&mut self, list: List) {
        let mut few = [0; LIST_MAX];
        let mut count = 0;
        match self.active {
            Active::Set => {
                for id in list.ids() {
                    let (word, bit) = (usize::from(id) / 64, id % 64);
                    if word < self.words && self.set[word] >> bit & 1 == 1 {
                        self.set[word] &= !(1 << bit);
                        few[count] = id;
                        count += 1;
                    }
                }
                self.drop_set();
            }
            Active::Few(before, len) => {
                for &id in &before[..len] {
                    if list.contains(id) {
                        few[count] = id;
                        count += 1;
                    } else {
                        self.leading[usize::from(id)] = self.depth as u32;
                    }
                }
            }
        }
        self.active = Active::Few(few, count);
    }

    /// Records the depth of every member left in the set, and ends the walk for them.
    fn drop_set(&mut self) {
        for word in 0..self.words {
            note(&mut self.leading[word * 64..][..64], self.set[word], self.depth as u32);
        }
    }

    /// Keeps members that hold all of the node; records the depth of those that hold only its beginning.
    fn keep_holder_sets(&mut self, holder_sets: &HolderSets, seen: &NodeView<'_>) {
        self.tiers_seen |= holder_sets.present();
        match self.active {
            Active::Set => self.keep_holder_sets_of_set(holder_sets, seen),
            Active::Few(before, len) => {
                let mut few = [0; LIST_MAX];
                let mut count = 0;
                for &id in &before[..len] {
                    let is_full =
                        holder_sets.full_word(self.level, usize::from(id) / 64) >> (id % 64) & 1 == 1;
                    let blocks =
                        if is_full { seen.shape.len() } else { self.blocks_of(holder_sets, id, seen.shape) };
                    if blocks >= seen.agreeing {
                        few[count] = id;
                        count += 1;
                    } else {
                        self.leading[usize::from(id)] = (self.depth + blocks) as u32;
                    }
                }
                self.active = Active::Few(few, count);
            }
        }
    }

    fn keep_holder_sets_of_set(&mut self, holder_sets: &HolderSets, seen: &NodeView<'_>) {
        // Loads the full sets before the entries: see the writer's order in `holders`.
        let mut going_on = [0_u64; WORDS];
        for (word, (going_on, before)) in going_on.iter_mut().zip(&self.set).enumerate().take(self.words) {
            *going_on = before & holder_sets.full_word(self.level, word);
        }
        for entry in holder_sets.entries() {
            let id = entry.id();
            let (word, bit) = (usize::from(id) / 64, 1_u64 << (id % 64));
            if word >= self.words || entry.tier() > self.level || self.set[word] & !going_on[word] & bit == 0
            {
                continue;
            }
            // With one tier the entry is complete.
            let mask = if holder_sets.has_lower_tiers() {
                holder_sets.partial_mask(id, self.level)
            } else {
                entry.mask()
            };
            let blocks = leading_of(mask, seen.shape);
            if blocks >= seen.agreeing {
                going_on[word] |= bit;
            } else {
                self.set[word] &= !bit;
                self.leading[usize::from(id)] = (self.depth + blocks) as u32;
            }
        }
        for (word, &going_on) in going_on.iter().enumerate().take(self.words) {
            let dropped = self.set[word] & !going_on;
            if dropped != 0 {
                note(&mut self.leading[word * 64..][..64], dropped, self.depth as u32);
            }
            self.set[word] = going_on;
        }
    }

    /// Leading blocks of a node that a member without a full bit holds.
    fn blocks_of(&self, holder_sets: &HolderSets, id: u16, shape: Shape) -> usize {
        leading_of(holder_sets.partial_mask(id, self.level), shape)
    }

    /// Records the full depth for the remaining members, which hold every block that was found.
    fn finish(&mut self) {
        match self.active {
            Active::Set => self.drop_set(),
            Active::Few(few, len) => {
                for &id in &few[..len] {
                    self.leading[usize::from(id)] = self.depth as u32;
                }
            }
        }
    }
}

/// Number of leading blocks of a node that are set in a mask.
fn leading_of(mask: u32, shape: Shape) -> usize {
    ((mask >> shape.base()).trailing_ones() as usize).min(shape.len())
}

/// Records a number for each member of a word.
#[inline]
fn note(leading: &mut [u32], mut members: u64, blocks: u32) {
    if blocks == 0 {
        return;
    }
    if members == u64::MAX {
        leading.fill(blocks);
        return;
    }
    while members != 0 {
        leading[members.trailing_zeros() as usize] = blocks;
        members &= members - 1;
    }
}
