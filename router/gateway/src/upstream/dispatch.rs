//! Sending a request to workers: to one for everything, or to one for the prompt and to one for the rest.
//!
//! With two legs, an object that names blocks on the prefill worker is used once and immediately: an engine
//! that is given an object whose blocks have been reused meanwhile answers 200 with the wrong text (seen
//! with vLLM 0.32). So an attempt that failed starts again with a fresh prefill, and the decode leg is
//! never sent twice.

use std::borrow::Cow;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Instant;

use axum::http::{HeaderName, header};
use bytes::Bytes;
use http::Response as HttpResponse;
use router_engines::connector_params::ConnectorParams;
use router_engines::dialect::legs::{Pairing, PrefillAnswer, Protocol, decode_leg, prefill_leg};
use router_engines::dialect::{Engine, host_of};
use router_engines::proxy_dispatch::{ProxyDispatch, ProxyDispatchError, ServedElsewhere};
use router_engines::upstream::{Call, ReplyBody, UpstreamError};
use router_fleet::{Booking, RankRef, Route};
use router_openai::{FORM_USAGE, RawBody, Usage};
use router_trace::names;
use tokio::task::JoinHandle;

use super::Generation;
use super::failure::{Failure, Refusal};
use crate::metrics::Metrics;
use crate::service::{Gateway, fresh_number};
use crate::traced::LegSpan;

/// Largest answer of a prefill leg, and largest error that is relayed.
const LEG_BYTES_MAX: usize = 64 << 20;

/// Usage that the prefill leg reported, to check the decode leg's answer: tokens must not come from another
/// prompt's KV.
#[derive(Debug)]
pub(super) struct PrefillUsage {
    prompt_tokens: Option<usize>,
}

impl PrefillUsage {
    /// Compares the decode worker's token count with the prefill worker's.
    pub(super) fn check(&self, usage: &Usage) -> Result<(), String> {
        if let Some(prefill_tokens) = self.prompt_tokens
            && usage.prompt != prefill_tokens
        {
            return Err(format!(
                "it decoded a prompt of {} tokens, prefill had {prefill_tokens}",
                usage.prompt
            ));
        }
        match usage.cached {
            Some(cached) if cached > usage.prompt => {
                Err(format!("it says that {cached} tokens of {} were cached", usage.prompt))
            }
            _ => Ok(()),
        }
    }
}

/// A task that is aborted on drop.
#[derive(Debug)]
pub(super) struct AbortOnDrop<T>(JoinHandle<T>);

impl<T> AbortOnDrop<T> {
    /// Returns the task's result once it has ended; `None` when it was torn down.
    pub(super) fn poll_end(&mut self, context: &mut Context<'_>) -> Poll<Option<T>> {
        Pin::new(&mut self.0).poll(context).map(Result::ok)
    }
}

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A prefill leg beside the decode leg; returns the tokens that its worker had cached, if the worker
/// reports them.
pub(super) type PrefillTask = AbortOnDrop<Result<Option<usize>, Failure>>;

/// A decode leg that has begun to answer with 200.
pub(super) struct LegReply {
    /// When the request was sent.
    pub(super) sent: Instant,
    pub(super) reply: HttpResponse<ReplyBody>,
    pub(super) prefill_usage: Option<PrefillUsage>,
    /// Tokens that the prefill worker had cached, if it has reported them.
    pub(super) prefill_cached: Option<usize>,
    /// The prefill leg, if it still runs.
    pub(super) prefill: Option<PrefillTask>,
    /// Start of the transfer of blocks to the decode worker, if there is one.
    pub(super) transfer_started: Option<Instant>,
    pub(super) span: Option<LegSpan>,
}

impl LegReply {
    /// Whether a proxy had another endpoint answer than the picked one.
    pub(super) fn is_served_elsewhere(&self) -> bool {
        self.reply.extensions().get::<ServedElsewhere>().is_some()
    }

    /// Compares the cached tokens that the prefill worker reported with the prediction. Nothing is learned from the answer of
    /// another endpoint than the picked one.
    pub(super) fn compare_cached_tokens(&self, booking: &mut Booking) {
        if self.is_served_elsewhere() {
            booking.served_elsewhere();
        }
        if let Some(cached) = self.prefill_cached {
            booking.prefill_cached_tokens(cached);
        }
    }
}

/// Builds the call for a worker, and its span if the request is traced.
fn call(
    generation: &Generation,
    body: &RawBody,
    rank: &RankRef,
    name: &'static str,
) -> (Call, Option<LegSpan>) {
    let mut call = match rank.run.description.engine.dialect().takes_extensions() {
        true => Call::post(generation.path, body.content_type(), body.to_bytes()),
        false => {
            let mut standard = body.clone();
            standard.remove("cache_salt");
            standard.remove(FORM_USAGE);
            Call::post(generation.path, standard.content_type(), standard.to_bytes())
        }
    };
    call.headers.extend(generation.headers.iter().map(|(name, value)| (name.clone(), value.clone())));
    let name_of_call = HeaderName::from_static("x-request-id");
    // Both legs of an attempt have one id. An engine may still be aborting the previous attempt, and some
    // engines refuse a second call with the same id.
    let mut call = match generation.attempts.load(Ordering::Relaxed) {
        ..=1 => call.with(name_of_call, &generation.engine_id),
        more => call.with(name_of_call, &format!("{}-{more}", generation.engine_id)),
    };
    let header = rank.run.description.engine.dialect().rank_header();
    if let (Some(rank), Some(header)) = (rank.run.rank, header) {
        call = call.with(HeaderName::from_static(header), &rank.to_string());
    }
    let span = LegSpan::open(&generation.traced, name, rank, &mut call.headers);
    (call, span)
}

/// The proxy that sends a request in the gateway's place.
struct Proxy<'a> {
    proxy_dispatch: &'a ProxyDispatch,
    metrics: &'a Metrics,
}

/// Returns the proxy that sends the generating leg, if there is one, and counts the request as handed over.
fn handed_over(generation: &Generation) -> Option<Proxy<'_>> {
    let proxy_dispatch = generation.proxy_dispatch.as_ref()?;
    let metrics = &generation.gateway.metrics;
    metrics.handed_over.inc();
    Some(Proxy { proxy_dispatch, metrics })
}

/// Sends a call to one worker; returns the answer only if its status is a success.
async fn send(
    rank: &RankRef,
    call: &Call,
    span: &mut Option<LegSpan>,
    proxy: Option<Proxy<'_>>,
) -> Result<HttpResponse<ReplyBody>, Failure> {
    let mut failed = |how| {
        if let Some(span) = span {
            span.failed(how);
        }
    };
    let upstream = &rank.worker.upstream;
    let sent = match &proxy {
        None => upstream.send(call).await.map_err(|error| Failure::connection(&error)),
        Some(proxy) => proxy.proxy_dispatch.send(upstream, call.clone()).await.map_err(|error| match error {
            ProxyDispatchError::Worker(error) => Failure::connection(&error),
            ProxyDispatchError::Proxy(error) => Failure::of_proxy(error.to_string()),
        }),
    };
    let reply = sent.inspect_err(|_| failed("connection"))?;
    let elsewhere = reply.extensions().get::<ServedElsewhere>();
    let is_elsewhere = elsewhere.is_some();
    if let (Some(proxy), Some(ServedElsewhere(endpoint))) = (proxy, elsewhere) {
        proxy.metrics.served_elsewhere.inc();
        tracing::debug!(
            worker = rank.worker.name,
            endpoint,
            "the proxy had another endpoint serve a request"
        );
        // The proxy does not know the picked worker or considers it unhealthy: after several such answers
        // in a row other workers are picked.
        if rank.worker.breaker.failed(Instant::now()) {
            tracing::warn!(
                worker = rank.run.name,
                "circuit breaker opened: the proxy sends this worker's requests elsewhere"
            );
        }
    }
    let status = reply.status();
    if status.is_success() {
        return Ok(reply);
    }
    failed(if status.is_server_error() { "engine_error" } else { "refused_by_engine" });
    let content_type = reply.headers().get(header::CONTENT_TYPE).cloned();
    let body = reply
        .into_body()
        .whole(LEG_BYTES_MAX)
        .await
        .map_err(|error| Failure::connection(&error).unattributed_if(is_elsewhere))?;
    Err(Failure::refused(rank, Refusal { status, content_type, body }).unattributed_if(is_elsewhere))
}

/// Sends the request to the workers of a route.
pub(super) async fn ask(generation: &Generation, body: &RawBody, route: &Route) -> Result<LegReply, Failure> {
    generation.attempts.fetch_add(1, Ordering::Relaxed);
    let sent = Instant::now();
    let down = route.decode.worker.given_up(sent);
    // A decode engine may wait without limit for the blocks of a prefill worker that has frozen.
    let prefill_down = async {
        match &route.prefill {
            Some(prefill) => {
                prefill.worker.given_up(sent).await;
                prefill
            }
            None => std::future::pending().await,
        }
    };
    // Whether the prefill leg is running, to name the late worker when the time limit expires.
    let is_prefilling = AtomicBool::new(false);
    let limit = generation.gateway.tuning().answer_within;
    tokio::select! {
        asked = tokio::time::timeout(limit, legs(generation, body, route, sent, &is_prefilling)) => {
            asked.unwrap_or_else(|_| Err(match &route.prefill {
                Some(prefill) if is_prefilling.load(Ordering::Relaxed) => {
                    Failure::late(prefill, limit, sent).of_prefill()
                }
                _ => Failure::late(&route.decode, limit, sent).behind_proxy(generation.proxy_dispatch.is_some()),
            }))
        }
        () = down => Err(Failure::hung(&route.decode)),
        prefill = prefill_down => Err(Failure::hung(prefill).of_prefill()),
    }
}

/// Returns the seconds for which this engine is to retain the blocks of a request.
fn retain_seconds(generation: &Generation, engine: &RankRef) -> Option<u32> {
    let seconds = u32::try_from(generation.retain_for.as_secs()).unwrap_or(u32::MAX);
    Some(seconds).filter(|&seconds| seconds > 0 && engine.run.description.retains_blocks)
}

/// Returns the body with these connector parameters.
fn with_connector_params(body: &RawBody, params: ConnectorParams) -> Cow<'_, RawBody> {
    match params.beside(body.get("kv_transfer_params")) {
        None => Cow::Borrowed(body),
        Some(params) => {
            let mut extended = body.clone();
            extended.set("kv_transfer_params", params);
            Cow::Owned(extended)
        }
    }
}

async fn legs(
    generation: &Generation,
    body: &RawBody,
    route: &Route,
    sent: Instant,
    is_prefilling: &AtomicBool,
) -> Result<LegReply, Failure> {
    let Some(prefill) = &route.prefill else {
        let params = ConnectorParams {
            shared_blocks: route.shared_blocks,
            retain_seconds: retain_seconds(generation, &route.decode),
        };
        let body = &with_connector_params(body, params);
        let (call, mut span) = call(generation, body, &route.decode, names::span::DECODE);
        let reply = send(&route.decode, &call, &mut span, handed_over(generation)).await?;
        return Ok(LegReply {
            sent,
            reply,
            prefill_usage: None,
            prefill_cached: None,
            prefill: None,
            transfer_started: None,
            span,
        });
    };
    let gateway = &generation.gateway;
    gateway.metrics.disaggregated.inc();
    let description = &prefill.run.description;
    let protocol = gateway.config.protocol.unwrap_or(match description.engine {
        Engine::Native => Protocol::Kvasir,
        Engine::Vllm if description.data_plane.is_some() => Protocol::Kvasir,
        Engine::Vllm => Protocol::Nixl,
        Engine::Sglang => Protocol::Bootstrap,
        Engine::TensorRtLlm => Protocol::TensorRtLlm,
        // A generic OpenAI service takes no part in a hand-off.
        Engine::OpenAi => Protocol::Kvasir,
    });
    let mooncake = match protocol {
        Protocol::Mooncake => Some(bootstrap(gateway, prefill).await.map_err(Failure::of_prefill)?),
        _ => None,
    };
    let pairing = Pairing {
        number: fresh_number(),
        prefill: description,
        prefill_rank: prefill.run.rank.unwrap_or(0),
        decode: &route.decode.run.description,
        mooncake: mooncake.as_ref().map(|(address, engine)| (address.as_str(), engine.as_str())),
    };
    let unmade = |error| Failure::protocol(prefill, error).of_prefill();
    let mut prefill_body = prefill_leg(protocol, body, &pairing).map_err(unmade)?;
    if protocol == Protocol::Kvasir {
        // The engine that computes the blocks retains them.
        let params = ConnectorParams {
            retain_seconds: retain_seconds(generation, prefill),
            ..ConnectorParams::default()
        };
        prefill_body = with_connector_params(&prefill_body, params).into_owned();
    }
    let (mut prefill_call, prefill_span) = call(generation, &prefill_body, prefill, names::span::PREFILL);
    if protocol.is_sequential() {
        is_prefilling.store(true, Ordering::Relaxed);
        let answer = first_leg(prefill, &prefill_call, prefill_span).await.map_err(Failure::of_prefill)?;
        is_prefilling.store(false, Ordering::Relaxed);
        let transfer_started = Some(Instant::now());
        let answer = PrefillAnswer::parse(answer).map_err(unmade)?;
        // A prefill that ended with its first token left no blocks behind: the decode worker computes that token itself.
        let decode = match decode_leg(protocol, body, &pairing, Some(&answer)) {
            Err(_) if answer.is_complete() => {
                with_connector_params(body, ConnectorParams::default()).into_owned()
            }
            leg => leg.map_err(unmade)?,
        };
        let (mut decode_call, mut span) = call(generation, &decode, &route.decode, names::span::DECODE);
        decode_call.once = true;
        let reply = send(&route.decode, &decode_call, &mut span, handed_over(generation)).await?;
        let prefill_usage = Some(PrefillUsage { prompt_tokens: answer.prompt_tokens });
        let prefill_cached = answer.cached_tokens;
        return Ok(LegReply {
            sent,
            reply,
            prefill_usage,
            prefill_cached,
            prefill: None,
            transfer_started,
            span,
        });
    }
    let decode = decode_leg(protocol, body, &pairing, None).map_err(unmade)?;
    let (mut decode_call, mut span) = call(generation, &decode, &route.decode, names::span::DECODE);
    decode_call.once = true;
    // The transfer id names one prefill: sent again, it would be registered twice.
    prefill_call.once = true;
    let leg = prefill.clone();
    let mut task = AbortOnDrop(tokio::spawn(async move {
        let answer = first_leg(&leg, &prefill_call, prefill_span).await.map_err(Failure::of_prefill)?;
        // The prefill leg's output is not needed, and may be a stream.
        Ok(PrefillAnswer::parse(answer).ok().and_then(|answer| answer.cached_tokens))
    }));
    let transfer_started = Some(Instant::now());
    let mut ended = None;
    let mut start = Box::pin(send(&route.decode, &decode_call, &mut span, handed_over(generation)));
    loop {
        tokio::select! {
            reply = &mut start => {
                drop(start);
                let prefill = ended.is_none().then_some(task);
                let prefill_cached = ended.flatten();
                return Ok(LegReply { sent, reply: reply?, prefill_usage: None, prefill_cached, prefill, transfer_started, span });
            }
            // A failed prefill leg also ends the decode leg, which is dropped here.
            over = &mut task.0, if ended.is_none() => match over {
                Ok(Err(failure)) => return Err(failure),
                Ok(Ok(cached)) => ended = Some(cached),
                Err(_) => ended = Some(None),
            },
        }
    }
}

/// A prefill leg from its request to the end of its answer.
async fn first_leg(prefill: &RankRef, call: &Call, mut span: Option<LegSpan>) -> Result<Bytes, Failure> {
    let down = prefill.worker.given_up(Instant::now());
    let asked = async {
        let reply = send(prefill, call, &mut span, None).await?;
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
        () = down => Err(Failure::hung(prefill)),
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
        Failure::connection(&UpstreamError {
            worker: address.clone(),
            reason: error.to_string(),
            is_too_large: false,
        })
    })?;
    let said: serde_json::Value = serde_json::from_slice(&said).unwrap_or_default();
    let rank = prefill.run.rank.unwrap_or(0).to_string();
    match said[&rank]["engine_id"].as_str() {
        Some(engine) => Ok((address, engine.to_owned())),
        None => Err(Failure::protocol(prefill, format!("{address}/query names no engine of rank {rank}"))),
    }
}
