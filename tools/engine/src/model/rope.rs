//! Rotary position embedding, in the "rotate half" form of Hugging Face, with Llama 3's scaling.

use std::f32::consts::PI;

use super::{ModelConfig, RopeScaling};

/// Cosines and sines of every position, made once.
#[derive(Debug)]
pub(super) struct Rope {
    half: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Rope {
    pub(super) fn new(config: &ModelConfig) -> Self {
        let half = config.head_dim / 2;
        let frequencies: Vec<f32> = (0..half)
            .map(|index| {
                let exponent = 2.0 * index as f32 / config.head_dim as f32;
                let frequency = 1.0 / config.rope_theta.powf(exponent);
                config.rope_scaling.map_or(frequency, |scaling| scaled(frequency, scaling))
            })
            .collect();
        let angles =
            || (0..config.context_tokens).flat_map(|at| frequencies.iter().map(move |f| at as f32 * f));
        Self { half, cos: angles().map(f32::cos).collect(), sin: angles().map(f32::sin).collect() }
    }

    /// Turns one head's vector to its position.
    pub(super) fn apply(&self, head: &mut [f32], position: usize) {
        let at = position * self.half;
        let (first, second) = head.split_at_mut(self.half);
        let (cos, sin) = (&self.cos[at..at + self.half], &self.sin[at..at + self.half]);
        for index in 0..self.half {
            let (a, b) = (first[index], second[index]);
            first[index] = a * cos[index] - b * sin[index];
            second[index] = b * cos[index] + a * sin[index];
        }
    }
}

/// Long waves are stretched by the factor, short ones kept, the ones between blended.
fn scaled(frequency: f32, scaling: RopeScaling) -> f32 {
    let wavelength = 2.0 * PI / frequency;
    let longest_kept = scaling.original_context / scaling.high_freq_factor;
    let shortest_stretched = scaling.original_context / scaling.low_freq_factor;
    if wavelength < longest_kept {
        return frequency;
    }
    if wavelength > shortest_stretched {
        return frequency / scaling.factor;
    }
    let smooth = (scaling.original_context / wavelength - scaling.low_freq_factor)
        / (scaling.high_freq_factor - scaling.low_freq_factor);
    (1.0 - smooth) * frequency / scaling.factor + smooth * frequency
}
