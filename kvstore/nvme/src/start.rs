//! Reading of the first bytes of a device, before anything is written to it.
//!
//! The caller interprets the bytes. Runs once, before the engine is used; not a hot path.

use kvstore_io::{Buffer, IoEngine, IoError, IoErrorKind, Operation, PageBuffer, Request};

use crate::dma::PAGE_BYTES;

/// Reads the first `bytes` of the device, or all its whole pages if that is less.
pub(crate) fn first_bytes(engine: &mut impl IoEngine, bytes: usize) -> Result<Vec<u8>, IoError> {
    if engine.in_flight() > 0 {
        return Err(IoError {
            engine: engine.name(),
            operation: format!("read the first {bytes} bytes"),
            kind: IoErrorKind::Invalid,
            reason: format!("{} requests are in flight", engine.in_flight()),
        });
    }
    let geometry = engine.geometry();
    let page = PAGE_BYTES as u64;
    let there = geometry.files.first().map_or(0, |&there| there - there % page);
    let wanted = (bytes as u64).min(there) as usize;
    let piece_bytes_max = geometry.transfer_bytes_max - geometry.transfer_bytes_max % PAGE_BYTES;
    let (mut start, mut completions) = (Vec::with_capacity(wanted), Vec::with_capacity(1));
    while start.len() < wanted {
        // Every part but the last is whole pages, so the next offset is aligned.
        let offset = start.len() as u64;
        let buffer = Buffer::Pages(PageBuffer::zeroed((wanted - start.len()).min(piece_bytes_max)));
        let request = Request { id: offset, operation: Operation::Read, file: 0, offset, buffer };
        // The engine is empty, so it has room for one request.
        engine.submit(request).map_err(|full| {
            IoError::invalid(engine.name(), &full.0, "the engine has no room for one request")
        })?;
        engine.flush()?;
        while engine.poll(1, &mut completions) == 0 {
            engine.wait(None)?;
        }
        for completion in completions.drain(..) {
            completion.result?;
            if let Buffer::Pages(pages) = completion.buffer {
                start.extend_from_slice(&pages[..pages.len().min(wanted - start.len())]);
            }
        }
    }
    Ok(start)
}
