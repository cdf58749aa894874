//! Faults of an API server, drawn from a seed.

/// Frequency of each fault, in 1,000 cases.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Faults {
    /// A request is answered with 500.
    pub fail: u32,
    /// A request is answered with 429.
    pub throttle: u32,
    /// A watch ends before a change is sent.
    pub cut: u32,
    /// A watch reports that its version has expired, before a change.
    pub expire: u32,
    /// A change is sent twice.
    pub repeat: u32,
}

impl Faults {
    /// Returns the configuration with all faults enabled at a low frequency.
    #[must_use]
    pub fn all() -> Self {
        Self { fail: 50, throttle: 20, cut: 60, expire: 30, repeat: 50 }
    }
}

/// A small generator (xorshift64*), so that equal seeds draw equal faults.
#[derive(Debug)]
pub(crate) struct Draw(u64);

impl Draw {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// Returns true in this many of 1,000 cases.
    pub(crate) fn hits(&mut self, of_thousand: u32) -> bool {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let number = self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33;
        number % 1_000 < u64::from(of_thousand)
    }
}
