//! Division by a number that is known at launch, as a multiplication (Granlund and Montgomery 1994, section
//! 4).

use bytemuck::{Pod, Zeroable};

/// One more than the largest dividend.
pub(crate) const DIVIDEND_END: u64 = 1 << 31;

/// Divides numbers below 2³¹ by `divisor`. Mirrors `Divider` in `kernels/base.cu`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
pub struct Divider {
    divisor: u32,
    multiplier: u32,
    shift: u32,
}

impl Divider {
    /// Creates the divider of a number from 1 to 2³¹ − 1; other numbers are clamped to that range.
    #[must_use]
    pub fn new(divisor: u32) -> Self {
        let divisor = divisor.clamp(1, (DIVIDEND_END - 1) as u32);
        if divisor == 1 {
            return Self { divisor, multiplier: 0, shift: 0 };
        }
        let log = 32 - (divisor - 1).leading_zeros();
        let multiplier = (1_u64 << (31 + log)).div_ceil(u64::from(divisor));
        Self { divisor, multiplier: multiplier as u32, shift: log - 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns `number / divisor`, computed as `divide` of `kernels/base.cu` does.
    fn divide(by: Divider, number: u32) -> u32 {
        if by.divisor == 1 {
            return number;
        }
        ((u64::from(number) * u64::from(by.multiplier)) >> 32) as u32 >> by.shift
    }

    #[test]
    fn quotients_are_exact_up_to_the_limit() {
        let divisors = (1..2000).chain([4095, 4096, 4097, 65_535, 1 << 30, (1 << 30) + 1, (1 << 31) - 1]);
        for divisor in divisors {
            let divider = Divider::new(divisor);
            let last = (1_u32 << 31) - 1;
            let multiple = last / divisor * divisor;
            let near = [
                0,
                1,
                divisor - 1,
                divisor,
                divisor.saturating_add(1),
                multiple - 1,
                multiple,
                last - 1,
                last,
            ];
            for number in near.into_iter().chain((0..500).map(|step| step * 4_294_967)) {
                if u64::from(number) < DIVIDEND_END {
                    assert_eq!(divide(divider, number), number / divisor, "{number} / {divisor}");
                }
            }
        }
    }
}
