//! Translation of a device's status (Base 2.0c figures 92 to 98; NVM Command Set 1.0c figures 14 and 15).

use crate::IoErrorKind;

/// Bits of the status field that are type and code; above them are retry delay, "more" and "do not retry".
const CODE_MASK: u16 = 0x7FF;

/// Returns kind and words for a status that is not zero.
pub(super) fn meaning(status: u16) -> (IoErrorKind, &'static str) {
    match status & CODE_MASK {
        0x001 => (IoErrorKind::Unsupported, "invalid command opcode"),
        0x002 => (IoErrorKind::Invalid, "invalid field in command"),
        0x004 => (IoErrorKind::Device, "data transfer error"),
        0x005 => (IoErrorKind::Device, "aborted due to power loss"),
        0x006 => (IoErrorKind::Device, "internal error"),
        0x007 => (IoErrorKind::Device, "abort requested"),
        0x008 => (IoErrorKind::Device, "aborted as the queue was deleted"),
        0x00B => (IoErrorKind::Device, "invalid namespace or format"),
        0x013 => (IoErrorKind::Invalid, "PRP offset invalid"),
        0x015 => (IoErrorKind::Unsupported, "operation denied"),
        0x01E => (IoErrorKind::Unsupported, "sanitize in progress"),
        0x020 => (IoErrorKind::Unsupported, "namespace is write protected"),
        0x080 => (IoErrorKind::Invalid, "LBA out of range"),
        0x081 => (IoErrorKind::NoSpace, "capacity exceeded"),
        0x082 => (IoErrorKind::Device, "namespace not ready"),
        0x084 => (IoErrorKind::Device, "format in progress"),
        0x180 => (IoErrorKind::Invalid, "conflicting attributes"),
        0x182 => (IoErrorKind::Unsupported, "write to a read-only range"),
        0x280 => (IoErrorKind::Media, "write fault"),
        0x281 => (IoErrorKind::Media, "unrecovered read error"),
        0x282 => (IoErrorKind::Media, "guard check error"),
        0x283 => (IoErrorKind::Media, "application tag check error"),
        0x284 => (IoErrorKind::Media, "reference tag check error"),
        0x285 => (IoErrorKind::Media, "compare failure"),
        0x286 => (IoErrorKind::Unsupported, "access denied"),
        0x287 => (IoErrorKind::Media, "deallocated or unwritten block"),
        0x288 => (IoErrorKind::Media, "storage tag check error"),
        0x300..=0x3FF => (IoErrorKind::Device, "path error"),
        0x200..=0x2FF => (IoErrorKind::Media, "media error"),
        _ => (IoErrorKind::Other, "unknown status"),
    }
}

/// Describes a status: words, and type and code as the specification writes them.
pub(super) fn describe(status: u16) -> String {
    let (_, words) = meaning(status);
    let code = status & CODE_MASK;
    let again = if status & 0x4000 != 0 { ", do not retry" } else { "" };
    format!("{words} (type {:#x}, code {:#04x}{again})", code >> 8, code & 0xFF)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_has_a_meaning() {
        for (status, kind) in [
            (0x281, IoErrorKind::Media),
            (0x4281, IoErrorKind::Media),
            (0x2FE, IoErrorKind::Media),
            (0x371, IoErrorKind::Device),
            (0x080, IoErrorKind::Invalid),
            (0x4001, IoErrorKind::Unsupported),
            (0x7FF, IoErrorKind::Other),
        ] {
            assert_eq!(meaning(status).0, kind, "{status:#x}");
        }
        assert_eq!(describe(0x4281), "unrecovered read error (type 0x2, code 0x81, do not retry)");
        (0..=u16::MAX).for_each(|status| assert!(!describe(status).is_empty()));
    }
}
