//! The hot path allocates nothing.

use std::hint::black_box;
use std::time::{Duration, Instant};

use kvstore_io::{Completion, IoEngine, Operation, Request};
use kvstore_nvme::NvmeConfig;
use kvstore_nvme::testing::{Faults, SoftwareDevice};
use tests_allocations::{Counting, count};

use crate::rig::Rig;

/// Counts of this thread: the software controller's own do not count.
#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn reads_and_writes_allocate_nothing() {
    let config = NvmeConfig { queue_pairs: 2, ..NvmeConfig::default() };
    let mut rig = Rig::new(SoftwareDevice::default(), Faults::default(), &config);
    let mut free: Vec<_> = (0..64).map(|_| rig.buffer(4096)).collect();
    let mut completions: Vec<Completion> = Vec::with_capacity(64);
    let (started, mut done) = (Instant::now(), 0_u64);
    let counts = count(|| {
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
    });
    assert_eq!(counts.allocations, 0, "allocations in {done} requests");
    assert!(done > 1000, "only {done} requests in a minute");
    let planted = count(|| drop(black_box(Box::new(done))));
    assert_eq!(planted.allocations, 1, "a planted one is seen");
    eprintln!("{done} requests, no allocation");
    drop(free);
    rig.collect();
    rig.close();
}
