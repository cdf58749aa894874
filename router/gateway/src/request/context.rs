//! One request inside the gateway: its client, its place at the gate, its charge, and the records written
//! when it is over.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::response::Response;
use router_access::{
    AdmissionRequest, AuditRecord, Charge, Entry, Estimate, Gate, Grant, PASSED_HEADERS, Permit, RateState,
    WaitOutcome, admit, is_plain_request_id, retry_after_seconds,
};
use router_openai::{ApiError, Kind, Surface, Usage};
use router_tls::PeerAddr;
use router_trace::{KeyValue, Status, names};

use crate::access::limited;
use crate::answer::deadline::DEADLINE_EXCEEDED;
use crate::caller::{Caller, peer_of};
use crate::memory::Footprint;
use crate::models::Target;
use crate::service::{Gateway, fresh_id};
use crate::traced::{self, Traced, Tracing};
use crate::upstream::{Generation, LastWorker};
use router_engines::proxy_dispatch::ProxyDispatch;

/// Tokens that are assumed for an answer without a limit, until its length is known.
const ANSWER_TOKENS_ASSUMED: u64 = 256;
/// Request header: the client's timeout in milliseconds.
static TIMEOUT: HeaderName = HeaderName::from_static("x-request-timeout-ms");
static SESSION: HeaderName = HeaderName::from_static("x-session-id");
/// The client's name for a request.
pub(super) static REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Fields of a request's audit record.
#[derive(Debug, Default)]
struct AuditFields {
    model: Option<String>,
    client: Option<IpAddr>,
    status: u16,
    reason: Option<&'static str>,
    usage: Usage,
    queued: Duration,
    first_token: Option<Duration>,
    arrived_unix_ns: u64,
}

/// A request inside the gateway. Dropping it returns all that it holds and records how it ended.
pub(crate) struct RequestContext {
    pub(crate) gateway: Arc<Gateway>,
    pub(crate) surface: Surface,
    /// The client's id of the request: for logs, traces and the answer.
    pub(crate) request_id: String,
    /// The request id that engines see, always made here: engines refuse an id that is in use and abort
    /// requests by id, so an id that a client chose could disturb other requests.
    pub(crate) engine_id: String,
    pub(crate) session: Option<u64>,
    /// Time for which the client asks to retain the blocks of its prompt.
    pub(crate) retain_for: Duration,
    /// Time at which the request must be over.
    pub(crate) deadline: Option<Instant>,
    pub(crate) traced: Tracing,
    /// Headers of the client that are passed on to engines.
    headers: HeaderMap,
    pub(crate) grant: Arc<Grant>,
    /// Set if a proxy sends the request to its worker.
    pub(crate) proxy_dispatch: Option<ProxyDispatch>,
    /// The memory charged to the request while it is inside.
    pub(crate) footprint: Footprint,
    /// Set once the request is sent to an engine, which computes from then on.
    last_worker: LastWorker,
    permit: Option<Permit>,
    charge: Option<Charge>,
    /// Tokens of the prompt, as the gateway counted them.
    prompt_tokens: u64,
    /// Events of the answer that were sent to the client; about as many as tokens.
    pieces: u64,
    /// Whether the usage is final: reported by the engine, or estimated where the engine reports none.
    is_usage_final: bool,
    /// Requests that were already inside when this one arrived.
    inside_before: usize,
    rates: RateState,
    started: Instant,
    record: AuditFields,
}

/// Returns the longest time of a request: the client's limit, but at most the operator's.
fn request_timeout(headers: &HeaderMap, most: Duration) -> Result<Option<Duration>, ApiError> {
    /// Longer limits count as none, so that adding one to a time cannot overflow.
    const MOST_MS: u64 = 7 * 24 * 3600 * 1000;
    let most = (!most.is_zero()).then_some(most);
    let Some(given) = headers.get(&TIMEOUT) else { return Ok(most) };
    let millis = given.to_str().ok().and_then(|text| text.trim().parse::<u64>().ok()).filter(|ms| *ms > 0);
    let Some(millis) = millis else {
        let message = format!("The header `{TIMEOUT}` is a number of milliseconds.");
        return Err(ApiError::invalid(TIMEOUT.as_str(), message));
    };
    let wanted = (millis <= MOST_MS).then(|| Duration::from_millis(millis));
    Ok(wanted.into_iter().chain(most).min())
}

/// Returns the client's own id, if it is plain enough for logs and headers.
pub(super) fn own_id(headers: &HeaderMap) -> Option<&str> {
    let given = headers.get(&REQUEST_ID).and_then(|id| id.to_str().ok());
    given.filter(|id| is_plain_request_id(id))
}

/// Returns the conversation that a request belongs to, from the session header of vLLM's clients.
fn session_of(headers: &HeaderMap) -> Option<u64> {
    let name = headers.get(&SESSION)?.as_bytes();
    let letters: Vec<u32> = name.iter().map(|&letter| u32::from(letter)).collect();
    Some(kvstore_block::block_hash(&letters))
}

impl RequestContext {
    /// Counts a request as inside.
    pub(crate) fn new(gateway: &Arc<Gateway>, surface: Surface, request: &Request) -> Box<Self> {
        let inside_before = gateway.inside.fetch_add(1, Ordering::Relaxed);
        gateway.metrics.active.inc();
        let headers = request.headers();
        let passed =
            PASSED_HEADERS.iter().filter_map(|name| Some((name.clone(), headers.get(name)?.clone())));
        let engine_id = fresh_id();
        let request_id = own_id(headers).map_or_else(|| engine_id.clone(), str::to_owned);
        if request_id != engine_id {
            tracing::debug!(request = request_id, engine_id, "the client has given its own request id");
        }
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        Box::new(Self {
            gateway: Arc::clone(gateway),
            surface,
            request_id,
            engine_id,
            session: session_of(headers),
            retain_for: Duration::ZERO,
            deadline: None,
            traced: None,
            headers: passed.collect(),
            grant: Arc::clone(&gateway.access.nobody),
            proxy_dispatch: request.extensions().get::<ProxyDispatch>().cloned(),
            footprint: Footprint::default(),
            last_worker: LastWorker::default(),
            permit: None,
            charge: None,
            prompt_tokens: 0,
            pieces: 0,
            is_usage_final: false,
            inside_before,
            rates: RateState::of(None, None, 0),
            started: Instant::now(),
            record: AuditFields {
                client: peer_of(request).map(|peer| peer.addr.ip()),
                arrived_unix_ns: now.as_nanos() as u64,
                ..AuditFields::default()
            },
        })
    }

    /// Begins the request's time and its trace.
    pub(super) fn begin(&mut self, headers: &HeaderMap) -> Result<(), ApiError> {
        let time = request_timeout(headers, self.gateway.tuning().request_time_max)?;
        self.deadline = time.map(|time| self.started + time);
        if let Some(tracer) = &self.gateway.tracer {
            self.traced = traced::begin(tracer, headers, &mut self.headers, self.started);
        }
        Ok(())
    }

    /// Identifies the client and charges the request to it; refuses when too many requests are inside.
    pub(super) fn identify(
        &mut self,
        headers: &HeaderMap,
        peer: Option<&PeerAddr>,
        acts_for: Option<Arc<Grant>>,
    ) -> Result<(), ApiError> {
        // Bounds the requests inside, waiting ones included: each holds its body in memory.
        if self.inside_before >= self.gateway.models.inside_max {
            return Err(ApiError::unavailable("Too many requests are being served."));
        }
        self.grant = match acts_for {
            Some(grant) => grant,
            None => self.gateway.access.identify(&Caller::at_api(headers, peer))?,
        };
        // The request counts from here on, also among those of its key: a body that never comes holds both
        // places.
        self.charge_request()
    }

    fn charge_request(&mut self) -> Result<(), ApiError> {
        let access = &self.gateway.access;
        let [own, tenant] = access.limiters(&self.grant)?;
        let now = access.now();
        let charged = admit(own.as_ref(), tenant.as_ref(), 0, now);
        self.rates = RateState::of(own.as_ref(), tenant.as_ref(), now);
        match charged {
            Ok(charge) => {
                self.charge = Some(charge);
                Ok(())
            }
            Err(refusal) => {
                let after = refusal.retry_after.map(retry_after_seconds);
                Err(limited(&refusal).retry_after(after))
            }
        }
    }

    /// Checks that the client may ask for the model that a request names; called before the request waits
    /// for anything.
    pub(crate) fn allow(&mut self, asked: Option<&str>) -> Result<(), ApiError> {
        let Some(model) = asked else { return Ok(()) };
        self.record.model = Some(model.to_owned());
        if self.grant.models.allows(model) {
            return Ok(());
        }
        let message = format!("Your key does not allow the model `{model}`.");
        Err(ApiError::new(StatusCode::FORBIDDEN, message, "model_not_allowed"))
    }

    /// Does the same for a request that names no model, once its target is known.
    pub(crate) fn allow_target(&mut self, asked: Option<&str>, target: &Target) -> Result<(), ApiError> {
        match asked {
            Some(_) => Ok(()),
            None => self.allow(Some(&target.model.pool.model())),
        }
    }

    /// Charges limits and waits for a place at the gate, when the size of the request is known.
    pub(crate) async fn admit(
        &mut self,
        gate: &Arc<Gate>,
        prompt_tokens: usize,
        answer_max: Option<usize>,
        choices: usize,
    ) -> Result<(), ApiError> {
        let access = &self.gateway.access;
        let tokens = Estimate::PromptAndAnswer.tokens(
            prompt_tokens as u64,
            answer_max.map(|most| most as u64),
            ANSWER_TOKENS_ASSUMED,
            choices as u64,
        );
        let [own, tenant] = access.limiters(&self.grant)?;
        let now = access.now();
        self.prompt_tokens = prompt_tokens as u64;
        let rates = RateState::of(own.as_ref(), tenant.as_ref(), now);
        if let Some(left) = rates.tokens.filter(|left| left.remaining < tokens.min(left.limit)) {
            let message = "This is more than the limit of tokens per minute allows.";
            let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, message, "rate_limit_exceeded");
            return Err(error.retry_after(Some(retry_after_seconds(left.reset))));
        }
        if let Some(charge) = &mut self.charge {
            charge.reconcile(tokens, now);
        }
        self.rates = RateState::of(own.as_ref(), tenant.as_ref(), now);
        let ask = AdmissionRequest {
            tenant: &self.grant.tenant,
            priority: self.grant.priority,
            weight: self.grant.weight,
            cost: tokens,
            deadline: now.saturating_add(self.gateway.config.access.wait_max.as_nanos() as u64),
        };
        let entry = gate.enter(&ask, now);
        let outcome = match entry {
            Entry::Admitted(permit) => WaitOutcome::Admitted(permit),
            Entry::Waiting(wait) => {
                let waited = tokio::time::timeout(self.gateway.config.access.wait_max, wait).await;
                waited.unwrap_or(WaitOutcome::Expired)
            }
            Entry::Full(refusal) => {
                self.gateway.metrics.shed.inc();
                let seconds = retry_after_seconds(refusal.retry_after);
                let message = "Too many requests are waiting; try again later.";
                return Err(ApiError::unavailable(message).retry_after(Some(seconds)));
            }
        };
        self.record.queued = Duration::from_nanos(access.now().saturating_sub(now));
        if let Some(traced) = &self.traced {
            traced.lasted(names::span::QUEUE, self.record.queued, Vec::new());
        }
        match outcome {
            WaitOutcome::Admitted(permit) => {
                self.permit = Some(permit);
                Ok(())
            }
            WaitOutcome::Expired => {
                self.gateway.metrics.shed.inc();
                Err(ApiError::unavailable("No place became free in time."))
            }
        }
    }

    /// Whether a proxy sends the request and does not show the body of the answer.
    pub(crate) fn is_headers_only(&self) -> bool {
        self.proxy_dispatch.as_ref().is_some_and(|proxy_dispatch| !proxy_dispatch.shows_answers())
    }

    /// Creates a generation for this request, with the parts that all generations have.
    pub(crate) fn generation(&self, target: Target, path: &'static str) -> Generation {
        Generation {
            gateway: Arc::clone(&self.gateway),
            target,
            surface: self.surface,
            path,
            request_id: self.request_id.clone(),
            engine_id: self.engine_id.clone(),
            explains: self.gateway.access.explains(&self.grant),
            headers: self.headers.clone(),
            session: self.session,
            salt: None,
            retain_for: self.retain_for.min(self.gateway.tuning().prompt_cache_retention_max),
            can_split: false,
            traced: self.traced.clone(),
            proxy_dispatch: self.proxy_dispatch.clone(),
            last_worker: self.last_worker.clone(),
            attempts: AtomicU32::new(0),
        }
    }

    /// Releases the place at the gate: the engines have finished with this request.
    pub(crate) fn leave_gate(&mut self) {
        let Some(permit) = self.permit.take() else { return };
        // The gate learns its rate only from requests that were served.
        match self.is_usage_final && self.is_served() {
            true => permit.release(self.gateway.access.now()),
            false => drop(permit),
        }
    }

    fn is_good(&self) -> bool {
        (200..300).contains(&self.record.status)
    }

    fn is_served(&self) -> bool {
        self.is_good() && (self.is_usage_final || self.pieces > 0)
    }

    /// Records the token usage that an engine reported.
    pub(crate) fn record_usage(&mut self, usage: &Usage) {
        self.record.usage = *usage;
        self.is_usage_final = true;
        let now = self.gateway.access.now();
        if let Some(charge) = &mut self.charge {
            charge.reconcile(usage.prompt.saturating_add(usage.completion) as u64, now);
        }
    }

    /// Records the estimated prompt as usage, for an engine that reports none.
    pub(crate) fn record_estimate(&mut self) {
        self.record_usage(&Usage { prompt: self.prompt_tokens as usize, ..Usage::default() });
    }

    /// Records an answer that a proxy does not show: its usage is unknown, so the reserved tokens stay
    /// charged.
    pub(crate) fn record_headers_only(&mut self) {
        self.record.usage = Usage { prompt: self.prompt_tokens as usize, ..Usage::default() };
        self.is_usage_final = true;
    }

    /// Changes the memory charged to the request; returns whether so much is available.
    pub(crate) fn resize_memory_charge(&self, bytes: usize) -> bool {
        self.footprint.resize(bytes)
    }

    /// Counts events, or tokens, that were sent to the client.
    pub(crate) fn count_events(&mut self, pieces: usize) {
        self.pieces += pieces as u64;
    }

    /// Records the time of the first token; further calls do nothing.
    pub(crate) fn first_token(&mut self) {
        if self.record.first_token.is_none() {
            let took = self.started.elapsed();
            self.record.first_token = Some(took);
            self.gateway.metrics.time_to_first_token.observe(took);
            if let Some(traced) = &self.traced {
                traced.event(names::event::FIRST_TOKEN);
            }
        }
    }

    /// Records the status and reason of the answer.
    pub(crate) fn answered(&mut self, status: StatusCode, reason: Option<&'static str>) {
        self.record.status = status.as_u16();
        self.record.reason = reason;
    }

    /// Records that the answer is an error.
    pub(crate) fn refused(&mut self, error: &ApiError) {
        // A request that ran out of time is accounted as abandoned, since it was computed for its client.
        if error.code != Some(DEADLINE_EXCEEDED) {
            self.answered(error.status, error.code);
        }
    }

    /// Notes that the answer broke off.
    pub(crate) fn record_broken_stream(&mut self) {
        self.gateway.metrics.broken_streams.inc();
        self.answered(StatusCode::OK, Some("broken_stream"));
    }

    /// Adds the headers that say how much of the client's limits is left.
    pub(crate) fn add_rate_limit_headers(&self, response: &mut Response) {
        for (name, value) in self.rates.headers() {
            if let Ok(value) = HeaderValue::from_str(&value) {
                response.headers_mut().insert(HeaderName::from_static(name), value);
            }
        }
    }

    fn finish_trace(&self, traced: &Traced) {
        let record = &self.record;
        let operation = match self.surface.kind() {
            Some(Kind::Completion) => names::operation::TEXT_COMPLETION,
            Some(Kind::Chat) => names::operation::CHAT,
            None if self.surface == Surface::Embeddings => names::operation::EMBEDDINGS,
            None => self.surface.name(),
        };
        let model = record.model.as_deref().unwrap_or_default();
        let tokens = |count: usize| count as i64;
        let mut attributes = vec![
            KeyValue::new(names::GEN_AI_OPERATION_NAME, operation),
            KeyValue::new(names::GEN_AI_REQUEST_MODEL, model.to_owned()),
            KeyValue::new(names::KVASIR_REQUEST_ID, self.request_id.clone()),
            KeyValue::new(names::KVASIR_TENANT, self.grant.tenant.to_string()),
            KeyValue::new(names::HTTP_RESPONSE_STATUS_CODE, i64::from(record.status)),
            KeyValue::new(names::GEN_AI_USAGE_INPUT_TOKENS, tokens(record.usage.prompt)),
            KeyValue::new(names::GEN_AI_USAGE_OUTPUT_TOKENS, tokens(record.usage.completion)),
        ];
        if let Some(cached) = record.usage.cached {
            attributes.push(KeyValue::new(names::GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS, tokens(cached)));
        }
        if let Some(first) = record.first_token {
            attributes.push(KeyValue::new(names::GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK, first.as_secs_f64()));
        }
        if let Some(run) = self.last_worker.get() {
            attributes.push(KeyValue::new(names::KVASIR_DECODE_WORKER, run.name.clone()));
        }
        let is_cut = matches!(record.reason, Some("broken_stream" | "deadline_exceeded" | "client_gone"));
        let failure = record.reason.filter(|_| record.status >= 499 || is_cut);
        if let Some(reason) = failure {
            attributes.push(KeyValue::new(names::ERROR_TYPE, reason));
        }
        let status = failure.map_or(Status::Unset, Status::error);
        traced.finish(format!("{operation} {model}"), attributes, status);
    }
}

impl Drop for RequestContext {
    fn drop(&mut self) {
        let gateway = &self.gateway;
        gateway.inside.fetch_sub(1, Ordering::Relaxed);
        gateway.metrics.active.dec();
        let is_late = self.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        let is_abandoned = self.record.status == 0;
        if is_abandoned {
            // No status was recorded: the request was abandoned. 499 is nginx's status for a client that
            // disconnected.
            let (status, reason) = if is_late { (504, "deadline_exceeded") } else { (499, "client_gone") };
            self.record.status = status;
            self.record.reason = Some(reason);
        }
        let (is_good, is_served) = (self.is_good(), self.is_served());
        // The prompt is charged when an engine computed it for this client: not for refusals and failures, but when the client left
        // or its time was over.
        let worker = self.last_worker.get();
        let owes_prompt = worker.is_some() && (is_good || is_abandoned);
        self.leave_gate();
        let gateway = &self.gateway;
        let now = gateway.access.now();
        match self.charge.take() {
            // The client disconnected early: it is charged for its prompt and for the events it got.
            Some(mut charge) if (is_served || owes_prompt) && !self.is_usage_final => {
                charge.reconcile(self.prompt_tokens + self.pieces, now);
                self.record.usage = Usage {
                    prompt: self.prompt_tokens as usize,
                    completion: self.pieces as usize,
                    ..Usage::default()
                };
                if is_served {
                    let reason = if is_late { "deadline_exceeded" } else { "client_gone" };
                    self.record.reason.get_or_insert(reason);
                }
            }
            // Nothing was served, or everything is accounted for; the request itself stays counted.
            Some(mut charge) if !is_served && !self.is_usage_final => charge.reconcile(0, now),
            _ => {}
        }
        // An engine's usage counts also when its answer was blocked.
        if is_served || self.is_usage_final {
            gateway.account(&self.record.usage);
        }
        let record = &self.record;
        let worker = worker.as_deref().map(|run| run.name.as_str());
        let (cached, surface) = (record.usage.cached.unwrap_or(0), self.surface.name());
        if let Some(traced) = self.traced.take() {
            self.finish_trace(&traced);
        }
        tracing::debug!(
            request_id = self.request_id,
            surface,
            tenant = %self.grant.tenant,
            model = record.model,
            status = record.status,
            reason = record.reason,
            worker,
            prompt_tokens = record.usage.prompt,
            cached_tokens = cached,
            answer_tokens = record.usage.completion,
            queued_ms = record.queued.as_millis() as u64,
            first_token_ms = record.first_token.map(|first| first.as_millis() as u64),
            total_ms = self.started.elapsed().as_millis() as u64,
            "request"
        );
        let Some(audit) = &gateway.access.audit else { return };
        // A full queue counts the records that it drops.
        let _dropped = audit.log(&AuditRecord {
            time_unix_ns: record.arrived_unix_ns,
            request_id: &self.request_id,
            key: Some(&self.grant.name),
            tenant: Some(&self.grant.tenant),
            client: record.client,
            model: record.model.as_deref(),
            surface,
            status: record.status,
            reason: record.reason,
            prompt_tokens: record.usage.prompt as u64,
            cached_tokens: cached as u64,
            answer_tokens: record.usage.completion as u64,
            worker,
            queued: record.queued,
            first_token: record.first_token,
            total: self.started.elapsed(),
        });
    }
}
