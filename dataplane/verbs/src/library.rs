//! `libibverbs.so.1`, loaded at run time: the build needs no RDMA package, and a machine without one gets an
//! error that says so.
//!
//! A [`Library`] is a table of the entry points. The software device of `testing` is another such table, so
//! that the rest of the crate runs unchanged on either. The calls of the data path are not in the table:
//! they are taken from the opened context, as the header's inline functions do.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;

use crate::VerbsError;
use crate::ffi::{
    AsyncEvent, CompletionChannel, CompletionQueue, Context, Device, DeviceAttributes, Gid, MemoryRegion,
    PortAttributes, ProtectionDomain, QueuePair, QueuePairAttributes, QueuePairInit, SharedReceiveInit,
    SharedReceiveQueue,
};

const LIBRARY: &str = "libibverbs.so.1";

type RegisterIova =
    unsafe extern "C" fn(*mut ProtectionDomain, *mut c_void, usize, u64, u32) -> *mut MemoryRegion;
type RegisterDmabuf =
    unsafe extern "C" fn(*mut ProtectionDomain, u64, usize, u64, c_int, c_int) -> *mut MemoryRegion;

/// Address type of a row of a port's GID table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GidType {
    /// InfiniBand, or RoCE v1.
    InfinibandOrRoceV1,
    /// RoCE v2: UDP over IP.
    RoceV2,
    /// The kernel did not report the type.
    Unknown,
}

macro_rules! library {
    ($($(#[$doc:meta])* $field:ident = $symbol:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The entry points that this crate calls, by their C names.
        pub struct Library {
            $($(#[$doc])* pub(crate) $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            /// `ibv_reg_mr_iova2`, since rdma-core 28: takes optional access flags.
            pub(crate) register_iova: Option<RegisterIova>,
            /// `ibv_reg_dmabuf_mr`, since rdma-core 34.
            pub(crate) register_dmabuf: Option<RegisterDmabuf>,
            /// Reads the type of a row of the GID table, which the kernel reports in sysfs only.
            pub(crate) gid_type: fn(device: &str, port: u8, index: u32) -> GidType,
            /// Keeps the entry points mapped; `None` for the software device.
            pub(crate) loaded: Option<libloading::Library>,
        }

        fn resolve(loaded: libloading::Library) -> Result<Library, VerbsError> {
            Ok(Library {
                $($field: symbol(&loaded, $symbol)?,)*
                register_iova: symbol(&loaded, "ibv_reg_mr_iova2").ok(),
                register_dmabuf: symbol(&loaded, "ibv_reg_dmabuf_mr").ok(),
                gid_type: gid_type_from_sysfs,
                loaded: Some(loaded),
            })
        }
    };
}

library! {
    /// Lists the devices, verbs.h:2239.
    get_device_list = "ibv_get_device_list": fn(*mut c_int) -> *mut *mut Device;
    /// Frees the list, not the devices that were opened from it.
    free_device_list = "ibv_free_device_list": fn(*mut *mut Device);
    /// Returns the kernel's name of a device.
    get_device_name = "ibv_get_device_name": fn(*mut Device) -> *const c_char;
    /// Opens a device.
    open_device = "ibv_open_device": fn(*mut Device) -> *mut Context;
    /// Closes a device.
    close_device = "ibv_close_device": fn(*mut Context) -> c_int;
    /// Queries the limits of a device.
    query_device = "ibv_query_device": fn(*mut Context, *mut DeviceAttributes) -> c_int;
    /// Queries a port. The exported symbol fills the struct up to `flags` (verbs.h:2360); the header's
    /// inline wrapper adds `port_cap_flags2`, which is not read here.
    query_port = "ibv_query_port": fn(*mut Context, u8, *mut PortAttributes) -> c_int;
    /// Reads a row of the GID table.
    query_gid = "ibv_query_gid": fn(*mut Context, u8, c_int, *mut Gid) -> c_int;
    /// Reads a row of the partition key table, big-endian.
    query_partition_key = "ibv_query_pkey": fn(*mut Context, u8, c_int, *mut u16) -> c_int;
    /// Allocates a protection domain.
    allocate_domain = "ibv_alloc_pd": fn(*mut Context) -> *mut ProtectionDomain;
    /// Frees a protection domain.
    free_domain = "ibv_dealloc_pd": fn(*mut ProtectionDomain) -> c_int;
    /// Registers memory, verbs.h:2542; the symbol, not the macro of the same name.
    register = "ibv_reg_mr": fn(*mut ProtectionDomain, *mut c_void, usize, c_int) -> *mut MemoryRegion;
    /// Deregisters a memory region.
    deregister = "ibv_dereg_mr": fn(*mut MemoryRegion) -> c_int;
    /// Creates a completion channel.
    create_channel = "ibv_create_comp_channel": fn(*mut Context) -> *mut CompletionChannel;
    /// Destroys a completion channel.
    destroy_channel = "ibv_destroy_comp_channel": fn(*mut CompletionChannel) -> c_int;
    /// Creates a completion queue.
    create_completions = "ibv_create_cq":
        fn(*mut Context, c_int, *mut c_void, *mut CompletionChannel, c_int) -> *mut CompletionQueue;
    /// Destroys a completion queue; waits until its events were acknowledged.
    destroy_completions = "ibv_destroy_cq": fn(*mut CompletionQueue) -> c_int;
    /// Takes the next event of a completion channel.
    get_completion_event = "ibv_get_cq_event":
        fn(*mut CompletionChannel, *mut *mut CompletionQueue, *mut *mut c_void) -> c_int;
    /// Acknowledges completion events.
    acknowledge_completion_events = "ibv_ack_cq_events": fn(*mut CompletionQueue, u32);
    /// Creates a shared receive queue.
    create_shared_receives = "ibv_create_srq":
        fn(*mut ProtectionDomain, *mut SharedReceiveInit) -> *mut SharedReceiveQueue;
    /// Destroys a shared receive queue.
    destroy_shared_receives = "ibv_destroy_srq": fn(*mut SharedReceiveQueue) -> c_int;
    /// Creates a queue pair.
    create_queue_pair = "ibv_create_qp": fn(*mut ProtectionDomain, *mut QueuePairInit) -> *mut QueuePair;
    /// Destroys a queue pair: after the return the device accesses no memory on its behalf.
    destroy_queue_pair = "ibv_destroy_qp": fn(*mut QueuePair) -> c_int;
    /// Moves a queue pair to another state.
    modify_queue_pair = "ibv_modify_qp": fn(*mut QueuePair, *mut QueuePairAttributes, c_int) -> c_int;
    /// Takes the next asynchronous event.
    get_async_event = "ibv_get_async_event": fn(*mut Context, *mut AsyncEvent) -> c_int;
    /// Acknowledges an asynchronous event; destroying the event's object waits for this.
    acknowledge_async_event = "ibv_ack_async_event": fn(*mut AsyncEvent);
    /// Returns the text of a completion status.
    status_text = "ibv_wc_status_str": fn(u32) -> *const c_char;
    /// Returns the text of an asynchronous event.
    event_text = "ibv_event_type_str": fn(u32) -> *const c_char;
}

impl std::fmt::Debug for Library {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Library").field("loaded", &self.loaded.is_some()).finish_non_exhaustive()
    }
}

impl Library {
    /// Whether the library can register a dma-buf. The kernel may still refuse.
    #[must_use]
    pub fn takes_dma_buf(&self) -> bool {
        self.register_dmabuf.is_some()
    }

    /// Loads `libibverbs.so.1` from the loader's path.
    pub fn load() -> Result<Arc<Self>, VerbsError> {
        Self::load_from(LIBRARY)
    }

    fn load_from(file: &str) -> Result<Arc<Self>, VerbsError> {
        // SAFETY: the initialisers of libibverbs only register its providers; they expect nothing of the caller.
        let loaded = unsafe { libloading::Library::new(file) }
            .map_err(|error| VerbsError::Library { library: LIBRARY, reason: error.to_string() })?;
        resolve(loaded).map(Arc::new)
    }

    /// Returns the text of a completion status, also of one that this crate does not know.
    #[must_use]
    pub fn status_text(&self, status: u32) -> String {
        // SAFETY: takes any number and returns a static string or null.
        let text = unsafe { (self.status_text)(status) };
        words(text, status)
    }

    /// Returns the text of an asynchronous event.
    #[must_use]
    pub fn event_text(&self, event: u32) -> String {
        // SAFETY: takes any number and returns a static string or null.
        let text = unsafe { (self.event_text)(event) };
        words(text, event)
    }
}

fn words(text: *const c_char, number: u32) -> String {
    if text.is_null() {
        return format!("code {number}");
    }
    // SAFETY: not null, and the library returns static, zero-ended strings.
    let text = unsafe { CStr::from_ptr(text) };
    format!("{} (code {number})", text.to_string_lossy())
}

fn symbol<T: Copy>(loaded: &libloading::Library, name: &'static str) -> Result<T, VerbsError> {
    // SAFETY: the caller's type is that of the function of this name in verbs.h, whose ABI is stable; the
    // copied pointer is kept together with the library that it points into.
    let found = unsafe { loaded.get::<T>(name) };
    found.map(|symbol| *symbol).map_err(|error| VerbsError::Symbol {
        library: LIBRARY,
        symbol: name,
        reason: error.to_string(),
    })
}

/// `/sys/class/infiniband/<device>/ports/<port>/gid_attrs/types/<index>`: "IB/RoCE v1" or "RoCE v2"; reading
/// it fails for an empty row (Documentation/ABI/stable/sysfs-class-infiniband).
fn gid_type_from_sysfs(device: &str, port: u8, index: u32) -> GidType {
    let path = format!("/sys/class/infiniband/{device}/ports/{port}/gid_attrs/types/{index}");
    match std::fs::read_to_string(path).as_deref().map(str::trim) {
        Ok("RoCE v2") => GidType::RoceV2,
        Ok("IB/RoCE v1") => GidType::InfinibandOrRoceV1,
        _ => GidType::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_an_error_that_says_so() {
        let error = Library::load_from("libibverbs-of-nowhere.so.9").expect_err("there is no such file");
        assert!(error.to_string().starts_with("no RDMA here: libibverbs.so.1 cannot be loaded: "), "{error}");
    }

    #[test]
    fn a_library_without_the_symbols_is_an_error_that_names_one() {
        let error = Library::load_from("libc.so.6").expect_err("libc has no verbs");
        assert!(error.to_string().contains("has no ibv_get_device_list"), "{error}");
    }

    #[test]
    fn unknown_codes_have_words() {
        assert_eq!(words(std::ptr::null(), 999), "code 999");
    }
}
