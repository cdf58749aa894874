//! The listener without TLS, so that a service sees the same of its clients either way.

use std::io;
use std::time::Duration;

use axum::extract::connect_info::Connected;
use axum::serve::{IncomingStream, Listener};
use tokio::net::TcpListener;

use crate::identity::PeerAddr;
use crate::socket::ClientSocket;

/// How long to wait when the system gives no connection, for want of file descriptors.
const REST: Duration = Duration::from_millis(100);

/// A TCP listener for `axum::serve`, with Nagle's algorithm off.
#[derive(Debug)]
pub struct PlainListener {
    tcp: TcpListener,
    write_timeout: Option<Duration>,
}

impl PlainListener {
    /// A listener over a bound socket.
    #[must_use]
    pub fn new(tcp: TcpListener) -> Self {
        Self { tcp, write_timeout: None }
    }

    /// Gives connections up whose client takes no byte for so long while there is something to write.
    #[must_use]
    pub fn with_write_timeout(mut self, write_timeout: Duration) -> Self {
        self.write_timeout = Some(write_timeout);
        self
    }
}

/// The client was gone before it was accepted: its own affair.
fn is_clients(error: &io::Error) -> bool {
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
                Err(error) if is_clients(&error) => {}
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
