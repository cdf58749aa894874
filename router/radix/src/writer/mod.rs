//! The writer: applies the changes of members, one at a time, while readers walk the tree.
//!
//! Each step leaves the tree in a state that is valid for every reader at every moment. New nodes are complete before they are
//! linked; a node's last slots move to a new node in one store of its shape; holders are added after the blocks are stored and
//! removed before them. Unlinked memory waits for its grace period.

mod changes;
mod holding;
mod names;
mod queries;
mod tree;

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Arc, PoisonError};

use crate::aliases::Aliases;
use crate::arena::{NodeAllocator, SEGMENT_BYTES};
use crate::children::Replaced;
use crate::holders::{HolderSets, Tier, tiers_for};
use crate::index::{Held, IndexConfig, Member, Outcome, Shared, Usage};
use crate::keys::{EngineHash, Keys, NodeSlot, growth_bytes};
use crate::limits::{IDS_MAX, NODE_BLOCKS, PARTIAL_MAX, SEGMENT_NODES, SWEEP_STEP};
use crate::node::{Children, FORK, ForkId, LIST_MAX, List, Node, NodeId, ROOT, Shape, bits};
use crate::parked::OrphanBlocks;
use crate::pool::Pool;
use crate::sync::{Ordering, fence};

/// Blocks of one event that are applied between two checks of the memory limit.
const CHUNK: usize = 512;
/// Number of unlinked items from which every reader's cell is checked.
const COLLECT_AT: usize = if cfg!(loom) { 1 } else { 256 };
/// Number of keys that are prefetched ahead.
const AHEAD: usize = 16;

/// Copies beyond the first, by block and tier.
type Copies = HashMap<(EngineHash, Tier), u32, BuildHasherDefault<PrehashedHasher>>;

/// Hasher for keys that are hashes already: a multiplication improves the spread of an engine's numbers (Knuth, 6.4).
#[derive(Debug, Default)]
struct PrehashedHasher(u64);

impl Hasher for PrehashedHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(u64::from(byte)));
    }

    fn write_u64(&mut self, value: u64) {
        let mixed = (self.0 ^ value).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = mixed ^ mixed >> 32;
    }

    fn write_isize(&mut self, value: isize) {
        self.write_u64(value as u64);
    }

    fn write_u8(&mut self, value: u8) {
        self.write_u64(u64::from(value));
    }
}

#[derive(Debug)]
struct MemberState {
    id: u16,
    keys: Keys,
    /// Copies beyond the first.
    extra_copies: Copies,
    /// Blocks for which the engine has more than one name.
    aliases: Aliases,
    parked: OrphanBlocks,
    /// Placed blocks whose children may be waiting. Empty between changes.
    awaited: Vec<EngineHash>,
}

impl MemberState {
    /// Bytes in addition to the pool's pieces.
    fn bytes(&self) -> usize {
        self.keys.directory_bytes()
            + self.extra_copies.capacity() * 32
            + self.parked.bytes()
            + self.aliases.bytes()
    }

    /// Frees the capacity of empty maps.
    fn shrink(&mut self) {
        if self.extra_copies.is_empty() {
            self.extra_copies = Copies::default();
        }
        if self.parked.len() == 0 {
            self.parked = OrphanBlocks::default();
        }
        if self.aliases.is_empty() {
            self.aliases = Aliases::default();
        }
    }
}

#[derive(Debug, Clone, Copy)]
struct Fork {
    owner: NodeId,
    children: u32,
}

/// Unlinked memory that waits for its grace period.
#[derive(Debug)]
pub(crate) enum Garbage {
    Node(NodeId),
    Fork(ForkId),
    HolderSets(*mut HolderSets),
    Replaced(Replaced),
}

// SAFETY: the pointers are owned: only the owner of the garbage frees them, on any thread.
unsafe impl Send for Garbage {}

#[derive(Debug)]
pub(crate) struct Writer {
    shared: Arc<Shared>,
    config: IndexConfig,
    nodes: NodeAllocator,
    forks: Vec<Fork>,
    free_forks: Vec<ForkId>,
    members: Vec<Option<Box<MemberState>>>,
    free_ids: std::collections::BTreeSet<u16>,
    /// Numbers that are being swept, and the rest of their blocks.
    sweeping: VecDeque<(u16, Keys)>,
    garbage: VecDeque<(u64, Garbage)>,
    replaced: Vec<Replaced>,
    /// Number of splits so far.
    splits: u64,
    /// Random seed of the members' key tables.
    seed: u64,
    ext_bytes: usize,
    pool: Pool,
    members_bytes: usize,
    /// Number of blocks that each number holds, by tier.
    blocks_held: Vec<[u32; 4]>,
    /// Number of children in the table, and of its pieces.
    table_live: usize,
    table_pieces: usize,
    /// Number of children below which shrinking the table is tried again.
    shrink_below: usize,
}

impl Writer {
    pub(crate) fn new(shared: Arc<Shared>, config: IndexConfig) -> Self {
        let mut writer = Self {
            shared,
            config,
            nodes: NodeAllocator::default(),
            forks: vec![Fork { owner: ROOT, children: 0 }],
            free_forks: Vec::new(),
            members: Vec::new(),
            free_ids: (0..IDS_MAX as u16).collect(),
            sweeping: VecDeque::new(),
            garbage: VecDeque::new(),
            replaced: Vec::new(),
            splits: 0,
            seed: crate::children::random_seed(),
            ext_bytes: 0,
            pool: Pool::default(),
            members_bytes: 0,
            blocks_held: vec![[0; 4]; IDS_MAX],
            table_live: 0,
            table_pieces: 1,
            shrink_below: usize::MAX,
        };
        let root = writer.nodes.allocate(&writer.shared.arena);
        assert_eq!(root, Some(ROOT), "the first number is the root's");
        writer.node(ROOT).publish(Shape::new(0, 0, Children::Many(ROOT)));
        writer
    }

    fn node(&self, id: NodeId) -> &Node {
        self.shared.arena.node(id)
    }

    // ---- members

    pub(crate) fn join(&mut self) -> Option<Member> {
        let internal_id = match self.members.iter().position(Option::is_none) {
            Some(internal_id) => internal_id,
            None if self.members.len() < self.shared.internal_ids() => {
                self.members.push(None);
                self.members.len() - 1
            }
            None => return None,
        };
        let id = self.free_id()?;
        let member = Member(internal_id as u16);
        let state = MemberState {
            id,
            keys: Keys::new(self.seed),
            extra_copies: Copies::default(),
            aliases: Aliases::default(),
            parked: OrphanBlocks::default(),
            awaited: Vec::new(),
        };
        self.members[internal_id] = Some(Box::new(state));
        self.shared.internal_id(member, Some(id));
        self.set_live(id, true);
        Some(member)
    }

    /// Returns a free number. Sweeps until there is one: there are twice as many as members.
    fn free_id(&mut self) -> Option<u16> {
        while self.free_ids.is_empty() && self.sweep_some(SWEEP_STEP) {}
        self.free_ids.pop_first()
    }

    fn set_live(&self, id: u16, is_live: bool) {
        let word = &self.shared.live[usize::from(id) / 64];
        let bit = 1_u64 << (id % 64);
        let before = word.load(Ordering::Relaxed);
        // Release: pairs with the acquire in `Walk::new`.
        word.store(if is_live { before | bit } else { before & !bit }, Ordering::Release);
        let highest = self.shared.live.iter().rposition(|word| word.load(Ordering::Relaxed) != 0);
        self.shared.set_words(highest.unwrap_or(0) + 1);
    }

    pub(crate) fn leave(&mut self, member: Member) {
        let Some(state) = self.members.get_mut(member.index()).and_then(Option::take) else { return };
        self.shared.internal_id(member, None);
        self.members_bytes -= state.bytes();
        self.retire(state.id, state.keys);
    }

    pub(crate) fn clear(&mut self, member: Member) {
        let Some(Some(state)) = self.members.get_mut(member.index()) else { return };
        self.members_bytes -= state.bytes();
        state.extra_copies = Copies::default();
        state.aliases = Aliases::default();
        state.parked = OrphanBlocks::default();
        if state.keys.len() == 0 {
            self.members_bytes += state.bytes();
            return;
        }
        let (old, keys) = (state.id, std::mem::replace(&mut state.keys, Keys::new(self.seed)));
        self.members_bytes += state.bytes();
        self.retire(old, keys);
        // Twice as many numbers as members: one is free or will be after sweeping.
        let id = self.free_id();
        assert!(id.is_some(), "all numbers are in use by {} members", self.members.len());
        if let (Some(id), Some(Some(state))) = (id, self.members.get_mut(member.index())) {
            state.id = id;
            self.shared.internal_id(member, Some(id));
            self.set_live(id, true);
        }
    }

    fn retire(&mut self, id: u16, keys: Keys) {
        self.set_live(id, false);
        self.members_bytes += keys.directory_bytes();
        self.sweeping.push_back((id, keys));
        self.sweep_some(SWEEP_STEP);
    }

    pub(crate) fn sweep(&mut self) -> bool {
        let more = self.sweep_some(SWEEP_STEP * 16);
        self.collect(1);
        more || !self.garbage.is_empty()
    }

    /// Removes up to about `most` blocks of retired numbers. Returns whether some are left.
    fn sweep_some(&mut self, most: usize) -> bool {
        let mut done = 0;
        while done < most {
            let Some((id, mut keys)) = self.sweeping.pop_front() else { return false };
            let before = keys.directory_bytes();
            let taken = keys.take_piece(&mut self.pool);
            self.members_bytes = self.members_bytes + keys.directory_bytes() - before;
            match taken {
                Some(blocks) => {
                    done += blocks.len();
                    for (_, position) in blocks {
                        // For a block with several names the first one removed it.
                        if let Some((node, _)) = self.resolved(position) {
                            self.forget_node(node, id);
                        }
                    }
                    self.sweeping.push_front((id, keys));
                }
                None => {
                    self.members_bytes -= keys.directory_bytes();
                    self.free_ids.insert(id);
                }
            }
        }
        !self.sweeping.is_empty()
    }

    /// Removes a number from the holders of a node.
    fn forget_node(&mut self, node: NodeId, id: u16) {
        for tier in Tier::ALL {
            let held = self.mask(node, id, tier);
            if held != 0 {
                self.clear_bits(node, id, tier, held);
            }
            // Without an extension there is only the device; and a node that is gone has no holders.
            if self.node(node).holder_sets.load(Ordering::Relaxed).is_null() {
                return;
            }
        }
    }

    // ---- memory

    /// Frees memory that no reader can see any more.
    fn collect(&mut self, at_least: usize) {
        let is_sparse = self.table_live * 8 < self.table_pieces * crate::limits::TABLE_SLOTS;
        if self.table_pieces > 1 && is_sparse && self.table_live < self.shrink_below {
            // If this fails, it is not tried again before half of the children are gone.
            self.shrink_below = self.table_live / 2;
            let shared = Arc::clone(&self.shared);
            shared.children.shrink(&shared.arena, self.table_live, &mut self.replaced);
            self.take_replaced();
        }
        if self.garbage.len() < at_least {
            return;
        }
        let below = self.shared.grace.free_below();
        while let Some((stamp, _)) = self.garbage.front()
            && *stamp < below
        {
            match self.garbage.pop_front() {
                Some((_, Garbage::Node(id))) => self.nodes.free(&self.shared.arena, id),
                Some((_, Garbage::Fork(id))) => self.free_forks.push(id),
                Some((_, Garbage::HolderSets(holder_sets))) => {
                    // SAFETY: made by `Box::into_raw`, unlinked, and its grace period is over.
                    let holder_sets = unsafe { Box::from_raw(holder_sets) };
                    self.ext_bytes -= holder_sets.bytes();
                }
                Some((_, Garbage::Replaced(replaced))) => replaced.free(),
                None => return,
            }
        }
    }

    /// Whether any `blocks` further blocks can be stored within the memory limit.
    fn has_room(&self, blocks: usize) -> bool {
        let free_nodes = self.nodes.allocated * SEGMENT_NODES - self.nodes.nodes;
        let segments = (blocks / NODE_BLOCKS + 4).saturating_sub(free_nodes).div_ceil(SEGMENT_NODES);
        let keys = growth_bytes(blocks, self.pool.spare());
        self.bytes() + segments * SEGMENT_BYTES + keys <= self.config.memory_max
    }

    fn bytes(&self) -> usize {
        self.nodes.allocated * SEGMENT_BYTES
            + self.ext_bytes
            + self.pool.bytes()
            + self.members_bytes
            + self.shared.children.bytes(self.table_pieces)
            + self.forks.len() * size_of::<Fork>()
    }

    pub(crate) fn usage(&self) -> Usage {
        let members = || self.members.iter().flatten();
        Usage {
            bytes: self.bytes(),
            mapped_bytes: self.nodes.allocated * SEGMENT_BYTES + self.pool.bytes(),
            nodes: self.nodes.nodes - 1,
            entries: members().map(|state| state.keys.len()).sum(),
            parked: members().map(|state| state.parked.len()).sum(),
            members: members().count(),
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // A reader may be in the middle of a look-up: memory that it may see is freed with the last reader.
        let left = self.garbage.drain(..).map(|(_, garbage)| garbage);
        self.shared.leftovers.lock().unwrap_or_else(PoisonError::into_inner).extend(left);
    }
}

impl Garbage {
    /// Frees the memory. No reader may be left.
    pub(crate) fn free_at_last(self) {
        match self {
            // SAFETY: made by `Box::into_raw` and unlinked, and no reader is left that could see it.
            Self::HolderSets(holder_sets) => drop(unsafe { Box::from_raw(holder_sets) }),
            Self::Replaced(replaced) => replaced.free(),
            Self::Node(_) | Self::Fork(_) => {}
        }
    }
}
