//! xxh3-64 over rows of a slot.
//!
//! Peers can write to the slab while we read, so the bytes are copied into a private buffer first: a slice
//! into shared memory would be a data race in the language's terms. The copy stays in the L1 cache.

use dataplane_memory::Slab;
use xxhash_rust::xxh3::Xxh3;

const CHUNK_BYTES: usize = 8 << 10;

/// The sum of `len` bytes from `offset` on, which lie in rows of (bytes, stride).
pub(crate) fn of_rows(slab: &Slab, slot: u32, offset: usize, len: usize, row: (usize, usize)) -> u64 {
    let (row_bytes, stride) = row;
    let mut hasher = Xxh3::new();
    let mut chunk = [0; CHUNK_BYTES];
    if row_bytes == stride {
        hash_range(&mut hasher, &mut chunk, slab, (slot, offset), len);
        return hasher.digest();
    }
    // Small rows share a chunk: the hash takes long inputs faster.
    let mut filled = 0;
    for number in 0..len / row_bytes.max(1) {
        let at = offset + number * stride;
        if row_bytes > CHUNK_BYTES {
            hash_range(&mut hasher, &mut chunk, slab, (slot, at), row_bytes);
            continue;
        }
        if filled + row_bytes > CHUNK_BYTES {
            hasher.update(&chunk[..filled]);
            filled = 0;
        }
        slab.read(slot, at, &mut chunk[filled..filled + row_bytes]);
        filled += row_bytes;
    }
    hasher.update(&chunk[..filled]);
    hasher.digest()
}

fn hash_range(hasher: &mut Xxh3, chunk: &mut [u8], slab: &Slab, from: (u32, usize), len: usize) {
    let (slot, mut at) = from;
    let end = at + len;
    while at < end {
        let bytes = chunk.len().min(end - at);
        slab.read(slot, at, &mut chunk[..bytes]);
        hasher.update(&chunk[..bytes]);
        at += bytes;
    }
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
        for (row, stride, count) in
            [(100, 300, 300), (9000, 10_000, 9), (64, 64, 1000), (8192, 9000, 5), (1, 2, 20_000)]
        {
            let gathered: Vec<u8> =
                (0..count).flat_map(|number| bytes[10 + number * stride..][..row].to_vec()).collect();
            let expected = xxhash_rust::xxh3::xxh3_64(&gathered);
            assert_eq!(of_rows(&slab, 0, 10, row * count, (row, stride)), expected, "rows of {row}");
        }
    }
}
