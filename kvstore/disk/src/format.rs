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
//! | 32 | 28 | [`Usage`](crate::Usage): total, day's bytes, previous day's bytes, day |
//! | 60 | 4 | CRC32C of the page, with zeros here |
//!
//! Records follow in a table page, 72 bytes and the meta bytes each: identity 16, parent 16, checksum 8, generation
//! 8, bytes 4, tenant 4, written at 4, meta length 2, state 1, zero 1, CRC32C 4, zero 4. A record's CRC starts from
//! store id, segment and slot, so a record copied elsewhere does not verify, and one in a damaged page can be
//! trusted on its own.
//!
//! Invariants: no function here panics or allocates, whatever the bytes; unknown versions and states are errors.

mod page;
mod record;

pub use page::{
    PageError, PageHeader, PageKind, SegmentHeader, decode_page, decode_segment_header,
    encode_segment_header, seal_page,
};
pub use record::{
    Record, RecordDamaged, RecordLocation, RecordState, decode_record, encode_record, parse_record,
};

/// Bytes of a page, and the unit of every request.
pub const PAGE_BYTES: usize = 4096;
/// Offset of the first record in a table page.
pub const RECORDS_AT: usize = 64;
/// Bytes of a record before its meta bytes.
pub const RECORD_BYTES: usize = 72;

/// Maximum valid sequence and generation; larger ones are damage. At one page each nanosecond a store needs 146
/// years to get there.
const COUNTER_MAX: u64 = 1 << 62;

/// Whether all bytes are zero, as in an area that was never written.
#[must_use]
pub fn is_blank(bytes: &[u8]) -> bool {
    bytes.iter().all(|&byte| byte == 0)
}

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
