//! Allocation counts of all threads together, for benchmarks: two atomic additions per allocation and one per
//! deallocation. These additions are part of the measured time, so only values that a benchmark reports are
//! counted.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

/// The system's allocator, with counts of all threads.
#[derive(Debug)]
pub struct CountingAllThreads {
    allocations: AtomicU64,
    live_bytes: AtomicI64,
}

impl CountingAllThreads {
    /// Creates the allocator, to be the program's `#[global_allocator]`.
    #[allow(clippy::new_without_default, reason = "a static needs a constant function")]
    pub const fn new() -> Self {
        Self { allocations: AtomicU64::new(0), live_bytes: AtomicI64::new(0) }
    }

    /// Returns the number of blocks allocated since the program began.
    pub fn allocations(&self) -> u64 {
        self.allocations.load(Ordering::Relaxed)
    }

    /// Returns the bytes of live blocks: allocated and not freed, without the allocator's own overhead.
    pub fn live_bytes(&self) -> i64 {
        self.live_bytes.load(Ordering::Relaxed)
    }
}

// SAFETY: every call is forwarded to the system's allocator unchanged, and its result is returned. The
// counters are part of the allocator itself: counting neither allocates nor unwinds.
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
        // SAFETY: the caller promises that `alloc` returned the block for this layout; `alloc` got it from
        // the system's allocator.
        unsafe { System.dealloc(block, layout) }
    }
}
