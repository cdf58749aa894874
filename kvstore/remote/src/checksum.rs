//! The checksum sent with a block: `dataplane-checksum` of its bytes, XORed with a word derived from its identity, so that right bytes
//! under a wrong identity fail. Either checksum follows from the other without reading the block.
//!
//! Peers can write to the slab concurrently: each byte is read once.

use dataplane_checksum::Sum;
use dataplane_memory::SlotRef;
use kvstore_block::BlockIdentity;

/// Combines a block's checksum with its identity. Applied twice, it returns the original checksum.
#[must_use]
pub fn with_identity(checksum: u64, identity: &BlockIdentity) -> u64 {
    // A bijection of a word (SplitMix64's finish): identities that differ in these 64 bits give different words.
    let mixed = identity.short().wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    checksum ^ mixed ^ mixed >> 31
}

/// The checksum of the first `bytes` bytes of `slot`, as the block `identity`. Panics when the slot is smaller.
#[must_use]
pub fn checksum(identity: &BlockIdentity, slot: &SlotRef, bytes: usize) -> u64 {
    let mut sum = Sum::default();
    slot.slab().add_to_sum(slot.slot(), 0, bytes, &mut sum);
    with_identity(sum.seal(bytes as u64), identity)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use dataplane_memory::{PageSize, Slab, SlabLayout, SlotPool};

    use super::*;

    #[test]
    fn every_bit_and_the_identity_count() {
        let layout = SlabLayout { slot_bytes: 100_000, slot_count: 1 };
        let pool = SlotPool::new(Arc::new(Slab::create("sum", layout, PageSize::Standard).expect("slab")));
        let slot = pool.acquire().expect("slot");
        let bytes: Vec<u8> = (0..100_000_u32).map(|at| (at * 31 + at / 251) as u8).collect();
        slot.slab().write(slot.slot(), 0, &bytes);
        let (one, other) = (BlockIdentity([1; 16]), BlockIdentity([2; 16]));
        let expected = with_identity(dataplane_checksum::checksum(&bytes), &one);
        assert_eq!(checksum(&one, &slot, 100_000), expected);
        assert_ne!(checksum(&other, &slot, 100_000), expected);
        assert_ne!(checksum(&one, &slot, 99_999), expected);
        assert_eq!(with_identity(expected, &one), dataplane_checksum::checksum(&bytes));
        // A flipped bit is found at every position.
        for at in [0, 7, 8191, 8192, 50_001, 99_999] {
            slot.slab().write(slot.slot(), at, &[bytes[at] ^ 0x80]);
            assert_ne!(checksum(&one, &slot, 100_000), expected, "byte {at}");
            slot.slab().write(slot.slot(), at, &bytes[at..=at]);
        }
    }
}
