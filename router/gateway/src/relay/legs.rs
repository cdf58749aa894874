//! Asking workers: one for everything, or one for the prompt and one for the rest.
//!
//! With two legs, an object that names blocks on the prefill worker is used once and at once: an engine that is given one
//! whose blocks have been reused meanwhile answers 200 with the wrong text (seen with vLLM 0.32). So an attempt that
//! failed starts again with a fresh prefill, and the decode leg is never sent twice.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::Response;
use bytes::Bytes;
use http::Response as HttpResponse;
use router_engines::body::RawBody;
use router_engines::dialect::legs::{Pairing, PrefillAnswer, Protocol, decode_leg, prefill_leg};
use router_engines::dialect::{Engine, host_of};
use router_engines::openai::ApiError;
use router_engines::upstream::{Call, ReplyBody, UpstreamError};
use router_fleet::{Booking, RankRef, Route};
use router_trace::names;
use tokio::task::JoinHandle;

use super::RelayRequest;
use super::events::Usage;
use crate::service::{Gateway, workers_failed};
use crate::traced::LegSpan;

/// First pause of a request that keeps failing.
pub(crate) const BACKOFF: Duration = Duration::from_millis(5);
/// Largest answer of a prefill leg, and largest error that is passed on.
const LEG_BYTES_MAX: usize = 64 << 20;

/// Whether an engine says that it has too much to do, rather than that something is wrong.
pub(crate) fn is_busy(status: StatusCode) -> bool {
    matches!(status.as_u16(), 408 | 425 | 429 | 503 | 529)
}

/// Why an attempt is over.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) reason: String,
    pub(crate) blames_prefill: bool,
    /// It speaks against the worker.
    pub(crate) is_workers: bool,
    /// It could not be reached, or broke off.
    pub(crate) is_connection: bool,
    /// Another worker may do better.
    pub(crate) is_retryable: bool,
    /// The engine's own words.
    answer: Option<(StatusCode, Option<HeaderValue>, Bytes)>,
}

impl Failure {
    pub(crate) fn connection(error: &UpstreamError) -> Self {
        Self {
            reason: error.to_string(),
            blames_prefill: false,
            is_workers: true,
            is_connection: true,
            is_retryable: true,
            answer: None,
        }
    }

    pub(crate) fn protocol(route: &Route, reason: impl std::fmt::Display) -> Self {
        Self {
            reason: format!("{}: {reason}", route.decode.run.name),
            blames_prefill: false,
            is_workers: true,
            is_connection: false,
            is_retryable: true,
            answer: None,
        }
    }

    pub(crate) fn hung(route: &Route) -> Self {
        let mut failure = Self::protocol(route, "it does not answer");
        failure.is_connection = true;
        failure
    }

    /// No first token in time, of a request that was sent to the worker at `sent`. A queue is no fault of an engine, and what
    /// waits in it may still be computed there: only a worker that reports no request at all has lost this one.
    pub(crate) fn late(rank: &RankRef, limit: Duration, sent: Instant) -> Self {
        let is_lost = rank.run.reported.is_idle_since(sent);
        Self {
            reason: format!("{}: no answer within {} ms", rank.run.name, limit.as_millis()),
            blames_prefill: false,
            is_workers: is_lost,
            is_connection: false,
            is_retryable: is_lost,
            answer: None,
        }
    }

    /// The engine says no. What is wrong with the request stays wrong elsewhere.
    fn refused(rank: &RankRef, status: StatusCode, kind: Option<HeaderValue>, body: Bytes) -> Self {
        let busy = is_busy(status);
        Self {
            reason: format!("{} answered {status}", rank.run.name),
            blames_prefill: false,
            is_workers: status.is_server_error() && !busy,
            is_connection: false,
            is_retryable: busy || status.is_server_error(),
            answer: Some((status, kind, body)),
        }
    }

    /// Whose failure it is.
    pub(crate) fn at_fault<'a>(&self, route: &'a Route) -> &'a RankRef {
        match &route.prefill {
            Some(prefill) if self.blames_prefill => prefill,
            _ => &route.decode,
        }
    }

    /// The prefill worker died while its blocks were being fetched.
    pub(crate) fn gone(prefill: &RankRef) -> Self {
        Self {
            reason: format!("{}: it is gone, and blocks were to come from it", prefill.run.name),
            blames_prefill: true,
            is_workers: true,
            is_connection: true,
            is_retryable: true,
            answer: None,
        }
    }

    fn of_prefill(mut self) -> Self {
        self.blames_prefill = true;
        self
    }

    /// As an error of the gateway, in the engine's words if it had some.
    pub(crate) fn into_response(self, request: &RelayRequest) -> Result<Response, ApiError> {
        match self.answer {
            Some((status, kind, body)) if !body.is_empty() && !status.is_success() => {
                let mut response = Response::new(Body::from(body));
                *response.status_mut() = status;
                let kind = kind.unwrap_or(HeaderValue::from_static("application/json"));
                response.headers_mut().insert(header::CONTENT_TYPE, kind);
                if status == StatusCode::SERVICE_UNAVAILABLE || status == StatusCode::TOO_MANY_REQUESTS {
                    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
                }
                Ok(response)
            }
            _ => Err(workers_failed(request.explains, &request.request_id, &self.reason)),
        }
    }
}

/// What the prefill leg said, for the check of the decode leg's answer: tokens must not come from another prompt's KV.
#[derive(Debug)]
pub(crate) struct Promised {
    prompt_tokens: Option<usize>,
    cached_tokens: Option<usize>,
}

impl Promised {
    /// Compares what the decode worker counted with what the prefill worker computed.
    pub(crate) fn check(&self, usage: &Usage) -> Result<(), String> {
        if let Some(promised) = self.prompt_tokens
            && usage.prompt_tokens != promised
        {
            return Err(format!(
                "it decoded a prompt of {} tokens, prefill had {promised}",
                usage.prompt_tokens
            ));
        }
        match usage.cached_tokens() {
            Some(cached) if cached > usage.prompt_tokens => {
                Err(format!("it says that {cached} tokens of {} were cached", usage.prompt_tokens))
            }
            _ => Ok(()),
        }
    }
}

/// A task that ends with whoever holds this.
#[derive(Debug)]
pub(crate) struct Owned<T>(JoinHandle<T>);

impl<T> Owned<T> {
    /// What it ended with, once it has; `None` when it was torn down.
    pub(crate) fn poll_end(&mut self, context: &mut Context<'_>) -> Poll<Option<T>> {
        Pin::new(&mut self.0).poll(context).map(Result::ok)
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A decode leg that has begun to answer with 200.
pub(crate) struct Asked {
    pub(crate) reply: HttpResponse<ReplyBody>,
    pub(crate) promised: Option<Promised>,
    /// A prefill leg that goes on beside it.
    pub(crate) prefill: Option<Owned<Result<(), Failure>>>,
    /// Since when blocks are on their way to the decode worker, if they are.
    pub(crate) moving: Option<Instant>,
    pub(crate) span: Option<LegSpan>,
}

impl Asked {
    /// What the prefill worker found in its cache is compared with what was predicted.
    pub(crate) fn audit(&self, booking: &mut Booking) {
        if let Some(cached) = self.promised.as_ref().and_then(|promised| promised.cached_tokens) {
            booking.prefill_cached_tokens(cached);
        }
    }
}

/// What to send to a worker, and its span if the request is traced.
fn call(
    request: &RelayRequest,
    body: &RawBody,
    rank: &RankRef,
    name: &'static str,
) -> (Call, Option<LegSpan>) {
    let mut call = match rank.run.description.engine.dialect().takes_extensions() {
        true => Call::json(request.path, body.to_bytes()),
        false => {
            let mut standard = body.clone();
            standard.remove("cache_salt");
            Call::json(request.path, standard.to_bytes())
        }
    };
    call.headers.extend(request.headers.iter().map(|(name, value)| (name.clone(), value.clone())));
    let name_of_call = HeaderName::from_static("x-request-id");
    // Both legs of an attempt have one name. An engine may still be busy with giving up the attempt before, and some
    // refuse a second call of its name.
    let mut call = match request.attempts.load(Ordering::Relaxed) {
        ..=1 => call.with(name_of_call, &request.engine_id),
        more => call.with(name_of_call, &format!("{}-{more}", request.engine_id)),
    };
    let header = rank.run.description.engine.dialect().rank_header();
    if let (Some(rank), Some(header)) = (rank.run.rank, header) {
        call = call.with(HeaderName::from_static(header), &rank.to_string());
    }
    let span = LegSpan::open(&request.traced, name, rank, &mut call.headers);
    (call, span)
}

/// Sends to one worker; its answer's head has a status of success.
async fn send(
    rank: &RankRef,
    call: &Call,
    span: &mut Option<LegSpan>,
) -> Result<HttpResponse<ReplyBody>, Failure> {
    let mut failed = |how| {
        if let Some(span) = span {
            span.failed(how);
        }
    };
    let reply = rank.worker.upstream.send(call).await.map_err(|error| {
        failed("connection");
        Failure::connection(&error)
    })?;
    let status = reply.status();
    if status.is_success() {
        return Ok(reply);
    }
    failed(if status.is_server_error() { "engine_error" } else { "refused_by_engine" });
    let kind = reply.headers().get(header::CONTENT_TYPE).cloned();
    let body = reply.into_body().whole(LEG_BYTES_MAX).await.map_err(|error| Failure::connection(&error))?;
    Err(Failure::refused(rank, status, kind, body))
}

/// Asks the workers of a route. `body` is the request's own, or that of its continuation.
pub(crate) async fn ask(
    gateway: &Arc<Gateway>,
    request: &Arc<RelayRequest>,
    body: &RawBody,
    route: &Route,
) -> Result<Asked, Failure> {
    request.attempts.fetch_add(1, Ordering::Relaxed);
    let sent = Instant::now();
    let down = route.decode.worker.given_up(sent);
    // An engine may wait for blocks of a prefill worker that has frozen for as long as it likes.
    let prefill_down = async {
        match &route.prefill {
            Some(prefill) => prefill.worker.given_up(sent).await,
            None => std::future::pending().await,
        }
    };
    // Where the request is when time runs out.
    let is_prefilling = AtomicBool::new(false);
    let limit = gateway.tuning().answer_within;
    tokio::select! {
        asked = tokio::time::timeout(limit, legs(gateway, request, body, route, &is_prefilling)) => {
            asked.unwrap_or_else(|_| Err(match &route.prefill {
                Some(prefill) if is_prefilling.load(Ordering::Relaxed) => {
                    Failure::late(prefill, limit, sent).of_prefill()
                }
                _ => Failure::late(&route.decode, limit, sent),
            }))
        }
        () = down => Err(Failure::hung(route)),
        () = prefill_down => Err(Failure::hung(route).of_prefill()),
    }
}

async fn legs(
    gateway: &Arc<Gateway>,
    request: &Arc<RelayRequest>,
    body: &RawBody,
    route: &Route,
    is_prefilling: &AtomicBool,
) -> Result<Asked, Failure> {
    let Some(prefill) = &route.prefill else {
        let (call, mut span) = call(request, body, &route.decode, names::span::DECODE);
        let reply = send(&route.decode, &call, &mut span).await?;
        return Ok(Asked { reply, promised: None, prefill: None, moving: None, span });
    };
    gateway.metrics.disaggregated.inc();
    let protocol = gateway.config.protocol.unwrap_or(match prefill.run.description.engine {
        Engine::Native => Protocol::Native,
        Engine::Vllm => Protocol::Nixl,
        Engine::Sglang => Protocol::Bootstrap,
        Engine::TensorRtLlm => Protocol::TensorRtLlm,
        // No such worker has a part in a hand-off.
        Engine::OpenAi => Protocol::Native,
    });
    let mooncake = match protocol {
        Protocol::Mooncake => Some(bootstrap(gateway, prefill).await.map_err(Failure::of_prefill)?),
        _ => None,
    };
    let pairing = Pairing {
        number: crate::service::fresh_number(),
        prefill: &prefill.run.description,
        mooncake: mooncake.as_ref().map(|(address, engine)| (address.as_str(), engine.as_str())),
    };
    let unmade = |error| Failure::protocol(route, error).of_prefill();
    let prefill_body = prefill_leg(protocol, body, &pairing).map_err(unmade)?;
    let (mut prefill_call, prefill_span) = call(request, &prefill_body, prefill, names::span::PREFILL);
    if protocol.is_sequential() {
        is_prefilling.store(true, Ordering::Relaxed);
        let answer = first_leg(prefill, &prefill_call, prefill_span).await.map_err(Failure::of_prefill)?;
        is_prefilling.store(false, Ordering::Relaxed);
        let moving = Some(Instant::now());
        let answer = PrefillAnswer::parse(answer).map_err(unmade)?;
        // One that ended with its first token left no blocks behind: the decode worker computes that token itself.
        let decode = match decode_leg(protocol, body, &pairing, Some(&answer)) {
            Err(_) if answer.is_complete() => body.clone(),
            leg => leg.map_err(unmade)?,
        };
        let (mut decode_call, mut span) = call(request, &decode, &route.decode, names::span::DECODE);
        decode_call.once = true;
        let reply = send(&route.decode, &decode_call, &mut span).await?;
        let promised = Promised { prompt_tokens: answer.prompt_tokens, cached_tokens: answer.cached_tokens };
        return Ok(Asked { reply, promised: Some(promised), prefill: None, moving, span });
    }
    let decode = decode_leg(protocol, body, &pairing, None).map_err(unmade)?;
    let (mut decode_call, mut span) = call(request, &decode, &route.decode, names::span::DECODE);
    decode_call.once = true;
    // One that meets the other by a number must not come twice.
    prefill_call.once = true;
    let leg = prefill.clone();
    let mut task = Owned(tokio::spawn(async move {
        // Its answer is read to the end, and not needed.
        first_leg(&leg, &prefill_call, prefill_span).await.map(drop).map_err(Failure::of_prefill)
    }));
    let moving = Some(Instant::now());
    let mut is_over = false;
    let mut start = Box::pin(send(&route.decode, &decode_call, &mut span));
    loop {
        tokio::select! {
            reply = &mut start => {
                drop(start);
                let prefill = (!is_over).then_some(task);
                return Ok(Asked { reply: reply?, promised: None, prefill, moving, span });
            }
            // The decode leg is given up with it, here, by dropping it.
            ended = &mut task.0, if !is_over => match ended {
                Ok(Err(failure)) => return Err(failure),
                _ => is_over = true,
            },
        }
    }
}

/// A prefill leg from its request to the end of its answer.
async fn first_leg(prefill: &RankRef, call: &Call, mut span: Option<LegSpan>) -> Result<Bytes, Failure> {
    let down = prefill.worker.given_up(Instant::now());
    let asked = async {
        let reply = send(prefill, call, &mut span).await?;
        let answer =
            reply.into_body().whole(LEG_BYTES_MAX).await.map_err(|error| Failure::connection(&error))?;
        if let Some(span) = &mut span {
            span.succeeded();
        }
        Ok(answer)
    };
    tokio::select! {
        answer = asked => {
            if answer.is_ok() {
                prefill.worker.breaker.succeeded();
            }
            answer
        }
        () = down => Err(Failure {
            reason: format!("{}: it does not answer", prefill.run.name),
            blames_prefill: true,
            is_workers: true,
            is_connection: true,
            is_retryable: true,
            answer: None,
        }),
    }
}

/// Address of a prefill worker's MooncakeConnector bootstrap server, and the id that its engine has there.
async fn bootstrap(gateway: &Gateway, prefill: &RankRef) -> Result<(String, String), Failure> {
    let base = prefill.worker.client.base();
    let host = host_of(base);
    let address = gateway.config.mooncake_bootstrap.replace('*', host);
    let client = router_engines::client::EngineClient::new(&address, gateway.config.access.tls.as_ref());
    let said = client.get("/query").await;
    let said = said.map_err(|error| {
        Failure::connection(&UpstreamError { worker: address.clone(), reason: error.to_string() })
    })?;
    let said: serde_json::Value = serde_json::from_slice(&said).unwrap_or_default();
    let rank = prefill.run.rank.unwrap_or(0).to_string();
    match said[&rank]["engine_id"].as_str() {
        Some(engine) => Ok((address, engine.to_owned())),
        None => Err(Failure {
            reason: format!("{address}/query names no engine of rank {rank}"),
            blames_prefill: true,
            is_workers: true,
            is_connection: false,
            is_retryable: true,
            answer: None,
        }),
    }
}
