//! Grace periods: what a writer has unlinked is reused only when no reader can still be looking at it.
//!
//! A reader owns a cell. While it reads, the cell holds the epoch that it saw on entering; else zero. What is
//! unlinked is stamped with the present epoch, then the epoch moves on. A stamp below every cell's value is
//! free: a reader that entered later read the new epoch, and with it every store before (acquire of the
//! increment); one whose cell the writer saw empty has its fence after the writer's, so that its loads come
//! after the unlinking.
//!
//! Written here because a reader must never run anybody's clean-up: the known libraries let any thread that
//! leaves a critical section execute deferred functions.

use crate::limits::READERS_MAX;
use crate::sync::{AtomicU64, Ordering, fence};

/// A cell on its own pair of cache lines (the adjacent line is prefetched too).
#[derive(Debug)]
#[repr(align(128))]
struct Cell {
    /// 0: not reading. Else the epoch on entering.
    entered: AtomicU64,
    /// Not zero: some reader owns the cell.
    taken: AtomicU64,
}

#[derive(Debug)]
pub(crate) struct Grace {
    epoch: AtomicU64,
    /// Cells that have ever had an owner: no other needs a look.
    used: AtomicU64,
    cells: Box<[Cell]>,
}

/// Ends the reading when it is dropped.
pub(crate) struct Pin<'a>(&'a Cell);

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        // Release: what was read is read before; pairs with the acquire in `free_below`.
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

    /// A cell of one's own; `None` when all are taken.
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

    /// Enters. The cell must be the caller's own, and not be pinned.
    #[inline]
    pub(crate) fn pin(&self, cell: usize) -> Pin<'_> {
        let cell = &self.cells[cell];
        // Acquire: pairs with the increment in `advance`.
        cell.entered.store(self.epoch.load(Ordering::Acquire), Ordering::Relaxed);
        // Pairs with the fence in `free_below`.
        fence(Ordering::SeqCst);
        Pin(cell)
    }

    /// The stamp for what was unlinked just now.
    pub(crate) fn stamp(&self) -> u64 {
        self.epoch.load(Ordering::Relaxed)
    }

    /// What carries a stamp below the returned one is out of every reader's sight. Only the writer calls this.
    pub(crate) fn free_below(&self) -> u64 {
        // Release: pairs with the acquire in `pin`.
        let now = self.epoch.fetch_add(1, Ordering::AcqRel) + 1;
        fence(Ordering::SeqCst);
        #[cfg(loom)]
        if crate::broken(crate::Broken::NoGrace) {
            return now;
        }
        let used = self.used.load(Ordering::Acquire) as usize;
        let entered = self.cells[..used].iter().map(|cell| cell.entered.load(Ordering::Acquire));
        entered.filter(|&epoch| epoch != 0).fold(now, u64::min)
    }
}
