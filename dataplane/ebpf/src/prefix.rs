//! An IP prefix in an operator's notation: `10.0.0.0/8`, `fd00::/8`, or a single address.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

/// A block of addresses: all addresses whose first `bits` bits equal those of `address`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Prefix {
    address: IpAddr,
    bits: u8,
}

/// Fault of a prefix.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum PrefixError {
    /// The part before the slash is not an IPv4 or IPv6 address.
    #[error("{0:?} is no IP address")]
    Address(String),
    /// The part after the slash is not a prefix length of the address's family.
    #[error("{0:?} is no prefix length for this address (0 to 32 for IPv4, 0 to 128 for IPv6)")]
    Bits(String),
    /// Bits behind the prefix are set, which is most likely a typing error in the length or the address.
    #[error("{0} has bits set behind the prefix")]
    HostBits(String),
    /// An IPv4 address in IPv6 notation, which no packet carries.
    #[error("{0} is an IPv4 address in IPv6 notation: write it as IPv4")]
    Mapped(String),
}

impl Prefix {
    /// Creates the prefix of `address` with `bits` bits.
    ///
    /// # Errors
    ///
    /// [`PrefixError`] where `bits` is too large, bits behind the prefix are set, or the address is IPv4-mapped.
    pub fn new(address: IpAddr, bits: u8) -> Result<Self, PrefixError> {
        let (value, width) = match address {
            IpAddr::V4(v4) => (u128::from(v4.to_bits()) << 96, 32),
            IpAddr::V6(v6) if v6.to_ipv4_mapped().is_some() => {
                return Err(PrefixError::Mapped(v6.to_string()));
            }
            IpAddr::V6(v6) => (v6.to_bits(), 128),
        };
        if bits > width {
            return Err(PrefixError::Bits(bits.to_string()));
        }
        if value.checked_shl(u32::from(bits)).unwrap_or(0) != 0 {
            return Err(PrefixError::HostBits(format!("{address}/{bits}")));
        }
        Ok(Self { address, bits })
    }

    /// Returns the first address of the block.
    #[must_use]
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// Returns the length of the prefix in bits.
    #[must_use]
    pub fn bits(&self) -> u8 {
        self.bits
    }
}

impl FromStr for Prefix {
    type Err = PrefixError;

    fn from_str(text: &str) -> Result<Self, PrefixError> {
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().map_err(|_| PrefixError::Address(address.to_owned()))?;
        let bits = match bits {
            Some(bits) => bits.parse().map_err(|_| PrefixError::Bits(bits.to_owned()))?,
            None if address.is_ipv4() => 32,
            None => 128,
        };
        Self::new(address, bits)
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.bits)
    }
}

#[cfg(test)]
mod tests {
    use super::{Prefix, PrefixError};

    #[test]
    fn parses_what_operators_write() {
        for (text, shown) in [
            ("10.0.0.0/8", "10.0.0.0/8"),
            ("0.0.0.0/0", "0.0.0.0/0"),
            ("192.168.7.9", "192.168.7.9/32"),
            ("fd00::/8", "fd00::/8"),
            ("::/0", "::/0"),
            ("::1", "::1/128"),
        ] {
            assert_eq!(text.parse::<Prefix>().expect(text).to_string(), shown);
        }
    }

    #[test]
    fn refuses_what_they_cannot_mean() {
        for (text, error) in [
            ("10.0.0/8", PrefixError::Address("10.0.0".into())),
            ("10.0.0.0/33", PrefixError::Bits("33".into())),
            ("10.0.0.0/", PrefixError::Bits(String::new())),
            ("::/129", PrefixError::Bits("129".into())),
            ("10.0.0.1/8", PrefixError::HostBits("10.0.0.1/8".into())),
            ("fd00::1/64", PrefixError::HostBits("fd00::1/64".into())),
            ("::ffff:10.0.0.0/104", PrefixError::Mapped("::ffff:10.0.0.0".into())),
        ] {
            assert_eq!(text.parse::<Prefix>(), Err(error), "{text}");
        }
    }
}
