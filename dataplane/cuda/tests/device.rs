//! The same over a real device, where there is one: `cargo test -p dataplane-cuda --test device -- --nocapture` prints
//! what was found and how fast copies were. Without a device each test says why it is skipped.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dataplane_cuda::{
    Completion, CopyQueue, CopyQueueConfig, CopyRequest, Cuda, Device, DeviceMemory, DeviceSlab, DirectProbe,
    DmaBufMapping, GpuDirect, Module, Pinned, Place, Priority, Region, RegionId, Rows, Stream, compile,
};
use dataplane_memory::{PageSize, Slab, SlabLayout};

/// The first device, or `None` after the reason was printed.
fn device() -> Option<Device> {
    match Cuda::open() {
        Ok(cuda) => Some(cuda.device(0).expect("the first device")),
        Err(reason) => {
            eprintln!("skipped: {reason}");
            None
        }
    }
}

struct Rig {
    device: Device,
    host: Arc<Slab>,
    slab: Arc<DeviceSlab>,
    queue: CopyQueue,
    regions: [RegionId; 2],
}

impl Rig {
    fn new(slot_bytes: usize, slot_count: u32) -> Option<Self> {
        let device = device()?;
        let layout = SlabLayout { slot_bytes, slot_count };
        let host = Arc::new(Slab::create("device test", layout, PageSize::HugeIfAvailable).expect("slab"));
        host.populate(usize::MAX).expect("populate");
        let slab = Arc::new(DeviceSlab::allocate(&device, layout).expect("slab"));
        let stream = Stream::new(&device, Priority::Urgent).expect("stream");
        let mut queue = CopyQueue::new(stream, CopyQueueConfig::default()).expect("queue");
        let started = Instant::now();
        let pinned = Arc::new(Pinned::register(&device, host.clone()).expect("register"));
        let pages = if host.has_huge_pages() { "2 MiB" } else { "4 KiB" };
        eprintln!("pinned {} MiB of {pages} pages in {:?}", host.mapped_bytes() >> 20, started.elapsed());
        let regions = [Region::Host(pinned), Region::Device(slab.clone())];
        let regions = regions.map(|region| queue.add_region(region).expect("region"));
        Some(Self { device, host, slab, queue, regions })
    }

    fn copy(&self, from: usize, to: usize, slots: (u32, u32), rows: Rows) -> CopyRequest {
        let place = |region: usize, slot| Place { region: self.regions[region], slot, offset: 0 };
        CopyRequest { from: place(from, slots.0), to: place(to, slots.1), rows }
    }

    fn drain(&mut self) -> Vec<Completion> {
        let (mut completions, started) = (Vec::new(), Instant::now());
        self.queue.flush();
        while self.queue.in_flight() > 0 {
            self.queue.poll(usize::MAX, &mut completions);
            assert!(started.elapsed() < Duration::from_secs(60), "{} stuck", self.queue.in_flight());
        }
        assert!(completions.iter().all(|end| end.result.is_ok()), "{completions:?}");
        completions
    }
}

#[test]
fn what_is_there() {
    if device().is_none() {
        return;
    }
    let cuda = Cuda::open().expect("open");
    for device in cuda.devices().expect("devices") {
        eprintln!("{device:?}\n{}", device.uuid_text());
        eprintln!("between a NIC and it: {}", GpuDirect::choose(&DirectProbe::of(&device)));
        let address = device.pci_address.expect("address").to_string();
        let sysfs = std::path::Path::new("/sys/bus/pci/devices").join(&address);
        eprintln!("{} {}", sysfs.display(), if sysfs.exists() { "exists" } else { "DOES NOT EXIST" });
        assert!(device.has_unified_addresses && device.memory_bytes > 0 && device.row_pitch_max > 0);
    }
}

#[test]
fn bytes_survive_both_ways_in_pieces_rows_and_batches() {
    let Some(mut rig) = Rig::new(64 << 10, 64) else { return };
    rig.slab.fill(0xEE).expect("fill");
    for slot in 0..32 {
        let bytes: Vec<u8> = (0..64 << 10).map(|at: u32| (at * 7 + slot * 13 + at / 251) as u8).collect();
        rig.host.write(slot, 0, &bytes);
        // Reversed, so that no two are neighbours: one batch.
        let copy = rig.copy(0, 1, (slot, 31 - slot), Rows::contiguous(64 << 10));
        rig.queue.submit(&copy, u64::from(slot)).expect("room");
    }
    assert_eq!(rig.drain().len(), 32);
    eprintln!("32 scattered copies took {} calls of the driver", rig.queue.counters().calls);
    let rows = Rows { bytes: 100, count: 50, from_stride: 1000, to_stride: 333 };
    for slot in 0..32 {
        let whole = rig.copy(1, 0, (31 - slot, 32 + slot), Rows::contiguous(64 << 10));
        rig.queue.submit(&whole, 0).expect("room");
        rig.queue.submit(&rig.copy(1, 1, (slot, 32 + slot), rows), 1).expect("room");
    }
    rig.drain();
    let (mut sent, mut back) = (vec![0; 64 << 10], vec![0; 64 << 10]);
    for slot in 0..32 {
        rig.host.read(slot, 0, &mut sent);
        rig.host.read(32 + slot, 0, &mut back);
        assert!(sent == back, "slot {slot}");
        rig.slab.read((63 - slot as usize) * (64 << 10), &mut back).expect("read");
        for row in 0..50 {
            assert!(back[row * 333..][..100] == sent[row * 1000..][..100], "slot {slot}, row {row}");
            assert!(row == 49 || back[row * 333 + 100..(row + 1) * 333].iter().all(|&byte| byte == 0xEE));
        }
    }
}

#[test]
fn exports_have_an_outcome() {
    let Some(device) = device() else { return };
    let layout = SlabLayout { slot_bytes: 1 << 20, slot_count: 4 };
    let slab = DeviceSlab::allocate(&device, layout).expect("slab");
    eprintln!("address {:#x}, a NIC may register it: {}", slab.address(), slab.has_peer_memory());
    for mapping in [DmaBufMapping::Automatic, DmaBufMapping::Bar] {
        eprintln!("DMA buffer, {mapping:?}: {:?}", slab.dma_buf(mapping));
    }
    let export = slab.dma_buf(DmaBufMapping::Automatic);
    if device.description().has_dma_buf && device.description().has_direct_access {
        export.as_ref().expect("the device says that it exports");
    }
    let probe = DirectProbe { export: Some(export.map(drop)), ..DirectProbe::of(device.description()) };
    eprintln!("with that: {}", GpuDirect::choose(&probe));
    eprintln!("IPC: {:?}", slab.export_ipc().map(|_| "exported"));
}

#[test]
fn a_compiled_kernel_runs() {
    let Some(mut rig) = Rig::new(4096, 1) else { return };
    let source = "extern \"C\" __global__ void add(unsigned *words, unsigned count, unsigned value) {
        unsigned thread = blockIdx.x * blockDim.x + threadIdx.x;
        if (thread < count) words[thread] += value;
    }";
    let (major, minor) = rig.device.description().compute_capability;
    let image = match compile(source, "add.cu", &[&format!("--gpu-architecture=compute_{major}{minor}")]) {
        Ok(image) => image,
        Err(reason) => return eprintln!("skipped: {reason}"),
    };
    let module = match Module::load(&rig.device, image.bytes()) {
        Ok(module) => module,
        Err(error) => return eprintln!("skipped: the compiler may be newer than the driver: {error}"),
    };
    let add = module.function("add").expect("function");
    rig.slab.fill(0).expect("fill");
    let (mut address, mut count, mut value) = (rig.slab.address(), 1000_u32, 3_u32);
    for _ in 0..3 {
        let mut parameters: [*mut c_void; 3] =
            [(&raw mut address).cast(), (&raw mut count).cast(), (&raw mut value).cast()];
        // SAFETY: the kernel's three parameters; it stays inside the slab, which outlives it.
        unsafe { rig.queue.stream().launch(&add, [4, 1, 1], [256, 1, 1], 0, &mut parameters) }
            .expect("launch");
    }
    rig.queue.submit_batch(&[], 5).expect("room");
    assert_eq!(rig.drain()[0].token, 5);
    let mut bytes = [0; 4096];
    rig.slab.read(0, &mut bytes).expect("read");
    for (at, word) in bytes.chunks(4).enumerate() {
        assert_eq!(word, u32::to_le_bytes(if at < 1000 { 9 } else { 0 }), "word {at}");
    }
    assert!(
        Module::load(&rig.device, b"nonsense").expect_err("no image").to_string().contains("cuModuleLoad")
    );
}

/// Gigabytes per second through the queue, by the clock of the host, beside the driver's own call on the same pinned
/// memory: pieces of 256 MiB for the peak, 64 KiB ones that are not neighbours for the cost of a call.
#[test]
fn how_fast_copies_are() {
    let Some(mut rig) = Rig::new(64 << 10, 4096) else { return };
    let total = (64 << 10) * 4096_u64;
    for (name, from, to) in [("host to device", 0, 1), ("device to host", 1, 0)] {
        for scattered in [false, true] {
            let mut best = f64::MAX;
            for _ in 0..5 {
                let started = Instant::now();
                for slot in 0..4096 {
                    let target = if scattered { 4095 - slot } else { slot };
                    let copy = rig.copy(from, to, (slot, target), Rows::contiguous(64 << 10));
                    rig.queue.submit(&copy, 0).expect("room");
                }
                rig.drain();
                best = best.min(started.elapsed().as_secs_f64());
            }
            let shape = if scattered { "4096 scattered pieces of 64 KiB" } else { "one piece of 256 MiB" };
            eprintln!("{name}, queue, {shape}: {:.1} GB/s", total as f64 / best / 1e9);
        }
        let best = plain(&rig, from == 0, total as usize);
        eprintln!("{name}, plain cuMemcpyAsync, one piece of 256 MiB: {:.1} GB/s", total as f64 / best / 1e9);
    }
    eprintln!("{:?}", rig.queue.counters());
}

/// Seconds of the best of five of the driver's own copies, without anything of this crate around them.
fn plain(rig: &Rig, is_down: bool, bytes: usize) -> f64 {
    use cudarc::driver::sys;
    let host = rig.host.address(0, 0, 0).addr().get() as u64;
    let (to, from) = if is_down { (rig.slab.address(), host) } else { (host, rig.slab.address()) };
    let stream: sys::CUstream = rig.queue.stream().handle().cast();
    let mut context = std::ptr::null_mut();
    // SAFETY: the device is initialised; its context is retained by the rig too.
    let retained = unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, 0) };
    assert_eq!(retained, sys::CUresult::CUDA_SUCCESS);
    // SAFETY: retained just now.
    assert_eq!(unsafe { sys::cuCtxPushCurrent_v2(context) }, sys::CUresult::CUDA_SUCCESS);
    let once = || {
        let started = Instant::now();
        // SAFETY: both ranges have that many bytes, and live until the stream is synchronised.
        let copied = unsafe { sys::cuMemcpyAsync(to, from, bytes, stream) };
        assert_eq!(copied, sys::CUresult::CUDA_SUCCESS);
        rig.queue.stream().synchronise().expect("synchronise");
        started.elapsed().as_secs_f64()
    };
    let best = (0..5).map(|_| once()).fold(f64::MAX, f64::min);
    // SAFETY: pushed above, on this thread.
    let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut context) };
    // SAFETY: retained above, and not used any more.
    let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(0) };
    best
}
