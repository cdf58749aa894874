//! Devices and memory, over the double of the driver.

use std::io::Write;
use std::process::{Command, Stdio};
use std::sync::Arc;

use dataplane_cuda::{
    Cuda, Device, DeviceMemory, DeviceSlab, DirectProbe, DmaBufMapping, DriverVersion, GpuDirect, IpcHandle,
    Pinned, Unavailable,
};
use dataplane_memory::{PageSize, Slab, SlabLayout};

use crate::double::Double;

fn device(ordinal: u32) -> Device {
    Cuda::open().expect("the double starts").device(ordinal).expect("device")
}

fn slab(device: &Device, slot_bytes: usize, slot_count: u32) -> DeviceSlab {
    DeviceSlab::allocate(device, SlabLayout { slot_bytes, slot_count }).expect("slab")
}

fn host(slot_bytes: usize, slot_count: u32) -> Arc<Slab> {
    let layout = SlabLayout { slot_bytes, slot_count };
    Arc::new(Slab::create("cuda test", layout, PageSize::Standard).expect("slab"))
}

#[test]
fn devices_are_described() {
    let Some(_double) = Double::load() else { return };
    let cuda = Cuda::open().expect("the double starts");
    assert_eq!(cuda.driver_version().to_string(), "12.8");
    let devices = cuda.devices().expect("devices");
    assert_eq!(devices.len(), 2);
    let second = &devices[1];
    assert_eq!((second.ordinal, second.name.as_str()), (1, "Double 1"));
    assert_eq!(second.pci_address.expect("address").to_string(), "0000:ac:00.0");
    assert_eq!(second.uuid_text(), "GPU-f1e1d1c1-b1a1-9181-7161-514131211101");
    assert_eq!((second.memory_bytes, second.compute_capability, second.copy_engines), (1 << 30, (9, 0), 3));
    assert!(second.has_dma_buf && second.has_direct_access && second.has_unified_addresses);
    assert!(cuda.device(2).expect_err("there is none").to_string().contains("CUDA_ERROR_INVALID_DEVICE"));
}

#[test]
fn a_driver_that_does_not_work_says_why() {
    let Some(double) = Double::load() else { return };
    let version = DriverVersion(12_080);
    double.set("initialise", 100);
    assert_eq!(Cuda::open().expect_err("no device"), Unavailable::NoDevice { version });
    double.set("initialise", 803);
    let text = "the CUDA driver 12.8 does not start: cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)";
    assert_eq!(Cuda::open().expect_err("broken").to_string(), text);
    double.set("initialise", 98_765);
    assert!(Cuda::open().expect_err("broken").to_string().contains("an unknown error (98765)"));
    double.set("initialise", 0);
    double.set("devices", 0);
    assert_eq!(Cuda::open().expect_err("no device"), Unavailable::NoDevice { version });
}

#[test]
fn slots_are_disjoint_and_ranges_outside_are_errors() {
    let Some(_double) = Double::load() else { return };
    let slab = slab(&device(0), 1000, 3);
    assert_eq!(slab.bytes(), 3072);
    slab.fill(0xAB).expect("fill");
    let start = slab.try_address(1, 0, 1000).expect("slot") - slab.address();
    slab.write(start as usize, &[7; 1000]).expect("write");
    let mut bytes = vec![0; 3072];
    slab.read(0, &mut bytes).expect("read");
    let expected: Vec<u8> = [[0xAB; 1024], [7; 1024], [0xAB; 1024]].concat();
    assert_eq!(bytes[..2024], expected[..2024]);
    assert_eq!(bytes[2024..], expected[2048..][..1].repeat(1048));
    for (slot, offset, len) in [(3, 0, 1), (2, 1000, 1), (0, 0, 1001), (0, usize::MAX, 2)] {
        assert_eq!(slab.try_address(slot, offset, len), None, "{slot} {offset} {len}");
    }
    assert!(slab.write(3000, &[0; 73]).expect_err("outside").reason.contains("3000+73"));
    assert!(slab.read(usize::MAX, &mut [0]).is_err());
    slab.read(3072, &mut []).expect("nothing");
}

#[test]
fn a_part_is_inside_its_whole_and_keeps_it() {
    let Some(double) = Double::load() else { return };
    let whole = Arc::new(slab(&device(0), 10_000, 1));
    let layout = SlabLayout { slot_bytes: 1000, slot_count: 3 };
    let part = DeviceSlab::part(&whole, 6976, layout).expect("3072 of 10048 bytes");
    assert!(DeviceSlab::part(&whole, 6977, layout).expect_err("outside").reason.contains("6977+3072"));
    assert_eq!(part.try_address(2, 0, 1000), whole.try_address(0, 6976 + 2048, 976));
    part.write(0, b"part").expect("write");
    let mut bytes = [0; 4];
    whole.read(6976, &mut bytes).expect("read");
    assert_eq!(&bytes, b"part");
    drop(whole);
    assert_eq!(double.get("allocations"), 1);
    part.read(0, &mut bytes).expect("read");
}

#[test]
fn the_processor_cannot_read_device_memory() {
    let Some(_double) = Double::load() else { return };
    let slab = slab(&device(0), 4096, 1);
    let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
    let holds = |line: &&str| {
        let (range, _) = line.split_once(' ').expect("range");
        let (start, end) = range.split_once('-').expect("range");
        let number = |digits| u64::from_str_radix(digits, 16).expect("number");
        (number(start)..number(end)).contains(&slab.address())
    };
    let line = maps.lines().find(holds).expect("it is reserved");
    assert!(line.contains(" ---p "), "{line}");
}

#[test]
fn memory_that_is_not_there_is_an_error_and_leaks_nothing() {
    let Some(double) = Double::load() else { return };
    double.set("memory", 8 << 20);
    let device = device(1);
    let first = slab(&device, 5 << 20, 1);
    let layout = SlabLayout { slot_bytes: 2 << 20, slot_count: 2 };
    let text = "cuMemAlloc: 4194304 bytes on device 1: cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY (2)";
    assert_eq!(DeviceSlab::allocate(&device, layout).expect_err("full").to_string(), text);
    drop(first);
    DeviceSlab::allocate(&device, layout).expect("there is room again");
    for layout in [(0, 1), (1, 0), (usize::MAX, 2), (isize::MAX as usize / 2, 2)] {
        let layout = SlabLayout { slot_bytes: layout.0, slot_count: layout.1 };
        assert!(DeviceSlab::allocate(&device, layout).is_err(), "{layout:?}");
    }
}

#[test]
fn freed_and_foreign_addresses_are_refused() {
    let Some(_double) = Double::load() else { return };
    let device = device(0);
    let layout = SlabLayout { slot_bytes: 4096, slot_count: 1 };
    let (first, second) = (slab(&device, 4096, 1), slab(&device, 4096, 1));
    let stale = first.address();
    drop(first);
    for address in [stale, 0, second.address() + (2 << 20) - 64] {
        // SAFETY: not upheld on purpose; the double checks each access.
        let adopted = unsafe { DeviceSlab::adopt(&device, address, layout) }.expect("not looked at");
        let refused = adopted.write(0, &[1; 4096]).expect_err("not ours");
        assert_eq!(refused.reason, "CUDA_ERROR_INVALID_VALUE (1)", "{address:#x}");
    }
}

#[test]
fn an_exported_buffer_is_the_slab() {
    let Some(double) = Double::load() else { return };
    let device = device(0);
    let slab = slab(&device, 100, 5);
    slab.write(0, b"device").expect("write");
    for mapping in [DmaBufMapping::Automatic, DmaBufMapping::Bar] {
        let buffer = slab.dma_buf(mapping).expect("export");
        let mut bytes = [0; 6];
        rustix::io::pread(&buffer.descriptor, &mut bytes, buffer.offset).expect("pread");
        assert_eq!(&bytes, b"device");
    }
    // SAFETY: inside the slab, which outlives it.
    let inner = unsafe {
        DeviceSlab::adopt(&device, slab.address() + 2, SlabLayout { slot_bytes: 4, slot_count: 1 })
    };
    let inner = inner.expect("adopt");
    assert_eq!(inner.dma_buf(DmaBufMapping::Bar).expect("export").offset, 2);
    // The page of an allocation of 5 bytes is shared with other allocations, which must not be exported.
    double.set("range_bytes", (64 << 10) + 5);
    let refused = inner.dma_buf(DmaBufMapping::Bar).expect_err("not whole pages").reason;
    assert!(refused.contains("65541 bytes") && refused.contains("64 KiB"), "{refused}");
    slab.dma_buf(DmaBufMapping::Bar).expect("its last page is its own");
    double.set("range_bytes", 0);

    double.set("no_pcie_flag", 1);
    assert!(slab.dma_buf(DmaBufMapping::Bar).is_err(), "the driver chooses the mapping");
    slab.dma_buf(DmaBufMapping::Automatic).expect("as it likes");
    double.set("no_dmabuf", 1);
    let refused = slab.dma_buf(DmaBufMapping::Automatic).expect_err("refused").to_string();
    assert!(
        refused.contains("cuMemGetHandleForAddressRange") && refused.contains("NOT_SUPPORTED (801)"),
        "{refused}"
    );
    let other = Cuda::open().expect("open").device(0).expect("device");
    let slab = DeviceSlab::allocate(&other, slab.layout()).expect("slab");
    let reason = slab.dma_buf(DmaBufMapping::Automatic).expect_err("refused").reason;
    assert_eq!(reason, "the device says that it exports no DMA buffers");
}

/// Memory that was mapped piece by piece: the driver reports only the first piece, and all bytes are
/// exported.
#[test]
fn a_range_over_several_allocations_is_exported_whole() {
    let Some(double) = Double::load() else { return };
    let slab = slab(&device(0), 3 << 20, 2);
    double.set("range_bytes", 2 << 20);
    slab.dma_buf(DmaBufMapping::Bar).expect("export");
    assert_eq!(double.get("exported_bytes"), 6 << 20);
}

#[test]
fn what_a_nic_has_written_is_flushed_where_it_is_not_ordered() {
    let Some(double) = Double::load() else { return };
    for (options, ordering, flushes, is_ok) in
        [(1, 0, 1, true), (1, 100, 0, true), (0, 200, 0, true), (2, 0, 0, false)]
    {
        double.set("flush_options", options);
        double.set("writes_ordering", ordering);
        let slab = slab(&device(0), 4096, 1);
        let flush = || assert_eq!(slab.flush_nic_writes().is_ok(), is_ok, "{options} {ordering}");
        assert_eq!(double.growth("direct_flushes", flush), flushes, "{options} {ordering}");
    }
}

#[test]
fn the_report_follows_what_was_probed() {
    let Some(double) = Double::load() else { return };
    let describe = || Cuda::open().expect("open").devices().expect("devices").remove(0);
    assert_eq!(GpuDirect::choose(&DirectProbe::of(&describe())), GpuDirect::DmaBuf);
    double.set("no_dmabuf", 1);
    let probe = DirectProbe { has_peer_memory: false, ..DirectProbe::of(&describe()) };
    assert_eq!(GpuDirect::choose(&probe).label(), "staged");
}

/// Runs in a process of its own, started by the test below.
#[test]
#[ignore = "the other side of another process attaches a slab"]
fn attach_in_this_process() {
    let Ok(handle) = std::env::var("KVASIR_TEST_IPC") else { return };
    let Some(_double) = Double::load() else { return };
    let byte = |at| u8::from_str_radix(&handle[at * 2..at * 2 + 2], 16).expect("digits");
    let handle = IpcHandle::from_bytes(std::array::from_fn(byte));
    let device = device(0);
    let too_large = SlabLayout { slot_bytes: 4 << 20, slot_count: 1 };
    let error = DeviceSlab::attach(&device, handle, too_large).expect_err("too large");
    assert!(error.reason.contains("the layout needs 4194304"), "{error}");
    let slab =
        DeviceSlab::attach(&device, handle, SlabLayout { slot_bytes: 1000, slot_count: 2 }).expect("attach");
    let mut bytes = [0; 5];
    slab.read(1024, &mut bytes).expect("read");
    assert_eq!(&bytes, b"hello");
    slab.write(1024, b"reply").expect("write");
    for mapping in [DmaBufMapping::Bar, DmaBufMapping::Automatic] {
        assert!(slab.dma_buf(mapping).expect_err("not tried").reason.contains("another process"));
    }
    assert!(slab.export_ipc().is_err(), "not this process's to give away");
}

#[test]
fn another_process_attaches_a_slab() {
    let Some(double) = Double::load() else { return };
    let device = device(0);
    let slab = slab(&device, 1000, 2);
    slab.write(1024, b"hello").expect("write");
    let handle = slab.export_ipc().expect("export");
    let digits: String = handle.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    let output = Command::new(std::env::current_exe().expect("this program"))
        .args(["--ignored", "--exact", "memory::attach_in_this_process", "--nocapture"])
        .env("KVASIR_TEST_IPC", digits)
        .stdin(Stdio::null())
        .output()
        .expect("run");
    std::io::stderr().write_all(&output.stderr).expect("stderr");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    let mut bytes = [0; 5];
    slab.read(1024, &mut bytes).expect("read");
    assert_eq!(&bytes, b"reply");

    let layout = slab.layout();
    let here = DeviceSlab::attach(&device, handle, layout).expect_err("the exporter itself");
    assert!(here.reason.contains("INVALID_CONTEXT"), "{here}");
    let garbage = DeviceSlab::attach(&device, IpcHandle::from_bytes([9; 64]), layout).expect_err("garbage");
    assert!(garbage.reason.contains("INVALID_VALUE"), "{garbage}");
    double.set("no_ipc", 1);
    assert!(slab.export_ipc().expect_err("refused").reason.contains("NOT_SUPPORTED"));
}

#[test]
fn a_slab_is_registered_once_and_as_long_as_it_is_used() {
    let Some(double) = Double::load() else { return };
    let (first, second) = (device(0), device(1));
    let slab = host(1000, 4);
    let pinned = Pinned::register(&first, slab.clone()).expect("register");
    let again = Pinned::register(&second, slab.clone()).expect("again");
    assert_eq!(double.get("registrations"), 1);
    let address = slab.address(3, 5, 10).addr().get() as u64;
    assert_eq!(pinned.device_address(3, 5, 10), Some(address));
    assert_eq!(pinned.device_address(4, 0, 1), None);
    drop((pinned, first));
    assert_eq!((double.get("registrations"), double.get("contexts")), (1, 2), "its context is kept");
    drop(again);
    assert_eq!((double.get("registrations"), double.get("contexts")), (0, 1));
    drop(second);

    let device = device(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                (0..200).for_each(|_| drop(Pinned::register(&device, slab.clone()).expect("register")));
            });
        }
    });
    assert_eq!(double.get("registrations"), 0);
}

#[test]
fn anothers_registration_is_refused_and_one_that_does_not_end_keeps_its_pages() {
    let Some(double) = Double::load() else { return };
    let (device, slab) = (device(0), host(1000, 4));
    double.set("refuse_register", 712);
    let text = Pinned::register(&device, slab.clone()).expect_err("not ours").to_string();
    assert!(text.contains("ALREADY_REGISTERED") && text.contains("somebody else"), "{text}");
    double.set("refuse_register", 0);
    let pinned = Pinned::register(&device, slab.clone()).expect("register");
    let watched = Arc::downgrade(&slab);
    drop(slab);
    double.set("refuse_unregister", 999);
    drop(pinned);
    let kept = watched.upgrade().expect("the device may reach its pages");
    double.set("refuse_unregister", 0);
    drop(Pinned::register(&device, kept).expect("it is known"));
    assert_eq!(double.get("registrations"), 0);
}

#[test]
fn a_refused_registration_says_whether_the_limit_may_be_why() {
    let Some(double) = Double::load() else { return };
    let device = device(0);
    let unlimited = rustix::process::getrlimit(rustix::process::Resource::Memlock);
    double.set("refuse_register", 801);
    let slab = host(1 << 20, 4);
    let error = Pinned::register(&device, slab.clone()).expect_err("refused");
    assert_eq!((error.bytes, error.hint.as_str()), (slab.mapped_bytes(), ""));
    double.set("refuse_register", 2);
    let limit = rustix::process::Rlimit { current: Some(65_536), maximum: unlimited.maximum };
    rustix::process::setrlimit(rustix::process::Resource::Memlock, limit).expect("lower");
    let text = Pinned::register(&device, slab).expect_err("refused").to_string();
    assert!(text.contains("RLIMIT_MEMLOCK is 65536 bytes") && text.contains("OUT_OF_MEMORY"), "{text}");
    rustix::process::setrlimit(rustix::process::Resource::Memlock, unlimited).expect("restore");
}
