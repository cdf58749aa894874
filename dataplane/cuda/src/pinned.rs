//! A host slab that devices access by DMA: its pages are locked and mapped for every context.
//!
//! The slab remains a mapping of this process: a NIC can register it too, and peers can attach it. (Memory
//! that the driver allocates allows neither, and `cudarc`'s is write-combined, which the processor reads very
//! slowly.) Registering locks every page and is slow; done at start-up.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_PORTABLE};
use dataplane_memory::Slab;
use rustix::process::{Resource, getrlimit};

use crate::Device;
use crate::device::Context;
use crate::error::CudaError;
use crate::library::code;

/// A failure to register a slab.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{bytes} bytes of host memory cannot be pinned: {error}{hint}")]
pub struct PinError {
    /// Bytes of the mapping.
    pub bytes: usize,
    /// Error of the driver.
    pub error: CudaError,
    /// Likely cause, beginning with a separator; empty when none is known.
    pub hint: String,
}

/// A registered slab. The registration ends when the last `Pinned` of the slab is dropped.
#[derive(Debug)]
pub struct Pinned {
    slab: Arc<Slab>,
    device: Device,
    /// Device address of the mapping's first byte.
    device_base: u64,
}

/// The registrations, by the first address of their mappings.
static REGISTERED: Mutex<BTreeMap<usize, Registration>> = Mutex::new(BTreeMap::new());

struct Registration {
    /// Number of [`Pinned`] values; 0 when the driver refused to end the registration.
    users: usize,
    /// Keeps the device's context: the registration would end with it, for other devices too.
    device: Device,
}

fn registered() -> MutexGuard<'static, BTreeMap<usize, Registration>> {
    REGISTERED.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pinned {
    /// Registers the slab's mapping, or counts one more user of an existing registration. A mapping of which
    /// other code in this process has registered any part is refused, because extent and end of that
    /// registration are unknown.
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

    /// Returns the slab.
    #[must_use]
    pub fn slab(&self) -> &Arc<Slab> {
        &self.slab
    }

    /// Returns the device for which the device address was looked up. Other devices can copy from and to the
    /// slab as well.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the device address of `len` bytes at `offset` of `slot`; `None` when they are not inside the
    /// slot.
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

/// Ends a registration. Returns whether it has ended; a lost device counts, since it accesses no page any
/// more.
fn unregister(context: &Context, start: *mut u8) -> bool {
    let _entered = match context.enter() {
        Ok(entered) => entered,
        Err(error) => return error.is_final(),
    };
    // SAFETY: registered by this module and no longer in use: each copy queue held a `Pinned`.
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
        // The table stays locked, so that no thread registers the mapping again before the registration has
        // ended.
        if unregister(known.device.context(), start) {
            registered.remove(&start.addr());
        } else {
            // The device may still access the pages: they stay mapped and registered until the process ends.
            std::mem::forget(Arc::clone(&self.slab));
        }
    }
}

/// Returns the likely cause of a refusal: a registration by other code, or the limit of locked memory.
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
