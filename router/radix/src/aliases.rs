//! Blocks of one member for which the engine has more than one hash: it distinguishes blocks that have one block hash here (by
//! the offset of an image in its block, for example), or the engine restarted without an event.
//!
//! For each such block: the tiers in which each name holds it. The first name is not stored: when the second one comes, all
//! copies belong to the first, and any name that is not among the others is the first.

use std::collections::HashMap;

use crate::holders::Tier;
use crate::keys::EngineHash;
use crate::node::NodeId;

/// Largest number of blocks with several names, per member. Further names are not stored.
const BLOCKS_MAX: usize = 16_384;
/// Largest number of names of a block besides the first.
const NAMES_MAX: usize = 64;

/// The names of one block, each with its tiers as bits.
#[derive(Debug, Default)]
pub(crate) struct Names {
    first: u8,
    others: Vec<(EngineHash, u8)>,
}

impl Names {
    /// Tiers of a name, as bits.
    pub(crate) fn of(&mut self, key: EngineHash) -> &mut u8 {
        match self.others.iter().position(|other| other.0 == key) {
            Some(at) => &mut self.others[at].1,
            None => &mut self.first,
        }
    }

    /// Tiers of all names, as bits.
    pub(crate) fn all(&self) -> u8 {
        self.others.iter().fold(self.first, |all, other| all | other.1)
    }
}

#[derive(Debug, Default)]
pub(crate) struct Aliases {
    /// Names by position (node, index in its run), valid at `splits` splits of the index.
    positions: HashMap<(NodeId, usize), Names>,
    splits: u64,
}

impl Aliases {
    pub(crate) fn is_empty(&self) -> bool {
        self.positions.is_empty()
    }

    /// Approximate size in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.positions.capacity() * 128
    }

    pub(crate) fn names(&self, position: (NodeId, usize)) -> Option<&Names> {
        self.positions.get(&position)
    }

    pub(crate) fn names_mut(&mut self, position: (NodeId, usize)) -> Option<&mut Names> {
        self.positions.get_mut(&position)
    }

    /// Adds a name for a block that is held in the tiers `held`. False when there is no room.
    pub(crate) fn add(&mut self, position: (NodeId, usize), key: EngineHash, tier: Tier, held: u8) -> bool {
        if self.positions.len() >= BLOCKS_MAX && !self.positions.contains_key(&position) {
            return false;
        }
        let names = self.positions.entry(position).or_insert(Names { first: held, others: Vec::new() });
        if names.others.len() >= NAMES_MAX {
            return false;
        }
        names.others.push((key, 1 << tier as u8));
        true
    }

    /// Removes names without tiers, and a block that has one name again.
    pub(crate) fn remove_unused(&mut self, position: (NodeId, usize)) {
        let Some(names) = self.positions.get_mut(&position) else { return };
        names.others.retain(|other| other.1 != 0);
        let count = names.others.len() + usize::from(names.first != 0);
        if count <= 1 {
            self.positions.remove(&position);
        }
    }

    /// Updates the positions after splits.
    pub(crate) fn refresh(
        &mut self,
        splits: u64,
        resolve: impl Fn(NodeId, usize) -> Option<(NodeId, usize)>,
    ) {
        if std::mem::replace(&mut self.splits, splits) == splits || self.positions.is_empty() {
            return;
        }
        let before = std::mem::take(&mut self.positions);
        let moved =
            before.into_iter().filter_map(|((node, slot), names)| Some((resolve(node, slot)?, names)));
        self.positions.extend(moved);
    }
}
