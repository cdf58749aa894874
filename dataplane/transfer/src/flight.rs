//! The in-flight table: what any thread may know and ask of a batch that the transfer thread is moving.
//!
//! The problem: a batch is owned by the transfer thread until its last work request has completed, and watched
//! by whoever submitted it, who may look, cancel or walk away at any moment. Entries are reused, so an old
//! ticket must not act on a newer batch.
//!
//! Each entry is one atomic word: a generation, and below it the phase. The phases form a line
//! `Free → Open → Ended(outcome)`, with two flags that the watcher may set while the entry is open: *cancel*
//! and *abandoned*. Whoever takes the step that leaves an entry both ended and abandoned frees it, and since
//! every step is a compare-and-swap on the one word, that is exactly one of the two threads. Freeing raises the
//! generation, so that every earlier ticket is stale.
//!
//! The step to `Ended` is a release, reading an outcome is an acquire: who sees `Done` also sees the bytes that
//! a read has brought. `tests/loom.rs` tries every interleaving of this, and of a version without the release,
//! which must fail.
//!
//! No lock; opening and closing are one queue operation each; nothing allocates.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering};

/// How a batch ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MoveOutcome {
    /// Every byte has landed; for a read: is here, and visible to kernels of the device that are started afterwards.
    /// (A write to a peer's device is the peer's to settle.)
    Done,
    /// Cancelled by its owner. Some of the bytes may have landed, and none will any more.
    Cancelled,
    /// Its deadline passed first. As for cancelled.
    Deadline,
    /// The peer could not be reached, or the connection ended on every rail.
    PeerDown,
    /// It could not start: the address is none of this node's transports', or a piece makes no sense.
    Refused,
    /// Every byte is here, but the device in whose memory it lies did not say that its kernels see it.
    Unsettled,
}

impl MoveOutcome {
    const ALL: [Self; 6] =
        [Self::Done, Self::Cancelled, Self::Deadline, Self::PeerDown, Self::Refused, Self::Unsettled];
}

const PHASE_BITS: u32 = 8;
const OPEN: u64 = 1;
/// Plus the position in [`MoveOutcome::ALL`].
const ENDED: u64 = 2;
const PHASE_MASK: u64 = 0x0F;
const CANCEL: u64 = 0x40;
const ABANDONED: u64 = 0x80;

fn outcome_of(word: u64) -> Option<MoveOutcome> {
    let index = (word & PHASE_MASK).checked_sub(ENDED)?;
    MoveOutcome::ALL.get(index as usize).copied()
}

/// Whose turn it is to put the entry back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Done; the other side still knows of the entry.
    Kept,
    /// Done, and the caller is the last that knows of it: it is free now, with a new generation.
    Freed,
    /// The ticket is of an earlier batch: nothing was changed.
    Stale,
}

/// The state of one entry. See the module's documentation.
#[derive(Debug)]
pub struct Word(AtomicU64);

impl Default for Word {
    fn default() -> Self {
        Self::new()
    }
}

impl Word {
    /// A free entry of generation 0.
    #[must_use]
    pub fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Takes a free entry into use. Only its owner, who took it off the free list, calls this.
    pub fn open(&self) -> u32 {
        let word = self.0.load(Ordering::Relaxed);
        debug_assert_eq!(word & ((1 << PHASE_BITS) - 1), 0, "an entry off the free list is free");
        self.0.store(word | OPEN, Ordering::Relaxed);
        (word >> PHASE_BITS) as u32
    }

    /// Changes the word by `step` unless it is of another generation or `step` has nothing to do.
    fn change(&self, generation: u32, step: impl Fn(u64) -> Option<u64>) -> Step {
        let mut word = self.0.load(Ordering::Relaxed);
        loop {
            if (word >> PHASE_BITS) as u32 != generation || word & PHASE_MASK == 0 {
                return Step::Stale;
            }
            let Some(mut next) = step(word) else { return Step::Kept };
            let is_over = next & ABANDONED != 0 && outcome_of(next).is_some();
            if is_over {
                next = u64::from(generation.wrapping_add(1)) << PHASE_BITS;
            }
            // Release: what the driver did for this batch comes before an outcome is seen (`outcome`), and what the
            // watcher did before the entry is reused. Acquire: the one who frees has seen both.
            match self.0.compare_exchange_weak(word, next, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) if is_over => return Step::Freed,
                Ok(_) => return Step::Kept,
                Err(now) => word = now,
            }
        }
    }

    /// The driver: the batch is over.
    pub fn end(&self, generation: u32, outcome: MoveOutcome) -> Step {
        let phase = ENDED + MoveOutcome::ALL.iter().position(|&known| known == outcome).unwrap_or(0) as u64;
        self.change(generation, |word| outcome_of(word).is_none().then_some(word & !PHASE_MASK | phase))
    }

    /// The watcher: asks the driver to stop.
    pub fn cancel(&self, generation: u32) -> Step {
        self.change(generation, |word| {
            (outcome_of(word).is_none() && word & CANCEL == 0).then_some(word | CANCEL)
        })
    }

    /// The watcher: will not look again. What is open goes on.
    pub fn abandon(&self, generation: u32) -> Step {
        self.change(generation, |word| Some(word | ABANDONED))
    }

    /// The driver: whether the watcher has asked to stop.
    #[must_use]
    pub fn is_cancelled(&self, generation: u32) -> bool {
        let word = self.0.load(Ordering::Relaxed);
        (word >> PHASE_BITS) as u32 == generation && word & CANCEL != 0
    }

    /// The watcher: how it ended, if it has.
    #[must_use]
    pub fn outcome(&self, generation: u32) -> Option<MoveOutcome> {
        // Acquire: pairs with the release in `change`.
        let word = self.0.load(Ordering::Acquire);
        if (word >> PHASE_BITS) as u32 != generation { None } else { outcome_of(word) }
    }
}

pub(crate) use table::FlightTable;
pub use table::Ticket;

mod table {
    use crossbeam_queue::ArrayQueue;

    use super::{MoveOutcome, Step, Word};

    /// Names one batch; stale once both sides are done with it.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub struct Ticket {
        pub(crate) index: u32,
        pub(crate) generation: u32,
    }

    /// A fixed number of entries.
    #[derive(Debug)]
    pub(crate) struct FlightTable {
        words: Box<[Word]>,
        free: ArrayQueue<u32>,
    }

    impl FlightTable {
        pub(crate) fn new(capacity: usize) -> Self {
            let free = ArrayQueue::new(capacity.max(1));
            for index in 0..capacity.max(1) as u32 {
                let pushed = free.push(index);
                debug_assert!(pushed.is_ok(), "room for every entry");
            }
            Self { words: (0..capacity.max(1)).map(|_| Word::new()).collect(), free }
        }

        /// An entry for a new batch, or `None` when as many are under way as there may be.
        pub(crate) fn open(&self) -> Option<Ticket> {
            let index = self.free.pop()?;
            Some(Ticket { index, generation: self.words[index as usize].open() })
        }

        fn step(&self, ticket: Ticket, step: impl FnOnce(&Word) -> Step) -> Step {
            let taken = step(&self.words[ticket.index as usize]);
            if taken == Step::Freed {
                let pushed = self.free.push(ticket.index);
                debug_assert!(pushed.is_ok(), "entry {} freed twice", ticket.index);
            }
            taken
        }

        pub(crate) fn end(&self, ticket: Ticket, outcome: MoveOutcome) {
            self.step(ticket, |word| word.end(ticket.generation, outcome));
        }

        pub(crate) fn cancel(&self, ticket: Ticket) {
            self.step(ticket, |word| word.cancel(ticket.generation));
        }

        pub(crate) fn abandon(&self, ticket: Ticket) {
            self.step(ticket, |word| word.abandon(ticket.generation));
        }

        pub(crate) fn is_cancelled(&self, ticket: Ticket) -> bool {
            self.words[ticket.index as usize].is_cancelled(ticket.generation)
        }

        pub(crate) fn outcome(&self, ticket: Ticket) -> Option<MoveOutcome> {
            self.words[ticket.index as usize].outcome(ticket.generation)
        }

        /// Entries in use.
        pub(crate) fn open_count(&self) -> usize {
            self.words.len() - self.free.len()
        }
    }

    #[cfg(all(test, not(loom)))]
    mod tests {
        use super::*;

        #[test]
        fn an_entry_returns_when_both_sides_are_done() {
            let table = FlightTable::new(1);
            let first = table.open().expect("one entry");
            assert_eq!(table.open(), None, "the table is full");
            assert_eq!(table.outcome(first), None);
            table.end(first, MoveOutcome::Done);
            assert_eq!(table.outcome(first), Some(MoveOutcome::Done));
            table.end(first, MoveOutcome::PeerDown);
            assert_eq!(table.outcome(first), Some(MoveOutcome::Done), "the first outcome stays");
            assert_eq!(table.open_count(), 1);
            table.abandon(first);
            assert_eq!(table.open_count(), 0);
            let second = table.open().expect("free again");
            assert_ne!(first, second);
            table.cancel(first);
            assert!(!table.is_cancelled(second), "an old ticket does nothing");
            table.abandon(second);
            assert_eq!(table.open_count(), 1, "the driver still moves it");
            table.cancel(second);
            assert!(table.is_cancelled(second));
            table.end(second, MoveOutcome::Cancelled);
            assert_eq!(table.open_count(), 0);
        }
    }
}
