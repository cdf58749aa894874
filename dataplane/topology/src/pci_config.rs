//! Reads from PCI configuration space whether a bridge's Access Control Services are on, which no other file
//! shows.
//!
//! Source: PCI Express Base Specification §7.7.11 (capability 0x000d; the control word at offset 6, bit 2
//! request redirect, bit 3 completion redirect). The file has 4096 bytes for root and 64 for other users.

use crate::sysfs::Tree;

const CONFIG_BYTES_MAX: u64 = 4096;
const EXTENDED_START: usize = 0x100;
const CAPABILITY_ACS: u32 = 0x000d;
const REDIRECT_BITS: u16 = 1 << 2 | 1 << 3;

/// Returns whether a bridge redirects requests; `None` when configuration space cannot be read beyond its
/// start.
pub(crate) fn acs_redirects(tree: &Tree, path: &str) -> Option<bool> {
    redirects(&tree.bytes(&format!("{path}/config"), CONFIG_BYTES_MAX)?)
}

fn redirects(config: &[u8]) -> Option<bool> {
    // Each capability takes at least four bytes: a list with more entries than that is a loop.
    const CAPABILITIES_MAX: usize = (CONFIG_BYTES_MAX as usize - EXTENDED_START) / 4;
    let mut offset = EXTENDED_START;
    for _ in 0..CAPABILITIES_MAX {
        let header = config.get(offset..offset + 4)?;
        let header = u32::from_le_bytes([header[0], header[1], header[2], header[3]]);
        if header & 0xffff == CAPABILITY_ACS {
            let control = config.get(offset + 6..offset + 8)?;
            return Some(u16::from_le_bytes([control[0], control[1]]) & REDIRECT_BITS != 0);
        }
        offset = (header >> 20) as usize & !3;
        if offset < EXTENDED_START {
            return Some(false);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(control: u8) -> Vec<u8> {
        let mut config = vec![0; 4096];
        // Advanced error reporting at 0x100, then ACS at 0x140.
        config[0x100..0x104].copy_from_slice(&(0x0001_u32 | 1 << 16 | 0x140 << 20).to_le_bytes());
        config[0x140..0x144].copy_from_slice(&(CAPABILITY_ACS | 1 << 16).to_le_bytes());
        config[0x146] = control;
        config
    }

    #[test]
    fn the_capability_is_found_or_absent() {
        assert_eq!(redirects(&config(0x1d)), Some(true));
        assert_eq!(redirects(&config(0x01)), Some(false));
        assert_eq!(redirects(&vec![0; 4096]), Some(false));
        assert_eq!(redirects(&[0; 64]), None);
        assert_eq!(redirects(&config(0x1d)[..0x145]), None);
    }

    #[test]
    fn a_loop_ends() {
        let mut config = vec![0; 4096];
        config[0x100..0x104].copy_from_slice(&(0x0001_u32 | 0x100 << 20).to_le_bytes());
        assert_eq!(redirects(&config), None);
    }
}
