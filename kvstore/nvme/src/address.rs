//! PCI addresses of NVMe devices.

use std::fmt;
use std::str::FromStr;

use crate::NvmeError;

/// A PCI function: `0000:01:00.0`, or `01:00.0` in domain 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

impl FromStr for PciAddress {
    type Err = NvmeError;

    fn from_str(text: &str) -> Result<Self, NvmeError> {
        let malformed = || NvmeError::Address(text.to_owned());
        // `from_str_radix` takes a sign, which an address has not.
        let number = |part: &str, max: u32| {
            u32::from_str_radix(part, 16)
                .ok()
                .filter(|&value| value <= max && !part.starts_with('+'))
                .ok_or_else(malformed)
        };
        let byte = |part: &str, max: u8| number(part, max.into()).map(|value| value as u8);
        let (slot, function) = text.rsplit_once('.').ok_or_else(malformed)?;
        let mut parts = slot.rsplit(':');
        let device = byte(parts.next().ok_or_else(malformed)?, 0x1f)?;
        let bus = byte(parts.next().ok_or_else(malformed)?, 0xff)?;
        let domain = parts.next().map_or(Ok(0), |part| number(part, u32::MAX))?;
        if parts.next().is_some() {
            return Err(malformed());
        }
        Ok(Self { domain, bus, device, function: byte(function, 7)? })
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:04x}:{:02x}:{:02x}.{:x}", self.domain, self.bus, self.device, self.function)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_written() {
        for (text, written) in [
            ("0000:01:00.0", "0000:01:00.0"),
            ("01:1f.7", "0000:01:1f.7"),
            ("10000:FF:02.3", "10000:ff:02.3"),
        ] {
            assert_eq!(text.parse::<PciAddress>().expect(text).to_string(), written);
        }
        for text in [
            "",
            "01",
            "01:00",
            "00:20.0",
            "00:01.8",
            "0:1:2:3.0",
            "x:1.0",
            "+1:+1.0",
            "100:00.0",
            "..",
            ":.0",
        ] {
            assert!(matches!(text.parse::<PciAddress>(), Err(NvmeError::Address(_))), "{text}");
        }
    }
}
