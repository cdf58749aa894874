//! Kernels, over the double of the driver and an emulator of one kernel.

use std::ffi::c_void;
use std::sync::Arc;

use dataplane_cuda::{
    CopyQueue, CopyQueueConfig, Cuda, Device, DeviceMemory, DeviceSlab, Function, Module, Priority, Stream,
};
use dataplane_memory::SlabLayout;

use crate::double::{self, Double};

const WORDS: u32 = 100;

struct Rig {
    device: Device,
    slab: Arc<DeviceSlab>,
    module: Module,
}

impl Rig {
    fn new() -> Self {
        let device = Cuda::open().expect("the double starts").device(0).expect("device");
        let emulator =
            double::shared_object("emulator", include_str!("../double/emulator.c"), &[]).expect("a compiler");
        let image = format!("emulator:{}\n", emulator.display());
        let module = Module::load(&device, image.as_bytes()).expect("load");
        let layout = SlabLayout { slot_bytes: 4 * WORDS as usize, slot_count: 1 };
        let slab = Arc::new(DeviceSlab::allocate(&device, layout).expect("slab"));
        slab.fill(0).expect("fill");
        Self { device, slab, module }
    }

    fn launch(&self, stream: &Stream, function: &Function, count: u32, value: u32) {
        let (mut address, mut count, mut value) = (self.slab.address(), count, value);
        let mut parameters: [*mut c_void; 3] =
            [(&raw mut address).cast(), (&raw mut count).cast(), (&raw mut value).cast()];
        // SAFETY: the three parameters of the kernel, which stays inside the slab; the caller waits for its end.
        unsafe { stream.launch(function, [4, 1, 1], [32, 1, 1], 0, &mut parameters) }.expect("launch");
        // Read during the call: what the caller does with them is its own affair.
        (address, count, value) = (0, 0, 0);
        let _ = (address, count, value);
    }

    fn words(&self) -> Vec<u32> {
        let mut bytes = [0; 4 * WORDS as usize];
        self.slab.read(0, &mut bytes).expect("read");
        bytes.chunks(4).map(|word| u32::from_le_bytes(word.try_into().expect("four"))).collect()
    }
}

#[test]
fn a_kernel_runs_on_its_stream_and_its_end_is_polled() {
    let Some(double) = Double::load() else { return };
    let rig = Rig::new();
    let add = rig.module.function("add_words").expect("function");
    let stream = Stream::new(&rig.device, Priority::Background).expect("stream");
    let mut queue = CopyQueue::new(stream, CopyQueueConfig::default()).expect("queue");
    double.set("delay_us", 10_000);
    rig.launch(queue.stream(), &add, 60, 5);
    rig.launch(queue.stream(), &add, WORDS, 2);
    queue.submit_batch(&[], 77).expect("room");
    queue.flush();
    let mut completions = Vec::new();
    assert_eq!(queue.poll(1, &mut completions), 0, "the kernels take 20 ms");
    while queue.poll(1, &mut completions) == 0 {}
    assert!(completions[0].token == 77 && completions[0].result.is_ok());
    let expected: Vec<u32> = (0..WORDS).map(|at| if at < 60 { 7 } else { 2 }).collect();
    assert_eq!(rig.words(), expected);
}

#[test]
fn images_functions_and_launches_that_are_wrong_are_errors() {
    let Some(_double) = Double::load() else { return };
    let rig = Rig::new();
    let error = Module::load(&rig.device, b".version 8.0").expect_err("not an emulator's").to_string();
    assert!(error.contains("CUDA_ERROR_INVALID_PTX (218): the image names no emulator"), "{error}");
    let error = rig.module.function("subtract").expect_err("none").to_string();
    assert!(error.contains("subtract: CUDA_ERROR_NOT_FOUND"), "{error}");
    assert!(rig.module.function("a\0b").is_err());
    let crash = rig.module.function("crash").expect("function");
    let stream = Stream::new(&rig.device, Priority::Urgent).expect("stream");
    for (grid, block, shared) in
        [([0, 1, 1], [1, 1, 1], 0), ([1, 1, 1], [1025, 1, 1], 0), ([1; 3], [1; 3], 1 << 20)]
    {
        // SAFETY: the kernel has no parameters.
        let launched = unsafe { stream.launch(&crash, grid, block, shared, &mut []) };
        assert_eq!(launched.expect_err("wrong").name, "CUDA_ERROR_INVALID_VALUE");
    }
    // SAFETY: the kernel has no parameters.
    unsafe { stream.launch(&crash, [1; 3], [1; 3], 0, &mut []) }.expect("it starts");
    assert_eq!(stream.synchronise().expect_err("crashed").name, "CUDA_ERROR_LAUNCH_FAILED");
}
