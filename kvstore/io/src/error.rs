/// What went wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IoErrorKind {
    /// The request breaks the contract: alignment, length or range.
    Invalid,
    /// The medium cannot give these bytes back; the range is lost, the rest is not.
    Media,
    /// The device is gone, was reset under the request, or does not answer.
    Device,
    /// The buffer's memory is not registered, and this engine needs it to be.
    Unmapped,
    /// No room on the device or the file system.
    NoSpace,
    /// Not supported or not permitted here.
    Unsupported,
    /// Anything else.
    Other,
}

/// A failed operation of an engine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{engine}: {operation}: {reason}")]
pub struct IoError {
    /// Name of the engine.
    pub engine: &'static str,
    /// What was tried, and on what: "read 1048576 bytes at 0x100000 of file 2".
    pub operation: String,
    /// What it means for the caller.
    pub kind: IoErrorKind,
    /// The errno or NVMe status, in words and as a number.
    pub reason: String,
}
