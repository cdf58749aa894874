//! Quantising gather and dequantising scatter: how parts become groups, work and tiles.

use crate::copy::{Direction, paged_parameters};
use crate::divider::Divider;
use crate::error::PlanError;
use crate::launch::{Batch, Device, Launch, Parameters, SumPlaces, bounded};
use crate::layout::{HeadRange, PagedLayout, agree, alignment_of};
use crate::parameters::{PartParameters, QuantiseParameters};
use crate::quantised::{Element, Format, Grouping, QuantisedSlot, ScaleType};

const QUANTISE_THREADS: u32 = 128;
const DEQUANTISE_THREADS: u32 = 256;
const DEQUANTISE_LOADS: u32 = 4;
const GROUPS_IN_FLIGHT: u32 = 4;
/// Elements of one access.
const WIDE: u32 = 8;

/// How blocks of one layout are quantised and restored. Made once, launched for every batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantisePlan {
    paged: PagedLayout,
    slot: QuantisedSlot,
    heads: HeadRange,
    /// 8, or 1 where alignment or sizes do not allow it.
    width: u32,
}

impl QuantisePlan {
    /// A plan for addresses (of planes and slots) that are multiples of `alignment`, a power of two: see
    /// [`alignment_of`].
    pub fn new(
        paged: PagedLayout,
        slot: QuantisedSlot,
        heads: HeadRange,
        alignment: u64,
    ) -> Result<Self, PlanError> {
        let slot = slot.validate()?;
        let element = slot.element.bytes();
        let head_bytes = bounded("bytes of a head", u64::from(slot.head_dim) * u64::from(element))?;
        agree(&paged, slot.tokens, head_bytes)?;
        let heads = heads.validate(paged.heads, slot.heads)?;
        bounded("elements of a plane", slot.plane_elements())?;
        let strides = [paged.block_stride, paged.token_stride, paged.head_stride];
        let found = alignment_of(strides.into_iter().chain([alignment.max(1)]));
        if found < u64::from(element) {
            return Err(PlanError::Alignment { found, wanted: element.into() });
        }
        let are_groups_wide = (0..slot.parts).all(|part| match slot.grouping(part) {
            Grouping::Channel => true,
            Grouping::Token(group) => group.is_multiple_of(WIDE),
        });
        let are_lanes_whole = (0..slot.parts).all(|part| slot.scale_bytes(part).is_multiple_of(8));
        let is_wide = found == 16 && slot.head_dim.is_multiple_of(WIDE) && are_groups_wide && are_lanes_whole;
        Ok(Self { paged, slot, heads, width: if is_wide { WIDE } else { 1 } })
    }

    /// Elements of one access: 8 (16 bytes of bf16 or fp16, twice 16 of fp32), or 1.
    #[must_use]
    pub fn width(&self) -> u32 {
        self.width
    }

    /// Bytes that a batch reads and writes together.
    #[must_use]
    pub fn bytes_moved(&self, items: u32) -> u64 {
        let elements = u64::from(self.slot.layers) * u64::from(self.slot.parts) * u64::from(self.slot.tokens);
        let elements = elements * u64::from(self.channels());
        u64::from(items) * (elements * u64::from(self.slot.element.bytes()) + self.slot.bytes())
    }

    fn channels(&self) -> u32 {
        self.heads.count * self.slot.head_dim
    }

    fn part(&self, part: u32) -> Result<PartParameters, PlanError> {
        let slot = &self.slot;
        let offset = slot.plane_offset(0, part);
        let code_offset = offset + slot.scale_bytes(part);
        let parameters = match slot.grouping(part) {
            Grouping::Channel => PartParameters {
                plane_work: Divider::new(self.channels() / self.width),
                work: self.channels() / self.width,
                ..PartParameters { offset, code_offset, ..bytemuck::Zeroable::zeroed() }
            },
            Grouping::Token(group) => {
                let token_groups = self.channels() / group;
                let groups = slot.tokens * token_groups;
                let plane_work = groups.div_ceil(GROUPS_IN_FLIGHT);
                PartParameters {
                    offset,
                    code_offset,
                    group,
                    groups,
                    slot_groups: (slot.channels() / u64::from(group)) as u32,
                    first_group: self.heads.slot_first * (slot.head_dim / group),
                    lanes_shift: (group / self.width).next_power_of_two().min(32).ilog2(),
                    tiles: 0,
                    work: plane_work,
                    plane_work: Divider::new(plane_work),
                    token_groups: Divider::new(token_groups),
                    group_divider: Divider::new(group),
                }
            }
        };
        let work = bounded("groups of an item", u64::from(parameters.work) * u64::from(slot.layers))?;
        let tiles = work.div_ceil(QUANTISE_THREADS >> parameters.lanes_shift);
        Ok(PartParameters { work, tiles, ..parameters })
    }

    fn check_sum(&self, direction: Direction) -> Result<(), PlanError> {
        if direction == Direction::Scatter {
            return Err(PlanError::Checksum("a dequantising launch takes none; verify the slots first"));
        }
        if self.heads.count != self.slot.heads {
            return Err(PlanError::Checksum("the launch does not touch the whole slot"));
        }
        if self.width != WIDE {
            return Err(PlanError::Checksum("lanes of eight bytes are not moved whole"));
        }
        Ok(())
    }

    /// A launch for a batch: [`Direction::Gather`] quantises, [`Direction::Scatter`] restores.
    pub fn launch(&self, direction: Direction, batch: &Batch, device: Device) -> Result<Launch, PlanError> {
        if batch.sums.is_some() {
            self.check_sum(direction)?;
        }
        if batch.count == 0 {
            return Err(PlanError::Zero("the count of items"));
        }
        let slot = &self.slot;
        let parts =
            [self.part(0)?, if slot.parts > 1 { self.part(1)? } else { bytemuck::Zeroable::zeroed() }];
        let token_units = self.channels() / self.width;
        let part_units = bounded("units of a plane", u64::from(token_units) * u64::from(slot.tokens))?;
        let layer_units = bounded("units of a layer", u64::from(part_units) * u64::from(slot.parts))?;
        let units = bounded("units of an item", u64::from(layer_units) * u64::from(slot.layers))?;
        let (threads, item_tiles) = match direction {
            Direction::Gather => {
                (QUANTISE_THREADS, bounded("tiles", parts.iter().map(|part| u64::from(part.tiles)).sum())?)
            }
            Direction::Scatter => (DEQUANTISE_THREADS, units.div_ceil(DEQUANTISE_THREADS * DEQUANTISE_LOADS)),
        };
        let tiles = bounded("tiles", u64::from(item_tiles) * u64::from(batch.count))?;
        let parameters = QuantiseParameters {
            items: batch.items,
            status: batch.status,
            paged: paged_parameters(&self.paged, self.heads, batch.planes),
            sums: SumPlaces::parameters(batch.sums),
            layer_bytes: slot.layer_bytes(),
            slot_bytes: slot.bytes(),
            header: header_words(&slot.header),
            parts,
            part_count: slot.parts,
            tokens: slot.tokens,
            channels: self.channels(),
            slot_channels: slot.channels() as u32,
            first_channel: self.heads.slot_first * slot.head_dim,
            has_bf16_scales: u32::from(slot.scale == ScaleType::Bf16),
            tiles,
            units,
            item_tiles: Divider::new(item_tiles),
            head_elements: Divider::new(slot.head_dim),
            layer_units: Divider::new(layer_units),
            part_units: Divider::new(part_units),
            token_units: Divider::new(token_units),
            reserved: 0,
        };
        Ok(Launch {
            function: function(direction, slot.element, slot.format, self.width),
            grid: [tiles.min(device.multiprocessors.max(1).saturating_mul(8)), 1, 1],
            block: [threads, 1, 1],
            shared_bytes: 0,
            parameters: Parameters::Quantise(parameters),
        })
    }
}

fn header_words(header: &[u8; 64]) -> [u32; 16] {
    let (words, _) = header.as_chunks::<4>();
    std::array::from_fn(|at| u32::from_le_bytes(words[at]))
}

fn function(direction: Direction, element: Element, format: Format, width: u32) -> &'static str {
    macro_rules! name {
        ($work:literal, $element:literal, $format:literal) => {
            if width == WIDE {
                concat!("kvasir_", $work, "_", $element, "_", $format, "_8")
            } else {
                concat!("kvasir_", $work, "_", $element, "_", $format, "_1")
            }
        };
    }
    match (direction, element, format) {
        (Direction::Gather, Element::Bf16, Format::Fp8E4m3) => name!("quantise", "bf16", "fp8"),
        (Direction::Gather, Element::Bf16, Format::Int8) => name!("quantise", "bf16", "int8"),
        (Direction::Gather, Element::F16, Format::Fp8E4m3) => name!("quantise", "f16", "fp8"),
        (Direction::Gather, Element::F16, Format::Int8) => name!("quantise", "f16", "int8"),
        (Direction::Gather, Element::F32, Format::Fp8E4m3) => name!("quantise", "f32", "fp8"),
        (Direction::Gather, Element::F32, Format::Int8) => name!("quantise", "f32", "int8"),
        (Direction::Scatter, Element::Bf16, Format::Fp8E4m3) => name!("dequantise", "bf16", "fp8"),
        (Direction::Scatter, Element::Bf16, Format::Int8) => name!("dequantise", "bf16", "int8"),
        (Direction::Scatter, Element::F16, Format::Fp8E4m3) => name!("dequantise", "f16", "fp8"),
        (Direction::Scatter, Element::F16, Format::Int8) => name!("dequantise", "f16", "int8"),
        (Direction::Scatter, Element::F32, Format::Fp8E4m3) => name!("dequantise", "f32", "fp8"),
        (Direction::Scatter, Element::F32, Format::Int8) => name!("dequantise", "f32", "int8"),
    }
}
