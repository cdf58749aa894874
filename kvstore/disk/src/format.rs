//! The bytes on the disk: pages, segment headers, records. All parsing of the crate is here; it is fuzzed.
//!
//! Everything but payloads lies in pages of 4 KiB, little-endian, that begin with the same 64 bytes:
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 4 | `KVDH` (segment header) or `KVDT` (table) |
//! | 4 | 2 | version |
//! | 6 | 2 | zero |
//! | 8 | 8 | store id, new with each formatting |
//! | 16 | 8 | sequence, one counter for the whole store |
//! | 24 | 4 | segment |
//! | 28 | 4 | page in the table |
//! | 32 | 28 | [`Usage`]: total, day's bytes, previous day's bytes, day |
//! | 60 | 4 | CRC32C of the page, with zeros here |
//!
//! Records follow in a table page, 72 bytes and the meta bytes each: identity 16, parent 16, checksum 8, generation
//! 8, bytes 4, tenant 4, written at 4, meta length 2, state 1, zero 1, CRC32C 4, zero 4. A record's CRC starts from
//! store id, segment and slot, so a record copied elsewhere does not verify, and one in a damaged page can be
//! trusted on its own.
//!
//! Invariants: no function here panics or allocates, whatever the bytes; unknown versions and states are errors.

use kvstore_block::BlockIdentity;

use crate::Usage;

/// Bytes of a page, and the unit of every request.
pub const PAGE_BYTES: usize = 4096;
/// Where records begin in a table page.
pub const RECORDS_AT: usize = 64;
/// Bytes of a record before its meta bytes.
pub const RECORD_BYTES: usize = 72;

/// Sequences and generations beyond this are nobody's: a store that wrote a page each nanosecond would need 146 years.
const COUNTER_MAX: u64 = 1 << 62;
const VERSION: u16 = 1;
const HEADER_MAGIC: [u8; 4] = *b"KVDH";
const TABLE_MAGIC: [u8; 4] = *b"KVDT";
const CRC_AT: usize = 60;
const RECORD_CRC_AT: usize = 64;
const LIVE: u8 = 1;
const TOMBSTONE: u8 = 2;

/// What a page is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageKind {
    /// Says what the segment holds.
    Header,
    /// Records.
    Table,
}

/// The first 64 bytes of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageHeader {
    /// What it is for.
    pub kind: PageKind,
    /// Which formatting it belongs to.
    pub store_id: u64,
    /// The newest copy has the largest.
    pub sequence: u64,
    /// Which segment.
    pub segment: u32,
    /// Which page of the table; 0 in a header.
    pub page: u32,
    /// What had been written when the page was.
    pub usage: Usage,
}

/// Why bytes are no page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageError {
    /// All zero: never written.
    Blank,
    /// No magic of ours.
    Foreign,
    /// Our magic, and a version that this program does not know.
    Version(u16),
    /// Our magic, and a checksum or a field that is wrong.
    Damaged,
}

/// What a segment holds.
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
    /// Longest meta bytes.
    pub meta_bytes_max: u16,
}

/// Whether a record's block is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordState {
    /// Its payload was written.
    Live,
    /// It was forgotten; the record keeps the generation.
    Tombstone,
}

/// What is kept about one slot, meta bytes apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// Whose payload.
    pub identity: BlockIdentity,
    /// The block before it.
    pub parent: BlockIdentity,
    /// Seeded xxh3-64 of the payload.
    pub checksum: u64,
    /// Number of the write, unique in the store.
    pub generation: u64,
    /// Bytes of the payload.
    pub bytes: u32,
    /// Whose quota.
    pub tenant: u32,
    /// Seconds since 1970.
    pub written_at_s: u32,
    /// Bytes of meta that follow.
    pub meta_bytes: u16,
    /// Whether the block is there.
    pub state: RecordState,
}

/// Where a record lies; part of its CRC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordPlace {
    /// The formatting.
    pub store_id: u64,
    /// The segment.
    pub segment: u32,
    /// The slot in the segment.
    pub slot: u32,
}

/// The record is damaged, or of a kind that this program does not know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordDamaged;

fn take<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at.checked_add(N)?)?.try_into().ok()
}

fn long(bytes: &[u8], at: usize) -> Option<u64> {
    take(bytes, at).map(u64::from_le_bytes)
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    take(bytes, at).map(u32::from_le_bytes)
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    take(bytes, at).map(u16::from_le_bytes)
}

/// Whether nothing was ever written there.
#[must_use]
pub fn is_blank(bytes: &[u8]) -> bool {
    bytes.iter().all(|&byte| byte == 0)
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
    // After the checksum: what is left is what somebody wrote, so another version is one, and not damage.
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

fn record_crc(record: &[u8], meta_bytes: usize, place: RecordPlace) -> Option<u32> {
    let crc = crc32c::crc32c(&place.store_id.to_le_bytes());
    let crc = crc32c::crc32c_append(crc, &place.segment.to_le_bytes());
    let crc = crc32c::crc32c_append(crc, &place.slot.to_le_bytes());
    let crc = crc32c::crc32c_append(crc, record.get(..RECORD_CRC_AT)?);
    Some(crc32c::crc32c_append(crc, record.get(RECORD_BYTES..RECORD_BYTES + meta_bytes)?))
}

/// Checks a record and reads it; `None` when the slot was never written. The meta bytes follow at [`RECORD_BYTES`].
pub fn decode_record(bytes: &[u8], place: RecordPlace) -> Result<Option<Record>, RecordDamaged> {
    if is_blank(bytes) {
        return Ok(None);
    }
    let is_possible = |record: &Record| record.generation <= COUNTER_MAX;
    let record = parse_record(bytes).filter(is_possible).ok_or(RecordDamaged)?;
    let crc = record_crc(bytes, record.meta_bytes.into(), place).ok_or(RecordDamaged)?;
    if word(bytes, RECORD_CRC_AT) == Some(crc) { Ok(Some(record)) } else { Err(RecordDamaged) }
}

/// Reads a record without checking it: for images in memory, whose records were checked when they came in.
#[must_use]
pub fn parse_record(bytes: &[u8]) -> Option<Record> {
    let state = match *bytes.get(62)? {
        LIVE => RecordState::Live,
        TOMBSTONE => RecordState::Tombstone,
        _ => return None,
    };
    Some(Record {
        identity: BlockIdentity(take(bytes, 0)?),
        parent: BlockIdentity(take(bytes, 16)?),
        checksum: long(bytes, 32)?,
        generation: long(bytes, 40)?,
        bytes: word(bytes, 48)?,
        tenant: word(bytes, 52)?,
        written_at_s: word(bytes, 56)?,
        meta_bytes: half(bytes, 60)?,
        state,
    })
}

/// Writes a record over `out`, which is as long as the layout's records. Meta bytes beyond its end are cut off; the
/// log has refused them before.
pub fn encode_record(out: &mut [u8], record: &Record, meta: &[u8], place: RecordPlace) {
    let meta = &meta[..meta.len().min(out.len() - RECORD_BYTES)];
    out.fill(0);
    out[..16].copy_from_slice(&record.identity.0);
    out[16..32].copy_from_slice(&record.parent.0);
    out[32..40].copy_from_slice(&record.checksum.to_le_bytes());
    out[40..48].copy_from_slice(&record.generation.to_le_bytes());
    out[48..52].copy_from_slice(&record.bytes.to_le_bytes());
    out[52..56].copy_from_slice(&record.tenant.to_le_bytes());
    out[56..60].copy_from_slice(&record.written_at_s.to_le_bytes());
    out[60..62].copy_from_slice(&(meta.len() as u16).to_le_bytes());
    out[62] = match record.state {
        RecordState::Live => LIVE,
        RecordState::Tombstone => TOMBSTONE,
    };
    out[RECORD_BYTES..RECORD_BYTES + meta.len()].copy_from_slice(meta);
    if let Some(crc) = record_crc(out, meta.len(), place) {
        out[RECORD_CRC_AT..RECORD_CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACE: RecordPlace = RecordPlace { store_id: 7, segment: 2, slot: 5 };

    fn record() -> Record {
        Record {
            identity: BlockIdentity([1; 16]),
            parent: BlockIdentity([2; 16]),
            checksum: 3,
            generation: 4,
            bytes: 5,
            tenant: 6,
            written_at_s: 7,
            meta_bytes: 3,
            state: RecordState::Live,
        }
    }

    fn page() -> PageHeader {
        let usage = Usage { total_bytes: 10, day: 11, day_bytes: 12, previous_day_bytes: 13 };
        PageHeader { kind: PageKind::Table, store_id: 7, sequence: 8, segment: 2, page: 9, usage }
    }

    #[test]
    fn records_come_back_and_every_flipped_bit_is_seen() {
        let mut bytes = [0; RECORD_BYTES + 8];
        encode_record(&mut bytes, &record(), b"abc", PLACE);
        assert_eq!(decode_record(&bytes, PLACE), Ok(Some(record())));
        assert_eq!(&bytes[RECORD_BYTES..RECORD_BYTES + 3], b"abc");
        for other in [
            RecordPlace { store_id: 8, ..PLACE },
            RecordPlace { segment: 3, ..PLACE },
            RecordPlace { slot: 6, ..PLACE },
        ] {
            assert_eq!(decode_record(&bytes, other), Err(RecordDamaged), "{other:?}");
        }
        // Byte 63 and 68..72 are not used; behind the meta bytes nothing counts either.
        for bit in (0..(RECORD_BYTES + 3) * 8).filter(|bit| !(68..72).contains(&(bit / 8))) {
            let mut flipped = bytes;
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode_record(&flipped, PLACE), Err(RecordDamaged), "bit {bit}");
        }
        assert_eq!(decode_record(&[0; 80], PLACE), Ok(None));
        for len in 0..bytes.len() - 5 {
            assert!(decode_record(&bytes[..len], PLACE).is_err() || len == 0, "{len} bytes");
        }
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
