//! The hot path allocates nothing.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::time::{Duration, Instant};

use kvstore_io::{Completion, IoEngine, Operation, Request};
use kvstore_nvme::NvmeConfig;
use kvstore_nvme::testing::{Faults, SoftwareDevice};

use crate::rig::Rig;

thread_local! {
    /// Of this thread: the software controller's own do not count.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: everything is handed to the system's allocator; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller upholds the contract of the layout.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: it came from `alloc` with this layout, as the caller upholds.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn count() -> u64 {
    ALLOCATIONS.with(Cell::get)
}

#[test]
fn reads_and_writes_allocate_nothing() {
    let config = NvmeConfig { queue_pairs: 2, ..NvmeConfig::default() };
    let mut rig = Rig::new(SoftwareDevice::default(), Faults::default(), &config);
    let mut free: Vec<_> = (0..64).map(|_| rig.buffer(4096)).collect();
    let mut completions: Vec<Completion> = Vec::with_capacity(64);
    let (before, started, mut done) = (count(), Instant::now(), 0_u64);
    while done < 100_000 && started.elapsed() < Duration::from_secs(60) {
        while let Some(buffer) = free.pop() {
            let operation = if done % 2 == 0 { Operation::Read } else { Operation::Write };
            let offset = done % 1000 * 4096;
            if rig.engine.submit(Request { id: done, operation, file: 0, offset, buffer }).is_err() {
                break;
            }
        }
        let flushed = rig.engine.flush();
        if rig.engine.poll(32, &mut completions) == 0 {
            let waited = rig.engine.wait(Some(Instant::now() + Duration::from_millis(10)));
            assert!(waited.is_ok());
        }
        assert!(flushed.is_ok());
        done += completions.len() as u64;
        free.extend(completions.drain(..).map(|completion| completion.buffer));
    }
    assert_eq!(count() - before, 0, "allocations in {done} requests");
    assert!(done > 1000, "only {done} requests in a minute");
    let planted = Box::new(done);
    assert_eq!(count() - before, 1, "a planted one is seen: {planted}");
    eprintln!("{done} requests, no allocation");
    drop(free);
    rig.collect();
    rig.close();
}
