//! Status of a completed command (NVM Express Base Specification 2.0, 3.3.3.2.1, figures 93 to 102).

use std::fmt;

use kvstore_io::IoErrorKind;

/// The status field of a completion without its phase bit: code, code type, retry hints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status(pub u16);

impl Status {
    /// The command succeeded.
    pub const SUCCESS: Self = Self(0);

    /// Makes a status from status code type and status code.
    #[must_use]
    pub const fn new(code_type: u8, code: u8) -> Self {
        Self((code_type as u16 & 7) << 8 | code as u16)
    }

    /// Status code type: 0 generic, 1 specific to the command, 2 media and data integrity, 3 path, 7 vendor.
    #[must_use]
    pub const fn code_type(self) -> u8 {
        (self.0 >> 8) as u8 & 7
    }

    /// Status code.
    #[must_use]
    pub const fn code(self) -> u8 {
        self.0 as u8
    }

    /// Whether the command succeeded.
    #[must_use]
    #[inline]
    pub const fn is_success(self) -> bool {
        self.0 & 0x7ff == 0
    }

    /// Whether the same command would fail again.
    #[must_use]
    pub const fn do_not_retry(self) -> bool {
        self.0 >> 14 & 1 == 1
    }

    /// The kind of this error, as callers of an engine distinguish it.
    #[must_use]
    pub const fn kind(self) -> IoErrorKind {
        match (self.code_type(), self.code()) {
            // Invalid field, LBA out of range, conflicting attributes.
            (0, 0x02 | 0x80) | (1, 0x80) => IoErrorKind::Invalid,
            // Invalid opcode, namespace write protected, write to a read-only range, access denied.
            (0, 0x01 | 0x20) | (1, 0x82) | (2, 0x86) => IoErrorKind::Unsupported,
            // Capacity exceeded.
            (0, 0x81) => IoErrorKind::NoSpace,
            (2, _) => IoErrorKind::Media,
            (0 | 1 | 3, _) => IoErrorKind::Device,
            _ => IoErrorKind::Other,
        }
    }

    const fn words(self) -> &'static str {
        match (self.code_type(), self.code()) {
            (0, 0x00) => "success",
            (0, 0x01) => "invalid opcode",
            (0, 0x02) => "invalid field in command",
            (0, 0x04) => "data transfer error",
            (0, 0x05) => "aborted due to power loss",
            (0, 0x06) => "internal error",
            (0, 0x07) => "abort requested",
            (0, 0x08) => "aborted: the submission queue was deleted",
            (0, 0x0b) => "invalid namespace or format",
            (0, 0x13) => "invalid PRP offset",
            (0, 0x20) => "namespace is write protected",
            (0, 0x80) => "LBA out of range",
            (0, 0x81) => "capacity exceeded",
            (0, 0x82) => "namespace not ready",
            (0, 0x84) => "format in progress",
            (1, 0x80) => "conflicting attributes",
            (1, 0x82) => "write to a read-only range",
            (2, 0x80) => "write fault",
            (2, 0x81) => "unrecovered read error",
            (2, 0x82) => "end-to-end guard check failed",
            (2, 0x83) => "application tag check failed",
            (2, 0x84) => "reference tag check failed",
            (2, 0x85) => "compare failure",
            (2, 0x86) => "access denied",
            (2, 0x87) => "deallocated or unwritten block",
            (0, _) => "generic error",
            (1, _) => "command specific error",
            (2, _) => "media or data integrity error",
            (3, _) => "path error",
            (7, _) => "vendor specific error",
            _ => "unknown status",
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} (status type {}, code {:#04x}", self.words(), self.code_type(), self.code())?;
        out.write_str(if self.do_not_retry() { ", do not retry)" } else { ")" })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_status_has_a_meaning() {
        for (code_type, code, kind) in [
            (0, 0x80, IoErrorKind::Invalid),
            (0, 0x81, IoErrorKind::NoSpace),
            (0, 0x20, IoErrorKind::Unsupported),
            (0, 0x06, IoErrorKind::Device),
            (0, 0x07, IoErrorKind::Device),
            (2, 0x80, IoErrorKind::Media),
            (2, 0x81, IoErrorKind::Media),
            (2, 0xff, IoErrorKind::Media),
            (3, 0x00, IoErrorKind::Device),
            (7, 0x12, IoErrorKind::Other),
        ] {
            assert_eq!(Status::new(code_type, code).kind(), kind, "{}", Status::new(code_type, code));
        }
        for field in 0..=0x7fff {
            let status = Status(field);
            assert!(!status.to_string().is_empty() && status.is_success() == (field & 0x7ff == 0));
        }
        let status = Status(0x4281);
        assert_eq!(status.to_string(), "unrecovered read error (status type 2, code 0x81, do not retry)");
    }
}
