//! Contents of a block: a function of its identity, so that every byte read back can be compared.

use dataplane_memory::SlotRef;
use kvstore_block::BlockIdentity;

/// Bytes generated and compared at a time; slots are multiples of it.
const CHUNK_BYTES: usize = 4096;
/// Byte with which a slot is filled before a block is expected in it, so that an earlier block is not taken for it.
const EMPTY: u8 = 0xA5;

/// The bytes of one identity, in order.
struct Content {
    state: u64,
    chunk: [u8; CHUNK_BYTES],
}

impl Content {
    fn of(identity: &BlockIdentity) -> Self {
        let halves = identity.0.as_chunks::<8>().0;
        let state =
            halves.iter().fold(0, |state: u64, half| state.rotate_left(31) ^ u64::from_le_bytes(*half));
        Self { state, chunk: [0; CHUNK_BYTES] }
    }

    fn next(&mut self) -> &[u8; CHUNK_BYTES] {
        for word in self.chunk.as_chunks_mut::<8>().0 {
            self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mixed = (self.state ^ self.state >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            *word = (mixed ^ mixed >> 29).to_le_bytes();
        }
        &self.chunk
    }
}

/// Fills a slot with a block.
pub(super) fn fill(slot: &SlotRef, identity: &BlockIdentity) {
    let mut content = Content::of(identity);
    for at in (0..slot.slab().layout().slot_bytes).step_by(CHUNK_BYTES) {
        slot.slab().write(slot.slot(), at, content.next());
    }
}

/// Fills a slot with bytes that no block has.
pub(super) fn clear(slot: &SlotRef) {
    for at in (0..slot.slab().layout().slot_bytes).step_by(CHUNK_BYTES) {
        slot.slab().write(slot.slot(), at, &[EMPTY; CHUNK_BYTES]);
    }
}

/// Number of bytes of a slot that differ from the block's.
pub(super) fn wrong_in_slot(slot: &SlotRef, identity: &BlockIdentity) -> u64 {
    let mut found = [0; CHUNK_BYTES];
    let mut content = Content::of(identity);
    let starts = (0..slot.slab().layout().slot_bytes).step_by(CHUNK_BYTES);
    starts
        .map(|at| {
            slot.slab().read(slot.slot(), at, &mut found);
            differing(&found, content.next())
        })
        .sum()
}

/// Number of bytes that differ from the block's.
pub(super) fn wrong_in_bytes(bytes: &[u8], identity: &BlockIdentity) -> u64 {
    let mut content = Content::of(identity);
    bytes.chunks(CHUNK_BYTES).map(|found| differing(found, content.next())).sum()
}

fn differing(found: &[u8], expected: &[u8]) -> u64 {
    if found == expected {
        return 0;
    }
    found.iter().zip(expected).filter(|(found, expected)| found != expected).count() as u64
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool};

    use super::*;

    #[test]
    fn one_wrong_byte_is_one_and_another_block_is_nearly_all() {
        let layout = SlabLayout { slot_bytes: 12_288, slot_count: 1 };
        let slab = Arc::new(Slab::create("content", layout, PageSize::Standard).expect("a slab"));
        let slot = SlotPool::new(slab).acquire().expect("a slot");
        let (block, other) = (BlockIdentity([7; 16]), BlockIdentity([8; 16]));
        fill(&slot, &block);
        assert_eq!(wrong_in_slot(&slot, &block), 0);
        let mut bytes = vec![0; layout.slot_bytes];
        slot.slab().read(slot.slot(), 0, &mut bytes);
        assert_eq!(wrong_in_bytes(&bytes, &block), 0);
        assert!(wrong_in_bytes(&bytes, &other) > 12_000);
        bytes[12_287] ^= 1;
        slot.slab().write(slot.slot(), 12_287, &bytes[12_287..]);
        assert_eq!((wrong_in_bytes(&bytes, &block), wrong_in_slot(&slot, &block)), (1, 1));
        clear(&slot);
        assert!(wrong_in_slot(&slot, &block) > 12_000);
    }
}
