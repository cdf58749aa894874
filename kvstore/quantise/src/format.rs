//! Codes of eight bits: OCP fp8 e4m3 and int8, and what they cost in accuracy.
//!
//! e4m3 (OCP 8-bit floating point specification 1.0, section 5): sign, 4 exponent bits with bias 7, 3 mantissa
//! bits; no infinity; S.1111.111 is NaN; greatest value 448 = S.1111.110; least normal 2⁻⁶, least
//! subnormal 2⁻⁹. int8 is used symmetrically: −127 … 127.
//!
//! Encoding and decoding use additions on floats and integers only, so the compiler turns loops over them
//! into vector code; the conversions of the machine would round by its mode or saturate differently.

/// The kind of code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Format {
    /// 8-bit float with 4 exponent and 3 mantissa bits.
    Fp8E4m3,
    /// 8-bit integer, symmetric.
    Int8,
}

impl Format {
    /// The greatest code value; a group's greatest element is mapped to it.
    #[must_use]
    pub fn code_max(self) -> f32 {
        match self {
            Self::Fp8E4m3 => Fp8E4m3::MAX,
            Self::Int8 => Int8::MAX,
        }
    }

    /// A bound of |restored − value| for a value of a group with this stored scale, before the restored value
    /// is rounded to the element type.
    ///
    /// int8: scale × ½ × (1 + 2⁻¹⁴). fp8: max(|value| × 2⁻⁴, scale × 2⁻¹⁰) × (1 + 2⁻¹⁴): half a unit in the
    /// last of three mantissa bits, or half a subnormal step. The factor covers the single-precision
    /// product with 1 / scale (which may tip a tie) and with the scale: together less than 2⁻²² of the value,
    /// which is at most 2 × 127 × 2⁻²² < 2⁻¹⁴ of half a step.
    #[must_use]
    pub fn error_bound(self, scale: f64, value: f64) -> f64 {
        let step = match self {
            Self::Fp8E4m3 => (value.abs() / 16.0).max(scale / 1024.0),
            Self::Int8 => scale / 2.0,
        };
        step * (1.0 + 1.0 / 16_384.0)
    }
}

/// Encoding of values that are already divided by the scale.
pub(crate) trait Code {
    const MAX: f32;
    /// Nearest code, ties to even; |value| is at most a little above [`Self::MAX`].
    fn encode(value: f32) -> u8;
    fn decode(code: u8) -> f32;
}

/// OCP e4m3.
pub(crate) struct Fp8E4m3;
/// Symmetric int8.
pub(crate) struct Int8;

/// 1.5 × 2²³: adding it leaves the nearest integer in the low mantissa bits.
const INTEGER_MAGIC: f32 = 12_582_912.0;
/// 2¹⁴: the last mantissa bit of a sum with it is 2⁻⁹, the subnormal step of e4m3.
const SUBNORMAL_MAGIC: f32 = 16_384.0;

impl Code for Int8 {
    const MAX: f32 = 127.0;

    #[inline(always)]
    fn encode(value: f32) -> u8 {
        let value = value.clamp(-127.0, 127.0);
        // The low byte of the sum's bits is the integer in two's complement.
        (value + INTEGER_MAGIC).to_bits() as u8
    }

    #[inline(always)]
    fn decode(code: u8) -> f32 {
        f32::from(code as i8)
    }
}

impl Code for Fp8E4m3 {
    const MAX: f32 = 448.0;

    #[inline(always)]
    fn encode(value: f32) -> u8 {
        let bits = value.to_bits();
        let magnitude = f32::from_bits(bits & 0x7fff_ffff).min(448.0);
        let magnitude_bits = magnitude.to_bits();
        // Normal: drop 20 mantissa bits with rounding; a carry runs into the exponent as it should.
        let odd = magnitude_bits >> 20 & 1;
        let normal = (magnitude_bits.wrapping_add(0x7_ffff + odd) >> 20).wrapping_sub(120 << 3);
        let subnormal = (magnitude + SUBNORMAL_MAGIC).to_bits().wrapping_sub(SUBNORMAL_MAGIC.to_bits());
        let code = if magnitude_bits < 121 << 23 { subnormal } else { normal };
        (code | bits >> 24 & 0x80) as u8
    }

    #[inline(always)]
    fn decode(code: u8) -> f32 {
        let magnitude = u32::from(code & 0x7f);
        let normal = f32::from_bits((magnitude << 20) + (120 << 23));
        let subnormal = f32::from_bits((magnitude << 20) + (121 << 23)) - f32::from_bits(121 << 23);
        let value = if magnitude < 8 { subnormal } else { normal };
        let value = if magnitude == 0x7f { f32::NAN } else { value };
        f32::from_bits(value.to_bits() | u32::from(code & 0x80) << 24)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value of a code by the definition in the specification.
    fn e4m3(code: u8) -> f64 {
        let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
        let magnitude = match exponent {
            15 if code & 7 == 7 => f64::NAN,
            0 => mantissa / 8.0 * 2_f64.powi(-6),
            _ => (1.0 + mantissa / 8.0) * 2_f64.powi(exponent - 7),
        };
        if code & 0x80 == 0 { magnitude } else { -magnitude }
    }

    #[test]
    fn every_code_decodes_as_specified_and_encodes_to_itself() {
        for code in 0..=255_u8 {
            let value = Fp8E4m3::decode(code);
            if code & 0x7f == 0x7f {
                assert!(value.is_nan());
                continue;
            }
            assert_eq!(f64::from(value).to_bits(), e4m3(code).to_bits(), "{code:#x}");
            assert_eq!(Fp8E4m3::encode(value), code);
        }
        assert_eq!(Fp8E4m3::decode(0x7e), 448.0);
        for code in -127..=127_i8 {
            assert_eq!(Int8::encode(f32::from(code)), code as u8);
            assert_eq!(Int8::decode(code as u8), f32::from(code));
        }
    }

    #[test]
    fn rounding_is_to_the_nearest_and_ties_go_to_even() {
        for code in 0..0x7e_u8 {
            let (low, high) = (e4m3(code), e4m3(code + 1));
            let tie = ((low + high) / 2.0) as f32;
            assert_eq!(f64::from(tie), (low + high) / 2.0, "a tie is exact in single precision");
            let even = if code & 1 == 0 { code } else { code + 1 };
            assert_eq!(Fp8E4m3::encode(tie), even, "{code:#x}");
            assert_eq!(Fp8E4m3::encode(-tie), even | 0x80);
            assert_eq!(Fp8E4m3::encode(f32::from_bits(tie.to_bits() - 1)), code);
            assert_eq!(Fp8E4m3::encode(f32::from_bits(tie.to_bits() + 1)), code + 1);
        }
        for code in 0..127_u8 {
            let tie = f32::from(code) + 0.5;
            assert_eq!(Int8::encode(tie), (code + 1) & !1);
            assert_eq!(Int8::encode(-tie) as i8, -(((code + 1) & !1).min(127) as i8));
        }
        assert_eq!(Fp8E4m3::encode(500.0), 0x7e, "saturates");
        assert_eq!(Int8::encode(-127.4) as i8, -127);
        assert_eq!(Fp8E4m3::encode(1e-40), 0);
        assert_eq!(Fp8E4m3::encode(-0.0), 0x80);
    }
}
