//! One request's stay in the gateway: its place, its charge, and what is written down when it is over.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::response::Response;
use router_access::{
    Ask, AuditRecord, Charge, Entry, Estimate, Gate, Grant, Permit, RateState, WaitOutcome, admit,
    retry_after_seconds,
};
use router_engines::openai::ApiError;
use router_trace::{KeyValue, Status, names};

use crate::access::limited;
use crate::caller::Caller;
use crate::memory::Footprint;
use crate::models::Target;
use crate::relay::Usage;
use crate::requests::Head;
use crate::service::{Gateway, retry_after};
use crate::traced::{Traced, Tracing};

/// Tokens that an answer without a limit is taken to have, until it is known.
const ANSWER_TOKENS_ASSUMED: u64 = 256;

/// What the audit log says of a request.
#[derive(Debug, Default)]
struct Noted {
    request_id: String,
    surface: &'static str,
    model: Option<String>,
    worker: Option<String>,
    client: Option<IpAddr>,
    status: u16,
    reason: Option<&'static str>,
    usage: Usage,
    queued: Duration,
    first_token: Option<Duration>,
    arrived_unix_ns: u64,
}

/// A request inside. Dropping it gives everything back.
pub(crate) struct Stay {
    gateway: Arc<Gateway>,
    pub(crate) grant: Arc<Grant>,
    /// The memory that it holds for as long as it is inside.
    pub(crate) footprint: Footprint,
    permit: Option<Permit>,
    charge: Option<Charge>,
    /// Tokens of the prompt, as the gateway counted them.
    prompt_tokens: u64,
    /// Pieces of the answer that have gone to the client; about as many tokens.
    pieces: u64,
    /// It has been sent to an engine, which computes from then on.
    is_sent: bool,
    /// An engine has said what it did.
    is_settled: bool,
    rates: RateState,
    started: Instant,
    /// When the request's time is over.
    deadline: Option<Instant>,
    traced: Tracing,
    noted: Noted,
}

impl Stay {
    /// The stay of a request of which nothing is known yet.
    pub(crate) fn nobodys(gateway: &Arc<Gateway>) -> Box<Self> {
        gateway.inside.fetch_add(1, Ordering::Relaxed);
        gateway.metrics.active.inc();
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        Box::new(Self {
            gateway: Arc::clone(gateway),
            grant: Arc::clone(&gateway.access.nobody),
            footprint: Footprint::default(),
            permit: None,
            charge: None,
            prompt_tokens: 0,
            pieces: 0,
            is_sent: false,
            is_settled: false,
            rates: RateState::of(None, None, 0),
            started: Instant::now(),
            deadline: None,
            traced: None,
            noted: Noted { arrived_unix_ns: now.as_nanos() as u64, ..Noted::default() },
        })
    }

    /// Counts a request as inside; refused when too many are.
    pub(crate) fn enter(
        gateway: &Arc<Gateway>,
        headers: &HeaderMap,
        surface: &'static str,
        head: &Head,
    ) -> Result<Box<Self>, (Box<Self>, ApiError)> {
        let before = gateway.inside.load(Ordering::Relaxed);
        let mut stay = Self::nobodys(gateway);
        stay.noted.request_id = head.request_id.clone();
        stay.noted.surface = surface;
        stay.noted.client = head.peer.as_ref().map(|peer| peer.addr.ip());
        stay.deadline = head.deadline;
        stay.traced.clone_from(&head.traced);
        // Who waits for a place has a body in memory already.
        let most = gateway.models.inside_max;
        if before >= most {
            return Err((stay, ApiError::unavailable("Too many requests are being served.")));
        }
        match gateway.access.identify(&Caller::at_api(headers, head.peer.as_ref())) {
            Ok(grant) => stay.grant = grant,
            Err(error) => return Err((stay, error)),
        }
        // The request and its place among those of its key count from here on: a body that never comes holds both.
        match stay.charge_request() {
            Ok(()) => Ok(stay),
            Err(error) => Err((stay, error)),
        }
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
                Err(retry_after(limited(&refusal), after))
            }
        }
    }

    /// Whether the model that a request names may be asked for; before it waits for anything.
    pub(crate) fn allow(&mut self, asked: Option<&str>) -> Result<(), ApiError> {
        let Some(model) = asked else { return Ok(()) };
        self.noted.model = Some(model.to_owned());
        if self.grant.models.allows(model) {
            return Ok(());
        }
        let message = format!("Your key does not allow the model `{model}`.");
        Err(ApiError::new(StatusCode::FORBIDDEN, message, "model_not_allowed"))
    }

    /// The same of a request that names none, once it is known which is meant.
    pub(crate) fn allow_target(&mut self, asked: Option<&str>, target: &Target) -> Result<(), ApiError> {
        match asked {
            Some(_) => Ok(()),
            None => self.allow(Some(&target.model.pool.model())),
        }
    }

    /// Charges limits and waits for a place, when the size of the request is known.
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
            return Err(retry_after(error, Some(retry_after_seconds(left.reset))));
        }
        if let Some(charge) = &mut self.charge {
            charge.settle(tokens, now);
        }
        self.rates = RateState::of(own.as_ref(), tenant.as_ref(), now);
        let ask = Ask {
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
                return Err(retry_after(ApiError::unavailable(message), Some(seconds)));
            }
        };
        self.noted.queued = Duration::from_nanos(access.now().saturating_sub(now));
        if let Some(traced) = &self.traced {
            traced.lasted(names::span::QUEUE, self.noted.queued, Vec::new());
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

    /// What an engine says that it did.
    pub(crate) fn used(&mut self, usage: &Usage) {
        self.noted.usage = *usage;
        self.is_settled = true;
        let now = self.gateway.access.now();
        if let Some(charge) = &mut self.charge {
            charge.settle((usage.prompt_tokens + usage.completion_tokens) as u64, now);
        }
    }

    /// It goes to an engine now. From here on its prompt is charged, also when the client leaves before the first token.
    pub(crate) fn sent(&mut self) {
        self.is_sent = true;
    }

    /// What it holds from now on, as far as that is known.
    pub(crate) fn holds(&self, bytes: usize) {
        if let Some(held) = &self.footprint.held {
            held.resize(bytes);
        }
    }

    /// So many pieces have gone to the client.
    pub(crate) fn progress(&mut self, pieces: usize) {
        self.pieces += pieces as u64;
    }

    pub(crate) fn served_by(&mut self, worker: &str) {
        self.noted.worker = Some(worker.to_owned());
    }

    pub(crate) fn first_token(&mut self) {
        if self.noted.first_token.is_none() {
            self.noted.first_token = Some(self.started.elapsed());
            if let Some(traced) = &self.traced {
                traced.event(names::event::FIRST_TOKEN);
            }
        }
    }

    /// How it was answered.
    pub(crate) fn answered(&mut self, status: StatusCode, reason: Option<&'static str>) {
        self.noted.status = status.as_u16();
        self.noted.reason = reason;
    }

    /// Tells the client how much of its limits is left.
    pub(crate) fn tell_rates(&self, response: &mut Response) {
        for (name, value) in self.rates.headers() {
            if let Ok(value) = HeaderValue::from_str(&value) {
                response.headers_mut().insert(HeaderName::from_static(name), value);
            }
        }
    }
}

impl Stay {
    fn finish_trace(&self, traced: &Traced) {
        let noted = &self.noted;
        let operation = match noted.surface {
            "completions" | "kserve" => names::operation::TEXT_COMPLETION,
            "embeddings" => names::operation::EMBEDDINGS,
            _ => names::operation::CHAT,
        };
        let model = noted.model.as_deref().unwrap_or_default();
        let tokens = |count: usize| count as i64;
        let mut attributes = vec![
            KeyValue::new(names::GEN_AI_OPERATION_NAME, operation),
            KeyValue::new(names::GEN_AI_REQUEST_MODEL, model.to_owned()),
            KeyValue::new(names::KVASIR_REQUEST_ID, noted.request_id.clone()),
            KeyValue::new(names::KVASIR_TENANT, self.grant.tenant.to_string()),
            KeyValue::new(names::HTTP_RESPONSE_STATUS_CODE, i64::from(noted.status)),
            KeyValue::new(names::GEN_AI_USAGE_INPUT_TOKENS, tokens(noted.usage.prompt_tokens)),
            KeyValue::new(names::GEN_AI_USAGE_OUTPUT_TOKENS, tokens(noted.usage.completion_tokens)),
        ];
        if let Some(cached) = noted.usage.cached_tokens() {
            attributes.push(KeyValue::new(names::GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS, tokens(cached)));
        }
        if let Some(first) = noted.first_token {
            attributes.push(KeyValue::new(names::GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK, first.as_secs_f64()));
        }
        if let Some(worker) = &noted.worker {
            attributes.push(KeyValue::new(names::KVASIR_DECODE_WORKER, worker.clone()));
        }
        let is_cut = matches!(noted.reason, Some("broken_stream" | "deadline_exceeded" | "client_gone"));
        let failure = noted.reason.filter(|_| noted.status >= 499 || is_cut);
        if let Some(reason) = failure {
            attributes.push(KeyValue::new(names::ERROR_TYPE, reason));
        }
        let status = failure.map_or(Status::Unset, Status::error);
        traced.finish(format!("{operation} {model}"), attributes, status);
    }
}

impl Drop for Stay {
    fn drop(&mut self) {
        let gateway = &self.gateway;
        gateway.inside.fetch_sub(1, Ordering::Relaxed);
        gateway.metrics.active.dec();
        let now = gateway.access.now();
        let is_late = self.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        let is_abandoned = self.noted.status == 0;
        if is_abandoned {
            // Nobody has said how it was answered: it was given up on the way. 499 is what nginx says of such clients.
            let (status, reason) = if is_late { (504, "deadline_exceeded") } else { (499, "client_gone") };
            self.noted.status = status;
            self.noted.reason = Some(reason);
        }
        let is_good = (200..300).contains(&self.noted.status);
        let is_served = is_good && (self.is_settled || self.pieces > 0);
        // What engines refused or failed is nobody's to pay; what a client left, or had no time for, was computed for it.
        let owes_prompt = self.is_sent && (is_good || is_abandoned);
        // How fast requests go is learned from those that went through.
        match self.permit.take() {
            Some(permit) if is_served && self.is_settled => permit.release(now),
            permit => drop(permit),
        }
        match self.charge.take() {
            // The client has gone before the end: what it got is what it is charged, and its prompt.
            Some(mut charge) if (is_served || owes_prompt) && !self.is_settled => {
                charge.settle(self.prompt_tokens + self.pieces, now);
                self.noted.usage = Usage::of(self.prompt_tokens as usize, self.pieces as usize);
                if is_served {
                    let reason = if is_late { "deadline_exceeded" } else { "client_gone" };
                    self.noted.reason.get_or_insert(reason);
                }
            }
            // Nothing was served, or everything is accounted for; the request itself stays counted.
            Some(mut charge) if !is_served => charge.settle(0, now),
            _ => {}
        }
        let noted = &self.noted;
        if let Some(traced) = self.traced.take() {
            self.finish_trace(&traced);
        }
        tracing::debug!(
            request_id = noted.request_id,
            surface = noted.surface,
            tenant = %self.grant.tenant,
            model = noted.model,
            status = noted.status,
            reason = noted.reason,
            worker = noted.worker,
            prompt_tokens = noted.usage.prompt_tokens,
            cached_tokens = noted.usage.cached_tokens().unwrap_or(0),
            answer_tokens = noted.usage.completion_tokens,
            queued_ms = noted.queued.as_millis() as u64,
            first_token_ms = noted.first_token.map(|first| first.as_millis() as u64),
            total_ms = self.started.elapsed().as_millis() as u64,
            "request"
        );
        let Some(audit) = &gateway.access.audit else { return };
        // A full queue counts what it drops.
        let _dropped = audit.log(&AuditRecord {
            time_unix_ns: noted.arrived_unix_ns,
            request_id: &noted.request_id,
            key: Some(&self.grant.name),
            tenant: Some(&self.grant.tenant),
            client: noted.client,
            model: noted.model.as_deref(),
            surface: noted.surface,
            status: noted.status,
            reason: noted.reason,
            prompt_tokens: noted.usage.prompt_tokens as u64,
            cached_tokens: noted.usage.cached_tokens().unwrap_or(0) as u64,
            answer_tokens: noted.usage.completion_tokens as u64,
            worker: noted.worker.as_deref(),
            queued: noted.queued,
            first_token: noted.first_token,
            total: self.started.elapsed(),
        });
    }
}
