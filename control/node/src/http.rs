//! An HTTP server for both versions (h2 over TLS, h2c with prior knowledge): Nagle's algorithm off, bounds on connections and on how long a client may take to say what it wants,
//! and a shutdown that finishes what is in flight, until a deadline.

use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use anyhow::{Context as _, Result};
use axum::Router;
use axum::body::HttpBody;
use axum::extract::ConnectInfo;
use axum::serve::Listener;
use bytes::{Bytes, BytesMut};
use http::header::HOST;
use http::{HeaderValue, Request};
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::{http1, http2};
use hyper::service::Service;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use router_gateway::Unread;
use router_tls::PeerAddr;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpSocket};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Semaphore, watch};
use tokio::time::Instant;

/// Connections that wait to be accepted, per listener; the kernel may allow fewer.
const BACKLOG: u32 = 4096;
/// Connections open at a time, per listener; more wait in the kernel.
const CONNECTIONS_MAX: usize = 65_536;
/// Largest head of a request; a longer one is answered with 431.
const HEAD_BYTES_MAX: usize = 64 << 10;
/// A connection whose next request has not begun, or whose head is not whole, after this time is closed. Longer than the
/// pools of usual clients keep theirs, so that it is they who close.
const HEAD_WITHIN: Duration = Duration::from_secs(120);

/// How a connection of HTTP/2 begins (RFC 9113, section 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Room for the first read: most heads fit.
const FIRST_BYTES: usize = 4096;
/// Requests of one HTTP/2 connection at a time.
const STREAMS_MAX: u32 = 128;
/// Bytes that a client may send ahead, for each request and in all: no memory of requests is charged for them yet.
const STREAM_WINDOW_BYTES: u32 = 64 << 10;
const CONNECTION_WINDOW_BYTES: u32 = 1 << 20;
/// An HTTP/2 connection that says nothing for so long is asked whether it is there, and has as long to answer.
const KEEP_ALIVE: Duration = Duration::from_secs(30);
/// How long an answer over HTTP/2 waits for its client to read on, where no setting says so.
const UNREAD_WITHIN: Duration = Duration::from_secs(60);

/// Binds the address; the error names it.
pub(crate) async fn bind(address: SocketAddr) -> Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))
}

/// Binds an address once for each of several threads: the kernel spreads connections over the listeners. The first binds
/// alone, so that it fails when another process has the address, unless `takes_over`: then it joins one of the same user.
pub(crate) fn bind_shared(
    address: SocketAddr,
    listeners: usize,
    takes_over: bool,
) -> Result<Vec<std::net::TcpListener>> {
    let socket = || {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        socket.set_reuseaddr(true)?;
        std::io::Result::Ok(socket)
    };
    let bind = || {
        let first = socket()?;
        first.set_reuseport(takes_over)?;
        first.bind(address)?;
        // From here on the others may join.
        first.set_reuseport(true)?;
        // With port 0 the first has decided.
        let address = first.local_addr()?;
        let mut all = vec![first.listen(BACKLOG)?.into_std()?];
        for _ in 1..listeners {
            let next = socket()?;
            next.set_reuseport(true)?;
            next.bind(address)?;
            all.push(next.listen(BACKLOG)?.into_std()?);
        }
        std::io::Result::Ok(all)
    };
    bind().with_context(|| format!("cannot listen on {address}"))
}

/// When a server has to be over: `None` while nobody has told it to stop.
pub(crate) type Stop = watch::Receiver<Option<Instant>>;

/// What the signals say: first, perhaps, that no new requests are wanted, then when to be over.
pub(crate) struct Signals {
    /// True from the first signal on.
    pub(crate) is_leaving: watch::Receiver<bool>,
    pub(crate) stop: Stop,
}

/// Listens to SIGTERM and SIGINT from now on: the first gives requests in flight `drain` to end, the second nothing. After
/// SIGTERM alone the server goes on accepting for `unready_for`, so that load balancers can leave it first.
pub(crate) fn signals(drain: Duration, unready_for: Duration) -> Result<Signals> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let (stop, stopped) = watch::channel(None);
    let (leave, is_leaving) = watch::channel(false);
    tokio::spawn(async move {
        let is_terminated = tokio::select! {
            _ = terminate.recv() => true,
            _ = interrupt.recv() => false,
        };
        // Without a receiver there is nothing to be told.
        let _unheard = leave.send(true);
        if is_terminated && !unready_for.is_zero() {
            tokio::select! {
                () = tokio::time::sleep(unready_for) => {}
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        }
        let _over = stop.send(Some(Instant::now() + drain));
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        let _over = stop.send(Some(Instant::now()));
        std::future::pending::<()>().await;
    });
    Ok(Signals { is_leaving, stop: stopped })
}

/// The signals of a server that no load balancer stands before.
pub(crate) fn stop_signals(drain: Duration) -> Result<Stop> {
    Ok(signals(drain, Duration::ZERO)?.stop)
}

/// Waits until everything has to be over.
pub(crate) async fn deadline(mut stop: Stop) {
    loop {
        let until = *stop.borrow_and_update();
        let sleep = async {
            match until {
                Some(until) => tokio::time::sleep_until(until).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = sleep => return,
            changed = stop.changed() => if changed.is_err() { return },
        }
    }
}

/// The routes of one connection, with who asks.
#[derive(Clone)]
struct Known {
    router: TowerToHyperService<Router>,
    peer: PeerAddr,
    /// Over HTTP/2.
    http2: Option<Http2Calls>,
}

/// The calls of one HTTP/2 connection.
#[derive(Clone)]
struct Http2Calls {
    /// How long an answer waits for its client to read on.
    unread_max: Duration,
    activity: Arc<Activity>,
}

/// What one HTTP/2 connection does. Calls that are over may leave a frame for a client that does not read, so a connection
/// without calls must not stay for ever.
#[derive(Default)]
struct Activity {
    begun: AtomicU64,
    in_flight: AtomicUsize,
}

impl Activity {
    /// Ends when no call has begun or was under way for [`HEAD_WITHIN`].
    async fn is_over(&self) {
        let (mut since, mut seen) = (Instant::now(), 0);
        while since.elapsed() < HEAD_WITHIN {
            tokio::time::sleep(HEAD_WITHIN / 8).await;
            let begun = self.begun.load(Ordering::Relaxed);
            if begun != seen || self.in_flight.load(Ordering::Relaxed) > 0 {
                (since, seen) = (Instant::now(), begun);
            }
        }
    }
}

/// A call that is under way, until its answer is handed out or dropped.
struct InFlight(Arc<Activity>);

impl InFlight {
    fn new(activity: &Arc<Activity>) -> Self {
        activity.begun.fetch_add(1, Ordering::Relaxed);
        activity.in_flight.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(activity))
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The body of a call that is under way.
struct Counted {
    body: Unread,
    _in_flight: InFlight,
}

impl HttpBody for Counted {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Service<Request<Incoming>> for Known {
    type Response = axum::response::Response;
    type Error = std::convert::Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        request.extensions_mut().insert(ConnectInfo(self.peer.clone()));
        // HTTP/2 names the host in a field of its own, and HTTP/1 may in the request line; what looks at `Host` looks at that.
        let authority = request.uri().authority().and_then(|host| HeaderValue::from_str(host.as_str()).ok());
        if let Some(authority) = authority {
            request.headers_mut().insert(HOST, authority);
        }
        let Some(calls) = &self.http2 else { return Box::pin(self.router.call(request)) };
        let (in_flight, limit) = (InFlight::new(&calls.activity), calls.unread_max);
        let answered = self.router.call(request);
        Box::pin(async move {
            let answer = answered.await?;
            if HttpBody::is_end_stream(answer.body()) {
                return Ok(answer);
            }
            // A stream's window may be closed while the socket takes bytes.
            let counted = |body| Counted { body: Unread::new(body, limit), _in_flight: in_flight };
            Ok(answer.map(|body| axum::body::Body::new(counted(body))))
        })
    }
}

/// Bytes that a connection began with, and the rest of it.
struct Begun<S> {
    first: Bytes,
    stream: S,
}

impl<S: AsyncRead + Unpin> AsyncRead for Begun<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        if self.first.is_empty() {
            return Pin::new(&mut self.stream).poll_read(context, buffer);
        }
        let count = self.first.len().min(buffer.remaining());
        buffer.put_slice(&self.first.split_to(count));
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Begun<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[std::io::IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

/// Reads until it is known whether a connection speaks HTTP/2; the bytes are kept.
async fn begin<S: AsyncRead + Unpin>(mut stream: S) -> std::io::Result<(Begun<S>, bool)> {
    let mut first = BytesMut::with_capacity(FIRST_BYTES);
    loop {
        let known = first.len().min(PREFACE.len());
        if first[..known] != PREFACE[..known] {
            return Ok((Begun { first: first.freeze(), stream }, false));
        }
        if known == PREFACE.len() {
            return Ok((Begun { first: first.freeze(), stream }, true));
        }
        if stream.read_buf(&mut first).await? == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
    }
}

/// Serves until it is told to stop, then finishes what is in flight until it has to be over.
pub(crate) async fn serve<L>(listener: L, router: Router, stop: Stop)
where
    L: Listener<Addr = PeerAddr>,
{
    serve_bounded(listener, router, stop, UNREAD_WITHIN).await;
}

/// The same, with how long an answer over HTTP/2 waits for its client to read on.
pub(crate) async fn serve_bounded<L>(mut listener: L, router: Router, mut stop: Stop, unread_max: Duration)
where
    L: Listener<Addr = PeerAddr>,
{
    let mut http1 = http1::Builder::new();
    http1.timer(TokioTimer::new()).header_read_timeout(HEAD_WITHIN).max_header_size(HEAD_BYTES_MAX);
    let mut http2 = http2::Builder::new(TokioExecutor::new());
    http2
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS_MAX)
        .max_header_list_size(HEAD_BYTES_MAX as u32)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE);
    let graceful = GracefulShutdown::new();
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    let is_told = stop.clone();
    let mut told = pin!(async move { drop(stop.wait_for(Option::is_some).await) });
    loop {
        let accepted = async {
            // It is never closed.
            let place = Arc::clone(&places).acquire_owned().await;
            (listener.accept().await, place)
        };
        let ((stream, peer), place) = tokio::select! {
            accepted = accepted => accepted,
            () = &mut told => break,
        };
        let known = Known { router: TowerToHyperService::new(router.clone()), peer, http2: None };
        let (http1, http2, watcher) = (http1.clone(), http2.clone(), graceful.watcher());
        let mut leaving = is_told.clone();
        tokio::spawn(async move {
            let begun = tokio::select! {
                begun = tokio::time::timeout(HEAD_WITHIN, begin(stream)) => begun,
                // A connection that has said nothing yet holds up no shutdown.
                _ = leaving.wait_for(Option::is_some) => return,
            };
            // A client that breaks off, or never begins, is told nothing.
            let Ok(Ok((stream, is_http2))) = begun else { return };
            let stream = TokioIo::new(stream);
            if is_http2 {
                let activity = Arc::new(Activity::default());
                let calls = Http2Calls { unread_max, activity: Arc::clone(&activity) };
                let known = Known { http2: Some(calls), ..known };
                tokio::select! {
                    _broken = watcher.watch(http2.serve_connection(stream, known)) => {}
                    () = activity.is_over() => {}
                }
            } else {
                let _broken = watcher.watch(http1.serve_connection(stream, known)).await;
            }
            drop(place);
        });
    }
    drop(listener);
    tokio::select! {
        () = graceful.shutdown() => {}
        () = deadline(is_told) => tracing::warn!("requests were still in flight at the end of the drain time"),
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;

    #[tokio::test]
    async fn the_version_is_known_by_the_first_bytes_and_none_is_lost() {
        for (sent, is_http2) in [
            (&b"GET / HTTP/1.1\r\n\r\n"[..], false),
            (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nrest", true),
            (b"PUT / HTTP/1.1\r\n\r\n", false),
            (b"PRI * HTTP/1.1\r\n\r\n", false),
        ] {
            for step in [1, 3, 100] {
                let (mut client, server) = tokio::io::duplex(256);
                let send = async {
                    for piece in sent.chunks(step) {
                        client.write_all(piece).await.expect("room");
                        tokio::task::yield_now().await;
                    }
                    drop(client);
                };
                let (_, (mut begun, found)) =
                    tokio::join!(send, async { begin(server).await.expect("begun") });
                let mut all = Vec::new();
                begun.read_to_end(&mut all).await.expect("the rest");
                assert_eq!((found, &all[..]), (is_http2, sent), "{step}");
            }
        }
        let (client, server) = tokio::io::duplex(16);
        drop(client);
        assert!(begin(server).await.is_err(), "nothing came");
    }
}
