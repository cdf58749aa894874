//! Storing, removing and moving of members' blocks.

use std::iter::zip;

use super::*;

impl Writer {
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

    pub(super) fn stored_chunk(
        &mut self,
        member: Member,
        tier: Tier,
        parent: Option<EngineHash>,
        keys: &[EngineHash],
        blocks: &[u64],
    ) -> Outcome {
        let mut outcome = Outcome::default();
        // Taken out of the list meanwhile, so that the tree can be borrowed as well.
        let Some(mut state) = self.members.get_mut(member.index()).and_then(Option::take) else {
            return Outcome { refused: keys.len() as u64, ..outcome };
        };
        let bytes_before = state.bytes();
        let at = match parent {
            None => Some((ROOT, 0)),
            Some(parent) => self.position_of(&state, parent).map(|(node, slot)| (node, slot + 1)),
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
        // Places blocks that waited for the new ones, and blocks that waited for those: a chain of any length, one step at a time.
        while let Some(parent) = state.awaited.pop() {
            self.place_parked(&mut state, parent, &mut outcome);
        }
        self.members_bytes = self.members_bytes + state.bytes() - bytes_before;
        self.members[member.index()] = Some(state);
        outcome
    }

    /// Keys are those of `source`. Keys that could not be placed are appended to `unplaced`: blocks that `source` does not hold,
    /// and at the memory limit new ones.
    pub(crate) fn stored_as(
        &mut self,
        (member, tier): (Member, Tier),
        source: Member,
        keys: &[EngineHash],
        unplaced: &mut Vec<EngineHash>,
    ) -> Outcome {
        let mut outcome = Outcome::default();
        let Some(mut state) = self.members.get_mut(member.index()).and_then(Option::take) else {
            unplaced.extend_from_slice(keys);
            return Outcome { unknown: keys.len() as u64, ..outcome };
        };
        let bytes_before = state.bytes();
        let has_room = self.has_room(keys.len());
        for &key in keys {
            let refused = outcome.refused;
            if !has_room {
                self.count_known(&mut state, tier, &[key], &mut outcome);
            } else {
                let position = match source == member {
                    true => self.position_of(&state, key),
                    false => self.member(source).and_then(|source| self.position_of(source, key)),
                };
                let Some(position) = position else {
                    outcome.unknown += 1;
                    unplaced.push(key);
                    continue;
                };
                self.add_copy(&mut state, tier, position, key, &mut outcome);
                // A key either has a position or waits for its parent.
                for (tier, copies) in zip(Tier::ALL, state.parked.forget(key)) {
                    for _ in 0..copies {
                        // The previous copy may have split the node.
                        let Some(position) = self.position_of(&state, key) else { break };
                        self.add_copy(&mut state, tier, position, key, &mut outcome);
                    }
                }
            }
            if outcome.refused > refused {
                unplaced.push(key);
            }
        }
        while let Some(parent) = state.awaited.pop() {
            self.place_parked(&mut state, parent, &mut outcome);
        }
        self.members_bytes = self.members_bytes + state.bytes() - bytes_before;
        self.members[member.index()] = Some(state);
        self.sweep_some(SWEEP_STEP);
        self.collect(COLLECT_AT);
        outcome
    }

    /// Adds one copy of a block that is in the tree already.
    fn add_copy(
        &mut self,
        state: &mut MemberState,
        tier: Tier,
        position: (NodeId, usize),
        key: EngineHash,
        outcome: &mut Outcome,
    ) {
        let block = self.node(position.0).hash(position.1);
        let after = self.before(position).map_or((ROOT, 0), |(node, slot)| (node, slot + 1));
        self.place_run(state, tier, after, &[key], &[block], outcome);
    }

    /// At the memory limit no new block is added; but one more copy of a present block must be counted, or the next removal would
    /// remove the block while the engine still has it.
    pub(super) fn count_known(
        &mut self,
        state: &mut MemberState,
        tier: Tier,
        keys: &[EngineHash],
        outcome: &mut Outcome,
    ) {
        for &key in keys {
            let position = self.position_of(state, key);
            let is_held =
                position.is_some_and(|(node, slot)| self.mask(node, state.id, tier) >> slot & 1 == 1);
            if is_held {
                *state.extra_copies.entry((key, tier)).or_default() += 1;
                outcome.copies += 1;
            } else {
                outcome.refused += 1;
            }
        }
    }

    /// Places a run of blocks after slot `next - 1` of a node, in one step per node.
    pub(super) fn place_run(
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
            // Slots of the node that the member held before, in each tier.
            let before = if is_new { [0; 4] } else { Tier::ALL.map(|tier| self.mask(at, state.id, tier)) };
            // First of all: a node without holders could be taken for unused.
            self.set_bits(at, state.id, tier, bits(from, from + count));
            let mut renamed = Vec::new();
            for (offset, &key) in keys[done..done + count].iter().enumerate() {
                if let Some(&ahead) = keys.get(done + offset + AHEAD) {
                    state.keys.prefetch(&self.pool, ahead);
                }
                let (slot, position) = (from + offset, NodeSlot::new(at, from + offset));
                let tiers = Tier::ALL.into_iter().filter(|&tier| before[tier as usize] >> slot & 1 == 1);
                let held = tiers.fold(0_u8, |held, tier| held | 1 << tier as u8);
                match state.keys.insert(&mut self.pool, key, position) {
                    Some(old) if old != position && self.resolved(old) != self.resolved(position) => {
                        // The engine now uses the name for another block: the newer one counts.
                        renamed.push((key, old));
                        self.add_name(state, position, key, tier, held, outcome);
                    }
                    Some(_) => self.store_name(state, position, key, tier, held, outcome),
                    None if held == 0 => outcome.changed += 1,
                    None => self.add_name(state, position, key, tier, held, outcome),
                }
            }
            for (key, old) in renamed {
                Tier::ALL.iter().for_each(|&tier| {
                    state.extra_copies.remove(&(key, tier));
                });
                if let Some(position) = self.resolved(old) {
                    self.drop_name(state, position, key);
                }
            }
            if state.parked.len() > 0 {
                state.awaited.extend(&keys[done..done + count]);
            }
            done += count;
            (node, next) = (at, from + count);
            if self.node(at).shape().end() < next {
                // Splitting a ragged node, or removing another block, has moved the node's end.
                let Some((resolved, slot)) = self.resolved(NodeSlot::new(at, from + count - 1)) else {
                    outcome.refused += (blocks.len() - done) as u64;
                    return;
                };
                (node, next) = (resolved, slot + 1);
            }
        }
    }

    /// Places a block of a run whose parent is unknown.
    pub(super) fn place_orphan(
        &mut self,
        state: &mut MemberState,
        tier: Tier,
        parent: EngineHash,
        key: EngineHash,
        block: u64,
        outcome: &mut Outcome,
    ) {
        // The block's own parent may be known, or the block itself: then placing continues from there.
        let before = match self.position_of(state, parent) {
            Some(position) => Some(position),
            None => self.position_of(state, key).and_then(|position| self.before(position)),
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
    pub(super) fn place_parked(
        &mut self,
        state: &mut MemberState,
        parent: EngineHash,
        outcome: &mut Outcome,
    ) {
        for (key, block, copies) in state.parked.take(parent) {
            for (tier, copies) in Tier::ALL.into_iter().zip(copies) {
                for _ in 0..copies {
                    let Some((node, slot)) = self.position_of(state, parent) else {
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
        // Adjacent blocks are removed together: slots of one node are gathered and cleared at once.
        let mut gathered = (ROOT, 0_u32);
        for (at, &key) in keys.iter().enumerate() {
            if let Some(&ahead) = keys.get(at + AHEAD) {
                state.keys.prefetch(&self.pool, ahead);
            }
            let is_single = state.extra_copies.is_empty() || !state.extra_copies.contains_key(&(key, tier));
            let is_plain = tier == Tier::Device && is_single && state.aliases.is_empty();
            let found = state.keys.locate(&self.pool, key).filter(|_| is_plain);
            let position = found.and_then(|found| self.resolved(found.position));
            let (node, slot) = position.unwrap_or((ROOT, 0));
            if node != gathered.0 && gathered.1 != 0 {
                self.clear_bits(gathered.0, state.id, tier, gathered.1);
                gathered.1 = 0;
            }
            match found {
                Some(found)
                    if position.is_some()
                        && self.node(node).holder_sets.load(Ordering::Relaxed).is_null() =>
                {
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
            let position =
                self.member(member).and_then(|state| Some((state.id, self.position_of(state, key)?)));
            let Some((id, (node, slot))) =
                position.filter(|&(id, (node, slot))| self.mask(node, id, from) >> slot & 1 == 1)
            else {
                outcome.unknown += 1;
                continue;
            };
            // Added to the new tier before it is removed from the old one. A reader that loads them in the other order may miss it, once.
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
            if let Some((node, slot)) = self.resolved(NodeSlot::new(node, slot)) {
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

    pub(super) fn remove_one(
        &mut self,
        state: &mut MemberState,
        tier: Tier,
        key: EngineHash,
        outcome: &mut Outcome,
    ) {
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
        let Some((node, slot)) = self.resolved(found.position) else {
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
}
