//! Requests that engines answer themselves: the client's own bytes go to the worker that the router chose, and the
//! engine's bytes come back.
//!
//! The gateway adds the choice of workers, the two legs of a hand-off, and what happens when a worker fails: before the
//! first byte has gone to the client the request starts over elsewhere; in the middle of a stream it is continued there
//! (`resume`), or the client is told why not. Templates, tools, guided decoding and whatever an engine learns next are the
//! engine's; fields that nobody here knows pass through.
//!
//! Reading order: `legs` (asking workers), `events` (what comes), `stream` (passing it on), `resume` (going on elsewhere).
//! Everything runs in the task of the client's connection, so a client that goes away drops it all, connections to
//! engines included.

mod events;
mod legs;
mod resume;
mod stream;

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Instant;

use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::Response;
use router_engines::body::RawBody;
use router_engines::dialect::Role;
use router_engines::openai::ApiError;
use router_fleet::{Booking, RankRef, Route, RouteRequest};
use router_trace::names;

pub(crate) use self::events::{Usage, data_of, events};
pub(crate) use self::legs::is_busy;
use self::legs::{Asked, Failure, ask};
use self::stream::RelayStream;
use crate::models::Target;
use crate::service::Gateway;
use crate::stay::Stay;
use crate::traced::Tracing;

/// Largest answer that is not streamed.
const ANSWER_BYTES_MAX: usize = 256 << 20;

/// What kind of answer is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Surface {
    Chat,
    Completion,
    /// Anything that is not generated token by token: embeddings, scores.
    Other,
}

/// A request on its way to an engine.
#[derive(Debug)]
pub(crate) struct RelayRequest {
    pub(crate) path: &'static str,
    pub(crate) surface: Surface,
    /// Without the fields that belong to the gateway.
    pub(crate) body: RawBody,
    /// What the prompt looks like to the index; possibly empty.
    pub(crate) tokens: Vec<u32>,
    /// Tokens of the prompt, when they are the engine's own.
    pub(crate) prompt_tokens: Option<usize>,
    /// For logs.
    pub(crate) request_id: String,
    /// Engines' name for it.
    pub(crate) engine_id: String,
    /// The client is told which workers it met.
    pub(crate) explains: bool,
    /// For the engine.
    pub(crate) headers: HeaderMap,
    pub(crate) session: Option<u64>,
    pub(crate) salt: Option<String>,
    pub(crate) target: Target,
    pub(crate) stream: bool,
    /// It has one prompt and one choice, so a prefill worker may compute it.
    pub(crate) can_split: bool,
    /// The usage at the end of the stream is the gateway's wish, not the client's.
    pub(crate) hides_usage: bool,
    pub(crate) started: Instant,
    pub(crate) traced: Tracing,
    /// Attempts so far, hedges included.
    pub(crate) attempts: AtomicU32,
}

impl RelayRequest {
    #[cfg(test)]
    pub(crate) fn empty() -> Self {
        Self {
            target: Target::for_tests(),
            path: "/",
            surface: Surface::Chat,
            body: RawBody::parse(bytes::Bytes::from_static(b"{}")).expect("an object"),
            tokens: Vec::new(),
            prompt_tokens: None,
            request_id: String::new(),
            engine_id: String::new(),
            explains: true,
            headers: HeaderMap::new(),
            session: None,
            salt: None,
            stream: false,
            can_split: false,
            hides_usage: false,
            started: Instant::now(),
            traced: None,
            attempts: AtomicU32::new(0),
        }
    }
}

/// What a request has been through.
#[derive(Debug, Default)]
pub(crate) struct Attempts {
    made: u32,
    /// Workers that have just failed it.
    avoid: Vec<String>,
    /// The prefill leg has failed.
    without_prefill: bool,
    /// After a failure all further attempts together wait no longer for a worker than one would.
    deadline: Option<Instant>,
}

impl Attempts {
    /// The next pair of workers.
    pub(crate) async fn route(
        &self,
        gateway: &Gateway,
        request: &RelayRequest,
    ) -> Result<(Route, Booking), ApiError> {
        let wanted = self.wanted(request, &self.avoid);
        let deadline = self.deadline.unwrap_or_else(|| Instant::now() + gateway.tuning().worker_wait);
        let pool = &request.target.model.pool;
        gateway.wait_for_route(pool, &wanted, request.traced.as_deref(), deadline).await
    }

    /// Another worker than the chosen one, if there is one and the budget allows a second attempt.
    fn beside(&self, gateway: &Gateway, request: &RelayRequest, chosen: &str) -> Option<(Route, Booking)> {
        let avoid: Vec<String> = self.avoid.iter().cloned().chain([chosen.to_owned()]).collect();
        let is_other = |rank: &RankRef| {
            let run = &rank.run;
            let is_alone = run.role != Role::Prefill && !run.needs_prefill();
            is_alone && rank.is_ready() && !avoid.contains(&run.name)
        };
        // Nothing is decided for an attempt that will not be made.
        let pool = &request.target.model.pool;
        if !pool.roster().iter().any(is_other) || !gateway.retries.spend() {
            return None;
        }
        let wanted = self.wanted(request, &avoid);
        let wanted = RouteRequest { without_prefill: true, ..wanted };
        let routed = gateway.route(pool, &wanted, request.traced.as_deref())?;
        // Those to be avoided come in again when there is nobody else. A second attempt is no hand-off.
        let is_fit = routed.0.prefill.is_none() && !avoid.contains(&routed.0.decode.run.name);
        is_fit.then_some(routed)
    }

    fn wanted<'a>(&self, request: &'a RelayRequest, avoid: &'a [String]) -> RouteRequest<'a> {
        RouteRequest {
            tokens: &request.tokens,
            salt: request.salt.as_deref(),
            session: request.session,
            adapter: request.target.adapter.as_deref(),
            without_prefill: self.without_prefill || !request.can_split,
            audited: request.prompt_tokens.is_some(),
            avoid,
        }
    }

    /// An answer is coming: the next failure is a new one.
    pub(crate) fn goes_well(&mut self) {
        self.deadline = None;
    }

    /// Notes a failure; an error when there is no further attempt.
    pub(crate) async fn failed(
        &mut self,
        gateway: &Gateway,
        request: &RelayRequest,
        route: &Route,
        failure: Failure,
    ) -> Result<(), Failure> {
        self.made += 1;
        self.deadline.get_or_insert_with(|| Instant::now() + gateway.tuning().worker_wait);
        blame(route, &failure);
        let at_fault = failure.at_fault(route);
        if !failure.is_retryable || self.made > gateway.tuning().retries || !gateway.retries.spend() {
            return Err(failure);
        }
        tracing::warn!(
            request = request.request_id,
            worker = at_fault.run.name,
            reason = failure.reason,
            "going on elsewhere"
        );
        gateway.metrics.migrations.inc();
        if let Some(traced) = &request.traced {
            traced.event(names::event::RETRY);
        }
        self.avoid.push(at_fault.run.name.clone());
        self.without_prefill |= failure.blames_prefill;
        // The next worker is not at fault; only a request that keeps failing waits, a little longer each time.
        if self.made > 1 {
            tokio::time::sleep(legs::BACKOFF * (1 << self.made.min(6))).await;
        }
        Ok(())
    }
}

/// Serves a request from its first attempt to the head of its answer.
pub(crate) async fn relay(
    gateway: &Arc<Gateway>,
    request: RelayRequest,
    mut stay: Box<Stay>,
) -> Result<Response, (Box<Stay>, ApiError)> {
    let request = Arc::new(request);
    let mut attempts = Attempts::default();
    gateway.retries.earn(gateway.requests_inside());
    loop {
        let routed = match attempts.route(gateway, &request).await {
            Ok(routed) => routed,
            Err(error) => return Err((stay, error)),
        };
        stay.served_by(&routed.0.decode.run.name);
        stay.sent();
        let (route, failure) = match hedged(gateway, &request, &attempts, routed).await {
            Ok((begun, route)) => {
                stay.served_by(&route.decode.run.name);
                return Ok(match begun {
                    Begun::Stream(stream) => stream.into_response(attempts, stay, &route),
                    Begun::Whole(whole) => whole.into_response(gateway, &request, &mut stay, &route),
                });
            }
            Err(failed) => failed,
        };
        if let Err(failure) = attempts.failed(gateway, &request, &route, failure).await {
            return match failure.into_response(&request) {
                Ok(response) => {
                    stay.answered(response.status(), Some("refused_by_engine"));
                    Ok(response)
                }
                Err(error) => Err((stay, error)),
            };
        }
    }
}

/// An answer that is there, or has begun to come.
enum Begun {
    Stream(Box<RelayStream>),
    Whole(Whole),
}

/// An attempt with the workers that made it.
type Attempted = Result<(Begun, Route), (Route, Failure)>;

async fn attempt(
    gateway: &Arc<Gateway>,
    request: &Arc<RelayRequest>,
    (route, mut booking): (Route, Booking),
) -> Attempted {
    let asked = ask(gateway, request, &request.body, &route).await;
    if let Ok(asked) = &asked {
        asked.audit(&mut booking);
    }
    let begun = match asked {
        Ok(asked) if request.stream => {
            let stream = RelayStream::begin(gateway, request, asked, booking, &route).await;
            stream.map(|stream| Begun::Stream(Box::new(stream)))
        }
        Ok(asked) => whole(gateway, asked, booking, &route).await.map(Begun::Whole),
        Err(failure) => Err(failure),
    };
    match begun {
        Ok(begun) => Ok((begun, route)),
        Err(failure) => Err((route, failure)),
    }
}

/// An attempt, and a second one on another worker beside it when the first takes longer than the operator wants to
/// wait. Whichever answers first counts; the other is dropped, and so given up by its engine. A hand-off is not doubled.
async fn hedged(
    gateway: &Arc<Gateway>,
    request: &Arc<RelayRequest>,
    attempts: &Attempts,
    routed: (Route, Booking),
) -> Attempted {
    let after = gateway.tuning().hedge_after;
    if after.is_zero() || routed.0.prefill.is_some() {
        return attempt(gateway, request, routed).await;
    }
    let chosen = routed.0.decode.run.name.clone();
    let mut first = Box::pin(attempt(gateway, request, routed));
    if let Ok(done) = tokio::time::timeout(after, &mut first).await {
        return done;
    }
    let Some(beside) = attempts.beside(gateway, request, &chosen) else { return first.await };
    gateway.metrics.hedged.inc();
    let mut second = Box::pin(attempt(gateway, request, beside));
    let (failed, other) = tokio::select! {
        done = &mut first => match done {
            Err(failed) if failed.1.is_retryable => (failed, second),
            done => return done,
        },
        done = &mut second => match done {
            Err(failed) if failed.1.is_retryable => (failed, first),
            done => return done,
        },
    };
    blame(&failed.0, &failed.1);
    other.await
}

/// A failure speaks against the worker that made it.
fn blame(route: &Route, failure: &Failure) {
    let at_fault = failure.at_fault(route);
    if !failure.is_workers {
        return;
    }
    if at_fault.worker.breaker.failed(Instant::now()) {
        tracing::warn!(worker = at_fault.run.name, "too many failures in a row: out for a while");
    }
    if failure.is_connection {
        at_fault.worker.suspect();
    }
}

/// An answer that is not streamed.
struct Whole {
    body: bytes::Bytes,
    content_type: HeaderValue,
    usage: Option<Usage>,
}

impl Whole {
    fn into_response(
        self,
        gateway: &Gateway,
        request: &RelayRequest,
        stay: &mut Stay,
        route: &Route,
    ) -> Response {
        if let Some(usage) = self.usage {
            gateway.account(&usage);
            stay.used(&usage);
        }
        gateway.metrics.time_to_first_token.observe(request.started.elapsed());
        let mut response = Response::new(Body::from(self.body));
        response.headers_mut().insert(header::CONTENT_TYPE, self.content_type);
        explain(&mut response, request.explains, route);
        stay.tell_rates(&mut response);
        stay.answered(StatusCode::OK, None);
        response
    }
}

/// An answer that is not streamed is taken whole, so that one that breaks off can be asked for again.
async fn whole(
    gateway: &Gateway,
    asked: Asked,
    mut booking: Booking,
    route: &Route,
) -> Result<Whole, Failure> {
    let Asked { reply, promised, prefill: _prefill, mut span, .. } = asked;
    let (head, body) = reply.into_parts();
    let sent = Instant::now();
    let down = route.decode.worker.given_up(sent);
    let limit = gateway.tuning().answer_within;
    let body = tokio::select! {
        body = tokio::time::timeout(limit, body.whole(ANSWER_BYTES_MAX)) => match body {
            Ok(body) => body.map_err(|error| Failure::connection(&error))?,
            Err(_) => return Err(Failure::late(&route.decode, limit, sent)),
        },
        () = down => return Err(Failure::hung(route)),
    };
    let answer = RawBody::parse(body.clone());
    let answer =
        answer.map_err(|error| Failure::protocol(route, format!("its answer: {}", error.message)))?;
    let usage = answer.get("usage").and_then(|text| serde_json::from_str::<Usage>(text).ok());
    if let Some(usage) = usage {
        if let Some(promised) = &promised {
            promised.check(&usage).map_err(|reason| Failure::protocol(route, reason))?;
        }
        if let Some(cached) = usage.cached_tokens() {
            booking.cached_tokens(cached);
        }
    }
    booking.first_token();
    route.decode.worker.breaker.succeeded();
    if let Some(span) = &mut span {
        span.succeeded();
    }
    let content_type = head.headers.get(header::CONTENT_TYPE).cloned();
    let content_type = content_type.unwrap_or(HeaderValue::from_static("application/json"));
    Ok(Whole { body, content_type, usage })
}

fn explain(response: &mut Response, explains: bool, route: &Route) {
    if !explains {
        return;
    }
    if let Ok(value) = HeaderValue::from_str(&route.explain()) {
        response.headers_mut().insert("x-kvasir-route", value);
    }
}
