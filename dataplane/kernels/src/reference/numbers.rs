//! Elements and codes by their definitions.

use crate::quantised::{Element, Format};

/// The element's value; exact.
#[must_use]
pub fn element_from(element: Element, bytes: &[u8]) -> f64 {
    match element {
        Element::Bf16 => f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16).into(),
        Element::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]).into(),
        Element::F16 => {
            let bits = u16::from_le_bytes([bytes[0], bytes[1]]);
            let (exponent, mantissa) = (i32::from(bits >> 10 & 31), f64::from(bits & 0x3ff) / 1024.0);
            let magnitude = match exponent {
                31 if mantissa == 0.0 => f64::INFINITY,
                31 => f64::NAN,
                0 => mantissa * 2_f64.powi(-14),
                _ => (1.0 + mantissa) * 2_f64.powi(exponent - 15),
            };
            if bits >> 15 == 0 { magnitude } else { -magnitude }
        }
    }
}

/// (bits of the mantissa, least normal exponent, greatest value) of an element.
fn precision(element: Element) -> (i32, i32, f64) {
    match element {
        Element::Bf16 => (7, -126, f32::from_bits(0x7f7f_0000).into()),
        Element::F16 => (10, -14, 65_504.0),
        Element::F32 => (23, -126, f32::MAX.into()),
    }
}

/// Nearest multiple of the step that numbers of this size have, ties to even.
fn round_to(value: f64, mantissa_bits: i32, least_exponent: i32) -> f64 {
    if value == 0.0 {
        return value;
    }
    let exponent = ((value.to_bits() >> 52 & 0x7ff) as i32 - 1023).max(least_exponent);
    let step = 2_f64.powi(exponent - mantissa_bits);
    (value / step).round_ties_even() * step
}

/// Writes the nearest element; what is too large becomes the greatest finite one, a NaN the quiet one.
pub fn element_to(element: Element, value: f64, bytes: &mut [u8]) {
    let (mantissa_bits, least_exponent, greatest) = precision(element);
    let sign = u32::from(value.is_sign_negative());
    let rounded = round_to(value.clamp(-greatest, greatest), mantissa_bits, least_exponent);
    match element {
        Element::F32 if value.is_nan() => bytes.copy_from_slice(&(0x7fc0_0000 | sign << 31).to_le_bytes()),
        Element::F32 => bytes.copy_from_slice(&(rounded as f32).to_le_bytes()),
        Element::Bf16 if value.is_nan() => {
            bytes.copy_from_slice(&(0x7fc0 | (sign << 15) as u16).to_le_bytes())
        }
        Element::Bf16 => bytes.copy_from_slice(&((rounded as f32).to_bits().to_le_bytes())[2..]),
        Element::F16 if value.is_nan() => {
            bytes.copy_from_slice(&(0x7e00 | (sign << 15) as u16).to_le_bytes())
        }
        Element::F16 => {
            let magnitude = rounded.abs();
            let exponent = ((magnitude.to_bits() >> 52) as i32 - 1023).max(-15);
            let bits = if exponent < -14 {
                (magnitude * 2_f64.powi(24)) as u32
            } else {
                ((exponent + 15) as u32) << 10 | ((magnitude / 2_f64.powi(exponent) - 1.0) * 1024.0) as u32
            };
            bytes.copy_from_slice(&((bits | sign << 15) as u16).to_le_bytes());
        }
    }
}

/// The code's value by its definition; exact.
#[must_use]
pub fn decode(format: Format, code: u8) -> f64 {
    if format == Format::Int8 {
        return f64::from(code as i8);
    }
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    let magnitude = match exponent {
        15 if code & 7 == 7 => f64::NAN,
        0 => mantissa / 8.0 * 2_f64.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2_f64.powi(exponent - 7),
    };
    magnitude.copysign(if code & 0x80 == 0 { 1.0 } else { -1.0 })
}

/// The greatest magnitude of a code.
pub(super) fn code_max(format: Format) -> f64 {
    match format {
        Format::Fp8E4m3 => 448.0,
        Format::Int8 => 127.0,
    }
}

/// The code nearest to a value, ties to the even one; the greatest for what is greater.
pub(super) fn encode(format: Format, value: f64) -> u8 {
    let most = code_max(format);
    let value = value.clamp(-most, most);
    if format == Format::Int8 {
        return value.round_ties_even() as i8 as u8;
    }
    // Codes grow with their values: the last that is not greater, or the next.
    let magnitude = value.abs();
    let (mut low, mut end) = (0_u8, 127_u8);
    while end - low > 1 {
        let middle = low.midpoint(end);
        if decode(format, middle) <= magnitude { low = middle } else { end = middle }
    }
    let next = (low + 1).min(126);
    let (down, up) = (magnitude - decode(format, low), decode(format, next) - magnitude);
    let code = if up < down || (up == down && low % 2 == 1) { next } else { low };
    code | u8::from(value.is_sign_negative()) << 7
}
