//! Launches that are recorded once and then put on a stream by one call.

use cudarc::driver::sys::{CUgraph, CUgraphExec, CUstreamCaptureMode};

use crate::error::CudaError;
use crate::{Device, Stream};

/// What was recorded, ready to run.
#[derive(Debug)]
pub struct Graph {
    device: Device,
    raw: CUgraphExec,
}

// SAFETY: used from any thread, one at a time: `launch` may be called by several, and the driver orders them.
unsafe impl Send for Graph {}

impl Graph {
    /// Records what `work` puts on the stream; none of it runs now. What `work` must not do is wait for a stream or
    /// poll a queue: the driver then refuses, and the recording is lost.
    pub fn capture(
        stream: &Stream,
        work: impl FnOnce(&Stream) -> Result<(), CudaError>,
    ) -> Result<Self, CudaError> {
        let context = stream.context();
        let library = context.library;
        let _entered = context.enter()?;
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives.
        library.check("cuStreamBeginCapture", unsafe { (library.begin_capture)(stream.raw(), mode) })?;
        let worked = work(stream);
        let mut recorded: CUgraph = std::ptr::null_mut();
        // SAFETY: writes one handle; this thread began the capture. Ended also when `work` failed.
        let ended = unsafe { (library.end_capture)(stream.raw(), &mut recorded) };
        let made = library.check("cuStreamEndCapture", ended).and(worked).and_then(|()| {
            let mut raw = std::ptr::null_mut();
            // SAFETY: writes one handle; the recording lives.
            let made = unsafe { (library.instantiate_graph)(&mut raw, recorded, 0) };
            library.check("cuGraphInstantiate", made).map(|()| Self { device: stream.device().clone(), raw })
        });
        if !recorded.is_null() {
            // SAFETY: made by the end of the capture, destroyed once; what was made from it is a copy.
            let _ = unsafe { (library.destroy_graph)(recorded) };
        }
        made
    }

    /// Puts all of it on a stream.
    ///
    /// # Safety
    /// As for each launch that was recorded: what its parameters named then is valid until the graph is over.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<(), CudaError> {
        let context = self.device.context();
        let _entered = context.enter()?;
        // SAFETY: graph and stream live; the caller vouches for what the kernels touch.
        context
            .library
            .check("cuGraphLaunch", unsafe { (context.library.launch_graph)(self.raw, stream.raw()) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let context = self.device.context();
        let Ok(_entered) = context.enter() else { return };
        // SAFETY: made by this value, destroyed once.
        let _ = unsafe { (context.library.destroy_executable)(self.raw) };
    }
}
