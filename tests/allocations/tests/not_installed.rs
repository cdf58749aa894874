//! Without the allocator everything would allocate nothing, so counting refuses.

#![forbid(unsafe_code)]

use tests_allocations::count;

#[test]
#[should_panic(expected = "is not tests_allocations::Counting")]
fn counting_needs_the_allocator() {
    count(|| {});
}
