//! One device's primary context, retained while any value of this crate uses it.

use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::{CUcontext, CUdevice, CUstream, CUstream_flags, CUstreamCaptureMode};

use crate::description::{self, DeviceDescription};
use crate::error::CudaError;
use crate::library::{Library, code};

/// A device that is ready for use. Cheap to clone; any thread may use it.
#[derive(Debug, Clone)]
pub struct Device {
    context: Arc<Context>,
}

/// The retained context.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) library: &'static Library,
    pub(crate) device: CUdevice,
    pub(crate) raw: CUcontext,
    pub(crate) description: DeviceDescription,
    /// The stream of blocking copies, made with the first copy. The lock is held while a copy is running.
    blocking: Mutex<Option<CUstream>>,
}

// SAFETY: a context may be current on any number of threads; the driver does its own locking.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// Makes the context current on this thread while it lives; then the previous context is current again.
/// Meanwhile this thread's calls do not take part in graph recordings: a thread of the engine, which shares
/// the context, may record a graph in a mode that forbids other threads' calls such as an event query, and
/// such a call would invalidate the recording.
pub(crate) struct ContextGuard<'a> {
    context: &'a Context,
    /// The thread's previous capture mode; `None` when the driver cannot exchange it.
    capture_mode: Option<CUstreamCaptureMode>,
    /// Not `Send`: the driver's stack of contexts belongs to the thread.
    _thread: std::marker::PhantomData<*const ()>,
}

impl Context {
    /// Makes the context current on this thread. Four cheap calls, including those of the drop; no system
    /// call.
    #[inline]
    pub(crate) fn enter(&self) -> Result<ContextGuard<'_>, CudaError> {
        // SAFETY: the context is retained, so it is valid.
        self.library.check("cuCtxPushCurrent", unsafe { (self.library.context_push)(self.raw) })?;
        let capture_mode = self.exchange(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED);
        Ok(ContextGuard { context: self, capture_mode, _thread: std::marker::PhantomData })
    }

    /// Sets the thread's capture mode and returns the previous one.
    #[inline]
    fn exchange(&self, mut mode: CUstreamCaptureMode) -> Option<CUstreamCaptureMode> {
        let exchange = self.library.capture_mode?;
        // SAFETY: reads and writes one mode, which is the thread's; it has the three that the enum has.
        (unsafe { exchange(&mut mode) } == code::SUCCESS).then_some(mode)
    }

    /// Runs work on a stream of its own, which is not ordered with any other stream, and waits for
    /// it. `Err` has whether it is certain that no part of the work is running any more.
    pub(crate) fn block_on(
        &self,
        operation: &'static str,
        work: impl FnOnce(CUstream) -> u32,
    ) -> Result<(), (CudaError, bool)> {
        let is_over = |error| (error, true);
        let _entered = self.enter().map_err(is_over)?;
        let mut blocking = self.blocking.lock().unwrap_or_else(PoisonError::into_inner);
        let stream = match *blocking {
            Some(stream) => stream,
            None => *blocking.insert(self.create_stream(0).map_err(is_over)?),
        };
        self.library.check(operation, work(stream)).map_err(is_over)?;
        self.synchronise(stream).map_err(|error| (error, error.is_final()))
    }

    /// Creates a stream that does not wait for the null stream. The caller has entered the context.
    pub(crate) fn create_stream(&self, priority: i32) -> Result<CUstream, CudaError> {
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle.
        let created = unsafe { (self.library.create_stream)(&mut raw, flags, priority) };
        self.library.check("cuStreamCreateWithPriority", created).map(|()| raw)
    }

    /// Waits until a stream is empty.
    pub(crate) fn synchronise(&self, stream: CUstream) -> Result<(), CudaError> {
        let _entered = self.enter()?;
        // SAFETY: the stream lives and is of this context.
        self.library.check("cuStreamSynchronize", unsafe { (self.library.synchronise_stream)(stream) })
    }
}

impl Drop for ContextGuard<'_> {
    fn drop(&mut self) {
        if let Some(mode) = self.capture_mode {
            self.context.exchange(mode);
        }
        let mut popped = std::ptr::null_mut();
        // SAFETY: writes one pointer; `enter` pushed on this very thread.
        let left = unsafe { (self.context.library.context_pop)(&mut popped) };
        debug_assert!(left != code::SUCCESS || popped == self.context.raw, "somebody pushed and did not pop");
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let blocking = self.blocking.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((stream, Ok(_entered))) = blocking.map(|stream| (stream, self.enter())) {
            // SAFETY: made by `block_on`, destroyed once; the driver finishes what is on it.
            let _ = unsafe { (self.library.destroy_stream)(stream) };
        }
        // SAFETY: retained once in `Device::open`, released once here.
        let _ = unsafe { (self.library.context_release)(self.device) };
    }
}

impl Device {
    pub(crate) fn open(library: &'static Library, ordinal: u32) -> Result<Self, CudaError> {
        let ordinal = i32::try_from(ordinal).unwrap_or(i32::MAX);
        let (device, description) = description::describe(library, ordinal)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle.
        let retained = unsafe { (library.context_retain)(&mut raw, device) };
        library.check("cuDevicePrimaryCtxRetain", retained)?;
        let blocking = Mutex::new(None);
        Ok(Self { context: Arc::new(Context { library, device, raw, description, blocking }) })
    }

    /// Returns the properties of the device.
    #[must_use]
    pub fn description(&self) -> &DeviceDescription {
        &self.context.description
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(crate) fn is(&self, other: &Self) -> bool {
        self.context.device == other.context.device
    }
}
