//! Layout of a segment: two copies of the header page, two copies of the table, slots.
//!
//! ```text
//! header A | table A: n pages | table B: n pages | slot 0 | slot 1 | ... | header B
//! ```
//!
//! A single misdirected write cannot reach both copies of a header. The copies of a table page lie a whole
//! table apart: a device that writes units of 16 KiB loses at most neighbours of the same copy when power fails
//! in a write.

use std::ops::Range;

use kvstore_io::Geometry;

use crate::format::{PAGE_BYTES, RECORD_BYTES, RECORDS_AT, RecordLocation, SegmentHeader};
use crate::{Area, DiskConfig, DiskError};

const PAGE: u64 = PAGE_BYTES as u64;

/// One of the two copies of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PageCopy {
    A,
    B,
}

impl PageCopy {
    pub(crate) fn other(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }
}

/// Offsets and numbers of one segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SegmentLayout {
    pub(crate) area: Area,
    pub(crate) segment: u32,
    /// Number in the store of the first slot of its row: consecutive areas over which slots are dealt out in turn.
    pub(crate) row_first: u32,
    /// The area's number in its row, of `stripes`.
    pub(crate) column: u32,
    pub(crate) stripes: u32,
    pub(crate) slots: u32,
    pub(crate) slot_bytes: u32,
    pub(crate) pages: u32,
    pub(crate) records_per_page: u32,
    pub(crate) record_bytes: u32,
    pub(crate) meta_bytes_max: u16,
}

impl SegmentLayout {
    /// Returns a layout with as many slots as fit into the area; `None` when not even one does. The table takes
    /// at most a thirteenth of the area with the longest meta bytes and the smallest slots, whatever a header
    /// on the disk says.
    pub(crate) fn new(area: Area, segment: u32, slot_bytes: u32, meta_bytes_max: u16) -> Option<Self> {
        if slot_bytes == 0 || !slot_bytes.is_multiple_of(PAGE_BYTES as u32) || area.bytes < 2 * PAGE {
            return None;
        }
        let record_bytes = RECORD_BYTES + usize::from(meta_bytes_max).next_multiple_of(8);
        let records_per_page = (PAGE_BYTES - RECORDS_AT) / record_bytes;
        if records_per_page == 0 {
            return None;
        }
        // One page of each copy and its slots are a group; the last group may be partial.
        let per_page = records_per_page as u64;
        let group = 2 * PAGE + per_page * u64::from(slot_bytes);
        let room = area.bytes / PAGE * PAGE - 2 * PAGE;
        let rest = (room % group).saturating_sub(2 * PAGE) / u64::from(slot_bytes);
        let slots = u32::try_from(room / group * per_page + rest).ok().filter(|&slots| slots > 0)?;
        Some(Self {
            area,
            segment,
            row_first: 0,
            column: 0,
            stripes: 1,
            slots,
            slot_bytes,
            pages: slots.div_ceil(records_per_page as u32),
            records_per_page: records_per_page as u32,
            record_bytes: record_bytes as u32,
            meta_bytes_max,
        })
    }

    /// Returns the number in the store of a slot of this segment.
    pub(crate) fn slot_number(&self, slot: u32) -> u32 {
        self.row_first + slot * self.stripes + self.column
    }

    pub(crate) fn header_offset(&self, copy: PageCopy) -> u64 {
        match copy {
            PageCopy::A => self.area.offset,
            PageCopy::B => self.area.offset + self.area.bytes / PAGE * PAGE - PAGE,
        }
    }

    pub(crate) fn table_offset(&self, copy: PageCopy, page: u32) -> u64 {
        let before = if copy == PageCopy::A { 0 } else { u64::from(self.pages) };
        self.area.offset + (1 + before + u64::from(page)) * PAGE
    }

    pub(crate) fn slot_offset(&self, slot: u32) -> u64 {
        let tables = 1 + 2 * u64::from(self.pages);
        self.area.offset + tables * PAGE + u64::from(slot) * u64::from(self.slot_bytes)
    }

    /// Bytes of one copy of the table.
    pub(crate) fn table_bytes(&self) -> usize {
        self.pages as usize * PAGE_BYTES
    }

    pub(crate) fn page_of(&self, slot: u32) -> u32 {
        slot / self.records_per_page
    }

    /// Slots whose records a page holds.
    pub(crate) fn slots_of(&self, page: u32) -> Range<u32> {
        let first = page * self.records_per_page;
        first..(first + self.records_per_page).min(self.slots)
    }

    /// Range of a slot's record in one copy of the table.
    pub(crate) fn record_range(&self, slot: u32) -> Range<usize> {
        let page = self.page_of(slot) as usize;
        let index = (slot % self.records_per_page) as usize;
        let start = page * PAGE_BYTES + RECORDS_AT + index * self.record_bytes as usize;
        start..start + self.record_bytes as usize
    }

    pub(crate) fn place(&self, store_id: u64, slot: u32) -> RecordLocation {
        RecordLocation { store_id, segment: self.segment, slot }
    }

    pub(crate) fn header(&self, fingerprint: u64) -> SegmentHeader {
        SegmentHeader {
            fingerprint,
            segment_bytes: self.area.bytes,
            slot_bytes: self.slot_bytes,
            slots: self.slots,
            meta_bytes_max: self.meta_bytes_max,
        }
    }
}

/// Computes the layout of every area; the error names an area that cannot be used.
pub(crate) fn plan(
    config: &DiskConfig,
    areas: &[Area],
    geometry: &Geometry,
) -> Result<Vec<SegmentLayout>, DiskError> {
    config.validate()?;
    check_engine(geometry)?;
    if areas.is_empty() {
        return Err(DiskError::Configuration {
            object: "areas".to_owned(),
            reason: "there are none".to_owned(),
        });
    }
    if !(areas.len() as u64).is_multiple_of(config.stripes.into()) {
        let reason = format!("{} areas are not a multiple of stripes = {}", areas.len(), config.stripes);
        return Err(DiskError::Configuration { object: "areas".to_owned(), reason });
    }
    let mut row_first = 0_u32;
    let mut segments: Vec<SegmentLayout> = Vec::with_capacity(areas.len());
    for (area, segment) in areas.iter().zip(0..) {
        check_area(area, segment, geometry)?;
        let refused = |reason: String| DiskError::Configuration { object: format!("area {segment}"), reason };
        let mut layout = SegmentLayout::new(*area, segment, config.slot_bytes, config.meta_bytes_max)
            .ok_or_else(|| refused(format!("{} bytes hold no slot or too many", area.bytes)))?;
        (layout.row_first, layout.column, layout.stripes) =
            (row_first, segment % config.stripes, config.stripes);
        if let Some(before) =
            segments.last().filter(|before| layout.column > 0 && before.slots != layout.slots)
        {
            let reason =
                format!("{} slots, and its neighbour on another device has {}", layout.slots, before.slots);
            return Err(refused(reason));
        }
        if layout.column + 1 == config.stripes {
            row_first = layout
                .slots
                .checked_mul(config.stripes)
                .and_then(|slots| slots.checked_add(row_first))
                .filter(|&slots| slots < u32::MAX)
                .ok_or_else(|| refused("more than 2^32 slots in the store".to_owned()))?;
        }
        segments.push(layout);
    }
    check_apart(areas)?;
    Ok(segments)
}

/// Whether the engine's requests can be as small and as long as pages.
pub(crate) fn check_engine(geometry: &Geometry) -> Result<(), DiskError> {
    let block = geometry.block_bytes;
    if block > 0
        && PAGE_BYTES.is_multiple_of(block)
        && geometry.transfer_bytes_max >= PAGE_BYTES
        && geometry.depth_max > 0
    {
        return Ok(());
    }
    let reason = format!(
        "blocks of {block} bytes, requests of up to {} bytes and depth {} cannot carry pages of {PAGE_BYTES}",
        geometry.transfer_bytes_max, geometry.depth_max
    );
    Err(DiskError::Configuration { object: "engine".to_owned(), reason })
}

/// Checks that an area lies in its file and is aligned to pages.
pub(crate) fn check_area(area: &Area, segment: u32, geometry: &Geometry) -> Result<(), DiskError> {
    let refused = |reason: String| DiskError::Configuration { object: format!("area {segment}"), reason };
    let Some(&file_bytes) = geometry.files.get(area.file as usize) else {
        return Err(refused(format!("there is no file {}", area.file)));
    };
    if !area.offset.is_multiple_of(PAGE) {
        return Err(refused(format!("offset {} is not a multiple of {PAGE}", area.offset)));
    }
    if area.offset.checked_add(area.bytes).is_none_or(|end| end > file_bytes) {
        return Err(refused(format!(
            "{} bytes at {} lie outside a file of {file_bytes}",
            area.bytes, area.offset
        )));
    }
    Ok(())
}

fn check_apart(areas: &[Area]) -> Result<(), DiskError> {
    let mut sorted: Vec<&Area> = areas.iter().collect();
    sorted.sort_by_key(|area| (area.file, area.offset));
    match sorted
        .windows(2)
        .find(|pair| pair[0].file == pair[1].file && pair[0].offset + pair[0].bytes > pair[1].offset)
    {
        None => Ok(()),
        Some(pair) => Err(DiskError::Configuration {
            object: "areas".to_owned(),
            reason: format!("{:?} and {:?} overlap", pair[0], pair[1]),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::{SegmentTable, Tables};

    #[test]
    fn everything_fits_and_nothing_overlaps() {
        for (bytes, slot_bytes, meta) in [
            (28_672, 4096, 0_u16),
            (1 << 20, 4096, 128),
            (1 << 30, 1 << 20, 128),
            ((1 << 30) - 12_345, 5 << 20, 1024),
            (100 << 30, 4096, 0),
        ] {
            let area = Area { file: 0, offset: 8192, bytes };
            let layout = SegmentLayout::new(area, 3, slot_bytes, meta).expect("slots");
            let end = layout.slot_offset(layout.slots);
            assert!(end <= layout.header_offset(PageCopy::B), "{layout:?} ends at {end}");
            assert!(layout.header_offset(PageCopy::B) + PAGE <= area.offset + area.bytes);
            assert!(
                end + u64::from(slot_bytes) + 4 * PAGE > area.offset + area.bytes,
                "{layout:?} wastes room"
            );
            assert_eq!(layout.table_offset(PageCopy::B, layout.pages), layout.slot_offset(0));
            assert_eq!(layout.table_offset(PageCopy::A, layout.pages), layout.table_offset(PageCopy::B, 0));
            assert_eq!(layout.slots_of(layout.pages - 1).end, layout.slots);
            for slot in [0, layout.slots / 2, layout.slots - 1] {
                let (page, range) = (layout.page_of(slot), layout.record_range(slot));
                assert!(layout.slots_of(page).contains(&slot));
                assert_eq!((range.end - 1) / PAGE_BYTES, page as usize);
                assert!(range.start % PAGE_BYTES >= RECORDS_AT);
            }
        }
    }

    #[test]
    fn slots_are_dealt_out_over_the_areas_of_a_row() {
        let files = vec![1 << 20; 6];
        let geometry = Geometry { block_bytes: 512, transfer_bytes_max: 1 << 20, depth_max: 4, files };
        let areas: Vec<Area> = (0..6).map(|file| Area { file, offset: 0, bytes: 1 << 20 }).collect();
        let config = DiskConfig { slot_bytes: 4096, stripes: 3, ..DiskConfig::default() };
        let segments = plan(&config, &areas, &geometry).expect("a plan");
        let numbers = segments.iter().flat_map(|segment| {
            (0..segment.slots).map(move |slot| (segment.slot_number(slot), segment.segment))
        });
        let mut numbers: Vec<(u32, u32)> = numbers.collect();
        numbers.sort_unstable();
        let slots = segments[0].slots;
        assert!(
            numbers.iter().enumerate().all(|(at, (number, _))| at == *number as usize),
            "each once, no gap"
        );
        assert_eq!(numbers.len() as u32, 6 * slots);
        let row = |number: u32| 3 * (number / (3 * slots));
        assert!(numbers.iter().all(|(number, segment)| *segment == row(*number) + number % 3));

        for stripes in 1..=3 {
            let segments =
                plan(&DiskConfig { stripes, ..config.clone() }, &areas, &geometry).expect("a plan");
            let tables =
                Tables::new(segments.iter().map(|layout| SegmentTable::new(*layout)).collect(), 1, 1);
            assert_eq!(tables.slots(), 6 * slots);
            for (at, segment) in segments.iter().enumerate() {
                for slot in 0..segment.slots {
                    let number = segment.slot_number(slot);
                    assert_eq!(tables.locate(number), (at, slot), "{stripes} stripes");
                }
            }
        }

        let refused = |stripes: u32, areas: &[Area]| {
            plan(&DiskConfig { stripes, ..config.clone() }, areas, &geometry)
                .expect_err("refused")
                .to_string()
        };
        assert!(refused(4, &areas).contains("6 areas are not a multiple of stripes = 4"));
        assert!(refused(0, &areas).contains("stripes"));
        let mut uneven = areas.clone();
        uneven[1].bytes = 1 << 19;
        assert!(refused(3, &uneven).contains("area 1") && refused(3, &uneven).contains("another device"));
    }

    #[test]
    fn areas_that_cannot_work_are_named() {
        let geometry =
            Geometry { block_bytes: 512, transfer_bytes_max: 1 << 20, depth_max: 4, files: vec![1 << 20] };
        let config = DiskConfig { slot_bytes: 4096, ..DiskConfig::default() };
        let area = |file, offset, bytes| Area { file, offset, bytes };
        for (areas, reason) in [
            (vec![], "there are none"),
            (vec![area(1, 0, 1 << 20)], "no file 1"),
            (vec![area(0, 512, 65_536)], "not a multiple"),
            (vec![area(0, 4096, 1 << 20)], "outside"),
            (vec![area(0, u64::MAX - 4095, 1 << 20)], "outside"),
            (vec![area(0, 0, 8192)], "no slot"),
            (vec![area(0, 65_536, 65_536), area(0, 0, 65_537)], "overlap"),
        ] {
            let error = plan(&config, &areas, &geometry).expect_err("refused").to_string();
            assert!(error.contains(reason), "{error:?} does not say {reason:?}");
        }
        let small = Geometry { transfer_bytes_max: 512, ..geometry };
        assert!(plan(&config, &[area(0, 0, 1 << 20)], &small).is_err());
    }
}
