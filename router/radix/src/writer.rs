//! The writer: applies what members store and remove, one change at a time, under the eyes of readers.
//!
//! Each step leaves the tree in a state that is right for every reader at every moment. New nodes are complete
//! before they are linked; a node's last slots go to a new node in one store of its shape; who holds what
//! changes after the blocks are there and before they go. What is unlinked waits for its grace period.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, PoisonError};

use crate::aliases::Aliases;
use crate::arena::{NodeAllocator, SEGMENT_BYTES};
use crate::children::Replaced;
use crate::holders::{Ext, Tier, tiers_for};
use crate::index::{Held, IndexConfig, Member, Outcome, Shared, Usage};
use crate::keys::{EngineHash, Keys, Place, growth_bytes};
use crate::limits::{IDS_MAX, NODE_BLOCKS, PARTIAL_MAX, SEGMENT_NODES, SWEEP_STEP};
use crate::node::{Children, FORK, ForkId, LIST_MAX, List, Node, NodeId, ROOT, Shape, bits};
use crate::parked::Parked;
use crate::pool::Pool;
use crate::sync::{Ordering, fence};

/// Blocks of one event that are applied between two looks at the memory bound.
const CHUNK: usize = 512;
/// Unlinked things that are worth a look at every reader's cell.
const COLLECT_AT: usize = if cfg!(loom) { 1 } else { 256 };
/// Keys looked ahead for.
const AHEAD: usize = 16;

#[derive(Debug)]
struct MemberState {
    id: u16,
    keys: Keys,
    /// Copies beyond the first.
    extra_copies: HashMap<(EngineHash, Tier), u32>,
    /// Blocks that the engine has more than one name for.
    aliases: Aliases,
    parked: Parked,
    /// Blocks that have come and that others may be waiting for. Empty between changes.
    awaited: Vec<EngineHash>,
}

impl MemberState {
    /// Bytes beside the pool's pieces.
    fn bytes(&self) -> usize {
        self.keys.directory_bytes()
            + self.extra_copies.capacity() * 32
            + self.parked.bytes()
            + self.aliases.bytes()
    }
}

impl MemberState {
    /// Gives back what empty maps keep.
    fn shrink(&mut self) {
        if self.extra_copies.is_empty() {
            self.extra_copies = HashMap::new();
        }
        if self.parked.len() == 0 {
            self.parked = Parked::default();
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

/// Unlinked, and waiting for its grace period.
#[derive(Debug)]
pub(crate) enum Garbage {
    Node(NodeId),
    Fork(ForkId),
    Ext(*mut Ext),
    Replaced(Replaced),
}

// SAFETY: the pointers are owned: nobody but the holder of the garbage frees them, on whatever thread.
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
    /// Numbers that are being swept, and what is left of their blocks.
    sweeping: VecDeque<(u16, Keys)>,
    garbage: VecDeque<(u64, Garbage)>,
    replaced: Vec<Replaced>,
    /// Splits so far.
    splits: u64,
    /// Of the members' key tables.
    seed: u64,
    ext_bytes: usize,
    pool: Pool,
    members_bytes: usize,
    /// Children in the table, and its pieces.
    table_live: usize,
    table_pieces: usize,
    /// The table is worth another try when so few children are in it.
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
        let seat = match self.members.iter().position(Option::is_none) {
            Some(seat) => seat,
            None if self.members.len() < self.shared.seats() => {
                self.members.push(None);
                self.members.len() - 1
            }
            None => return None,
        };
        let id = self.free_id()?;
        let member = Member(seat as u16);
        let state = MemberState {
            id,
            keys: Keys::new(self.seed),
            extra_copies: HashMap::new(),
            aliases: Aliases::default(),
            parked: Parked::default(),
            awaited: Vec::new(),
        };
        self.members[seat] = Some(Box::new(state));
        self.shared.seat(member, Some(id));
        self.set_live(id, true);
        Some(member)
    }

    /// A number that no block knows. Sweeps until there is one: there are twice as many as members.
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
        self.shared.seat(member, None);
        self.members_bytes -= state.bytes();
        self.retire(state.id, state.keys);
    }

    pub(crate) fn clear(&mut self, member: Member) {
        let Some(Some(state)) = self.members.get_mut(member.index()) else { return };
        self.members_bytes -= state.bytes();
        state.extra_copies = HashMap::new();
        state.aliases = Aliases::default();
        state.parked = Parked::default();
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
            self.shared.seat(member, Some(id));
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

    /// Forgets up to about `most` blocks of retired numbers. Returns whether some are left.
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
                    for (_, place) in blocks {
                        // Of several names for one block the first did it.
                        if let Some((node, _)) = self.resolved(place) {
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

    /// A number no longer holds anything of a node.
    fn forget_node(&mut self, node: NodeId, id: u16) {
        for tier in Tier::ALL {
            let held = self.mask(node, id, tier);
            if held != 0 {
                self.clear_bits(node, id, tier, held);
            }
            // Only the device is known without an extension; and a node that is gone holds nothing.
            if self.node(node).ext.load(Ordering::Relaxed).is_null() {
                return;
            }
        }
    }

    // ---- changes

    pub(crate) fn stored(
        &mut self,
        member: Member,
        tier: Tier,
        mut parent: Option<EngineHash>,
        keys: &[EngineHash],
        blocks: &[u64],
    ) -> Outcome {
        assert_eq!(keys.len(), blocks.len(), "a key for each block");
        let mut outcome = Outcome::default();
        for (keys, blocks) in keys.chunks(CHUNK).zip(blocks.chunks(CHUNK)) {
            outcome += self.stored_chunk(member, tier, parent, keys, blocks);
            parent = keys.last().copied();
        }
        self.sweep_some(SWEEP_STEP);
        self.collect(COLLECT_AT);
        outcome
    }

    fn stored_chunk(
        &mut self,
        member: Member,
        tier: Tier,
        parent: Option<EngineHash>,
        keys: &[EngineHash],
        blocks: &[u64],
    ) -> Outcome {
        let mut outcome = Outcome::default();
        // Taken out while it is worked on, so that the tree can be changed beside it.
        let Some(mut state) = self.members.get_mut(member.index()).and_then(Option::take) else {
            return Outcome { refused: keys.len() as u64, ..outcome };
        };
        let bytes_before = state.bytes();
        let at = match parent {
            None => Some((ROOT, 0)),
            Some(parent) => self.place_of(&state, parent).map(|(node, slot)| (node, slot + 1)),
        };
        match (at, parent) {
            _ if !self.has_room(blocks.len()) => self.count_known(&mut state, tier, keys, &mut outcome),
            (Some((node, next)), _) => {
                self.place_run(&mut state, tier, (node, next), keys, blocks, &mut outcome)
            }
            (None, parent) => {
                let parents = parent.into_iter().chain(keys.iter().copied());
                for ((&key, &block), parent) in keys.iter().zip(blocks).zip(parents) {
                    self.place_orphan(&mut state, tier, parent, key, block, &mut outcome);
                }
            }
        }
        // Blocks that waited for those that came, and blocks that waited for them: a chain of any length, a step at a time.
        while let Some(parent) = state.awaited.pop() {
            self.place_parked(&mut state, parent, &mut outcome);
        }
        self.members_bytes = self.members_bytes + state.bytes() - bytes_before;
        self.members[member.index()] = Some(state);
        outcome
    }

    /// At the bound nothing new comes in; but one more copy of what is there must be counted, or the next removal would
    /// take the block away while the engine still has it.
    fn count_known(
        &mut self,
        state: &mut MemberState,
        tier: Tier,
        keys: &[EngineHash],
        outcome: &mut Outcome,
    ) {
        for &key in keys {
            let place = self.place_of(state, key);
            let is_held = place.is_some_and(|(node, slot)| self.mask(node, state.id, tier) >> slot & 1 == 1);
            if is_held {
                *state.extra_copies.entry((key, tier)).or_default() += 1;
                outcome.copies += 1;
            } else {
                outcome.refused += 1;
            }
        }
    }

    /// Puts a run of blocks after slot `next - 1` of a node, in as few steps as it touches nodes.
    fn place_run(
        &mut self,
        state: &mut MemberState,
        tier: Tier,
        (mut node, mut next): (NodeId, usize),
        keys: &[EngineHash],
        blocks: &[u64],
        outcome: &mut Outcome,
    ) {
        keys.iter().take(AHEAD).for_each(|&key| state.keys.prefetch(&self.pool, key));
        let mut done = 0;
        while done < blocks.len() {
            let Some((at, from, count, is_new)) = self.advance(state.id, tier, node, next, &blocks[done..])
            else {
                outcome.refused += (blocks.len() - done) as u64;
                return;
            };
            // What the member held of it before, in each tier.
            let before = if is_new { [0; 4] } else { Tier::ALL.map(|tier| self.mask(at, state.id, tier)) };
            // Before anything else is touched: a node without holders could be taken for unused.
            self.set_bits(at, state.id, tier, bits(from, from + count));
            let mut renamed = Vec::new();
            for (offset, &key) in keys[done..done + count].iter().enumerate() {
                if let Some(&ahead) = keys.get(done + offset + AHEAD) {
                    state.keys.prefetch(&self.pool, ahead);
                }
                let (slot, place) = (from + offset, Place::new(at, from + offset));
                let tiers = Tier::ALL.into_iter().filter(|&tier| before[tier as usize] >> slot & 1 == 1);
                let held = tiers.fold(0_u8, |held, tier| held | 1 << tier as u8);
                match state.keys.insert(&mut self.pool, key, place) {
                    Some(old) if old != place && self.resolved(old) != self.resolved(place) => {
                        // The engine uses the name for another block now: the newer one counts.
                        renamed.push((key, old));
                        self.add_name(state, place, key, tier, held, outcome);
                    }
                    Some(_) if state.aliases.is_empty() => {
                        if held >> tier as u8 & 1 == 1 {
                            *state.extra_copies.entry((key, tier)).or_default() += 1;
                            outcome.copies += 1;
                        } else {
                            outcome.changed += 1;
                        }
                    }
                    Some(_) => self.store_name(state, place, key, tier, held, outcome),
                    None if held == 0 => outcome.changed += 1,
                    None => self.add_name(state, place, key, tier, held, outcome),
                }
            }
            for (key, old) in renamed {
                Tier::ALL.iter().for_each(|&tier| {
                    state.extra_copies.remove(&(key, tier));
                });
                if let Some(place) = self.resolved(old) {
                    self.drop_name(state, place, key);
                }
            }
            if state.parked.len() > 0 {
                state.awaited.extend(&keys[done..done + count]);
            }
            done += count;
            (node, next) = (at, from + count);
            if self.node(at).shape().end() < next {
                // Splitting a ragged node, or forgetting another block, has moved the node's end.
                let Some((resolved, slot)) = self.resolved(Place::new(at, from + count - 1)) else {
                    outcome.refused += (blocks.len() - done) as u64;
                    return;
                };
                (node, next) = (resolved, slot + 1);
            }
        }
    }

    /// A block of a run whose beginning has an unknown parent.
    fn place_orphan(
        &mut self,
        state: &mut MemberState,
        tier: Tier,
        parent: EngineHash,
        key: EngineHash,
        block: u64,
        outcome: &mut Outcome,
    ) {
        // Its own parent may be known, or the block itself: then there is a place to go on from.
        let before = match self.place_of(state, parent) {
            Some(place) => Some(place),
            None => self.place_of(state, key).and_then(|place| self.before(place)),
        };
        if let Some((node, slot)) = before {
            self.place_run(state, tier, (node, slot + 1), &[key], &[block], outcome);
        } else if state.parked.add(parent, key, block, tier) {
            outcome.parked += 1;
        } else {
            outcome.refused += 1;
        }
    }

    /// Places the blocks that waited for `parent`.
    fn place_parked(&mut self, state: &mut MemberState, parent: EngineHash, outcome: &mut Outcome) {
        for (key, block, copies) in state.parked.take(parent) {
            for (tier, copies) in Tier::ALL.into_iter().zip(copies) {
                for _ in 0..copies {
                    let Some((node, slot)) = self.place_of(state, parent) else {
                        outcome.refused += 1;
                        continue;
                    };
                    self.place_run(state, tier, (node, slot + 1), &[key], &[block], outcome);
                }
            }
        }
    }

    pub(crate) fn removed(&mut self, member: Member, tier: Tier, keys: &[EngineHash]) -> Outcome {
        let mut outcome = Outcome::default();
        let Some(mut state) = self.members.get_mut(member.index()).and_then(Option::take) else {
            return Outcome { unknown: keys.len() as u64, ..outcome };
        };
        let bytes_before = state.bytes();
        keys.iter().take(AHEAD).for_each(|&key| state.keys.prefetch(&self.pool, key));
        // Neighbours are removed together: slots of one node are gathered and cleared at once.
        let mut gathered = (ROOT, 0_u32);
        for (at, &key) in keys.iter().enumerate() {
            if let Some(&ahead) = keys.get(at + AHEAD) {
                state.keys.prefetch(&self.pool, ahead);
            }
            let is_plain = tier == Tier::Device && state.extra_copies.is_empty() && state.aliases.is_empty();
            let found = state.keys.locate(&self.pool, key).filter(|_| is_plain);
            let place = found.and_then(|found| self.resolved(found.place));
            let (node, slot) = place.unwrap_or((ROOT, 0));
            if node != gathered.0 && gathered.1 != 0 {
                self.clear_bits(gathered.0, state.id, tier, gathered.1);
                gathered.1 = 0;
            }
            match found {
                Some(found) if place.is_some() && self.node(node).ext.load(Ordering::Relaxed).is_null() => {
                    state.keys.remove(&mut self.pool, found);
                    gathered = (node, gathered.1 | 1 << slot);
                    outcome.changed += 1;
                }
                _ => self.remove_one(&mut state, tier, key, &mut outcome),
            }
        }
        if gathered.1 != 0 {
            self.clear_bits(gathered.0, state.id, tier, gathered.1);
        }
        state.shrink();
        self.members_bytes = self.members_bytes + state.bytes() - bytes_before;
        self.members[member.index()] = Some(state);
        self.sweep_some(SWEEP_STEP);
        self.collect(COLLECT_AT);
        outcome
    }

    pub(crate) fn moved(&mut self, member: Member, keys: &[EngineHash], from: Tier, to: Tier) -> Outcome {
        let mut outcome = Outcome::default();
        if from == to {
            return outcome;
        }
        for &key in keys {
            let place = self.member(member).and_then(|state| Some((state.id, self.place_of(state, key)?)));
            let Some((id, (node, slot))) =
                place.filter(|&(id, (node, slot))| self.mask(node, id, from) >> slot & 1 == 1)
            else {
                outcome.unknown += 1;
                continue;
            };
            // There before it is gone here. A reader that looks in between the wrong way round may find it nowhere, once.
            let was_there = self.mask(node, id, to) >> slot & 1;
            self.set_bits(node, id, to, 1 << slot);
            let Some(mut state) = self.members.get_mut(member.index()).and_then(Option::take) else {
                continue;
            };
            let bytes_before = state.bytes();
            let copies = state.extra_copies.remove(&(key, from)).unwrap_or(0) + was_there;
            if copies > 0 {
                *state.extra_copies.entry((key, to)).or_default() += copies;
            }
            if let Some((node, slot)) = self.resolved(Place::new(node, slot)) {
                let is_last = self.move_name(&mut state, (node, slot), key, from, to);
                if is_last {
                    self.clear_bits(node, id, from, 1 << slot);
                }
            }
            self.members_bytes = self.members_bytes + state.bytes() - bytes_before;
            self.members[member.index()] = Some(state);
            outcome.changed += 1;
        }
        self.sweep_some(SWEEP_STEP);
        self.collect(COLLECT_AT);
        outcome
    }

    fn remove_one(&mut self, state: &mut MemberState, tier: Tier, key: EngineHash, outcome: &mut Outcome) {
        if !state.extra_copies.is_empty()
            && let Some(copies) = state.extra_copies.get_mut(&(key, tier))
        {
            *copies -= 1;
            if *copies == 0 {
                state.extra_copies.remove(&(key, tier));
            }
            outcome.copies += 1;
            return;
        }
        let Some(found) = state.keys.locate(&self.pool, key) else {
            let waited = state.parked.len() > 0 && state.parked.remove(key, tier);
            *(if waited { &mut outcome.parked } else { &mut outcome.unknown }) += 1;
            return;
        };
        let Some((node, slot)) = self.resolved(found.place) else {
            state.keys.remove(&mut self.pool, found);
            outcome.unknown += 1;
            return;
        };
        if !state.aliases.is_empty() {
            self.refresh_aliases(state);
            if state.aliases.names((node, slot)).is_some() {
                return self.remove_name(state, (node, slot), key, tier, outcome);
            }
        }
        let held = |tier: Tier| self.mask(node, state.id, tier) >> slot & 1 == 1;
        let is_elsewhere = Tier::ALL.into_iter().any(|other| other != tier && held(other));
        if !held(tier) {
            outcome.unknown += 1;
            if !is_elsewhere {
                state.keys.remove(&mut self.pool, found);
            }
            return;
        }
        if !is_elsewhere {
            state.keys.remove(&mut self.pool, found);
        }
        self.clear_bits(node, state.id, tier, 1 << slot);
        outcome.changed += 1;
    }

    // ---- several names for one block

    /// Places as they are after the splits since.
    fn refresh_aliases(&self, state: &mut MemberState) {
        state.aliases.refresh(self.splits, |node, slot| self.resolved(Place::new(node, slot)));
    }

    /// A name that was not known, or named another block, now names a block that the member holds in the tiers `held`.
    fn add_name(
        &mut self,
        state: &mut MemberState,
        place: Place,
        key: EngineHash,
        tier: Tier,
        held: u8,
        outcome: &mut Outcome,
    ) {
        if held == 0 {
            outcome.changed += 1;
            return;
        }
        self.refresh_aliases(state);
        let Some(place) = self.resolved(place) else { return };
        if state.aliases.add(place, key, tier, held) {
            *(if held >> tier as u8 & 1 == 1 { &mut outcome.copies } else { &mut outcome.changed }) += 1;
            return;
        }
        // Too many names: this one is not known. Its blocks are those of the others.
        if let Some(found) = state.keys.locate(&self.pool, key) {
            state.keys.remove(&mut self.pool, found);
        }
        outcome.refused += 1;
    }

    /// A known name stores its block once more, on a member that has blocks with several names.
    fn store_name(
        &mut self,
        state: &mut MemberState,
        place: Place,
        key: EngineHash,
        tier: Tier,
        held: u8,
        outcome: &mut Outcome,
    ) {
        self.refresh_aliases(state);
        let place = self.resolved(place);
        let names = place.and_then(|place| state.aliases.names_mut(place));
        let had = match names {
            Some(names) => {
                let own = names.of(key);
                let had = *own >> tier as u8 & 1 == 1;
                *own |= 1 << tier as u8;
                had
            }
            None => held >> tier as u8 & 1 == 1,
        };
        if had {
            *state.extra_copies.entry((key, tier)).or_default() += 1;
            outcome.copies += 1;
        } else {
            outcome.changed += 1;
        }
    }

    /// A name of a block with several names is removed from a tier.
    fn remove_name(
        &mut self,
        state: &mut MemberState,
        place: (NodeId, usize),
        key: EngineHash,
        tier: Tier,
        outcome: &mut Outcome,
    ) {
        let Some(names) = state.aliases.names_mut(place) else { return };
        let own = names.of(key);
        let had = *own >> tier as u8 & 1 == 1;
        *own &= !(1 << tier as u8);
        let is_gone = *own == 0;
        let is_last = had && names.all() >> tier as u8 & 1 == 0;
        state.aliases.tidy(place);
        if is_gone && let Some(found) = state.keys.locate(&self.pool, key) {
            state.keys.remove(&mut self.pool, found);
        }
        match (had, is_last) {
            (false, _) => outcome.unknown += 1,
            (true, false) => outcome.copies += 1,
            (true, true) => {
                self.clear_bits(place.0, state.id, tier, 1 << place.1);
                outcome.changed += 1;
            }
        }
    }

    /// A name no longer stands for a block in any tier.
    fn drop_name(&mut self, state: &mut MemberState, place: (NodeId, usize), key: EngineHash) {
        self.refresh_aliases(state);
        let left = state.aliases.names_mut(place).map_or(0, |names| {
            *names.of(key) = 0;
            names.all()
        });
        state.aliases.tidy(place);
        for tier in Tier::ALL {
            let Some((node, slot)) = self.resolved(Place::new(place.0, place.1)) else { return };
            if left >> tier as u8 & 1 == 0 && self.mask(node, state.id, tier) >> slot & 1 == 1 {
                self.clear_bits(node, state.id, tier, 1 << slot);
            }
        }
    }

    /// A name goes from one tier to another; whether nothing else names the block in the first.
    fn move_name(
        &mut self,
        state: &mut MemberState,
        place: (NodeId, usize),
        key: EngineHash,
        from: Tier,
        to: Tier,
    ) -> bool {
        if state.aliases.is_empty() {
            return true;
        }
        self.refresh_aliases(state);
        let Some(names) = state.aliases.names_mut(place) else { return true };
        let own = names.of(key);
        *own = *own & !(1 << from as u8) | 1 << to as u8;
        names.all() >> from as u8 & 1 == 0
    }

    // ---- the tree

    /// Where a place is now: splits may have handed the slot on. `None` when the block is gone.
    fn resolved(&self, place: Place) -> Option<(NodeId, usize)> {
        let (mut node, slot) = (place.node(), place.slot());
        loop {
            let at = self.shared.arena.get(node)?;
            let shape = at.shape();
            if slot < shape.end() {
                return (slot >= shape.base()).then_some((node, slot));
            }
            node = at.next_part.load(Ordering::Relaxed);
            if node == ROOT {
                return None;
            }
        }
    }

    /// Where the block of a name is.
    fn place_of(&self, state: &MemberState, key: EngineHash) -> Option<(NodeId, usize)> {
        self.resolved(state.keys.find(&self.pool, key)?)
    }

    /// Finds or makes the slots for the first of `blocks`, after slot `next - 1` of `node`, and for as many of
    /// the following as come in the same node: (node, first slot, count, whether they were made for it). `None` when there
    /// are no more nodes.
    fn advance(
        &mut self,
        id: u16,
        tier: Tier,
        node: NodeId,
        next: usize,
        blocks: &[u64],
    ) -> Option<(NodeId, usize, usize, bool)> {
        let shape = self.node(node).shape();
        if next < shape.end() {
            let agreeing = self.node(node).agreement_from(next, shape.end(), blocks);
            if agreeing > 0 {
                return Some((node, next, agreeing, false));
            }
            self.split(node, next)?;
        }
        match self.child(node, blocks[0]) {
            Some(child) => {
                let shape = self.node(child).shape();
                let agreeing = self.node(child).agreement(shape, blocks);
                Some((child, shape.base(), agreeing, false))
            }
            None => match self.append(node, id, tier, blocks) {
                Some((from, count)) => Some((node, from, count, true)),
                None => {
                    let (child, count) = self.add_child(node, id, tier, blocks)?;
                    Some((child, 0, count, true))
                }
            },
        }
    }

    /// The child of a node that begins with this block.
    fn child(&self, node: NodeId, hash: u64) -> Option<NodeId> {
        match self.node(node).shape().children() {
            Children::None => None,
            Children::One(child) => {
                let first = self.node(child);
                (first.hash(first.shape().base()) == hash).then_some(child)
            }
            Children::Many(fork) => self.shared.children.find(&self.shared.arena, fork, hash),
        }
    }

    /// Adds blocks to a node that this member alone holds and that nothing follows: (first slot, count).
    fn append(&mut self, id: NodeId, member: u16, tier: Tier, blocks: &[u64]) -> Option<(usize, usize)> {
        let node = self.node(id);
        let shape = node.shape();
        let is_alone = node.ext.load(Ordering::Relaxed).is_null()
            && List(node.list.load(Ordering::Relaxed)) == List::of([member].into_iter());
        let free = NODE_BLOCKS - shape.end();
        if tier != Tier::Device || !is_alone || shape.children() != Children::None || free == 0 {
            return None;
        }
        let count = free.min(blocks.len());
        // The slots may have been in use before a truncation: who still sees the old hashes' shape must not see these.
        // Pairs with the fence in `Walk::look`.
        fence(Ordering::Release);
        for (slot, &hash) in (shape.end()..).zip(&blocks[..count]) {
            node.set_hash(slot, hash);
        }
        // From here on the member holds them: it is on the list of those that hold everything.
        node.publish(shape.with_len(shape.len() + count));
        Some((shape.end(), count))
    }

    /// A new child with as many blocks as fit, held by one member.
    fn add_child(&mut self, parent: NodeId, id: u16, tier: Tier, blocks: &[u64]) -> Option<(NodeId, usize)> {
        let child = self.nodes.allocate(&self.shared.arena)?;
        let count = blocks.len().min(NODE_BLOCKS);
        let node = self.node(child);
        for (slot, &hash) in blocks[..count].iter().enumerate() {
            node.set_hash(slot, hash);
        }
        node.next_part.store(0, Ordering::Relaxed);
        node.ext.store(std::ptr::null_mut(), Ordering::Relaxed);
        node.list.store(0, Ordering::Relaxed);
        let shape = Shape(node.shape().0).with(0, count, Children::None);
        node.publish(shape);
        if tier == Tier::Device {
            node.list.store(List::of([id].into_iter()).0, Ordering::Relaxed);
        } else {
            self.set_bits(child, id, tier, shape.mask());
        }
        self.link(parent, child, blocks[0]);
        Some((child, count))
    }

    /// Makes a finished node visible below its parent.
    fn link(&mut self, parent: NodeId, child: NodeId, first: u64) {
        let shape = self.node(parent).shape();
        match shape.children() {
            Children::None => {
                self.node(child).parent.store(parent, Ordering::Relaxed);
                self.node(parent).publish(shape.with_children(Children::One(child)));
            }
            Children::One(sibling) => {
                let fork = self.new_fork(parent);
                let sibling_node = self.node(sibling);
                let sibling_first = sibling_node.hash(sibling_node.shape().base());
                sibling_node.parent.store(fork | FORK, Ordering::Relaxed);
                self.add_to_table(fork, sibling_first, sibling);
                self.node(child).parent.store(fork | FORK, Ordering::Relaxed);
                self.add_to_table(fork, first, child);
                self.node(parent).publish(shape.with_children(Children::Many(fork)));
            }
            Children::Many(fork) => {
                self.node(child).parent.store(fork | FORK, Ordering::Relaxed);
                self.add_to_table(fork, first, child);
            }
        }
    }

    fn new_fork(&mut self, owner: NodeId) -> ForkId {
        let fork = Fork { owner, children: 0 };
        match self.free_forks.pop() {
            Some(id) => {
                self.forks[id as usize] = fork;
                id
            }
            None => {
                self.forks.push(fork);
                (self.forks.len() - 1) as ForkId
            }
        }
    }

    fn add_to_table(&mut self, fork: ForkId, first: u64, child: NodeId) {
        let shared = Arc::clone(&self.shared);
        shared.children.insert(&shared.arena, fork, first, child, &mut self.replaced);
        self.forks[fork as usize].children += 1;
        self.table_live += 1;
        self.shrink_below = self.shrink_below.max(self.table_live);
        self.take_replaced();
    }

    fn take_replaced(&mut self) {
        if self.replaced.is_empty() {
            return;
        }
        self.table_pieces = self.shared.children.pieces();
        let stamp = self.shared.grace.stamp();
        self.garbage.extend(self.replaced.drain(..).map(|replaced| (stamp, Garbage::Replaced(replaced))));
    }

    /// Cuts a node before slot `at`: the rest goes to a new node, which becomes its only child.
    fn split(&mut self, id: NodeId, at: usize) -> Option<()> {
        let lower_id = self.nodes.allocate(&self.shared.arena)?;
        let (upper, lower) = (self.shared.arena.node(id), self.shared.arena.node(lower_id));
        let shape = upper.shape();
        let rest = Shape(lower.shape().0).with(at, shape.end() - at, shape.children());
        #[cfg(loom)]
        if crate::broken(crate::Broken::EarlySplit) {
            lower.list.store(0, Ordering::Relaxed);
            upper.publish(shape.with(shape.base(), at - shape.base(), Children::One(lower_id)));
        }
        for slot in at..shape.end() {
            lower.set_hash(slot, upper.hash(slot));
        }
        let ext = upper.ext.load(Ordering::Relaxed);
        // SAFETY: linked, so not freed; only the writer frees.
        let copy = unsafe { ext.as_ref() }.map(|ext| ext.copied_for(rest.mask()));
        lower.list.store(upper.list.load(Ordering::Relaxed), Ordering::Relaxed);
        lower.next_part.store(upper.next_part.load(Ordering::Relaxed), Ordering::Relaxed);
        lower.parent.store(id, Ordering::Relaxed);
        let copy = copy.map_or(std::ptr::null_mut(), |copy| {
            self.ext_bytes += copy.bytes();
            Box::into_raw(copy)
        });
        lower.ext.store(copy, Ordering::Relaxed);
        lower.publish(rest);
        match shape.children() {
            Children::None => {}
            Children::One(child) => self.shared.arena.node(child).parent.store(lower_id, Ordering::Relaxed),
            Children::Many(fork) => self.forks[fork as usize].owner = lower_id,
        }
        let kept = shape.with(shape.base(), at - shape.base(), Children::One(lower_id));
        // From here on the rest belongs to the new node, for readers and for places.
        upper.publish(kept);
        upper.next_part.store(lower_id, Ordering::Relaxed);
        self.splits += 1;
        // SAFETY: as above.
        if let Some(ext) = unsafe { ext.as_ref() } {
            // Who held only the beginning now holds all of it. The old copy speaks of the old slots.
            let copy = ext.copied_for(kept.mask());
            self.set_ext(id, Some(copy));
            self.tidy(id);
            self.tidy(lower_id);
        }
        Some(())
    }

    // ---- who holds what

    /// The slots of a node that a number holds in a tier.
    fn mask(&self, id: NodeId, member: u16, tier: Tier) -> u32 {
        let node = self.node(id);
        let all = node.shape().mask();
        // SAFETY: linked, so not freed; only the writer frees.
        match unsafe { node.ext.load(Ordering::Relaxed).as_ref() } {
            Some(ext) => ext.mask(member, tier, all),
            None if tier == Tier::Device && List(node.list.load(Ordering::Relaxed)).contains(member) => all,
            None => 0,
        }
    }

    /// Publishes who holds a node; what spoke for it before waits for its grace period.
    fn set_ext(&mut self, id: NodeId, ext: Option<Box<Ext>>) {
        let new = ext.map_or(std::ptr::null_mut(), |ext| {
            self.ext_bytes += ext.bytes();
            Box::into_raw(ext)
        });
        // Release: pairs with the acquire in `Walk::look`.
        let old = self.node(id).ext.swap(new, Ordering::AcqRel);
        if !old.is_null() {
            self.garbage.push_back((self.shared.grace.stamp(), Garbage::Ext(old)));
        }
    }

    /// The node's holders as an [`Ext`], made from its list if need be.
    fn ext_of(&mut self, id: NodeId, member: u16, tier: Tier) -> &Ext {
        let node = self.node(id);
        if node.ext.load(Ordering::Relaxed).is_null() {
            let all = node.shape().mask();
            let list = List(node.list.load(Ordering::Relaxed));
            let highest = list.ids().chain([member]).max().map_or(0, usize::from);
            let mut ext = Box::new(Ext::new(highest / 64 + 1, tiers_for(tier), 2));
            for held in list.ids() {
                if let Some(larger) = ext.stored(held, Tier::Device, all, all) {
                    ext = larger;
                }
            }
            self.set_ext(id, Some(ext));
        }
        // SAFETY: not null: it was there or has just been put there; only the writer frees.
        unsafe { &*self.node(id).ext.load(Ordering::Relaxed) }
    }

    /// A number now holds these slots too.
    fn set_bits(&mut self, id: NodeId, member: u16, tier: Tier, new: u32) {
        let node = self.node(id);
        let all = node.shape().mask();
        let held = self.mask(id, member, tier);
        if held & new == new {
            return;
        }
        let list = List(node.list.load(Ordering::Relaxed));
        let is_list = node.ext.load(Ordering::Relaxed).is_null();
        if is_list && tier == Tier::Device && new == all && list.len() < LIST_MAX {
            // Release: pairs with the acquire in `Walk::look`.
            node.list.store(list.with(member).0, Ordering::Release);
            return;
        }
        self.set_mask(id, member, tier, held | new);
        if new & all != all || held != 0 {
            self.split_if_ragged(id);
        }
        self.tidy(id);
    }

    fn set_mask(&mut self, id: NodeId, member: u16, tier: Tier, mask: u32) {
        let all = self.node(id).shape().mask();
        if let Some(larger) = self.ext_of(id, member, tier).stored(member, tier, mask, all) {
            self.set_ext(id, Some(larger));
        }
    }

    /// When many hold only the beginning of a node, it is cut where most of them end: afterwards each of them
    /// is a bit.
    fn split_if_ragged(&mut self, id: NodeId) {
        let shape = self.node(id).shape();
        // SAFETY: linked, so not freed; only the writer frees.
        let Some(ext) = (unsafe { self.node(id).ext.load(Ordering::Relaxed).as_ref() }) else { return };
        if ext.partial_count(shape.mask()) <= PARTIAL_MAX {
            return;
        }
        let mut ends = [0_u32; NODE_BLOCKS + 1];
        for (_, _, mask) in ext.held(shape.mask()) {
            let end = shape.base() + (mask >> shape.base()).trailing_ones() as usize;
            if end > shape.base() && end < shape.end() {
                ends[end] += 1;
            }
        }
        let most = (0..ends.len()).max_by_key(|&end| ends[end]).filter(|&end| ends[end] > 1);
        if let Some(at) = most {
            // Without a node to spare it stays ragged: slower, not wrong.
            let _split = self.split(id, at);
        }
    }

    /// A number no longer holds these slots.
    fn clear_bits(&mut self, id: NodeId, member: u16, tier: Tier, gone: u32) {
        let node = self.node(id);
        let shape = node.shape();
        let left = self.mask(id, member, tier) & !gone;
        let list = List(node.list.load(Ordering::Relaxed));
        if node.ext.load(Ordering::Relaxed).is_null() {
            let is_beginning = left == bits(shape.base(), shape.base() + left.count_ones() as usize);
            if left == 0 {
                node.list.store(list.without(member).0, Ordering::Release);
                self.free_if_unused(id);
                return;
            }
            if list.len() == 1 && is_beginning && shape.children() == Children::None {
                // Nobody has the last blocks any more.
                node.publish(shape.with_len(left.count_ones() as usize));
                return;
            }
        }
        self.set_mask(id, member, tier, left);
        self.tidy(id);
    }

    /// Makes a node's holders a list again when that can say it, and frees what nobody holds.
    fn tidy(&mut self, id: NodeId) {
        let node = self.node(id);
        let shape = node.shape();
        // SAFETY: linked, so not freed; only the writer frees.
        let Some(ext) = (unsafe { node.ext.load(Ordering::Relaxed).as_ref() }) else { return };
        let count = ext.count.load(Ordering::Relaxed) as usize;
        if count > LIST_MAX {
            return;
        }
        let mut held = [(0, Tier::Device, 0); LIST_MAX];
        let mut len = 0;
        for (slot, pair) in held.iter_mut().zip(ext.held(shape.mask())) {
            *slot = pair;
            len += 1;
        }
        let held = &held[..len];
        if held.iter().all(|&(_, tier, mask)| tier == Tier::Device && mask == shape.mask()) {
            // The list before the extension goes: readers look at the extension first.
            node.list.store(List::of(held.iter().map(|pair| pair.0)).0, Ordering::Release);
            self.set_ext(id, None);
            self.free_if_unused(id);
        } else if let &[(member, Tier::Device, mask)] = held
            && shape.children() == Children::None
            && mask == bits(shape.base(), shape.base() + mask.count_ones() as usize)
        {
            // One member is left, with the beginning: the rest is gone. The shape first, so that no reader
            // takes the member for a holder of the old length.
            node.publish(shape.with_len(mask.count_ones() as usize));
            node.list.store(List::of([member].into_iter()).0, Ordering::Release);
            self.set_ext(id, None);
        }
    }

    /// Unlinks a node that nobody holds and that nothing follows, and then perhaps the one before it.
    fn free_if_unused(&mut self, mut id: NodeId) {
        while id != ROOT {
            let node = self.node(id);
            let shape = node.shape();
            let is_held =
                node.list.load(Ordering::Relaxed) != 0 || !node.ext.load(Ordering::Relaxed).is_null();
            if is_held || shape.children() != Children::None || shape.len() == 0 {
                return;
            }
            let parent = node.parent.load(Ordering::Relaxed);
            let first = node.hash(shape.base());
            let owner = if parent & FORK == 0 {
                let shape = self.node(parent).shape();
                self.node(parent).publish(shape.with_children(Children::None));
                parent
            } else {
                self.unlink_from_fork(parent & !FORK, first, id)
            };
            let before = self.node(owner);
            if before.next_part.load(Ordering::Relaxed) == id {
                before.next_part.store(0, Ordering::Relaxed);
            }
            // No length: whoever holds on to the number sees that it is gone.
            let gone = self.node(id);
            gone.publish(gone.shape().with_len(0));
            gone.next_part.store(ROOT, Ordering::Relaxed);
            self.garbage.push_back((self.shared.grace.stamp(), Garbage::Node(id)));
            id = owner;
        }
    }

    fn unlink_from_fork(&mut self, fork: ForkId, first: u64, child: NodeId) -> NodeId {
        self.shared.children.remove(fork, first, child);
        self.table_live -= 1;
        let state = &mut self.forks[fork as usize];
        state.children -= 1;
        let owner = state.owner;
        if state.children == 0 && owner != ROOT {
            let shape = self.node(owner).shape();
            self.node(owner).publish(shape.with_children(Children::None));
            self.garbage.push_back((self.shared.grace.stamp(), Garbage::Fork(fork)));
        }
        owner
    }

    // ---- memory

    /// Frees what no reader can see any more.
    fn collect(&mut self, at_least: usize) {
        let is_sparse = self.table_live * 8 < self.table_pieces * crate::limits::TABLE_SLOTS;
        if self.table_pieces > 1 && is_sparse && self.table_live < self.shrink_below {
            // If it does not work out, not again before half of the rest is gone.
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
                Some((_, Garbage::Ext(ext))) => {
                    // SAFETY: made by `Box::into_raw`, unlinked, and its grace period is over.
                    let ext = unsafe { Box::from_raw(ext) };
                    self.ext_bytes -= ext.bytes();
                }
                Some((_, Garbage::Replaced(replaced))) => replaced.free(),
                None => return,
            }
        }
    }

    /// Whether `blocks` more can be stored within the bound, whatever they are.
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

    // ---- questions

    fn member(&self, member: Member) -> Option<&MemberState> {
        self.members.get(member.index())?.as_deref()
    }

    pub(crate) fn holds(&self, member: Member, key: EngineHash) -> bool {
        self.member(member).is_some_and(|state| state.keys.find(&self.pool, key).is_some())
    }

    pub(crate) fn entries_of(&self, member: Member) -> usize {
        self.member(member).map_or(0, |state| state.keys.len())
    }

    pub(crate) fn held(&self, member: Member) -> Vec<Held> {
        let Some(state) = self.member(member) else { return Vec::new() };
        let by_place: HashMap<(NodeId, usize), EngineHash> = state
            .keys
            .iter(&self.pool)
            .filter_map(|(key, place)| Some((self.resolved(place)?, key)))
            .collect();
        let mut out = Vec::with_capacity(by_place.len());
        let mut is_out = std::collections::HashSet::with_capacity(by_place.len());
        let mut is_broken = std::collections::HashSet::new();
        let mut chain = Vec::new();
        for &start in by_place.keys() {
            // Up to a block that is out already, or to the root; down again from there.
            let mut at = Some(start);
            while let Some(place) = at {
                if is_out.contains(&place) || is_broken.contains(&place) || !by_place.contains_key(&place) {
                    break;
                }
                chain.push(place);
                at = self.before(place);
            }
            let is_whole = at.is_none_or(|place| is_out.contains(&place));
            while let Some(place) = chain.pop() {
                let (Some(&key), true) = (by_place.get(&place), is_whole) else {
                    is_broken.insert(place);
                    continue;
                };
                let (node, slot) = place;
                let copies = Tier::ALL.map(|tier| {
                    let first = self.mask(node, state.id, tier) >> slot & 1;
                    first + state.extra_copies.get(&(key, tier)).copied().unwrap_or(0)
                });
                let parent = self.before(place).and_then(|before| by_place.get(&before)).copied();
                out.push(Held { key, parent, block: self.node(node).hash(slot), copies });
                is_out.insert(place);
            }
        }
        out
    }

    /// The block before a block; `None` at the start of a chain.
    fn before(&self, (node, slot): (NodeId, usize)) -> Option<(NodeId, usize)> {
        if slot > self.node(node).shape().base() {
            return Some((node, slot - 1));
        }
        let parent = self.node(node).parent.load(Ordering::Relaxed);
        let owner = if parent & FORK == 0 { parent } else { self.forks[(parent & !FORK) as usize].owner };
        (owner != ROOT).then(|| (owner, self.node(owner).shape().end() - 1))
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // A reader may be in the middle of a look-up: what it may see goes with the last of them.
        let left = self.garbage.drain(..).map(|(_, garbage)| garbage);
        self.shared.leftovers.lock().unwrap_or_else(PoisonError::into_inner).extend(left);
    }
}

impl Garbage {
    /// Frees it. No reader may be left.
    pub(crate) fn free_at_last(self) {
        match self {
            // SAFETY: made by `Box::into_raw` and unlinked, and nobody is left who could see it.
            Self::Ext(ext) => drop(unsafe { Box::from_raw(ext) }),
            Self::Replaced(replaced) => replaced.free(),
            Self::Node(_) | Self::Fork(_) => {}
        }
    }
}
