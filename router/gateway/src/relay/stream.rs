//! The body of a streamed answer: whole events, as they come, from whichever worker goes on with it.
//!
//! Hot path, once for each frame: the engine's bytes are handed on without a copy; a copy is kept for as long as the
//! stream may have to be continued elsewhere, up to a bound. One timer watches for stalls; it is not set anew with each
//! frame but looks, when it rings, at when the last one came. Waiting for the first token is no stall, and has a patience of
//! its own.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use http_body::{Body as HttpBody, Frame};
use router_engines::openai::ApiError;
use router_engines::upstream::ReplyBody;
use router_fleet::{Booking, Route, Worker};
use tokio::time::Sleep;

use super::events::{Batch, Scanner};
use super::legs::{Asked, Failure, Owned, Promised, ask};
use super::resume::{Sent, join, obstacle, read, rest};
use super::{Attempts, RelayRequest, explain};
use crate::service::Gateway;
use crate::stay::Stay;
use crate::traced::LegSpan;

/// A stream of more bytes than this is not continued elsewhere: what the client has could not be remembered.
const KEPT_BYTES_MAX: usize = 1 << 20;

/// How long the end of an engine's body is waited for, to use its connection again.
const END_WITHIN: Duration = Duration::from_secs(1);

/// A worker's answer on its way.
struct Leg {
    reply: ReplyBody,
    route: Route,
    booking: Booking,
    promised: Option<Promised>,
    prefill: Option<Owned<Result<(), Failure>>>,
    scanner: Scanner,
    /// Resolves when the worker is given up although its connection is open.
    down: BoxFuture<'static, ()>,
    stalled: Pin<Box<Sleep>>,
    /// How long nothing may come before the first token.
    answer_within: Duration,
    /// How long nothing may come after it.
    stall: Duration,
    /// When the wait for the first event began.
    began: Instant,
    /// When the last frame came.
    last: Instant,
    /// It has sent something.
    has_begun: bool,
    /// Since when blocks are on their way to it, until its first token.
    moving: Option<Instant>,
    span: Option<LegSpan>,
}

enum State {
    Live(Box<Leg>),
    /// Another worker is being asked for the rest.
    Resuming(BoxFuture<'static, Result<Box<Resumed>, (Attempts, String)>>),
    /// The engine has said its last word; the end of its body is all that can come.
    Ending(Box<Leg>),
    Over,
}

struct Resumed {
    leg: Leg,
    attempts: Attempts,
    first: Batch,
}

/// A streamed answer.
pub(crate) struct RelayStream {
    gateway: Arc<Gateway>,
    request: Arc<RelayRequest>,
    state: State,
    /// Events for the client, ready to go.
    ready: Bytes,
    attempts: Attempts,
    /// What the client has, while the stream may have to go on elsewhere.
    kept: Option<Vec<u8>>,
    /// Set once it goes on elsewhere.
    sent: Option<Arc<Sent>>,
    stay: Option<Box<Stay>>,
    /// What the engine said before there was a stay to tell.
    used: Option<super::Usage>,
    pieces: usize,
    /// What the present worker said last.
    told: Option<super::Usage>,
    last_piece: Option<Instant>,
}

/// Resolves at the next `Worker::down` notification.
fn next_give_up(worker: &Arc<Worker>) -> BoxFuture<'static, ()> {
    let worker = Arc::clone(worker);
    async move { worker.down.notified().await }.boxed()
}

impl Leg {
    fn new(gateway: &Gateway, request: &RelayRequest, asked: Asked, booking: Booking, route: Route) -> Self {
        let now = Instant::now();
        let (stall, answer_within) = {
            let tuning = gateway.tuning();
            (tuning.stall, tuning.answer_within)
        };
        Self {
            reply: asked.reply.into_body(),
            booking,
            promised: asked.promised,
            prefill: asked.prefill,
            scanner: Scanner::new(request.hides_usage),
            down: next_give_up(&route.decode.worker),
            stalled: Box::pin(tokio::time::sleep(answer_within)),
            answer_within,
            stall,
            began: now,
            last: now,
            has_begun: false,
            moving: asked.moving,
            span: asked.span,
            route,
        }
    }

    /// The next whole events; `None` at the end of a stream that ended as it should.
    fn poll_batch(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Batch, Failure>>> {
        loop {
            match Pin::new(&mut self.reply).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => {
                    self.last = Instant::now();
                    let Ok(data) = frame.into_data() else { continue };
                    let Some(batch) = self.scanner.push(data) else {
                        let failure = Failure::protocol(&self.route, "an event without end");
                        return Poll::Ready(Some(Err(failure)));
                    };
                    if batch != Batch::default() {
                        return Poll::Ready(Some(Ok(batch)));
                    }
                }
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Some(Err(Failure::connection(&error)))),
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending => break,
            }
        }
        // Until something has come, the decode worker may be waiting for a prefill worker that has failed.
        if !self.has_begun
            && let Some(prefill) = &mut self.prefill
            && let Poll::Ready(ended) = prefill.poll_end(context)
        {
            self.prefill = None;
            if let Some(Err(failure)) = ended {
                return Poll::Ready(Some(Err(failure)));
            }
        }
        let mut was_notified = false;
        while self.down.as_mut().poll(context).is_ready() {
            was_notified = true;
            self.down = next_give_up(&self.route.decode.worker);
        }
        // A slow health check does not end a stream that flows.
        if was_notified && self.route.decode.worker.is_silent_since(self.last) {
            return Poll::Ready(Some(Err(Failure::hung(&self.route))));
        }
        while self.stalled.as_mut().poll(context).is_ready() {
            let patience = if self.has_begun { self.stall } else { self.answer_within };
            if self.last.elapsed() >= patience {
                return Poll::Ready(Some(Err(self.silent())));
            }
            let due = tokio::time::Instant::from_std(self.last + patience);
            self.stalled.as_mut().reset(due);
        }
        Poll::Pending
    }

    /// Nothing came for too long.
    fn silent(&self) -> Failure {
        match self.has_begun {
            true => {
                let quiet = format!("nothing came for {} ms", self.stall.as_millis());
                Failure::protocol(&self.route, quiet)
            }
            false => Failure::late(&self.route.decode, self.answer_within, self.began),
        }
    }

    async fn first_batch(&mut self) -> Result<Batch, Failure> {
        let batch = std::future::poll_fn(|context| self.poll_batch(context)).await;
        match batch {
            None => Err(Failure::protocol(&self.route, "a stream without events")),
            Some(Ok(Batch { failure: Some(words), .. })) => {
                Err(Failure::protocol(&self.route, format!("it failed: {words}")))
            }
            Some(batch) => batch,
        }
    }
}

impl Leg {
    /// The first events that say something.
    async fn first_words(&mut self) -> Result<Batch, Failure> {
        let mut first = self.first_batch().await?;
        // Some engines open an answer before they know whether they can give one.
        while is_only_role(&first.out) && !first.is_done {
            let next = self.first_batch().await?;
            let usage = next.usage.or(first.usage);
            first = Batch { out: [first.out, next.out].concat().into(), usage, ..next };
        }
        Ok(first)
    }
}

/// Whether events say nothing but who speaks.
fn is_only_role(events: &[u8]) -> bool {
    super::events(events).all(|event| {
        let Ok(value) = serde_json::from_slice::<serde_json::Value>(super::data_of(event)) else {
            return false;
        };
        let choice = &value["choices"][0];
        choice["delta"]["role"].is_string()
            && choice["delta"]["content"].as_str().is_none_or(str::is_empty)
            && choice["delta"].as_object().is_some_and(|delta| delta.len() <= 2)
            && choice["finish_reason"].is_null()
    })
}

impl RelayStream {
    /// Waits for the first event, so that a failure before it is a proper error, or nobody's business.
    pub(crate) async fn begin(
        gateway: &Arc<Gateway>,
        request: &Arc<RelayRequest>,
        asked: Asked,
        booking: Booking,
        route: &Route,
    ) -> Result<Self, Failure> {
        // An engine that fetches blocks from a worker that died meanwhile may say nothing for as long as it likes.
        let moving_from = route.prefill.as_ref().filter(|_| asked.moving.is_some());
        let mut leg = Leg::new(gateway, request, asked, booking, route.clone());
        let first = match moving_from {
            None => leg.first_words().await?,
            Some(prefill) => {
                let gone = prefill.worker.disconnected.notified();
                tokio::select! {
                    first = leg.first_words() => first?,
                    () = gone => return Err(Failure::gone(prefill)),
                }
            }
        };
        let continues = leg.route.decode.run.description.engine.dialect().takes_extensions();
        let keeps = continues && obstacle(request.surface, &request.body).is_none();
        let mut this = Self {
            gateway: Arc::clone(gateway),
            request: Arc::clone(request),
            state: State::Live(Box::new(leg)),
            ready: Bytes::new(),
            attempts: Attempts::default(),
            kept: keeps.then(Vec::new),
            sent: None,
            stay: None,
            used: None,
            pieces: 0,
            told: None,
            last_piece: None,
        };
        this.take(first);
        Ok(this)
    }

    pub(crate) fn into_response(
        mut self,
        attempts: Attempts,
        mut stay: Box<Stay>,
        route: &Route,
    ) -> Response {
        self.attempts = attempts;
        self.attempts.goes_well();
        stay.answered(axum::http::StatusCode::OK, None);
        stay.first_token();
        stay.progress(self.pieces);
        if let Some(usage) = self.used.take() {
            stay.used(&usage);
        }
        let explains = self.request.explains;
        let mut response = Response::new(Body::empty());
        stay.tell_rates(&mut response);
        self.stay = Some(stay);
        *response.body_mut() = Body::new(self);
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        // Proxies in front that buffer would hold tokens back.
        headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
        explain(&mut response, explains, route);
        response
    }

    /// Takes events of the present worker.
    fn take(&mut self, batch: Batch) {
        let State::Live(leg) = &mut self.state else { return };
        let metrics = &self.gateway.metrics;
        if !batch.out.is_empty() {
            let now = Instant::now();
            if !std::mem::replace(&mut leg.has_begun, true) {
                let due = tokio::time::Instant::from_std(now + leg.stall);
                leg.stalled.as_mut().reset(due);
                leg.booking.first_token();
                leg.route.decode.worker.breaker.succeeded();
                if let (Some(traced), Some(since)) = (&self.request.traced, leg.moving.take()) {
                    traced.transferred(since, &leg.route);
                }
            }
            match self.last_piece.replace(now) {
                None => metrics.time_to_first_token.observe(now.duration_since(self.request.started)),
                Some(last) => metrics.inter_token.observe(now.duration_since(last)),
            }
        }
        let pieces = memchr::memmem::find_iter(&batch.out, b"\n\n").count();
        match &mut self.stay {
            Some(stay) => stay.progress(pieces),
            None => self.pieces += pieces,
        }
        let mut broken = None;
        if let Some(usage) = batch.usage {
            broken = leg.promised.as_ref().and_then(|promised| promised.check(&usage).err());
            if let Some(cached) = usage.cached_tokens() {
                leg.booking.cached_tokens(cached);
            }
            // Some tell it with each piece; the last one counts.
            self.told = Some(usage);
            match &mut self.stay {
                Some(stay) => stay.used(&usage),
                None => self.used = Some(usage),
            }
        }
        if let Some(reason) = broken {
            // The client has tokens already; what can be done is to say that they are not to be trusted.
            self.fail(&format!("the tokens may be of another prompt: {reason}"), None);
            return;
        }
        match &self.sent {
            None => {
                if let Some(kept) = &mut self.kept {
                    kept.extend_from_slice(&batch.out);
                    if kept.len() > KEPT_BYTES_MAX {
                        self.kept = None;
                    }
                }
                self.ready = batch.out;
            }
            // Another worker has taken over: what it says is made to fit, and kept for the next time.
            Some(sent) => {
                let joined = join(&batch.out, sent, &self.request);
                if let Some(kept) = &mut self.kept {
                    kept.extend_from_slice(&joined);
                    if kept.len() > KEPT_BYTES_MAX {
                        self.kept = None;
                    }
                }
                self.ready = joined.freeze();
            }
        }
        if batch.is_done
            && let State::Live(mut leg) = std::mem::replace(&mut self.state, State::Over)
        {
            if let Some(mut span) = leg.span.take() {
                span.succeeded();
            }
            self.state = State::Ending(leg);
        }
    }

    /// The stream ends with an error. What names a worker is for those who may know the fleet.
    fn fail(&mut self, why: &str, workers_reason: Option<&str>) {
        self.gateway.metrics.broken_streams.inc();
        if let Some(stay) = &mut self.stay {
            stay.answered(axum::http::StatusCode::OK, Some("broken_stream"));
        }
        let message = match workers_reason {
            Some(reason) if self.request.explains => format!("The stream broke: {reason}; {why}"),
            reason => {
                if let Some(reason) = reason {
                    tracing::warn!(request = self.request.request_id, reason, "a stream broke");
                }
                format!("The stream broke: {why}")
            }
        };
        let error = ApiError::unavailable(message);
        self.ready = format!("data: {}\n\n", error.to_json()).into();
        self.state = State::Over;
    }

    /// The present worker failed: another one goes on, if it can.
    fn go_on(&mut self, failure: Failure) {
        let State::Live(mut leg) = std::mem::replace(&mut self.state, State::Over) else { return };
        let route = leg.route.clone();
        if let Some(span) = &mut leg.span {
            span.failed("broken_stream");
        }
        drop(leg);
        let Some(kept) = &self.kept else {
            let why = obstacle(self.request.surface, &self.request.body);
            let why = why.unwrap_or("more was sent than can be remembered");
            return self.fail(why, Some(&failure.reason));
        };
        let sent = match read(self.request.surface, kept) {
            Ok(sent) => Arc::new(sent),
            Err(why) => return self.fail(why, Some(&failure.reason)),
        };
        if sent.is_finished {
            // Only the end was missing.
            self.ready = Bytes::from_static(b"data: [DONE]\n\n");
            return;
        }
        self.sent = Some(Arc::clone(&sent));
        let attempts = std::mem::take(&mut self.attempts);
        let (gateway, request) = (Arc::clone(&self.gateway), Arc::clone(&self.request));
        self.state = State::Resuming(resume(gateway, request, attempts, route, failure, sent).boxed());
    }
}

/// Finds a worker for the rest, and waits for its first event.
async fn resume(
    gateway: Arc<Gateway>,
    request: Arc<RelayRequest>,
    mut attempts: Attempts,
    mut route: Route,
    mut failure: Failure,
    sent: Arc<Sent>,
) -> Result<Box<Resumed>, (Attempts, String)> {
    loop {
        if let Err(failure) = attempts.failed(&gateway, &request, &route, failure).await {
            return Err((attempts, failure.reason));
        }
        let Some(body) = rest(&request, &sent) else {
            return Err((attempts, "its last token was its last".to_owned()));
        };
        let booking;
        (route, booking) = match attempts.route(&gateway, &request).await {
            Ok(routed) => routed,
            Err(error) => return Err((attempts, error.message)),
        };
        let asked = match ask(&gateway, &request, &body, &route).await {
            Ok(asked) => asked,
            Err(next) => {
                failure = next;
                continue;
            }
        };
        let mut leg = Leg::new(&gateway, &request, asked, booking, route.clone());
        match leg.first_words().await {
            Ok(first) => return Ok(Box::new(Resumed { leg, attempts, first })),
            Err(next) => failure = next,
        }
    }
}

impl Drop for RelayStream {
    fn drop(&mut self) {
        if let Some(usage) = &self.told {
            self.gateway.account(usage);
        }
    }
}

impl HttpBody for RelayStream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        loop {
            if !this.ready.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(std::mem::take(&mut this.ready)))));
            }
            match &mut this.state {
                State::Over => return Poll::Ready(None),
                State::Ending(leg) => {
                    let is_over = Pin::new(&mut leg.reply).poll_frame(context).is_ready();
                    if let State::Ending(leg) = std::mem::replace(&mut this.state, State::Over)
                        && !is_over
                    {
                        let reply = leg.reply;
                        // The client does not wait for it; the connection is worth a moment.
                        tokio::spawn(tokio::time::timeout(END_WITHIN, reply.whole(0)));
                    }
                }
                State::Live(leg) => match leg.poll_batch(context) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Some(Ok(mut batch))) => {
                        let failure = batch.failure.take();
                        let failure =
                            failure.map(|words| Failure::protocol(&leg.route, format!("it failed: {words}")));
                        this.take(batch);
                        if let Some(failure) = failure {
                            let ready = std::mem::take(&mut this.ready);
                            this.go_on(failure);
                            this.ready = [ready, std::mem::take(&mut this.ready)].concat().into();
                        }
                    }
                    Poll::Ready(Some(Err(failure))) => this.go_on(failure),
                    Poll::Ready(None) => {
                        let failure = Failure::protocol(&leg.route, "the stream ended too early");
                        this.go_on(failure);
                    }
                },
                State::Resuming(resuming) => match resuming.as_mut().poll(context) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Ok(resumed)) => {
                        let Resumed { leg, attempts, first } = *resumed;
                        this.attempts = attempts;
                        this.attempts.goes_well();
                        this.state = State::Live(Box::new(leg));
                        this.take(first);
                    }
                    Poll::Ready(Err((attempts, reason))) => {
                        this.attempts = attempts;
                        this.fail("no other worker could go on with it", Some(&reason));
                    }
                },
            }
        }
    }
}
