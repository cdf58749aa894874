//! Quantising and restoring by definition.

use crate::layout::{HeadRange, PagedLayout};
use crate::quantised::{Element, Grouping, HEADER_BYTES, QuantisedSlot, ScaleType};
use crate::status;

use super::numbers::{code_max, decode, element_from, element_to, encode};

/// Where one element lies: in a plane of the engine, and its code and scale in the slot.
struct Place {
    plane: usize,
    paged: usize,
    code: usize,
    scale: usize,
}

fn places(
    (paged, slot, heads): (&PagedLayout, &QuantisedSlot, HeadRange),
    (layer, part): (u32, u32),
    block: u64,
) -> impl Iterator<Item = Place> {
    let (paged, slot) = (*paged, *slot);
    let plane_offset = slot.plane_offset(layer, part);
    let place = move |token: u32, head: u32, dimension: u32| {
        let in_engine = block * paged.block_stride
            + u64::from(token) * paged.token_stride
            + u64::from(heads.paged_first + head) * paged.head_stride
            + u64::from(dimension * slot.element.bytes());
        let channel = u64::from((heads.slot_first + head) * slot.head_dim + dimension);
        let number = u64::from(token) * slot.channels() + channel;
        let scale = match slot.grouping(part) {
            Grouping::Channel => channel,
            Grouping::Token(group) => number / u64::from(group),
        };
        Place {
            plane: (layer * slot.parts + part) as usize,
            paged: in_engine as usize,
            code: (plane_offset + slot.scale_bytes(part) + number) as usize,
            scale: (plane_offset + scale * u64::from(slot.scale.bytes())) as usize,
        }
    };
    (0..slot.tokens).flat_map(move |token| {
        (0..heads.count)
            .flat_map(move |head| (0..slot.head_dim).map(move |dimension| place(token, head, dimension)))
    })
}

fn planes(slot: &QuantisedSlot) -> impl Iterator<Item = (u32, u32)> + use<> {
    let (layers, parts) = (slot.layers, slot.parts);
    (0..layers).flat_map(move |layer| (0..parts).map(move |part| (layer, part)))
}

/// The stored scale of a group with this greatest magnitude.
fn scale_of(slot: &QuantisedSlot, greatest: f64) -> f64 {
    // A quotient of two singles in double precision rounds to a single as the single-precision quotient does.
    let wanted = ((greatest / code_max(slot.format)) as f32).max(f32::MIN_POSITIVE);
    match slot.scale {
        ScaleType::F32 => wanted.into(),
        ScaleType::Bf16 => {
            let down = f32::from_bits(wanted.to_bits() & 0xffff_0000);
            let up = f32::from_bits((down.to_bits()) + 0x1_0000);
            (if down == wanted { down } else { up }).into()
        }
    }
}

fn write_scale(scale: ScaleType, value: f64, target: &mut [u8]) {
    let element = if scale == ScaleType::F32 { Element::F32 } else { Element::Bf16 };
    element_to(element, value, &mut target[..scale.bytes() as usize]);
}

fn read_scale(scale: ScaleType, source: &[u8]) -> f64 {
    element_from(if scale == ScaleType::F32 { Element::F32 } else { Element::Bf16 }, source)
}

/// Quantises a block into a slot; the status word. After one that is not 0 the slot's content is undefined.
#[must_use]
pub fn quantise(
    layouts: (&PagedLayout, &QuantisedSlot, HeadRange),
    engine: &[u8],
    (offsets, block): (&[u64], u64),
    target: &mut [u8],
) -> u32 {
    let slot = layouts.1;
    let bytes = slot.element.bytes() as usize;
    target[..HEADER_BYTES].copy_from_slice(&slot.header);
    for plane in planes(slot) {
        let mut greatest = std::collections::BTreeMap::new();
        for place in places(layouts, plane, block) {
            let value =
                element_from(slot.element, &engine[offsets[place.plane] as usize + place.paged..][..bytes]);
            if !value.is_finite() {
                return status::NOT_FINITE;
            }
            let most = greatest.entry(place.scale).or_insert(0.0_f64);
            *most = most.max(value.abs());
        }
        for (at, most) in &greatest {
            write_scale(slot.scale, scale_of(slot, *most), &mut target[*at..]);
        }
        for place in places(layouts, plane, block) {
            let value =
                element_from(slot.element, &engine[offsets[place.plane] as usize + place.paged..][..bytes]);
            let inverse = (1.0 / scale_of(slot, greatest[&place.scale])) as f32;
            target[place.code] = encode(slot.format, (value * f64::from(inverse)) as f32 as f64);
        }
    }
    0
}

/// Restores a block from a slot; the status word. After one that is not 0 the block's content is undefined.
#[must_use]
pub fn dequantise(
    layouts: (&PagedLayout, &QuantisedSlot, HeadRange),
    source: &[u8],
    (offsets, block): (&[u64], u64),
    engine: &mut [u8],
) -> u32 {
    let slot = layouts.1;
    let bytes = slot.element.bytes() as usize;
    if source[..HEADER_BYTES] != slot.header {
        return status::HEADER;
    }
    for plane in planes(slot) {
        for place in places(layouts, plane, block) {
            let scale = read_scale(slot.scale, &source[place.scale..]);
            if !scale.is_finite() || scale < f32::MIN_POSITIVE.into() {
                return status::SCALE;
            }
            let value = (decode(slot.format, source[place.code]) * scale) as f32 as f64;
            element_to(
                slot.element,
                value,
                &mut engine[offsets[place.plane] as usize + place.paged..][..bytes],
            );
        }
    }
    0
}
