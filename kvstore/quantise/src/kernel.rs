//! The loops over a plane. They are written for the compiler's vectoriser: no branch on elements, no
//! conversion that the machine lacks, neighbours side by side; each is compiled once for the base instruction
//! set and once with AVX2 (`codec.rs`). Hot: a few operations for each element.
//!
//! Greatest magnitudes are found on the bits as integers, which is exact, independent of the order, and shows
//! NaN and infinity (both at least [`NOT_FINITE`]) at no extra cost.

use crate::error::QuantiseError;
use crate::format::Code;
use crate::scale::{NOT_FINITE, Scale, scale_of, usable};

/// Channels that are worked on together: their scales stay in registers over all tokens.
const LANES: usize = 64;

/// An element as it lies in memory.
pub(crate) trait Element {
    /// Its bytes, least significant first.
    type Raw: Copy;
    fn cast(source: &[u8]) -> &[Self::Raw];
    fn cast_mut(target: &mut [u8]) -> &mut [Self::Raw];
    fn load(raw: Self::Raw) -> f32;
    /// Rounds to nearest even; what is too large becomes the greatest finite number.
    fn store(value: f32) -> Self::Raw;
}

pub(crate) struct Bf16;
pub(crate) struct F32;

impl Element for F32 {
    type Raw = [u8; 4];

    #[inline(always)]
    fn cast(source: &[u8]) -> &[Self::Raw] {
        source.as_chunks().0
    }

    #[inline(always)]
    fn cast_mut(target: &mut [u8]) -> &mut [Self::Raw] {
        target.as_chunks_mut().0
    }

    #[inline(always)]
    fn load(raw: Self::Raw) -> f32 {
        f32::from_le_bytes(raw)
    }

    #[inline(always)]
    fn store(value: f32) -> Self::Raw {
        value.clamp(f32::MIN, f32::MAX).to_le_bytes()
    }
}

/// The greatest finite bf16.
const BF16_MAX: f32 = f32::from_bits(0x7f7f_0000);

impl Element for Bf16 {
    type Raw = [u8; 2];

    #[inline(always)]
    fn cast(source: &[u8]) -> &[Self::Raw] {
        source.as_chunks().0
    }

    #[inline(always)]
    fn cast_mut(target: &mut [u8]) -> &mut [Self::Raw] {
        target.as_chunks_mut().0
    }

    #[inline(always)]
    fn load(raw: Self::Raw) -> f32 {
        f32::from_bits(u32::from(u16::from_le_bytes(raw)) << 16)
    }

    #[inline(always)]
    fn store(value: f32) -> Self::Raw {
        let bits = value.clamp(-BF16_MAX, BF16_MAX).to_bits();
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        (rounded as u16).to_le_bytes()
    }
}

/// The bits of |value|; they compare as the values do.
#[inline(always)]
fn magnitude_bits<E: Element>(raw: E::Raw) -> u32 {
    E::load(raw).to_bits() & 0x7fff_ffff
}

/// A plane in which neighbouring elements of a token share a scale.
#[inline(always)]
pub(crate) fn quantise_tokens<E: Element, C: Code, S: Scale>(
    group: usize,
    source: &[u8],
    scales: &mut [u8],
    codes: &mut [u8],
) -> Result<(), QuantiseError> {
    let groups = E::cast(source).chunks_exact(group).zip(codes.chunks_exact_mut(group));
    for (number, ((source, codes), scale)) in groups.zip(scales.chunks_exact_mut(S::BYTES)).enumerate() {
        let (wide, rest) = source.as_chunks::<LANES>();
        let mut lanes = [0_u32; LANES];
        for source in wide {
            for at in 0..LANES {
                lanes[at] = lanes[at].max(magnitude_bits::<E>(source[at]));
            }
        }
        let rest_greatest = rest.iter().fold(0, |most, raw| magnitude_bits::<E>(*raw).max(most));
        let greatest = lanes.into_iter().fold(rest_greatest, u32::max);
        if greatest >= NOT_FINITE {
            return Err(QuantiseError::NotFinite { element: number * group });
        }
        let stored = scale_of::<S>(greatest, C::MAX);
        S::write(stored, scale);
        let inverse = 1.0 / stored;
        let (wide_codes, rest_codes) = codes.as_chunks_mut::<LANES>();
        for (source, codes) in wide.iter().zip(wide_codes) {
            encode_lanes::<E, C>(source, &[inverse; LANES], codes);
        }
        for (raw, code) in rest.iter().zip(rest_codes) {
            *code = C::encode(E::load(*raw) * inverse);
        }
    }
    Ok(())
}

#[inline(always)]
fn encode_lanes<E: Element, C: Code>(
    source: &[E::Raw; LANES],
    inverse: &[f32; LANES],
    codes: &mut [u8; LANES],
) {
    for at in 0..LANES {
        codes[at] = C::encode(E::load(source[at]) * inverse[at]);
    }
}

#[inline(always)]
fn decode_lanes<E: Element, C: Code>(
    codes: &[u8; LANES],
    scale: &[f32; LANES],
    target: &mut [E::Raw; LANES],
) {
    for at in 0..LANES {
        target[at] = E::store(C::decode(codes[at]) * scale[at]);
    }
}

/// The reverse of [`quantise_tokens`].
#[inline(always)]
pub(crate) fn dequantise_tokens<E: Element, C: Code, S: Scale>(
    group: usize,
    scales: &[u8],
    codes: &[u8],
    target: &mut [u8],
) -> Result<(), QuantiseError> {
    let groups = E::cast_mut(target).chunks_exact_mut(group).zip(codes.chunks_exact(group));
    for (number, ((target, codes), scale)) in groups.zip(scales.chunks_exact(S::BYTES)).enumerate() {
        let scale = S::read(scale);
        if !usable(scale) {
            return Err(QuantiseError::Scale { scale: number });
        }
        let (wide_codes, rest_codes) = codes.as_chunks::<LANES>();
        let (wide, rest) = target.as_chunks_mut::<LANES>();
        for (codes, target) in wide_codes.iter().zip(wide) {
            decode_lanes::<E, C>(codes, &[scale; LANES], target);
        }
        for (code, raw) in rest_codes.iter().zip(rest) {
            *raw = E::store(C::decode(*code) * scale);
        }
    }
    Ok(())
}

/// A plane in which all tokens of a channel share a scale.
#[inline(always)]
pub(crate) fn quantise_channels<E: Element, C: Code, S: Scale>(
    channels: usize,
    source: &[u8],
    scales: &mut [u8],
    codes: &mut [u8],
) -> Result<(), QuantiseError> {
    let source = E::cast(source);
    for first in (0..channels).step_by(LANES) {
        let count = LANES.min(channels - first);
        let mut greatest = [0_u32; LANES];
        for token in source.chunks_exact(channels) {
            let token = &token[first..first + count];
            if let Some(token) = token.first_chunk::<LANES>() {
                for at in 0..LANES {
                    greatest[at] = greatest[at].max(magnitude_bits::<E>(token[at]));
                }
            } else {
                for (greatest, raw) in greatest.iter_mut().zip(token) {
                    *greatest = magnitude_bits::<E>(*raw).max(*greatest);
                }
            }
        }
        if let Some(at) = greatest.iter().position(|bits| *bits >= NOT_FINITE) {
            return Err(QuantiseError::NotFinite { element: first + at });
        }
        let stored = greatest.map(|bits| scale_of::<S>(bits, C::MAX));
        let places = scales[first * S::BYTES..].chunks_exact_mut(S::BYTES);
        for (stored, place) in stored[..count].iter().zip(places) {
            S::write(*stored, place);
        }
        let inverse = stored.map(|stored| 1.0 / stored);
        for (token, codes) in source.chunks_exact(channels).zip(codes.chunks_exact_mut(channels)) {
            let (token, codes) = (&token[first..first + count], &mut codes[first..first + count]);
            match (token.first_chunk::<LANES>(), codes.first_chunk_mut::<LANES>()) {
                (Some(token), Some(codes)) => encode_lanes::<E, C>(token, &inverse, codes),
                _ => {
                    for ((raw, code), inverse) in token.iter().zip(codes).zip(&inverse) {
                        *code = C::encode(E::load(*raw) * inverse);
                    }
                }
            }
        }
    }
    Ok(())
}

/// The reverse of [`quantise_channels`].
#[inline(always)]
pub(crate) fn dequantise_channels<E: Element, C: Code, S: Scale>(
    channels: usize,
    scales: &[u8],
    codes: &[u8],
    target: &mut [u8],
) -> Result<(), QuantiseError> {
    let target = E::cast_mut(target);
    for first in (0..channels).step_by(LANES) {
        let count = LANES.min(channels - first);
        let mut scale = [1.0_f32; LANES];
        let places = scales[first * S::BYTES..].chunks_exact(S::BYTES);
        for (scale, place) in scale[..count].iter_mut().zip(places) {
            *scale = S::read(place);
        }
        if let Some(at) = scale.iter().position(|scale| !usable(*scale)) {
            return Err(QuantiseError::Scale { scale: first + at });
        }
        for (token, codes) in target.chunks_exact_mut(channels).zip(codes.chunks_exact(channels)) {
            let (token, codes) = (&mut token[first..first + count], &codes[first..first + count]);
            match (codes.first_chunk::<LANES>(), token.first_chunk_mut::<LANES>()) {
                (Some(codes), Some(token)) => decode_lanes::<E, C>(codes, &scale, token),
                _ => {
                    for ((code, raw), scale) in codes.iter().zip(token).zip(&scale) {
                        *raw = E::store(C::decode(*code) * scale);
                    }
                }
            }
        }
    }
    Ok(())
}
