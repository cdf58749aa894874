//! Memory that the device may read and write: whole slabs, registered once, and dma-buf regions of GPUs.
//!
//! A region of a slab covers its slots and nothing else: the header and the generations in front of them
//! cannot be reached with its key. It keeps the slab mapped; a region that the device refuses to give up leaks
//! the slab rather than free memory that the device may still write.

use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use dataplane_memory::Slab;

use crate::VerbsError;
use crate::error::from_code;
use crate::ffi;
use crate::protection::ProtectionDomain;

/// Who may do what with a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    /// Whether peers may read and write it; our own work requests always may.
    pub remote: bool,
    /// Whether the device may reorder its writes to it (PCIe relaxed ordering). Ignored where unsupported.
    pub relaxed_ordering: bool,
}

impl Access {
    fn flags(self) -> u32 {
        let remote = if self.remote { ffi::ACCESS_REMOTE_WRITE | ffi::ACCESS_REMOTE_READ } else { 0 };
        let relaxed = if self.relaxed_ordering { ffi::ACCESS_RELAXED_ORDERING } else { 0 };
        ffi::ACCESS_LOCAL_WRITE | remote | relaxed
    }
}

/// Registered memory.
#[derive(Debug)]
pub struct MemoryRegion {
    domain: Arc<ProtectionDomain>,
    raw: NonNull<ffi::MemoryRegion>,
    address: u64,
    length: u64,
    local_key: u32,
    remote_key: u32,
    slab: Option<ManuallyDrop<Arc<Slab>>>,
}

// SAFETY: libibverbs is thread-safe by its specification; the keys and the range never change.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above.
unsafe impl Sync for MemoryRegion {}

impl MemoryRegion {
    /// Registers all slots of a slab. Pages are pinned; with huge pages there are fewer to pin.
    pub fn of_slab(
        domain: &Arc<ProtectionDomain>,
        slab: &Arc<Slab>,
        access: Access,
    ) -> Result<Self, VerbsError> {
        let layout = slab.layout();
        let start = slab.address(0, 0, 0);
        let length = layout.stride() * layout.slot_count as usize;
        let library = &domain.device.library;
        let flags = access.flags();
        let raw = match library.register_iova {
            Some(register) if access.relaxed_ordering => {
                let address = start.as_ptr() as u64;
                // SAFETY: the range is mapped as long as the slab, which the region keeps.
                unsafe { register(domain.raw.as_ptr(), start.as_ptr().cast(), length, address, flags) }
            }
            _ => {
                let plain = (flags & !ffi::ACCESS_RELAXED_ORDERING) as i32;
                // SAFETY: as above.
                unsafe { (library.register)(domain.raw.as_ptr(), start.as_ptr().cast(), length, plain) }
            }
        };
        let what = || format!(" for {length} bytes of a slab at {start:p}");
        let mut region = Self::adopt(domain, raw, "ibv_reg_mr", what, start.as_ptr() as u64, length)?;
        region.slab = Some(ManuallyDrop::new(Arc::clone(slab)));
        Ok(region)
    }

    /// Registers `length` bytes at `offset` of a dma-buf, such as exported GPU memory. Work requests name them
    /// by addresses from `iova`. Fails where library, driver or kernel cannot (Soft-RoCE: EOPNOTSUPP).
    ///
    /// # Safety
    /// 1. No Rust reference to these bytes exists while a work request that writes them is in flight.
    pub unsafe fn of_dmabuf(
        domain: &Arc<ProtectionDomain>,
        descriptor: BorrowedFd<'_>,
        offset: u64,
        length: usize,
        iova: u64,
        access: Access,
    ) -> Result<Self, VerbsError> {
        let what = || {
            let descriptor = descriptor.as_raw_fd();
            format!(" for {length} bytes at {offset} of dma-buf descriptor {descriptor}")
        };
        let Some(register) = domain.device.library.register_dmabuf else {
            let error = std::io::Error::new(
                std::io::ErrorKind::Unsupported,
                "the installed libibverbs is older than rdma-core 34 and lacks it",
            );
            return Err(domain.device.failed("ibv_reg_dmabuf_mr", what(), error));
        };
        let (raw_domain, raw_descriptor) = (domain.raw.as_ptr(), descriptor.as_raw_fd());
        // SAFETY: the domain and the descriptor are live; the kernel itself holds on to the buffer, and the
        // caller upholds that no Rust reference to its bytes is in the way.
        let raw =
            unsafe { register(raw_domain, offset, length, iova, raw_descriptor, access.flags() as i32) };
        Self::adopt(domain, raw, "ibv_reg_dmabuf_mr", what, iova, length)
    }

    fn adopt(
        domain: &Arc<ProtectionDomain>,
        raw: *mut ffi::MemoryRegion,
        verb: &'static str,
        what: impl Fn() -> String,
        address: u64,
        length: usize,
    ) -> Result<Self, VerbsError> {
        let Some(raw) = NonNull::new(raw) else {
            return Err(domain.device.failed(verb, what(), std::io::Error::last_os_error()));
        };
        // SAFETY: the library returned a live region, whose keys it does not change.
        let local_key = unsafe { (*raw.as_ptr()).local_key };
        // SAFETY: as above.
        let remote_key = unsafe { (*raw.as_ptr()).remote_key };
        let (domain, length) = (Arc::clone(domain), length as u64);
        Ok(Self { domain, raw, address, length, local_key, remote_key, slab: None })
    }

    /// First address, as work requests name it.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Whether the range lies inside.
    #[must_use]
    pub fn contains(&self, address: u64, length: u64) -> bool {
        address
            .checked_sub(self.address)
            .and_then(|offset| offset.checked_add(length))
            .is_some_and(|end| end <= self.length)
    }

    /// Names the region in our own work requests.
    #[must_use]
    pub fn local_key(&self) -> u32 {
        self.local_key
    }

    /// Names the region in a peer's.
    #[must_use]
    pub fn remote_key(&self) -> u32 {
        self.remote_key
    }

    /// The slab that it covers, unless it is a dma-buf.
    #[must_use]
    pub fn slab(&self) -> Option<&Arc<Slab>> {
        self.slab.as_deref()
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: the region is live and dropped once; requests that name it later fail at the device.
        let code = unsafe { (self.domain.device.library.deregister)(self.raw.as_ptr()) };
        if code != 0 {
            tracing::error!(device = self.domain.device.name(), error = %from_code(code), "ibv_dereg_mr");
            return;
        }
        if let Some(slab) = &mut self.slab {
            // SAFETY: dropped here only, and not used afterwards.
            unsafe { ManuallyDrop::drop(slab) };
        }
    }
}
