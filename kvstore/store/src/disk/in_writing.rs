//! Writes to the disk that are under way: the block stays in host memory until its write has ended.

use std::collections::HashMap;

use kvstore_block::BlockIdentity;

/// A write that is under way.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct WriteState {
    /// Where it goes.
    slot: u32,
    /// The block was forgotten meanwhile.
    pub(crate) is_forgotten: bool,
    /// It leaves host memory once it is written.
    is_leaving: bool,
    /// That host memory has it no more was told meanwhile.
    pub(crate) is_told: bool,
    /// The device does not answer.
    is_stuck: bool,
}

/// By block.
#[derive(Debug, Default)]
pub(crate) struct InWriting(HashMap<BlockIdentity, WriteState>);

impl InWriting {
    pub(crate) fn begin(&mut self, identity: BlockIdentity, slot: u32, is_leaving: bool) {
        self.0.insert(identity, WriteState { slot, is_leaving, ..WriteState::default() });
    }

    /// Slots that blocks are being written to which were forgotten meanwhile.
    pub(crate) fn forgotten_slots(&self) -> impl Iterator<Item = u32> {
        self.0.values().filter(|state| state.is_forgotten).map(|state| state.slot)
    }

    pub(crate) fn end(&mut self, identity: &BlockIdentity) -> WriteState {
        self.0.remove(identity).unwrap_or_default()
    }

    pub(crate) fn contains(&self, identity: &BlockIdentity) -> bool {
        self.0.contains_key(identity)
    }

    /// Writes that can still be answered.
    pub(crate) fn count(&self) -> usize {
        self.0.values().filter(|state| !state.is_stuck).count()
    }

    /// Whether a write of the block can still be answered.
    pub(crate) fn is_to_end(&self, identity: &BlockIdentity) -> bool {
        self.0.get(identity).is_some_and(|state| !state.is_stuck)
    }

    /// Whether listeners believe that host memory has a block that is leaving it.
    pub(crate) fn is_believed_on_host(&self, identity: &BlockIdentity) -> bool {
        self.0.get(identity).is_some_and(|state| state.is_leaving && !state.is_told)
    }

    /// That host memory has the block no more was told.
    pub(crate) fn told(&mut self, identity: &BlockIdentity) {
        if let Some(state) = self.0.get_mut(identity) {
            state.is_told = true;
        }
    }

    /// What the write brings is not wanted any more.
    pub(crate) fn forget(&mut self, identity: &BlockIdentity) {
        if let Some(state) = self.0.get_mut(identity) {
            state.is_forgotten = true;
        }
    }

    /// The device does not answer.
    pub(crate) fn stuck(&mut self, identity: &BlockIdentity) {
        if let Some(state) = self.0.get_mut(identity) {
            state.is_stuck = true;
        }
    }
}
