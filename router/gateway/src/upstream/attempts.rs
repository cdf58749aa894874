//! Attempts: the workers that are tried next, and the end of the attempts.

use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use axum::http::{HeaderValue, header};
use bytes::Bytes;
use memchr::memmem::Finder;
use router_engines::dialect::Role;
use router_engines::proxy_dispatch::ProxyDispatch;
use router_fleet::{Booking, RankRef, Route, RouteRequest};
use router_openai::{Entries, Entry, Usage};
use router_trace::names;
use serde::Deserialize;

use super::dispatch::{LegReply, ask};
use super::failure::Failure;
use super::scanner::{ENGINE_ABORTED, gave_up};
use super::{EngineRequest, Generation};

/// Unit of the pauses between attempts: 4 units before the second retry, then twice as many each time, up to 64.
const BACKOFF: Duration = Duration::from_millis(5);
/// Largest answer that is not streamed.
const ANSWER_BYTES_MAX: usize = 256 << 20;

/// Failed attempts of a request.
#[derive(Debug, Default)]
pub(crate) struct Attempts {
    failed: u32,
    /// Names of workers that have just failed this request.
    avoid: Vec<String>,
    /// Whether the prefill leg has failed.
    without_prefill: bool,
    /// Deadline for waiting for a worker, shared by all attempts after a failure.
    deadline: Option<Instant>,
}

impl Attempts {
    /// Makes attempts until one succeeds; an error when no further attempt is made.
    pub(crate) async fn run<T, F>(
        &mut self,
        generation: &Arc<Generation>,
        request: &EngineRequest,
        attempt: impl Fn(Route, Booking) -> F,
    ) -> Result<T, Failure>
    where
        F: Future<Output = Result<T, (Route, Failure)>> + Send,
    {
        loop {
            let routed = self.route(generation, request).await?;
            match self.hedged(generation, request, &attempt, routed).await {
                Ok(begun) => {
                    // A later failure gets a new wait for a worker.
                    self.deadline = None;
                    return Ok(begun);
                }
                Err((route, failure)) => self.failed(generation, &route, failure).await?,
            }
        }
    }

    /// Returns the next route. Waits for a worker, since one may be restarting.
    async fn route(
        &self,
        generation: &Generation,
        request: &EngineRequest,
    ) -> Result<(Route, Booking), Failure> {
        let gateway = &generation.gateway;
        let wanted = self.wanted(generation, request, &self.avoid);
        // A proxy can reach only the listed workers; it asks again when others appear.
        let wait =
            if wanted.allowed_workers.is_some() { Duration::ZERO } else { gateway.tuning().worker_wait };
        let deadline = self.deadline.unwrap_or_else(|| Instant::now() + wait);
        let pool = &generation.target.model.pool;
        let routed = gateway.wait_for_route(pool, &wanted, generation.traced.as_deref(), deadline).await;
        let routed = routed.map_err(Failure::without_worker)?;
        generation.last_worker.set(&routed.0.decode.run);
        Ok(routed)
    }

    fn wanted<'a>(
        &self,
        generation: &'a Generation,
        request: &'a EngineRequest,
        avoid: &'a [String],
    ) -> RouteRequest<'a> {
        RouteRequest {
            tokens: &request.tokens,
            salt: generation.salt.as_deref(),
            session: generation.session,
            adapter: generation.target.adapter.as_deref(),
            without_prefill: self.without_prefill || !generation.can_split,
            tokens_are_exact: request.tokens_are_exact,
            avoid,
            allowed_workers: generation.proxy_dispatch.as_ref().and_then(ProxyDispatch::allowed_workers),
        }
    }

    /// Returns a route with another worker than the chosen one, if there is one and the retry budget allows
    /// a second attempt.
    fn beside(
        &self,
        generation: &Generation,
        request: &EngineRequest,
        chosen: &str,
    ) -> Option<(Route, Booking)> {
        let gateway = &generation.gateway;
        let avoid: Vec<String> = self.avoid.iter().cloned().chain([chosen.to_owned()]).collect();
        let is_other = |rank: &RankRef| {
            let run = &rank.run;
            let is_alone = run.role != Role::Prefill && !run.needs_prefill();
            is_alone && rank.is_ready() && !avoid.contains(&run.name)
        };
        // No routing decision is made for an attempt that will not be made.
        let pool = &generation.target.model.pool;
        if !pool.roster().iter().any(is_other) || !gateway.retries.withdraw() {
            return None;
        }
        let wanted = RouteRequest { without_prefill: true, ..self.wanted(generation, request, &avoid) };
        // The router chooses a worker on the avoid list when no other is left; a hedge must not use that
        // worker, nor a hand-off.
        let is_fit = |(route, _): &(Route, Booking)| {
            route.prefill.is_none() && !avoid.contains(&route.decode.run.name)
        };
        let routed = gateway.route(pool, &wanted, generation.traced.as_deref()).filter(is_fit);
        if routed.is_none() {
            gateway.retries.refund();
        }
        routed
    }

    /// Makes an attempt, and a second one on another worker when the first takes longer than `hedge_after`.
    /// The first answer counts; the other attempt is dropped, which aborts it at its engine. A hand-off is
    /// not hedged.
    async fn hedged<T, F>(
        &self,
        generation: &Generation,
        request: &EngineRequest,
        attempt: &impl Fn(Route, Booking) -> F,
        (route, booking): (Route, Booking),
    ) -> Result<T, (Route, Failure)>
    where
        F: Future<Output = Result<T, (Route, Failure)>> + Send,
    {
        let after = generation.gateway.tuning().hedge_after;
        if after.is_zero() || route.prefill.is_some() || generation.proxy_dispatch.is_some() {
            return attempt(route, booking).await;
        }
        let chosen = route.decode.run.name.clone();
        let mut first = Box::pin(attempt(route, booking));
        if let Ok(done) = tokio::time::timeout(after, &mut first).await {
            return done;
        }
        let Some((route, booking)) = self.beside(generation, request, &chosen) else { return first.await };
        generation.gateway.metrics.hedged.inc();
        let mut second = Box::pin(attempt(route, booking));
        let ((route, failure), other) = tokio::select! {
            done = &mut first => match done {
                Err(failed) if failed.1.is_retryable => (failed, second),
                done => return done,
            },
            done = &mut second => match done {
                Err(failed) if failed.1.is_retryable => (failed, first),
                done => return done,
            },
        };
        failure.record_on_breaker(&route);
        other.await
    }

    /// Records a failure; an error when no further attempt is made.
    pub(super) async fn failed(
        &mut self,
        generation: &Generation,
        route: &Route,
        failure: Failure,
    ) -> Result<(), Failure> {
        let gateway = &generation.gateway;
        self.failed += 1;
        self.deadline.get_or_insert_with(|| Instant::now() + gateway.tuning().worker_wait);
        failure.record_on_breaker(route);
        let at_fault = failure.at_fault(route);
        // A proxy sends a request once; a failure before that, as of a prefill leg, may be retried.
        let is_last = generation.proxy_dispatch.as_ref().is_some_and(ProxyDispatch::is_used);
        if is_last
            || !failure.is_retryable
            || self.failed > gateway.tuning().retries
            || !gateway.retries.withdraw()
        {
            return Err(failure);
        }
        tracing::warn!(
            request = generation.request_id,
            worker = at_fault.run.name,
            reason = failure.reason,
            "the request is retried on another worker"
        );
        gateway.metrics.migrations.inc();
        if let Some(traced) = &generation.traced {
            traced.event(names::event::RETRY);
        }
        self.avoid.push(at_fault.run.name.clone());
        self.without_prefill |= failure.blames_prefill;
        // The first retry starts immediately, later ones after pauses that double.
        if self.failed > 1 {
            tokio::time::sleep(BACKOFF * (1 << self.failed.min(6))).await;
        }
        Ok(())
    }
}

/// An answer that is not streamed.
pub(crate) struct BufferedReply {
    pub(crate) body: Bytes,
    pub(crate) content_type: HeaderValue,
    pub(crate) usage: Option<Usage>,
    pub(crate) route: Route,
}

/// Makes an attempt at an answer that is not streamed. The answer is read completely, so that an
/// interrupted one can be retried.
pub(crate) async fn attempt_buffered(
    generation: Arc<Generation>,
    request: Arc<EngineRequest>,
    route: Route,
    booking: Booking,
) -> Result<BufferedReply, (Route, Failure)> {
    let answered = match ask(&generation, &request.body, &route).await {
        Ok(asked) => {
            let is_elsewhere = asked.is_served_elsewhere();
            let read = read_buffered_reply(&generation, asked, booking, &route).await;
            read.map_err(|failure| failure.unattributed_if(is_elsewhere))
        }
        Err(failure) => Err(failure),
    };
    match answered {
        Ok((body, content_type, usage)) => {
            // With hedging this may be the second worker that was tried.
            generation.last_worker.set(&route.decode.run);
            Ok(BufferedReply { body, content_type, usage, route })
        }
        Err(failure) => Err((route, failure)),
    }
}

/// Makes an attempt at an answer that a proxy does not show: its head tells the status, and its end that it
/// is over.
pub(crate) async fn attempt_headers_only(
    generation: Arc<Generation>,
    request: Arc<EngineRequest>,
    route: Route,
    mut booking: Booking,
) -> Result<(), (Route, Failure)> {
    let asked = match ask(&generation, &request.body, &route).await {
        Ok(asked) => asked,
        Err(failure) => return Err((route, failure)),
    };
    asked.compare_cached_tokens(&mut booking);
    booking.prompt_done();
    booking.decode_succeeded();
    let LegReply { reply, prefill: _prefill, mut span, .. } = asked;
    // The proxy does not tell how the body ended.
    let _whole = reply.into_body().whole(ANSWER_BYTES_MAX).await;
    if let Some(span) = &mut span {
        span.succeeded();
    }
    Ok(())
}

static USAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"usage\""));

/// Returns the usage in an answer. Parsing the answer is left to the client: it must only look like JSON
/// here.
fn usage_of(answer: &[u8]) -> Result<Option<Usage>, String> {
    let text = std::str::from_utf8(answer).map_err(|error| error.to_string())?.trim_ascii();
    // SGLang ranks in a list.
    let looks_like = |open: char, close: char| text.starts_with(open) && text.ends_with(close);
    if !looks_like('{', '}') && !looks_like('[', ']') {
        return Err("neither an object nor a list of JSON".to_owned());
    }
    // Inside JSON strings the quotes would be escaped, so a search of the bytes cannot be misled by what a
    // model writes.
    let mut found = USAGE.find_iter(answer);
    let usage = match (found.next(), found.next()) {
        (Some(at), None) => text
            .get(at + b"\"usage\"".len()..)
            .map(|rest| rest.trim_start_matches([':', ' ', '\n', '\r', '\t'])),
        (None, _) => None,
        // Parts of the answer have a usage each: the top-level one counts.
        _ => {
            let is_usage = |entry: &Entry<'_>| entry.name.as_deref() == Some("usage");
            Entries::of(text).filter(is_usage).last().map(|entry| entry.value)
        }
    };
    // A usage of another form is ignored. The text after the usage is not read.
    let usage = usage.map(|text| Usage::deserialize(&mut serde_json::Deserializer::from_str(text)));
    Ok(usage.and_then(Result::ok))
}

fn is_json(content_type: &HeaderValue) -> bool {
    content_type.as_bytes().starts_with(b"application/json")
}

async fn read_buffered_reply(
    generation: &Generation,
    asked: LegReply,
    mut booking: Booking,
    route: &Route,
) -> Result<(Bytes, HeaderValue, Option<Usage>), Failure> {
    asked.compare_cached_tokens(&mut booking);
    let LegReply { sent, reply, prefill_usage, prefill: _prefill, mut span, .. } = asked;
    let (head, body) = reply.into_parts();
    let down = route.decode.worker.given_up(sent);
    let limit = generation.gateway.tuning().answer_within;
    let body = tokio::select! {
        body = tokio::time::timeout_at((sent + limit).into(), body.whole(ANSWER_BYTES_MAX)) => match body {
            Ok(Err(error)) if error.is_too_large => return Err(Failure::too_large(&route.decode, ANSWER_BYTES_MAX)),
            Ok(body) => body.map_err(|error| Failure::connection(&error))?,
            Err(_) => {
                let late = Failure::late(&route.decode, limit, sent);
                return Err(late.behind_proxy(generation.proxy_dispatch.is_some()));
            }
        },
        () = down => return Err(Failure::hung(&route.decode)),
    };
    let bad = |reason: String| Failure::protocol(&route.decode, reason);
    if gave_up(&body) {
        return Err(bad(ENGINE_ABORTED.to_owned()));
    }
    let content_type = head.headers.get(header::CONTENT_TYPE).cloned();
    // Audio and plain text carry no usage.
    let usage = match generation.surface.is_audio() && !content_type.as_ref().is_some_and(is_json) {
        true => None,
        false => usage_of(&body).map_err(|error| bad(format!("its answer: {error}")))?,
    };
    if let Some(usage) = &usage {
        if let Some(prefill_usage) = &prefill_usage {
            prefill_usage.check(usage).map_err(bad)?;
        }
        if let Some(cached) = usage.cached {
            booking.cached_tokens(cached);
        }
    }
    booking.first_token();
    booking.decode_succeeded();
    if let Some(span) = &mut span {
        span.succeeded();
    }
    Ok((body, content_type.unwrap_or(HeaderValue::from_static("application/json")), usage))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usage_of_an_answer_is_found_without_parsing_it() {
        let counts = "{\"prompt_tokens\": 9, \"completion_tokens\": 2}";
        let nested = "\"choices\": [{\"usage\": {\"prompt_tokens\": 1}}]";
        for answer in [
            format!("{{\"id\":\"x\",\"usage\":{counts}}}"),
            format!(" {{\"usage\" : {counts}, \"choices\":[{{\"text\":\"\\\"usage\\\": {{}}\"}}]}}\n"),
            format!("{{{nested}, \"usage\": {counts}}}"),
            format!("{{\"usage\": {counts}, {nested}}}"),
        ] {
            let usage = usage_of(answer.as_bytes()).expect("an object").expect("a usage");
            assert_eq!((usage.prompt, usage.completion), (9, 2), "{answer}");
        }
        for without in ["{}", "{\"usage\": null}", "{\"usage\": 5}", "{\"text\": \"usage\"}"] {
            assert_eq!(usage_of(without.as_bytes()), Ok(None), "{without}");
        }
        for broken in ["", "<html></html>", "{\"choices\": [", "null"] {
            assert!(usage_of(broken.as_bytes()).is_err(), "{broken}");
        }
        assert_eq!(usage_of(b"[{\"score\": 1.5, \"index\": 0}]"), Ok(None));
        assert!(usage_of(b"{\"a\":\"\xff\"}").is_err());
    }
}
