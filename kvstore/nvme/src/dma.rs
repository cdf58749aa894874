//! Memory for queues, lists of pages and bounce buffers: one mapping, made at start-up.
//!
//! 2 MiB pages when the kernel has them reserved (one entry in the IOMMU's cache instead of hundreds), else 4 KiB
//! pages. Shared, not private: a `fork` must not let a page be copied away from under the device. The device and the
//! driver access the words concurrently, so both do it with atomics; bytes of bounce buffers are copied while only one
//! side owns them.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags};

use crate::NvmeError;

/// A page of the controller: `CC.MPS` is 0.
pub(crate) const PAGE_BYTES: usize = 4096;
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Memory that is pinned once it is mapped for a device.
#[derive(Debug)]
pub(crate) struct DmaMemory {
    start: NonNull<u8>,
    bytes: usize,
    has_huge_pages: bool,
}

// SAFETY: it owns its mapping; words are accessed by atomics, and bytes only by the side that owns them at that
// time.
unsafe impl Send for DmaMemory {}

impl DmaMemory {
    /// Zeroed memory of at least `bytes`.
    pub(crate) fn allocate(bytes: usize) -> Result<Self, NvmeError> {
        let huge_bytes = bytes.next_multiple_of(HUGE_PAGE_BYTES);
        let huge = MapFlags::HUGETLB | MapFlags::HUGE_2MB;
        if let Ok(start) = map(huge_bytes, huge) {
            return Ok(Self { start, bytes: huge_bytes, has_huge_pages: true });
        }
        let bytes = bytes.next_multiple_of(PAGE_BYTES);
        let start = map(bytes, MapFlags::empty()).map_err(|errno| NvmeError::System {
            operation: "mmap",
            object: format!("{bytes} bytes for queues"),
            errno: errno.raw_os_error(),
        })?;
        // The IOMMU's mapping pins the pages too; if a limit forbids the lock, that pin still holds.
        // SAFETY: the range was just mapped, and locking changes no contents.
        let _ = unsafe { rustix::mm::mlock(start.as_ptr().cast(), bytes) };
        Ok(Self { start, bytes, has_huge_pages: false })
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn has_huge_pages(&self) -> bool {
        self.has_huge_pages
    }

    #[inline]
    fn at(&self, offset: usize, bytes: usize, alignment: usize) -> NonNull<u8> {
        let inside = offset <= self.bytes && bytes <= self.bytes - offset;
        assert!(inside && offset.is_multiple_of(alignment), "{bytes} bytes at {offset} of {}", self.bytes);
        // SAFETY: the offset is inside the mapping, as was just checked.
        unsafe { self.start.add(offset) }
    }

    #[inline]
    pub(crate) fn word(&self, offset: usize) -> &AtomicU32 {
        let word = self.at(offset, 4, 4).cast::<AtomicU32>();
        // SAFETY: aligned, inside the mapping, which lives as long as `self`, and zeroed by the kernel at first.
        unsafe { word.as_ref() }
    }

    #[inline]
    pub(crate) fn long(&self, offset: usize) -> &AtomicU64 {
        let long = self.at(offset, 8, 8).cast::<AtomicU64>();
        // SAFETY: as in `word`.
        unsafe { long.as_ref() }
    }

    pub(crate) fn clear(&self, offset: usize, bytes: usize) {
        for at in (offset..offset + bytes).step_by(8) {
            self.long(at).store(0, Ordering::Relaxed);
        }
    }

    pub(crate) fn copy_in(&self, offset: usize, source: &[u8]) {
        let target = self.at(offset, source.len(), 1);
        // SAFETY: the target was checked to be inside the mapping, where no slice can reach; the caller's bounce
        // buffer is not with the device now.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), target.as_ptr(), source.len()) };
    }

    pub(crate) fn copy_out(&self, offset: usize, target: &mut [u8]) {
        let source = self.at(offset, target.len(), 1);
        // SAFETY: as in `copy_in`, the other way round.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), target.as_mut_ptr(), target.len()) };
    }
}

impl Drop for DmaMemory {
    fn drop(&mut self) {
        // SAFETY: mapped by `allocate` with this length; the owner took the device's mapping back before.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "munmap of queue memory: {unmapped:?}");
    }
}

fn map(bytes: usize, flags: MapFlags) -> Result<NonNull<u8>, rustix::io::Errno> {
    let flags = flags | MapFlags::SHARED | MapFlags::POPULATE;
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the kernel picks an address that nothing else uses.
    let start = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, protection, flags) }?;
    NonNull::new(start.cast()).ok_or(rustix::io::Errno::NOMEM)
}
