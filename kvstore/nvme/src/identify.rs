//! Identify structures of a controller and a namespace (Base Specification 2.0, 5.17.2.1; NVM Command Set 1.0,
//! 4.1.5.1).

use crate::NvmeError;

/// Bytes of an identify structure.
pub(crate) const IDENTIFY_BYTES: usize = 4096;
/// A page, in the controller's units too: `CC.MPS` is 0.
const PAGE_BYTES: usize = 4096;

/// Identity of a controller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ControllerIdentity {
    /// Model number.
    pub model: String,
    /// Serial number.
    pub serial: String,
    /// Firmware revision.
    pub firmware: String,
    /// The longest transfer of one command (MDTS), or `None` without a limit.
    pub transfer_bytes_max: Option<usize>,
    /// Largest namespace number.
    pub namespaces_max: u32,
    /// Whether the controller has a volatile write cache, so that FLUSH is needed (VWC).
    pub has_volatile_cache: bool,
    /// Whether the controller takes scatter-gather descriptors in I/O commands (SGLS).
    pub takes_sgl: bool,
}

/// Identity of a namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NamespaceIdentity {
    /// Number of the namespace.
    pub id: u32,
    /// Size of the namespace in blocks.
    pub blocks: u64,
    /// Bytes of a block in its present format.
    pub block_bytes: usize,
}

impl NamespaceIdentity {
    /// Size of the namespace in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.blocks.saturating_mul(self.block_bytes as u64)
    }
}

fn text(bytes: &[u8]) -> String {
    // The specification pads ASCII with blanks; any other byte is replaced, so that it cannot harm a terminal.
    let text: String =
        bytes.iter().map(|&byte| if (0x20..0x7f).contains(&byte) { byte as char } else { '?' }).collect();
    text.trim().to_owned()
}

fn word(bytes: &[u8; IDENTIFY_BYTES], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

impl ControllerIdentity {
    pub(crate) fn parse(bytes: &[u8; IDENTIFY_BYTES]) -> Self {
        let transfer_exponent = bytes[77];
        Self {
            serial: text(&bytes[4..24]),
            model: text(&bytes[24..64]),
            firmware: text(&bytes[64..72]),
            transfer_bytes_max: match transfer_exponent {
                1..32 => Some(PAGE_BYTES << transfer_exponent),
                _ => None,
            },
            namespaces_max: word(bytes, 516),
            has_volatile_cache: bytes[525] & 1 == 1,
            takes_sgl: matches!(word(bytes, 536) & 3, 1 | 2),
        }
    }
}

impl NamespaceIdentity {
    pub(crate) fn parse(device: &str, id: u32, bytes: &[u8; IDENTIFY_BYTES]) -> Result<Self, NvmeError> {
        let unsupported = |what: String| NvmeError::Unsupported { device: device.to_owned(), what };
        let blocks = u64::from(word(bytes, 0)) | u64::from(word(bytes, 4)) << 32;
        if blocks == 0 {
            return Err(unsupported(format!("namespace {id} is not active (`nvme list-ns`)")));
        }
        // The number of the format has its upper two bits apart from the lower four.
        let format = usize::from(bytes[26] & 0xf | bytes[26] >> 1 & 0x30);
        if format > usize::from(bytes[25]) {
            return Err(unsupported(format!(
                "namespace {id} has format {format}, which it does not describe"
            )));
        }
        let format = word(bytes, 128 + 4 * format);
        let (metadata_bytes, exponent) = (format & 0xffff, format >> 16 & 0xff);
        if metadata_bytes != 0 || bytes[29] & 7 != 0 {
            return Err(unsupported(format!(
                "namespace {id} is formatted with {metadata_bytes} bytes of metadata per block or protection; \
                 format it without (`nvme format`)"
            )));
        }
        if !(9..=12).contains(&exponent) {
            return Err(unsupported(format!(
                "namespace {id} has blocks of 2^{exponent} bytes, not of 512 to 4096"
            )));
        }
        Ok(Self { id, blocks, block_bytes: 1 << exponent })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn namespace(change: impl FnOnce(&mut [u8; IDENTIFY_BYTES])) -> Result<NamespaceIdentity, NvmeError> {
        let mut bytes = [0; IDENTIFY_BYTES];
        bytes[..8].copy_from_slice(&1000_u64.to_le_bytes());
        bytes[25] = 1;
        bytes[26] = 1;
        bytes[128 + 2] = 9;
        bytes[132 + 2] = 12;
        change(&mut bytes);
        NamespaceIdentity::parse("test", 1, &bytes)
    }

    #[test]
    fn namespaces_that_cannot_be_used_are_refused() {
        let expected = NamespaceIdentity { id: 1, blocks: 1000, block_bytes: 4096 };
        assert_eq!(namespace(|_| ()), Ok(expected));
        assert_eq!(namespace(|bytes| bytes[26] = 0).map(|found| found.block_bytes), Ok(512));
        type Change = fn(&mut [u8; IDENTIFY_BYTES]);
        let refused: [(Change, &str); 5] = [
            (|bytes| bytes[..8].fill(0), "not active"),
            (|bytes| bytes[26] = 2, "does not describe"),
            (|bytes| bytes[132] = 8, "metadata"),
            (|bytes| bytes[29] = 1, "protection"),
            (|bytes| bytes[134] = 13, "2^13"),
        ];
        for (change, words) in refused {
            let error = namespace(change).expect_err(words);
            assert!(error.to_string().contains(words), "{error}");
        }
    }

    #[test]
    fn random_structures_are_no_panic() {
        let mut state = 7_u64;
        for _ in 0..2000 {
            let mut bytes = [0; IDENTIFY_BYTES];
            for byte in &mut bytes {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                *byte = (state >> 56) as u8;
            }
            let identity = ControllerIdentity::parse(&bytes);
            assert!(identity.model.is_ascii());
            let _ = NamespaceIdentity::parse("test", 1, &bytes);
        }
    }
}
