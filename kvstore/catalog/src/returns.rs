//! Slots that their last reader hands to the writer: a stack on which any thread pushes, and which the holder
//! of the tier's lock takes whole.
//!
//! A slot is pushed by the one `Record::unpin` that returned `true`, and is on the stack at most once: the
//! flag that asks for the push is set only when none is out. Because the whole stack is taken at once, there
//! is no ABA problem.

use crate::record::Record;
use crate::sync::{AtomicU32, Ordering};

const NONE: u32 = u32::MAX;

/// The stack; its links are in the records.
#[derive(Debug)]
pub struct Returns {
    newest: AtomicU32,
}

impl Default for Returns {
    fn default() -> Self {
        Self { newest: AtomicU32::new(NONE) }
    }
}

impl Returns {
    /// Pushes a slot.
    pub fn push(&self, records: &[Record], slot: u32) {
        let mut newest = self.newest.load(Ordering::Relaxed);
        loop {
            records[slot as usize].returned.store(newest, Ordering::Relaxed);
            // Release pairs with the Acquire of `take`: the link is written, the pin is off.
            match self.newest.compare_exchange_weak(newest, slot, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => newest = now,
            }
        }
    }

    /// Takes all; only under the tier's lock.
    #[must_use]
    pub fn take(&self) -> Option<u32> {
        if self.newest.load(Ordering::Relaxed) == NONE {
            return None;
        }
        // Acquire pairs with the Release of every `push` that is taken: they are one release sequence.
        Some(self.newest.swap(NONE, Ordering::Acquire)).filter(|&slot| slot != NONE)
    }

    /// The slot below, of what `take` took.
    #[must_use]
    pub fn below(records: &[Record], slot: u32) -> Option<u32> {
        Some(records[slot as usize].returned.load(Ordering::Relaxed)).filter(|&slot| slot != NONE)
    }
}
