//! Counts of all threads together, for benchmarks: two atomic additions for an allocation and one for what is given
//! back. They are part of what a benchmark times, so nothing is counted that no benchmark reports.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

/// The system's allocator, with counts of all threads.
#[derive(Debug)]
pub struct CountingAllThreads {
    allocations: AtomicU64,
    live_bytes: AtomicI64,
}

impl CountingAllThreads {
    /// To be the program's `#[global_allocator]`.
    #[allow(clippy::new_without_default, reason = "a static needs a constant function")]
    pub const fn new() -> Self {
        Self { allocations: AtomicU64::new(0), live_bytes: AtomicI64::new(0) }
    }

    /// Blocks that were asked for since the program began.
    pub fn allocations(&self) -> u64 {
        self.allocations.load(Ordering::Relaxed)
    }

    /// Bytes of the blocks that are out: asked for and not given back. What the allocator adds to a block is not in it.
    pub fn live_bytes(&self) -> i64 {
        self.live_bytes.load(Ordering::Relaxed)
    }
}

// SAFETY: every call is handed to the system's allocator unchanged, and what it returns is returned. The counters are
// part of the allocator itself: counting neither allocates nor unwinds.
unsafe impl GlobalAlloc for CountingAllThreads {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.allocations.fetch_add(1, Ordering::Relaxed);
        self.live_bytes.fetch_add(layout.size() as i64, Ordering::Relaxed);
        // SAFETY: the caller promises a layout that is not empty, which is what the system's allocator asks for.
        unsafe { System.alloc(layout) }
    }

    #[inline]
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        self.live_bytes.fetch_sub(layout.size() as i64, Ordering::Relaxed);
        // SAFETY: the caller promises that `alloc` returned the block for this layout; it had it from the system's.
        unsafe { System.dealloc(block, layout) }
    }
}
