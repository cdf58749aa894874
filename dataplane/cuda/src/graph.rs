//! Graphs: launches that are recorded once and then put on a stream by one call.

use cudarc::driver::sys::{CUgraph, CUgraphExec, CUstreamCaptureMode};

use crate::error::CudaError;
use crate::{Device, Stream};

/// A recorded graph, ready to run.
#[derive(Debug)]
pub struct Graph {
    device: Device,
    raw: CUgraphExec,
}

// SAFETY: the handle belongs to no thread. It is not `Sync`: the driver requires that two threads do not use
// one graph at a time, so that a launch needs the thread that has the value.
unsafe impl Send for Graph {}

impl Graph {
    /// Records the work that `work` puts on the stream; none of it runs now. `work` must not wait for a
    /// stream or poll a queue: the driver then refuses, and the recording is lost.
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
        let mut capture = Capture { stream, recorded: std::ptr::null_mut(), is_open: true };
        let worked = work(stream);
        capture.end().and(worked)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes one handle; the recording lives.
        let made = unsafe { (library.instantiate_graph)(&mut raw, capture.recorded, 0) };
        library.check("cuGraphInstantiate", made)?;
        Ok(Self { device: stream.device().clone(), raw })
    }

    /// Launches the whole graph on a stream.
    ///
    /// # Safety
    /// As for each recorded launch: all memory that its parameters named is valid until the graph has ended.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<(), CudaError> {
        let context = self.device.context();
        let _entered = context.enter()?;
        // SAFETY: graph and stream live; the caller vouches for the memory that the kernels access.
        context
            .library
            .check("cuGraphLaunch", unsafe { (context.library.launch_graph)(self.raw, stream.raw()) })
    }
}

/// A capture that ends when this value is dropped, also when `work` failed or panicked.
struct Capture<'a> {
    stream: &'a Stream,
    recorded: CUgraph,
    is_open: bool,
}

impl Capture<'_> {
    fn end(&mut self) -> Result<(), CudaError> {
        self.is_open = false;
        let library = self.stream.context().library;
        // SAFETY: writes one handle; the capture is open and ends once. It is this thread's: the value is made and
        // dropped inside `Graph::capture`, whose caller has entered the context.
        let ended = unsafe { (library.end_capture)(self.stream.raw(), &mut self.recorded) };
        library.check("cuStreamEndCapture", ended)
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if self.is_open {
            let _ = self.end();
        }
        if !self.recorded.is_null() {
            let library = self.stream.context().library;
            // SAFETY: made by the end of the capture, destroyed once; the executable made from it is a copy.
            let _ = unsafe { (library.destroy_graph)(self.recorded) };
        }
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
