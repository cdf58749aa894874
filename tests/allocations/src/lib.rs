//! Counting global allocators, for tests and benchmarks that promise no allocation.
//!
//! ```
//! use tests_allocations::{Counting, count};
//!
//! #[global_allocator]
//! static ALLOCATOR: Counting = Counting;
//!
//! let mut squares = Vec::with_capacity(100);
//! assert_eq!(count(|| squares.extend((0..100).map(|n| n * n))).allocations, 0);
//! assert_eq!(count(|| drop(std::hint::black_box(Box::new(1)))).allocations, 1, "a planted box is counted");
//! ```
//!
//! * [`Counting`] counts for each thread separately: other threads of the test do not affect its numbers, and
//!   tests of one program may run concurrently. [`count`] runs a closure and returns the [`Counts`] of that
//!   time.
//! * [`CountingAllThreads`] counts all threads together.
//!
//! Both forward every call to the system's allocator. Each allocated block counts as one allocation, whether
//! zeroed or not and whether or not the system had one. A block that grows or shrinks is one allocation and
//! one deallocation, even if the system could have resized it in place: both allocators leave `realloc` and
//! `alloc_zeroed` to the trait, which implements them with `alloc` and `dealloc`. A counted program therefore
//! does not measure the speed of growing large blocks.
//!
//! Memory that does not come from the global allocator is not counted: stacks, mappings, the system's
//! allocator called by name, and `malloc` calls of C libraries. A count of 0 also does not show an allocation
//! that the compiler removed or that was made before the closure. A test therefore first triggers lazy
//! initialisation, and plants a box to verify that its own counting works.

mod all_threads;
mod thread;

pub use all_threads::CountingAllThreads;
pub use thread::{Counting, Counts, count};
