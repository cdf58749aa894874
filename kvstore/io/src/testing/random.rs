//! Seeded random numbers.

/// Deterministic draws (SplitMix64, Steele et al. 2014): equal seed, equal run.
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    /// Returns a random number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// Returns a number below `limit`; zero when the limit is zero.
    pub fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.draw()) * u128::from(limit)) >> 64) as u64
    }

    /// Returns true with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        (self.draw() >> 11) as f64 / (1_u64 << 53) as f64 <= probability && probability > 0.0
    }
}

pub(super) fn mix(mut value: u64) -> u64 {
    value = (value ^ value >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    value = (value ^ value >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    value ^ value >> 31
}
