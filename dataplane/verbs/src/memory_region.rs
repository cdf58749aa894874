//! Memory that the device may read and write: whole slabs, registered once, and dma-buf regions.
//!
//! A slab whose slots lie in an accelerator's memory is registered so that the card accesses that memory
//! directly: as a dma-buf that is mapped through the memory's window on the bus, else as a dma-buf that the
//! driver maps by its own choice, else by its bare address where a peer-memory module is loaded. Work
//! requests name all three by the accelerator's own addresses. [`MemoryRegion::registration`] returns which
//! one was used.
//!
//! A region of a slab covers its slots and nothing else: its key does not reach the header and the
//! generations in front of them. The region keeps the slab mapped; if the device refuses to deregister it,
//! the slab is leaked, because the device may still write to it.

use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use dataplane_fabric::PeerAccess;
use dataplane_memory::{DeviceMemory, DmaBufMapping, Slab};

use crate::VerbsError;
use crate::error::{from_code, named};
use crate::ffi;
use crate::protection::ProtectionDomain;

/// Access rights of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    /// Access of peers to the region; local work requests have full access.
    pub remote: PeerAccess,
    /// Whether the device may reorder its writes to the region (PCIe relaxed ordering). Ignored where
    /// unsupported. An accelerator's memory needs [`DeviceMemory::flush_nic_writes`] after the completion in either
    /// case.
    pub relaxed_ordering: bool,
}

impl Access {
    fn flags(self) -> u32 {
        let remote = remote_flags(self.remote);
        let relaxed = if self.relaxed_ordering { ffi::ACCESS_RELAXED_ORDERING } else { 0 };
        ffi::ACCESS_LOCAL_WRITE | remote | relaxed
    }
}

/// Converts the access of peers to flags of `enum ibv_access_flags`.
pub(crate) fn remote_flags(access: PeerAccess) -> u32 {
    match access {
        PeerAccess::None => 0,
        PeerAccess::Write => ffi::ACCESS_REMOTE_WRITE,
        PeerAccess::ReadWrite => ffi::ACCESS_REMOTE_WRITE | ffi::ACCESS_REMOTE_READ,
    }
}

/// Path by which the card reaches a region's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Registration {
    /// Memory of this machine.
    Host,
    /// An accelerator's memory, as a dma-buf.
    DmaBuf,
    /// An accelerator's memory, by its bare address, through a peer-memory module of the kernel.
    PeerMemory,
}

impl Registration {
    /// Returns the name of the path for reports and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::DmaBuf => "dma-buf",
            Self::PeerMemory => "peer memory",
        }
    }
}

/// Memory registered with a device.
#[derive(Debug)]
pub struct MemoryRegion {
    domain: Arc<ProtectionDomain>,
    raw: NonNull<ffi::MemoryRegion>,
    address: u64,
    length: u64,
    local_key: u32,
    remote_key: u32,
    registration: Registration,
    slab: Option<ManuallyDrop<Arc<Slab>>>,
}

// SAFETY: libibverbs is thread-safe by its specification; the keys and the range never change.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above.
unsafe impl Sync for MemoryRegion {}

impl MemoryRegion {
    /// Registers all slots of a slab. Pages are pinned; huge pages reduce their number. If the card cannot
    /// reach slots in an accelerator's memory, the error holds the reason for each way that was tried.
    pub fn of_slab(
        domain: &Arc<ProtectionDomain>,
        slab: &Arc<Slab>,
        access: Access,
    ) -> Result<Self, VerbsError> {
        let length = slab.layout().slots_bytes();
        let mut region = match slab.device() {
            Some(memory) => Self::of_device(domain, memory, length, access)?,
            None => {
                let start = slab.address(0, 0, 0).as_ptr() as u64;
                let what = || format!(" for {length} bytes of a slab at {start:#x}");
                Self::of_address(domain, start, length, access, what)?
            }
        };
        region.slab = Some(ManuallyDrop::new(Arc::clone(slab)));
        Ok(region)
    }

    /// Registers the first `length` bytes of an accelerator's memory. The caller keeps the memory alive as
    /// long as the region.
    fn of_device(
        domain: &Arc<ProtectionDomain>,
        memory: &Arc<dyn DeviceMemory>,
        length: usize,
        access: Access,
    ) -> Result<Self, VerbsError> {
        let address = memory.address();
        let as_dma_buf = |mapping| {
            let dma_buf = memory.dma_buf(mapping).map_err(|error| error.to_string())?;
            let (descriptor, offset) = (dma_buf.descriptor.as_fd(), dma_buf.offset);
            // SAFETY: the bytes are an accelerator's: no Rust reference to them can exist.
            unsafe { Self::of_dmabuf(domain, descriptor, offset, length, address, access) }.map_err(reason)
        };
        let through_bar = match as_dma_buf(DmaBufMapping::Bar) {
            Ok(region) => return Ok(region),
            Err(reason) => reason,
        };
        let dma_buf = match as_dma_buf(DmaBufMapping::Automatic) {
            Ok(region) => return Ok(region),
            Err(reason) => reason,
        };
        let peer_memory = if memory.has_peer_memory() {
            let what = || format!(" for {length} bytes of device memory at {address:#x}");
            match Self::of_address(domain, address, length, access, what) {
                Ok(region) => return Ok(region.reached_by(Registration::PeerMemory)),
                Err(error) => reason(error),
            }
        } else {
            "no peer-memory module for this memory".to_owned()
        };
        let device = domain.device.name().to_owned();
        Err(VerbsError::DeviceMemory { device, address, length, through_bar, dma_buf, peer_memory })
    }

    /// Registers a range of addresses, which need not be mapped by the CPU. The caller keeps the memory
    /// alive as long as the region.
    fn of_address(
        domain: &Arc<ProtectionDomain>,
        address: u64,
        length: usize,
        access: Access,
        what: impl Fn() -> String,
    ) -> Result<Self, VerbsError> {
        let library = &domain.device.library;
        let (flags, start) = (access.flags(), address as *mut c_void);
        let raw = match library.register_iova {
            Some(register) if access.relaxed_ordering => {
                // SAFETY: the call looks the range up and does not access it; its owner keeps it with the region.
                unsafe { register(domain.raw.as_ptr(), start, length, address, flags) }
            }
            _ => {
                let plain = (flags & !ffi::ACCESS_RELAXED_ORDERING) as i32;
                // SAFETY: as above.
                unsafe { (library.register)(domain.raw.as_ptr(), start, length, plain) }
            }
        };
        Self::adopt(domain, raw, "ibv_reg_mr", what, address, length)
    }

    /// Registers `length` bytes at `offset` of a dma-buf, such as exported GPU memory. Work requests name
    /// them by addresses from `iova`, whose offset within a page must equal that of `offset`. Fails where
    /// library, driver or kernel lack support (Soft-RoCE: EOPNOTSUPP).
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
        let region = Self::adopt(domain, raw, "ibv_reg_dmabuf_mr", what, iova, length)?;
        Ok(region.reached_by(Registration::DmaBuf))
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
        let registration = Registration::Host;
        Ok(Self { domain, raw, address, length, local_key, remote_key, registration, slab: None })
    }

    fn reached_by(mut self, registration: Registration) -> Self {
        self.registration = registration;
        self
    }

    /// Returns the first address, as work requests name it.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the length of the region in bytes.
    #[must_use]
    pub fn length(&self) -> u64 {
        self.length
    }

    /// Whether the range lies inside the region.
    #[must_use]
    pub fn contains(&self, address: u64, length: u64) -> bool {
        address
            .checked_sub(self.address)
            .and_then(|offset| offset.checked_add(length))
            .is_some_and(|end| end <= self.length)
    }

    /// Returns the key by which local work requests name the region.
    #[must_use]
    pub fn local_key(&self) -> u32 {
        self.local_key
    }

    /// Returns the key by which a peer's work requests name the region.
    #[must_use]
    pub fn remote_key(&self) -> u32 {
        self.remote_key
    }

    /// Returns the path by which the card reaches the region's memory.
    #[must_use]
    pub fn registration(&self) -> Registration {
        self.registration
    }

    /// Returns the slab that the region covers; `None` for a dma-buf.
    #[must_use]
    pub fn slab(&self) -> Option<&Arc<Slab>> {
        self.slab.as_deref()
    }
}

/// Returns the verb and its errno without the verb's object, which the enclosing error names.
fn reason(error: VerbsError) -> String {
    match error {
        VerbsError::Verb { verb, error, .. } => format!("{verb}: {}", named(&error)),
        other => other.to_string(),
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

#[cfg(test)]
mod tests {
    use dataplane_memory::SlabLayout;
    use dataplane_memory::testing::{Abilities, DeviceDouble};

    use super::*;
    use crate::device::Device;
    use crate::testing::{Reach, SoftwareDevice};

    /// With a library that is too old for dma-bufs, the slab is registered by its address, or the error
    /// says that the library is too old.
    #[test]
    fn a_library_without_dma_bufs_leaves_the_other_way() {
        let layout = SlabLayout { slot_bytes: 4096, slot_count: 2 };
        let abilities = Abilities { dma_buf: true, peer_memory: true };
        for peer_memory in [true, false] {
            let card = SoftwareDevice::new();
            let memory: Arc<dyn DeviceMemory> = DeviceDouble::new(layout.slots_bytes(), abilities);
            card.put_beside(Arc::clone(&memory), Reach { dma_buf: true, peer_memory });
            let mut library = Arc::into_inner(SoftwareDevice::library()).expect("nobody else has it");
            library.register_dmabuf = None;
            let device = Device::open(&Arc::new(library), Some(card.name())).expect("open");
            let domain = ProtectionDomain::new(&device).expect("domain");
            let slab = Arc::new(Slab::on_device("device", layout, memory).expect("slab"));
            let access = Access { remote: PeerAccess::ReadWrite, relaxed_ordering: false };
            match MemoryRegion::of_slab(&domain, &slab, access) {
                Ok(region) => {
                    assert_eq!((region.registration(), peer_memory), (Registration::PeerMemory, true))
                }
                Err(error) => {
                    let text = error.to_string();
                    let reasons =
                        ["ibv_reg_dmabuf_mr: the installed libibverbs is older", "ibv_reg_mr: EFAULT"];
                    assert!(!peer_memory && reasons.iter().all(|reason| text.contains(reason)), "{text}");
                }
            }
        }
    }
}
