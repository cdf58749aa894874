//! One launch: what to start, and the memory that a batch names.

use crate::error::PlanError;
use crate::parameters::{ChecksumParameters, CopyParameters, SumParameters};

/// What is to be launched. One launch works on a whole batch, waits for nothing on the host and can be
/// captured in a graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Name of the kernel.
    pub function: &'static str,
    /// Thread blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
    /// Dynamic shared memory.
    pub shared_bytes: u32,
    /// The kernel's one parameter.
    pub parameters: Parameters,
}

/// The one parameter of a kernel, a structure by value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parameters {
    /// Of gather and scatter.
    Copy(CopyParameters),
    /// Of the checksum.
    Checksum(ChecksumParameters),
}

impl Parameters {
    /// The structure as the kernel takes it, aligned to 8 bytes: the pointer to its first byte is the only
    /// entry of `cuLaunchKernel`'s array of parameters.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Copy(parameters) => bytemuck::bytes_of(parameters),
            Self::Checksum(parameters) => bytemuck::bytes_of(parameters),
        }
    }
}

/// What of the device decides how a batch is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    /// Its multiprocessors.
    pub multiprocessors: u32,
}

/// Places in memory that the device reaches, which one batch names. Each is a multiple of 16 unless stated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batch {
    /// Array of [`Item`](crate::Item).
    pub items: u64,
    /// Its length.
    pub count: u32,
    /// Array of each plane's first block's address (`u64`, in the slot's order); not read by the checksum.
    pub planes: u64,
    /// A status word (`u32`) for each item; bits of [`status`](crate::status) are added, so zero it before.
    pub status: u64,
    /// Where checksums go; `None`: none are taken.
    pub sums: Option<SumPlaces>,
}

/// Where a batch's checksums go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SumPlaces {
    /// Array of `u64`, one for each item, written.
    pub checksums: u64,
    /// Array of [`Scratch`](crate::Scratch), one for each item: zeroed once, and used by one launch at a
    /// time.
    pub scratch: u64,
    /// Array of the expected checksums, or 0. A difference sets
    /// [`status::CHECKSUM`](crate::status::CHECKSUM).
    pub expected: u64,
}

impl SumPlaces {
    pub(crate) fn parameters(places: Option<Self>) -> SumParameters {
        let none = Self { checksums: 0, scratch: 0, expected: 0 };
        let Self { checksums, scratch, expected } = places.unwrap_or(none);
        SumParameters { checksums, scratch, expected }
    }
}

/// The count of something, if the kernels can number it.
pub(crate) fn bounded(what: &'static str, count: u64) -> Result<u32, PlanError> {
    let most = crate::divider::DIVIDEND_END - 1;
    if count > most { Err(PlanError::TooMany { what, count, most }) } else { Ok(count as u32) }
}

/// How a batch is cut: (units of a tile, tiles of an item, tiles, thread blocks). Tiles are smaller when
/// there would be too few for the device; four loads a thread in flight otherwise.
pub(crate) fn cut(
    units: u32,
    items: u32,
    threads: u32,
    loads: u32,
    device: Device,
) -> Result<(u32, u32, u32, u32), PlanError> {
    if items == 0 {
        return Err(PlanError::Zero("the count of items"));
    }
    let tiles_for = |loads: u32| u64::from(items) * u64::from(units.div_ceil(threads * loads));
    let wanted = u64::from(device.multiprocessors) * 4;
    let loads =
        (0..=loads.ilog2()).rev().map(|log| 1 << log).find(|loads| tiles_for(*loads) >= wanted).unwrap_or(1);
    let tile_units = threads * loads;
    let tiles = bounded("tiles", tiles_for(loads))?;
    let grid = tiles.min(device.multiprocessors.max(1).saturating_mul(8));
    Ok((tile_units, units.div_ceil(tile_units), tiles, grid))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_small_block_and_many_large_ones_both_fill_the_device() {
        let device = Device { multiprocessors: 132 };
        // (bytes of a block, blocks) → (bytes of a tile, thread blocks), with units of 16 bytes.
        let cases = [
            ((4 << 10, 1), (4 << 10, 1)),
            ((4 << 10, 4096), (16 << 10, 1056)),
            ((2 << 20, 1), (4 << 10, 512)),
            ((5 << 20, 1), (8 << 10, 640)),
            ((16 << 20, 1), (16 << 10, 1024)),
            ((16 << 20, 4096), (16 << 10, 1056)),
        ];
        for ((bytes, items), (tile_bytes, grid)) in cases {
            let (tile_units, item_tiles, tiles, found) =
                cut(bytes / 16, items, 256, 4, device).expect("a cut");
            assert_eq!((tile_units * 16, found), (tile_bytes, grid), "{items} blocks of {bytes} bytes");
            assert_eq!(tiles, item_tiles * items);
            assert!(item_tiles * tile_units >= bytes / 16);
        }
        let too_many = cut((1 << 31) - 1, 4096, 256, 4, device);
        assert!(matches!(too_many, Err(PlanError::TooMany { what: "tiles", .. })));
        assert_eq!(cut(1, 0, 256, 4, device), Err(PlanError::Zero("the count of items")));
    }
}
