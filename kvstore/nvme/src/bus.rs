//! Access to a controller: its registers, and the memory that the device accesses.
//!
//! The driver above uses only this trait, so that it runs unchanged over a device behind VFIO and over the
//! software controller of `testing`.

use std::ptr::NonNull;

use crate::NvmeError;

/// Access to one controller.
pub trait Bus: Send {
    /// Name of the device in errors: its PCI address.
    fn device(&self) -> &str;

    /// Bytes of the register space that can be accessed.
    fn register_bytes(&self) -> usize;

    /// Reads the register at `offset`, a multiple of 4 inside the register space; panics otherwise. All ones when
    /// the device is gone.
    fn read(&self, offset: usize) -> u32;

    /// Writes the register at `offset`, as above. Memory that was written before is visible to the device first.
    fn write(&self, offset: usize, value: u32);

    /// Lets the device read and write `bytes` at `start`, both multiples of 4 KiB; returns the address by which the
    /// device names them.
    ///
    /// # Safety
    /// The memory must stay allocated, and every access to it must allow for concurrent accesses of the device,
    /// until [`Bus::unmap`] returned or this value is dropped.
    unsafe fn map(&mut self, start: NonNull<u8>, bytes: usize) -> Result<u64, NvmeError>;

    /// Removes a mapping that [`Bus::map`] made.
    fn unmap(&mut self, address: u64, bytes: usize) -> Result<(), NvmeError>;

    /// Resets the function from outside, for a controller that no longer obeys its registers. The controller
    /// then accesses no memory until it is enabled again. An error when the device has no such reset.
    fn reset(&mut self) -> Result<(), NvmeError>;

    /// Ends the device's access to memory permanently.
    fn isolate(&mut self);
}

/// Orders accesses to memory before the register write that follows. On x86 they are ordered anyway, also before an
/// uncached store, so that the compiler is all that must be told; Arm needs the barrier for the outer domain.
#[inline]
pub(crate) fn memory_before_register() {
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the barrier has no operands and changes no state.
    unsafe {
        std::arch::asm!("dmb osh", options(nostack, preserves_flags));
    }
    std::sync::atomic::fence(std::sync::atomic::Ordering::Release);
}

/// Orders the read of a completion's phase before the reads of what it announces.
#[inline]
pub(crate) fn completion_before_contents() {
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the barrier has no operands and changes no state.
    unsafe {
        std::arch::asm!("dmb oshld", options(nostack, preserves_flags));
    }
    std::sync::atomic::fence(std::sync::atomic::Ordering::Acquire);
}
