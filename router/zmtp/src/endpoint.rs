//! Endpoints, and the streams and listeners behind them.

use std::io::{self, ErrorKind};
use std::net::IpAddr;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::str::FromStr;
use std::task::{Context, Poll};
use std::time::Duration;

use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

use crate::Error;

/// Idle time after which a connection is probed.
const IDLE_MAX: Duration = Duration::from_secs(5);
/// Interval of probes.
const PROBE_EVERY: Duration = Duration::from_secs(5);
/// Number of unanswered probes after which a connection is closed.
const PROBES: u32 = 3;

/// Endpoint that a socket listens on or connects to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// `tcp://HOST:PORT`. A host `*` listens on all IPv4 addresses.
    Tcp {
        /// Host name or address, without brackets.
        host: String,
        /// Port; 0 lets the system choose when listening.
        port: u16,
    },
    /// `ipc://PATH`.
    Ipc(PathBuf),
}

impl Endpoint {
    /// The TCP port; `None` for a Unix socket.
    #[must_use]
    pub fn port(&self) -> Option<u16> {
        match self {
            Self::Tcp { port, .. } => Some(*port),
            Self::Ipc(_) => None,
        }
    }
}

impl FromStr for Endpoint {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let refused = || Error::Endpoint(text.to_owned());
        if let Some(path) = text.strip_prefix("ipc://") {
            // In libzmq a leading `@` means Linux's abstract namespace.
            let is_path = !path.is_empty() && !path.starts_with('@');
            return if is_path { Ok(Self::Ipc(PathBuf::from(path))) } else { Err(refused()) };
        }
        let authority = text.strip_prefix("tcp://").ok_or_else(refused)?;
        let (host, port) = authority.rsplit_once(':').ok_or_else(refused)?;
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        match port.parse() {
            Ok(port) if !host.is_empty() => Ok(Self::Tcp { host: host.to_owned(), port }),
            _ => Err(refused()),
        }
    }
}

impl std::fmt::Display for Endpoint {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(formatter, "tcp://[{host}]:{port}"),
            Self::Tcp { host, port } => write!(formatter, "tcp://{host}:{port}"),
            Self::Ipc(path) => write!(formatter, "ipc://{}", path.display()),
        }
    }
}

/// A connection of either transport.
#[derive(Debug)]
pub(crate) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    fn tcp(stream: TcpStream) -> Self {
        // Without this option messages are only slower.
        let _best_effort = stream.set_nodelay(true);
        // A connection that is already closed needs no option.
        let _gone = keep_alive(&stream);
        Self::Tcp(stream)
    }

    /// The peer's address; `None` over a Unix socket, and for a connection that is already closed.
    pub(crate) fn peer_address(&self) -> Option<IpAddr> {
        match self {
            Self::Tcp(stream) => stream.peer_addr().ok().map(|address| address.ip().to_canonical()),
            Self::Unix(_) => None,
        }
    }

    pub(crate) async fn connect(endpoint: &str) -> Result<Self, Error> {
        let failed = |source| Error::Connect { endpoint: endpoint.to_owned(), source };
        match endpoint.parse::<Endpoint>()? {
            Endpoint::Tcp { host, port } => {
                TcpStream::connect((host.as_str(), port)).await.map(Self::tcp).map_err(failed)
            }
            Endpoint::Ipc(path) => UnixStream::connect(path).await.map(Self::Unix).map_err(failed),
        }
    }
}

/// Enables TCP keep-alive. A subscriber sends nothing after its subscription: without probes it would wait for ever on a
/// connection whose peer lost power, or that a device on the path has dropped.
fn keep_alive(stream: &TcpStream) -> rustix::io::Result<()> {
    sockopt::set_tcp_keepidle(stream, IDLE_MAX)?;
    sockopt::set_tcp_keepintvl(stream, PROBE_EVERY)?;
    sockopt::set_tcp_keepcnt(stream, PROBES)?;
    sockopt::set_socket_keepalive(stream, true)
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_read(context, buffer),
            Self::Unix(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Unix(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_flush(context),
            Self::Unix(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Unix(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}

/// A socket file. Dropping it removes the file.
#[derive(Debug)]
pub(crate) struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _already_gone = std::fs::remove_file(&self.0);
    }
}

/// A listener of either transport.
#[derive(Debug)]
pub(crate) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener, #[allow(dead_code, reason = "removes the socket's file when dropped")] SocketFile),
}

impl Listener {
    /// Listens, and returns the endpoint with the port that the system chose.
    pub(crate) async fn bind(endpoint: &str) -> Result<(Self, Endpoint), Error> {
        let failed = |source| Error::Bind { endpoint: endpoint.to_owned(), source };
        match endpoint.parse::<Endpoint>()? {
            Endpoint::Tcp { host, port } => {
                let host = if host == "*" { "0.0.0.0" } else { host.as_str() };
                let listener = TcpListener::bind((host, port)).await.map_err(failed)?;
                let address = listener.local_addr().map_err(failed)?;
                let bound = Endpoint::Tcp { host: address.ip().to_string(), port: address.port() };
                Ok((Self::Tcp(listener), bound))
            }
            Endpoint::Ipc(path) => {
                let listener = bind_path(&path).await.map_err(failed)?;
                Ok((Self::Unix(listener, SocketFile(path.clone())), Endpoint::Ipc(path)))
            }
        }
    }

    /// The next connection. Cancel-safe.
    pub(crate) async fn accept(&self) -> io::Result<Stream> {
        match self {
            Self::Tcp(listener) => listener.accept().await.map(|(stream, _)| Stream::tcp(stream)),
            Self::Unix(listener, _) => listener.accept().await.map(|(stream, _)| Stream::Unix(stream)),
        }
    }
}

/// Listens at a path. A socket file that a dead process left there is replaced.
async fn bind_path(path: &Path) -> io::Result<UnixListener> {
    let error = match UnixListener::bind(path) {
        Ok(listener) => return Ok(listener),
        Err(error) => error,
    };
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
    if error.kind() != ErrorKind::AddrInUse || !is_socket {
        return Err(error);
    }
    match UnixStream::connect(path).await {
        Err(refused) if refused.kind() == ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path)?;
            UnixListener::bind(path)
        }
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_connection_is_probed() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let Stream::Tcp(stream) = Stream::connect(&format!("tcp://{address}")).await.expect("it listens")
        else {
            unreachable!("the endpoint is one of TCP");
        };
        assert_eq!(sockopt::socket_keepalive(&stream), Ok(true));
        assert_eq!(sockopt::tcp_keepidle(&stream), Ok(IDLE_MAX));
        assert_eq!(
            (sockopt::tcp_keepintvl(&stream), sockopt::tcp_keepcnt(&stream)),
            (Ok(PROBE_EVERY), Ok(PROBES))
        );
    }

    #[test]
    fn endpoints_are_read_and_written() {
        for (text, host, port) in [
            ("tcp://127.0.0.1:5557", "127.0.0.1", 5557),
            ("tcp://[::1]:0", "::1", 0),
            ("tcp://gateway.default.svc:65535", "gateway.default.svc", 65535),
            ("tcp://*:1", "*", 1),
        ] {
            let endpoint: Endpoint = text.parse().expect(text);
            assert_eq!(endpoint, Endpoint::Tcp { host: host.to_owned(), port });
            assert_eq!(endpoint.to_string(), text);
            assert_eq!(endpoint.port(), Some(port));
        }
        let path: Endpoint = "ipc:///run/kv".parse().expect("a path");
        assert_eq!((path.to_string().as_str(), path.port()), ("ipc:///run/kv", None));
        for text in ["", "tcp://", "tcp://host", "tcp://:1", "tcp://h:65536", "tcp://h:*", "inproc://x"] {
            assert!(text.parse::<Endpoint>().is_err(), "{text}");
        }
        for text in ["ipc://", "ipc://@abstract"] {
            assert!(text.parse::<Endpoint>().is_err(), "{text}");
        }
    }
}
