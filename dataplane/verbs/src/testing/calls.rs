//! The C interface of the software devices: what `libibverbs` exports, over the state in `world`.
//!
//! The C objects are small boxes that carry a handle; all state is in the world. Each call follows the
//! contract of the man page of the function that it stands for; "the caller" in the safety comments means
//! the caller under that contract.

use std::ffi::{c_char, c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use rustix::io::Errno;

use super::world::{ContextState, DeviceState, ENTRIES_MAX, RegionState, World, event_descriptor, strikes};
use crate::ffi::{
    self, AsyncEvent, Context, ContextOperations, Device, DeviceAttributes, Gid, MemoryRegion,
    PortAttributes, ProtectionDomain,
};
use crate::library::{GidType, Library};

const QUEUE_PAIRS_MAX: usize = 4096;
const WORK_REQUESTS_MAX: u32 = 32 << 10;
/// Fewer entries than a write may have, as on some cards.
const READ_ENTRIES_MAX: usize = 4;
const COMPLETION_ENTRIES_MAX: u32 = 4 << 20;
/// The default partition, a full member of one and a limited member of another.
const PARTITION_KEYS: [u16; 3] = [0xFFFF, 0x8001, 0x0002];

/// Reads a field through a raw pointer that the C contract makes valid.
macro_rules! field {
    ($pointer:expr, $field:ident) => {{
        // SAFETY: the caller passes an object that a call of this file made and that still exists.
        unsafe { (*$pointer).$field }
    }};
}

/// Writes a value through a raw pointer that the C contract makes valid.
macro_rules! put {
    ($pointer:expr, $value:expr) => {{
        // SAFETY: the caller passes a valid place to write to.
        unsafe { $pointer.write($value) }
    }};
}

/// Frees a C object that one of these calls boxed.
macro_rules! free {
    ($pointer:expr) => {{
        // SAFETY: the caller passes an object that a call of this file boxed, once.
        drop(unsafe { Box::from_raw($pointer) })
    }};
}

mod pairs;
mod queues;

use pairs::{create_queue_pair, destroy_queue_pair, modify_queue_pair, post_send};
use queues::{
    acknowledge_completion_events, create_channel, create_completions, create_shared_receives,
    destroy_channel, destroy_completions, destroy_shared_receives, get_completion_event, poll_cq,
    post_shared_receive, request_notify,
};

fn error<T>(errno: Errno) -> *mut T {
    set_errno(errno);
    std::ptr::null_mut()
}

/// Sets the errno that a C function returns. std has no setter; the raw call fails with the wanted number.
fn set_errno(errno: Errno) {
    unsafe extern "C" {
        fn __errno_location() -> *mut c_int;
    }
    // SAFETY: has no precondition; glibc and musl export it.
    let place = unsafe { __errno_location() };
    // SAFETY: the place is this thread's errno.
    unsafe { place.write(errno.raw_os_error()) };
}

pub(super) fn add_device(world: &mut World) -> (u32, String) {
    let index = world.devices.len() as u32;
    let name = format!("soft{index}");
    let mut bytes = [0; 64];
    bytes[..name.len()].copy_from_slice(name.as_bytes());
    let raw = Box::leak(Box::new(Device {
        operations: [std::ptr::null_mut(); 2],
        node_type: 1,
        transport_type: 0,
        name: bytes,
    }));
    world.devices.push(DeviceState {
        raw: std::ptr::from_mut(raw) as usize,
        faults: super::Faults::default(),
        is_cut: false,
        is_holding: false,
        is_discarding: false,
        command_threads: Default::default(),
    });
    (index, name)
}

pub(super) fn library() -> Arc<Library> {
    Arc::new(Library {
        get_device_list,
        free_device_list,
        get_device_name,
        open_device,
        close_device,
        query_device,
        query_port,
        query_gid,
        query_partition_key,
        allocate_domain,
        free_domain,
        register,
        deregister,
        create_channel,
        destroy_channel,
        create_completions,
        destroy_completions,
        get_completion_event,
        acknowledge_completion_events,
        create_shared_receives,
        destroy_shared_receives,
        create_queue_pair,
        destroy_queue_pair,
        modify_queue_pair,
        get_async_event,
        acknowledge_async_event,
        status_text,
        event_text,
        register_iova: Some(register_iova),
        register_dmabuf: Some(register_dmabuf),
        gid_type: |_, _, _| GidType::RoceV2,
        loaded: None,
    })
}

unsafe extern "C" fn get_device_list(count: *mut c_int) -> *mut *mut Device {
    let world = World::lock();
    let mut list: Vec<*mut Device> = world.devices.iter().map(|device| device.raw as *mut Device).collect();
    put!(count, list.len() as c_int);
    list.push(std::ptr::null_mut());
    Box::leak(list.into_boxed_slice()).as_mut_ptr()
}

/// The list is leaked: a few words for each test.
unsafe extern "C" fn free_device_list(_list: *mut *mut Device) {}

unsafe extern "C" fn get_device_name(device: *mut Device) -> *const c_char {
    // SAFETY: devices are never freed.
    unsafe { &raw const (*device).name }.cast()
}

unsafe extern "C" fn open_device(device: *mut Device) -> *mut Context {
    let mut world = World::lock();
    let Some(index) = world.devices.iter().position(|known| known.raw == device as usize) else {
        return error(Errno::NODEV);
    };
    let Some(wake) = event_descriptor() else { return error(Errno::MFILE) };
    let handle = world.handle();
    let nothing = std::ptr::null_mut();
    let context = Context {
        device,
        operations: ContextOperations {
            before_poll: [nothing; 11],
            poll_cq: Some(poll_cq),
            request_notify: Some(request_notify),
            before_post_shared_receive: [nothing; 7],
            post_shared_receive: Some(post_shared_receive),
            before_post_send: [nothing; 4],
            post_send: Some(post_send),
            post_receive: nothing,
            rest: [nothing; 5],
        },
        command_descriptor: handle as c_int,
        async_descriptor: wake.as_raw_fd(),
        completion_vectors: 1,
    };
    let state = ContextState { device: index as u32, events: Default::default(), wake };
    world.contexts.insert(handle, state);
    Box::into_raw(Box::new(context))
}

fn context_of(context: *mut Context) -> u32 {
    field!(context, command_descriptor) as u32
}

unsafe extern "C" fn close_device(context: *mut Context) -> c_int {
    World::lock().contexts.remove(&context_of(context));
    free!(context);
    0
}

unsafe extern "C" fn query_device(_context: *mut Context, attributes: *mut DeviceAttributes) -> c_int {
    // SAFETY: zero is a valid value of every field of this plain struct.
    let mut found: DeviceAttributes = unsafe { std::mem::zeroed() };
    found.queue_pairs_max = QUEUE_PAIRS_MAX as c_int;
    found.work_requests_max = WORK_REQUESTS_MAX as c_int;
    found.entries_max = ENTRIES_MAX as c_int;
    found.read_entries_max = READ_ENTRIES_MAX as c_int;
    found.completion_entries_max = COMPLETION_ENTRIES_MAX as c_int;
    found.regions_max = 1 << 16;
    found.reads_as_target_max = 16;
    found.reads_as_initiator_max = 16;
    found.shared_receive_requests_max = WORK_REQUESTS_MAX as c_int;
    found.port_count = 1;
    put!(attributes, found);
    0
}

unsafe extern "C" fn query_port(_context: *mut Context, port: u8, attributes: *mut PortAttributes) -> c_int {
    if port != 1 {
        return Errno::INVAL.raw_os_error();
    }
    let found = PortAttributes {
        state: ffi::PORT_ACTIVE,
        mtu_max: 5,
        mtu_active: 3,
        gid_count: 2,
        partition_key_count: PARTITION_KEYS.len() as u16,
        message_bytes_max: 1 << 30,
        active_width: 1,
        active_speed: 32,
        link_layer: ffi::LINK_LAYER_ETHERNET,
        ..Default::default()
    };
    put!(attributes, found);
    0
}

unsafe extern "C" fn query_gid(_context: *mut Context, _port: u8, index: c_int, gid: *mut Gid) -> c_int {
    let link_local = [0xFE, 0x80, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 1];
    let ipv4 = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xFF, 0xFF, 10, 77, 0, 1];
    match index {
        0 => put!(gid, Gid { raw: link_local }),
        1 => put!(gid, Gid { raw: ipv4 }),
        _ => return Errno::INVAL.raw_os_error(),
    }
    0
}

unsafe extern "C" fn query_partition_key(
    _context: *mut Context,
    _port: u8,
    index: c_int,
    key: *mut u16,
) -> c_int {
    let Some(found) = PARTITION_KEYS.get(index as usize) else { return Errno::INVAL.raw_os_error() };
    put!(key, found.to_be());
    0
}

unsafe extern "C" fn allocate_domain(context: *mut Context) -> *mut ProtectionDomain {
    let mut world = World::lock();
    let handle = world.handle();
    world.domains.insert(handle, context_of(context));
    Box::into_raw(Box::new(ProtectionDomain { context, handle }))
}

unsafe extern "C" fn free_domain(domain: *mut ProtectionDomain) -> c_int {
    let mut world = World::lock();
    let handle = field!(domain, handle);
    let is_used = world.regions.values().any(|region| region.domain == handle)
        || world.pairs.values().any(|pair| pair.domain == handle)
        || world.receives.values().any(|queue| queue.domain == handle);
    if is_used {
        return Errno::BUSY.raw_os_error();
    }
    world.domains.remove(&handle);
    free!(domain);
    0
}

fn register_with(
    domain: *mut ProtectionDomain,
    address: *mut c_void,
    length: usize,
    iova: u64,
    access: u32,
) -> *mut MemoryRegion {
    let mut world = World::lock();
    let number = context_of(field!(domain, context));
    if world.device_of_context(number).is_some_and(|device| strikes(&mut device.faults.register_fails_after))
    {
        return error(Errno::NOMEM);
    }
    let reach = world.reach_of(number, address as u64, length as u64);
    if reach.is_some_and(|reach| !reach.peer_memory) {
        return error(Errno::FAULT);
    }
    insert_region(&mut world, domain, address, length, iova, access)
}

fn insert_region(
    world: &mut World,
    domain: *mut ProtectionDomain,
    address: *mut c_void,
    length: usize,
    iova: u64,
    access: u32,
) -> *mut MemoryRegion {
    let (handle, context) = (field!(domain, handle), field!(domain, context));
    let key = world.handle();
    let remote = access & (ffi::ACCESS_REMOTE_READ | ffi::ACCESS_REMOTE_WRITE);
    let region = RegionState { domain: handle, address: iova, length: length as u64, remote };
    world.regions.insert(key, region);
    let (local_key, remote_key) = (key, key);
    Box::into_raw(Box::new(MemoryRegion {
        context,
        domain,
        address,
        length,
        handle: key,
        local_key,
        remote_key,
    }))
}

unsafe extern "C" fn register(
    domain: *mut ProtectionDomain,
    address: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut MemoryRegion {
    register_with(domain, address, length, address as u64, access as u32)
}

unsafe extern "C" fn register_iova(
    domain: *mut ProtectionDomain,
    address: *mut c_void,
    length: usize,
    iova: u64,
    access: u32,
) -> *mut MemoryRegion {
    register_with(domain, address, length, iova, access)
}

/// As on Soft-RoCE, dma-buf regions are refused, except those of an accelerator beside the device. The
/// address selects the accelerator, since the descriptor is a double's.
unsafe extern "C" fn register_dmabuf(
    domain: *mut ProtectionDomain,
    _offset: u64,
    length: usize,
    iova: u64,
    _descriptor: c_int,
    access: c_int,
) -> *mut MemoryRegion {
    let mut world = World::lock();
    let reach = world.reach_of(context_of(field!(domain, context)), iova, length as u64);
    if !reach.unwrap_or_default().dma_buf {
        return error(Errno::OPNOTSUPP);
    }
    insert_region(&mut world, domain, std::ptr::null_mut(), length, iova, access as u32)
}

unsafe extern "C" fn deregister(region: *mut MemoryRegion) -> c_int {
    World::lock().regions.remove(&field!(region, handle));
    free!(region);
    0
}

unsafe extern "C" fn get_async_event(context: *mut Context, event: *mut AsyncEvent) -> c_int {
    let descriptor = field!(context, async_descriptor);
    // SAFETY: the context keeps its descriptor open.
    let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
    let mut count = [0; 8];
    if let Err(errno) = rustix::io::read(descriptor, &mut count) {
        set_errno(errno);
        return -1;
    }
    let mut world = World::lock();
    let next = world.contexts.get_mut(&context_of(context)).and_then(|state| state.events.pop_front());
    let (element, kind) = next.unwrap_or((0, u32::MAX));
    put!(event, AsyncEvent { element: element as *mut c_void, kind });
    0
}

unsafe extern "C" fn acknowledge_async_event(_event: *mut AsyncEvent) {}

unsafe extern "C" fn status_text(status: u32) -> *const c_char {
    let text = match status {
        ffi::WC_SUCCESS => c"success",
        ffi::WC_LOC_LEN_ERR => c"local length error",
        ffi::WC_LOC_QP_OP_ERR => c"local QP operation error",
        ffi::WC_LOC_PROT_ERR => c"local protection error",
        ffi::WC_WR_FLUSH_ERR => c"Work Request Flushed Error",
        ffi::WC_REM_INV_REQ_ERR => c"remote invalid request error",
        ffi::WC_REM_ACCESS_ERR => c"remote access error",
        ffi::WC_RETRY_EXC_ERR => c"transport retry counter exceeded",
        ffi::WC_RNR_RETRY_EXC_ERR => c"RNR retry counter exceeded",
        _ => c"unknown",
    };
    text.as_ptr()
}

unsafe extern "C" fn event_text(event: u32) -> *const c_char {
    let text = match event {
        ffi::EVENT_CQ_ERR => c"CQ error",
        ffi::EVENT_QP_ACCESS_ERR => c"local access violation work queue error",
        ffi::EVENT_DEVICE_FATAL => c"local catastrophic error",
        ffi::EVENT_PORT_ERR => c"port error",
        ffi::EVENT_PORT_ACTIVE => c"port active",
        ffi::EVENT_QP_LAST_WQE_REACHED => c"last WQE reached",
        _ => c"unknown",
    };
    text.as_ptr()
}
