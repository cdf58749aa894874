//! The header of a quantised block: `b"KVQ1"`, four bytes of the scheme, the fingerprint of the block layout
//! and of the groups. A payload whose header differs in any bit was made by something else and is refused.

use crate::error::QuantiseError;
use crate::format::Format;
use crate::layout::{Grouping, QuantisedLayout};
use crate::scale::ScaleType;

/// Bytes of the header; the first plane starts at a multiple of this.
pub const HEADER_BYTES: usize = 64;

const MAGIC: [u8; 4] = *b"KVQ1";

impl QuantisedLayout {
    /// The header of every block of this layout.
    #[must_use]
    pub fn header(&self) -> [u8; HEADER_BYTES] {
        let scheme = self.scheme();
        let mut header = [0; HEADER_BYTES];
        header[0..4].copy_from_slice(&MAGIC);
        header[4] = match scheme.format {
            Format::Fp8E4m3 => 1,
            Format::Int8 => 2,
        };
        header[5] = match scheme.scale {
            ScaleType::F32 => 1,
            ScaleType::Bf16 => 2,
        };
        header[8..16].copy_from_slice(&self.layout().fingerprint().to_le_bytes());
        for (place, grouping) in [(16, scheme.keys), (20, scheme.values)] {
            let group = match grouping {
                Grouping::Channel => 0,
                Grouping::Token(group) => group,
            };
            header[place..place + 4].copy_from_slice(&group.to_le_bytes());
        }
        header
    }

    /// Whether a payload was made for this layout and scheme.
    pub fn check_header(&self, payload: &[u8]) -> Result<(), QuantiseError> {
        let wanted = self.header();
        let Some(found) = payload.get(..HEADER_BYTES) else {
            return Err(QuantiseError::Length {
                buffer: "payload",
                found: payload.len(),
                wanted: self.bytes(),
            });
        };
        let differing = wanted.chunks_exact(8).zip(found.chunks_exact(8)).find(|(one, other)| one != other);
        match differing {
            None => Ok(()),
            Some((wanted, found)) => Err(QuantiseError::Header { found: word(found), wanted: word(wanted) }),
        }
    }
}

fn word(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |word, byte| word << 8 | u64::from(*byte))
}
