//! Blocks of one member whose parent is not known, and which wait for it. Their number is limited.
//!
//! Rare: a feed that lost a message, or an engine that names a block whose parent it has just dropped.

use std::collections::HashMap;

use crate::holders::{TIERS, Tier};
use crate::keys::EngineHash;
use crate::limits::ORPHANS_MAX;

#[derive(Debug)]
struct Waiting {
    parent: EngineHash,
    block: u64,
    copies: [u32; TIERS],
}

#[derive(Debug, Default)]
pub(crate) struct OrphanBlocks {
    waiting: HashMap<EngineHash, Waiting>,
    by_parent: HashMap<EngineHash, Vec<EngineHash>>,
}

impl OrphanBlocks {
    pub(crate) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Approximate size in bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.waiting.capacity() * 64 + self.by_parent.capacity() * 80
    }

    /// Removes a block that was placed in another way and returns its waiting copies; zeros if it did not wait.
    pub(crate) fn forget(&mut self, key: EngineHash) -> [u32; TIERS] {
        let Some(waiting) = self.waiting.remove(&key) else { return [0; TIERS] };
        if let Some(siblings) = self.by_parent.get_mut(&waiting.parent) {
            siblings.retain(|&other| other != key);
            if siblings.is_empty() {
                self.by_parent.remove(&waiting.parent);
            }
        }
        waiting.copies
    }

    /// Adds a copy of a block in `tier` that waits for `parent`. False when there is no room.
    pub(crate) fn add(&mut self, parent: EngineHash, key: EngineHash, block: u64, tier: Tier) -> bool {
        if parent == key {
            return false; // It would wait for itself.
        }
        match self.waiting.get_mut(&key) {
            Some(waiting) if waiting.parent == parent && waiting.block == block => {
                waiting.copies[tier as usize] += 1;
                return true;
            }
            // The engine uses the name for another block now.
            Some(_) => {
                self.forget(key);
            }
            None => {}
        }
        if self.waiting.len() >= ORPHANS_MAX {
            return false;
        }
        let mut copies = [0; TIERS];
        copies[tier as usize] = 1;
        self.waiting.insert(key, Waiting { parent, block, copies });
        self.by_parent.entry(parent).or_default().push(key);
        true
    }

    /// Removes a copy. False when no such block waits.
    pub(crate) fn remove(&mut self, key: EngineHash, tier: Tier) -> bool {
        let Some(waiting) = self.waiting.get_mut(&key) else { return false };
        let copies = &mut waiting.copies[tier as usize];
        if *copies == 0 {
            return false;
        }
        *copies -= 1;
        if waiting.copies.iter().all(|&copies| copies == 0) {
            let parent = waiting.parent;
            self.waiting.remove(&key);
            if let Some(siblings) = self.by_parent.get_mut(&parent) {
                siblings.retain(|&other| other != key);
                if siblings.is_empty() {
                    self.by_parent.remove(&parent);
                }
            }
        }
        true
    }

    /// Removes and returns the children of a block that was just placed: (key, block, copies per tier).
    pub(crate) fn take(&mut self, parent: EngineHash) -> Vec<(EngineHash, u64, [u32; TIERS])> {
        let keys = self.by_parent.remove(&parent).unwrap_or_default();
        let found = keys.into_iter().filter_map(|key| Some((key, self.waiting.remove(&key)?)));
        found.map(|(key, waiting)| (key, waiting.block, waiting.copies)).collect()
    }
}
