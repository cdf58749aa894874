//! A host slab that devices reach by DMA: its pages are locked and mapped for every context.
//!
//! The slab stays what it was, a mapping of ours: a NIC can register it too, and peers can attach it. (Memory that
//! the driver allocates would be neither, and `cudarc`'s is write-combined: the processor reads it very slowly.)
//! Registering locks every page and is slow; done at start-up.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_PORTABLE};
use dataplane_memory::Slab;
use rustix::process::{Resource, getrlimit};

use crate::Device;
use crate::device::Context;
use crate::error::CudaError;
use crate::library::code;

/// Why a slab could not be registered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{bytes} bytes of host memory cannot be pinned: {error}{hint}")]
pub struct PinError {
    /// Bytes of the mapping.
    pub bytes: usize,
    /// What the driver said.
    pub error: CudaError,
    /// What may be the cause, where that can be told; begins with a separator, or is empty.
    pub hint: String,
}

/// A registered slab. The registration ends with the last of these for the slab.
#[derive(Debug)]
pub struct Pinned {
    slab: Arc<Slab>,
    device: Device,
    /// Where the device sees the mapping's first byte.
    device_base: u64,
}

/// The registrations, by the first address of their mappings.
static REGISTERED: Mutex<BTreeMap<usize, Registration>> = Mutex::new(BTreeMap::new());

struct Registration {
    /// 0 when the driver refused to end it.
    users: usize,
    /// Its context is kept: the registration would end with it, for other devices too.
    device: Device,
}

fn registered() -> MutexGuard<'static, BTreeMap<usize, Registration>> {
    REGISTERED.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pinned {
    /// Registers the slab's mapping, or counts once more that it is registered. A mapping of which somebody else in
    /// this process has registered any part is refused: nobody here knows how much that is, and when it ends.
    pub fn register(device: &Device, slab: Arc<Slab>) -> Result<Self, PinError> {
        let bytes = slab.mapped_bytes();
        let refused = |error: CudaError| PinError { bytes, error, hint: hint(error.code, bytes) };
        let context = device.context();
        let _entered = context.enter().map_err(refused)?;
        let start = slab.base().as_ptr();
        {
            let mut registered = registered();
            if let Some(known) = registered.get_mut(&start.addr()) {
                known.users += 1;
            } else {
                register(context, start, bytes).map_err(refused)?;
                registered.insert(start.addr(), Registration { users: 1, device: device.clone() });
            }
        }
        let mut pinned = Self { slab, device: device.clone(), device_base: 0 };
        // SAFETY: writes one address; the mapping is registered. The flags must be zero.
        let asked =
            unsafe { (context.library.host_device_pointer)(&mut pinned.device_base, start.cast(), 0) };
        context.library.check("cuMemHostGetDevicePointer", asked).map_err(refused)?;
        Ok(pinned)
    }

    /// The slab.
    #[must_use]
    pub fn slab(&self) -> &Arc<Slab> {
        &self.slab
    }

    /// The device whose address of it is known. Other devices copy from and to it as well.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Where a kernel on the device finds `len` bytes at `offset` of `slot`; `None` when they are not in the slot.
    #[must_use]
    pub fn device_address(&self, slot: u32, offset: usize, len: usize) -> Option<u64> {
        let address = self.slab.try_address(slot, offset, len)?;
        Some(self.device_base + (address.addr().get() - self.slab.base().addr().get()) as u64)
    }
}

fn register(context: &Context, start: *mut u8, bytes: usize) -> Result<(), CudaError> {
    let flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
    // SAFETY: the range is a mapping that the slab keeps for longer than its registration.
    let registered = unsafe { (context.library.register_host)(start.cast(), bytes, flags) };
    context.library.check("cuMemHostRegister", registered)
}

/// Ends a registration; says whether it is over. It is also when the device is lost, which reaches no page any more.
fn unregister(context: &Context, start: *mut u8) -> bool {
    let _entered = match context.enter() {
        Ok(entered) => entered,
        Err(error) => return error.is_final(),
    };
    // SAFETY: registered by us, and nobody uses it any more: the copy queues held a `Pinned` each.
    let ended = unsafe { (context.library.unregister_host)(start.cast()) };
    context.library.check("cuMemHostUnregister", ended).map_or_else(|error| error.is_final(), |()| true)
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let start = self.slab.base().as_ptr();
        let mut registered = registered();
        let Some(known) = registered.get_mut(&start.addr()) else { return };
        known.users -= 1;
        if known.users > 0 {
            return;
        }
        // The table is locked, so that nobody registers the mapping again before this is over.
        if unregister(known.device.context(), start) {
            registered.remove(&start.addr());
        } else {
            // The device may still reach the pages: they stay mapped, and known, for good.
            std::mem::forget(Arc::clone(&self.slab));
        }
    }
}

/// What may be why: somebody else's registration, or the limit of locked memory.
fn hint(code: u32, bytes: usize) -> String {
    if code == code::ALREADY_REGISTERED {
        return "; somebody else in this process has registered bytes of it".to_owned();
    }
    if !matches!(code, code::OUT_OF_MEMORY | code::OPERATING_SYSTEM | code::NOT_PERMITTED) {
        return String::new();
    }
    match getrlimit(Resource::Memlock).current {
        Some(limit) if limit < bytes as u64 => format!(
            "; RLIMIT_MEMLOCK is {limit} bytes, which may be why: raise it (ulimit -l, LimitMEMLOCK=)"
        ),
        _ => String::new(),
    }
}
