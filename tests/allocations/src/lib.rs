//! Global allocators that count, for the tests and benchmarks that promise no allocation.
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
//! * [`Counting`] counts for each thread on its own: what the test's other threads do is not in its numbers, and tests
//!   of one program may run side by side. [`count`] runs a closure and returns the [`Counts`] of the time in between.
//! * [`CountingAllThreads`] counts what all threads do together.
//!
//! Both hand every call to the system's allocator. A block that is asked for is one allocation, whether zeroed or not
//! and whether or not the system had one. A block that grows or shrinks is one allocation and one deallocation, even
//! where the system could have left it in its place: both allocators leave `realloc` and `alloc_zeroed` to the trait,
//! which makes them of `alloc` and `dealloc`. A counted program is therefore no measure of how fast large blocks grow.
//!
//! Not counted is memory that does not come from the global allocator: stacks, mappings, the system's allocator named
//! by name, and what C libraries take from `malloc`. A count of 0 also says nothing of an allocation that the compiler
//! removed or that was made before the closure, so a test warms up first what is made lazily, and plants a box to see
//! that its own way of counting works.

mod all_threads;
mod thread;

pub use all_threads::CountingAllThreads;
pub use thread::{Counting, Counts, count};
