//! Submissions to a copy queue and their completions, except for the copies themselves.

use crate::error::CudaError;

/// Limits of a copy queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyQueueConfig {
    /// Largest number of pieces of one flush, after neighbours were merged.
    pub copies_max: usize,
    /// Largest number of tokens that are accepted and not yet completed.
    pub tokens_max: usize,
    /// Largest number of flushes in flight.
    pub flushes_max: usize,
}

impl Default for CopyQueueConfig {
    fn default() -> Self {
        Self { copies_max: 4096, tokens_max: 4096, flushes_max: 64 }
    }
}

/// Reason for which a submission was rejected. No part of the submission was accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The queue is full: flush and poll, then try again.
    #[error("the queue is full")]
    Full,
    /// The submission has more pieces than one flush can hold.
    #[error("{copies} pieces are more than one flush can have ({copies_max})")]
    TooMany {
        /// Pieces of the submission.
        copies: usize,
        /// [`CopyQueueConfig::copies_max`].
        copies_max: usize,
    },
    /// A position or a row is outside of its region.
    #[error("copy {index} of the submission is not inside its regions")]
    Outside {
        /// Index of the copy.
        index: usize,
    },
}

/// Completion of a submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// Token of the submission.
    pub token: u64,
    /// Result. After an error the content of the target is undefined.
    pub result: Result<(), CudaError>,
}

/// Counters of a queue. They only grow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CopyQueueCounters {
    /// Copies submitted.
    pub copies: u64,
    /// Driver calls for these copies.
    pub calls: u64,
    /// Flushes.
    pub flushes: u64,
    /// Bytes handed to the driver.
    pub bytes: u64,
    /// Batch calls that the driver refused, whole or for one of their copies. Their copies were issued one by
    /// one.
    pub batches_refused: u64,
}
