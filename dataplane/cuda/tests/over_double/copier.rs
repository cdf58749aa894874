//! Copies between slots by the copier, over the double of the driver.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_cuda::{CopyQueueConfig, Cuda, DeviceSlab, Pinned, Priority, SlotCopier};
use dataplane_memory::{
    Copier, CopyDone, CopyRefused, DeviceMemory, PageSize, Slab, SlabLayout, SlotCopy, SlotPool, SlotRef,
};

use crate::double::Double;

const LAYOUT: SlabLayout = SlabLayout { slot_bytes: 1000, slot_count: 12 };

struct Rig {
    copier: SlotCopier,
    host: Arc<SlotPool>,
    device: Arc<SlotPool>,
    memory: Arc<DeviceSlab>,
}

impl Rig {
    fn new(config: CopyQueueConfig) -> Self {
        let device = Cuda::open().expect("the double starts").device(0).expect("device");
        let host = Arc::new(Slab::create("host", LAYOUT, PageSize::Standard).expect("slab"));
        let memory = Arc::new(DeviceSlab::allocate(&device, LAYOUT).expect("memory"));
        memory.fill(0).expect("fill");
        let away = Slab::on_device("device", LAYOUT, Arc::clone(&memory) as Arc<dyn DeviceMemory>);
        let away = Arc::new(away.expect("slab"));
        let mut copier = SlotCopier::new(&device, Priority::Urgent, config).expect("copier");
        let pinned = Arc::new(Pinned::register(&device, Arc::clone(&host)).expect("pinned"));
        copier.add_host(&pinned).expect("room");
        copier.add_device(&away, &memory).expect("the same memory");
        assert!(copier.add_device(&host, &memory).is_none(), "these slots do not lie there");
        Self { copier, host: SlotPool::new(host), device: SlotPool::new(away), memory }
    }

    fn read(&self, slot: &SlotRef) -> Vec<u8> {
        let mut bytes = vec![0; LAYOUT.slot_bytes];
        match slot.slab().device() {
            Some(_) => self.memory.read(slot.slot() as usize * LAYOUT.stride(), &mut bytes).expect("read"),
            None => slot.slab().read(slot.slot(), 0, &mut bytes),
        }
        bytes
    }

    fn drain(&mut self) -> Vec<CopyDone> {
        let (started, mut done) = (Instant::now(), Vec::new());
        self.copier.flush();
        while self.copier.in_flight() > 0 {
            self.copier.poll(&mut done);
            assert!(started.elapsed() < Duration::from_secs(30), "{} stuck", self.copier.in_flight());
        }
        assert_eq!(self.copier.poll(&mut done), 0, "no token twice");
        done
    }
}

fn copy(token: u64, from: &SlotRef, to: &SlotRef, len: u32) -> SlotCopy {
    SlotCopy { token, from: from.clone(), from_offset: 0, to: to.clone(), to_offset: 0, len }
}

#[test]
fn slots_are_copied_up_and_down_and_held_meanwhile() {
    let Some(double) = Double::load() else { return };
    double.set("delay_us", 300);
    let mut rig = Rig::new(CopyQueueConfig { copies_max: 4, tokens_max: 4, flushes_max: 2 });
    let mut random = 7_u64;
    println!("seed {random}");
    let mut token = 0;
    for _ in 0..60 {
        let slots: Vec<[SlotRef; 3]> = (0..4)
            .map(|_| {
                let there = rig.device.acquire().expect("slot");
                [rig.host.acquire().expect("slot"), there, rig.host.acquire().expect("slot")]
            })
            .collect();
        for [from, ..] in &slots {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            from.slab().write(from.slot(), 0, &random.to_le_bytes().repeat(125));
        }
        for half in [0, 1] {
            let mut expected = BTreeMap::new();
            for pair in &slots {
                let wanted = copy(token, &pair[half], &pair[half + 1], 1000);
                rig.copier.submit(wanted).expect("room for four in each direction");
                expected.insert(token, ());
                token += 1;
            }
            let refused = rig.copier.submit(copy(token, &slots[0][half], &slots[1][half + 1], 1000));
            assert!(matches!(refused, Err(CopyRefused::Full(back)) if back.token == token));
            for CopyDone { token, result } in rig.drain() {
                assert_eq!(result, Ok(()));
                assert!(expected.remove(&token).is_some(), "{token} once");
            }
            assert!(expected.is_empty());
        }
        for [from, there, back] in &slots {
            assert!(rig.read(from) == rig.read(there) && rig.read(there) == rig.read(back));
        }
    }
    // A slot that its owner has dropped is not reused under the copy.
    let (from, to) = (rig.host.acquire().expect("slot"), rig.device.acquire().expect("slot"));
    rig.copier.submit(copy(1, &from, &to, 8)).expect("room");
    drop((from, to));
    assert_eq!((rig.host.used_count(), rig.device.used_count()), (1, 1));
    rig.drain();
    assert_eq!((rig.host.used_count(), rig.device.used_count()), (0, 0));
    drop(rig);
    double.set("delay_us", 0);
    double.assert_nothing_leaked();
}

#[test]
fn what_it_cannot_copy_comes_back_and_a_dead_device_ends_all() {
    let Some(double) = Double::load() else { return };
    let mut rig = Rig::new(CopyQueueConfig::default());
    let (from, to) = (rig.host.acquire().expect("slot"), rig.device.acquire().expect("slot"));
    let other = SlotPool::new(Arc::new(Slab::create("other", LAYOUT, PageSize::Standard).expect("slab")));
    let foreign = other.acquire().expect("slot");
    assert!(matches!(rig.copier.submit(copy(1, &from, &to, 1001)), Err(CopyRefused::Outside(_))));
    assert!(matches!(rig.copier.submit(copy(2, &foreign, &to, 8)), Err(CopyRefused::Unreachable(_))));
    let beside = rig.host.acquire().expect("slot");
    assert!(matches!(rig.copier.submit(copy(2, &from, &beside, 8)), Err(CopyRefused::Unreachable(_))));
    drop(beside);
    double.set("fault_copy", 1);
    for token in 0..20 {
        rig.copier.submit(copy(token, &from, &to, 100)).expect("room");
        rig.copier.flush();
    }
    let done = rig.drain();
    assert_eq!(done.len(), 20);
    assert!(done.iter().any(|done| done.result.is_err()), "the device is lost");
    rig.copier.submit(copy(99, &from, &to, 100)).expect("taken, and ended");
    let done = rig.drain();
    assert!(done.len() == 1 && done[0].result.is_err(), "{done:?}");
    drop((from, to));
    assert_eq!((rig.host.used_count(), rig.device.used_count()), (0, 0));
    double.set("fault_copy", 0);
}
