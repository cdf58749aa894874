//! Objects that other code in this process has made: memory and events.

use std::ffi::{c_int, c_uint, c_void};

use cudarc::driver::sys::{CUmemorytype, CUpointer_attribute as Attribute};
use dataplane_memory::DeviceError;

use crate::Stream;
use crate::device::Context;
use crate::error::CudaError;
use crate::export::allocation_of;
use crate::library::code;

/// Largest number of allocations that one range may span: an engine's pool grows by pieces of 2 or 20 MiB.
const ALLOCATIONS_MAX: usize = 1 << 20;

/// Reason why memory cannot be borrowed.
#[derive(Debug, thiserror::Error)]
pub enum BorrowError {
    /// A part of the range is unmapped, or is not memory of the device.
    #[error(transparent)]
    Range(DeviceError),
    /// The driver cannot be asked, for example because the device is lost.
    #[error(transparent)]
    Driver(CudaError),
}

/// Checks that each byte of a range lies in an allocation of the context's device.
pub(crate) fn is_mapped(context: &Context, address: u64, bytes: usize) -> Result<(), BorrowError> {
    let no_range = |operation, reason: String| BorrowError::Range(DeviceError { operation, reason });
    let refused = |reason| no_range("cuMemGetAddressRange", reason);
    let told = |at: u64, error: CudaError| match error.code {
        code::INVALID_VALUE | code::NOT_FOUND => {
            no_range(error.operation, format!("{bytes} bytes at {address:#x}: {at:#x}: {error}"))
        }
        _ => BorrowError::Driver(error),
    };
    let end = (address.checked_add(bytes as u64))
        .ok_or_else(|| refused(format!("{bytes} bytes at {address:#x} end behind all memory")))?;
    let mut at = address;
    for _ in 0..ALLOCATIONS_MAX {
        if at >= end {
            return Ok(());
        }
        let (start, allocated) = allocation_of(context, at).map_err(|error| told(at, error))?;
        let (kind, ordinal) = owner_of(context, at).map_err(|error| told(at, error))?;
        let device = context.description.ordinal;
        if kind != CUmemorytype::CU_MEMORYTYPE_DEVICE as c_uint || i64::from(ordinal) != i64::from(device) {
            let reason =
                format!("{at:#x} is memory of type {kind} of device {ordinal}, not of device {device}");
            return Err(no_range("cuPointerGetAttribute", reason));
        }
        let next = start.saturating_add(allocated as u64);
        if next <= at {
            break;
        }
        at = next;
    }
    Err(refused(format!("{bytes} bytes at {address:#x}: the allocation at {at:#x} has no end")))
}

/// Returns the type of the memory (`CUmemorytype`) at an address, and the ordinal of its device.
fn owner_of(context: &Context, address: u64) -> Result<(c_uint, c_int), CudaError> {
    let _entered = context.enter()?;
    let (mut kind, mut ordinal): (c_uint, c_int) = (0, -1);
    let asked = [
        (Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (&raw mut kind).cast()),
        (Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, (&raw mut ordinal).cast()),
    ];
    for (which, value) in asked {
        // SAFETY: writes one integer of 32 bits for either attribute; the value is of that size and lives.
        let told = unsafe { (context.library.pointer_attribute)(value, which, address) };
        context.library.check("cuPointerGetAttribute", told)?;
    }
    Ok((kind, ordinal))
}

impl Stream {
    /// Makes all later work of this stream wait for the work that was last recorded with an event. The device
    /// waits, not the thread.
    ///
    /// # Safety
    /// `event` is an event (`CUevent`, `cudaEvent_t`) that was not destroyed.
    pub unsafe fn wait_for_event(&self, event: *mut c_void) -> Result<(), CudaError> {
        let context = self.context();
        let _entered = context.enter()?;
        // SAFETY: the stream lives, and so does the event by the contract of this function; the flags must be zero.
        let waits = unsafe { (context.library.wait_event)(self.raw(), event.cast(), 0) };
        context.library.check("cuStreamWaitEvent", waits)
    }
}
