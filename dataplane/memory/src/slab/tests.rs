//! Tests of slabs.

use rustix::fs::{MemfdFlags, SealFlags};

use super::layout::PAGE_BYTES;
use super::{PageSize, Slab, SlabLayout};
use crate::MemoryError;

fn slab(slot_bytes: usize, slot_count: u32) -> Slab {
    Slab::create("test", SlabLayout { slot_bytes, slot_count }, PageSize::Standard).expect("slab")
}

#[test]
fn slots_are_disjoint_and_keep_their_bytes() {
    let slab = slab(100, 9);
    for slot in 0..9 {
        slab.write(slot, 0, &[slot as u8 + 1; 100]);
    }
    for slot in 0..9 {
        let mut bytes = [0; 100];
        slab.read(slot, 0, &mut bytes);
        assert_eq!(bytes, [slot as u8 + 1; 100]);
    }
}

#[test]
fn an_attached_slab_sees_bytes_and_generations() {
    let owner = slab(4096, 3);
    owner.write(2, 8, b"hello");
    let before = owner.generation(2);
    owner.change_generation(2);
    let fd = rustix::io::dup(owner.memory()).expect("dup");
    let guest = Slab::attach(fd).expect("attach");
    assert_eq!(guest.layout(), owner.layout());
    assert_ne!(owner.generation(2), before);
    for slot in 0..3 {
        assert_eq!(guest.generation(slot), owner.generation(slot));
    }
    let mut bytes = [0; 5];
    guest.read(2, 8, &mut bytes);
    assert_eq!(&bytes, b"hello");
}

#[test]
fn rows_outside_of_the_slot_are_an_answer_and_change_nothing() {
    let (source, target) = (slab(1000, 2), slab(1000, 2));
    source.write(1, 0, &[7; 1000]);
    let rows =
        |strides, bytes, count| target.try_copy_rows_from(&source, (1, 0), (1, 0), strides, bytes, count);
    assert!(!rows((100, 101), 100, 10), "ten rows end at 1009 here");
    assert!(!rows((111, 100), 10, 10), "ten rows end at 1009 there");
    assert!(!rows((usize::MAX, 1), 1, 3), "a span beyond the address space");
    assert!(!rows((1, 1), usize::MAX, 2));
    assert!(!target.try_copy_from(&source, (2, 0), (0, 0), 1), "no such slot");
    assert!(!target.try_copy_from(&source, (1, 0), (0, usize::MAX), 2));
    assert_eq!(target.try_generation(2), None);
    let mut bytes = [0; 1000];
    target.read(1, 0, &mut bytes);
    assert_eq!(bytes, [0; 1000]);
    assert!(rows((100, 100), 100, 10) && rows((0, 0), 5, 0));
    target.read(1, 0, &mut bytes);
    assert_eq!(bytes, [7; 1000]);
}

#[test]
fn populating_keeps_the_bytes() {
    let slab = slab(8192, 4);
    slab.write(3, 0, b"kept");
    slab.populate(usize::MAX).expect("populate");
    let mut bytes = [0; 4];
    slab.read(3, 0, &mut bytes);
    assert_eq!(&bytes, b"kept");
}

#[test]
fn populating_slots_allocates_their_pages_and_no_others() {
    let slab = slab(8192, 40);
    let allocated = || rustix::fs::fstat(slab.memory()).expect("a memfd").st_blocks * 512;
    slab.write(3, 0, b"kept");
    let before = allocated();
    slab.populate_slots(2..12).expect("populate");
    // The slots begin at a page boundary; one of their pages was allocated already.
    assert_eq!(allocated() - before, 10 * 8192 - 4096);
    slab.populate_slots(0..40).expect("populate");
    slab.populate_slots(40..40).expect("nothing");
    let mut bytes = [0; 4];
    slab.read(3, 0, &mut bytes);
    assert_eq!(&bytes, b"kept");
    let beyond = std::panic::AssertUnwindSafe(|| slab.populate_slots(39..41));
    assert!(std::panic::catch_unwind(beyond).is_err());
}

#[test]
fn foreign_descriptors_are_refused() {
    let unsealed = rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC).expect("memfd");
    rustix::fs::ftruncate(&unsealed, 8192).expect("truncate");
    assert!(matches!(Slab::attach(unsealed), Err(MemoryError::System { .. } | MemoryError::NotASlab(_))));

    let empty = rustix::fs::memfd_create("x", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("fd");
    rustix::fs::ftruncate(&empty, 8192).expect("truncate");
    rustix::fs::fcntl_add_seals(&empty, SealFlags::SHRINK | SealFlags::GROW).expect("seal");
    assert!(matches!(Slab::attach(empty), Err(MemoryError::NotASlab("wrong magic"))));
}

fn on_device(layout: SlabLayout) -> Slab {
    let memory = crate::testing::DeviceDouble::new(layout.slots_bytes(), Default::default());
    Slab::on_device("device", layout, memory).expect("slab")
}

const DEVICE_LAYOUT: SlabLayout = SlabLayout { slot_bytes: 100, slot_count: 9 };

#[test]
fn slots_on_a_device_have_generations_and_device_addresses_only() {
    let slab = on_device(DEVICE_LAYOUT);
    let start = slab.device().expect("a device").address();
    assert_eq!(slab.device_address(0, 0, 100), Some(start));
    assert_eq!(slab.device_address(8, 99, 1), Some(start + 8 * 128 + 99));
    assert_eq!((slab.device_address(9, 0, 0), slab.device_address(0, 99, 2)), (None, None));
    let before = slab.generation(8);
    slab.change_generation(8);
    assert!(slab.generation(8) != before && slab.try_generation(9).is_none());
    assert!(slab.contains(8, 0, 100), "the slot exists");
    assert_eq!(slab.try_address(8, 0, 0), None, "and is out of the CPU's reach");
    let host = Slab::create("host", DEVICE_LAYOUT, PageSize::Standard).expect("slab");
    assert!(!slab.try_copy_from(&host, (0, 0), (0, 0), 1));
    assert!(!host.try_copy_from(&slab, (0, 0), (0, 0), 1));
    assert!(!host.try_copy_rows_from(&slab, (0, 0), (0, 0), (2, 2), 1, 2));
    slab.populate(usize::MAX).expect("what is mapped");
    assert_eq!((slab.mapped_bytes(), host.device_address(0, 0, 1)), (PAGE_BYTES, None));
}

#[test]
fn what_touches_bytes_on_a_device_is_a_bug() {
    let (slab, host) = (on_device(DEVICE_LAYOUT), slab(100, 1));
    let touches: [(&str, &dyn Fn()); 6] = [
        ("address", &|| _ = slab.address(0, 0, 0)),
        ("read", &|| slab.read(0, 0, &mut [0])),
        ("write", &|| slab.write(0, 0, &[0])),
        ("copy in", &|| slab.copy_from(&host, (0, 0), (0, 0), 1)),
        ("copy out", &|| host.copy_from(&slab, (0, 0), (0, 0), 1)),
        ("rows", &|| host.copy_rows_from(&slab, (0, 0), (0, 0), (2, 2), 1, 2)),
    ];
    for (what, touch) in touches {
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(touch)).expect_err(what);
        let message = caught.downcast_ref::<String>().expect("words");
        assert!(message.contains("the CPU cannot reach"), "{what}: {message}");
    }
}

#[test]
fn a_slab_on_a_device_is_refused_elsewhere_and_where_it_does_not_fit() {
    let owner = on_device(DEVICE_LAYOUT);
    let fd = rustix::io::dup(owner.memory()).expect("dup");
    let refused = Slab::attach(fd).expect_err("its slots are not behind the descriptor");
    assert!(matches!(refused, MemoryError::NotASlab("its slots lie in a device's memory")), "{refused}");
    let small = crate::testing::DeviceDouble::new(DEVICE_LAYOUT.slots_bytes() - 1, Default::default());
    let refused = Slab::on_device("small", DEVICE_LAYOUT, small).expect_err("one byte too few");
    assert!(refused.to_string().contains("take 1152 bytes"), "{refused}");
    let nothing = SlabLayout { slot_bytes: 0, slot_count: 1 };
    let memory = crate::testing::DeviceDouble::new(64, Default::default());
    assert!(matches!(Slab::on_device("none", nothing, memory), Err(MemoryError::Layout { .. })));
}

#[test]
fn unusable_layouts_are_errors() {
    for (slot_bytes, slot_count) in [(0, 1), (1, 0), (usize::MAX, 2), (isize::MAX as usize / 2, 4)] {
        let layout = SlabLayout { slot_bytes, slot_count };
        assert!(Slab::create("bad", layout, PageSize::Standard).is_err(), "{layout:?}");
    }
}

#[test]
#[should_panic(expected = "bytes 60+5")]
fn a_range_beyond_the_slot_is_a_bug() {
    let _ = slab(64, 1).address(0, 60, 5);
}

/// Checks the kernel's own account of the mapping (numa(7)).
#[test]
fn pages_are_wanted_on_a_node() {
    let Ok(maps) = std::fs::read_to_string("/proc/self/numa_maps") else {
        eprintln!("SKIPPED pages_are_wanted_on_a_node: this kernel knows of no NUMA nodes");
        return;
    };
    drop(maps);
    let layout = SlabLayout { slot_bytes: 4096, slot_count: 64 };
    let slab = Slab::create("numa", layout, PageSize::Standard).expect("a slab");
    slab.prefer_numa_node(0).expect("every machine has node 0");
    slab.write(63, 0, b"touched");
    let start = format!("{:08x} ", slab.base().addr().get());
    let maps = std::fs::read_to_string("/proc/self/numa_maps").expect("it was there");
    let line = maps.lines().find(|line| line.starts_with(&start)).expect("the mapping");
    assert!(line.contains("prefer") && line.contains(":0 "), "{line}");
    assert!(slab.prefer_numa_node(1023).is_err(), "no machine has so many");
    assert!(slab.prefer_numa_node(1024).is_err());
}
