//! Format of a block in a slot: a head, then the payload.
//!
//! ```text
//! 0        2      2 + meta bytes    head, a multiple of 64
//! | length | meta | zeros           | payload …
//! ```
//!
//! The length is that of the meta, a little-endian u16. The meta is stored with the payload, so that one
//! checksum covers both in every tier and after a restart. Stored beside it, in the disk's log, the meta would
//! not come back with a read. The payload begins on a cache line.

use std::collections::TryReserveError;
use std::mem::MaybeUninit;

use kvstore_store::BlockRead;

use crate::buffers::{Destination, Source};

/// Longest meta.
pub const META_BYTES_MAX: usize = kvstore_store::META_BYTES_MAX;
/// Bytes of the head of a block without meta, which is all zeros.
pub(crate) const HEAD_BYTES_MIN: usize = head_bytes(0);
/// Longest head.
pub(crate) const HEAD_BYTES_MAX: usize = head_bytes(META_BYTES_MAX);

const LENGTH_BYTES: usize = size_of::<u16>();
const LINE_BYTES: usize = 64;

const fn head_bytes(meta_bytes: usize) -> usize {
    (LENGTH_BYTES + meta_bytes).next_multiple_of(LINE_BYTES)
}

/// Packs a block into its stored form. Fails if there is no memory for it. The meta must not be longer than
/// [`META_BYTES_MAX`].
pub(crate) fn pack(meta: &Source, payload: &Source) -> Result<Vec<u8>, TryReserveError> {
    let mut block = head(meta, payload.len())?;
    payload.pieces().for_each(|piece| block.extend_from_slice(piece));
    Ok(block)
}

/// Returns the head of a block, with spare capacity for `more` bytes.
pub(crate) fn head(meta: &Source, more: usize) -> Result<Vec<u8>, TryReserveError> {
    let head = head_bytes(meta.len());
    let mut block = Vec::new();
    block.try_reserve_exact(head.saturating_add(more))?;
    block.extend_from_slice(&(meta.len() as u16).to_le_bytes());
    meta.pieces().for_each(|piece| block.extend_from_slice(piece));
    block.resize(head, 0);
    Ok(block)
}

/// Returns the meta of a block of `bytes`, if the bytes can be a block. The head must be in `start`.
fn meta(start: &[u8], bytes: usize) -> Option<&[u8]> {
    let (length, rest) = start.split_first_chunk::<LENGTH_BYTES>()?;
    let length = usize::from(u16::from_le_bytes(*length));
    let head = head_bytes(length);
    (length <= META_BYTES_MAX && head <= bytes && head <= start.len()).then(|| &rest[..length])
}

/// The outcome of unpacking a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unpacked {
    /// The block was copied to the destinations.
    Whole,
    /// The destinations are too small; nothing was written.
    TooSmall { meta_bytes: usize, payload_bytes: usize },
    /// The bytes are not a block.
    Nonsense,
}

/// Sequential reader of a block's bytes.
pub(crate) trait BlockBytes {
    /// The next 64 bytes; `None` when there are fewer.
    fn line(&mut self) -> Option<[u8; LINE_BYTES]>;
    /// Copies the next bytes; false when there are fewer.
    fn copy(&mut self, target: &mut [MaybeUninit<u8>]) -> bool;
}

impl BlockBytes for BlockRead<'_> {
    fn line(&mut self) -> Option<[u8; LINE_BYTES]> {
        self.read_lanes()
    }

    fn copy(&mut self, target: &mut [MaybeUninit<u8>]) -> bool {
        Self::copy(self, target)
    }
}

/// Copies the meta and the payload of a block of `bytes` to the destinations.
pub(crate) fn unpack(
    block: &mut impl BlockBytes,
    bytes: usize,
    meta_place: &mut Destination,
    payload_place: &mut Destination,
) -> Unpacked {
    let Some((head, head_bytes)) = read_head(block, bytes) else { return Unpacked::Nonsense };
    let Some(found) = meta(&head[..head_bytes], bytes) else { return Unpacked::Nonsense };
    let payload_bytes = bytes - head_bytes;
    if payload_bytes > payload_place.room() || !meta_place.write(found) {
        return Unpacked::TooSmall { meta_bytes: found.len(), payload_bytes };
    }
    if payload_place.next(payload_bytes).all(|piece| block.copy(piece)) {
        Unpacked::Whole
    } else {
        Unpacked::Nonsense
    }
}

/// Whether the bytes begin like a block of `bytes`.
pub(crate) fn is_block(block: &mut impl BlockBytes, bytes: usize) -> bool {
    read_head(block, bytes).is_some_and(|(head, head_bytes)| meta(&head[..head_bytes], bytes).is_some())
}

/// Reads the head of a block. Returns it with its length.
fn read_head(block: &mut impl BlockBytes, bytes: usize) -> Option<([u8; HEAD_BYTES_MAX], usize)> {
    let mut head = [0; HEAD_BYTES_MAX];
    let first = block.line()?;
    let length = usize::from(u16::from_le_bytes(*first.first_chunk()?));
    let head_bytes = head_bytes(length);
    if length > META_BYTES_MAX || head_bytes > bytes {
        return None;
    }
    head[..LINE_BYTES].copy_from_slice(&first);
    for line in head[LINE_BYTES..head_bytes].chunks_exact_mut(LINE_BYTES) {
        line.copy_from_slice(&block.line()?);
    }
    Some((head, head_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffers::{Buffer, Ranges};

    fn ranges(bytes: &mut [u8]) -> Ranges {
        Ranges::check(&[Buffer { start: bytes.as_mut_ptr().cast(), bytes: bytes.len() }]).expect("valid")
    }

    fn packed(meta: &mut [u8], payload: &mut [u8]) -> Vec<u8> {
        // SAFETY: both slices outlive the sources, and are not written to meanwhile.
        let meta = unsafe { Source::new(ranges(meta)) };
        // SAFETY: as above.
        let payload = unsafe { Source::new(ranges(payload)) };
        pack(&meta, &payload).expect("memory")
    }

    struct Bytes<'a>(&'a [u8]);

    impl BlockBytes for Bytes<'_> {
        fn line(&mut self) -> Option<[u8; LINE_BYTES]> {
            let (line, rest) = self.0.split_first_chunk()?;
            self.0 = rest;
            Some(*line)
        }

        fn copy(&mut self, target: &mut [MaybeUninit<u8>]) -> bool {
            let Some((now, rest)) = self.0.split_at_checked(target.len()) else { return false };
            for (target, byte) in target.iter_mut().zip(now) {
                target.write(*byte);
            }
            self.0 = rest;
            true
        }
    }

    fn unpacked(block: &[u8], meta: &mut [u8], payload: &mut [u8]) -> Unpacked {
        // SAFETY: both slices are this function's alone for as long as the destinations live.
        let mut meta = unsafe { Destination::new(ranges(meta)) };
        // SAFETY: as above.
        let mut payload = unsafe { Destination::new(ranges(payload)) };
        unpack(&mut Bytes(block), block.len(), &mut meta, &mut payload)
    }

    #[test]
    fn blocks_of_all_sizes_come_back() {
        for meta_bytes in [0, 1, 61, 62, 63, META_BYTES_MAX] {
            for payload_bytes in [0, 1, 64, 5000] {
                let mut meta: Vec<u8> = (0..meta_bytes).map(|at| at as u8).collect();
                let mut payload: Vec<u8> = (0..payload_bytes).map(|at| (at * 7) as u8).collect();
                let block = packed(&mut meta, &mut payload);
                assert_eq!((block.len() - payload_bytes) % 64, 0);
                assert!(block.len() <= HEAD_BYTES_MAX + payload_bytes);
                let (mut got, mut body) = (vec![9; meta_bytes], vec![9; payload_bytes]);
                assert_eq!(unpacked(&block, &mut got, &mut body), Unpacked::Whole);
                assert_eq!((got, body), (meta, payload));
            }
        }
    }

    #[test]
    fn no_memory_is_an_answer() {
        let start = std::ptr::NonNull::<u8>::dangling().as_ptr().cast();
        let huge = Ranges::check(&[Buffer { start, bytes: 1 << 62 }]).expect("a length");
        // SAFETY: nothing is read: there is no memory for the copy.
        let payload = unsafe { Source::new(huge) };
        // SAFETY: it has no bytes.
        let meta = unsafe { Source::new(ranges(&mut [])) };
        assert!(pack(&meta, &payload).is_err());
    }

    #[test]
    fn too_little_room_leaves_everything_as_it_was() {
        let block = packed(&mut [1; 10], &mut [2; 100]);
        for (meta_room, payload_room) in [(9, 100), (10, 99), (0, 0)] {
            let (mut meta, mut payload) = (vec![7; meta_room], vec![7; payload_room]);
            let needed = Unpacked::TooSmall { meta_bytes: 10, payload_bytes: 100 };
            assert_eq!(unpacked(&block, &mut meta, &mut payload), needed);
            assert!(meta.iter().chain(&payload).all(|byte| *byte == 7));
        }
    }

    #[test]
    fn any_bytes_are_a_block_or_nonsense() {
        let mut state = 0x5EED_u64;
        println!("seed {state:#x}");
        for _ in 0..20_000 {
            let mut random = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 40) as usize
            };
            let mut block: Vec<u8> = (0..random() % 600).map(|_| random() as u8).collect();
            if let Some(high) = block.get_mut(1) {
                *high &= 3;
            }
            let (mut meta, mut payload) = (vec![0; META_BYTES_MAX], vec![0; 600]);
            let length = block.first_chunk().map(|length| usize::from(u16::from_le_bytes(*length)));
            let is_block =
                length.is_some_and(|length| length <= META_BYTES_MAX && head_bytes(length) <= block.len());
            let expected = if is_block { Unpacked::Whole } else { Unpacked::Nonsense };
            assert_eq!(unpacked(&block, &mut meta, &mut payload), expected);
        }
    }
}
