//! What others in this process have made: memory, and events.

use std::ffi::{c_int, c_uint, c_void};

use cudarc::driver::sys::{CUmemorytype, CUpointer_attribute as Attribute};
use dataplane_memory::DeviceError;

use crate::Stream;
use crate::device::Context;
use crate::error::CudaError;
use crate::export::allocation_of;
use crate::library::code;

/// Allocations that one range may span: a pool of an engine's grows by pieces of 2 or 20 MiB.
const ALLOCATIONS_MAX: usize = 1 << 20;

/// Why memory cannot be borrowed.
#[derive(Debug, thiserror::Error)]
pub enum BorrowError {
    /// Not all of it is there, or it is not the device's own.
    #[error(transparent)]
    Range(DeviceError),
    /// The driver cannot tell: the device is lost, for example.
    #[error(transparent)]
    Driver(CudaError),
}

/// Whether each byte of a range lies in some allocation of the context's device.
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

/// The type of the memory (`CUmemorytype`) that an address lies in, and the ordinal of its device.
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
    /// Lets what is put on this stream from now on wait for what was recorded last with an event. The device waits, not the
    /// thread.
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
