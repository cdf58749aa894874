//! xxh3-64 over a range of a slot.
//!
//! Peers can write to the slab while we read, so the bytes are copied into a private buffer first: a slice
//! into shared memory would be a data race in the language's terms. The copy stays in the L1 cache.

use dataplane_memory::Slab;
use xxhash_rust::xxh3::Xxh3;

const CHUNK_BYTES: usize = 8 << 10;

pub(crate) fn of_range(slab: &Slab, slot: u32, offset: usize, len: usize) -> u64 {
    let mut hasher = Xxh3::new();
    let mut chunk = [0; CHUNK_BYTES];
    let mut at = offset;
    while at < offset + len {
        let bytes = CHUNK_BYTES.min(offset + len - at);
        slab.read(slot, at, &mut chunk[..bytes]);
        hasher.update(&chunk[..bytes]);
        at += bytes;
    }
    hasher.digest()
}
