//! The accept loop of all servers: HTTP/1.1 and HTTP/2 (over TLS, or with prior knowledge) on one port.
//!
//! Limits: the number of connections, the time until a connection's first request, the size of a head, and the time for which
//! an answer over HTTP/2 waits for a client that does not read on ([`StalledReadBody`]). A shutdown finishes requests in flight.

#![forbid(unsafe_code)]

mod stalled_read;
mod version;

use std::convert::Infallible;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, HttpBody};
use axum::extract::ConnectInfo;
use axum::serve::Listener;
use bytes::Bytes;
use http::header::HOST;
use http::{HeaderValue, Request};
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::{http1, http2};
use hyper::service::Service;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

pub use stalled_read::StalledReadBody;
use version::begin;

/// Largest head of a request; a longer one is answered with 431.
const HEAD_BYTES_MAX: usize = 64 << 10;
/// Idle time after which an HTTP/2 connection is pinged, and time limit of the answer.
const KEEP_ALIVE: Duration = Duration::from_secs(30);

/// Time within which an idle HTTP/2 connection must end after a GOAWAY.
const GOAWAY_TIMEOUT: Duration = Duration::from_secs(5);

/// Limits of a server.
#[derive(Debug, Clone)]
pub struct ServeConfig {
    /// Whether HTTP/1.1 is refused.
    pub http2_only: bool,
    /// Largest number of open connections; further ones wait in the kernel.
    pub connections_max: usize,
    /// Time within which a new connection must send its first bytes.
    pub first_call_within: Duration,
    /// Time within which each later request must begin, and the rest of its head arrive. Longer than the keep-alive of usual
    /// clients' pools, so that the client closes the connection.
    pub next_call_within: Duration,
    /// Largest number of concurrent requests of one HTTP/2 connection.
    pub streams_max: u32,
    /// Bytes that an HTTP/2 client may send ahead per request.
    pub stream_window_bytes: u32,
    /// Bytes that an HTTP/2 client may send ahead per connection.
    pub connection_window_bytes: u32,
    /// Longest wait of an answer over HTTP/2 for its client to read on.
    pub stalled_read_timeout: Duration,
}

impl Default for ServeConfig {
    fn default() -> Self {
        Self {
            http2_only: false,
            connections_max: 65_536,
            first_call_within: Duration::from_secs(120),
            next_call_within: Duration::from_secs(120),
            streams_max: 128,
            // Small windows: the bytes in them are not yet charged to the budget of request bodies.
            stream_window_bytes: 64 << 10,
            connection_window_bytes: 1 << 20,
            stalled_read_timeout: Duration::from_secs(60),
        }
    }
}

/// Counts the calls of an HTTP/2 connection. A finished call may leave a frame for a client that does not read, so a connection
/// without calls must be closed after a time.
#[derive(Debug, Default)]
struct Activity {
    calls: AtomicU64,
    in_flight: AtomicUsize,
}

impl Activity {
    /// Completes when no call has begun in time.
    async fn is_over(&self, config: &ServeConfig) {
        tokio::time::sleep(config.first_call_within).await;
        let (mut since, mut seen) = (Instant::now(), 0);
        loop {
            let calls = self.calls.load(Ordering::Relaxed);
            if calls == 0 {
                return;
            }
            if calls != seen || self.in_flight.load(Ordering::Relaxed) > 0 {
                (since, seen) = (Instant::now(), calls);
            } else if since.elapsed() >= config.next_call_within {
                return;
            }
            tokio::time::sleep(config.next_call_within / 8).await;
        }
    }
}

/// Guard of an HTTP/2 call in flight, until its answer is sent or dropped.
struct InFlight(Arc<Activity>);

impl InFlight {
    fn new(activity: &Arc<Activity>) -> Self {
        activity.calls.fetch_add(1, Ordering::Relaxed);
        activity.in_flight.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(activity))
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The body of an HTTP/2 call with its guard. Dropped when it is complete or aborted, whatever the state of its stream.
struct CountedBody {
    body: Body,
    _in_flight: InFlight,
}

impl HttpBody for CountedBody {
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

/// The routes of one connection, with the peer's address.
struct Calls<A> {
    router: TowerToHyperService<Router>,
    peer: A,
    /// For HTTP/2: the longest wait of an answer for its client to read on, and the connection's call counts.
    http2: Option<(Duration, Arc<Activity>)>,
}

impl<A: Clone + Send + Sync + 'static> Service<Request<Incoming>> for Calls<A> {
    type Response = axum::response::Response;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn call(&self, mut request: Request<Incoming>) -> Self::Future {
        request.extensions_mut().insert(ConnectInfo(self.peer.clone()));
        // HTTP/2 sends the host in a separate field, and HTTP/1 may in the request line; handlers read the `Host` header.
        let authority = request.uri().authority().and_then(|host| HeaderValue::from_str(host.as_str()).ok());
        if let Some(authority) = authority {
            request.headers_mut().insert(HOST, authority);
        }
        let Some((limit, activity)) = &self.http2 else { return Box::pin(self.router.call(request)) };
        let (in_flight, limit) = (InFlight::new(activity), *limit);
        let answered = self.router.call(request);
        Box::pin(async move {
            let answer = answered.await?;
            if HttpBody::is_end_stream(answer.body()) {
                return Ok(answer);
            }
            // A stream's window may be closed while the socket takes bytes.
            let counted = |body| Body::new(CountedBody { body, _in_flight: in_flight });
            Ok(answer.map(|body| Body::new(StalledReadBody::new(counted(body), limit))))
        })
    }
}

/// Protocol settings for the connections.
#[derive(Clone)]
struct Builders {
    http1: http1::Builder,
    http2: http2::Builder<TokioExecutor>,
    config: Arc<ServeConfig>,
}

impl Builders {
    fn new(config: ServeConfig) -> Self {
        let mut http1 = http1::Builder::new();
        http1
            .timer(TokioTimer::new())
            .header_read_timeout(config.next_call_within)
            .max_header_size(HEAD_BYTES_MAX);
        let mut http2 = http2::Builder::new(TokioExecutor::new());
        http2
            .timer(TokioTimer::new())
            .max_concurrent_streams(config.streams_max)
            .max_header_list_size(HEAD_BYTES_MAX as u32)
            .initial_stream_window_size(config.stream_window_bytes)
            .initial_connection_window_size(config.connection_window_bytes)
            .keep_alive_interval(KEEP_ALIVE)
            .keep_alive_timeout(KEEP_ALIVE);
        Self { http1, http2, config: Arc::new(config) }
    }

    /// Serves a connection to its end. A connection without a request does not delay a shutdown.
    async fn serve<S, A>(self, stream: S, router: Router, peer: A, watcher: Watcher, mut stopping: Stopping)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
        A: Clone + Send + Sync + 'static,
    {
        let begun = tokio::select! {
            begun = tokio::time::timeout(self.config.first_call_within, begin(stream)) => begun,
            _ = stopping.wait_for(|stopping| *stopping) => return,
        };
        // A client that breaks off, or never begins, gets no answer.
        let Ok(Ok((stream, is_http2))) = begun else { return };
        let (stream, router) = (TokioIo::new(stream), TowerToHyperService::new(router));
        if !is_http2 {
            if !self.config.http2_only {
                let calls = Calls { router, peer, http2: None };
                let _broken = watcher.watch(self.http1.serve_connection(stream, calls)).await;
            }
            return;
        }
        let activity = Arc::new(Activity::default());
        let http2 = Some((self.config.stalled_read_timeout, Arc::clone(&activity)));
        let mut connection = pin!(self.http2.serve_connection(stream, Calls { router, peer, http2 }));
        let is_stopping = tokio::select! {
            _broken = &mut connection => return,
            () = activity.is_over(&self.config) => false,
            _ = stopping.wait_for(|stopping| *stopping) => true,
        };
        // A connection without a call does not delay a shutdown.
        if is_stopping && activity.calls.load(Ordering::Relaxed) == 0 {
            return;
        }
        // GOAWAY: the client repeats a call that it sends at this moment, instead of losing it.
        connection.as_mut().graceful_shutdown();
        let goodbye = async {
            loop {
                tokio::time::sleep(GOAWAY_TIMEOUT).await;
                // A call that crossed the GOAWAY is finished.
                if !is_stopping && activity.in_flight.load(Ordering::Relaxed) == 0 {
                    return;
                }
            }
        };
        tokio::select! {
            _broken = &mut connection => {}
            () = goodbye => {}
        }
        // The server's shutdown waits for the watchers.
        drop(watcher);
    }
}

type Stopping = watch::Receiver<bool>;

/// Serves until `shutdown` completes; then no new call begins, and calls in flight are finished. The listener does the set-up of
/// connections, and waits when none is available. Dropping this future closes all connections at once.
pub async fn serve<L>(
    mut listener: L,
    router: Router,
    config: ServeConfig,
    shutdown: impl Future<Output = ()> + Send,
) where
    L: Listener,
    L::Addr: Clone + Send + Sync + 'static,
{
    let places = Arc::new(Semaphore::new(config.connections_max));
    let builders = Builders::new(config);
    let graceful = GracefulShutdown::new();
    let (stop, stopping) = watch::channel(false);
    let mut connections = JoinSet::new();
    let mut shutdown = pin!(shutdown);
    loop {
        let accepted = async {
            // The semaphore is never closed.
            let place = Arc::clone(&places).acquire_owned().await;
            (listener.accept().await, place)
        };
        let ((stream, peer), place) = tokio::select! {
            accepted = accepted => accepted,
            Some(_ended) = connections.join_next() => continue,
            () = &mut shutdown => break,
        };
        let serving =
            builders.clone().serve(stream, router.clone(), peer, graceful.watcher(), stopping.clone());
        connections.spawn(async move {
            serving.await;
            drop(place);
        });
    }
    drop(listener);
    let _nobody = stop.send(true);
    graceful.shutdown().await;
    while connections.join_next().await.is_some() {}
}
