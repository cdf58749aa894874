//! How a block lies in a slot: a head and the payload.
//!
//! ```text
//! 0        2      2 + meta bytes    head, a multiple of 64
//! | length | meta | zeros           | payload …
//! ```
//!
//! The length is that of the meta, a little-endian u16. The meta lies with the payload, so that one checksum proves both,
//! in every tier and after a restart; beside it, as the disk's log could keep it, it would not come back with a read.
//! The payload begins on a cache line.

use std::collections::TryReserveError;

use crate::buffers::{Destination, Source};

/// Longest meta.
pub const META_BYTES_MAX: usize = kvstore_store::META_BYTES_MAX;
/// The head of a block without meta: zeros.
pub(crate) const HEAD_BYTES_MIN: usize = head_bytes(0);
/// Longest head.
pub(crate) const HEAD_BYTES_MAX: usize = head_bytes(META_BYTES_MAX);

const LENGTH_BYTES: usize = size_of::<u16>();
const LINE_BYTES: usize = 64;

const fn head_bytes(meta_bytes: usize) -> usize {
    (LENGTH_BYTES + meta_bytes).next_multiple_of(LINE_BYTES)
}

/// A block as it is stored, if there is memory for it. The meta must not be longer than [`META_BYTES_MAX`].
pub(crate) fn pack(meta: &Source, payload: &Source) -> Result<Vec<u8>, TryReserveError> {
    let mut block = head(meta, payload.len())?;
    payload.pieces().for_each(|piece| block.extend_from_slice(piece));
    Ok(block)
}

/// The head of a block, with room for so many bytes more.
pub(crate) fn head(meta: &Source, more: usize) -> Result<Vec<u8>, TryReserveError> {
    let head = head_bytes(meta.len());
    let mut block = Vec::new();
    block.try_reserve_exact(head.saturating_add(more))?;
    block.extend_from_slice(&(meta.len() as u16).to_le_bytes());
    meta.pieces().for_each(|piece| block.extend_from_slice(piece));
    block.resize(head, 0);
    Ok(block)
}

/// Whether these bytes can be the start of a block of `bytes`; the head must be in `start`.
pub(crate) fn is_block(start: &[u8], bytes: usize) -> bool {
    meta(start, bytes).is_some()
}

/// The meta at the start of a block of `bytes`, if there can be one; the head must be in `start`.
fn meta(start: &[u8], bytes: usize) -> Option<&[u8]> {
    let (length, rest) = start.split_first_chunk::<LENGTH_BYTES>()?;
    let length = usize::from(u16::from_le_bytes(*length));
    let head = head_bytes(length);
    (length <= META_BYTES_MAX && head <= bytes && head <= start.len()).then(|| &rest[..length])
}

/// What became of a block's pieces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unpacked {
    /// It is where it was wanted.
    Whole,
    /// It has no room there; nothing was written.
    TooSmall { meta_bytes: usize, payload_bytes: usize },
    /// It is no block.
    Nonsense,
}

/// Takes a block's pieces to where its meta and its payload are wanted.
pub(crate) struct Unpacker<'a> {
    bytes: usize,
    meta: &'a mut Destination,
    payload: &'a mut Destination,
    /// Not there before the first piece.
    unpacked: Option<Unpacked>,
}

impl<'a> Unpacker<'a> {
    /// For a block of `bytes` in all.
    pub(crate) fn new(bytes: usize, meta: &'a mut Destination, payload: &'a mut Destination) -> Self {
        Self { bytes, meta, payload, unpacked: None }
    }

    /// Takes the next piece; the first one has the whole head.
    pub(crate) fn take(&mut self, piece: &[u8]) {
        let payload = match self.unpacked {
            None => self.begin(piece),
            Some(_) => piece,
        };
        if self.unpacked == Some(Unpacked::Whole) && !self.payload.write(payload) {
            // More bytes than the block was said to have.
            self.unpacked = Some(Unpacked::Nonsense);
        }
    }

    /// Reads the head and writes the meta; gives the part of the payload behind it.
    fn begin<'p>(&mut self, piece: &'p [u8]) -> &'p [u8] {
        let Some(found) = meta(piece, self.bytes) else {
            self.unpacked = Some(Unpacked::Nonsense);
            return &[];
        };
        let (meta_bytes, head) = (found.len(), head_bytes(found.len()));
        let payload_bytes = self.bytes - head;
        let fits = payload_bytes <= self.payload.room() && self.meta.write(found);
        self.unpacked =
            Some(if fits { Unpacked::Whole } else { Unpacked::TooSmall { meta_bytes, payload_bytes } });
        &piece[head..]
    }

    /// What became of it.
    pub(crate) fn finish(self) -> Unpacked {
        self.unpacked.unwrap_or(Unpacked::Nonsense)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffers::{Buffer, Ranges};

    fn ranges(bytes: &mut [u8]) -> Ranges {
        Ranges::check(&[Buffer { start: bytes.as_mut_ptr().cast(), bytes: bytes.len() }]).expect("valid")
    }

    fn packed(meta: &mut [u8], payload: &mut [u8]) -> Vec<u8> {
        // SAFETY: both slices outlive the sources, and nobody writes to them meanwhile.
        let meta = unsafe { Source::new(ranges(meta)) };
        // SAFETY: as above.
        let payload = unsafe { Source::new(ranges(payload)) };
        pack(&meta, &payload).expect("memory")
    }

    fn unpacked(block: &[u8], piece: usize, meta: &mut [u8], payload: &mut [u8]) -> Unpacked {
        // SAFETY: both slices are this function's alone for as long as the destinations live.
        let mut meta = unsafe { Destination::new(ranges(meta)) };
        // SAFETY: as above.
        let mut payload = unsafe { Destination::new(ranges(payload)) };
        let mut unpacker = Unpacker::new(block.len(), &mut meta, &mut payload);
        block.chunks(piece).for_each(|piece| unpacker.take(piece));
        unpacker.finish()
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
                assert_eq!(unpacked(&block, HEAD_BYTES_MAX, &mut got, &mut body), Unpacked::Whole);
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
            assert_eq!(unpacked(&block, 1000, &mut meta, &mut payload), needed);
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
            assert_eq!(unpacked(&block, 1024, &mut meta, &mut payload), expected);
        }
    }
}
