//! Failures of files, which the operator must correct, and of connections of the client side.

use std::io;
use std::path::PathBuf;

/// A failure, named by the operation. No variant contains contents of a key file.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("reading {path}: {source}", path = path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A file was read, but has wrong contents.
    #[error("{path}: {reason}", path = path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Description of the problem.
        reason: String,
    },
    /// The key belongs to another certificate.
    #[error(
        "the key in {key} does not match the first certificate in {certificate}",
        key = key.display(), certificate = certificate.display()
    )]
    KeyMismatch {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
    },
    /// Settings that contradict each other, or that rustls refuses.
    #[error("the configuration of TLS is bad: {reason}")]
    Config {
        /// Reason, in words.
        reason: String,
    },
    /// The system has no usable root certificates.
    #[error("the system's root certificates: {reason}")]
    SystemRoots {
        /// Reason, in words.
        reason: String,
    },
    /// A host that is neither a name nor an address.
    #[error("{name:?} is no name of a server and no address")]
    ServerName {
        /// The host.
        name: String,
    },
    /// The handshake with a server failed; the source says whether its certificate was refused.
    #[error("TLS with {host}: {source}")]
    Handshake {
        /// The server.
        host: String,
        /// Error of the handshake.
        source: io::Error,
    },
    /// The handshake with a server took too long.
    #[error("TLS with {host}: no answer in time")]
    Timeout {
        /// The server.
        host: String,
    },
}

impl TlsError {
    pub(crate) fn config(reason: impl ToString) -> Self {
        Self::Config { reason: reason.to_string() }
    }
}
