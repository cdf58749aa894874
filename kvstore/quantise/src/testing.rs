//! Synthetic keys and values for tests and the example, shaped like those of real models: keys have a few
//! channels that are large in every token (KIVI, arXiv 2402.02750, figure 2), values have none.

use kvstore_block::{BlockLayout, ElementType};

/// Seeded random numbers (splitmix64).
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Equal seeds, equal numbers.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    /// From (0, 1].
    pub fn uniform(&mut self) -> f64 {
        ((self.bits() >> 11) + 1) as f64 / (1_u64 << 53) as f64
    }

    /// Normal with mean 0 and variance 1 (Box-Muller).
    pub fn normal(&mut self) -> f64 {
        (-2.0 * self.uniform().ln()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos()
    }
}

/// Rounds to bf16, to nearest even.
#[must_use]
pub fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

/// Appends a number as an element.
pub fn push(element: ElementType, value: f32, bytes: &mut Vec<u8>) {
    match element {
        ElementType::Bf16 => bytes.extend_from_slice(&bf16_bits(value).to_le_bytes()),
        ElementType::F32 => bytes.extend_from_slice(&value.to_le_bytes()),
    }
}

/// The elements of a block or plane as numbers.
#[must_use]
pub fn elements(element: ElementType, bytes: &[u8]) -> Vec<f64> {
    match element {
        ElementType::Bf16 => {
            let (pairs, _) = bytes.as_chunks::<2>();
            pairs
                .iter()
                .map(|pair| f32::from_bits(u32::from(u16::from_le_bytes(*pair)) << 16).into())
                .collect()
        }
        ElementType::F32 => {
            let (words, _) = bytes.as_chunks::<4>();
            words.iter().map(|word| f32::from_le_bytes(*word).into()).collect()
        }
    }
}

/// A block: normal values; keys with one channel in 16 shifted and `outlier` times as large.
#[must_use]
pub fn block(layout: &BlockLayout, outlier: f64, random: &mut Random) -> Vec<u8> {
    let channels = layout.token_elements();
    let mut bytes = Vec::with_capacity(layout.block_bytes());
    for _layer in 0..layout.layers {
        for part in 0..layout.parts {
            let is_key = part == 0 && layout.parts > 1;
            let large: Vec<f64> = (0..channels)
                .map(|_| {
                    if is_key && random.uniform() < 1.0 / 16.0 {
                        outlier * random.normal().signum()
                    } else {
                        0.0
                    }
                })
                .collect();
            for _token in 0..layout.tokens {
                for large in &large {
                    let value = large + random.normal() * large.abs().max(1.0).sqrt();
                    push(layout.element, value as f32, &mut bytes);
                }
            }
        }
    }
    bytes
}
