//! `libcuda`, loaded at run time: a table of the driver's entry points.
//!
//! `cudarc` provides the types and the file names of the library. Its functions are not called, for two
//! reasons: a function that the installed driver lacks panics at the first call, and they return `CUresult`
//! as a Rust enum, so that a code which only a later driver knows is undefined behaviour. Here each entry
//! point is resolved once, a missing one is an error that names it (or `None`, where an alternative exists),
//! and codes are plain integers.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys::{self, CUcontext, CUdevice, CUdeviceptr, CUevent, CUmodule, CUresult, CUstream};

use crate::error::{CudaError, DriverVersion, Unavailable};

/// The oldest supported driver: CUDA 11.4.
pub(crate) const VERSION_MIN: DriverVersion = DriverVersion(11_040);

/// The codes that this crate distinguishes.
pub(crate) mod code {
    use super::CUresult;
    pub(crate) const SUCCESS: u32 = CUresult::CUDA_SUCCESS as u32;
    pub(crate) const INVALID_VALUE: u32 = CUresult::CUDA_ERROR_INVALID_VALUE as u32;
    pub(crate) const NOT_SUPPORTED: u32 = CUresult::CUDA_ERROR_NOT_SUPPORTED as u32;
    pub(crate) const OUT_OF_MEMORY: u32 = CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32;
    pub(crate) const NO_DEVICE: u32 = CUresult::CUDA_ERROR_NO_DEVICE as u32;
    pub(crate) const OPERATING_SYSTEM: u32 = CUresult::CUDA_ERROR_OPERATING_SYSTEM as u32;
    pub(crate) const NOT_FOUND: u32 = CUresult::CUDA_ERROR_NOT_FOUND as u32;
    pub(crate) const NOT_READY: u32 = CUresult::CUDA_ERROR_NOT_READY as u32;
    pub(crate) const NOT_PERMITTED: u32 = CUresult::CUDA_ERROR_NOT_PERMITTED as u32;
    pub(crate) const ALREADY_REGISTERED: u32 = CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED as u32;
}

macro_rules! library {
    (needed { $($(#[$doc:meta])* $field:ident = $symbol:ident: fn($($argument:ty),*);)* }
     newer { $($(#[$newer_doc:meta])* $newer:ident = $newer_symbol:ident since $since:literal:
        fn($($newer_argument:ty),*);)* }) => {
        /// The entry points that this crate calls, by the driver's names.
        pub(crate) struct Library {
            /// Accepts codes that are not in the enum.
            error_name: ErrorName,
            $($(#[$doc])* pub(crate) $field: unsafe extern "C" fn($($argument),*) -> c_uint,)*
            $($(#[$newer_doc])* pub(crate) $newer: Option<unsafe extern "C" fn($($newer_argument),*) -> c_uint>,)*
        }

        fn resolve(loaded: &'static libloading::Library) -> Result<Library, Unavailable> {
            let symbol = "cuGetErrorName";
            // SAFETY: the function's type, by the header; an enum of C is an integer.
            let error_name = unsafe { entry(loaded, symbol) }.ok_or(Unavailable::MissingFunction { symbol })?;
            Ok(Library {
                error_name,
                // SAFETY: the type is the function's: compared below with what `cudarc` made of the header.
                $($field: unsafe { entry(loaded, stringify!($symbol)) }
                    .ok_or(Unavailable::MissingFunction { symbol: stringify!($symbol) })?,)*
                // SAFETY: as above.
                $($newer: unsafe { entry_since(loaded, stringify!($newer_symbol), $since) },)*
            })
        }

        /// Each type is that of `cudarc`'s function of the same name, except for the returned code; and no
        /// function that is requested is newer than the header from which `cudarc`'s types were made.
        const _: () = {
            $(let _: unsafe fn($($argument),*) -> CUresult = sys::$symbol;)*
            $(let _: unsafe fn($($newer_argument),*) -> CUresult = sys::$newer_symbol;)*
            $(assert!($since <= sys::CUDA_VERSION);)*
        };

        /// The table as text: each function's name with its argument types.
        #[cfg(test)]
        pub(crate) const SIGNATURES: &[(&str, &[&str])] = &[
            $((stringify!($symbol), &[$(stringify!($argument)),*]),)*
            $((stringify!($newer_symbol), &[$(stringify!($newer_argument)),*]),)*
        ];

        #[cfg(test)]
        impl Library {
            /// Returns the optional functions: name, first version that has it, and the entry point that was
            /// found.
            pub(crate) fn newer(&self) -> Vec<(&'static str, c_int, Option<*const c_void>)> {
                vec![$((stringify!($newer_symbol), $since, self.$newer.map(|found| found as *const c_void)),)*]
            }
        }
    };
}

type ErrorName = unsafe extern "C" fn(c_uint, *mut *const c_char) -> c_uint;

library! {
    needed {
        initialise = cuInit: fn(c_uint);
        driver_version = cuDriverGetVersion: fn(*mut c_int);

        device_count = cuDeviceGetCount: fn(*mut c_int);
        device = cuDeviceGet: fn(*mut CUdevice, c_int);
        device_name = cuDeviceGetName: fn(*mut c_char, c_int, CUdevice);
        /// The second version, of 11.4, distinguishes the partitions of one device.
        device_uuid = cuDeviceGetUuid_v2: fn(*mut sys::CUuuid, CUdevice);
        device_memory = cuDeviceTotalMem_v2: fn(*mut usize, CUdevice);
        device_attribute = cuDeviceGetAttribute: fn(*mut c_int, sys::CUdevice_attribute, CUdevice);
        device_pci_address = cuDeviceGetPCIBusId: fn(*mut c_char, c_int, CUdevice);

        context_retain = cuDevicePrimaryCtxRetain: fn(*mut CUcontext, CUdevice);
        context_release = cuDevicePrimaryCtxRelease_v2: fn(CUdevice);
        context_push = cuCtxPushCurrent_v2: fn(CUcontext);
        context_pop = cuCtxPopCurrent_v2: fn(*mut CUcontext);
        priority_range = cuCtxGetStreamPriorityRange: fn(*mut c_int, *mut c_int);

        allocate = cuMemAlloc_v2: fn(*mut CUdeviceptr, usize);
        free = cuMemFree_v2: fn(CUdeviceptr);
        address_range = cuMemGetAddressRange_v2: fn(*mut CUdeviceptr, *mut usize, CUdeviceptr);
        pointer_attribute = cuPointerGetAttribute: fn(*mut c_void, sys::CUpointer_attribute, CUdeviceptr);
        set_pointer_attribute = cuPointerSetAttribute: fn(*const c_void, sys::CUpointer_attribute, CUdeviceptr);
        fill_async = cuMemsetD8Async: fn(CUdeviceptr, u8, usize, CUstream);
        register_host = cuMemHostRegister_v2: fn(*mut c_void, usize, c_uint);
        unregister_host = cuMemHostUnregister: fn(*mut c_void);
        host_device_pointer = cuMemHostGetDevicePointer_v2: fn(*mut CUdeviceptr, *mut c_void, c_uint);
        ipc_export = cuIpcGetMemHandle: fn(*mut sys::CUipcMemHandle, CUdeviceptr);
        ipc_open = cuIpcOpenMemHandle_v2: fn(*mut CUdeviceptr, sys::CUipcMemHandle, c_uint);
        ipc_close = cuIpcCloseMemHandle: fn(CUdeviceptr);

        create_stream = cuStreamCreateWithPriority: fn(*mut CUstream, c_uint, c_int);
        destroy_stream = cuStreamDestroy_v2: fn(CUstream);
        synchronise_stream = cuStreamSynchronize: fn(CUstream);
        create_event = cuEventCreate: fn(*mut CUevent, c_uint);
        destroy_event = cuEventDestroy_v2: fn(CUevent);
        record_event = cuEventRecord: fn(CUevent, CUstream);
        query_event = cuEventQuery: fn(CUevent);
        wait_event = cuStreamWaitEvent: fn(CUstream, CUevent, c_uint);
        copy_async = cuMemcpyAsync: fn(CUdeviceptr, CUdeviceptr, usize, CUstream);
        copy_rows_async = cuMemcpy2DAsync_v2: fn(*const sys::CUDA_MEMCPY2D, CUstream);

        load_module = cuModuleLoadDataEx:
            fn(*mut CUmodule, *const c_void, c_uint, *mut sys::CUjit_option, *mut *mut c_void);
        unload_module = cuModuleUnload: fn(CUmodule);
        function = cuModuleGetFunction: fn(*mut sys::CUfunction, CUmodule, *const c_char);
        launch = cuLaunchKernel:
            fn(sys::CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream,
                *mut *mut c_void, *mut *mut c_void);
    }
    newer {
        /// Sets how calls of this thread interact with graph recordings of other threads.
        capture_mode = cuThreadExchangeStreamCaptureMode since 10_010: fn(*mut sys::CUstreamCaptureMode);
        /// Makes the writes of a NIC visible to the device.
        flush_direct = cuFlushGPUDirectRDMAWrites since 11_030:
            fn(sys::CUflushGPUDirectRDMAWritesTarget, sys::CUflushGPUDirectRDMAWritesScope);
        /// Returns a descriptor of a range of device memory.
        range_handle = cuMemGetHandleForAddressRange since 11_070:
            fn(*mut c_void, CUdeviceptr, usize, sys::CUmemRangeHandleType, c_ulonglong);
        /// Makes many copies by one call. CUDA 13 has another form, without the failed index: this is that of
        /// 12.8.
        copy_batch_async = cuMemcpyBatchAsync since 12_080:
            fn(*mut CUdeviceptr, *mut CUdeviceptr, *mut usize, usize, *mut sys::CUmemcpyAttributes, *mut usize,
                usize, *mut usize, CUstream);
    }
}

impl std::fmt::Debug for Library {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Library(libcuda)")
    }
}

/// Returns the entry point of this name; `None` when the library has none.
///
/// # Safety
/// `F` is the type of the function `symbol`.
unsafe fn entry<F: Copy>(loaded: &'static libloading::Library, symbol: &str) -> Option<F> {
    // SAFETY: the caller vouches for the type, and the library is never unloaded.
    unsafe { loaded.get::<F>(symbol) }.ok().map(|found| *found)
}

/// Returns the entry point in its form of CUDA version `since`: later versions have other forms of some
/// functions under the same name. The driver is asked for it (`cuGetProcAddress_v2`, since 12.0); when the
/// driver cannot be asked or does not know the function, the library's own table is used.
///
/// # Safety
/// `F` is the type of that function in that version.
unsafe fn entry_since<F: Copy>(
    loaded: &'static libloading::Library,
    symbol: &str,
    since: c_int,
) -> Option<F> {
    type Ask =
        unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, c_ulonglong, *mut c_void) -> c_uint;
    const { assert!(size_of::<F>() == size_of::<*mut c_void>(), "an entry point is an address") };
    let name = CString::new(symbol).ok()?;
    let mut found: *mut c_void = std::ptr::null_mut();
    // SAFETY: the function's type, by the header: the last argument is the address of an enum, or null.
    if let Some(ask) = unsafe { entry::<Ask>(loaded, "cuGetProcAddress_v2") } {
        // SAFETY: writes one address; the name ends with a zero, and the status pointer may be null.
        let asked = unsafe { ask(name.as_ptr(), &mut found, since, 0, std::ptr::null_mut()) };
        if asked == code::SUCCESS && !found.is_null() {
            // SAFETY: an address of a function of that type, as the caller vouches; the sizes are equal.
            return Some(unsafe { std::mem::transmute_copy(&found) });
        }
    }
    // SAFETY: the caller vouches for the type.
    unsafe { entry(loaded, symbol) }
}

/// Returns the library's table, which is loaded once and kept for the life of the process.
pub(crate) fn load() -> Result<&'static Library, Unavailable> {
    static LIBRARY: OnceLock<Library> = OnceLock::new();
    if let Some(library) = LIBRARY.get() {
        return Ok(library);
    }
    // The driver's own name first: a bare `libcuda.so` may be a stub of the development package.
    let mut candidates = vec!["libcuda.so.1".to_owned()];
    candidates.extend(names("cuda").into_iter().filter(|name| name != "libcuda.so.1"));
    // SAFETY: opening the driver's library runs its initialisers, which have no preconditions.
    let open = |name: &String| unsafe { libloading::Library::new(name) }.ok();
    let Some(loaded) = candidates.iter().find_map(open) else {
        return Err(Unavailable::NoLibrary { tried: candidates.join(", ") });
    };
    // Never unloaded: its functions are kept for the life of the process.
    let loaded: &'static libloading::Library = Box::leak(Box::new(loaded));
    let oldest = version(loaded)?;
    if oldest < VERSION_MIN {
        return Err(Unavailable::DriverTooOld { version: oldest, needed: VERSION_MIN });
    }
    let library = resolve(loaded)?;
    Ok(LIBRARY.get_or_init(|| library))
}

/// Returns the file names under which `cudarc` looks for a library on this kind of system, without
/// duplicates.
pub(crate) fn names(library: &str) -> Vec<String> {
    let mut names = cudarc::get_lib_name_candidates(library);
    names.retain(|name| name.starts_with(&format!("lib{library}.")));
    names.dedup();
    names
}

/// The version is read before any function is resolved, so that an old driver is reported as too old.
fn version(loaded: &'static libloading::Library) -> Result<DriverVersion, Unavailable> {
    type Version = unsafe extern "C" fn(*mut c_int) -> c_uint;
    let symbol = "cuDriverGetVersion";
    // SAFETY: the function's type, by the header.
    let ask = unsafe { entry::<Version>(loaded, symbol) }.ok_or(Unavailable::MissingFunction { symbol })?;
    let mut version = 0;
    // SAFETY: the function writes one integer, and needs no initialised driver.
    unsafe { ask(&mut version) };
    Ok(DriverVersion(version))
}

impl Library {
    /// Returns the CUDA version of the driver.
    pub(crate) fn version(&self) -> DriverVersion {
        let mut version = 0;
        // SAFETY: writes one integer.
        unsafe { (self.driver_version)(&mut version) };
        DriverVersion(version)
    }

    /// Converts a returned code to a result.
    #[inline]
    pub(crate) fn check(&self, operation: &'static str, code: u32) -> Result<(), CudaError> {
        if code == code::SUCCESS { Ok(()) } else { Err(self.error(operation, code)) }
    }

    /// Returns the error of a code, with the driver's name of it.
    #[cold]
    pub(crate) fn error(&self, operation: &'static str, code: u32) -> CudaError {
        let mut name = std::ptr::null();
        // SAFETY: writes one pointer.
        let known = unsafe { (self.error_name)(code, &mut name) };
        if known != code::SUCCESS || name.is_null() {
            return CudaError { operation, code, name: "an unknown error" };
        }
        // SAFETY: the driver returns a constant string, and its library is never unloaded.
        let name: &'static CStr = unsafe { CStr::from_ptr(name) };
        CudaError { operation, code, name: name.to_str().unwrap_or("an unknown error") }
    }
}
