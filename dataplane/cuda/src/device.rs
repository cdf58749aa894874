//! One device's primary context, retained for as long as anything here uses it.

use std::sync::Arc;

use cudarc::driver::sys::{CUcontext, CUdevice, CUstream};

use crate::description::{self, DeviceDescription};
use crate::error::CudaError;
use crate::library::{Library, code};
use crate::peer::{self, PeerLink};

/// A device that can be worked with. Cheap to clone; any thread may use it.
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
}

// SAFETY: a context may be current on any number of threads; the driver locks for itself.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// The context is current on this thread for as long as this lives; then the one before it is again.
pub(crate) struct Entered<'a> {
    context: &'a Context,
    /// The driver's stack of contexts is the thread's.
    _thread: std::marker::PhantomData<*const ()>,
}

impl Context {
    /// Makes the context current on this thread. Two cheap calls with its end; no system call.
    #[inline]
    pub(crate) fn enter(&self) -> Result<Entered<'_>, CudaError> {
        // SAFETY: the context is retained, so it is valid.
        self.library.check("cuCtxPushCurrent", unsafe { (self.library.context_push)(self.raw) })?;
        Ok(Entered { context: self, _thread: std::marker::PhantomData })
    }

    /// Waits for a stream; for the null stream, where blocking copies run.
    pub(crate) fn synchronise(&self, stream: CUstream) -> Result<(), CudaError> {
        let _entered = self.enter()?;
        // SAFETY: the stream is null or one that lives, of this context.
        self.library.check("cuStreamSynchronize", unsafe { (self.library.synchronise_stream)(stream) })
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut popped = std::ptr::null_mut();
        // SAFETY: writes one pointer; `enter` pushed on this very thread.
        let left = unsafe { (self.context.library.context_pop)(&mut popped) };
        debug_assert!(left != code::SUCCESS || popped == self.context.raw, "somebody pushed and did not pop");
    }
}

impl Drop for Context {
    fn drop(&mut self) {
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
        Ok(Self { context: Arc::new(Context { library, device, raw, description }) })
    }

    /// What the driver tells about it.
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

    /// How this device reaches the memory of `peer`.
    pub fn can_access(&self, peer: &Self) -> Result<PeerLink, CudaError> {
        peer::link(self.context.library, self.context.device, peer.context.device)
    }

    /// Lets this device reach the memory of `peer` without the host. Once is enough; again is no error. Copies between
    /// devices work without it too: the driver then takes them through host memory.
    pub fn enable_access(&self, peer: &Self) -> Result<(), CudaError> {
        let library = self.context.library;
        let _entered = self.context.enter()?;
        // SAFETY: both contexts are retained; the flags must be zero.
        match unsafe { (library.enable_peer)(peer.context.raw, 0) } {
            code::PEER_ALREADY_ENABLED => Ok(()),
            enabled => library.check("cuCtxEnablePeerAccess", enabled),
        }
    }
}
