//! Values that are dropped while copies may still be running are leaked. A process of its own, since it leaks
//! memory.

mod double;

use std::sync::Arc;

use dataplane_cuda::{CopyQueueConfig, Cuda, DeviceSlab, Pinned, Priority, SlotCopier};
use dataplane_memory::{Copier, DeviceMemory, PageSize, Slab, SlabLayout, SlotCopy, SlotPool};
use double::Double;

const LAYOUT: SlabLayout = SlabLayout { slot_bytes: 1000, slot_count: 2 };

#[test]
fn a_copier_whose_end_cannot_be_waited_for_keeps_slots_and_memory() {
    let Some(double) = Double::load() else { return };
    for refusal in [0, 999] {
        let device = Cuda::open().expect("the double starts").device(0).expect("device");
        let host = Arc::new(Slab::create("host", LAYOUT, PageSize::Standard).expect("slab"));
        let memory = Arc::new(DeviceSlab::allocate(&device, LAYOUT).expect("memory"));
        let away = Slab::on_device("device", LAYOUT, Arc::clone(&memory) as Arc<dyn DeviceMemory>);
        let away = Arc::new(away.expect("slab"));
        let mut copier =
            SlotCopier::new(&device, Priority::Urgent, CopyQueueConfig::default()).expect("copier");
        copier
            .add_host(&Arc::new(Pinned::register(&device, Arc::clone(&host)).expect("pinned")))
            .expect("room");
        copier.add_device(&away, &memory).expect("room");
        let (host, away) = (SlotPool::new(host), SlotPool::new(away));
        let (from, to) = (host.acquire().expect("slot"), away.acquire().expect("slot"));
        double.set("delay_us", 20_000);
        let (from_offset, to_offset) = (0, 0);
        copier.submit(SlotCopy { token: 1, from, from_offset, to, to_offset, len: 1000 }).expect("room");
        copier.flush();
        double.set("refuse_synchronise", refusal);
        drop((copier, memory));
        let used = (host.used_count(), away.used_count());
        drop((host, away, device));
        let left = ["allocations", "registrations", "contexts"].map(|name| double.get(name));
        if refusal == 0 {
            assert_eq!((used, left), ((0, 0), [0; 3]), "it was waited for");
        } else {
            assert_eq!((used, left), ((1, 1), [1; 3]), "the copy may run");
        }
    }
    // The leak is intended, so the counts are reset.
    ["allocations", "registrations", "contexts", "events"].into_iter().for_each(|name| double.set(name, 0));
}
