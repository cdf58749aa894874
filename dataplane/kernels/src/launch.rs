//! Launches: the kernel to start, and the memory that a batch names.

use crate::error::PlanError;
use crate::parameters::{ChecksumParameters, CopyParameters, SumParameters};

/// A kernel launch. One launch works on a whole batch and waits for nothing on the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Launch {
    /// Name of the kernel.
    pub function: &'static str,
    /// Number of thread blocks in x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y, z.
    pub block: [u32; 3],
    /// Dynamic shared memory in bytes.
    pub shared_bytes: u32,
    /// The kernel's only parameter.
    pub parameters: Parameters,
}

/// The only parameter of a kernel, a structure passed by value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Parameters {
    /// Parameters of gather and scatter.
    Copy(CopyParameters),
    /// Parameters of the checksum.
    Checksum(ChecksumParameters),
}

impl Parameters {
    /// Returns the structure in the kernel's layout, aligned to 8 bytes: the pointer to its first byte is the
    /// only entry of `cuLaunchKernel`'s array of parameters.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        match self {
            Self::Copy(parameters) => bytemuck::bytes_of(parameters),
            Self::Checksum(parameters) => bytemuck::bytes_of(parameters),
        }
    }
}

/// Properties of the device that decide how a batch is divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    /// Number of multiprocessors.
    pub multiprocessors: u32,
}

/// Device addresses of one batch. Each is a multiple of 16 unless stated otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Batch {
    /// Array of [`Item`](crate::Item).
    pub items: u64,
    /// Number of items.
    pub count: u32,
    /// Array of the addresses of the planes' first blocks (`u64`, in the slot's order); not read by the
    /// checksum.
    pub planes: u64,
    /// Array of status words (`u32`), one per item. Bits of [`status`](crate::status) are ORed in, so zero it
    /// before.
    pub status: u64,
    /// Arrays for checksums; `None`: no checksums are taken.
    pub sums: Option<ChecksumArrays>,
}

/// Device addresses of a batch's checksum arrays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChecksumArrays {
    /// Array of `u64`, one per item, that is written.
    pub checksums: u64,
    /// Array of [`Scratch`](crate::Scratch), one per item: zeroed once, and used by one launch at a time.
    pub scratch: u64,
    /// Array of the expected checksums, or 0. A difference sets
    /// [`status::CHECKSUM`](crate::status::CHECKSUM).
    pub expected: u64,
}

impl ChecksumArrays {
    pub(crate) fn parameters(places: Option<Self>) -> SumParameters {
        let none = Self { checksums: 0, scratch: 0, expected: 0 };
        let Self { checksums, scratch, expected } = places.unwrap_or(none);
        SumParameters { checksums, scratch, expected }
    }
}

/// Returns the count as 32 bits; an error when it is above the kernels' limit.
pub(crate) fn bounded(what: &'static str, count: u64) -> Result<u32, PlanError> {
    let most = crate::divider::DIVIDEND_END - 1;
    if count > most { Err(PlanError::TooMany { what, count, most }) } else { Ok(count as u32) }
}

/// Divides a batch: returns (units of a tile, tiles of an item, tiles, thread blocks). With fewer than four
/// tiles per multiprocessor the tiles become smaller; otherwise each thread has `loads` loads in flight.
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
