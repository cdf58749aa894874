//! Records of slots.

use kvstore_block::BlockIdentity;

use super::{COUNTER_MAX, RECORD_BYTES, half, is_blank, long, take, word};

const RECORD_CRC_AT: usize = 64;
const LIVE: u8 = 1;
const TOMBSTONE: u8 = 2;

/// State of a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordState {
    /// The payload was written.
    Live,
    /// The block was forgotten; the record keeps the generation.
    Tombstone,
}

/// Record of one slot, without the meta bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// Identity of the block in the slot.
    pub identity: BlockIdentity,
    /// Identity of the preceding block of the chain.
    pub parent: BlockIdentity,
    /// `dataplane-checksum` of the payload.
    pub checksum: u64,
    /// Number of the write, unique in the store.
    pub generation: u64,
    /// Bytes of the payload.
    pub bytes: u32,
    /// Tenant whose quota the block counts against.
    pub tenant: u32,
    /// Time of the write, in seconds since 1970.
    pub written_at_s: u32,
    /// Number of meta bytes that follow the record.
    pub meta_bytes: u16,
    /// Whether the block is there.
    pub state: RecordState,
}

/// Position of a record; part of its CRC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordLocation {
    /// Id of the store.
    pub store_id: u64,
    /// The segment.
    pub segment: u32,
    /// The slot in the segment.
    pub slot: u32,
}

/// The record is damaged, or has a state that this program does not know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecordDamaged;

fn record_crc(record: &[u8], meta_bytes: usize, place: RecordLocation) -> Option<u32> {
    let crc = crc32c::crc32c(&place.store_id.to_le_bytes());
    let crc = crc32c::crc32c_append(crc, &place.segment.to_le_bytes());
    let crc = crc32c::crc32c_append(crc, &place.slot.to_le_bytes());
    let crc = crc32c::crc32c_append(crc, record.get(..RECORD_CRC_AT)?);
    Some(crc32c::crc32c_append(crc, record.get(RECORD_BYTES..RECORD_BYTES + meta_bytes)?))
}

/// Checks a record and reads it; `None` when the slot was never written. The meta bytes follow at [`RECORD_BYTES`].
pub fn decode_record(bytes: &[u8], place: RecordLocation) -> Result<Option<Record>, RecordDamaged> {
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
pub fn encode_record(out: &mut [u8], record: &Record, meta: &[u8], place: RecordLocation) {
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

    const PLACE: RecordLocation = RecordLocation { store_id: 7, segment: 2, slot: 5 };

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

    #[test]
    fn records_come_back_and_every_flipped_bit_is_seen() {
        let mut bytes = [0; RECORD_BYTES + 8];
        encode_record(&mut bytes, &record(), b"abc", PLACE);
        assert_eq!(decode_record(&bytes, PLACE), Ok(Some(record())));
        assert_eq!(&bytes[RECORD_BYTES..RECORD_BYTES + 3], b"abc");
        for other in [
            RecordLocation { store_id: 8, ..PLACE },
            RecordLocation { segment: 3, ..PLACE },
            RecordLocation { slot: 6, ..PLACE },
        ] {
            assert_eq!(decode_record(&bytes, other), Err(RecordDamaged), "{other:?}");
        }
        // Bytes 63 and 68..72 are not used; bytes behind the meta bytes do not count either.
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
}
