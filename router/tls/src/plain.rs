//! The listener without TLS, so that a service sees the same of its clients either way.

use std::io;
use std::time::Duration;

use axum::extract::connect_info::Connected;
use axum::serve::{IncomingStream, Listener};
use tokio::net::{TcpListener, TcpStream};

use crate::identity::PeerAddr;

/// How long to wait when the system gives no connection, for want of file descriptors.
const REST: Duration = Duration::from_millis(100);

/// A TCP listener for `axum::serve`, with Nagle's algorithm off.
#[derive(Debug)]
pub struct PlainListener(TcpListener);

impl PlainListener {
    /// A listener over a bound socket.
    #[must_use]
    pub fn new(tcp: TcpListener) -> Self {
        Self(tcp)
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
    type Io = TcpStream;
    type Addr = PeerAddr;

    async fn accept(&mut self) -> (TcpStream, PeerAddr) {
        loop {
            match self.0.accept().await {
                Ok((stream, addr)) => {
                    // A connection that is gone already needs no option.
                    let _gone = stream.set_nodelay(true);
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
        self.0.local_addr().map(|addr| PeerAddr { addr, certificate: None })
    }
}

impl Connected<IncomingStream<'_, PlainListener>> for PeerAddr {
    fn connect_info(stream: IncomingStream<'_, PlainListener>) -> Self {
        stream.remote_addr().clone()
    }
}
