//! Errors. No variant holds text from a server, from the HTTP library or from a credentials file, and
//! none has a source, so that no secret repeated in such a text can be printed.

use std::path::PathBuf;

/// The configuration cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// Values out of range, one per line.
    #[error("object tier configuration:\n{0}")]
    Values(String),
    /// Every user may read the credentials file.
    #[error("credentials file {path}: mode {mode:o} lets every user read it; use 0600 or 0640")]
    WorldReadable {
        /// Path of the file.
        path: PathBuf,
        /// Permission bits of the file.
        mode: u32,
    },
    /// A credentials or certificate file cannot be read.
    #[error("{what} {path}: {kind}")]
    Unreadable {
        /// Purpose of the file.
        what: &'static str,
        /// Path of the file.
        path: PathBuf,
        /// Kind of the I/O error.
        kind: std::io::ErrorKind,
    },
    /// A credential is missing.
    #[error("credentials: {0} is not set")]
    MissingCredential(&'static str),
    /// The file holds no certificate.
    #[error("CA bundle {0}: no certificate in PEM form")]
    Certificate(PathBuf),
    /// The store could not be set up.
    #[error("object store at {0} cannot be set up")]
    Backend(String),
}

/// Type of a request to the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Read of an object's index.
    ReadIndex,
    /// Read of payloads.
    ReadPayload,
    /// Upload in one piece.
    Put,
    /// Start of an upload in parts.
    CreateUpload,
    /// Upload of one part.
    PutPart,
    /// End of an upload in parts.
    CompleteUpload,
    /// Deletion.
    Delete,
    /// Listing.
    List,
}

impl std::fmt::Display for Operation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::ReadIndex => "read index",
            Self::ReadPayload => "read payload",
            Self::Put => "put",
            Self::CreateUpload => "create upload",
            Self::PutPart => "put part",
            Self::CompleteUpload => "complete upload",
            Self::Delete => "delete",
            Self::List => "list",
        })
    }
}

/// Cause of a failed request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FailureCause {
    /// The object is not there.
    #[error("not found")]
    NotFound,
    /// The object exists already, or is not the expected one.
    #[error("precondition failed")]
    Precondition,
    /// The server does not support the operation.
    #[error("not implemented by the server")]
    NotImplemented,
    /// The server refused: credentials, bucket, region or request.
    #[error("refused by the server")]
    Denied,
    /// The server asks to slow down.
    #[error("server asks to slow down")]
    SlowDown,
    /// The range is outside the object.
    #[error("range outside the object")]
    OutOfRange,
    /// The server failed, or refused for another reason.
    #[error("server error")]
    Server,
    /// No connection, or it broke.
    #[error("connection failed")]
    Connection,
    /// The file system failed.
    #[error("input/output error, errno {0}")]
    Io(i32),
    /// One attempt took longer than `request_timeout`.
    #[error("timed out")]
    Timeout,
    /// The caller's deadline has passed.
    #[error("deadline passed")]
    Deadline,
    /// The breaker is open.
    #[error("the breaker is open")]
    BreakerOpen,
}

/// A request failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ObjectError {
    /// A request to the store failed.
    #[error("{operation} {bucket}/{key}: {cause}, status {}, after {attempts} attempts", status_text(*.status))]
    Request {
        /// Type of the request.
        operation: Operation,
        /// Bucket or directory.
        bucket: String,
        /// Key of the object, or prefix of the listing.
        key: String,
        /// HTTP status of the last answer, if there was one.
        status: Option<u16>,
        /// Cause of the failure.
        cause: FailureCause,
        /// Number of attempts made.
        attempts: u32,
    },
    /// The run cannot be stored.
    #[error("put: {0}")]
    Run(#[from] crate::format::FormatError),
    /// The number of blocks is neither a whole run nor an allowed part of one.
    #[error(
        "put: {blocks} blocks do not form a run (run_blocks {run_blocks}, store_partial {store_partial})"
    )]
    RunLength {
        /// Number of blocks given.
        blocks: usize,
        /// Blocks of a whole run.
        run_blocks: usize,
        /// Whether partial runs are stored.
        store_partial: bool,
    },
}

fn status_text(status: Option<u16>) -> String {
    status.map_or_else(|| "none".into(), |status| status.to_string())
}

impl ObjectError {
    /// The cause, if a request failed.
    #[must_use]
    pub fn cause(&self) -> Option<FailureCause> {
        match self {
            Self::Request { cause, .. } => Some(*cause),
            _ => None,
        }
    }
}
