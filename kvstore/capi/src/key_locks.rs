//! Per-block locks: changes of one block run one at a time.
//!
//! The store takes a put and a removal through different queues, and answers a second put of the same block
//! like the first. Changes of one block therefore wait for each other here: of two puts exactly one stores the
//! block, and a put after a removal finds the block absent. Changes of different blocks share only the lock,
//! which is held for one look-up in a set; the set has an entry for each thread that is changing a block.

use std::collections::HashSet;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::backend::Identity;

/// The blocks that are being changed.
#[derive(Debug, Default)]
pub(crate) struct KeyLocks {
    busy: Mutex<HashSet<Identity>>,
    ended: Condvar,
}

/// The right to change a block. Dropping it releases the block.
#[derive(Debug)]
pub(crate) struct KeyLock<'a> {
    key_locks: &'a KeyLocks,
    identity: Identity,
}

impl KeyLocks {
    /// Waits until no other thread changes the block.
    pub(crate) fn take(&self, identity: &Identity) -> KeyLock<'_> {
        let mut busy = self.busy();
        while !busy.insert(*identity) {
            busy = self.ended.wait(busy).unwrap_or_else(PoisonError::into_inner);
        }
        KeyLock { key_locks: self, identity: *identity }
    }

    /// As [`Self::take`], without waiting: a thread that holds a [`KeyLock`] must not wait for another, or two
    /// threads could wait for each other.
    pub(crate) fn try_take(&self, identity: &Identity) -> Option<KeyLock<'_>> {
        self.busy().insert(*identity).then(|| KeyLock { key_locks: self, identity: *identity })
    }

    fn busy(&self) -> MutexGuard<'_, HashSet<Identity>> {
        // No code panics while the lock is held.
        self.busy.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for KeyLock<'_> {
    fn drop(&mut self) {
        self.key_locks.busy().remove(&self.identity);
        self.key_locks.ended.notify_all();
    }
}
