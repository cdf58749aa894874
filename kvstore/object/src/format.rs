//! The bytes of an object, version 1. Little-endian. Fuzzed: [`RunIndex::decode`] takes any bytes.
//!
//! | Offset | Field |
//! | --- | --- |
//! | 0 | magic `KVASIRUN` |
//! | 8 | version u16, blocks u16, alignment of the payloads u32 |
//! | 16 | layout fingerprint u64, time of creation in Unix ms u64 |
//! | 32 | bytes of header, entries and metas u32, CRC32C of them with this field as zero u32 |
//! | 40 | offset of the first payload u64, bytes of the object u64, zero u64 |
//! | 64 | entries of 40 bytes: identity, payload bytes u64, xxh3-64 of the payload u64, meta bytes u32, zero u32 |
//! | … | metas one after the other, then zeros up to the first payload |
//!
//! The index stands in front, so one read of the first kilobytes tells whether the run is there, whole and of
//! the right age, and where each payload lies. Every field that can be computed is checked against its computed
//! value, so each object has exactly one valid index. Gaps between payloads are not covered by a checksum, and
//! never read.

use std::ops::Range;

use bytes::{BufMut, Bytes, BytesMut};
use kvstore_block::BlockIdentity;
use xxhash_rust::xxh3::xxh3_64;

/// Bytes of the header.
pub const HEADER_BYTES: usize = 64;
/// Maximum number of blocks of one object.
pub const RUN_BLOCKS_MAX: usize = 1024;
/// Maximum alignment of payloads, in bytes.
pub const ALIGNMENT_MAX: u32 = 1 << 20;
/// Maximum bytes of header, entries and metas.
pub const INDEX_BYTES_MAX: usize = 16 << 20;
/// Maximum bytes of one payload.
pub const PAYLOAD_BYTES_MAX: u64 = 1 << 30;

const ENTRY_BYTES: usize = 40;
const MAGIC: &[u8; 8] = b"KVASIRUN";
const VERSION: u16 = 1;
const CRC_OFFSET: usize = 36;

/// The bytes are not a valid object, or the blocks cannot form one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// More bytes are needed to decode the index.
    #[error("index needs {0} bytes")]
    Short(usize),
    /// Not an object.
    #[error("not a run of blocks")]
    Magic,
    /// A version that this program does not know.
    #[error("unknown version {0}")]
    Version(u16),
    /// The CRC of the index is wrong.
    #[error("index checksum mismatch")]
    Checksum,
    /// A field has an invalid value.
    #[error("{0} out of range")]
    Field(&'static str),
}

/// A block to be stored.
#[derive(Debug, Clone)]
pub struct Block {
    /// Identity of the block.
    pub identity: BlockIdentity,
    /// Opaque bytes of the store, such as token ids.
    pub meta: Bytes,
    /// KV of the block.
    pub payload: Bytes,
}

/// Index entry of one block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IndexEntry {
    /// Identity of the block.
    pub identity: BlockIdentity,
    /// xxh3-64 of its payload.
    pub checksum: u64,
    /// Range of its payload in the object.
    pub range: Range<u64>,
    /// Opaque bytes of the store.
    pub meta: Bytes,
}

/// The index of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunIndex {
    /// Fingerprint of model and layout.
    pub layout_fingerprint: u64,
    /// Time of creation by the writer's clock, in milliseconds since 1970.
    pub created_unix_ms: u64,
    /// Bytes of the whole object.
    pub object_bytes: u64,
    /// Entries of the blocks, in order.
    pub entries: Vec<IndexEntry>,
}

/// An object ready to be sent: its index and the pieces that make up its bytes.
#[derive(Debug)]
pub struct Encoded {
    /// The index.
    pub index: RunIndex,
    /// Header, entries, metas and padding, then payloads with their padding. Payloads are not copied.
    pub pieces: Vec<Bytes>,
}

/// Lays out a run.
pub fn encode(
    layout_fingerprint: u64,
    created_unix_ms: u64,
    alignment: u32,
    blocks: &[Block],
) -> Result<Encoded, FormatError> {
    check(!blocks.is_empty() && blocks.len() <= RUN_BLOCKS_MAX, "blocks")?;
    check(alignment.is_power_of_two() && alignment <= ALIGNMENT_MAX, "alignment")?;
    let metas: usize = blocks.iter().map(|block| block.meta.len()).sum();
    let index_bytes = HEADER_BYTES + blocks.len() * ENTRY_BYTES + metas;
    check(index_bytes <= INDEX_BYTES_MAX, "meta bytes")?;
    check(blocks.iter().all(|block| block.payload.len() as u64 <= PAYLOAD_BYTES_MAX), "payload bytes")?;

    let alignment_bytes = u64::from(alignment);
    let payload_offset = (index_bytes as u64).next_multiple_of(alignment_bytes);
    let (mut end, mut entries) = (payload_offset, Vec::with_capacity(blocks.len()));
    for block in blocks {
        let start = end.next_multiple_of(alignment_bytes);
        end = start + block.payload.len() as u64;
        entries.push(IndexEntry {
            identity: block.identity,
            checksum: xxh3_64(&block.payload),
            range: start..end,
            meta: block.meta.clone(),
        });
    }
    let index = RunIndex { layout_fingerprint, created_unix_ms, object_bytes: end, entries };

    let mut front = BytesMut::with_capacity(payload_offset as usize);
    front.put_slice(MAGIC);
    front.put_u16_le(VERSION);
    front.put_u16_le(blocks.len() as u16);
    front.put_u32_le(alignment);
    front.put_u64_le(layout_fingerprint);
    front.put_u64_le(created_unix_ms);
    front.put_u32_le(index_bytes as u32);
    front.put_u32_le(0);
    front.put_u64_le(payload_offset);
    front.put_u64_le(end);
    front.put_u64_le(0);
    for entry in &index.entries {
        front.put_slice(&entry.identity.0);
        front.put_u64_le(entry.range.end - entry.range.start);
        front.put_u64_le(entry.checksum);
        front.put_u32_le(entry.meta.len() as u32);
        front.put_u32_le(0);
    }
    blocks.iter().for_each(|block| front.put_slice(&block.meta));
    let crc = crc32c::crc32c(&front);
    front[CRC_OFFSET..CRC_OFFSET + 4].copy_from_slice(&crc.to_le_bytes());
    front.resize(payload_offset as usize, 0);

    let zeros = Bytes::from(vec![0; alignment as usize]);
    let mut pieces = vec![front.freeze()];
    let mut at = payload_offset;
    for (entry, block) in index.entries.iter().zip(blocks) {
        pieces.push(zeros.slice(..(entry.range.start - at) as usize));
        pieces.push(block.payload.clone());
        at = entry.range.end;
    }
    pieces.retain(|piece| !piece.is_empty());
    Ok(Encoded { index, pieces })
}

impl RunIndex {
    /// Decodes an index from the first bytes of an object. [`FormatError::Short`] says how many are needed.
    pub fn decode(bytes: &Bytes) -> Result<Self, FormatError> {
        if bytes.len() < HEADER_BYTES {
            return Err(FormatError::Short(HEADER_BYTES));
        }
        if &bytes[..8] != MAGIC {
            return Err(FormatError::Magic);
        }
        let version = u16_at(bytes, 8);
        if version != VERSION {
            return Err(FormatError::Version(version));
        }
        let blocks = usize::from(u16_at(bytes, 10));
        check((1..=RUN_BLOCKS_MAX).contains(&blocks), "blocks")?;
        let alignment = u32_at(bytes, 12);
        check(alignment.is_power_of_two() && alignment <= ALIGNMENT_MAX, "alignment")?;
        let index_bytes = u32_at(bytes, 32) as usize;
        let metas_offset = HEADER_BYTES + blocks * ENTRY_BYTES;
        check((metas_offset..=INDEX_BYTES_MAX).contains(&index_bytes), "index bytes")?;
        if bytes.len() < index_bytes {
            return Err(FormatError::Short(index_bytes));
        }
        let crc = crc32c::crc32c(&bytes[..CRC_OFFSET]);
        let crc = crc32c::crc32c_append(crc, &[0; 4]);
        let crc = crc32c::crc32c_append(crc, &bytes[CRC_OFFSET + 4..index_bytes]);
        if crc != u32_at(bytes, CRC_OFFSET) {
            return Err(FormatError::Checksum);
        }
        check(u64_at(bytes, 56) == 0, "reserved field")?;
        let alignment = u64::from(alignment);
        let payload_offset = (index_bytes as u64).next_multiple_of(alignment);
        check(u64_at(bytes, 40) == payload_offset, "payload offset")?;

        let (mut end, mut meta_at) = (payload_offset, metas_offset);
        let mut entries = Vec::with_capacity(blocks);
        for number in 0..blocks {
            let at = HEADER_BYTES + number * ENTRY_BYTES;
            let mut identity = [0; 16];
            identity.copy_from_slice(&bytes[at..at + 16]);
            let payload_bytes = u64_at(bytes, at + 16);
            check(payload_bytes <= PAYLOAD_BYTES_MAX, "payload bytes")?;
            let meta_bytes = u32_at(bytes, at + 32) as usize;
            check(meta_bytes <= index_bytes - meta_at, "meta bytes")?;
            check(u32_at(bytes, at + 36) == 0, "reserved field")?;
            let start = end.next_multiple_of(alignment);
            end = start + payload_bytes;
            entries.push(IndexEntry {
                identity: BlockIdentity(identity),
                checksum: u64_at(bytes, at + 24),
                range: start..end,
                // A copy: a slice would keep the whole first read alive in the cache.
                meta: Bytes::copy_from_slice(&bytes[meta_at..meta_at + meta_bytes]),
            });
            meta_at += meta_bytes;
        }
        check(meta_at == index_bytes, "meta bytes")?;
        check(u64_at(bytes, 48) == end, "object bytes")?;
        Ok(Self {
            layout_fingerprint: u64_at(bytes, 16),
            created_unix_ms: u64_at(bytes, 24),
            object_bytes: end,
            entries,
        })
    }

    /// Approximate memory of the index, in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        let metas: usize = self.entries.iter().map(|entry| entry.meta.len()).sum();
        size_of::<Self>() + self.entries.len() * size_of::<IndexEntry>() + metas
    }
}

fn check(holds: bool, field: &'static str) -> Result<(), FormatError> {
    if holds { Ok(()) } else { Err(FormatError::Field(field)) }
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::Jitter;

    fn run(blocks: usize) -> Vec<Block> {
        let block = |number: usize| Block {
            identity: BlockIdentity((number as u128 + 1).to_le_bytes()),
            meta: Bytes::from(vec![7; number * 3]),
            payload: Bytes::from(vec![number as u8; 1000 + number]),
        };
        (0..blocks).map(block).collect()
    }

    fn bytes_of(encoded: &Encoded) -> Bytes {
        Bytes::from(encoded.pieces.concat())
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        for (blocks, alignment) in [(1, 1), (3, 64), (16, 4096), (RUN_BLOCKS_MAX, 512)] {
            let blocks = run(blocks);
            let encoded = encode(9, 77, alignment, &blocks).expect("valid run");
            let bytes = bytes_of(&encoded);
            let index = RunIndex::decode(&bytes).expect("own bytes");
            assert_eq!(index, encoded.index);
            assert_eq!(index.object_bytes, bytes.len() as u64);
            for (entry, block) in index.entries.iter().zip(&blocks) {
                assert_eq!(entry.range.start % u64::from(alignment), 0);
                assert_eq!(bytes[entry.range.start as usize..entry.range.end as usize], block.payload);
                assert_eq!((entry.identity, &entry.meta), (block.identity, &block.meta));
            }
        }
        assert_eq!(encode(9, 0, 4096, &[]).expect_err("no blocks"), FormatError::Field("blocks"));
    }

    #[test]
    fn every_flipped_bit_of_the_index_is_noticed() {
        let bytes = bytes_of(&encode(9, 77, 64, &run(4)).expect("valid run"));
        let index_bytes = u32_at(&bytes, 32) as usize;
        for bit in 0..index_bytes * 8 {
            let mut flipped = bytes.to_vec();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(RunIndex::decode(&flipped.into()).is_err(), "bit {bit} went unnoticed");
        }
        for length in 0..index_bytes {
            let short = RunIndex::decode(&bytes.slice(..length)).expect_err("cut off");
            assert!(matches!(short, FormatError::Short(needed) if needed > length));
        }
    }

    #[test]
    fn nonsense_with_a_valid_checksum_never_panics() {
        let seed = 0x0bad_5eed;
        println!("seed {seed}");
        let jitter = Jitter::new(seed);
        let original = bytes_of(&encode(9, 77, 64, &run(4)).expect("valid run"));
        let index_bytes = u32_at(&original, 32) as usize;
        let (mut accepted, rounds) = (0, 200_000);
        for _ in 0..rounds {
            let mut bytes = original.to_vec();
            for _ in 0..1 + jitter.below(4) {
                let at = 8 + jitter.below(index_bytes as u64 - 8) as usize;
                bytes[at] = jitter.below(256) as u8;
            }
            // Correct the checksum, so that the checks after it are reached.
            let end = (u32_at(&bytes, 32) as usize).clamp(HEADER_BYTES, bytes.len());
            bytes[CRC_OFFSET..CRC_OFFSET + 4].fill(0);
            let crc = crc32c::crc32c(&bytes[..end]);
            bytes[CRC_OFFSET..CRC_OFFSET + 4].copy_from_slice(&crc.to_le_bytes());
            if let Ok(index) = RunIndex::decode(&bytes.into()) {
                accepted += 1;
                let mut before = index_bytes as u64;
                for entry in &index.entries {
                    assert!(before <= entry.range.start && entry.range.start <= entry.range.end);
                    before = entry.range.end;
                }
                assert_eq!(before, index.object_bytes);
            }
        }
        assert!(accepted > 1000 && accepted < rounds, "{accepted} of {rounds} accepted: both paths ran");
    }
}
