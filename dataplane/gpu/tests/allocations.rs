//! Batches allocate nothing: counted, not believed. A process of its own, since it counts all allocations of its thread.

#[path = "../../cuda/tests/double/mod.rs"]
mod double;
#[allow(dead_code, reason = "of the emulator only the library is used")]
#[path = "../../kernels/tests/emulator/harness.rs"]
mod harness;

use std::sync::Arc;

use dataplane_cuda::{Cuda, DeviceSlab, Priority, Stream};
use dataplane_gpu::{KernelQueue, KernelQueueConfig, LayoutKernels, SlotRoute};
use dataplane_memory::SlabLayout;
use double::Double;
use tests_allocations::{Counting, count};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn batches_allocate_nothing() {
    let Some(_double) = Double::load() else { return };
    let Some(library) =
        harness::build("libkvasir_emulator.so", &["emulator.cpp"], &["-O2", "-shared", "-fPIC"])
    else {
        return;
    };
    let device = Cuda::open().expect("open").device(0).expect("device");
    let image = format!("emulator:{}\n", library.display());
    // SAFETY: the emulator is compiled from the kernels' own text.
    let kernels = Arc::new(unsafe { LayoutKernels::load(&device, image.as_bytes()) }.expect("kernels"));
    let slots = DeviceSlab::allocate(&device, SlabLayout { slot_bytes: 64, slot_count: 8 }).expect("slots");
    let route = SlotRoute::new(Arc::new(slots), 64).expect("route");
    let stream = Stream::new(&device, Priority::Urgent).expect("stream");
    let config = KernelQueueConfig { items_max: 8, batches_max: 4 };
    let mut queue = KernelQueue::new(kernels, stream, config).expect("queue");
    let (mut submitted, mut completed, mut refused) = (0_u64, 0_u64, 0_u64);
    let mut work = |count: u64| {
        while submitted < count {
            let is_full = queue.checksum(&route, &[0, 7, 3], submitted).is_err();
            submitted += u64::from(!is_full);
            refused += u64::from(is_full);
            if is_full {
                completed += queue.poll(2, |end| assert!(end.checksums.len() == 3)) as u64;
            }
        }
    };
    work(20);
    assert_eq!(count(|| work(520)).allocations, 0);
    assert!(refused > 0 && completed > 500, "{refused} refused, {completed} completed");
    assert_eq!(count(|| drop(std::hint::black_box(Box::new(1_u8)))).allocations, 1, "the count counts");
}
