//! SPDK's functions (`include/spdk/env.h`, `include/spdk/nvme.h`), found at run time.

use std::ffi::{c_char, c_int, c_void};
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library as Loaded, RTLD_GLOBAL, RTLD_NOW};

use super::bus_error::BusErrorHandler;
use crate::NvmeError;

/// `struct spdk_nvme_ctrlr`, `spdk_nvme_ns`, `spdk_nvme_qpair`: opaque.
pub(super) type Controller = *mut c_void;
pub(super) type Namespace = *mut c_void;
pub(super) type Pair = *mut c_void;
/// `spdk_nvme_cmd_cb`: its argument, and the completion entry (four words, as in the specification).
pub(super) type Callback = unsafe extern "C" fn(*mut c_void, *const [u32; 4]);

/// `SPDK_NVME_NS_FLUSH_SUPPORTED`.
pub(super) const NAMESPACE_CAN_FLUSH: u32 = 2;

/// `SPDK_VTOPHYS_ERROR`.
pub(super) const NO_ADDRESS: u64 = u64::MAX;
/// `opts_size` of `struct spdk_env_opts`, since 24.09: its place, as an index of 8 bytes, and the length up to its end. Older versions
/// of the structure end before it.
pub(super) const OPTIONS_SIZE: (usize, u64) = (112 / 8, 120);

/// Room for `struct spdk_env_opts` or `struct spdk_nvme_transport_id` of any version (about 150 and 1,300 bytes). The
/// first begins with the name of the application. Zeroes, as both initialisers ask for.
#[repr(C, align(64))]
pub(super) struct OptionsBuffer(pub(super) [u64; 1024]);

impl OptionsBuffer {
    pub(super) fn new() -> Box<Self> {
        Box::new(Self([0; 1024]))
    }
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
    env_opts_init = "spdk_env_opts_init": fn(*mut OptionsBuffer);
    env_init = "spdk_env_init": fn(*const OptionsBuffer) -> c_int;
    dma_zmalloc = "spdk_dma_zmalloc": fn(usize, usize, *mut u64) -> *mut c_void;
    dma_free = "spdk_dma_free": fn(*mut c_void);
    mem_register = "spdk_mem_register": fn(*mut c_void, usize) -> c_int;
    mem_unregister = "spdk_mem_unregister": fn(*mut c_void, usize) -> c_int;
    vtophys = "spdk_vtophys": fn(*const c_void, *mut u64) -> u64;
    transport_id_parse = "spdk_nvme_transport_id_parse": fn(*mut OptionsBuffer, *const c_char) -> c_int;
    connect = "spdk_nvme_connect": fn(*const OptionsBuffer, *const c_void, usize) -> Controller;
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
}

/// Libraries that SPDK's own use and are not linked with: OpenSSL for `libspdk_util`, and DPDK for the environment. Each has the
/// versions of its name that are tried, those of a machine without development files too. All of DPDK's have one version.
const OPENSSL: [&str; 2] = ["libcrypto", "libssl"];
const OPENSSL_VERSIONS: [&str; 3] = [".so.3", ".so.1.1", ".so"];
const DPDK: [&str; 4] = ["librte_eal", "librte_mempool", "librte_mempool_ring", "librte_bus_pci"];
/// DPDK 25.11 to 20.11: `.so.24` is that of 23.11.
const DPDK_VERSIONS: [&str; 7] = [".so", ".so.26", ".so.25", ".so.24", ".so.23", ".so.22", ".so.21"];
/// The environment first, since the driver needs it.
const SPDK: [&str; 2] = ["libspdk_env_dpdk.so", "libspdk_nvme.so"];

/// Global, since SPDK's libraries and DPDK's drivers look for each other; and never unloaded, since the environment is initialised
/// once in a process and has threads and memory that outlive every engine.
const FLAGS: c_int = RTLD_NOW | RTLD_GLOBAL | libc::RTLD_NODELETE;

fn open(file: &Path) -> Result<Loaded, String> {
    // SAFETY: running the initialisers of SPDK and of what it needs is what the caller wants.
    unsafe { Loaded::open(Some(file), FLAGS) }.map_err(|error| {
        let cause = std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
        let name = file.display().to_string();
        if cause.starts_with(&name) { cause } else { format!("{name}: {cause}") }
    })
}

/// Loads libraries of one version, in this order: the first version of which all are there. Otherwise returns
/// the reason of the first failure.
fn open_set(names: &[&str], versions: &[&str]) -> Result<Vec<Loaded>, String> {
    let mut first = None;
    for version in versions {
        let all = names.iter().map(|name| open(Path::new(&format!("{name}{version}"))));
        match all.collect() {
            Ok(loaded) => return Ok(loaded),
            Err(reason) => _ = first.get_or_insert(reason),
        }
    }
    Err(format!("{}; tried {}", first.unwrap_or_default(), versions.join(", ")))
}

impl Library {
    /// Loads these files in order; if there are none, SPDK's libraries from the loader's path, after those that
    /// they need.
    pub(super) fn load(files: &[PathBuf]) -> Result<Self, NvmeError> {
        let handler = BusErrorHandler::current();
        let (mut loaded, mut missing) = (Vec::new(), String::new());
        if files.is_empty() {
            for (names, versions) in [(&OPENSSL[..], &OPENSSL_VERSIONS[..]), (&DPDK, &DPDK_VERSIONS)] {
                match open_set(names, versions) {
                    Ok(set) => loaded.extend(set),
                    // SPDK's libraries may be linked with them; if not, the next error tells.
                    Err(reason) => missing += &format!(" (before it: {reason})"),
                }
            }
        }
        let own: Vec<PathBuf> =
            if files.is_empty() { SPDK.map(PathBuf::from).into() } else { files.to_vec() };
        for file in own {
            let library =
                open(&file).map_err(|reason| NvmeError::Library { reason: format!("{reason}{missing}") })?;
            loaded.push(library);
        }
        handler.install_in_front();
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
