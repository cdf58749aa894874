//! What goes into a copy queue and what comes out of it, apart from the copies.

use crate::error::CudaError;

/// The sizes of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyQueueConfig {
    /// Pieces of one flush, after neighbours were merged.
    pub copies_max: usize,
    /// Tokens that are accepted and not yet completed.
    pub tokens_max: usize,
    /// Flushes that are in flight.
    pub flushes_max: usize,
}

impl Default for CopyQueueConfig {
    fn default() -> Self {
        Self { copies_max: 4096, tokens_max: 4096, flushes_max: 64 }
    }
}

/// Why a submission was not accepted. Nothing of it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// There is no room now: flush and poll, then try again.
    #[error("the queue is full")]
    Full,
    /// It has more pieces than a flush ever has room for.
    #[error("{copies} pieces are more than one flush can have ({copies_max})")]
    TooMany {
        /// Pieces of the submission.
        copies: usize,
        /// [`CopyQueueConfig::copies_max`].
        copies_max: usize,
    },
    /// A place or a row does not exist.
    #[error("copy {index} of the submission is not inside its regions")]
    Outside {
        /// Which copy.
        index: usize,
    },
}

/// The end of a submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// The token that came with it.
    pub token: u64,
    /// How it ended. After an error the target's bytes may be anything.
    pub result: Result<(), CudaError>,
}

/// What a queue has done. Counts only grow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CopyQueueCounters {
    /// Copies submitted.
    pub copies: u64,
    /// Calls of the driver for them.
    pub calls: u64,
    /// Flushes.
    pub flushes: u64,
    /// Bytes handed to the driver.
    pub bytes: u64,
    /// Batch calls that the driver refused, as such or for one of their copies. Their copies were issued one by one.
    pub batches_refused: u64,
}
