//! `count` panics if the counting allocator is not installed, because every count would be 0.

#![forbid(unsafe_code)]

use tests_allocations::count;

#[test]
#[should_panic(expected = "is not tests_allocations::Counting")]
fn counting_needs_the_allocator() {
    count(|| {});
}
