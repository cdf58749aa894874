//! Pages and the headers of segments.

use super::{COUNTER_MAX, PAGE_BYTES, half, is_blank, long, word};
use crate::Usage;

/// Version of the format. 2: payload checksums are taken by the maker of the block (`dataplane-checksum`); 1:
/// by the log.
const VERSION: u16 = 2;
const HEADER_MAGIC: [u8; 4] = *b"KVDH";
const TABLE_MAGIC: [u8; 4] = *b"KVDT";
const CRC_AT: usize = 60;

/// Type of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageKind {
    /// Description of the segment.
    Header,
    /// Records.
    Table,
}

/// The first 64 bytes of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageHeader {
    /// Type of the page.
    pub kind: PageKind,
    /// Id of the store, new with each formatting.
    pub store_id: u64,
    /// Sequence number of the write; the newest copy has the largest.
    pub sequence: u64,
    /// Number of the segment.
    pub segment: u32,
    /// Index of the page in the table; 0 in a header.
    pub page: u32,
    /// Bytes that the device had been made to write when the page was written.
    pub usage: Usage,
}

/// Reason why bytes are not a valid page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageError {
    /// All zero: never written.
    Blank,
    /// No magic number of this format; of a table page also: another store's id.
    Foreign,
    /// A known magic number, and a version that this program does not know.
    Version(u16),
    /// A known magic number, and a wrong checksum or field.
    Damaged,
}

/// Description of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentHeader {
    /// Fingerprint of the blocks.
    pub fingerprint: u64,
    /// Bytes of the area.
    pub segment_bytes: u64,
    /// Bytes of a slot.
    pub slot_bytes: u32,
    /// Slots in the segment.
    pub slots: u32,
    /// Maximum number of meta bytes of a record.
    pub meta_bytes_max: u16,
}

fn page_crc(page: &[u8; PAGE_BYTES]) -> u32 {
    let crc = crc32c::crc32c_append(crc32c::crc32c(&page[..CRC_AT]), &[0; 4]);
    crc32c::crc32c_append(crc, &page[CRC_AT + 4..])
}

/// Checks a page and reads its first 64 bytes.
pub fn decode_page(bytes: &[u8]) -> Result<PageHeader, PageError> {
    let page: &[u8; PAGE_BYTES] = bytes.try_into().map_err(|_| PageError::Damaged)?;
    let kind = match page[..4] {
        ref magic if *magic == HEADER_MAGIC => PageKind::Header,
        ref magic if *magic == TABLE_MAGIC => PageKind::Table,
        _ if is_blank(page) => return Err(PageError::Blank),
        _ => return Err(PageError::Foreign),
    };
    if word(page, CRC_AT) != Some(page_crc(page)) {
        return Err(PageError::Damaged);
    }
    // The checksum is right, so an unknown version is another format, not damage.
    match half(page, 4) {
        Some(VERSION) => read_page_header(page, kind)
            .filter(|header| header.sequence <= COUNTER_MAX)
            .ok_or(PageError::Damaged),
        Some(version) => Err(PageError::Version(version)),
        None => Err(PageError::Damaged),
    }
}

fn read_page_header(page: &[u8], kind: PageKind) -> Option<PageHeader> {
    let usage = Usage {
        total_bytes: long(page, 32)?,
        day_bytes: long(page, 40)?,
        previous_day_bytes: long(page, 48)?,
        day: word(page, 56)?,
    };
    Some(PageHeader {
        kind,
        store_id: long(page, 8)?,
        sequence: long(page, 16)?,
        segment: word(page, 24)?,
        page: word(page, 28)?,
        usage,
    })
}

/// Writes the first 64 bytes of a page whose other bytes are in place, checksum included.
pub fn seal_page(page: &mut [u8; PAGE_BYTES], header: &PageHeader) {
    let magic = match header.kind {
        PageKind::Header => HEADER_MAGIC,
        PageKind::Table => TABLE_MAGIC,
    };
    page[..4].copy_from_slice(&magic);
    page[4..6].copy_from_slice(&VERSION.to_le_bytes());
    page[6..8].fill(0);
    page[8..16].copy_from_slice(&header.store_id.to_le_bytes());
    page[16..24].copy_from_slice(&header.sequence.to_le_bytes());
    page[24..28].copy_from_slice(&header.segment.to_le_bytes());
    page[28..32].copy_from_slice(&header.page.to_le_bytes());
    page[32..40].copy_from_slice(&header.usage.total_bytes.to_le_bytes());
    page[40..48].copy_from_slice(&header.usage.day_bytes.to_le_bytes());
    page[48..56].copy_from_slice(&header.usage.previous_day_bytes.to_le_bytes());
    page[56..60].copy_from_slice(&header.usage.day.to_le_bytes());
    let crc = page_crc(page);
    page[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
}

/// Reads a segment's header page.
pub fn decode_segment_header(bytes: &[u8]) -> Result<(PageHeader, SegmentHeader), PageError> {
    let page = decode_page(bytes)?;
    if page.kind != PageKind::Header {
        return Err(PageError::Damaged);
    }
    let read = || {
        Some(SegmentHeader {
            fingerprint: long(bytes, 64)?,
            segment_bytes: long(bytes, 72)?,
            slot_bytes: word(bytes, 80)?,
            slots: word(bytes, 84)?,
            meta_bytes_max: half(bytes, 88)?,
        })
    };
    read().map(|segment| (page, segment)).ok_or(PageError::Damaged)
}

/// Writes a segment's header page.
pub fn encode_segment_header(out: &mut [u8; PAGE_BYTES], page: &PageHeader, segment: &SegmentHeader) {
    out.fill(0);
    out[64..72].copy_from_slice(&segment.fingerprint.to_le_bytes());
    out[72..80].copy_from_slice(&segment.segment_bytes.to_le_bytes());
    out[80..84].copy_from_slice(&segment.slot_bytes.to_le_bytes());
    out[84..88].copy_from_slice(&segment.slots.to_le_bytes());
    out[88..90].copy_from_slice(&segment.meta_bytes_max.to_le_bytes());
    seal_page(out, page);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page() -> PageHeader {
        let usage = Usage { total_bytes: 10, day: 11, day_bytes: 12, previous_day_bytes: 13 };
        PageHeader { kind: PageKind::Table, store_id: 7, sequence: 8, segment: 2, page: 9, usage }
    }

    #[test]
    fn pages_come_back_and_every_flipped_bit_is_seen() {
        let mut bytes = [0xA5; PAGE_BYTES];
        seal_page(&mut bytes, &page());
        assert_eq!(decode_page(&bytes), Ok(page()));
        for bit in 0..PAGE_BYTES * 8 {
            let mut flipped = bytes;
            flipped[bit / 8] ^= 1 << (bit % 8);
            let expected = if bit < 32 { PageError::Foreign } else { PageError::Damaged };
            assert_eq!(decode_page(&flipped), Err(expected), "bit {bit}");
        }
        assert_eq!(decode_page(&[0; PAGE_BYTES]), Err(PageError::Blank));
        assert_eq!(decode_page(&bytes[1..]), Err(PageError::Damaged));
    }

    #[test]
    fn another_version_is_named() {
        let mut bytes = [0; PAGE_BYTES];
        seal_page(&mut bytes, &page());
        bytes[4] = 9;
        bytes[CRC_AT..CRC_AT + 4].fill(0);
        let crc = page_crc(&bytes);
        bytes[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
        assert_eq!(decode_page(&bytes), Err(PageError::Version(9)));
    }

    #[test]
    fn segment_headers_come_back() {
        let segment =
            SegmentHeader { fingerprint: 1, segment_bytes: 2, slot_bytes: 3, slots: 4, meta_bytes_max: 5 };
        let header = PageHeader { kind: PageKind::Header, ..page() };
        let mut bytes = [0xFF; PAGE_BYTES];
        encode_segment_header(&mut bytes, &header, &segment);
        assert_eq!(decode_segment_header(&bytes), Ok((header, segment)));
        seal_page(&mut bytes, &page());
        assert_eq!(decode_segment_header(&bytes), Err(PageError::Damaged), "a table page is no header");
    }
}
