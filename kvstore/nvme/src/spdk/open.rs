//! SPDK's environment, its controller, and the namespace with its queue pair.

use std::ffi::CString;
use std::sync::{Mutex, PoisonError};

use super::engine::{PAGE_BYTES, SpdkEngine};
use super::library::{Controller, Library, Namespace, OPTIONS_SIZE, OptionsBuffer};
use crate::NvmeError;

/// Initialises SPDK's environment, which exists once in a process.
pub(super) fn initialise(library: &Library) -> Result<(), NvmeError> {
    static IS_INITIALISED: Mutex<bool> = Mutex::new(false);
    let mut is_initialised = IS_INITIALISED.lock().unwrap_or_else(PoisonError::into_inner);
    if *is_initialised {
        return Ok(());
    }
    let mut options = OptionsBuffer::new();
    let (at, bytes) = OPTIONS_SIZE;
    options.0[at] = bytes;
    // SAFETY: the options have room for the structure of any version.
    unsafe { (library.env_opts_init)(&raw mut *options) };
    // The first field of every version: the application's name.
    options.0[0] = c"kvstore".as_ptr().expose_provenance() as u64;
    // The environment binds this thread, and so all threads that it starts later, to the first core of its
    // mask.
    let cores = rustix::thread::sched_getaffinity(None);
    // SAFETY: the options were initialised by SPDK, and the name is static.
    let errno = unsafe { (library.env_init)(&raw const *options) };
    if let Ok(cores) = cores {
        // A thread may always be given its earlier cores back.
        let _refused = rustix::thread::sched_setaffinity(None, &cores);
    }
    match errno {
        0 => *is_initialised = true,
        errno => {
            let device = "environment".to_owned();
            return Err(NvmeError::Spdk { device, operation: "spdk_env_init", errno });
        }
    }
    Ok(())
}

pub(super) fn connect(library: &Library, transport: &str) -> Result<Controller, NvmeError> {
    let failed = |operation, errno| NvmeError::Spdk { device: transport.to_owned(), operation, errno };
    let text = CString::new(transport).map_err(|_| NvmeError::Address(transport.to_owned()))?;
    let mut id = OptionsBuffer::new();
    // SAFETY: the room is zeroed and large enough for any version; the text ends with a zero.
    let errno = unsafe { (library.transport_id_parse)(&raw mut *id, text.as_ptr()) };
    if errno != 0 {
        return Err(failed("spdk_nvme_transport_id_parse", errno));
    }
    // SAFETY: the id was just filled in; without options SPDK takes its defaults.
    let controller = unsafe { (library.connect)(&raw const *id, std::ptr::null(), 0) };
    if controller.is_null() { Err(failed("spdk_nvme_connect", 0)) } else { Ok(controller) }
}

impl SpdkEngine {
    pub(super) fn identify(&mut self) -> Result<(), NvmeError> {
        let unsupported =
            |engine: &Self, what: String| Err(NvmeError::Unsupported { device: engine.device.clone(), what });
        let Some(namespace) = self.active_namespace() else {
            return unsupported(self, format!("namespace {} is not active", self.namespace_id));
        };
        // SAFETY: the namespace is one of the attached controller; so in the following calls.
        let block_bytes = unsafe { (self.library.block_bytes)(namespace) } as usize;
        // SAFETY: as above.
        let blocks = unsafe { (self.library.blocks)(namespace) };
        // SAFETY: as above.
        let metadata_bytes = unsafe { (self.library.metadata_bytes)(namespace) };
        // SAFETY: as above.
        let transfer_bytes = unsafe { (self.library.transfer_bytes_max)(namespace) } as usize;
        // SAFETY: as above.
        self.flags = unsafe { (self.library.flags)(namespace) };
        let is_usable = block_bytes.is_power_of_two() && (512..=PAGE_BYTES).contains(&block_bytes);
        if !is_usable || metadata_bytes != 0 || transfer_bytes < PAGE_BYTES {
            let what =
                format!("blocks of {block_bytes} bytes with {metadata_bytes} of metadata are not supported");
            return unsupported(self, what);
        }
        self.block_bytes = block_bytes;
        self.command_bytes_max = transfer_bytes - transfer_bytes % PAGE_BYTES;
        self.queue.geometry.block_bytes = block_bytes;
        self.queue.geometry.files = vec![blocks.saturating_mul(block_bytes as u64)];
        Ok(())
    }

    fn active_namespace(&self) -> Option<Namespace> {
        // SAFETY: the controller is attached; a number without a namespace gives null.
        let namespace = unsafe { (self.library.namespace)(self.controller, self.namespace_id) };
        // SAFETY: not null, so a namespace of this controller.
        (!namespace.is_null() && unsafe { (self.library.is_active)(namespace) }).then_some(namespace)
    }

    /// Finds the namespace and makes a queue pair, at first and after a reset, which invalidates both.
    pub(super) fn reopen(&mut self) -> bool {
        let Some(namespace) = self.active_namespace() else { return false };
        // SAFETY: as in `identify`.
        let block_bytes = unsafe { (self.library.block_bytes)(namespace) } as usize;
        // SAFETY: as above.
        let blocks = unsafe { (self.library.blocks)(namespace) };
        if block_bytes != self.block_bytes
            || self.queue.geometry.files != [blocks.saturating_mul(block_bytes as u64)]
        {
            return false;
        }
        self.namespace = namespace;
        // SAFETY: the controller is attached; without options SPDK takes its defaults.
        self.pair = unsafe { (self.library.allocate_pair)(self.controller, std::ptr::null(), 0) };
        !self.pair.is_null()
    }
}
