//! Slabs that are mapped for the device.

use std::ptr::NonNull;
use std::sync::Arc;

use dataplane_memory::Slab;

/// Maximum number of slabs of one engine: the host tier, a staging pool, a few more.
pub(crate) const REGISTRATIONS_MAX: usize = 16;

#[derive(Debug)]
struct Registration {
    start: usize,
    bytes: usize,
    address: u64,
    /// Keeps the memory from being freed under the device.
    slab: Arc<Slab>,
}

/// Maps addresses of this process to addresses of the device. A search over a handful of ranges.
#[derive(Debug, Default)]
pub(crate) struct Registrations(Vec<Registration>);

impl Registrations {
    pub(crate) fn contains(&self, slab: &Arc<Slab>) -> bool {
        self.0.iter().any(|registration| Arc::ptr_eq(&registration.slab, slab))
    }

    pub(crate) fn is_full(&self) -> bool {
        self.0.len() == REGISTRATIONS_MAX
    }

    pub(crate) fn push(&mut self, slab: Arc<Slab>, address: u64) {
        self.0.push(Registration {
            start: slab.base().addr().get(),
            bytes: slab.mapped_bytes(),
            address,
            slab,
        });
    }

    /// The device's address of `bytes` at `start`, if one registration holds them all.
    #[inline]
    pub(crate) fn translate(&self, start: NonNull<u8>, bytes: usize) -> Option<u64> {
        let start = start.addr().get();
        self.0.iter().find_map(|registration| {
            let offset = start.checked_sub(registration.start)?;
            let inside = offset <= registration.bytes && bytes <= registration.bytes - offset;
            inside.then(|| registration.address + offset as u64)
        })
    }

    /// Removes one registration: its device address, its bytes, and the slab, which the caller keeps until it
    /// is unmapped.
    pub(crate) fn pop(&mut self) -> Option<(u64, usize, Arc<Slab>)> {
        self.0.pop().map(|registration| (registration.address, registration.bytes, registration.slab))
    }
}
