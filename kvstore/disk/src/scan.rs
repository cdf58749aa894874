//! Blocking reads and writes for opening, formatting and inspection. Never the hot path.
//!
//! Reads keep [`DEPTH_MAX`] requests of [`CHUNK_BYTES`] in flight, as tables are long and contiguous. An engine
//! that does not answer is given up after the caller's timeout.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kvstore_io::{Buffer, Completion, Full, IoEngine, IoError, IoErrorKind, Operation, PageBuffer, Request};

use crate::DiskError;
use crate::format::{PAGE_BYTES, PageError, PageHeader, PageKind, decode_page};
use crate::layout::{PageCopy, SegmentLayout};

const DEPTH_MAX: usize = 32;
const CHUNK_BYTES: usize = 128 << 10;
/// Maximum number of consecutive failures that count as the medium's: a bad chunk and all its pages. One more
/// is taken as a failed device.
const UNCERTAIN_MAX: u32 = 64;

/// A range of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Extent {
    pub(crate) file: u32,
    pub(crate) offset: u64,
    pub(crate) bytes: usize,
}

/// Reads every extent, in any order, and passes each with its bytes or the kind of its failure to `on_read`.
/// Stops at a failed device, and at more than [`UNCERTAIN_MAX`] failures in a row that do not say what failed
/// (EIO).
pub(crate) fn read_extents(
    engine: &mut dyn IoEngine,
    operation: &'static str,
    timeout: Duration,
    extents: impl Iterator<Item = Extent>,
    mut on_read: impl FnMut(Extent, Result<&[u8], IoErrorKind>),
) -> Result<(), DiskError> {
    let mut spare: Vec<PageBuffer> = Vec::new();
    let mut transact = BlockingIo::new(engine, operation, timeout);
    for extent in extents {
        let buffer = match spare.pop() {
            Some(buffer) if buffer.len() == extent.bytes => buffer,
            _ => PageBuffer::zeroed(extent.bytes),
        };
        transact.submit(extent, Operation::Read, buffer, &mut |extent, buffer, result| {
            on_read(extent, result.map(|()| &buffer[..]));
            spare.push(buffer);
        })?;
    }
    transact.finish(&mut |extent, buffer, result| on_read(extent, result.map(|()| &buffer[..])))
}

/// Writes pages, in any order; any failure is an error.
pub(crate) fn write_pages(
    engine: &mut dyn IoEngine,
    operation: &'static str,
    timeout: Duration,
    pages: Vec<(Extent, PageBuffer)>,
) -> Result<(), DiskError> {
    let mut failure = None;
    let mut transact = BlockingIo::new(engine, operation, timeout);
    let mut note = |extent: Extent, _, result: Result<(), IoErrorKind>| {
        if let Err(kind) = result {
            failure.get_or_insert((extent, kind));
        }
    };
    for (extent, buffer) in pages {
        transact.submit(extent, Operation::Write, buffer, &mut note)?;
    }
    transact.finish(&mut note)?;
    let name = engine.name();
    match failure {
        None => Ok(()),
        Some((extent, kind)) => {
            let what =
                format!("write {} bytes at {:#x} of file {}", extent.bytes, extent.offset, extent.file);
            let source = IoError { engine: name, operation: what, kind, reason: format!("{kind:?}") };
            Err(DiskError::Io { operation, source })
        }
    }
}

type OnDone<'a> = &'a mut dyn FnMut(Extent, PageBuffer, Result<(), IoErrorKind>);

/// Requests in flight of a blocking call.
struct BlockingIo<'a> {
    engine: &'a mut dyn IoEngine,
    operation: &'static str,
    timeout: Duration,
    depth: usize,
    next_id: u64,
    pending: BTreeMap<u64, Extent>,
    completions: Vec<Completion>,
    /// Consecutive failures that do not say what failed.
    uncertain: u32,
}

impl<'a> BlockingIo<'a> {
    fn new(engine: &'a mut dyn IoEngine, operation: &'static str, timeout: Duration) -> Self {
        let depth = engine.geometry().depth_max.clamp(1, DEPTH_MAX);
        let (pending, completions) = (BTreeMap::new(), Vec::with_capacity(depth));
        Self { engine, operation, timeout, depth, next_id: 0, pending, completions, uncertain: 0 }
    }

    fn submit(
        &mut self,
        extent: Extent,
        operation: Operation,
        buffer: PageBuffer,
        on_done: OnDone<'_>,
    ) -> Result<(), DiskError> {
        while self.pending.len() >= self.depth {
            self.drive(on_done)?;
        }
        self.next_id += 1;
        let Extent { file, offset, .. } = extent;
        let mut request =
            Request { id: self.next_id, operation, file, offset, buffer: Buffer::Pages(buffer) };
        while let Err(Full(back)) = self.engine.submit(request) {
            request = back;
            self.drive(on_done)?;
        }
        self.pending.insert(self.next_id, extent);
        Ok(())
    }

    fn finish(&mut self, on_done: OnDone<'_>) -> Result<(), DiskError> {
        while !self.pending.is_empty() {
            self.drive(on_done)?;
        }
        Ok(())
    }

    /// Waits for at least one completion.
    fn drive(&mut self, on_done: OnDone<'_>) -> Result<(), DiskError> {
        let operation = self.operation;
        let started = Instant::now();
        let deadline = started + self.timeout;
        self.engine.flush().map_err(|source| DiskError::Io { operation, source })?;
        while self.engine.poll(self.depth, &mut self.completions) == 0 {
            if Instant::now() >= deadline {
                let in_flight = self.pending.len();
                return Err(DiskError::Timeout { operation, in_flight, waited_ms: self.timeout.as_millis() });
            }
            self.engine.wait(Some(deadline)).map_err(|source| DiskError::Io { operation, source })?;
        }
        for completion in self.completions.drain(..) {
            let (Some(extent), Buffer::Pages(buffer)) =
                (self.pending.remove(&completion.id), completion.buffer)
            else {
                continue;
            };
            match completion.result {
                Ok(()) => {
                    self.uncertain = 0;
                    on_done(extent, buffer, Ok(()));
                }
                Err(source) if source.kind == IoErrorKind::Media => on_done(extent, buffer, Err(source.kind)),
                Err(source) if source.kind == IoErrorKind::Other && self.uncertain < UNCERTAIN_MAX => {
                    self.uncertain += 1;
                    on_done(extent, buffer, Err(source.kind));
                }
                Err(source) => return Err(DiskError::Io { operation, source }),
            }
        }
        Ok(())
    }
}

/// One copy of one table page, as read from the disk.
pub(crate) struct FoundPage<'a> {
    /// Index of the segment in the list given.
    pub(crate) segment: usize,
    pub(crate) page: u32,
    pub(crate) copy: PageCopy,
    /// Bytes of the page; `None` when it could not be read.
    pub(crate) bytes: Option<&'a [u8]>,
    /// Header of a valid table page of this store and place, or the reason why it is none.
    pub(crate) state: Result<PageHeader, PageError>,
}

/// Reads both copies of all tables, and passes each page to `on_page`. Returns the number of bytes read.
pub(crate) fn scan_tables(
    engine: &mut dyn IoEngine,
    timeout: Duration,
    segments: &[SegmentLayout],
    store_id: u64,
    mut on_page: impl FnMut(FoundPage<'_>),
) -> Result<u64, DiskError> {
    let chunk = (engine.geometry().transfer_bytes_max / PAGE_BYTES * PAGE_BYTES).min(CHUNK_BYTES);
    let mut bytes_read = 0;
    for (index, segment) in segments.iter().enumerate() {
        let mut on_chunk = |(copy, page), bytes: &[u8]| {
            bytes_read += PAGE_BYTES as u64;
            let state = check_page(bytes, segment, page, store_id);
            on_page(FoundPage { segment: index, page, copy, bytes: Some(bytes), state });
        };
        let chunks = [PageCopy::A, PageCopy::B].into_iter().flat_map(|copy| chunks_of(segment, copy, chunk));
        let unreadable = read_pages(engine, timeout, segment, chunks, &mut on_chunk)?;
        // Read refused chunks again page by page: one bad page must not hide its neighbours.
        let pages = unreadable.into_iter().flat_map(pages_of);
        for extent in read_pages(engine, timeout, segment, pages, &mut on_chunk)? {
            let (copy, page) = place_of(segment, extent.offset);
            let state = Err(PageError::Damaged);
            on_page(FoundPage { segment: index, page, copy, bytes: None, state });
        }
    }
    Ok(bytes_read)
}

/// Callback that takes the position and the bytes of a page.
type OnPage<'a> = dyn FnMut((PageCopy, u32), &[u8]) + 'a;

/// Reads whole pages of a segment's tables; returns the extents that could not be read.
fn read_pages(
    engine: &mut dyn IoEngine,
    timeout: Duration,
    segment: &SegmentLayout,
    extents: impl Iterator<Item = Extent>,
    on_page: &mut OnPage<'_>,
) -> Result<Vec<Extent>, DiskError> {
    let mut unreadable = Vec::new();
    read_extents(engine, "scan tables", timeout, extents, |extent, result| match result {
        Err(_) => unreadable.push(extent),
        Ok(bytes) => {
            let pages = bytes.chunks_exact(PAGE_BYTES).enumerate();
            pages.for_each(|(page, bytes)| {
                on_page(place_of(segment, extent.offset + (page * PAGE_BYTES) as u64), bytes);
            });
        }
    })?;
    Ok(unreadable)
}

fn chunks_of(segment: &SegmentLayout, copy: PageCopy, chunk: usize) -> impl Iterator<Item = Extent> + use<> {
    let (file, start, total) = (segment.area.file, segment.table_offset(copy, 0), segment.table_bytes());
    (0..total.div_ceil(chunk)).map(move |index| Extent {
        file,
        offset: start + (index * chunk) as u64,
        bytes: chunk.min(total - index * chunk),
    })
}

fn pages_of(extent: Extent) -> impl Iterator<Item = Extent> {
    (0..extent.bytes / PAGE_BYTES).map(move |page| Extent {
        offset: extent.offset + (page * PAGE_BYTES) as u64,
        bytes: PAGE_BYTES,
        ..extent
    })
}

/// Returns the copy and the page that an offset in the tables belongs to.
fn place_of(segment: &SegmentLayout, offset: u64) -> (PageCopy, u32) {
    let page = ((offset - segment.table_offset(PageCopy::A, 0)) / PAGE_BYTES as u64) as u32;
    if page < segment.pages { (PageCopy::A, page) } else { (PageCopy::B, page - segment.pages) }
}

fn check_page(
    bytes: &[u8],
    segment: &SegmentLayout,
    page: u32,
    store_id: u64,
) -> Result<PageHeader, PageError> {
    let header = decode_page(bytes)?;
    if header.store_id != store_id {
        return Err(PageError::Foreign);
    }
    let is_here = header.kind == PageKind::Table && header.segment == segment.segment && header.page == page;
    if is_here { Ok(header) } else { Err(PageError::Damaged) }
}
