//! Streams: the work of one stream runs in order, concurrently with that of other streams.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys::{CUevent_flags, CUstream};

use crate::Device;
use crate::device::Context;
use crate::error::CudaError;
use crate::module::Function;

/// Scheduling priority of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Priority {
    /// Before all other streams: work that a request waits for.
    Urgent,
    /// After all other streams: work that no request waits for.
    Background,
}

/// A stream that does not wait for the device's default stream.
#[derive(Debug)]
pub struct Stream {
    device: Device,
    raw: CUstream,
}

// SAFETY: a stream is used from any thread; the driver does its own locking.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// Creates a stream of the device's highest or lowest priority.
    pub fn new(device: &Device, priority: Priority) -> Result<Self, CudaError> {
        let context = device.context();
        let library = context.library;
        let _entered = context.enter()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: writes two integers.
        library.check("cuCtxGetStreamPriorityRange", unsafe {
            (library.priority_range)(&mut least, &mut greatest)
        })?;
        let priority = match priority {
            Priority::Urgent => greatest,
            Priority::Background => least,
        };
        let raw = context.create_stream(priority)?;
        Ok(Self { device: device.clone(), raw })
    }

    /// Returns the device of the stream.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        self.device.context()
    }

    pub(crate) fn raw(&self) -> CUstream {
        self.raw
    }

    /// Returns the driver's handle, for libraries that put their own work on the stream.
    #[must_use]
    pub fn handle(&self) -> *mut c_void {
        self.raw.cast()
    }

    /// Launches a kernel on the stream and returns without waiting. `parameters` has the address of each
    /// parameter, which is read during the call; grid and block are in x, y, z.
    ///
    /// # Safety
    /// 1. `parameters` has as many entries as the kernel has parameters, each the address of a value of its type.
    /// 2. All memory that the kernel accesses lies inside the ranges that it was given and lives until the
    ///    kernel has ended: this function does not keep it.
    /// 3. The function's module is not dropped before the kernel has ended. (Unloading waits for the device.)
    pub unsafe fn launch(
        &self,
        function: &Function,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        parameters: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        let context = self.context();
        let _entered = context.enter()?;
        let ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]) = (grid, block);
        let (function, parameters, no_extra) =
            (function.raw(), parameters.as_mut_ptr(), std::ptr::null_mut());
        // SAFETY: function and stream live; the caller vouches for the parameters.
        #[rustfmt::skip]
        let launched = unsafe {
            (context.library.launch)(
                function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes,
                self.raw, parameters, no_extra,
            )
        };
        context.library.check("cuLaunchKernel", launched)
    }

    /// Blocks until the stream is empty. For start-up, shut-down and tests.
    pub fn synchronise(&self) -> Result<(), CudaError> {
        self.context().synchronise(self.raw)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let context = self.context();
        let Ok(_entered) = context.enter() else { return };
        // SAFETY: made by this value, destroyed once; the driver finishes what is on it.
        let _ = unsafe { (context.library.destroy_stream)(self.raw) };
    }
}

/// Creates an event without timing, which is cheaper.
pub(crate) fn create_event(context: &Context) -> Result<cudarc::driver::sys::CUevent, CudaError> {
    let _entered = context.enter()?;
    let mut event = std::ptr::null_mut();
    let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
    // SAFETY: writes one handle.
    context.library.check("cuEventCreate", unsafe { (context.library.create_event)(&mut event, flags) })?;
    Ok(event)
}

/// Destroys an event. The driver keeps an event that has not passed until it passes.
pub(crate) fn destroy_event(context: &Context, event: cudarc::driver::sys::CUevent) {
    let Ok(_entered) = context.enter() else { return };
    // SAFETY: made by `create_event`, destroyed once.
    let _ = unsafe { (context.library.destroy_event)(event) };
}
