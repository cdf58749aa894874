//! Errors of reads and writes, with the request that failed.

use crate::{Operation, Request};

/// Kind of a failure, as callers of an engine distinguish it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IoErrorKind {
    /// The request violates the contract: alignment, length or range.
    Invalid,
    /// The medium reports that it cannot return these bytes: the range is lost, other ranges are not.
    Media,
    /// The device was removed, was reset during the request, or does not answer.
    Device,
    /// The buffer's memory is not registered, and this engine requires that.
    Unmapped,
    /// No room on the device or the file system.
    NoSpace,
    /// Not supported or not permitted here.
    Unsupported,
    /// Any other failure. Includes a plain EIO: the cause may be the medium, a dead device or a file system
    /// that shut down, so the bytes must not be taken for lost.
    Other,
}

/// A failed operation of an engine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{engine}: {operation}: {reason}")]
pub struct IoError {
    /// Name of the engine.
    pub engine: &'static str,
    /// The operation and its object: "read 1048576 bytes at 0x100000 of file 2".
    pub operation: String,
    /// Kind of the failure.
    pub kind: IoErrorKind,
    /// The errno or NVMe status, in words and as a number.
    pub reason: String,
}

impl IoError {
    /// Returns the error for a request that violates clause 5 of the contract.
    #[must_use]
    #[cold]
    pub fn invalid(engine: &'static str, request: &Request, reason: &str) -> Self {
        Self {
            engine,
            operation: describe(request.operation, request.buffer.len(), request.offset, request.file),
            kind: IoErrorKind::Invalid,
            reason: reason.to_owned(),
        }
    }

    /// Returns the error for a system call or a request that failed with an errno.
    #[must_use]
    #[cold]
    pub fn from_errno(engine: &'static str, operation: String, errno: i32) -> Self {
        let reason = std::io::Error::from_raw_os_error(errno).to_string();
        Self { engine, operation, kind: kind_of_errno(errno), reason }
    }
}

/// "read 1048576 bytes at 0x100000 of file 2".
pub(crate) fn describe(operation: Operation, bytes: usize, offset: u64, file: u32) -> String {
    let verb = match operation {
        Operation::Read => "read",
        Operation::Write => "write",
    };
    format!("{verb} {bytes} bytes at {offset:#x} of file {file}")
}

/// Returns the kind of an errno of a read, a write or a sync. The block layer's own translation is `blk_errors`
/// in `block/blk-core.c`: a bad medium is ENODATA, a failed integrity check EILSEQ, a failed target EREMOTEIO;
/// EIO is everything that has no errno of its own, and so says nothing of the medium.
#[must_use]
pub fn kind_of_errno(errno: i32) -> IoErrorKind {
    match errno {
        libc::EREMOTEIO | libc::ENODATA | libc::EILSEQ => IoErrorKind::Media,
        libc::ENXIO | libc::ENODEV | libc::ETIME | libc::ETIMEDOUT | libc::ENOLINK | libc::ESHUTDOWN => {
            IoErrorKind::Device
        }
        libc::ENOSPC | libc::EDQUOT | libc::EFBIG => IoErrorKind::NoSpace,
        libc::EINVAL => IoErrorKind::Invalid,
        libc::EOPNOTSUPP | libc::EPERM | libc::EACCES | libc::ENOSYS | libc::EROFS | libc::ENOTTY => {
            IoErrorKind::Unsupported
        }
        _ => IoErrorKind::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_errno_says_what_it_means_for_the_caller() {
        for (errno, kind) in [
            (libc::EIO, IoErrorKind::Other),
            (libc::EREMOTEIO, IoErrorKind::Media),
            (libc::EILSEQ, IoErrorKind::Media),
            (libc::ENODATA, IoErrorKind::Media),
            (libc::ENODEV, IoErrorKind::Device),
            (libc::ETIME, IoErrorKind::Device),
            (libc::EDQUOT, IoErrorKind::NoSpace),
            (libc::EACCES, IoErrorKind::Unsupported),
            (libc::EBADF, IoErrorKind::Other),
            (0, IoErrorKind::Other),
            (-1, IoErrorKind::Other),
            (i32::MAX, IoErrorKind::Other),
        ] {
            assert_eq!(kind_of_errno(errno), kind, "errno {errno}");
        }
        let error = IoError::from_errno("pread", describe(Operation::Read, 4096, 8192, 2), libc::EIO);
        let text = "pread: read 4096 bytes at 0x2000 of file 2: Input/output error (os error 5)";
        assert_eq!(error.to_string(), text);
    }
}
