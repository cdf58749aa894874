//! Driver calls for the planned copies: the inner part of a flush.

use cudarc::driver::sys::{self, CUmemorytype};

use crate::copy::Resolved;
use crate::error::CudaError;
use crate::library::code;
use crate::plan::CopySpan;
use crate::stream::Stream;
use crate::submission::CopyQueueCounters;

/// The arrays of a batch call, allocated once.
#[derive(Debug)]
pub(crate) struct Issuer {
    to: Vec<u64>,
    from: Vec<u64>,
    bytes: Vec<usize>,
    /// Whether the driver does not support batches: it is not tried again.
    is_batch_refused: bool,
}

impl Issuer {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            to: Vec::with_capacity(capacity),
            from: Vec::with_capacity(capacity),
            bytes: Vec::with_capacity(capacity),
            is_batch_refused: false,
        }
    }

    /// Puts all runs on the stream and reports those that the driver refused. The caller has entered the
    /// stream's context, and keeps the memory of each run until the stream is empty.
    pub(crate) fn issue(
        &mut self,
        stream: &Stream,
        runs: &[CopySpan],
        counters: &mut CopyQueueCounters,
        mut refused: impl FnMut(&CopySpan, CudaError),
    ) {
        self.collect(runs);
        let is_issued = self.bytes.len() > 1 && self.issue_batch(stream, counters);
        for run in runs {
            let issued = match run.copy.rows.count {
                1 if is_issued => continue,
                1 => issue_piece(stream, &run.copy),
                _ => issue_rows(stream, &run.copy),
            };
            counters.calls += 1;
            match issued {
                Ok(()) => counters.bytes += (run.copy.rows.bytes * run.copy.rows.count) as u64,
                Err(error) => refused(run, error),
            }
        }
    }

    /// Collects the contiguous runs.
    fn collect(&mut self, runs: &[CopySpan]) {
        self.to.clear();
        self.from.clear();
        self.bytes.clear();
        for CopySpan { copy, .. } in runs.iter().filter(|run| run.copy.rows.count == 1) {
            self.to.push(copy.to);
            self.from.push(copy.from);
            self.bytes.push(copy.rows.bytes);
        }
    }

    /// Returns whether all pieces were issued. When a batch is refused for one of its copies, the caller
    /// finds that copy by issuing each one. Repeating a copy does no harm, because the copies of a flush do
    /// not depend on each other.
    fn issue_batch(&mut self, stream: &Stream, counters: &mut CopyQueueCounters) -> bool {
        let library = stream.context().library;
        let Some(copy_batch_async) = library.copy_batch_async.filter(|_| !self.is_batch_refused) else {
            return false;
        };
        let hint = sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
        let order = sys::CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
        let mut attributes =
            sys::CUmemcpyAttributes { srcAccessOrder: order, srcLocHint: hint, dstLocHint: hint, flags: 0 };
        let (mut first, mut failed) = (0, usize::MAX);
        let (to, from, sizes) = (self.to.as_mut_ptr(), self.from.as_mut_ptr(), self.bytes.as_mut_ptr());
        let (count, stream) = (self.bytes.len(), stream.raw());
        // SAFETY: three arrays of `count` entries and one attribute for all of them, read during the call; each range
        // was checked against a region that the queue keeps until the stream is empty.
        let issued = unsafe {
            copy_batch_async(to, from, sizes, count, &mut attributes, &mut first, 1, &mut failed, stream)
        };
        counters.calls += 1;
        if issued != code::SUCCESS {
            counters.batches_refused += 1;
            // Other codes concern this call only, for example a lack of memory.
            let is_for_good = matches!(issued, code::NOT_SUPPORTED | code::INVALID_VALUE);
            self.is_batch_refused = is_for_good && failed == usize::MAX;
            return false;
        }
        counters.bytes += self.bytes.iter().sum::<usize>() as u64;
        true
    }
}

/// Copies one piece. Both addresses are in the unified address space, so the driver finds the device of each.
fn issue_piece(stream: &Stream, copy: &Resolved) -> Result<(), CudaError> {
    let library = stream.context().library;
    // SAFETY: both ranges were checked against regions that the queue keeps until the stream is empty.
    let issued = unsafe { (library.copy_async)(copy.to, copy.from, copy.rows.bytes, stream.raw()) };
    library.check("cuMemcpyAsync", issued)
}

fn issue_rows(stream: &Stream, copy: &Resolved) -> Result<(), CudaError> {
    let library = stream.context().library;
    let rows = sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: CUmemorytype::CU_MEMORYTYPE_UNIFIED,
        srcHost: std::ptr::null(),
        srcDevice: copy.from,
        srcArray: std::ptr::null_mut(),
        srcPitch: copy.rows.from_stride,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: CUmemorytype::CU_MEMORYTYPE_UNIFIED,
        dstHost: std::ptr::null_mut(),
        dstDevice: copy.to,
        dstArray: std::ptr::null_mut(),
        dstPitch: copy.rows.to_stride,
        WidthInBytes: copy.rows.bytes,
        Height: copy.rows.count,
    };
    // SAFETY: as for one piece; the description is read during the call.
    let issued = unsafe { (library.copy_rows_async)(&rows, stream.raw()) };
    library.check("cuMemcpy2DAsync", issued)
}
