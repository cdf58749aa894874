//! A client's socket that fails when the client has read nothing for too long.
//!
//! HTTP servers wait for a full socket without limit: the request behind it keeps its place and its engine.
//! Two timers end that. The kernel's, `TCP_USER_TIMEOUT`, runs while bytes that were sent are not
//! acknowledged or the client's window is closed. The one here runs while [`TcpStream`] accepts no byte,
//! wherever the kernel's does not.
//!
//! A socket becomes writable only once a good part of its buffer is free, which may take minutes with a
//! slow reader. So at each quarter of the time the bytes are offered to the kernel directly: an accepted
//! byte restarts the time. A client that reads a segment in that time is alive.
//!
//! Under TLS the socket is the lowest layer, so bytes on the wire count. One timer for each socket, made
//! when the socket is full for the first time; a write that succeeds has no extra cost.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use rustix::net::{SendFlags, send, sockopt};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep};

/// Number of times that bytes are offered to a full socket before its time is over.
const OFFERS: u32 = 4;

/// A client's socket with a write timeout.
#[derive(Debug)]
pub struct ClientSocket<S = TcpStream> {
    inner: S,
    /// Writes the bytes that fit now, regardless of the reactor's readiness state.
    offer: fn(&S, &[u8]) -> io::Result<usize>,
    /// Longest time without an accepted byte; `None` is no limit.
    write_timeout: Option<Duration>,
    timer: Option<Pin<Box<Sleep>>>,
    /// Offers that were refused since the socket became full; `None` while it is not full.
    refused: Option<u32>,
}

impl ClientSocket {
    /// Wraps an accepted socket: Nagle's algorithm off, and keep-alive and the kernel's timer on if there
    /// is a limit. Errors of a connection that is already closed are ignored.
    pub(crate) fn accepted(tcp: TcpStream, write_timeout: Option<Duration>) -> Self {
        let _gone = tcp.set_nodelay(true);
        if let Some(limit) = write_timeout {
            let _gone = set_dead_peer_timeout(&tcp, limit);
        }
        let offer = |tcp: &TcpStream, bytes: &[u8]| {
            send(tcp, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).map_err(io::Error::from)
        };
        Self::new(tcp, offer, write_timeout)
    }
}

/// Has the kernel close a connection whose peer shows no sign of life for `limit`: bytes are not
/// acknowledged or not read, or, while nothing is sent, probes are not answered. With `TCP_USER_TIMEOUT`
/// Linux gives up at the first unanswered probe after `limit`, however many there were
/// (`tcp_keepalive_timer`), so the first is sent at half of it: a lost one does no harm.
///
/// # Errors
/// When the connection is already closed.
pub fn set_dead_peer_timeout(tcp: &TcpStream, limit: Duration) -> rustix::io::Result<()> {
    sockopt::set_tcp_user_timeout(tcp, u32::try_from(limit.as_millis()).unwrap_or(u32::MAX))?;
    let second = Duration::from_secs(1);
    sockopt::set_tcp_keepidle(tcp, (limit / 2).max(second))?;
    sockopt::set_tcp_keepintvl(tcp, (limit / 8).max(second))?;
    sockopt::set_socket_keepalive(tcp, true)
}

impl<S> ClientSocket<S> {
    fn new(inner: S, offer: fn(&S, &[u8]) -> io::Result<usize>, write_timeout: Option<Duration>) -> Self {
        Self { inner, offer, write_timeout, timer: None, refused: None }
    }

    /// Returns the inner socket.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }

    /// Returns the result of a write: unchanged, or an error when the socket has been full for too long.
    fn check_write_timeout(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let Some(limit) = self.write_timeout else { return written };
        if written.is_ready() || bytes.is_empty() {
            self.refused = None;
            return written;
        }
        let step = limit / OFFERS;
        let timer = self.timer.get_or_insert_with(|| Box::pin(sleep(step)));
        if self.refused.is_none() {
            timer.as_mut().reset(Instant::now() + step);
        }
        loop {
            let refused = self.refused.get_or_insert(0);
            ready!(timer.as_mut().poll(context));
            match (self.offer)(&self.inner, bytes) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    *refused += 1;
                    if *refused >= OFFERS {
                        return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
                    }
                    timer.as_mut().reset(Instant::now() + step);
                }
                taken => {
                    self.refused = None;
                    return Poll::Ready(taken);
                }
            }
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ClientSocket<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ClientSocket<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write(context, bytes);
        self.check_write_timeout(context, written, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write_vectored(context, parts);
        let first = parts.iter().find(|part| !part.is_empty());
        self.check_write_timeout(context, written, first.map_or(&[][..], |part| &part[..]))
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
    use tokio::time::timeout;

    use super::*;

    const LIMIT: Duration = Duration::from_millis(80);
    const PATIENCE: Duration = Duration::from_secs(20);

    fn full(_: &DuplexStream, _: &[u8]) -> io::Result<usize> {
        Err(io::ErrorKind::WouldBlock.into())
    }

    #[tokio::test]
    async fn a_dead_peer_is_probed_before_its_time_is_over() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let tcp = TcpStream::connect(listener.local_addr().expect("an address")).await.expect("it listens");
        let limit = Duration::from_secs(40);
        set_dead_peer_timeout(&tcp, limit).expect("options");
        assert_eq!(sockopt::tcp_user_timeout(&tcp), Ok(40_000));
        let (idle, interval) = (sockopt::tcp_keepidle(&tcp), sockopt::tcp_keepintvl(&tcp));
        let (idle, interval) = (idle.expect("a time"), interval.expect("a time"));
        assert_eq!(sockopt::socket_keepalive(&tcp), Ok(true));
        assert!(idle + 3 * interval < limit, "at least three probes: {idle:?} {interval:?}");
    }

    #[tokio::test]
    async fn a_client_that_stops_reading_is_given_up() {
        let (ours, mut clients) = duplex(16);
        let mut socket = ClientSocket::new(ours, full, Some(LIMIT));
        let began = Instant::now();
        let written = timeout(PATIENCE, socket.write_all(&[7; 64])).await.expect("not for ever");
        assert_eq!(written.expect_err("nobody reads").kind(), io::ErrorKind::TimedOut);
        assert!(began.elapsed() >= LIMIT);
        // The client still gets the bytes that were accepted before.
        let mut taken = [0; 16];
        clients.read_exact(&mut taken).await.expect("the first bytes");
        assert_eq!(taken, [7; 16]);
    }

    #[tokio::test]
    async fn time_without_a_limit_and_time_in_which_nothing_is_written_do_not_count() {
        let (ours, mut clients) = duplex(16);
        let mut socket = ClientSocket::new(ours, full, Some(LIMIT));
        for round in 0..3 {
            socket.write_all(&[round; 16]).await.expect("there is room");
            tokio::time::sleep(LIMIT * 2).await;
            clients.read_exact(&mut [0; 16]).await.expect("read");
        }
        let (ours, _clients) = duplex(16);
        let mut patient = ClientSocket::new(ours, full, None);
        assert!(timeout(LIMIT * 3, patient.write_all(&[7; 64])).await.is_err());
    }

    /// A socket that the reactor considers full, with a client that reads a byte now and then.
    struct Trickle {
        offers: std::cell::Cell<u32>,
    }

    impl AsyncWrite for Trickle {
        fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, _: &[u8]) -> Poll<io::Result<usize>> {
            Poll::Pending
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    #[tokio::test]
    async fn a_slow_reader_that_still_reads_a_little_is_alive() {
        let taken_at_last = |socket: &Trickle, _: &[u8]| {
            socket.offers.set(socket.offers.get() + 1);
            match socket.offers.get() % OFFERS {
                0 => Ok(1),
                _ => Err(io::ErrorKind::WouldBlock.into()),
            }
        };
        // The third offer is accepted; at the fourth refusal the connection would fail.
        let inner = Trickle { offers: 1.into() };
        let mut socket = ClientSocket::new(inner, taken_at_last, Some(LIMIT));
        for _ in 0..3 {
            let written = timeout(PATIENCE, socket.write(&[7; 64])).await.expect("in time");
            assert_eq!(written.expect("alive"), 1);
            socket.inner.offers.set(1);
        }
    }
}
