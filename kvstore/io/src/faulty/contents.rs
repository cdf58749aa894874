//! Contents of requests: copied, torn and flipped.

use super::SECTOR_BYTES;
use crate::testing::Random;
use crate::{Buffer, PageBuffer};

pub(super) fn copy_of_bytes(bytes: &[u8]) -> PageBuffer {
    let mut copy = PageBuffer::zeroed(bytes.len());
    copy.copy_from_slice(bytes);
    copy
}

pub(super) fn copy_of(buffer: &Buffer) -> PageBuffer {
    match buffer {
        Buffer::Slot { slot, offset, len } => {
            let mut copy = PageBuffer::zeroed(*len);
            slot.slab().read(slot.slot(), *offset, &mut copy);
            copy
        }
        Buffer::Pages(pages) => copy_of_bytes(pages),
    }
}

/// Restores the old contents of some sectors: of all from one on, or of random ones.
pub(super) fn tear(random: &mut Random, old: &[u8], new: &mut [u8]) {
    let sectors = new.len() / SECTOR_BYTES;
    let prefix = random.chance(0.5);
    // At least one sector keeps its old contents.
    let landed = random.below(sectors as u64) as usize;
    for sector in 0..sectors {
        let lost = if prefix { sector >= landed } else { sector == landed || random.chance(0.5) };
        if lost {
            let range = sector * SECTOR_BYTES..(sector + 1) * SECTOR_BYTES;
            new[range.clone()].copy_from_slice(&old[range]);
        }
    }
}

pub(super) fn flip(random: &mut Random, bytes: &mut [u8]) {
    let bit = random.below(bytes.len() as u64 * 8);
    bytes[(bit / 8) as usize] ^= 1 << (bit % 8);
}

pub(super) fn flip_in(random: &mut Random, buffer: &mut Buffer) {
    match buffer {
        Buffer::Pages(pages) => flip(random, pages),
        Buffer::Slot { slot, offset, len } => {
            let bit = random.below(*len as u64 * 8);
            let (at, mut byte) = (*offset + (bit / 8) as usize, [0]);
            slot.slab().read(slot.slot(), at, &mut byte);
            slot.slab().write(slot.slot(), at, &[byte[0] ^ 1 << (bit % 8)]);
        }
    }
}
