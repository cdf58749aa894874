//! The headers of segments: writing, finding, checking, restoring.
//!
//! Segment 0's header is written last when a store is formatted, so a store whose segment 0 names it is
//! complete. A segment that names another store, or whose header is lost, takes part all the same: its pages
//! and records carry the store id, segment and slot that they belong to. Foreign bytes, and stores of another
//! layout, are refused and left as they are.

use std::collections::HashMap;
use std::time::Duration;

use kvstore_io::{IoEngine, IoError, IoErrorKind, PageBuffer};

use crate::format::{
    PAGE_BYTES, PageError, PageHeader, PageKind, SegmentHeader, decode_segment_header, encode_segment_header,
};
use crate::layout::{PageCopy, SegmentLayout};
use crate::scan::{Extent, read_extents, write_pages};
use crate::{Area, DiskConfig, DiskError, Usage};

/// Writes the headers of an empty store, the first segment's last.
pub(crate) fn format_segments(
    engine: &mut dyn IoEngine,
    config: &DiskConfig,
    segments: &[SegmentLayout],
    store_id: u64,
    usage: Usage,
) -> Result<(), DiskError> {
    let Some((first, others)) = segments.split_first() else { return Ok(()) };
    let operation = "format";
    for part in [others, std::slice::from_ref(first)] {
        let pages =
            part.iter().flat_map(|segment| header_pages(config, segment, store_id, usage, 1)).collect();
        write_pages(engine, operation, config.operation_timeout, pages)?;
        sync_files(engine, operation, part)?;
    }
    Ok(())
}

fn sync_files(
    engine: &mut dyn IoEngine,
    operation: &'static str,
    segments: &[SegmentLayout],
) -> Result<(), DiskError> {
    let mut files: Vec<u32> = segments.iter().map(|segment| segment.area.file).collect();
    files.sort_unstable();
    files.dedup();
    files
        .into_iter()
        .try_for_each(|file| engine.sync(file).map_err(|source| DiskError::Io { operation, source }))
}

fn header_pages(
    config: &DiskConfig,
    segment: &SegmentLayout,
    store_id: u64,
    usage: Usage,
    sequence: u64,
) -> [(Extent, PageBuffer); 2] {
    let header =
        PageHeader { kind: PageKind::Header, store_id, sequence, segment: segment.segment, page: 0, usage };
    [PageCopy::A, PageCopy::B].map(|copy| {
        let mut buffer = PageBuffer::zeroed(PAGE_BYTES);
        if let Some(page) = buffer.first_chunk_mut() {
            encode_segment_header(page, &header, &segment.header(config.fingerprint));
        }
        let (file, offset) = (segment.area.file, segment.header_offset(copy));
        (Extent { file, offset, bytes: PAGE_BYTES }, buffer)
    })
}

/// Result of decoding one header page; `None` when it could not be read.
type FoundHeader = Option<Result<(PageHeader, SegmentHeader), PageError>>;

/// State of a segment, by its two header pages.
#[derive(Debug, Clone, Copy)]
pub(crate) enum HeaderState {
    /// The newest valid header, and for each copy whether it has to be written again.
    Valid(PageHeader, SegmentHeader, [bool; 2]),
    Version(u16),
    Blank,
    Damaged,
    Foreign,
}

/// The headers of a store.
pub(crate) struct Headers {
    pub(crate) store_id: u64,
    pub(crate) usage: Usage,
    pub(crate) sequence: u64,
    states: Vec<HeaderState>,
}

impl Headers {
    /// Reads the headers; `None` when the areas are to be formatted.
    pub(crate) fn find(
        engine: &mut dyn IoEngine,
        config: &DiskConfig,
        segments: &[SegmentLayout],
    ) -> Result<Option<Self>, DiskError> {
        let (states, failure) = read_headers(engine, config.operation_timeout, segments)?;
        // A device that returns no header, and does not report them as lost by the medium, must not be
        // formatted.
        if let Some(kind) = failure {
            let (engine, operation) =
                (engine.name(), format!("read the headers of {} segments", segments.len()));
            let reason = "none could be read".to_owned();
            let source = IoError { engine, operation, kind, reason };
            return Err(DiskError::Io { operation: "open", source });
        }
        // The first segment decides. If its header is lost, the other segments still carry the store id.
        let valid = states.iter().find_map(|state| match state {
            HeaderState::Valid(page, ..) => Some(*page),
            _ => None,
        });
        if let Some(problem) = Self::problem(config, segments, &states, valid.map(|page| page.store_id)) {
            return if config.reformat { Ok(None) } else { Err(problem) };
        }
        let Some(page) = valid else { return Ok(None) };
        let of_store = |state: &&HeaderState| matches!(state, HeaderState::Valid(other, ..) if other.store_id == page.store_id);
        let mut headers =
            Self { store_id: page.store_id, usage: page.usage, sequence: page.sequence, states: Vec::new() };
        for state in states.iter().filter(of_store) {
            if let HeaderState::Valid(page, ..) = state {
                headers.sequence = headers.sequence.max(page.sequence);
                headers.usage = later(headers.usage, page.usage);
            }
        }
        headers.states = states;
        Ok(Some(headers))
    }

    /// The first reason why these areas cannot be used as they are.
    fn problem(
        config: &DiskConfig,
        segments: &[SegmentLayout],
        states: &[HeaderState],
        store_id: Option<u64>,
    ) -> Option<DiskError> {
        for (layout, state) in segments.iter().zip(states) {
            let wanted = layout.header(config.fingerprint);
            let mismatch = |found| {
                let segment = layout.segment;
                Some(DiskError::Mismatch { segment, found, wanted: describe(segment, &wanted) })
            };
            match state {
                HeaderState::Valid(page, header, _)
                    if Some(page.store_id) == store_id
                        && (*header != wanted || page.segment != layout.segment) =>
                {
                    return mismatch(describe(page.segment, header));
                }
                HeaderState::Version(version) => {
                    return mismatch(format!(
                        "a store of format {version}, which this program does not read"
                    ));
                }
                // Damage cannot make both copies look foreign, as they lie far apart.
                HeaderState::Foreign => {
                    let Area { file, offset, .. } = layout.area;
                    return Some(DiskError::NotAStore { segment: layout.segment, file, offset });
                }
                HeaderState::Damaged if store_id.is_none() => {
                    return mismatch("a store whose header is damaged".to_owned());
                }
                _ => {}
            }
        }
        None
    }

    /// Writes only the headers that are missing or differ; returns the number of these copies. A copy that
    /// the medium refuses counts too, and stays lost: the other copy serves.
    pub(crate) fn restore(
        &self,
        engine: &mut dyn IoEngine,
        config: &DiskConfig,
        segments: &[SegmentLayout],
        sequence: u64,
    ) -> Result<u32, DiskError> {
        let mut damaged = 0;
        for (segment, state) in segments.iter().zip(&self.states) {
            let bad = match state {
                HeaderState::Valid(page, _, bad) if page.store_id == self.store_id => *bad,
                _ => [true; 2],
            };
            let pages = header_pages(config, segment, self.store_id, self.usage, sequence + 1);
            for (page, _) in pages.into_iter().zip(bad).filter(|(_, bad)| *bad) {
                damaged += 1;
                match write_pages(engine, "restore headers", config.operation_timeout, vec![page]) {
                    Err(DiskError::Io { source, .. })
                        if matches!(source.kind, IoErrorKind::Media | IoErrorKind::Other) => {}
                    written => written?,
                }
            }
        }
        if damaged > 0 {
            sync_files(engine, "restore headers", segments)?;
        }
        Ok(damaged)
    }
}

fn describe(segment: u32, header: &SegmentHeader) -> String {
    format!(
        "segment {segment} of {} bytes with {} slots of {} bytes, {} meta bytes, fingerprint {:#018x}",
        header.segment_bytes, header.slots, header.slot_bytes, header.meta_bytes_max, header.fingerprint
    )
}

pub(crate) fn later(one: Usage, other: Usage) -> Usage {
    if other.total_bytes > one.total_bytes { other } else { one }
}

/// Reads the headers. Also returns the kind of the last failure if no header could be read and one failed for
/// another reason than a media error.
pub(crate) fn read_headers(
    engine: &mut dyn IoEngine,
    timeout: Duration,
    segments: &[SegmentLayout],
) -> Result<(Vec<HeaderState>, Option<IoErrorKind>), DiskError> {
    let (mut read, mut failure) = (0, None);
    let mut copies: Vec<[FoundHeader; 2]> = vec![[None, None]; segments.len()];
    let places: HashMap<(u32, u64), (usize, usize)> = segments
        .iter()
        .enumerate()
        .flat_map(|(index, segment)| {
            [(PageCopy::A, 0), (PageCopy::B, 1)]
                .map(|(copy, number)| ((segment.area.file, segment.header_offset(copy)), (index, number)))
        })
        .collect();
    let extents = places.keys().map(|&(file, offset)| Extent { file, offset, bytes: PAGE_BYTES });
    read_extents(engine, "read headers", timeout, extents, |extent, result| {
        match result {
            Ok(_) => read += 1,
            Err(IoErrorKind::Media) => {}
            Err(kind) => failure = Some(kind),
        }
        if let Some(&(segment, copy)) = places.get(&(extent.file, extent.offset)) {
            copies[segment][copy] = result.ok().map(decode_segment_header);
        }
    })?;
    let judge = |(layout, copies): (&SegmentLayout, [FoundHeader; 2])| judge_headers(layout.segment, copies);
    Ok((segments.iter().zip(copies).map(judge).collect(), failure.filter(|_| read == 0)))
}

fn judge_headers(segment: u32, copies: [FoundHeader; 2]) -> HeaderState {
    let valid = || copies.iter().flatten().filter_map(|copy| copy.as_ref().ok());
    // One copy that names another segment was misdirected to this place. Two copies are another segment's area.
    let here = || valid().filter(|(page, _)| page.segment == segment);
    let newest = here().max_by_key(|(page, _)| page.sequence);
    if let Some((page, header)) = newest.or_else(|| valid().max_by_key(|(page, _)| page.sequence)) {
        let says_so = |copy: &FoundHeader| {
            matches!(copy, Some(Ok((other, same)))
                if other.segment == page.segment && other.store_id == page.store_id && same == header)
        };
        return HeaderState::Valid(*page, *header, [!says_so(&copies[0]), !says_so(&copies[1])]);
    }
    let errors = || copies.iter().map(|copy| copy.and_then(Result::err));
    if let Some(PageError::Version(version)) =
        errors().flatten().find(|error| matches!(error, PageError::Version(_)))
    {
        HeaderState::Version(version)
    } else if errors().all(|error| error == Some(PageError::Blank)) {
        HeaderState::Blank
    } else if errors().all(|error| error == Some(PageError::Foreign) || error == Some(PageError::Blank)) {
        HeaderState::Foreign
    } else {
        HeaderState::Damaged
    }
}
