//! The double answers misuse as the driver does: what passed over it by accident would fail on a device. And this
//! crate's calls leave a thread's own context alone.

use std::ffi::c_void;

use cudarc::driver::sys::{self, CUresult};
use dataplane_cuda::{Cuda, Device, DeviceMemory, DeviceSlab, Priority, Stream};
use dataplane_memory::SlabLayout;

use crate::double::Double;

/// The device's context is current on this thread until the end.
struct Current {
    context: sys::CUcontext,
    ordinal: i32,
}

impl Current {
    fn new(ordinal: i32) -> Self {
        let mut context = std::ptr::null_mut();
        // SAFETY: writes one handle.
        let retained = unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, ordinal) };
        assert_eq!(retained, CUresult::CUDA_SUCCESS);
        // SAFETY: retained just now.
        assert_eq!(unsafe { sys::cuCtxPushCurrent_v2(context) }, CUresult::CUDA_SUCCESS);
        Self { context, ordinal }
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        let mut context = std::ptr::null_mut();
        // SAFETY: pushed in `new`, on this thread.
        assert_eq!(unsafe { sys::cuCtxPopCurrent_v2(&mut context) }, CUresult::CUDA_SUCCESS);
        assert_eq!(context, self.context);
        // SAFETY: retained in `new`.
        assert_eq!(unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.ordinal) }, CUresult::CUDA_SUCCESS);
    }
}

fn device() -> Device {
    Cuda::open().expect("the double starts").device(0).expect("device")
}

#[test]
fn misuse_has_the_drivers_codes() {
    let Some(double) = Double::load() else { return };
    Cuda::open().expect("open");
    let mut address = 0;
    // SAFETY: writes one address.
    let mut allocate = || unsafe { sys::cuMemAlloc_v2(&mut address, 4096) };
    assert_eq!(allocate(), CUresult::CUDA_ERROR_INVALID_CONTEXT, "no context is current");
    let _current = Current::new(0);
    assert_eq!(allocate(), CUresult::CUDA_SUCCESS);

    let mut host = vec![3_u8; 3 * 4096];
    let start = host.as_mut_ptr();
    let mut stream = std::ptr::null_mut();
    // SAFETY: writes one handle.
    assert_eq!(unsafe { sys::cuStreamCreateWithPriority(&mut stream, 1, 0) }, CUresult::CUDA_SUCCESS);
    // SAFETY: wrong on purpose; the double checks each range before it copies.
    let copy = |from: u64, bytes, stream| unsafe { sys::cuMemcpyAsync(address, from, bytes, stream) };
    let from = start as u64;
    assert_eq!(double.growth("pageable", || assert_eq!(copy(from, 4096, stream), CUresult::CUDA_SUCCESS)), 1);
    assert_eq!(copy(from, 4097, stream), CUresult::CUDA_ERROR_INVALID_VALUE, "beyond the allocation");
    assert_eq!(copy(0, 16, stream), CUresult::CUDA_ERROR_INVALID_VALUE, "nowhere");
    // SAFETY: the range lives until it is unregistered below.
    let registered = unsafe { sys::cuMemHostRegister_v2(start.cast(), 4096, 3) };
    assert_eq!(registered, CUresult::CUDA_SUCCESS);
    // SAFETY: refused, since it is registered.
    let again = unsafe { sys::cuMemHostRegister_v2(start.wrapping_add(100).cast(), 4096, 3) };
    assert_eq!(again, CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    assert_eq!(copy(from + 100, 4096, stream), CUresult::CUDA_ERROR_INVALID_VALUE, "leaves its registration");
    // SAFETY: as the driver wants it, then once too often.
    let unregister = || unsafe { sys::cuMemHostUnregister(start.cast()) };
    assert_eq!(unregister(), CUresult::CUDA_SUCCESS);
    assert_eq!(unregister(), CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);

    // SAFETY: as the driver wants it, then once too often.
    let free = || unsafe { sys::cuMemFree_v2(address) };
    assert_eq!(free(), CUresult::CUDA_SUCCESS);
    assert_eq!(free(), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(copy(from, 16, stream), CUresult::CUDA_ERROR_INVALID_VALUE, "freed");
    // SAFETY: as the driver wants it.
    assert_eq!(unsafe { sys::cuStreamDestroy_v2(stream) }, CUresult::CUDA_SUCCESS);
    // SAFETY: wrong on purpose; the double knows its streams.
    assert_eq!(unsafe { sys::cuStreamSynchronize(stream) }, CUresult::CUDA_ERROR_INVALID_HANDLE);
}

#[test]
fn the_threads_context_is_what_it_was() {
    let Some(double) = Double::load() else { return };
    let device = device();
    let _current = Current::new(1);
    let before: *mut c_void = double.current_context();
    let slab = DeviceSlab::allocate(&device, SlabLayout { slot_bytes: 4096, slot_count: 1 }).expect("slab");
    slab.write(0, b"one").expect("write");
    assert!(slab.write(4096, b"one").is_err());
    let stream = Stream::new(&device, Priority::Urgent).expect("stream");
    stream.synchronise().expect("synchronise");
    drop((stream, slab, device));
    assert!(!before.is_null() && double.current_context() == before);
}

#[test]
fn the_priorities_are_the_ends_of_the_devices_range() {
    let Some(_double) = Double::load() else { return };
    let (device, _current) = (device(), Current::new(0));
    for (priority, expected) in [(Priority::Urgent, -5), (Priority::Background, 0)] {
        let stream = Stream::new(&device, priority).expect("stream");
        let mut found = 99;
        // SAFETY: writes one integer; the stream lives.
        let asked = unsafe { sys::cuStreamGetPriority(stream.handle().cast(), &mut found) };
        assert_eq!((asked, found), (CUresult::CUDA_SUCCESS, expected));
    }
}
