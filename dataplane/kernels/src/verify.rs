//! Checksums of slots in device memory.

use crate::divider::Divider;
use crate::error::PlanError;
use crate::launch::{Batch, ChecksumArrays, Device, Launch, Parameters, bounded, cut};
use crate::parameters::ChecksumParameters;

const THREADS: u32 = 256;
const LOADS: u32 = 4;
const UNIT_BYTES: u64 = 16;

/// Plan for checksums of slots of one size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChecksumPlan {
    bytes: u64,
    is_aligned: bool,
}

impl ChecksumPlan {
    /// Creates a plan for slots of `bytes` bytes whose addresses are multiples of `alignment`; from 16 on the
    /// fast kernel is used.
    pub fn new(bytes: u64, alignment: u64) -> Result<Self, PlanError> {
        if bytes == 0 {
            return Err(PlanError::Zero("a slot's size"));
        }
        bounded("units of an item", bytes.div_ceil(UNIT_BYTES))?;
        Ok(Self { bytes, is_aligned: alignment.is_multiple_of(UNIT_BYTES) && alignment != 0 })
    }

    /// Creates the launch for a batch. Blocks of the items and planes are not read. The kernel reads
    /// [`Batch::count`] × bytes and writes 8 bytes per item.
    pub fn launch(&self, batch: &Batch, device: Device) -> Result<Launch, PlanError> {
        let Some(sums) = batch.sums else {
            return Err(PlanError::Checksum("the batch has no place for it"));
        };
        let units = bounded("units of an item", self.bytes.div_ceil(UNIT_BYTES))?;
        let (tile_units, item_tiles, tiles, grid) = cut(units, batch.count, THREADS, LOADS, device)?;
        let parameters = ChecksumParameters {
            items: batch.items,
            status: batch.status,
            sums: ChecksumArrays::parameters(Some(sums)),
            bytes: self.bytes,
            tiles,
            tile_units,
            units,
            item_tiles: Divider::new(item_tiles),
        };
        Ok(Launch {
            function: if self.is_aligned { "kvasir_checksum_16" } else { "kvasir_checksum_1" },
            grid: [grid, 1, 1],
            block: [THREADS, 1, 1],
            shared_bytes: 0,
            parameters: Parameters::Checksum(parameters),
        })
    }
}
