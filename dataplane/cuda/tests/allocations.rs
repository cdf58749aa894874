//! Submitting, flushing and polling allocate nothing: counted, not believed. A process of its own, since it counts all
//! allocations of its thread.

mod double;

use std::sync::Arc;

use dataplane_cuda::{
    CopyQueue, CopyQueueConfig, CopyRequest, Cuda, DeviceSlab, Pinned, Place, Priority, Region, Rows, Stream,
};
use dataplane_memory::{PageSize, Slab, SlabLayout};
use double::Double;
use tests_allocations::{Counting, count};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn copies_allocate_nothing() {
    let Some(double) = Double::load() else { return };
    let device = Cuda::open().expect("open").device(0).expect("device");
    let layout = SlabLayout { slot_bytes: 256, slot_count: 64 };
    let host = Arc::new(Slab::create("allocations", layout, PageSize::Standard).expect("slab"));
    let stream = Stream::new(&device, Priority::Background).expect("stream");
    let config = CopyQueueConfig { copies_max: 64, tokens_max: 128, flushes_max: 4 };
    let mut queue = CopyQueue::new(stream, config).expect("queue");
    let pinned = Arc::new(Pinned::register(&device, host).expect("register"));
    let from = queue.add_region(Region::Host(pinned)).expect("region");
    let slab = Arc::new(DeviceSlab::allocate(&device, layout).expect("slab"));
    let to = queue.add_region(Region::Device(slab)).expect("region");
    let mut completions = Vec::with_capacity(128);

    let (mut submitted, mut completed, mut refused) = (0_u64, 0_u64, 0_u64);
    let mut work = |count: u64| {
        while submitted < count {
            let slot = (submitted * 7 % 64) as u32;
            let rows = match submitted % 3 {
                0 => Rows::contiguous(256),
                1 => Rows { bytes: 16, count: 4, from_stride: 32, to_stride: 64 },
                _ => Rows::contiguous(100),
            };
            let place = |region, slot| Place { region, slot, offset: 0 };
            let copy = CopyRequest { from: place(from, slot), to: place(to, 63 - slot), rows };
            let is_full = queue.submit(&copy, submitted).is_err();
            submitted += u64::from(!is_full);
            refused += u64::from(is_full);
            if submitted % 24 == 0 || is_full {
                queue.flush();
            }
            // Now and then nobody asks for what is done until the queue is full.
            if is_full || submitted % 512 >= 256 {
                completed += queue.poll(16, &mut completions) as u64;
                completions.clear();
            }
        }
    };
    work(500);
    assert_eq!(count(|| work(20_500)).allocations, 0);
    assert!(refused > 0 && completed > 20_000, "{refused} refused, {completed} completed");
    assert_eq!(count(|| drop(std::hint::black_box(Box::new(1_u8)))).allocations, 1, "the count counts");
    drop(queue);
    assert!(double.get("batch_calls") > 100 && double.get("row_calls") > 100);
}
