//! Several names of an engine for one block.

use super::*;

impl Writer {
    /// Updates the positions after splits.
    pub(super) fn refresh_aliases(&self, state: &mut MemberState) {
        state.aliases.refresh(self.splits, |node, slot| self.resolved(NodeSlot::new(node, slot)));
    }

    /// Adds a name, which was unknown or named another block, to a block that the member holds in the tiers `held`.
    pub(super) fn add_name(
        &mut self,
        state: &mut MemberState,
        position: NodeSlot,
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
        let Some(position) = self.resolved(position) else { return };
        if state.aliases.add(position, key, tier, held) {
            *(if held >> tier as u8 & 1 == 1 { &mut outcome.copies } else { &mut outcome.changed }) += 1;
            return;
        }
        // Too many names: this one is not stored. Its blocks count for the other names.
        if let Some(found) = state.keys.locate(&self.pool, key) {
            state.keys.remove(&mut self.pool, found);
        }
        outcome.refused += 1;
    }

    /// Stores a block once more under a known name.
    pub(super) fn store_name(
        &mut self,
        state: &mut MemberState,
        position: NodeSlot,
        key: EngineHash,
        tier: Tier,
        held: u8,
        outcome: &mut Outcome,
    ) {
        self.refresh_aliases(state);
        let position = self.resolved(position);
        let names = position.and_then(|position| state.aliases.names_mut(position));
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

    /// Removes a name of a block with several names from a tier.
    pub(super) fn remove_name(
        &mut self,
        state: &mut MemberState,
        position: (NodeId, usize),
        key: EngineHash,
        tier: Tier,
        outcome: &mut Outcome,
    ) {
        let Some(names) = state.aliases.names_mut(position) else { return };
        let own = names.of(key);
        let had = *own >> tier as u8 & 1 == 1;
        *own &= !(1 << tier as u8);
        let is_gone = *own == 0;
        let is_last = had && names.all() >> tier as u8 & 1 == 0;
        state.aliases.remove_unused(position);
        if is_gone && let Some(found) = state.keys.locate(&self.pool, key) {
            state.keys.remove(&mut self.pool, found);
        }
        match (had, is_last) {
            (false, _) => outcome.unknown += 1,
            (true, false) => outcome.copies += 1,
            (true, true) => {
                self.clear_bits(position.0, state.id, tier, 1 << position.1);
                outcome.changed += 1;
            }
        }
    }

    /// Removes a name that no longer stands for a block in any tier.
    pub(super) fn drop_name(&mut self, state: &mut MemberState, position: (NodeId, usize), key: EngineHash) {
        self.refresh_aliases(state);
        let left = state.aliases.names_mut(position).map_or(0, |names| {
            *names.of(key) = 0;
            names.all()
        });
        state.aliases.remove_unused(position);
        for tier in Tier::ALL {
            let Some((node, slot)) = self.resolved(NodeSlot::new(position.0, position.1)) else { return };
            if left >> tier as u8 & 1 == 0 && self.mask(node, state.id, tier) >> slot & 1 == 1 {
                self.clear_bits(node, state.id, tier, 1 << slot);
            }
        }
    }

    /// Moves a name from one tier to another; returns whether no other name holds the block in the first.
    pub(super) fn move_name(
        &mut self,
        state: &mut MemberState,
        position: (NodeId, usize),
        key: EngineHash,
        from: Tier,
        to: Tier,
    ) -> bool {
        if state.aliases.is_empty() {
            return true;
        }
        self.refresh_aliases(state);
        let Some(names) = state.aliases.names_mut(position) else { return true };
        let own = names.of(key);
        *own = *own & !(1 << from as u8) | 1 << to as u8;
        names.all() >> from as u8 & 1 == 0
    }
}
