//! Memory for large arrays, in 2 MiB pages if the kernel provides them: accesses are spread over the whole array, and with
//! 4 KiB pages each one costs a page-table walk. Mapped separately instead of taken from the heap, so that freed memory returns
//! to the system at once.

use std::ops::{Deref, DerefMut};

/// Size and alignment of a mapping.
pub(crate) const HUGE_BYTES: usize = 2 << 20;

/// A `T` of at most [`HUGE_BYTES`], zeroed.
#[derive(Debug)]
pub(crate) struct Huge<T>(*mut T);

// SAFETY: owns its memory like a box.
unsafe impl<T: Send> Send for Huge<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Huge<T> {}

/// Types for which zeroed memory is a valid value.
///
/// # Safety
/// All bytes zero must be a valid value, and dropping it must do nothing.
pub(crate) unsafe trait Zeroed {}

#[cfg(all(target_os = "linux", not(loom)))]
mod mapping {
    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

    use super::HUGE_BYTES;

    /// Maps memory aligned to its size. `None` when the system has no memory.
    pub(super) fn map() -> Option<*mut u8> {
        // Twice as much, so that an aligned piece is in it; the rest goes back.
        // SAFETY: a new anonymous mapping touches no other memory.
        let start = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                2 * HUGE_BYTES,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        let start = start.ok()?.cast::<u8>();
        let before = start.align_offset(HUGE_BYTES);
        let aligned = start.wrapping_add(before);
        let behind = aligned.wrapping_add(HUGE_BYTES);
        if before > 0 {
            // SAFETY: the beginning of the mapping just made, which is not used. On failure it stays mapped.
            let _kept = unsafe { munmap(start.cast(), before) };
        }
        // SAFETY: its end, likewise.
        let _kept = unsafe { munmap(behind.cast(), HUGE_BYTES - before) };
        // SAFETY: advice on the mapping just made changes no contents. A kernel without huge pages refuses.
        let _refused = unsafe { madvise(aligned.cast(), HUGE_BYTES, Advice::LinuxHugepage) };
        Some(aligned)
    }

    pub(super) fn unmap(at: *mut u8) {
        // SAFETY: made by `map`, and the owner is being dropped.
        let _unmapped = unsafe { munmap(at.cast(), HUGE_BYTES) };
    }
}

#[cfg(not(all(target_os = "linux", not(loom))))]
mod mapping {
    use std::alloc::{Layout, alloc_zeroed, dealloc};

    use super::HUGE_BYTES;

    fn layout() -> Option<Layout> {
        Layout::from_size_align(HUGE_BYTES, 4096).ok()
    }

    pub(super) fn map() -> Option<*mut u8> {
        // SAFETY: the size is not zero.
        let at = unsafe { alloc_zeroed(layout()?) };
        (!at.is_null()).then_some(at)
    }

    pub(super) fn unmap(at: *mut u8) {
        if let Some(layout) = layout() {
            // SAFETY: made by `map` with the same layout.
            unsafe { dealloc(at, layout) };
        }
    }
}

impl<T: Zeroed> Huge<T> {
    const FITS: () = assert!(size_of::<T>() <= HUGE_BYTES && align_of::<T>() <= 4096);

    /// `None` when the system has no memory.
    pub(crate) fn new() -> Option<Self> {
        const { Self::FITS };
        Some(Self(mapping::map()?.cast()))
    }

    /// Returns the memory, which the caller then owns. It is freed through [`Self::from_raw`].
    #[cfg(not(loom))]
    pub(crate) fn into_raw(self) -> *mut T {
        let at = self.0;
        std::mem::forget(self);
        at
    }

    /// # Safety
    /// `at` came from [`Self::into_raw`], and no other code uses it any more.
    #[cfg(not(loom))]
    pub(crate) unsafe fn from_raw(at: *mut T) -> Self {
        Self(at)
    }
}

impl<T> Deref for Huge<T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: mapped, large enough, aligned, and zeroed bytes are a value (`Zeroed`); owned by self.
        unsafe { &*self.0 }
    }
}

impl<T> DerefMut for Huge<T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`, and borrowed for this alone.
        unsafe { &mut *self.0 }
    }
}

impl<T> Drop for Huge<T> {
    fn drop(&mut self) {
        mapping::unmap(self.0.cast());
    }
}
