//! Failures of sockets.

use crate::wire::WireError;

/// A socket cannot be opened, or a connection has ended.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The endpoint's form is unknown.
    #[error("endpoint {0:?}: only tcp://HOST:PORT and ipc://PATH are supported")]
    Endpoint(String),
    /// The endpoint cannot be listened on.
    #[error("cannot listen on {endpoint}: {source}")]
    Bind {
        /// As it was given.
        endpoint: String,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The endpoint cannot be connected to.
    #[error("cannot connect to {endpoint}: {source}")]
    Connect {
        /// As it was given.
        endpoint: String,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The peer's bytes are not ZMTP 3, or exceed a limit.
    #[error("the peer's bytes are refused: {0}")]
    Wire(#[from] WireError),
    /// The peer is no partner for this socket.
    #[error("handshake: {0}")]
    Handshake(&'static str),
    /// The peer answered the handshake with ERROR.
    #[error("the peer refused the handshake: {0}")]
    Refused(String),
    /// The peer took too long.
    #[error("the peer was too slow: {0}")]
    Slow(&'static str),
    /// The peer exceeded a limit of the socket.
    #[error("limit reached: {0}")]
    Limit(&'static str),
    /// The peer has closed the connection.
    #[error("the peer closed the connection")]
    Closed,
    /// The connection is broken.
    #[error("the connection broke: {0}")]
    Io(#[from] std::io::Error),
}

impl Error {
    /// Whether the peer broke the protocol or a limit, rather than just going away.
    pub(crate) fn is_misbehaviour(&self) -> bool {
        matches!(self, Self::Wire(_) | Self::Handshake(_) | Self::Slow(_) | Self::Limit(_))
    }
}
