//! Detection of contents on a device: file systems, partition tables and the like.
//!
//! Offsets and bytes are those that file(1) and libblkid know. Incomplete on purpose: the check protects
//! against a wrong path, not against intent.

/// Bytes at the start of a device that are examined.
pub const SIGNATURE_BYTES: usize = 72 << 10;

const SIGNATURES: [(&str, usize, &[u8]); 17] = [
    ("an ext2, ext3 or ext4 file system", 0x438, b"\x53\xEF"),
    ("an XFS file system", 0, b"XFSB"),
    ("a Btrfs file system", 0x1_0040, b"_BHRfS_M"),
    ("an F2FS file system", 0x400, b"\x10\x20\xF5\xF2"),
    ("an exFAT file system", 3, b"EXFAT   "),
    ("an NTFS file system", 3, b"NTFS    "),
    ("a SquashFS file system", 0, b"hsqs"),
    ("a Bcachefs file system", 0x1018, b"\xC6\x85\x73\xF6\x4E\x1A\x45\xCA"),
    ("an ISO 9660 file system", 0x8001, b"CD001"),
    ("swap space", 4086, b"SWAPSPACE2"),
    ("a LUKS volume", 0, b"LUKS\xBA\xBE"),
    ("an LVM physical volume", 512, b"LABELONE"),
    ("a member of a RAID", 0x1000, b"\xFC\x4E\x2B\xA9"),
    ("a member of a RAID", 0x1000, b"\xA9\x2B\x4E\xFC"),
    ("a GPT partition table", 512, b"EFI PART"),
    ("a GPT partition table", 4096, b"EFI PART"),
    ("a partition table or a FAT file system", 510, b"\x55\xAA"),
];

/// Returns the name of the signature in the first bytes of a device, if there is one.
pub fn signature(start: &[u8]) -> Option<&'static str> {
    let found = |(_, at, magic): &&(&str, usize, &[u8])| start.get(*at..at + magic.len()) == Some(*magic);
    SIGNATURES.iter().find(found).map(|(name, ..)| *name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_are_found_and_zeros_are_none() {
        assert_eq!(signature(&[]), None);
        assert_eq!(signature(&vec![0; SIGNATURE_BYTES]), None);
        for (name, at, magic) in SIGNATURES {
            let mut start = vec![0; SIGNATURE_BYTES];
            start[at..at + magic.len()].copy_from_slice(magic);
            assert_eq!(signature(&start), Some(name));
            assert_eq!(signature(&start[..at + magic.len() - 1]), None, "cut off");
        }
    }
}
