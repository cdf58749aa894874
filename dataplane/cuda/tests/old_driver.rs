//! An old driver: too old, and just old enough, without what came later. A process of its own, with its own double.

mod double;

use std::sync::Arc;

use dataplane_cuda::{
    CopyQueue, CopyQueueConfig, CopyRequest, Cuda, DeviceMemory, DeviceSlab, DmaBufMapping, Pinned, Place,
    Priority, Region, Stream,
};
use dataplane_memory::{PageSize, Slab, SlabLayout};
use double::Double;

#[test]
fn too_old_is_an_error_and_old_works_by_other_calls() {
    let Some(double) = Double::load_old() else { return };
    double.set("version", 11_030);
    let text = "the CUDA driver speaks 11.3; 11.4 is needed";
    assert_eq!(Cuda::open().expect_err("too old").to_string(), text);

    double.set("version", 11_040);
    let device = Cuda::open().expect("old enough").device(0).expect("device");
    assert!(!device.description().has_dma_buf);
    let layout = SlabLayout { slot_bytes: 4096, slot_count: 4 };
    let slab = Arc::new(DeviceSlab::allocate(&device, layout).expect("slab"));
    let refused = slab.dma_buf(DmaBufMapping::Bar).expect_err("11.7 has it").to_string();
    assert!(refused.contains("speaks CUDA 11.4; 11.7 is needed"), "{refused}");

    let host = Arc::new(Slab::create("old", layout, PageSize::Standard).expect("slab"));
    let stream = Stream::new(&device, Priority::Urgent).expect("stream");
    let mut queue = CopyQueue::new(stream, CopyQueueConfig::default()).expect("queue");
    let pinned = Arc::new(Pinned::register(&device, host.clone()).expect("register"));
    let from = queue.add_region(Region::Host(pinned)).expect("region");
    let to = queue.add_region(Region::Device(slab.clone())).expect("region");
    for slot in 0..4 {
        host.write(slot, 0, &[slot as u8 + 1; 4096]);
        // Not neighbours on both sides.
        let place = |region, slot| Place { region, slot, offset: 0 };
        queue
            .submit(&CopyRequest::contiguous(place(from, slot), place(to, 3 - slot), 4096), 7)
            .expect("room");
    }
    let calls = double.growth("copy_calls", || queue.flush());
    assert_eq!(calls, 4, "one call each");
    queue.stream().synchronise().expect("synchronise");
    let mut completions = Vec::new();
    assert_eq!(queue.poll(usize::MAX, &mut completions), 4);
    let mut bytes = [0; 4];
    slab.read(4095, &mut bytes).expect("read");
    assert_eq!(bytes, [4, 3, 3, 3]);
}
