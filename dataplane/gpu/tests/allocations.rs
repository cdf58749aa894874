//! Batches allocate nothing: counted, not believed. A process of its own, since it counts all allocations of its thread.

#[path = "../../cuda/tests/double/mod.rs"]
mod double;
#[allow(dead_code, reason = "of the emulator only the library is used")]
#[path = "../../kernels/tests/emulator/harness.rs"]
mod harness;

use std::sync::Arc;

use dataplane_cuda::{Cuda, DeviceSlab, Priority, Stream};
use dataplane_gpu::{KernelQueue, KernelQueueConfig, LayoutKernels, SlotChecksummer, SlotRoute};
use dataplane_memory::{Checksummer, DeviceMemory, Slab, SlabLayout, SlotPool, SlotSum};
use double::Double;
use tests_allocations::{Counting, count};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A queue, and slots of its device.
fn queue() -> Option<(Double, KernelQueue, Arc<DeviceSlab>)> {
    let double = Double::load()?;
    let options = ["-O2", "-shared", "-fPIC"];
    let library = harness::build("libkvasir_emulator.so", &["emulator.cpp"], &options)?;
    let device = Cuda::open().expect("open").device(0).expect("device");
    let image = format!("emulator:{}\n", library.display());
    // SAFETY: the emulator is compiled from the kernels' own text.
    let kernels = Arc::new(unsafe { LayoutKernels::load(&device, image.as_bytes()) }.expect("kernels"));
    let slots = DeviceSlab::allocate(&device, SlabLayout { slot_bytes: 64, slot_count: 8 }).expect("slots");
    let stream = Stream::new(&device, Priority::Urgent).expect("stream");
    let config = KernelQueueConfig { items_max: 8, batches_max: 4 };
    let queue = KernelQueue::new(kernels, stream, config).expect("queue");
    Some((double, queue, Arc::new(slots)))
}

#[test]
fn batches_allocate_nothing() {
    let Some((_double, mut queue, slots)) = queue() else { return };
    let route = SlotRoute::new(slots, 64).expect("route");
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

#[test]
fn sums_of_ranges_allocate_nothing() {
    let Some((_double, queue, memory)) = queue() else { return };
    let device = Arc::clone(&memory) as Arc<dyn DeviceMemory>;
    let slab = Arc::new(Slab::on_device("device", memory.layout(), device).expect("slab"));
    let slot = SlotPool::new(Arc::clone(&slab)).acquire().expect("slot");
    let mut summer = SlotChecksummer::new(queue, 12);
    summer.add_device(&slab, &memory).expect("its own memory");
    let mut done = Vec::with_capacity(12);
    let (mut submitted, mut ended, mut refused) = (0_u64, 0, 0_u64);
    let mut work = |count: u64| {
        while submitted < count {
            // Seven kinds, and room for four batches.
            let (offset, len) = (submitted as u32 % 7, 8 + submitted as u32 % 7);
            let taken = summer.submit(SlotSum { token: submitted, slot: slot.clone(), offset, len });
            submitted += u64::from(taken.is_ok());
            if taken.is_err() {
                refused += 1;
                summer.flush();
                ended += summer.poll(&mut done);
                assert!(done.drain(..).all(|done| done.result.is_ok()));
            }
        }
    };
    work(100);
    assert_eq!(count(|| work(2000)).allocations, 0);
    assert!(refused > 0 && ended > 1900, "{refused} refused, {ended} ended");
}
