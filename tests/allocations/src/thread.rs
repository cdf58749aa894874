//! Allocation counts of each thread separately, in a plain cell: no atomic operation, no shared state.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;

thread_local! {
    static COUNTS: Cell<Counts> = const { Cell::new(Counts::NONE) };
}

/// Allocator calls of a thread, since it began or between two moments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// Number of allocated blocks.
    pub allocations: u64,
    /// Number of freed blocks, no matter which thread allocated them.
    pub deallocations: u64,
    /// Bytes of allocated blocks; freeing subtracts nothing.
    pub allocated_bytes: u64,
}

impl Counts {
    const NONE: Self = Self { allocations: 0, deallocations: 0, allocated_bytes: 0 };

    /// Returns the counts of the calling thread since it began. All are 0 if [`Counting`] is not the
    /// program's allocator.
    pub fn of_this_thread() -> Self {
        COUNTS.with(Cell::get)
    }

    fn since(self, before: Self) -> Self {
        Self {
            allocations: self.allocations.wrapping_sub(before.allocations),
            deallocations: self.deallocations.wrapping_sub(before.deallocations),
            allocated_bytes: self.allocated_bytes.wrapping_sub(before.allocated_bytes),
        }
    }
}

/// Counts the allocator calls of the calling thread while `work` runs, including the drop of the values that
/// `work` owns.
///
/// # Panics
///
/// If [`Counting`] is not the program's global allocator: every count would be 0.
pub fn count(work: impl FnOnce()) -> Counts {
    let before = Counts::of_this_thread();
    drop(black_box(Box::new(1_u8)));
    let planted = Counts::of_this_thread();
    assert_ne!(before, planted, "the program's #[global_allocator] is not tests_allocations::Counting");
    work();
    Counts::of_this_thread().since(planted)
}

/// The system's allocator, with [`Counts`] of each thread.
#[derive(Debug, Clone, Copy)]
pub struct Counting;

fn add(change: impl FnOnce(&mut Counts)) {
    // An exiting thread may have lost its counts; its calls are not counted.
    let _ending = COUNTS.try_with(|cell| {
        let mut counts = cell.get();
        change(&mut counts);
        cell.set(counts);
    });
}

// SAFETY: every call is forwarded to the system's allocator unchanged, and its result is returned. Counting
// neither allocates, since the cell is a constant without a destructor, nor unwinds, since it wraps.
unsafe impl GlobalAlloc for Counting {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(|counts| {
            counts.allocations = counts.allocations.wrapping_add(1);
            counts.allocated_bytes = counts.allocated_bytes.wrapping_add(layout.size() as u64);
        });
        // SAFETY: the caller promises a layout that is not empty, which is what the system's allocator asks for.
        unsafe { System.alloc(layout) }
    }

    #[inline]
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        add(|counts| counts.deallocations = counts.deallocations.wrapping_add(1));
        // SAFETY: the caller promises that `alloc` returned the block for this layout; `alloc` got it from
        // the system's allocator.
        unsafe { System.dealloc(block, layout) }
    }
}
