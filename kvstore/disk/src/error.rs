//! Errors of the disk log.

use kvstore_io::IoError;

/// Errors of opening, formatting, inspecting and closing a store.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DiskError {
    /// The configuration cannot work on these areas.
    #[error("disk tier: {object}: {reason}")]
    Configuration {
        /// The configuration key or area.
        object: String,
        /// The fault, with the numbers.
        reason: String,
    },
    /// The area holds a store of another layout. Nothing was written.
    #[error("segment {segment} holds {found}, but {wanted} was configured; `reformat` would discard it")]
    Mismatch {
        /// Number of the segment.
        segment: u32,
        /// Description of the store that the segment holds.
        found: String,
        /// Description of the store that the configuration asks for.
        wanted: String,
    },
    /// The area holds bytes that are no store. Nothing was written.
    #[error(
        "segment {segment} at {offset:#x} of file {file} holds bytes that are no store; `reformat` would overwrite them"
    )]
    NotAStore {
        /// Number of the segment.
        segment: u32,
        /// Number of the segment's file.
        file: u32,
        /// First byte of the segment in the file.
        offset: u64,
    },
    /// The engine failed.
    #[error("disk tier: {operation}: {source}")]
    Io {
        /// The step that failed.
        operation: &'static str,
        /// Error of the engine.
        source: IoError,
    },
    /// The engine did not complete a request in time.
    #[error("disk tier: {operation}: {in_flight} requests without an answer after {waited_ms} ms")]
    Timeout {
        /// The step that timed out.
        operation: &'static str,
        /// Number of requests without an answer.
        in_flight: usize,
        /// Time waited, in milliseconds.
        waited_ms: u128,
    },
}
