//! The listener without TLS, with the same peer address and socket as with TLS.

use std::io;
use std::time::Duration;

use axum::extract::connect_info::Connected;
use axum::serve::{IncomingStream, Listener};
use tokio::net::TcpListener;

use crate::identity::PeerAddr;
use crate::socket::ClientSocket;

/// Pause after a failed accept, for example when file descriptors are used up.
const REST: Duration = Duration::from_millis(100);

/// A TCP listener for `axum::serve`, with Nagle's algorithm off.
#[derive(Debug)]
pub struct PlainListener {
    tcp: TcpListener,
    write_timeout: Option<Duration>,
}

impl PlainListener {
    /// Creates a listener over a bound socket.
    #[must_use]
    pub fn new(tcp: TcpListener) -> Self {
        Self { tcp, write_timeout: None }
    }

    /// Closes connections whose client reads no byte for `write_timeout` while there are bytes to write.
    #[must_use]
    pub fn with_write_timeout(mut self, write_timeout: Duration) -> Self {
        self.write_timeout = Some(write_timeout);
        self
    }
}

/// Whether the client closed the connection before it was accepted, which is not a failure of the system.
fn is_client_abort(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionRefused | io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset
    )
}

impl Listener for PlainListener {
    type Io = ClientSocket;
    type Addr = PeerAddr;

    async fn accept(&mut self) -> (ClientSocket, PeerAddr) {
        loop {
            match self.tcp.accept().await {
                Ok((stream, addr)) => {
                    let stream = ClientSocket::accepted(stream, self.write_timeout);
                    return (stream, PeerAddr { addr, certificate: None });
                }
                Err(error) if is_client_abort(&error) => {}
                Err(error) => {
                    tracing::error!(%error, "no connection can be accepted");
                    tokio::time::sleep(REST).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<PeerAddr> {
        self.tcp.local_addr().map(|addr| PeerAddr { addr, certificate: None })
    }
}

impl Connected<IncomingStream<'_, PlainListener>> for PeerAddr {
    fn connect_info(stream: IncomingStream<'_, PlainListener>) -> Self {
        stream.remote_addr().clone()
    }
}
