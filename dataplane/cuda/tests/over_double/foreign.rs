//! Memory of other allocators, and slabs that are created after the copier, over the double of the driver.

use std::sync::Arc;

use dataplane_cuda::{CopyQueueConfig, Cuda, Device, DeviceMemory, DeviceSlab, Pinned, Priority, SlotCopier};
use dataplane_memory::{Copier, CopyDone, CopyRefused, PageSize, Slab, SlabLayout, SlotCopy, SlotPool};

use crate::double::Double;

fn rig() -> Option<(Double, Device)> {
    let double = Double::load()?;
    let device = Cuda::open().expect("the double starts").device(0).expect("device");
    Some((double, device))
}

fn one(slot_bytes: usize) -> SlabLayout {
    SlabLayout { slot_bytes, slot_count: 1 }
}

/// # Safety
/// As for [`DeviceSlab::borrow`].
unsafe fn borrowed(device: &Device, address: u64, bytes: usize) -> Result<DeviceSlab, String> {
    // SAFETY: handed on to the caller.
    unsafe { DeviceSlab::borrow(device, address, bytes) }.map_err(|error| error.to_string())
}

#[test]
fn memory_is_borrowed_where_it_is_mapped() {
    let Some((double, device)) = rig() else { return };
    let engine = DeviceSlab::allocate(&device, one(4 << 20)).expect("memory");
    engine.fill(7).expect("fill");
    let (start, end) = (engine.address(), 4 << 20);
    // SAFETY: the engine's memory outlives what is borrowed of it.
    let part = unsafe { borrowed(&device, start + 100, end - 100) }.expect("inside");
    let mut last = [0];
    part.read(end - 101, &mut last).expect("read");
    assert_eq!((last, part.bytes(), part.address()), ([7], end - 100, start + 100));
    drop(part);
    for (address, bytes) in [(start, end + 1), (start + end as u64, 1), (start - 1, 10), (u64::MAX, 2)] {
        // SAFETY: it is refused.
        let refused = unsafe { borrowed(&device, address, bytes) }.expect_err("outside");
        assert!(refused.starts_with("cuMemGetAddressRange: "), "{refused}");
    }
    // Memory that a kernel of this device must not access, although the driver knows its range.
    let other = Cuda::open().expect("the double starts").device(1).expect("device");
    let elsewhere = DeviceSlab::allocate(&other, one(4096)).expect("memory");
    let host = Arc::new(Slab::create("host", one(4096), PageSize::Standard).expect("slab"));
    let pinned = Pinned::register(&device, host.clone()).expect("pin");
    for (address, text) in [
        (elsewhere.address(), "is memory of type 2 of device 1, not of device 0"),
        (host.base().as_ptr().addr() as u64, "is memory of type 1 of device 0, not of device 0"),
    ] {
        // SAFETY: it is refused.
        let refused = unsafe { borrowed(&device, address, 4096) }.expect_err("not the device's");
        assert!(refused.starts_with("cuPointerGetAttribute: ") && refused.contains(text), "{refused}");
    }
    drop((pinned, elsewhere));
    // A driver that reports a range which ends before the requested address must not cause an endless loop.
    double.set("range_bytes", 1 << 20);
    // SAFETY: it is refused.
    let refused = unsafe { borrowed(&device, start, end) }.expect_err("no end");
    assert!(refused.contains("has no end"), "{refused}");
    double.set("range_bytes", 0);
    engine.fill(8).expect("what was borrowed was not freed");
}

#[test]
fn slabs_that_lie_in_known_memory_need_not_be_told() {
    let Some((_double, device)) = rig() else { return };
    let host = Arc::new(
        Slab::create("host", SlabLayout { slot_bytes: 500, slot_count: 8 }, PageSize::Standard)
            .expect("slab"),
    );
    let pinned = Arc::new(Pinned::register(&device, host.clone()).expect("pin"));
    let staging = Arc::new(DeviceSlab::allocate(&device, one(64 << 10)).expect("memory"));
    let other = Arc::new(DeviceSlab::allocate(&device, one(64 << 10)).expect("memory"));
    let mut copier = SlotCopier::new(&device, Priority::Urgent, CopyQueueConfig::default()).expect("copier");
    copier.add_host(&pinned).expect("room");
    copier.add_memory(&staging).expect("room");
    let many = Arc::new(
        DeviceSlab::allocate(&device, SlabLayout { slot_bytes: 64, slot_count: 2 }).expect("memory"),
    );
    assert_eq!(copier.add_memory(&many), None, "two slots");
    let pool = |whole: &Arc<DeviceSlab>, offset| {
        let layout = SlabLayout { slot_bytes: 500, slot_count: 8 };
        let part: Arc<dyn DeviceMemory> = Arc::new(DeviceSlab::part(whole, offset, layout).expect("part"));
        SlotPool::new(Arc::new(Slab::on_device("part", layout, part).expect("slab")))
    };
    let host = SlotPool::new(host);
    let copy = |from: &Arc<SlotPool>, to: &Arc<SlotPool>| {
        let [from, to] = [from, to].map(|pool| pool.acquire().expect("slot"));
        SlotCopy { token: 1, from, from_offset: 10, to, to_offset: 20, len: 400 }
    };
    let there = pool(&staging, 1 << 10);
    for round in 0..8_u8 {
        let slot = host.acquire().expect("slot");
        host.slab().write(slot.slot(), 0, &[round + 1; 500]);
        let up = SlotCopy { from: slot, ..copy(&host, &there) };
        let target = up.to.clone();
        assert!(copier.submit(up).is_ok());
        copier.flush();
        let mut done: Vec<CopyDone> = Vec::new();
        while copier.poll(&mut done) == 0 {}
        assert!(done[0].result.is_ok());
        let at = (1 << 10) + target.slot() as usize * there.slab().layout().stride();
        let mut found = [0; 500];
        staging.read(at, &mut found).expect("read");
        assert!(found[20..420] == [round + 1; 400]);
    }
    let refused = copier.submit(copy(&host, &pool(&other, 0)));
    assert!(matches!(refused, Err(CopyRefused::Unreachable(_))));
}
