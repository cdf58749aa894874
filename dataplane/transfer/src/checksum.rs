//! The checksums of pieces of slots, as the processor takes them: over the rows of a piece one after the other.
//!
//! xxh3-64 is the faster one here. The sum over lanes (`dataplane-checksum`) is the one that a GPU takes too: nodes whose
//! blocks stay in a device's memory use it, and then their peers do ([`crate::terms`]).
//!
//! Peers can write to the slab while we read, so the bytes are copied into a private buffer first: a slice
//! into shared memory would be a data race in the language's terms. The copy stays in the L1 cache.

use dataplane_checksum::{LANE_BYTES, Sum};
use dataplane_memory::Slab;
use xxhash_rust::xxh3::Xxh3;

const CHUNK_BYTES: usize = 8 << 10;
const _: () = assert!(CHUNK_BYTES.is_multiple_of(LANE_BYTES), "only the last chunk may end within a lane");

/// Which checksum the pieces of a connection carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Checksum {
    /// xxh3-64.
    Xxh3,
    /// The sum over lanes.
    Lanes,
}

impl Checksum {
    /// The sum of `len` bytes from `offset` on, which lie in rows of (bytes, stride).
    pub(crate) fn of_rows(
        self,
        slab: &Slab,
        slot: u32,
        offset: usize,
        len: usize,
        row: (usize, usize),
    ) -> u64 {
        let mut chunk = [0; CHUNK_BYTES];
        match self {
            Self::Xxh3 => {
                let mut hasher = Xxh3::new();
                gather(&mut chunk, slab, (slot, offset), len, row, |bytes| hasher.update(bytes));
                hasher.digest()
            }
            Self::Lanes => {
                let (mut sum, mut lane) = (Sum::default(), 0);
                gather(&mut chunk, slab, (slot, offset), len, row, |bytes| {
                    sum.add(lane, bytes);
                    lane += (bytes.len() / LANE_BYTES) as u64;
                });
                sum.seal(len as u64)
            }
        }
    }
}

/// Brings the rows' bytes chunk by chunk, each full but the last: checksums take long inputs faster, so small rows share
/// a chunk.
fn gather(
    chunk: &mut [u8; CHUNK_BYTES],
    slab: &Slab,
    from: (u32, usize),
    len: usize,
    row: (usize, usize),
    mut each: impl FnMut(&[u8]),
) {
    let (slot, offset) = from;
    // Rows without gaps are one row.
    let (row_bytes, stride) = if row.0 == row.1 { (len.max(1), 0) } else { row };
    let mut filled = 0;
    for number in 0..len / row_bytes.max(1) {
        let (mut at, end) = (offset + number * stride, offset + number * stride + row_bytes);
        while at < end {
            let bytes = (CHUNK_BYTES - filled).min(end - at);
            slab.read(slot, at, &mut chunk[filled..filled + bytes]);
            (at, filled) = (at + bytes, filled + bytes);
            if filled == CHUNK_BYTES {
                each(chunk);
                filled = 0;
            }
        }
    }
    each(&chunk[..filled]);
}

#[cfg(test)]
mod tests {
    use dataplane_memory::{PageSize, SlabLayout};

    use super::*;

    #[test]
    fn rows_have_the_sum_of_their_bytes_in_order() {
        let layout = SlabLayout { slot_bytes: 100_000, slot_count: 1 };
        let slab = Slab::create("sum", layout, PageSize::Standard).expect("slab");
        let bytes: Vec<u8> = (0..100_000_usize).map(|at| (at * 7 + at / 99) as u8).collect();
        slab.write(0, 0, &bytes);
        for (row, stride, count) in [
            (100, 300, 300),
            (9000, 10_000, 9),
            (64, 64, 1000),
            (8192, 9000, 5),
            (1, 2, 20_000),
            (8191, 8191, 3),
            (8192, 8192, 2),
            (5, 5, 1),
            (77, 100, 0),
        ] {
            let gathered: Vec<u8> =
                (0..count).flat_map(|number| bytes[10 + number * stride..][..row].to_vec()).collect();
            let sum = |kind: Checksum| kind.of_rows(&slab, 0, 10, row * count, (row, stride));
            assert_eq!(sum(Checksum::Xxh3), xxhash_rust::xxh3::xxh3_64(&gathered), "rows of {row}");
            assert_eq!(sum(Checksum::Lanes), dataplane_checksum::checksum(&gathered), "rows of {row}");
        }
    }
}
