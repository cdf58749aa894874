//! Connections to one engine, driven by the requests that use them.
//!
//! A connection (`http1`) has no task of its own: the request that holds it polls it, so that neither head nor body crosses
//! from one task to another (hyper-util's pool gives each connection a task, and each hop is a wake-up). Idle connections are
//! not watched; a connection is checked when it is taken out, and one that has been idle for longer than the least keep-alive
//! among engines' servers (uvicorn: 5 s) is not used again. A request whose reused connection turns out to be closed before
//! any answer is sent once more over a new one, unless it must not be sent twice.
//!
//! Dropping a [`ReplyBody`] before its end closes the connection, which is how an engine learns of a cancellation.
//! Nagle's algorithm is off. Taking a connection out and putting it back is lock-free.

use std::cell::Cell;
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker, ready};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use crossbeam_queue::ArrayQueue;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, Uri};
use http_body::{Body, Frame, SizeHint};
use router_tls::{ClientStream, ClientTls};
use tokio::net::TcpStream;
use tokio::sync::mpsc;

use crate::http1::{self, Answer, Connection, Framing, Next};
use crate::key::ApiKey;
use crate::proxy_dispatch::BodyPiece;

/// Idle connections kept for each engine by threads that share them; further ones are closed.
const IDLE_MAX: usize = 2048;
/// Idle connections kept for each engine by a thread that has its own.
const IDLE_OWN_MAX: usize = 256;
/// Longest idle time: below uvicorn's keep-alive of 5 s, with time for a request to arrive.
const IDLE_FOR: Duration = Duration::from_secs(4);
/// Expired connections that one request closes at most.
const EXPIRED_EACH_MAX: usize = 4;
/// A connection that was closed while idle fails within this time; a later failure is the engine's.
const CLOSED_WITHIN: Duration = Duration::from_millis(100);
const CONNECT_WITHIN: Duration = Duration::from_secs(2);
/// Time without acknowledgement after which a connection is given up: the machine is gone, or a device on the path has
/// dropped the connection. An engine that computes is unaffected, as its kernel acknowledges; an engine that does not read a
/// body larger than its kernel's buffers has this time, too.
const SILENT_MAX: Duration = Duration::from_secs(120);

/// Failure of a request to an engine.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{worker}: {reason}")]
pub struct UpstreamError {
    /// The engine's URL.
    pub worker: String,
    /// Text of the failure.
    pub reason: String,
    /// Whether the answer is longer than its reader accepts.
    pub is_too_large: bool,
}

/// A request to an engine.
#[derive(Debug, Clone)]
pub struct Call {
    /// The method.
    pub method: Method,
    /// Path and query.
    pub path: Uri,
    /// Headers in addition to `host` and the length.
    pub headers: HeaderMap,
    /// The body.
    pub body: Bytes,
    /// Whether the request must not be sent twice, not even when its connection was closed before an answer.
    pub once: bool,
}

impl Call {
    /// Returns a POST of JSON.
    #[must_use]
    pub fn json(path: &'static str, body: Bytes) -> Self {
        Self::post(path, HeaderValue::from_static("application/json"), body)
    }

    /// Returns a POST of a body of this type.
    #[must_use]
    pub fn post(path: &'static str, content_type: HeaderValue, body: Bytes) -> Self {
        let mut headers = HeaderMap::with_capacity(8);
        headers.insert(http::header::CONTENT_TYPE, content_type);
        Self { method: Method::POST, path: Uri::from_static(path), headers, body, once: false }
    }

    /// Adds a header, unless its value has characters that headers cannot have.
    #[must_use]
    pub fn with(mut self, name: HeaderName, value: &str) -> Self {
        if let Ok(value) = HeaderValue::from_str(value) {
            self.headers.insert(name, value);
        }
        self
    }
}

struct Idle {
    connection: Box<Connection>,
    since: Instant,
}

/// The connections to one engine.
pub struct Upstream {
    base: String,
    authority: String,
    host: HeaderValue,
    tls: Option<Arc<ClientTls>>,
    /// Key sent with every request, in place of any other `authorization`.
    key: Option<ApiKey>,
    /// Idle connections by their owner, as [`place`] numbers it.
    idle: Box<[OnceLock<ArrayQueue<Idle>>]>,
}

/// Number of connection sets: the shared one, and one for each thread that has its own. Further threads use the shared one.
const OWNERS_MAX: usize = 64;

thread_local! {
    static PLACE: Cell<usize> = const { Cell::new(0) };
}

/// Gives this thread its own connections, which no other thread uses. A connection wakes the reactor that it was made on,
/// so a thread that runs its own reactor would otherwise be woken for other threads' requests.
pub fn use_thread_connections() {
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    let place = NEXT.fetch_add(1, Ordering::Relaxed);
    PLACE.set(if place < OWNERS_MAX { place } else { 0 });
}

/// Number of the connection set that this thread uses.
fn place() -> usize {
    PLACE.get()
}

impl std::fmt::Debug for Upstream {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Upstream({})", self.base)
    }
}

impl Upstream {
    /// Returns the connections to the engine at `base`: `http://host:port`, or `https://` over `tls`.
    #[must_use]
    pub fn new(base: &str, tls: Option<&Arc<ClientTls>>) -> Arc<Self> {
        Self::with_key(base, tls, None)
    }

    /// As [`Self::new`], for an engine with a key, which is sent with every request.
    #[must_use]
    pub fn with_key(base: &str, tls: Option<&Arc<ClientTls>>, key: Option<&ApiKey>) -> Arc<Self> {
        let base = base.trim_end_matches('/');
        let is_tls = base.starts_with("https://");
        let authority = base.strip_prefix("https://").or(base.strip_prefix("http://")).unwrap_or(base);
        let authority = authority.split('/').next().unwrap_or(authority);
        let has_port = authority.rsplit(':').next().is_some_and(|port| port.parse::<u16>().is_ok());
        let port = match (has_port, is_tls) {
            (true, _) => "",
            (false, true) => ":443",
            (false, false) => ":80",
        };
        Arc::new(Self {
            base: base.to_owned(),
            host: HeaderValue::from_str(authority).unwrap_or(HeaderValue::from_static("engine")),
            authority: format!("{authority}{port}"),
            tls: tls.filter(|_| is_tls).cloned(),
            key: key.cloned(),
            idle: (0..OWNERS_MAX).map(|_| OnceLock::new()).collect(),
        })
    }

    /// The engine's URL.
    #[must_use]
    pub fn base(&self) -> &str {
        &self.base
    }

    /// The engine's own key as a value of `authorization`, if the engine asks for one. It replaces any other.
    #[must_use]
    pub fn authorization(&self) -> Option<HeaderValue> {
        self.key.as_ref().map(|key| key.header().clone())
    }

    /// Idle connections of this thread.
    fn idle(&self) -> &ArrayQueue<Idle> {
        let place = place();
        self.idle[place].get_or_init(|| ArrayQueue::new(if place == 0 { IDLE_MAX } else { IDLE_OWN_MAX }))
    }

    fn error(&self, reason: impl ToString) -> UpstreamError {
        UpstreamError { worker: self.base.clone(), reason: reason.to_string(), is_too_large: false }
    }

    /// Takes an idle connection that is still open as far as can be seen.
    fn take(&self) -> Option<Box<Connection>> {
        // Closing takes a while: one request does not close all connections that many requests have left.
        for _ in 0..EXPIRED_EACH_MAX {
            let Idle { mut connection, since } = self.idle().pop()?;
            let mut context = Context::from_waker(Waker::noop());
            if since.elapsed() <= IDLE_FOR && connection.is_quiet(&mut context) {
                return Some(connection);
            }
        }
        None
    }

    /// Closes connections that have been idle for too long; must be called periodically.
    pub fn sweep(&self) {
        for idle in self.idle.iter().filter_map(OnceLock::get) {
            for _ in 0..idle.len() {
                let Some(connection) = idle.pop() else { break };
                // Put back behind the others, so the queue is not in the order of age and is walked to its end.
                if connection.since.elapsed() <= IDLE_FOR {
                    let _closed = idle.push(connection);
                }
            }
        }
    }

    async fn connect(&self) -> Result<Box<Connection>, UpstreamError> {
        let connecting = tokio::time::timeout(CONNECT_WITHIN, TcpStream::connect(&self.authority));
        let stream = match connecting.await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => return Err(self.error(error)),
            Err(_) => return Err(self.error("no connection in time")),
        };
        // Errors are ignored: a connection that is closed already fails at the first use.
        let _gone = stream.set_nodelay(true);
        let _gone = router_tls::set_dead_peer_timeout(&stream, SILENT_MAX);
        let stream = match &self.tls {
            None if self.base.starts_with("https://") => {
                return Err(self.error("there are no settings for https"));
            }
            None => ClientStream::Plain(stream),
            Some(tls) => {
                let host = self.authority.rsplit_once(':').map_or(self.authority.as_str(), |(host, _)| host);
                tls.connect(host, stream).await.map_err(|error| self.error(error))?
            }
        };
        Ok(Box::new(Connection::new(stream)))
    }

    /// Sends a request and returns the head of its answer; the body is read later.
    pub async fn send(self: &Arc<Self>, call: &Call) -> Result<Response<ReplyBody>, UpstreamError> {
        if let Some(connection) = self.take() {
            let started = Instant::now();
            match self.exchange(connection, call).await {
                // The connection was closed while idle: this shows at once and is no failure of the engine.
                Err(error) if !call.once && is_closed(&error) && started.elapsed() < CLOSED_WITHIN => {}
                answer => return answer.map_err(|error| self.error(error)),
            }
        }
        let connection = self.connect().await?;
        self.exchange(connection, call).await.map_err(|error| self.error(error))
    }

    async fn exchange(
        self: &Arc<Self>,
        mut connection: Box<Connection>,
        call: &Call,
    ) -> io::Result<Response<ReplyBody>> {
        let request = http1::Request {
            method: &call.method,
            path: call.path.path_and_query().map_or("/", PathAndQuery::as_str),
            host: &self.host,
            authorization: self.key.as_ref().map(ApiKey::header),
            headers: &call.headers,
            body: &call.body,
        };
        let answer = connection.exchange(&request).await?;
        let Answer { head, framing, is_reusable } = answer;
        let mut body = ReplyBody {
            connection: Some(connection),
            framing,
            is_reusable,
            home: Arc::clone(self),
            handed_back: None,
        };
        if framing == Framing::Ended {
            body.give_back();
        }
        Ok(Response::from_parts(head, body))
    }
}

/// Whether the error means that the connection was closed; other errors are the engine's.
fn is_closed(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, NotConnected, UnexpectedEof};
    matches!(error.kind(), UnexpectedEof | ConnectionReset | BrokenPipe | ConnectionAborted | NotConnected)
}

/// The body of an answer, and the connection that it comes over.
pub struct ReplyBody {
    /// `None` once the connection is idle again, or broken.
    connection: Option<Box<Connection>>,
    framing: Framing,
    is_reusable: bool,
    home: Arc<Upstream>,
    /// Channel of an answer that a proxy passes on, instead of a connection.
    handed_back: Option<mpsc::Receiver<BodyPiece>>,
}

impl std::fmt::Debug for ReplyBody {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("ReplyBody")
    }
}

impl ReplyBody {
    /// Returns a body that a proxy passes on.
    pub(crate) fn handed_back(pieces: mpsc::Receiver<BodyPiece>, home: &Arc<Upstream>) -> Self {
        Self {
            connection: None,
            framing: Framing::UntilClose,
            is_reusable: false,
            home: Arc::clone(home),
            handed_back: Some(pieces),
        }
    }

    fn poll_piece(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, UpstreamError>>> {
        let Some(pieces) = &mut self.handed_back else { return Poll::Ready(None) };
        match ready!(pieces.poll_recv(context)) {
            Some(BodyPiece::Data(data)) => return Poll::Ready(Some(Ok(data))),
            Some(BodyPiece::End) => self.framing = Framing::Ended,
            None if self.framing != Framing::Ended => {
                self.handed_back = None;
                return Poll::Ready(Some(Err(self.home.error("the proxy's connection broke off"))));
            }
            None => {}
        }
        self.handed_back = None;
        Poll::Ready(None)
    }

    /// Returns the connection to the idle ones, after the body has ended.
    fn give_back(&mut self) {
        let connection = self.connection.take();
        if let Some(connection) = connection.filter(|connection| self.is_reusable && connection.is_drained())
        {
            // The connection is closed when the queue is full.
            let _closed = self.home.idle().push(Idle { connection, since: Instant::now() });
        }
    }

    fn poll_data(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, UpstreamError>>> {
        let Some(connection) = &mut self.connection else { return self.poll_piece(context) };
        match ready!(connection.poll_next(&mut self.framing, context)) {
            Ok(Next::Data(data)) => {
                if self.framing == Framing::Ended {
                    self.give_back();
                }
                Poll::Ready(Some(Ok(data)))
            }
            Ok(_) => {
                self.give_back();
                Poll::Ready(None)
            }
            Err(error) => {
                self.connection = None;
                Poll::Ready(Some(Err(self.home.error(error))))
            }
        }
    }

    /// The whole body, if it has at most `bytes_max`.
    pub async fn whole(mut self, bytes_max: usize) -> Result<Bytes, UpstreamError> {
        let too_large = |home: &Upstream| UpstreamError {
            is_too_large: true,
            ..home.error(format!("an answer of more than {bytes_max} bytes"))
        };
        if let Framing::Length(length) = self.framing
            && length > bytes_max as u64
        {
            return Err(too_large(&self.home));
        }
        let mut first = Bytes::new();
        let mut all = BytesMut::new();
        while let Some(data) = poll_fn(|context| self.poll_data(context)).await {
            let data = data?;
            if first.len().max(all.len()) + data.len() > bytes_max {
                return Err(too_large(&self.home));
            }
            // Most bodies come in one piece.
            match (first.is_empty(), all.is_empty()) {
                (true, true) => first = data,
                (false, true) => {
                    let left = match self.framing {
                        Framing::Length(left) => usize::try_from(left).unwrap_or(0),
                        _ => 0,
                    };
                    all.reserve(first.len() + data.len() + left);
                    all.extend_from_slice(&first);
                    all.extend_from_slice(&data);
                }
                _ => all.extend_from_slice(&data),
            }
        }
        Ok(if all.is_empty() { first } else { all.freeze() })
    }
}

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = UpstreamError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, UpstreamError>>> {
        self.poll_data(context).map(|data| data.map(|data| data.map(Frame::data)))
    }

    fn is_end_stream(&self) -> bool {
        self.framing == Framing::Ended
    }

    fn size_hint(&self) -> SizeHint {
        match self.framing {
            Framing::Length(left) => SizeHint::with_exact(left),
            Framing::Ended => SizeHint::with_exact(0),
            _ => SizeHint::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    /// The head of the first request on a listener, which is answered with an empty 200.
    async fn first_head(listener: TcpListener) -> String {
        let (mut stream, _) = listener.accept().await.expect("a connection");
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.expect("a byte"));
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await.expect("written");
        String::from_utf8(head).expect("ASCII")
    }

    #[tokio::test]
    async fn a_sweep_closes_expired_connections_behind_young_ones() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let upstream = Upstream::with_key(&listener.local_addr().expect("bound").to_string(), None, None);
        let now = Instant::now();
        let expired = now.checked_sub(2 * IDLE_FOR).expect("the machine has run for that long");
        for since in [now, expired, now, expired] {
            let connection = upstream.connect().await.expect("a connection");
            assert!(upstream.idle().push(Idle { connection, since }).is_ok());
        }
        upstream.sweep();
        let left: Vec<Instant> =
            std::iter::from_fn(|| upstream.idle().pop()).map(|idle| idle.since).collect();
        assert_eq!(left, [now, now]);
    }

    #[tokio::test]
    async fn an_engine_is_shown_its_own_key_and_no_other() {
        for own in [Some("engine-key"), None] {
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
            let base = format!("http://{}", listener.local_addr().expect("bound"));
            let key = own.map(|own| ApiKey::new(own).expect("a key"));
            let upstream = Upstream::with_key(&base, None, key.as_ref());
            let mut call = Call::json("/v1/chat/completions", Bytes::new());
            if own.is_some() {
                // The gateway does not forward a client's header; if it did, the engine would still see only its own key.
                call = call.with(http::header::AUTHORIZATION, "Bearer clients-key");
            }
            let (head, answer) = tokio::join!(first_head(listener), upstream.send(&call));
            assert!(answer.is_ok(), "{answer:?}");
            let shown: Vec<&str> = head.lines().filter(|line| line.starts_with("authorization")).collect();
            let expected: Vec<String> =
                own.iter().map(|own| format!("authorization: Bearer {own}")).collect();
            assert_eq!(shown, expected);
        }
    }
}
