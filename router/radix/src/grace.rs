//! Grace periods: unlinked memory is reused only when no reader can still access it.
//!
//! A reader owns a cell. While it reads, the cell holds the epoch that it saw on entering; else zero. Unlinked memory is
//! stamped with the present epoch, then the epoch is advanced. Memory with a stamp below every cell's value can be freed: a
//! reader that entered later read the new epoch, and with it every store before (acquire of the increment); a reader whose
//! cell the writer saw empty has its fence after the writer's, so that its loads come after the unlinking.
//!
//! Written here because a reader must never run deferred functions of other threads: the known libraries let any thread that
//! leaves a critical section execute them.

use crate::limits::READERS_MAX;
use crate::sync::{AtomicU64, Ordering, fence};

/// A cell on its own pair of cache lines (the adjacent line is prefetched too).
#[derive(Debug)]
#[repr(align(128))]
struct Cell {
    /// Epoch on entering; 0: not reading.
    entered: AtomicU64,
    /// Non-zero: the cell has an owner.
    taken: AtomicU64,
}

#[derive(Debug)]
pub(crate) struct Grace {
    epoch: AtomicU64,
    /// Number of cells that have ever had an owner; only these are checked.
    used: AtomicU64,
    cells: Box<[Cell]>,
}

/// A reader's critical section, which ends when this is dropped.
pub(crate) struct Pin<'a>(&'a Cell);

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        // Release: earlier loads complete before this store; pairs with the acquire in `free_below`.
        self.0.entered.store(0, Ordering::Release);
    }
}

impl Grace {
    pub(crate) fn new() -> Self {
        let cell = |_| Cell { entered: AtomicU64::new(0), taken: AtomicU64::new(0) };
        Self {
            epoch: AtomicU64::new(1),
            used: AtomicU64::new(0),
            cells: (0..READERS_MAX).map(cell).collect(),
        }
    }

    /// Takes a cell for a reader; `None` when all are taken.
    pub(crate) fn enlist(&self) -> Option<usize> {
        let take =
            |cell: &Cell| cell.taken.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok();
        let cell = self.cells.iter().position(take)?;
        // Before the first pin of this cell, whose fence pairs with the one in `free_below`.
        self.used.fetch_max(cell as u64 + 1, Ordering::AcqRel);
        Some(cell)
    }

    pub(crate) fn leave(&self, cell: usize) {
        // Release: pairs with the acquire of the next owner.
        self.cells[cell].taken.store(0, Ordering::Release);
    }

    /// Enters a critical section. The cell must be the caller's own, and not be pinned.
    #[inline]
    pub(crate) fn pin(&self, cell: usize) -> Pin<'_> {
        let cell = &self.cells[cell];
        // Acquire: pairs with the increment in `advance`.
        cell.entered.store(self.epoch.load(Ordering::Acquire), Ordering::Relaxed);
        // Pairs with the fence in `free_below`.
        fence(Ordering::SeqCst);
        Pin(cell)
    }

    /// Stamp for memory that was unlinked just now.
    pub(crate) fn stamp(&self) -> u64 {
        self.epoch.load(Ordering::Relaxed)
    }

    /// Advances the epoch. Memory with a stamp below the returned one is out of every reader's sight. Called by the writer only.
    pub(crate) fn free_below(&self) -> u64 {
        // Release: pairs with the acquire in `pin`.
        let now = self.epoch.fetch_add(1, Ordering::AcqRel) + 1;
        fence(Ordering::SeqCst);
        #[cfg(loom)]
        if crate::broken(crate::PlantedFault::NoGrace) {
            return now;
        }
        let used = self.used.load(Ordering::Acquire) as usize;
        let entered = self.cells[..used].iter().map(|cell| cell.entered.load(Ordering::Acquire));
        entered.filter(|&epoch| epoch != 0).fold(now, u64::min)
    }
}
