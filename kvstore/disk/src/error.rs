use kvstore_io::IoError;

/// Why a store could not be opened, formatted, inspected or closed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DiskError {
    /// The configuration cannot work on these areas.
    #[error("disk tier: {object}: {reason}")]
    Configuration {
        /// Which key or area.
        object: String,
        /// What is wrong with it, with the numbers.
        reason: String,
    },
    /// The area holds a store of another layout. Nothing was written.
    #[error("segment {segment} holds {found}, but {wanted} was configured; `reformat` would discard it")]
    Mismatch {
        /// Which segment.
        segment: u32,
        /// What is there.
        found: String,
        /// What was asked for.
        wanted: String,
    },
    /// The area holds bytes that are no store. Nothing was written.
    #[error(
        "segment {segment} at {offset:#x} of file {file} holds bytes that are no store; `reformat` would overwrite them"
    )]
    NotAStore {
        /// Which segment.
        segment: u32,
        /// Its file.
        file: u32,
        /// Where it starts.
        offset: u64,
    },
    /// The engine failed.
    #[error("disk tier: {operation}: {source}")]
    Io {
        /// What the store was doing.
        operation: &'static str,
        /// What the engine said.
        source: IoError,
    },
    /// The engine did not complete a request in time.
    #[error("disk tier: {operation}: {in_flight} requests without an answer after {waited_ms} ms")]
    Timeout {
        /// What the store was doing.
        operation: &'static str,
        /// How many requests are missing.
        in_flight: usize,
        /// For how long.
        waited_ms: u128,
    },
}
