//! Reference implementation of the kernels on a processor: the oracle of the tests, and a replacement where
//! there is no GPU.

use crate::layout::{HeadRange, PagedLayout, SlotLayout};

/// Copies a block from the engine's memory, in which each plane's first block has an offset, into a slot.
pub fn gather(
    (paged, slot, heads): (&PagedLayout, &SlotLayout, HeadRange),
    engine: &[u8],
    (planes, block): (&[u64], u64),
    target: &mut [u8],
) {
    let bytes = slot.head_bytes as usize;
    for (plane, from, to) in places(paged, slot, heads, block) {
        let from = planes[plane] as usize + from;
        target[to..to + bytes].copy_from_slice(&engine[from..from + bytes]);
    }
}

/// Copies a slot into a block of the engine's memory.
pub fn scatter(
    (paged, slot, heads): (&PagedLayout, &SlotLayout, HeadRange),
    source: &[u8],
    (planes, block): (&[u64], u64),
    engine: &mut [u8],
) {
    let bytes = slot.head_bytes as usize;
    for (plane, to, from) in places(paged, slot, heads, block) {
        let to = planes[plane] as usize + to;
        engine[to..to + bytes].copy_from_slice(&source[from..from + bytes]);
    }
}

/// Returns (plane, offset in the plane, offset in the slot) for each head of each token of each plane.
fn places(
    paged: &PagedLayout,
    slot: &SlotLayout,
    heads: HeadRange,
    block: u64,
) -> impl Iterator<Item = (usize, usize, usize)> {
    let (paged, slot) = (*paged, *slot);
    let numbers = move |plane: u32, token: u32, head: u32| {
        let in_engine = block * paged.block_stride
            + u64::from(token) * paged.token_stride
            + u64::from(heads.paged_first + head) * paged.head_stride;
        let head_in_slot = u64::from(token) * u64::from(slot.heads) + u64::from(heads.slot_first + head);
        let in_slot = slot.first_byte
            + u64::from(plane) * slot.plane_stride
            + head_in_slot * u64::from(slot.head_bytes);
        (plane as usize, in_engine as usize, in_slot as usize)
    };
    (0..slot.planes).flat_map(move |plane| {
        (0..slot.tokens).flat_map(move |token| (0..heads.count).map(move |head| numbers(plane, token, head)))
    })
}
