//! Queries that only the writer answers.

use super::*;

impl Writer {
    pub(super) fn member(&self, member: Member) -> Option<&MemberState> {
        self.members.get(member.index())?.as_deref()
    }

    pub(crate) fn holds(&self, member: Member, key: EngineHash) -> bool {
        self.member(member).is_some_and(|state| state.keys.find(&self.pool, key).is_some())
    }

    pub(crate) fn entries_of(&self, member: Member) -> usize {
        self.member(member).map_or(0, |state| state.keys.len())
    }

    pub(crate) fn blocks_of(&self, member: Member) -> [u32; 4] {
        self.member(member).map_or([0; 4], |state| self.blocks_held[usize::from(state.id)])
    }

    pub(crate) fn held(&self, member: Member) -> Vec<Held> {
        let Some(state) = self.member(member) else { return Vec::new() };
        let by_position: HashMap<(NodeId, usize), EngineHash> = state
            .keys
            .iter(&self.pool)
            .filter_map(|(key, position)| Some((self.resolved(position)?, key)))
            .collect();
        let mut out = Vec::with_capacity(by_position.len());
        let mut is_out = std::collections::HashSet::with_capacity(by_position.len());
        let mut is_broken = std::collections::HashSet::new();
        let mut chain = Vec::new();
        for &start in by_position.keys() {
            // Walks up to a block that was written already, or to the root, and down again from there.
            let mut at = Some(start);
            while let Some(position) = at {
                if is_out.contains(&position)
                    || is_broken.contains(&position)
                    || !by_position.contains_key(&position)
                {
                    break;
                }
                chain.push(position);
                at = self.before(position);
            }
            let is_whole = at.is_none_or(|position| is_out.contains(&position));
            while let Some(position) = chain.pop() {
                let (Some(&key), true) = (by_position.get(&position), is_whole) else {
                    is_broken.insert(position);
                    continue;
                };
                let (node, slot) = position;
                let copies = Tier::ALL.map(|tier| {
                    let first = self.mask(node, state.id, tier) >> slot & 1;
                    first + state.extra_copies.get(&(key, tier)).copied().unwrap_or(0)
                });
                let parent = self.before(position).and_then(|before| by_position.get(&before)).copied();
                out.push(Held { key, parent, block: self.node(node).hash(slot), copies });
                is_out.insert(position);
            }
        }
        out
    }

    /// The block before a block; `None` at the start of a chain.
    pub(super) fn before(&self, (node, slot): (NodeId, usize)) -> Option<(NodeId, usize)> {
        if slot > self.node(node).shape().base() {
            return Some((node, slot - 1));
        }
        let parent = self.node(node).parent.load(Ordering::Relaxed);
        let owner = if parent & FORK == 0 { parent } else { self.forks[(parent & !FORK) as usize].owner };
        (owner != ROOT).then(|| (owner, self.node(owner).shape().end() - 1))
    }
}
