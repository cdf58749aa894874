//! Gather and scatter: division of a layout and a slot into runs, units and tiles.

use crate::divider::Divider;
use crate::error::PlanError;
use crate::launch::{Batch, ChecksumArrays, Device, Launch, Parameters, bounded, cut};
use crate::layout::{HeadRange, PagedLayout, SlotLayout, agree, alignment_of};
use crate::parameters::{CopyParameters, PagedParameters};

const THREADS: u32 = 256;
const LOADS: u32 = 4;

/// Direction of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the engine to slots.
    Gather,
    /// From slots to the engine.
    Scatter,
}

/// Plan for copies of blocks of one layout. Made once, launched for every batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyPlan {
    paged: PagedLayout,
    slot: SlotLayout,
    heads: HeadRange,
    tokens: u32,
    runs: u32,
    run_bytes: u64,
    unit_bytes: u64,
    is_whole: bool,
}

impl CopyPlan {
    /// Creates a plan for plane and slot addresses that are multiples of `alignment`, a power of two: see
    /// [`alignment_of`]. With 16 and strides to match, every access is one of 16 bytes.
    pub fn new(
        paged: PagedLayout,
        slot: SlotLayout,
        heads: HeadRange,
        alignment: u64,
    ) -> Result<Self, PlanError> {
        agree(&paged, slot.tokens, slot.head_bytes)?;
        if slot.planes == 0 {
            return Err(PlanError::Zero("the count of planes"));
        }
        let heads = heads.validate(paged.heads, slot.heads)?;
        let is_whole =
            heads.count == slot.heads && slot.plane_stride == slot.plane_bytes() && slot.first_byte == 0;
        let mut plan = Self {
            paged,
            slot,
            heads,
            tokens: slot.tokens,
            runs: heads.count,
            run_bytes: slot.head_bytes.into(),
            unit_bytes: 0,
            is_whole,
        };
        plan.join_runs();
        plan.unit_bytes = plan.widest(alignment);
        bounded("units of an item", plan.units())?;
        Ok(plan)
    }

    /// Merges heads that are adjacent on both sides into one run, and then tokens likewise.
    fn join_runs(&mut self) {
        let token_bytes = self.run_bytes * u64::from(self.runs);
        if self.runs > 1 && self.paged.head_stride != self.run_bytes {
            return;
        }
        (self.runs, self.run_bytes) = (1, token_bytes);
        let strides = [self.paged.token_stride, self.slot_token_stride()];
        if self.tokens == 1 || strides == [token_bytes; 2] {
            self.run_bytes *= u64::from(self.tokens);
            self.tokens = 1;
        }
    }

    /// Returns the widest access that all positions allow, in bytes.
    fn widest(&self, alignment: u64) -> u64 {
        let stride = |count: u32, stride: u64| if count > 1 { stride } else { 0 };
        let common = alignment_of([
            alignment.max(1),
            self.paged.block_stride,
            u64::from(self.heads.paged_first) * self.paged.head_stride,
            self.slot_first(),
            stride(self.slot.planes, self.slot.plane_stride),
            stride(self.tokens, self.paged.token_stride),
            stride(self.tokens, self.slot_token_stride()),
            stride(self.runs, self.paged.head_stride),
            stride(self.runs, self.slot.head_bytes.into()),
        ]);
        let longest = 1 << self.run_bytes.ilog2();
        let unit = common.min(longest);
        // Units of eight bytes without a tail can be summed; units of sixteen with a tail cannot.
        if unit == 16 && self.run_bytes % 16 == 8 && self.run_bytes < 1024 { 8 } else { unit }
    }

    fn slot_token_stride(&self) -> u64 {
        u64::from(self.slot.heads) * u64::from(self.slot.head_bytes)
    }

    fn slot_first(&self) -> u64 {
        self.slot.first_byte + u64::from(self.heads.slot_first) * u64::from(self.slot.head_bytes)
    }

    fn run_units(&self) -> u64 {
        self.run_bytes.div_ceil(self.unit_bytes)
    }

    fn units(&self) -> u64 {
        self.run_units()
            .saturating_mul(self.runs.into())
            .saturating_mul(self.tokens.into())
            .saturating_mul(self.slot.planes.into())
    }

    /// Returns the bytes of one access: 1, 2, 4, 8 or 16.
    #[must_use]
    pub fn unit_bytes(&self) -> u64 {
        self.unit_bytes
    }

    /// Returns the length of a run: bytes that are contiguous on both sides.
    #[must_use]
    pub fn run_bytes(&self) -> u64 {
        self.run_bytes
    }

    /// Returns the number of bytes that a batch reads, which is also the number that it writes.
    #[must_use]
    pub fn bytes_moved(&self, items: u32) -> u64 {
        let runs = u64::from(self.slot.planes) * u64::from(self.tokens) * u64::from(self.runs);
        u64::from(items) * runs * self.run_bytes
    }

    fn check_sum(&self) -> Result<(), PlanError> {
        if !self.is_whole {
            return Err(PlanError::Checksum("the launch does not touch the whole slot"));
        }
        if self.unit_bytes < 8 || !self.run_bytes.is_multiple_of(self.unit_bytes) {
            return Err(PlanError::Checksum("lanes of eight bytes are not moved whole"));
        }
        Ok(())
    }

    fn function(&self, direction: Direction, with_sums: bool) -> &'static str {
        match (direction, self.unit_bytes, with_sums) {
            (Direction::Gather, 16, true) => "kvasir_gather_sum_16",
            (Direction::Gather, _, true) => "kvasir_gather_sum_8",
            (Direction::Gather, 16, false) => "kvasir_gather_16",
            (Direction::Gather, 8, false) => "kvasir_gather_8",
            (Direction::Gather, 4, false) => "kvasir_gather_4",
            (Direction::Gather, 2, false) => "kvasir_gather_2",
            (Direction::Gather, _, false) => "kvasir_gather_1",
            (Direction::Scatter, 16, true) => "kvasir_scatter_sum_16",
            (Direction::Scatter, _, true) => "kvasir_scatter_sum_8",
            (Direction::Scatter, 16, false) => "kvasir_scatter_16",
            (Direction::Scatter, 8, false) => "kvasir_scatter_8",
            (Direction::Scatter, 4, false) => "kvasir_scatter_4",
            (Direction::Scatter, 2, false) => "kvasir_scatter_2",
            (Direction::Scatter, _, false) => "kvasir_scatter_1",
        }
    }

    /// Creates the launch for a batch. With `sums`, the checksum of each slot is taken during the copy
    /// (scatter: of the bytes that were read); the slot must then be moved whole, in lanes of eight bytes.
    pub fn launch(&self, direction: Direction, batch: &Batch, device: Device) -> Result<Launch, PlanError> {
        if batch.sums.is_some() {
            self.check_sum()?;
        }
        let units = bounded("units of an item", self.units())?;
        let (tile_units, item_tiles, tiles, shares) = cut(units, batch.count, THREADS, LOADS, device)?;
        // Sums need large shares of an item, because each share is added to memory separately; copies without
        // sums go by tiles.
        let grid = if batch.sums.is_some() { shares } else { tiles };
        let run_units = self.run_units() as u32;
        let token_units = run_units * self.runs;
        let parameters = CopyParameters {
            items: batch.items,
            status: batch.status,
            paged: paged_parameters(&self.paged, self.heads, batch.planes),
            sums: ChecksumArrays::parameters(batch.sums),
            slot_first: self.slot_first(),
            slot_plane_stride: self.slot.plane_stride,
            slot_token_stride: self.slot_token_stride(),
            slot_head_stride: self.slot.head_bytes.into(),
            slot_bytes: self.slot.bytes(),
            tiles,
            tile_units,
            units,
            tail_bytes: (self.run_bytes % self.unit_bytes) as u32,
            item_tiles: Divider::new(item_tiles),
            plane_units: Divider::new(token_units * self.tokens),
            token_units: Divider::new(token_units),
            run_units: Divider::new(run_units),
        };
        Ok(Launch {
            function: self.function(direction, batch.sums.is_some()),
            grid: [grid, 1, 1],
            block: [THREADS, 1, 1],
            shared_bytes: 0,
            parameters: Parameters::Copy(parameters),
        })
    }
}

/// Returns the parameters of the engine's side for a range of heads.
pub(crate) fn paged_parameters(paged: &PagedLayout, heads: HeadRange, planes: u64) -> PagedParameters {
    PagedParameters {
        planes,
        block_count: paged.blocks,
        block_stride: paged.block_stride,
        token_stride: paged.token_stride,
        head_stride: paged.head_stride,
        first: u64::from(heads.paged_first) * paged.head_stride,
    }
}
