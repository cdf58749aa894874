//! What can fail: files, which the operator mends, and a connection of the client side.

use std::io;
use std::path::PathBuf;

/// A failure, named by the operation. No variant shows what is in a key file.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("reading {path}: {source}", path = path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file was read, but does not hold what it should.
    #[error("{path}: {reason}", path = path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
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
        /// Why.
        reason: String,
    },
    /// The system has no roots that can be used.
    #[error("the system's root certificates: {reason}")]
    SystemRoots {
        /// Why.
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
        /// Why.
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
