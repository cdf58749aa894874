//! A test engine: tensors, a stream, and a store through the functions that C calls.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;
use std::time::Duration;

use dataplane_cuda::{Device, DeviceMemory, DeviceSlab, Priority, Stream};
use dataplane_memory::SlabLayout;
use kvasir_kv::buffers::Buffer;
use kvasir_kv::{Completion, Handle, Plane, Statistics, Status, Tensors, Transfer};
use libloading::Library;

use crate::harness::Random;

pub(crate) type Identity = [u8; 16];

/// Returns an identity all of whose bits depend on the numbers, like a hash.
pub(crate) fn name(round: u64, at: u64) -> Identity {
    let number = u128::from(round * 1000 + at + 1);
    number.wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835).to_le_bytes()
}

pub(crate) fn payload(seed: u8, bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at as u8).wrapping_mul(31) ^ (at >> 8) as u8 ^ seed).collect()
}

/// Planes one after the other in one piece of memory, and the bytes expected in it.
pub(crate) struct Engine {
    memory: Result<Arc<DeviceSlab>, Vec<u8>>,
    pub(crate) planes: Vec<Plane>,
    offsets: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
    pub(crate) blocks: u64,
    pub(crate) device: i32,
}

impl Engine {
    /// Planes of these strides and pieces, full of random bytes, in the device's memory.
    pub(crate) fn new(
        device: &Device,
        random: &mut Random,
        shapes: &[(usize, usize)],
        blocks: usize,
    ) -> Self {
        let total: usize = shapes.iter().map(|(stride, _)| stride * blocks).sum();
        let layout = SlabLayout { slot_bytes: total, slot_count: 1 };
        let memory = DeviceSlab::allocate(device, layout).expect("memory");
        let bytes = random.bytes(total);
        memory.write(0, &bytes).expect("write");
        let start = std::ptr::without_provenance_mut(memory.address() as usize);
        Self::over(Ok(Arc::new(memory)), start, shapes, blocks, bytes)
    }

    /// As [`Self::new`], in host memory.
    pub(crate) fn on_host(random: &mut Random, shapes: &[(usize, usize)], blocks: usize) -> Self {
        let total: usize = shapes.iter().map(|(stride, _)| stride * blocks).sum();
        let bytes = random.bytes(total);
        let mut memory = bytes.clone();
        let start = memory.as_mut_ptr();
        Self::over(Err(memory), start, shapes, blocks, bytes)
    }

    fn over(
        memory: Result<Arc<DeviceSlab>, Vec<u8>>,
        start: *mut u8,
        shapes: &[(usize, usize)],
        blocks: usize,
        bytes: Vec<u8>,
    ) -> Self {
        let (mut planes, mut offsets, mut offset) = (Vec::new(), Vec::new(), 0);
        for (stride, piece) in shapes {
            let (block_stride, block_bytes) = (*stride as u64, *piece as u64);
            planes.push(Plane { start: start.wrapping_add(offset).cast(), block_stride, block_bytes });
            offsets.push(offset);
            offset += stride * blocks;
        }
        Self { memory, planes, offsets, bytes, blocks: blocks as u64, device: 0 }
    }

    pub(crate) fn memory(&self) -> &Arc<DeviceSlab> {
        self.memory.as_ref().expect("on a device")
    }

    pub(crate) fn address(&self) -> u64 {
        self.memory().address()
    }

    /// Returns the current bytes of all planes.
    pub(crate) fn read(&self) -> Vec<u8> {
        match &self.memory {
            Err(host) => host.clone(),
            Ok(memory) => {
                let mut bytes = vec![0; self.bytes.len()];
                memory.read(0, &mut bytes).expect("read");
                bytes
            }
        }
    }

    fn pieces(&self, block: u64) -> impl Iterator<Item = std::ops::Range<usize>> {
        self.planes.iter().zip(&self.offsets).map(move |(plane, offset)| {
            let start = offset + (block * plane.block_stride) as usize;
            start..start + plane.block_bytes as usize
        })
    }

    /// The expected bytes of a block.
    pub(crate) fn payload(&self, block: u64) -> Vec<u8> {
        self.pieces(block).flat_map(|piece| self.bytes[piece].to_vec()).collect()
    }

    /// The current bytes of a block.
    pub(crate) fn payload_now(&mut self, block: u64) -> Vec<u8> {
        self.bytes = self.read();
        self.payload(block)
    }

    /// Sets the expected bytes of a block.
    pub(crate) fn put(&mut self, block: u64, payload: &[u8]) {
        let (mut rest, pieces) = (payload, self.pieces(block).collect::<Vec<_>>());
        for piece in pieces {
            let (now, later) = rest.split_at(piece.len());
            self.bytes[piece].copy_from_slice(now);
            rest = later;
        }
    }
}

/// An open store with its C handle; closed on drop.
pub(crate) struct Rig(pub(crate) *mut Handle);

impl Rig {
    pub(crate) fn new(handle: *mut Handle) -> Self {
        Self(handle)
    }

    pub(crate) fn try_register(&self, engine: &Engine) -> (i32, u64) {
        let tensors = Tensors {
            memory: u32::from(engine.memory.is_ok()),
            device: engine.device,
            blocks: engine.blocks,
            planes: engine.planes.as_ptr(),
            plane_count: engine.planes.len(),
        };
        let mut id = 0;
        // SAFETY: the tensors have their planes, and tests keep an engine for longer than transfers on it.
        let status = unsafe { kvasir_kv::kvasir_kv_register(self.0, &raw const tensors, &raw mut id) };
        (status, id)
    }

    pub(crate) fn register(&self, engine: &Engine) -> u64 {
        let (status, id) = self.try_register(engine);
        assert_eq!(status, 0, "{}", self.last_error());
        id
    }

    /// Returns the error with which the engine's tensors are refused.
    pub(crate) fn refused(&self, engine: &Engine) -> String {
        assert_eq!(self.try_register(engine), (Status::InvalidArgument as i32, 0));
        self.last_error()
    }

    pub(crate) fn unregister(&self, id: u64) -> i32 {
        kvasir_kv::kvasir_kv_unregister(self.0, id)
    }

    pub(crate) fn submit(
        &self,
        operation: u32,
        user: u64,
        tensors: u64,
        names: &[Identity],
        blocks: &[u64],
        event: *mut c_void,
    ) {
        self.submit_within(operation, user, tensors, names, blocks, event, 0);
    }

    /// As [`Self::submit`]; `deadline_us` limits a load, unless it is 0.
    #[expect(clippy::too_many_arguments, reason = "the fields of a transfer")]
    pub(crate) fn submit_within(
        &self,
        operation: u32,
        user: u64,
        tensors: u64,
        names: &[Identity],
        blocks: &[u64],
        event: *mut c_void,
        deadline_us: u32,
    ) {
        assert_eq!(names.len(), blocks.len());
        let (identities, count) = (names.as_ptr(), names.len());
        let blocks = blocks.as_ptr();
        let (bytes, is_chain) = (size_of::<Transfer>() as u32, u32::from(operation == 5));
        let (parent, position) = (std::ptr::null(), 0);
        let transfer = Transfer {
            user,
            operation,
            bytes,
            tensors,
            identities,
            blocks,
            count,
            event,
            parent,
            position,
            is_chain,
            deadline_us,
            held: 0,
            tenant: 0,
            reserved: 0,
        };
        // SAFETY: the arrays are there, and tests keep an engine for longer than transfers on it.
        let status = unsafe { kvasir_kv::kvasir_kv_submit_transfer(self.0, &raw const transfer) };
        assert_eq!(status, 0, "{}", self.last_error());
    }

    pub(crate) fn poll(&self, patience: Duration) -> Completion {
        let mut end = Completion { user: 0, status: 99, reserved: 0, meta_bytes: 0, payload_bytes: 0 };
        let mut count = 0;
        let timeout_ms = patience.as_millis() as i32;
        // SAFETY: room for one completion.
        unsafe { kvasir_kv::kvasir_kv_poll(self.0, &raw mut end, 1, timeout_ms, &raw mut count) };
        assert_eq!(count, 1, "no completion");
        end
    }

    fn moved(&self, operation: u32, id: u64, names: &[Identity], blocks: &[u64]) -> (i32, u64) {
        self.submit(operation, 3, id, names, blocks, std::ptr::null_mut());
        let end = self.poll(Duration::from_secs(30));
        if end.status < 0 {
            eprintln!("{}", self.last_error());
        }
        (end.status, end.payload_bytes)
    }

    /// Saves blocks. Returns the status, and the number of stored blocks.
    pub(crate) fn save(&self, id: u64, names: &[Identity], blocks: &[u64]) -> (i32, u64) {
        self.moved(5, id, names, blocks)
    }

    /// Loads blocks. Returns the status, and the number of loaded blocks.
    pub(crate) fn load(&self, id: u64, names: &[Identity], blocks: &[u64]) -> (i32, u64) {
        self.moved(6, id, names, blocks)
    }

    /// Returns the meta and payload of a block; `None` if it is absent.
    pub(crate) fn get(&self, name: &Identity) -> Option<(Vec<u8>, Vec<u8>)> {
        let (mut meta, mut payload) = (vec![0; 400], vec![0; 64 << 10]);
        let [to_meta, to_payload] = [&mut meta, &mut payload]
            .map(|bytes| Buffer { start: bytes.as_mut_ptr().cast(), bytes: bytes.len() });
        let (mut meta_bytes, mut payload_bytes) = (0, 0);
        // SAFETY: both buffers are this function's own.
        let status = unsafe {
            kvasir_kv::kvasir_kv_get(
                self.0,
                name,
                &raw const to_meta,
                &raw const to_payload,
                1,
                &raw mut meta_bytes,
                &raw mut payload_bytes,
            )
        };
        assert!(status >= 0, "{}", self.last_error());
        meta.truncate(meta_bytes);
        payload.truncate(payload_bytes);
        (status == 0).then_some((meta, payload))
    }

    pub(crate) fn put(&self, name: &Identity, meta: &[u8], payload: &[u8]) {
        let [meta, payload] = [meta, payload]
            .map(|bytes| Buffer { start: bytes.as_ptr().cast_mut().cast(), bytes: bytes.len() });
        // SAFETY: both buffers are only read.
        let status =
            unsafe { kvasir_kv::kvasir_kv_put(self.0, name, &raw const meta, &raw const payload, 1) };
        assert_eq!(status, 0, "{}", self.last_error());
    }

    pub(crate) fn delete(&self, name: &Identity) {
        // SAFETY: one identity.
        assert_eq!(unsafe { kvasir_kv::kvasir_kv_delete(self.0, name) }, 0);
    }

    pub(crate) fn statistics(&self) -> Statistics {
        let mut statistics = Statistics::default();
        // SAFETY: room for all of them.
        let status =
            unsafe { kvasir_kv::kvasir_kv_stats(self.0, &raw mut statistics, size_of::<Statistics>()) };
        assert_eq!(status, 0);
        statistics
    }

    pub(crate) fn last_error(&self) -> String {
        let mut text = vec![0_u8; 500];
        // SAFETY: room for as many bytes.
        let length = unsafe { kvasir_kv::kvasir_kv_last_error(text.as_mut_ptr().cast(), text.len()) };
        text.truncate(length.min(499));
        String::from_utf8(text).expect("UTF-8")
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        assert_eq!(kvasir_kv::kvasir_kv_close(self.0), 0);
    }
}

/// The driver calls that an engine makes itself: work on its own stream, and events.
pub(crate) struct EngineStream {
    driver: Library,
    context: *mut c_void,
    stream: Stream,
}

impl EngineStream {
    pub(crate) fn new(device: &Device) -> Self {
        // SAFETY: the double is loaded under this name, and has no initialisers.
        let driver = unsafe { Library::new("libcuda.so.1") }.expect("the double");
        let stream = Stream::new(device, Priority::Urgent).expect("stream");
        let mut engine = Self { driver, context: std::ptr::null_mut(), stream };
        type Retain = unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_uint;
        // SAFETY: the function's type, by the driver's header.
        let retain = unsafe { engine.driver.get::<Retain>(b"cuDevicePrimaryCtxRetain") }.expect("function");
        // SAFETY: writes one handle; the first device's number is 0.
        assert_eq!(unsafe { retain(&raw mut engine.context, 0) }, 0);
        engine
    }

    /// Calls the driver with the context current.
    fn within(&self, call: impl FnOnce(&Library) -> c_uint) {
        type Push = unsafe extern "C" fn(*mut c_void) -> c_uint;
        type Pop = unsafe extern "C" fn(*mut *mut c_void) -> c_uint;
        // SAFETY: the functions' types, by the driver's header.
        let push = unsafe { self.driver.get::<Push>(b"cuCtxPushCurrent_v2") }.expect("function");
        // SAFETY: as above.
        let pop = unsafe { self.driver.get::<Pop>(b"cuCtxPopCurrent_v2") }.expect("function");
        // SAFETY: the context is retained.
        assert_eq!(unsafe { push(self.context) }, 0);
        let called = call(&self.driver);
        let mut popped = std::ptr::null_mut();
        // SAFETY: writes one handle.
        assert_eq!((called, unsafe { pop(&raw mut popped) }), (0, 0));
    }

    /// Enqueues a copy of device memory.
    pub(crate) fn copy(&self, from: u64, to: u64, bytes: usize) {
        type Copy = unsafe extern "C" fn(u64, u64, usize, *mut c_void) -> c_uint;
        self.within(|driver| {
            // SAFETY: the function's type, by the driver's header.
            let copy = unsafe { driver.get::<Copy>(b"cuMemcpyAsync") }.expect("function");
            // SAFETY: the caller's memory, and a stream that lives.
            unsafe { copy(to, from, bytes, self.stream.handle()) }
        });
    }

    /// Records an event behind all work on the stream.
    pub(crate) fn record(&self) -> *mut c_void {
        type Create = unsafe extern "C" fn(*mut *mut c_void, c_uint) -> c_uint;
        type Record = unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_uint;
        let mut event = std::ptr::null_mut();
        self.within(|driver| {
            // SAFETY: the function's type, by the driver's header.
            let create = unsafe { driver.get::<Create>(b"cuEventCreate") }.expect("function");
            // SAFETY: writes one handle; the flag turns the time off.
            unsafe { create(&raw mut event, 2) }
        });
        self.within(|driver| {
            // SAFETY: the function's type, by the driver's header.
            let record = unsafe { driver.get::<Record>(b"cuEventRecord") }.expect("function");
            // SAFETY: event and stream live.
            unsafe { record(event, self.stream.handle()) }
        });
        event
    }

    pub(crate) fn destroy(&self, event: *mut c_void) {
        type Destroy = unsafe extern "C" fn(*mut c_void) -> c_uint;
        self.within(|driver| {
            // SAFETY: the function's type, by the driver's header.
            let destroy = unsafe { driver.get::<Destroy>(b"cuEventDestroy_v2") }.expect("function");
            // SAFETY: made by `record`, destroyed once.
            unsafe { destroy(event) }
        });
    }
}

impl Drop for EngineStream {
    fn drop(&mut self) {
        type Release = unsafe extern "C" fn(c_int) -> c_uint;
        // SAFETY: the function's type, by the driver's header.
        let release =
            unsafe { self.driver.get::<Release>(b"cuDevicePrimaryCtxRelease_v2") }.expect("function");
        // SAFETY: retained by this value.
        unsafe { release(0) };
    }
}
