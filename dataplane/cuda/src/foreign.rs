//! What others in this process have made: memory, and events.

use std::ffi::c_void;

use dataplane_memory::DeviceError;

use crate::Stream;
use crate::device::Context;
use crate::error::CudaError;
use crate::export::allocation_of;

/// Allocations that one range may span: a pool of an engine's grows by pieces of 2 or 20 MiB.
const ALLOCATIONS_MAX: usize = 1 << 20;

/// Whether each byte of a range lies in some allocation.
pub(crate) fn is_mapped(context: &Context, address: u64, bytes: usize) -> Result<(), DeviceError> {
    let refused = |reason: String| DeviceError { operation: "cuMemGetAddressRange", reason };
    let end = (address.checked_add(bytes as u64))
        .ok_or_else(|| refused(format!("{bytes} bytes at {address:#x} end behind all memory")))?;
    let mut at = address;
    for _ in 0..ALLOCATIONS_MAX {
        if at >= end {
            return Ok(());
        }
        let (start, allocated) = allocation_of(context, at)
            .map_err(|error| refused(format!("{bytes} bytes at {address:#x}: {:#x}: {error}", at)))?;
        let next = start.saturating_add(allocated as u64);
        if next <= at {
            break;
        }
        at = next;
    }
    Err(refused(format!("{bytes} bytes at {address:#x}: the allocation at {at:#x} has no end")))
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
