//! The record tables in memory, and which of their pages must be written.
//!
//! A table is kept as the bytes of its pages, so writing a page is one copy and a checksum, and memory is what the
//! disk needs for one copy. A record is changed here first; its page is then dirty, and is written to the copy that
//! is *not* the newest, under the next sequence number. Whatever happens to that write, the newest copy is whole.
//!
//! Invariants: a page has at most one write under way; a live record is put here only after its payload's write
//! completed; a page that is dirty or in flight is counted until it is neither; one that was given up is stale, and
//! not clean, until a write of it succeeds: its next change, the next flush or the next write that works tries again.

use std::collections::VecDeque;
use std::time::Instant;

use kvstore_io::PageBuffer;

use crate::Usage;
use crate::format::{
    PAGE_BYTES, PageHeader, PageKind, RECORD_BYTES, RECORDS_AT, Record, RecordState, encode_record,
    parse_record, seal_page,
};
use crate::layout::{PageCopy, SegmentLayout};

/// Number of failed writes after which a page is given up until its next change.
const ATTEMPTS_MAX: u8 = 3;

/// State of one page of a table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PageState {
    /// The copy that holds the newest whole version of the page.
    pub(crate) newest: PageCopy,
    dirty: bool,
    in_flight: bool,
    /// Given up: the page on the disk is older than the one in memory.
    stale: bool,
    attempts: u8,
    dirty_since: Option<Instant>,
    /// Writes of this page that a flush still waits for.
    awaited: u8,
}

/// One segment's table.
#[derive(Debug)]
pub(crate) struct SegmentTable {
    pub(crate) layout: SegmentLayout,
    pub(crate) image: Vec<u8>,
    pub(crate) pages: Vec<PageState>,
}

/// Number of a page: its segment, and its index in the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PageNumber {
    pub(crate) segment: u32,
    pub(crate) page: u32,
}

/// The tables of all segments.
#[derive(Debug)]
pub(crate) struct Tables {
    pub(crate) segments: Vec<SegmentTable>,
    pub(crate) store_id: u64,
    pub(crate) sequence: u64,
    /// Dirty pages without a write under way, in the order in which they became dirty.
    dirty: VecDeque<PageNumber>,
    /// Pages that a flush waits for.
    pub(crate) awaited_pages: usize,
    /// Number of pages that were given up while a flush waited for them.
    pub(crate) given_up: u32,
}

impl SegmentTable {
    pub(crate) fn new(layout: SegmentLayout) -> Self {
        let page = PageState {
            newest: PageCopy::B,
            dirty: false,
            in_flight: false,
            stale: false,
            attempts: 0,
            dirty_since: None,
            awaited: 0,
        };
        let pages = vec![page; layout.pages as usize];
        Self { layout, image: vec![0; layout.table_bytes()], pages }
    }
}

impl Tables {
    pub(crate) fn new(segments: Vec<SegmentTable>, store_id: u64, sequence: u64) -> Self {
        let pages = segments.iter().map(|segment| segment.pages.len()).sum();
        let dirty = VecDeque::with_capacity(pages);
        Self { segments, store_id, sequence, dirty, awaited_pages: 0, given_up: 0 }
    }

    /// Number of slots of the store.
    pub(crate) fn slots(&self) -> u32 {
        self.segments
            .last()
            .map_or(0, |segment| segment.layout.row_first + segment.layout.slots * segment.layout.stripes)
    }

    /// Returns the segment of a slot and the slot's index in it; `slot` must exist.
    pub(crate) fn locate(&self, slot: u32) -> (usize, u32) {
        // The index of the last area of the slot's row.
        let index = self.segments.partition_point(|segment| segment.layout.row_first <= slot) - 1;
        let SegmentLayout { row_first, column, stripes, .. } = self.segments[index].layout;
        let in_row = slot - row_first;
        (index - (column - in_row % stripes) as usize, in_row / stripes)
    }

    pub(crate) fn record(&self, slot: u32) -> Option<Record> {
        let (segment, local) = self.locate(slot);
        let segment = &self.segments[segment];
        parse_record(&segment.image[segment.layout.record_range(local)])
    }

    pub(crate) fn live(&self, slot: u32) -> Option<Record> {
        self.record(slot).filter(|record| record.state == RecordState::Live)
    }

    /// Returns the meta bytes beside a record.
    pub(crate) fn meta(&self, slot: u32) -> &[u8] {
        let (segment, local) = self.locate(slot);
        let segment = &self.segments[segment];
        let record = &segment.image[segment.layout.record_range(local)];
        let bytes = parse_record(record).map_or(0, |record| usize::from(record.meta_bytes));
        record.get(RECORD_BYTES..RECORD_BYTES + bytes).unwrap_or(&[])
    }

    /// Stores a record and marks its page as dirty.
    pub(crate) fn put(&mut self, slot: u32, record: &Record, meta: &[u8], now: Instant) {
        let (index, local) = self.locate(slot);
        let segment = &mut self.segments[index];
        let range = segment.layout.record_range(local);
        let place = segment.layout.place(self.store_id, local);
        encode_record(&mut segment.image[range], record, meta, place);
        let page = segment.layout.page_of(local);
        self.touch(PageNumber { segment: index as u32, page }, now);
    }

    /// Replaces a live record by its tombstone; returns whether there was one.
    pub(crate) fn write_tombstone(&mut self, slot: u32, now: Instant) -> bool {
        let Some(record) = self.live(slot) else { return false };
        self.put(slot, &Record { state: RecordState::Tombstone, meta_bytes: 0, ..record }, &[], now);
        true
    }

    fn page_mut(&mut self, number: PageNumber) -> &mut PageState {
        &mut self.segments[number.segment as usize].pages[number.page as usize]
    }

    fn touch(&mut self, number: PageNumber, now: Instant) {
        let page = self.page_mut(number);
        page.attempts = 0;
        if page.dirty {
            return;
        }
        page.dirty = true;
        page.dirty_since = Some(now);
        if !page.in_flight {
            self.dirty.push_back(number);
        }
    }

    /// Whether the slot's record on the disk is the one in memory.
    #[cfg(test)]
    pub(crate) fn is_clean(&self, slot: u32) -> bool {
        let (segment, local) = self.locate(slot);
        let segment = &self.segments[segment];
        let page = &segment.pages[segment.layout.page_of(local) as usize];
        !page.dirty && !page.in_flight && !page.stale
    }

    /// Time at which the oldest waiting page became dirty.
    pub(crate) fn oldest_dirty(&self) -> Option<Instant> {
        let number = self.dirty.front()?;
        self.segments[number.segment as usize].pages[number.page as usize].dirty_since
    }

    /// Takes the oldest waiting page and fills `buffer` with its contents. Returns the page, the copy and the
    /// file offset to write to.
    pub(crate) fn start_write(
        &mut self,
        usage: Usage,
        buffer: &mut PageBuffer,
    ) -> Option<(PageNumber, PageCopy, u64)> {
        let number = self.dirty.pop_front()?;
        self.sequence += 1;
        let (sequence, store_id) = (self.sequence, self.store_id);
        let segment = &mut self.segments[number.segment as usize];
        let state = &mut segment.pages[number.page as usize];
        (state.dirty, state.in_flight) = (false, true);
        let copy = state.newest.other();
        let page = buffer.first_chunk_mut::<PAGE_BYTES>()?;
        let start = number.page as usize * PAGE_BYTES;
        page[RECORDS_AT..].copy_from_slice(&segment.image[start + RECORDS_AT..start + PAGE_BYTES]);
        let header = PageHeader {
            kind: PageKind::Table,
            store_id,
            sequence,
            segment: segment.layout.segment,
            page: number.page,
            usage,
        };
        seal_page(page, &header);
        Some((number, copy, segment.layout.table_offset(copy, number.page)))
    }

    /// Records the end of a page's write. A page without further changes is given up after [`ATTEMPTS_MAX`]
    /// failed writes, the first one included; until then, and when the device failed, it stays dirty. Returns
    /// whether the page was given up.
    pub(crate) fn end_write(
        &mut self,
        number: PageNumber,
        copy: PageCopy,
        outcome: TableWrite,
        now: Instant,
    ) -> bool {
        let page = self.page_mut(number);
        page.in_flight = false;
        let mut given_up = false;
        match outcome {
            TableWrite::Done => (page.newest, page.attempts, page.stale) = (copy, 0, false),
            TableWrite::Failed => {
                page.attempts += 1;
                given_up = page.attempts >= ATTEMPTS_MAX && !page.dirty;
                page.stale |= given_up;
            }
            TableWrite::DeviceFailed => {}
        }
        if outcome != TableWrite::Done && !given_up {
            page.dirty = true;
            page.dirty_since.get_or_insert(now);
        }
        let is_dirty = page.dirty;
        if is_dirty {
            self.dirty.push_back(number);
        } else {
            self.page_mut(number).dirty_since = None;
        }
        self.count_awaited(number, outcome, given_up);
        given_up
    }

    fn count_awaited(&mut self, number: PageNumber, outcome: TableWrite, given_up: bool) {
        let page = self.page_mut(number);
        if page.awaited == 0 {
            return;
        }
        if given_up {
            page.awaited = 0;
        } else if outcome == TableWrite::Done {
            page.awaited -= 1;
        } else {
            // The next write of the page replaces this one.
            page.awaited = 1;
        }
        if page.awaited == 0 {
            self.awaited_pages -= 1;
            self.given_up += u32::from(given_up);
        }
    }

    /// Marks the pages that were given up as dirty again.
    pub(crate) fn retry_stale_pages(&mut self, now: Instant) {
        for (index, segment) in (0..).zip(&mut self.segments) {
            for (page, state) in (0..).zip(&mut segment.pages) {
                if state.stale && !state.dirty && !state.in_flight {
                    (state.dirty, state.attempts, state.dirty_since) = (true, 0, Some(now));
                    self.dirty.push_back(PageNumber { segment: index, page });
                }
            }
        }
    }

    /// Makes the flush wait for every page that is dirty, in flight or given up.
    pub(crate) fn begin_flush_wait(&mut self, now: Instant) {
        self.retry_stale_pages(now);
        self.given_up = 0;
        for page in self.segments.iter_mut().flat_map(|segment| &mut segment.pages) {
            page.awaited = u8::from(page.dirty) + u8::from(page.in_flight);
            self.awaited_pages += usize::from(page.awaited > 0);
        }
    }

    /// Ends the wait of the flush; returns the number of pages it still waited for.
    pub(crate) fn end_flush_wait(&mut self) -> u32 {
        self.segments.iter_mut().flat_map(|segment| &mut segment.pages).for_each(|page| page.awaited = 0);
        std::mem::take(&mut self.awaited_pages) as u32
    }
}

/// Result of a table write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TableWrite {
    Done,
    Failed,
    DeviceFailed,
}
