//! A store in memory: forgets the oldest block when there is no room.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::backend::{Backend, BackendError, Identity, PutOutcome, Statistics};
use crate::buffers::{Destination, Source};

/// Counted for each block beyond its bytes: its places in the map, which is at most 16/7 as large as it has entries of 56
/// bytes, and in the order, of 24 bytes for up to two entries, and what the allocator adds to two allocations.
const BLOCK_OVERHEAD_BYTES: u64 = 256;

/// A bounded map.
#[derive(Debug)]
pub struct MemoryBackend {
    bytes_max: usize,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    blocks: HashMap<Identity, Block>,
    /// Identities from the oldest on, also of blocks that were deleted since.
    order: VecDeque<(Identity, u64)>,
    next: u64,
    statistics: Statistics,
}

#[derive(Debug)]
struct Block {
    meta: Box<[u8]>,
    payload: Box<[u8]>,
    number: u64,
}

impl Block {
    fn bytes(&self) -> u64 {
        (self.meta.len() + self.payload.len()) as u64
    }
}

impl MemoryBackend {
    /// An empty store for at most so many bytes, of which each block takes 256 beyond its own.
    #[must_use]
    pub fn new(bytes_max: usize) -> Self {
        let statistics = Statistics { bytes_max: bytes_max as u64, ..Statistics::default() };
        Self { bytes_max, state: Mutex::new(State { statistics, ..State::default() }) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// What the blocks take in memory.
    fn occupied(&self) -> u64 {
        self.statistics.bytes + self.statistics.blocks * BLOCK_OVERHEAD_BYTES
    }

    fn forget(&mut self, identity: &Identity) -> bool {
        let Some(block) = self.blocks.remove(identity) else { return false };
        self.statistics.bytes -= block.bytes();
        self.statistics.blocks -= 1;
        true
    }
}

impl Backend for MemoryBackend {
    fn matched(&self, identities: &[Identity]) -> Result<usize, BackendError> {
        let state = self.state();
        Ok(identities.iter().take_while(|identity| state.blocks.contains_key(*identity)).count())
    }

    fn get(
        &self,
        identity: &Identity,
        meta: &mut Destination,
        payload: &mut Destination,
    ) -> Result<bool, BackendError> {
        let state = &mut *self.state();
        let Some(block) = state.blocks.get(identity) else {
            state.statistics.misses += 1;
            return Ok(false);
        };
        let (meta_bytes, payload_bytes) = (block.meta.len(), block.payload.len());
        let room = meta_bytes <= meta.room() && payload_bytes <= payload.room();
        if !(room && meta.write(&block.meta) && payload.write(&block.payload)) {
            return Err(BackendError::DestinationTooSmall { meta_bytes, payload_bytes });
        }
        state.statistics.hits += 1;
        Ok(true)
    }

    fn put(&self, identity: &Identity, meta: &Source, payload: &Source) -> Result<PutOutcome, BackendError> {
        let bytes = meta.len().saturating_add(payload.len());
        let bytes_max = self.bytes_max.saturating_sub(BLOCK_OVERHEAD_BYTES as usize);
        if bytes > bytes_max {
            return Err(BackendError::TooLarge { bytes, bytes_max });
        }
        let joined = |source: &Source| source.pieces().collect::<Vec<_>>().concat().into_boxed_slice();
        let (meta, payload) = (joined(meta), joined(payload));
        let state = &mut *self.state();
        if state.blocks.contains_key(identity) {
            return Ok(PutOutcome::Present);
        }
        while state.occupied() + bytes as u64 + BLOCK_OVERHEAD_BYTES > self.bytes_max as u64 {
            let Some((oldest, number)) = state.order.pop_front() else { break };
            if state.blocks.get(&oldest).is_some_and(|block| block.number == number) {
                state.forget(&oldest);
                state.statistics.evicted += 1;
            }
        }
        let number = state.next;
        state.next += 1;
        if state.order.len() > 2 * state.blocks.len() + 64 {
            // Most of these were deleted: they shall not pile up.
            let blocks = &state.blocks;
            state.order.retain(|(identity, number)| {
                blocks.get(identity).is_some_and(|block| block.number == *number)
            });
        }
        state.order.push_back((*identity, number));
        state.blocks.insert(*identity, Block { meta, payload, number });
        state.statistics.blocks += 1;
        state.statistics.bytes += bytes as u64;
        state.statistics.stored += 1;
        Ok(PutOutcome::Stored)
    }

    fn delete(&self, identity: &Identity) -> Result<bool, BackendError> {
        Ok(self.state().forget(identity))
    }

    fn statistics(&self) -> Statistics {
        self.state().statistics
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffers::Ranges;

    #[test]
    fn blocks_of_no_bytes_take_room_too() {
        let store = MemoryBackend::new(4096);
        let ranges = || Ranges::check(&[]).expect("no buffers are valid");
        for number in 0..1000_u128 {
            // SAFETY: there is no memory in it.
            let meta = unsafe { Source::new(ranges()) };
            // SAFETY: as above.
            let payload = unsafe { Source::new(ranges()) };
            let put = store.put(&number.to_le_bytes(), &meta, &payload);
            assert_eq!(put, Ok(PutOutcome::Stored));
        }
        let statistics = store.statistics();
        assert_eq!((statistics.blocks, statistics.evicted, statistics.bytes), (16, 984, 0));
        assert!(store.state().order.len() < 100);
    }
}
