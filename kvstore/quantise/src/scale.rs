//! Scales of groups and how they are stored.

/// How a scale is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScaleType {
    /// Four bytes, exact.
    F32,
    /// Two bytes, rounded up: at most 2⁻⁷ larger, and the error bound with it.
    Bf16,
}

impl ScaleType {
    /// Bytes of one scale.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

/// Bits of |value| from which on a single-precision number is not finite.
pub(crate) const NOT_FINITE: u32 = 0x7f80_0000;

/// How scales are written; the kernels are compiled for each.
pub(crate) trait Scale {
    const BYTES: usize;
    /// The number that is stored for a wanted scale; not below it.
    fn stored(wanted: f32) -> f32;
    fn write(stored: f32, target: &mut [u8]);
    fn read(source: &[u8]) -> f32;
}

pub(crate) struct ScaleF32;
pub(crate) struct ScaleBf16;

impl Scale for ScaleF32 {
    const BYTES: usize = 4;

    #[inline(always)]
    fn stored(wanted: f32) -> f32 {
        wanted
    }

    #[inline(always)]
    fn write(stored: f32, target: &mut [u8]) {
        target.copy_from_slice(&stored.to_le_bytes());
    }

    #[inline(always)]
    fn read(source: &[u8]) -> f32 {
        f32::from_le_bytes([source[0], source[1], source[2], source[3]])
    }
}

impl Scale for ScaleBf16 {
    const BYTES: usize = 2;

    #[inline(always)]
    fn stored(wanted: f32) -> f32 {
        f32::from_bits(wanted.to_bits().wrapping_add(0xffff) & 0xffff_0000)
    }

    #[inline(always)]
    fn write(stored: f32, target: &mut [u8]) {
        target.copy_from_slice(&((stored.to_bits() >> 16) as u16).to_le_bytes());
    }

    #[inline(always)]
    fn read(source: &[u8]) -> f32 {
        f32::from_bits(u32::from(u16::from_le_bytes([source[0], source[1]])) << 16)
    }
}

/// The scale of a group whose greatest magnitude has these bits (below [`NOT_FINITE`]). At least 2⁻¹²⁶, so that
/// its inverse is finite and groups of zeros and denormals need no case of their own.
#[inline(always)]
pub(crate) fn scale_of<S: Scale>(magnitude_bits: u32, code_max: f32) -> f32 {
    S::stored((f32::from_bits(magnitude_bits) / code_max).max(f32::MIN_POSITIVE))
}

/// Whether a scale that was read can be used.
#[inline(always)]
pub(crate) fn usable(scale: f32) -> bool {
    (f32::MIN_POSITIVE..f32::INFINITY).contains(&scale)
}
