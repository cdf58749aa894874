//! Status codes of calls: zero and above are outcomes, negative values are failures.

use std::ffi::CStr;

use crate::backend::{BackendError, GetOutcome, PutOutcome};

/// `kvasir_kv_status` in C.
#[repr(i32)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// The block is not there.
    Miss = 1,
    /// The block was there already.
    Present = 2,
    /// No room or no bandwidth now; nothing was done.
    Throttled = 3,
    /// A null pointer, a size of zero, an unknown operation.
    InvalidArgument = -1,
    /// No open store has this handle.
    InvalidHandle = -2,
    /// The buffers are smaller than the block; the sizes that it needs were written.
    BufferTooSmall = -3,
    /// The store never accepts blocks of this size.
    TooLarge = -4,
    /// The configuration is wrong.
    Configuration = -5,
    /// The store failed.
    Failed = -6,
    /// A bug in this library; the store may still be used.
    Panicked = -7,
}

impl Status {
    /// All status codes.
    pub const ALL: [Self; 11] = [
        Self::Ok,
        Self::Miss,
        Self::Present,
        Self::Throttled,
        Self::InvalidArgument,
        Self::InvalidHandle,
        Self::BufferTooSmall,
        Self::TooLarge,
        Self::Configuration,
        Self::Failed,
        Self::Panicked,
    ];

    /// Returns the text of a code, which may be any number.
    pub(crate) fn text(code: i32) -> &'static CStr {
        match Self::ALL.into_iter().find(|status| *status as i32 == code) {
            Some(Self::Ok) => c"done",
            Some(Self::Miss) => c"the block is not there",
            Some(Self::Present) => c"the block was there already",
            Some(Self::Throttled) => c"no room or bandwidth at the moment",
            Some(Self::InvalidArgument) => c"invalid argument",
            Some(Self::InvalidHandle) => c"no open store has this handle",
            Some(Self::BufferTooSmall) => c"the block does not fit into the buffers",
            Some(Self::TooLarge) => c"the block is larger than the store takes",
            Some(Self::Configuration) => c"the configuration is wrong",
            Some(Self::Failed) => c"the store failed",
            Some(Self::Panicked) => c"a bug in libkvasir_kv",
            None => c"unknown status",
        }
    }
}

impl From<GetOutcome> for Status {
    fn from(outcome: GetOutcome) -> Self {
        match outcome {
            GetOutcome::Read => Self::Ok,
            GetOutcome::Miss => Self::Miss,
            GetOutcome::Throttled => Self::Throttled,
        }
    }
}

impl From<PutOutcome> for Status {
    fn from(outcome: PutOutcome) -> Self {
        match outcome {
            PutOutcome::Stored => Self::Ok,
            PutOutcome::Present => Self::Present,
            PutOutcome::Throttled => Self::Throttled,
        }
    }
}

/// A negative status, and a sentence that explains it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) status: Status,
    pub(crate) text: String,
    /// Bytes of meta and payload of the block that did not fit the buffers.
    pub(crate) needed: Option<(usize, usize)>,
}

impl Failure {
    pub(crate) fn new(status: Status, text: impl Into<String>) -> Self {
        Self { status, text: text.into(), needed: None }
    }

    /// The failure of an allocation for data that the caller handed over.
    pub(crate) fn no_memory(what: &str) -> Self {
        Self::new(Status::Failed, format!("no memory for {what}"))
    }
}

impl From<BackendError> for Failure {
    fn from(error: BackendError) -> Self {
        let (status, needed) = match error {
            BackendError::DestinationTooSmall { meta_bytes, payload_bytes } => {
                (Status::BufferTooSmall, Some((meta_bytes, payload_bytes)))
            }
            BackendError::TooLarge { .. } => (Status::TooLarge, None),
            BackendError::Failed { .. } => (Status::Failed, None),
        };
        Self { status, text: error.to_string(), needed }
    }
}
