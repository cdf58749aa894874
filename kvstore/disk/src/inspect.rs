//! Contents of segments, for people: `kvasir inspect segments`. Reads only; never the hot path.

use std::time::Duration;

use kvstore_io::IoEngine;

use crate::format::{PAGE_BYTES, PageError, RecordState, SegmentHeader, decode_record, is_blank};
use crate::headers::{HeaderState, later, read_headers};
use crate::layout::{SegmentLayout, check_area, check_engine};
use crate::scan::scan_tables;
use crate::{Area, DiskError, Usage};

/// State of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SegmentState {
    /// At least one copy of the header is whole.
    Valid,
    /// Neither copy of the header was ever written.
    Blank,
    /// Both copies of the header are lost, or describe a segment that cannot be in this area.
    Damaged,
    /// The area holds bytes that are no store.
    Foreign,
    /// A store of a format version that this program does not know.
    Version(u16),
}

/// Contents of one area. The counts are zero unless the segment is valid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentSummary {
    /// The area.
    pub area: Area,
    /// State of the segment.
    pub state: SegmentState,
    /// Header of the segment, if one was read.
    pub header: Option<SegmentHeader>,
    /// Number of the segment.
    pub segment: u32,
    /// Id of the store, new with each formatting.
    pub store_id: u64,
    /// Copies of the header that are not whole.
    pub headers_damaged: u32,
    /// Copies of table pages that are whole.
    pub pages_valid: u64,
    /// Copies of table pages that are damaged or cannot be read.
    pub pages_damaged: u64,
    /// Slots with a block, by the newest whole pages.
    pub live: u32,
    /// Bytes of those blocks.
    pub live_bytes: u64,
    /// Slots whose block was forgotten.
    pub tombstones: u32,
    /// Records whose checksum fails in a page that is whole.
    pub records_damaged: u32,
    /// Seconds since 1970 of the oldest block.
    pub oldest_written_at_s: Option<u32>,
    /// Seconds since 1970 of the newest block.
    pub newest_written_at_s: Option<u32>,
    /// The latest sequence number.
    pub sequence: u64,
}

/// Contents of all areas.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    /// One for each area.
    pub segments: Vec<SegmentSummary>,
    /// Bytes that the device was made to write.
    pub usage: Usage,
}

/// Reads headers and tables of these areas. Nothing is written, and no configuration is needed.
pub fn inspect(engine: &mut dyn IoEngine, areas: &[Area], timeout: Duration) -> Result<Summary, DiskError> {
    check_engine(engine.geometry())?;
    let mut summary = Summary { segments: Vec::with_capacity(areas.len()), usage: Usage::default() };
    for (&area, segment) in areas.iter().zip(0..) {
        check_area(&area, segment, engine.geometry())?;
        // The place of the headers depends on the area only.
        let place = SegmentLayout::new(area, segment, PAGE_BYTES as u32, 0).ok_or_else(|| {
            DiskError::Configuration {
                object: format!("area {segment}"),
                reason: "too small for a segment".to_owned(),
            }
        })?;
        let (states, _) = read_headers(engine, timeout, &[place])?;
        let state = states.first().copied().unwrap_or(HeaderState::Blank);
        let segment = inspect_segment(engine, area, state, timeout, &mut summary.usage)?;
        summary.segments.push(segment);
    }
    Ok(summary)
}

fn inspect_segment(
    engine: &mut dyn IoEngine,
    area: Area,
    state: HeaderState,
    timeout: Duration,
    usage: &mut Usage,
) -> Result<SegmentSummary, DiskError> {
    let mut summary = SegmentSummary {
        area,
        state: SegmentState::Damaged,
        header: None,
        segment: 0,
        store_id: 0,
        headers_damaged: 0,
        pages_valid: 0,
        pages_damaged: 0,
        live: 0,
        live_bytes: 0,
        tombstones: 0,
        records_damaged: 0,
        oldest_written_at_s: None,
        newest_written_at_s: None,
        sequence: 0,
    };
    let (page, header, damaged) = match state {
        HeaderState::Valid(page, header, damaged) => (page, header, damaged.map(u32::from).iter().sum()),
        HeaderState::Blank => return Ok(SegmentSummary { state: SegmentState::Blank, ..summary }),
        HeaderState::Foreign => return Ok(SegmentSummary { state: SegmentState::Foreign, ..summary }),
        HeaderState::Version(version) => {
            return Ok(SegmentSummary { state: SegmentState::Version(version), ..summary });
        }
        HeaderState::Damaged => return Ok(summary),
    };
    summary.header = Some(header);
    (summary.segment, summary.store_id) = (page.segment, page.store_id);
    (summary.headers_damaged, summary.sequence) = (damaged, page.sequence);
    *usage = later(*usage, page.usage);
    let claimed = Area { bytes: header.segment_bytes, ..area };
    let layout = SegmentLayout::new(claimed, page.segment, header.slot_bytes, header.meta_bytes_max);
    let Some(layout) = layout.filter(|layout| claimed.bytes <= area.bytes && layout.slots == header.slots)
    else {
        return Ok(summary);
    };
    summary.state = SegmentState::Valid;
    read_tables(engine, &layout, timeout, &mut summary, usage)?;
    Ok(summary)
}

fn read_tables(
    engine: &mut dyn IoEngine,
    layout: &SegmentLayout,
    timeout: Duration,
    summary: &mut SegmentSummary,
    usage: &mut Usage,
) -> Result<(), DiskError> {
    let mut newest = vec![0_u64; layout.pages as usize];
    let mut image = vec![0_u8; layout.table_bytes()];
    scan_tables(engine, timeout, std::slice::from_ref(layout), summary.store_id, |found| {
        match found.state {
            Ok(header) => {
                summary.pages_valid += 1;
                summary.sequence = summary.sequence.max(header.sequence);
                *usage = later(*usage, header.usage);
                let page = found.page as usize;
                if let Some(bytes) = found.bytes.filter(|_| header.sequence > newest[page]) {
                    newest[page] = header.sequence;
                    image[page * PAGE_BYTES..(page + 1) * PAGE_BYTES].copy_from_slice(bytes);
                }
            }
            Err(PageError::Blank | PageError::Foreign) => {}
            Err(_) => summary.pages_damaged += 1,
        }
    })?;
    for slot in 0..layout.slots {
        let bytes = &image[layout.record_range(slot)];
        match decode_record(bytes, layout.place(summary.store_id, slot)) {
            Ok(Some(record)) if record.state == RecordState::Live => {
                summary.live += 1;
                summary.live_bytes += u64::from(record.bytes);
                let at = record.written_at_s;
                summary.oldest_written_at_s = Some(summary.oldest_written_at_s.map_or(at, |old| old.min(at)));
                summary.newest_written_at_s = Some(summary.newest_written_at_s.map_or(at, |new| new.max(at)));
            }
            Ok(Some(_)) => summary.tombstones += 1,
            Ok(None) => {}
            Err(_) => summary.records_damaged += u32::from(!is_blank(bytes)),
        }
    }
    Ok(())
}
