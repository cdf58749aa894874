//! SPDK's functions (`include/spdk/env.h`, `include/spdk/nvme.h`), found at run time.

use std::ffi::{c_char, c_int, c_void};
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library as Loaded, RTLD_GLOBAL, RTLD_NOW};

use crate::NvmeError;

/// `struct spdk_nvme_ctrlr`, `spdk_nvme_ns`, `spdk_nvme_qpair`: never looked into.
pub(super) type Controller = *mut c_void;
pub(super) type Namespace = *mut c_void;
pub(super) type Pair = *mut c_void;
/// `spdk_nvme_cmd_cb`: its argument, and the completion entry (four words, as in the specification).
pub(super) type Callback = unsafe extern "C" fn(*mut c_void, *const [u32; 4]);

/// `SPDK_NVME_NS_DEALLOCATE_SUPPORTED` and `SPDK_NVME_NS_FLUSH_SUPPORTED`.
pub(super) const NAMESPACE_CAN_DEALLOCATE: u32 = 1;
pub(super) const NAMESPACE_CAN_FLUSH: u32 = 2;
/// `SPDK_NVME_DSM_ATTR_DEALLOCATE`.
pub(super) const DEALLOCATE: u32 = 4;

/// Room for `struct spdk_env_opts` or `struct spdk_nvme_transport_id` of any version (about 150 and 1,300 bytes). The
/// first begins with the name of the application. Zeroes, as both initialisers ask for.
#[repr(C, align(64))]
pub(super) struct Room(pub(super) [u64; 1024]);

impl Room {
    pub(super) fn new() -> Box<Self> {
        Box::new(Self([0; 1024]))
    }
}

/// `struct spdk_nvme_dsm_range`: attributes, blocks, first block, as in the specification.
#[repr(C)]
pub(super) struct Range {
    pub(super) attributes: u32,
    pub(super) blocks: u32,
    pub(super) first: u64,
}

macro_rules! functions {
    ($($name:ident = $symbol:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The functions, and the libraries that they are in.
        pub(super) struct Library {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            _loaded: Vec<Loaded>,
        }

        impl Library {
            fn resolve(loaded: Vec<Loaded>) -> Result<Self, NvmeError> {
                Ok(Self { $($name: symbol(&loaded, $symbol)?,)* _loaded: loaded })
            }
        }
    };
}

functions! {
    env_opts_init = "spdk_env_opts_init": fn(*mut Room);
    env_init = "spdk_env_init": fn(*const Room) -> c_int;
    dma_zmalloc = "spdk_dma_zmalloc": fn(usize, usize, *mut u64) -> *mut c_void;
    dma_free = "spdk_dma_free": fn(*mut c_void);
    mem_register = "spdk_mem_register": fn(*mut c_void, usize) -> c_int;
    mem_unregister = "spdk_mem_unregister": fn(*mut c_void, usize) -> c_int;
    transport_id_parse = "spdk_nvme_transport_id_parse": fn(*mut Room, *const c_char) -> c_int;
    connect = "spdk_nvme_connect": fn(*const Room, *const c_void, usize) -> Controller;
    detach = "spdk_nvme_detach": fn(Controller) -> c_int;
    reset = "spdk_nvme_ctrlr_reset": fn(Controller) -> c_int;
    namespace = "spdk_nvme_ctrlr_get_ns": fn(Controller, u32) -> Namespace;
    allocate_pair = "spdk_nvme_ctrlr_alloc_io_qpair": fn(Controller, *const c_void, usize) -> Pair;
    free_pair = "spdk_nvme_ctrlr_free_io_qpair": fn(Pair) -> c_int;
    admin_completions = "spdk_nvme_ctrlr_process_admin_completions": fn(Controller) -> i32;
    completions = "spdk_nvme_qpair_process_completions": fn(Pair, u32) -> i32;
    is_active = "spdk_nvme_ns_is_active": fn(Namespace) -> bool;
    block_bytes = "spdk_nvme_ns_get_sector_size": fn(Namespace) -> u32;
    blocks = "spdk_nvme_ns_get_num_sectors": fn(Namespace) -> u64;
    metadata_bytes = "spdk_nvme_ns_get_md_size": fn(Namespace) -> u32;
    transfer_bytes_max = "spdk_nvme_ns_get_max_io_xfer_size": fn(Namespace) -> u32;
    flags = "spdk_nvme_ns_get_flags": fn(Namespace) -> u32;
    read = "spdk_nvme_ns_cmd_read":
        fn(Namespace, Pair, *mut c_void, u64, u32, Callback, *mut c_void, u32) -> c_int;
    write = "spdk_nvme_ns_cmd_write":
        fn(Namespace, Pair, *mut c_void, u64, u32, Callback, *mut c_void, u32) -> c_int;
    flush = "spdk_nvme_ns_cmd_flush": fn(Namespace, Pair, Callback, *mut c_void) -> c_int;
    deallocate = "spdk_nvme_ns_cmd_dataset_management":
        fn(Namespace, Pair, u32, *const Range, u16, Callback, *mut c_void) -> c_int;
}

/// What is loaded when nothing else is named: the environment first, since the driver needs it.
pub(super) fn default_libraries() -> Vec<PathBuf> {
    let folder = Path::new(option_env!("KVSTORE_SPDK_FOLDER").unwrap_or(""));
    ["libspdk_env_dpdk.so", "libspdk_nvme.so"].iter().map(|name| folder.join(name)).collect()
}

/// Global, since DPDK's drivers look for each other; and never unloaded, since the environment is initialised once in
/// a process and has threads and memory that outlive every engine.
const FLAGS: c_int = RTLD_NOW | RTLD_GLOBAL | libc::RTLD_NODELETE;

fn unloadable(file: &Path, error: &dyn std::error::Error) -> NvmeError {
    let cause = error.source().map_or_else(|| error.to_string(), ToString::to_string);
    NvmeError::Library { reason: format!("{}: {cause}", file.display()) }
}

impl Library {
    pub(super) fn load(files: &[PathBuf]) -> Result<Self, NvmeError> {
        let mut loaded = Vec::new();
        for file in files {
            // SAFETY: running SPDK's initialisers is what the caller wants; it named the files.
            let library = unsafe { Loaded::open(Some(file), FLAGS) };
            loaded.push(library.map_err(|error| unloadable(file, &error))?);
        }
        Self::resolve(loaded)
    }
}

fn symbol<T: Copy>(loaded: &[Loaded], name: &'static str) -> Result<T, NvmeError> {
    for library in loaded {
        // SAFETY: `functions` gives each symbol the type that SPDK's headers give it, and keeps its library loaded.
        if let Ok(found) = unsafe { library.get::<T>(name.as_bytes()) } {
            return Ok(*found);
        }
    }
    Err(NvmeError::Library { reason: format!("{name} is in none of its libraries") })
}
