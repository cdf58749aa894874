//! A leg that generates: its events, and the limits on silence.
//!
//! Hot path, once per frame. One timer detects stalls; it is not reset with each frame but compares, when
//! it fires, the time of the last frame. Waiting for the first token is not a stall and has a limit of its
//! own.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use http_body::Body as HttpBody;
use router_engines::upstream::ReplyBody;
use router_fleet::{Booking, Route, Worker};
use router_openai::sse;
use tokio::time::Sleep;

use super::dispatch::{LegReply, PrefillTask, PrefillUsage};
use super::failure::Failure;
use super::scanner::{EventBatch, Scanner};
use super::{EngineRequest, Generation};
use crate::traced::LegSpan;

/// Longest wait for the end of an engine's body, after which its connection can be used again.
const END_WITHIN: Duration = Duration::from_secs(1);

/// Largest number of bytes that an engine may send before its first output.
const OPENING_BYTES_MAX: usize = 64 << 10;

/// A worker's answer in progress.
pub(super) struct Leg {
    reply: ReplyBody,
    pub(super) route: Route,
    pub(super) booking: Booking,
    pub(super) prefill_usage: Option<PrefillUsage>,
    prefill: Option<PrefillTask>,
    /// Tokens that the prefill worker had cached, until they are reported.
    pub(super) prefill_cached: Option<usize>,
    scanner: Scanner,
    /// Resolves when the worker is declared down although its connection is open.
    down: BoxFuture<'static, ()>,
    stalled: Pin<Box<Sleep>>,
    /// Longest time from the request to the first token.
    answer_within: Duration,
    /// Longest time between two frames after the first token.
    stall: Duration,
    /// When the request was sent.
    sent: Instant,
    /// Time of the last frame; before the first frame, the time at which the request was sent.
    last: Instant,
    /// Whether the worker has sent its first output (set by `mark_first_output`).
    has_begun: bool,
    /// A proxy relays the answer, at the pace of its client.
    is_behind_proxy: bool,
    /// Start of the transfer of blocks to the worker; cleared at its first token.
    transfer_started: Option<Instant>,
    span: Option<LegSpan>,
}

/// Resolves at the next `Worker::down` notification.
fn next_give_up(worker: &Arc<Worker>) -> BoxFuture<'static, ()> {
    let worker = Arc::clone(worker);
    async move { worker.down.notified().await }.boxed()
}

/// Sends the request to the workers of a route and waits for the first output, so that an earlier failure
/// can be retried on another worker or be answered with an error status.
pub(super) async fn begin(
    generation: Arc<Generation>,
    request: Arc<EngineRequest>,
    scanner: Scanner,
    route: Route,
    booking: Booking,
) -> Result<(Leg, EventBatch), (Route, Failure)> {
    let asked = match super::dispatch::ask(&generation, &request.body, &route).await {
        Ok(asked) => asked,
        Err(failure) => return Err((route, failure)),
    };
    let mut leg = Leg::new(&generation, asked, scanner, booking, route);
    match leg.first_words_or_failure().await {
        Ok(first) => {
            // With hedging this may be the second worker that was tried.
            generation.last_worker.set(&leg.route.decode.run);
            Ok((leg, first))
        }
        Err(failure) => {
            leg.failed();
            let failure = failure.unattributed_if(leg.booking.is_served_elsewhere());
            Err((leg.route, failure))
        }
    }
}

impl Leg {
    fn new(
        generation: &Generation,
        asked: LegReply,
        scanner: Scanner,
        mut booking: Booking,
        route: Route,
    ) -> Self {
        asked.compare_cached_tokens(&mut booking);
        let (stall, answer_within) = {
            let tuning = generation.gateway.tuning();
            (tuning.stall, tuning.answer_within)
        };
        let due = tokio::time::Instant::from_std(asked.sent + answer_within);
        Self {
            reply: asked.reply.into_body(),
            booking,
            prefill_usage: asked.prefill_usage,
            prefill: asked.prefill,
            prefill_cached: asked.prefill_cached,
            scanner,
            down: next_give_up(&route.decode.worker),
            stalled: Box::pin(tokio::time::sleep_until(due)),
            answer_within,
            stall,
            sent: asked.sent,
            last: asked.sent,
            has_begun: false,
            is_behind_proxy: generation.proxy_dispatch.is_some(),
            transfer_started: asked.transfer_started,
            span: asked.span,
            route,
        }
    }

    /// The next whole events; `None` at the end of the body.
    pub(super) fn poll_batch(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<EventBatch, Failure>>> {
        loop {
            match Pin::new(&mut self.reply).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => {
                    self.last = Instant::now();
                    let Ok(data) = frame.into_data() else { continue };
                    match self.scanner.push(data) {
                        Err(error) => {
                            return Poll::Ready(Some(Err(Failure::protocol(&self.route.decode, error))));
                        }
                        Ok(batch) if batch == EventBatch::default() => {}
                        Ok(batch) => return Poll::Ready(Some(Ok(batch))),
                    }
                }
                Poll::Ready(Some(Err(error))) => return Poll::Ready(Some(Err(Failure::connection(&error)))),
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Pending => break,
            }
        }
        if let Poll::Ready(failure) = self.poll_prefill(context) {
            return Poll::Ready(Some(Err(failure)));
        }
        let mut was_notified = false;
        while self.down.as_mut().poll(context).is_ready() {
            was_notified = true;
            self.down = next_give_up(&self.route.decode.worker);
        }
        // A slow health check does not end a stream that makes progress.
        if was_notified && self.route.decode.worker.is_silent_since(self.last) {
            return Poll::Ready(Some(Err(Failure::hung(&self.route.decode))));
        }
        while self.stalled.as_mut().poll(context).is_ready() {
            // Frames that only keep the connection open do not count as an answer.
            let (since, patience) = match self.has_begun {
                true => (self.last, self.stall),
                false => (self.sent, self.answer_within),
            };
            if since.elapsed() >= patience {
                return Poll::Ready(Some(Err(self.silent())));
            }
            let due = tokio::time::Instant::from_std(since + patience);
            self.stalled.as_mut().reset(due);
        }
        Poll::Pending
    }

    /// Polls the prefill leg. Before the first output the decode worker may be waiting for a prefill leg
    /// that has failed; after it the decode worker has the blocks or computes the rest.
    fn poll_prefill(&mut self, context: &mut Context<'_>) -> Poll<Failure> {
        let Some(prefill) = &mut self.prefill else { return Poll::Pending };
        let Poll::Ready(ended) = prefill.poll_end(context) else { return Poll::Pending };
        self.prefill = None;
        match ended {
            Some(Ok(cached)) => {
                if let Some(cached) = cached {
                    self.booking.prefill_cached_tokens(cached);
                }
                self.prefill_cached = cached;
                Poll::Pending
            }
            Some(Err(failure)) if !self.has_begun => Poll::Ready(failure),
            Some(Err(failure)) => {
                tracing::debug!(failure.reason, "the prefill leg failed after the first token");
                Poll::Pending
            }
            None => Poll::Pending,
        }
    }

    /// Returns the failure for a worker that was silent for too long.
    fn silent(&self) -> Failure {
        let failure = match self.has_begun {
            true => {
                let quiet = format!("nothing came for {} ms", self.stall.as_millis());
                Failure::stalled(&self.route.decode, quiet)
            }
            false => Failure::late(&self.route.decode, self.answer_within, self.sent),
        };
        failure.behind_proxy(self.is_behind_proxy)
    }

    /// Returns the time of the last frame.
    pub(super) fn last_frame_at(&self) -> Instant {
        self.last
    }

    /// Returns the failure for an engine that reports an error, with the engine's message.
    pub(super) fn engine_error(&self, words: &str) -> Failure {
        Failure::protocol(&self.route.decode, format!("it failed: {words}"))
    }

    async fn first_batch(&mut self) -> Result<EventBatch, Failure> {
        match std::future::poll_fn(|context| self.poll_batch(context)).await {
            None => Err(Failure::protocol(&self.route.decode, "a stream without events")),
            Some(Ok(EventBatch { failure: Some(words), .. })) => Err(self.engine_error(&words)),
            Some(batch) => batch,
        }
    }

    async fn first_output(&mut self) -> Result<EventBatch, Failure> {
        let mut first = self.first_batch().await?;
        if first.is_done || !is_only_role(&first.out) {
            return Ok(first);
        }
        // Some engines begin an answer before they know whether they can serve the request.
        let mut opening = BytesMut::from(first.out);
        let mut events = first.events;
        loop {
            let next = self.first_batch().await?;
            let is_output = next.is_done || !is_only_role(&next.out);
            // A comment has kept the connection open and is dropped.
            if next.events > 0 || is_output {
                opening.extend_from_slice(&next.out);
                events += next.events;
            }
            first = EventBatch { out: Bytes::new(), usage: next.usage.or(first.usage), ..next };
            if is_output {
                return Ok(EventBatch { out: opening.freeze(), events, ..first });
            }
            if opening.len() > OPENING_BYTES_MAX {
                return Err(Failure::protocol(
                    &self.route.decode,
                    "the engine sent the message role and no output",
                ));
            }
        }
    }

    async fn first_words_or_failure(&mut self) -> Result<EventBatch, Failure> {
        // An engine that fetches blocks from a worker that died meanwhile may stay silent without limit.
        let Some(prefill) = self.route.prefill.clone().filter(|_| self.transfer_started.is_some()) else {
            return self.first_output().await;
        };
        let gone = prefill.worker.disconnected.notified();
        tokio::select! {
            first = self.first_output() => first,
            () = gone => Err(Failure::gone(&prefill)),
        }
    }

    /// Marks the first output: stalls are detected from here on, and the worker counts as healthy. Returns
    /// when the transfer of blocks began, at the first call, if there was a transfer.
    pub(super) fn mark_first_output(&mut self) -> Option<Instant> {
        if std::mem::replace(&mut self.has_begun, true) {
            return None;
        }
        self.stalled.as_mut().reset(tokio::time::Instant::now() + self.stall);
        self.booking.first_token();
        self.booking.decode_succeeded();
        self.transfer_started.take()
    }

    /// Records that the engine has completed its answer.
    pub(super) fn succeeded(&mut self) {
        if let Some(mut span) = self.span.take() {
            span.succeeded();
        }
    }

    pub(super) fn failed(&mut self) {
        if let Some(span) = &mut self.span {
            span.failed("broken_stream");
        }
    }

    /// Reads the end of the body, in a task of its own if it has yet to arrive, so that the connection can
    /// be used again.
    pub(super) fn end(mut self, context: &mut Context<'_>) {
        if Pin::new(&mut self.reply).poll_frame(context).is_pending() {
            tokio::spawn(tokio::time::timeout(END_WITHIN, self.reply.whole(0)));
        }
    }
}

/// Whether the events hold only the role of the message, or nothing.
fn is_only_role(events: &[u8]) -> bool {
    sse::events(events).all(|event| {
        let data = sse::data_of(event);
        // A comment only keeps the connection open.
        if data.is_empty() {
            return true;
        }
        let Ok(value) = serde_json::from_slice::<serde_json::Value>(&data) else { return false };
        let choice = &value["choices"][0];
        choice["delta"]["role"].is_string()
            && choice["delta"]["content"].as_str().is_none_or(str::is_empty)
            && choice["delta"].as_object().is_some_and(|delta| delta.len() <= 2)
            && choice["finish_reason"].is_null()
    })
}
