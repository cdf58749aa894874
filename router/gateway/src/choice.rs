//! One output of one request: its legs, its text, and what happens when a worker fails.
//!
//! Each attempt routes prompt + tokens so far. With a prefill worker, both legs are dispatched at once and
//! meet by transfer id; the decode leg's stream is the output. When the decode worker fails, the next attempt
//! goes on from the tokens so far: the sampler draws by (seed, position), and every request has a seed, so the
//! continuation is the same one. When only the prefill leg fails, the decode worker computes the prompt
//! itself, or, if nothing has come yet, the attempt is repeated without a prefill worker.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::HeaderMap;
use router_engines::client::{CompletionPiece, EngineError};
use router_engines::handoff::Handoff;
use router_engines::openai::{ApiError, Finish, STRUCTURED_OUTPUTS, Sampling, TokenLogprob, TokenLogprobs};
use router_fleet::{Booking, RankRef, Route, RouteRequest};
use router_tokens::{Detokenizer, StopStrings, Tokenizer};
use router_trace::names;
use serde_json::{Map, Value, json};
use tokio::sync::mpsc;

use crate::models::Model;
use crate::relay::is_busy;
use crate::service::{Gateway, workers_failed};
use crate::traced::{LegSpan, Tracing};

/// Pause before a request that found no worker tries again; `Fleet::changed` usually wakes it earlier.
const RECHECK: Duration = Duration::from_millis(50);

/// What a choice reports.
pub(crate) enum ChoiceEvent {
    /// Text and tokens.
    Piece(ChoicePiece),
    /// It cannot go on.
    Failed(ApiError),
}

/// Part of an output.
#[derive(Default)]
pub(crate) struct ChoicePiece {
    pub(crate) index: u32,
    pub(crate) text: String,
    pub(crate) tokens: Vec<u32>,
    pub(crate) logprobs: Vec<TokenLogprobs>,
    pub(crate) finish: Option<Finish>,
    pub(crate) cached_tokens: usize,
}

/// A choice before it runs.
pub(crate) struct ChoiceRequest {
    pub(crate) model: Arc<Model>,
    pub(crate) index: u32,
    /// For logs.
    pub(crate) request_id: String,
    /// Engines' name for it.
    pub(crate) engine_id: String,
    /// The client is told which workers failed.
    pub(crate) explains: bool,
    pub(crate) prompt: Arc<Vec<u32>>,
    pub(crate) sampling: Sampling,
    pub(crate) salt: Option<String>,
    pub(crate) session: Option<u64>,
    pub(crate) traced: Tracing,
    /// Of the client, for engines.
    pub(crate) headers: HeaderMap,
}

/// Why an attempt is over.
enum Ended {
    /// The output is complete.
    Finished,
    /// The client is gone.
    Abandoned,
    /// Worth another attempt.
    Failed { error: EngineError, blames_prefill: bool },
    /// No first token in time, and the engine may still compute it: no fault of the engine, and not to be sent again.
    Late(ApiError),
}

struct Runner {
    gateway: Arc<Gateway>,
    request: ChoiceRequest,
    generated: Vec<u32>,
    cached_tokens: usize,
    /// Arrival of the latest tokens, for the time between tokens. A migration counts as one gap.
    last_piece: Option<Instant>,
    /// Why the engine says that it ended.
    engine_finish: Option<Finish>,
    detokenizer: Detokenizer,
    stop: StopStrings,
    out: mpsc::Sender<ChoiceEvent>,
}

/// Runs a choice to its end. The first route is made already, so that it could be shown in a header.
pub(crate) async fn run(
    gateway: Arc<Gateway>,
    request: ChoiceRequest,
    first: (Route, Booking),
    out: mpsc::Sender<ChoiceEvent>,
) {
    let tokenizer = request.model.text.tokenizer.clone();
    let sampling = &request.sampling;
    let detokenizer = Detokenizer::new(tokenizer, sampling.skip_special_tokens, &request.prompt);
    let stop = StopStrings::new(sampling.stop.clone(), sampling.include_stop);
    let runner = Runner {
        gateway,
        request,
        generated: Vec::new(),
        cached_tokens: 0,
        last_piece: None,
        engine_finish: None,
        detokenizer,
        stop,
        out,
    };
    runner.run(first).await;
}

impl Runner {
    async fn run(mut self, first: (Route, Booking)) {
        let mut avoid: Vec<String> = Vec::new();
        let mut without_prefill = false;
        let mut route = Some(first);
        let mut attempts = 0;
        loop {
            let (chosen, mut booking) = match route.take() {
                Some(route) => route,
                None => match self.next_route(&avoid, without_prefill).await {
                    Some(routed) => routed,
                    None => return self.fail(ApiError::unavailable("No worker is available.")).await,
                },
            };
            attempts += 1;
            let (error, blames_prefill) = match self.attempt(&chosen, &mut booking).await {
                Ended::Finished | Ended::Abandoned => return,
                Ended::Failed { error, blames_prefill } => (error, blames_prefill),
                Ended::Late(error) => return self.fail(error).await,
            };
            if let Some(finish) = self.complete() {
                // It failed after its last token: there is nothing to go on with.
                self.engine_finish = Some(finish);
                let _told = self.finish().await;
                return;
            }
            let at_fault = if blames_prefill { chosen.prefill.as_ref() } else { Some(&chosen.decode) };
            let is_refused = matches!(error, EngineError::Refused(_));
            // An engine that is busy, or that says what is wrong with the request, does not fail.
            let is_fault = match &error {
                EngineError::Refused(refusal) => refusal.status.is_server_error() && !is_busy(refusal.status),
                _ => true,
            };
            if let Some(rank) = at_fault.filter(|_| is_fault)
                && rank.worker.breaker.failed(Instant::now())
            {
                tracing::warn!(worker = rank.run.name, "too many failures in a row: out for a while");
            }
            let may_retry = error.is_retryable() && attempts <= self.gateway.tuning().retries;
            if !may_retry || !self.gateway.retries.spend() {
                let error = match error {
                    EngineError::Refused(refusal) => self.with_client_param(refusal),
                    other => {
                        let request = &self.request;
                        workers_failed(request.explains, &request.request_id, &other.to_string())
                    }
                };
                return self.fail(error).await;
            }
            if let Some(rank) = at_fault {
                tracing::warn!(request = self.request.request_id, %error, tokens = self.generated.len(), "going on elsewhere");
                if !is_refused {
                    rank.worker.suspect();
                }
                avoid.push(rank.run.name.clone());
            }
            without_prefill |= blames_prefill;
            self.gateway.metrics.migrations.inc();
            if let Some(traced) = &self.request.traced {
                traced.event(names::event::RETRY);
            }
        }
    }

    /// Replaces the engine's field name (`structured_outputs`) by the field that the client used.
    fn with_client_param(&self, mut refusal: ApiError) -> ApiError {
        if let Some(output) = &self.request.sampling.structured
            && refusal.param.as_deref() == Some(STRUCTURED_OUTPUTS)
        {
            refusal.param = Some(output.param.to_owned());
        }
        refusal
    }

    async fn fail(&self, error: ApiError) {
        // A client that is gone needs no error.
        let _gone = self.out.send(ChoiceEvent::Failed(error)).await;
    }

    /// Why the output is complete, if it is: the engine said so, or the last token or the limits say it.
    fn complete(&self) -> Option<Finish> {
        if let Some(finish) = self.engine_finish.filter(|finish| *finish != Finish::Abort) {
            return Some(finish);
        }
        if self.generated.last().is_some_and(|&id| self.is_end(id)) {
            return Some(Finish::Stop);
        }
        let context = self.request.model.pool.context_tokens();
        let len = self.request.prompt.len() + self.generated.len();
        let is_full = self.request.sampling.max_tokens == Some(self.generated.len())
            || (context > 0 && !self.generated.is_empty() && len >= context);
        is_full.then_some(Finish::Length)
    }

    /// Prompt and tokens so far.
    fn sequence(&self) -> Vec<u32> {
        self.request.prompt.iter().chain(&self.generated).copied().collect()
    }

    async fn next_route(&self, avoid: &[String], without_prefill: bool) -> Option<(Route, Booking)> {
        let tokens = self.sequence();
        let deadline = tokio::time::Instant::now() + self.gateway.tuning().worker_wait;
        loop {
            let changed = self.gateway.fleet.changed.notified();
            let salt = self.request.salt.as_deref();
            let session = self.request.session;
            let adapter = None;
            let traced = self.request.traced.as_deref();
            let wanted = RouteRequest {
                tokens: &tokens,
                salt,
                session,
                adapter,
                audited: true,
                without_prefill,
                avoid,
            };
            if let Some(routed) = self.gateway.route(&self.request.model.pool, &wanted, traced) {
                return Some(routed);
            }
            if tokio::time::Instant::now() >= deadline {
                return None;
            }
            tokio::select! {
                () = changed => {}
                () = tokio::time::sleep(RECHECK) => {}
                () = self.out.closed() => return None,
            }
        }
    }

    fn fields(&self, handoff: Option<&Handoff>) -> Map<String, Value> {
        let mut sampling = self.request.sampling.clone();
        // A chat without a limit runs to the end of the context. It has to be said: engines are asked for a
        // completion of token ids, whose own default is 16 tokens.
        let context = self.request.model.pool.context_tokens();
        let room = context.checked_sub(self.request.prompt.len()).filter(|_| context > 0);
        let limit = sampling.max_tokens.or(room);
        sampling.max_tokens = limit.map(|max| max.saturating_sub(self.generated.len()).max(1));
        sampling.resumed_tokens += self.generated.len();
        let mut fields = sampling.to_engine_fields();
        let mut put = |name: &str, value: Value| drop(fields.insert(name.to_owned(), value));
        put("model", json!(*self.request.model.pool.model()));
        put("stream", json!(true));
        put("stream_options", json!({ "include_usage": true, "continuous_usage_stats": true }));
        put("return_token_ids", json!(true));
        put("return_tokens_as_token_ids", json!(true));
        if let Some(salt) = &self.request.salt {
            put("cache_salt", json!(salt));
        }
        if let Some(handoff) = handoff {
            put("kv_transfer_params", handoff.to_json());
        }
        fields
    }

    async fn attempt(&mut self, route: &Route, booking: &mut Booking) -> Ended {
        self.engine_finish = None;
        let id = self.request.engine_id.clone();
        let prompt = self.sequence();
        let Some(prefill) = &route.prefill else {
            let fields = self.fields(None);
            let (span, headers) = self.leg(names::span::DECODE, &route.decode);
            let start = route.decode.worker.client.complete(&id, headers, &fields, &prompt);
            let never = std::future::pending();
            return closed(span, self.follow(start, never, booking, route, None).await);
        };
        self.gateway.metrics.disaggregated.inc();
        let transfer_id = crate::service::fresh_number();
        let Some(from) = prefill.run.description.data_plane.clone() else {
            let reason = "it names no data plane".to_owned();
            let error = EngineError::Protocol { worker: prefill.run.name.clone(), reason };
            return Ended::Failed { error, blames_prefill: true };
        };
        let decode_fields = self.fields(Some(&Handoff::Decode { transfer_id, from }));
        let mut prefill_fields = self.fields(Some(&Handoff::Prefill { transfer_id }));
        prefill_fields.insert("max_tokens".to_owned(), json!(1));
        prefill_fields.insert("min_tokens".to_owned(), json!(0));
        prefill_fields.remove("logprobs");
        // The prefill leg generates no output; without its schema the request is smaller.
        prefill_fields.remove(STRUCTURED_OUTPUTS);
        // Both legs at once. The prefill leg is not waited for, but its failure is heard.
        let leg = prefill_leg(
            prefill.worker.client.clone(),
            self.leg(names::span::PREFILL, prefill),
            &id,
            prefill_fields,
            &prompt,
        );
        let (span, headers) = self.leg(names::span::DECODE, &route.decode);
        let start = route.decode.worker.client.complete(&id, headers, &decode_fields, &prompt);
        closed(span, self.follow(start, leg, booking, route, Some(Instant::now())).await)
    }

    /// The span of a leg, and the headers that go with it.
    fn leg(&self, name: &'static str, rank: &RankRef) -> (Option<LegSpan>, HeaderMap) {
        let mut headers = self.request.headers.clone();
        (LegSpan::open(&self.request.traced, name, rank, &mut headers), headers)
    }

    /// Follows the decode leg, and the prefill leg beside it until that is over.
    async fn follow(
        &mut self,
        start: impl Future<Output = Result<router_engines::client::CompletionStream, EngineError>>,
        prefill: impl Future<Output = Result<Option<usize>, EngineError>>,
        booking: &mut Booking,
        route: &Route,
        mut moving: Option<Instant>,
    ) -> Ended {
        tokio::pin!(prefill);
        tokio::pin!(start);
        let mut prefill_over = false;
        let out = self.out.clone();
        // A worker that hangs closes no connection: its watcher says when it is given up.
        let worker = Arc::clone(&booking.decode.worker);
        let down = worker.down.notified();
        tokio::pin!(down);
        let hung = || Ended::Failed {
            error: EngineError::Connection {
                worker: worker.name.clone(),
                reason: "it does not answer".to_owned(),
            },
            blames_prefill: false,
        };
        let (stall, answer_within) = {
            let tuning = self.gateway.tuning();
            (tuning.stall, tuning.answer_within)
        };
        let sent = Instant::now();
        let mut last = sent;
        // A queue is no fault of the engine; one that has no request at all has lost this one.
        let late = || match route.decode.run.reported.is_idle_since(sent) {
            true => hung(),
            false => Ended::Late(ApiError::unavailable(format!(
                "The workers failed: {}: no answer within {} ms",
                worker.name,
                answer_within.as_millis()
            ))),
        };
        let first_due = tokio::time::sleep(answer_within);
        tokio::pin!(first_due);
        let mut stream = loop {
            tokio::select! {
                started = &mut start => match started {
                    Ok(stream) => break stream,
                    Err(error) => return Ended::Failed { error, blames_prefill: false },
                },
                result = &mut prefill, if !prefill_over => match result {
                    Ok(cached) => {
                        prefill_over = true;
                        prefilled(route, booking, cached);
                        self.cached_tokens = self.cached_tokens.max(cached.unwrap_or(0));
                    }
                    Err(error) => return Ended::Failed { error, blames_prefill: true },
                },
                () = &mut first_due => return late(),
                () = &mut down => {
                    down.set(worker.down.notified());
                    if worker.is_silent_since(last) {
                        return hung();
                    }
                }
                () = out.closed() => return Ended::Abandoned,
            }
        };
        let mut is_first = true;
        // A long queue or prompt takes a while; between two tokens nothing does.
        let patience = |is_first, sent: Instant| match is_first {
            true => answer_within.saturating_sub(sent.elapsed()),
            false => stall,
        };
        loop {
            let piece = tokio::select! {
                piece = tokio::time::timeout(patience(is_first, sent), stream.next()) => match piece {
                    Ok(piece) => piece,
                    Err(_) if is_first => return late(),
                    Err(_) => return hung(),
                },
                result = &mut prefill, if !prefill_over => {
                    prefill_over = true;
                    match result {
                        Ok(cached) => {
                            prefilled(route, booking, cached);
                            self.cached_tokens = self.cached_tokens.max(cached.unwrap_or(0));
                        }
                        Err(error) if is_first => return Ended::Failed { error, blames_prefill: true },
                        // The decode worker has what it needs or computes the rest.
                        Err(error) => tracing::debug!(%error, "the prefill leg failed after the first token"),
                    }
                    continue;
                }
                () = &mut down => {
                    down.set(worker.down.notified());
                    // A slow health check does not end a stream that flows.
                    if worker.is_silent_since(last) {
                        return hung();
                    }
                    continue;
                }
                () = out.closed() => return Ended::Abandoned,
            };
            last = Instant::now();
            match piece {
                Ok(Some(piece)) => {
                    if !piece.token_ids.is_empty() && std::mem::replace(&mut is_first, false) {
                        booking.first_token();
                        route.decode.worker.breaker.succeeded();
                        if let (Some(traced), Some(since)) = (&self.request.traced, moving.take()) {
                            traced.transferred(since, route);
                        }
                    }
                    if let Some(cached) = piece.cached_tokens {
                        booking.cached_tokens(cached);
                    }
                    if let Some(ended) = self.take(piece).await {
                        return ended;
                    }
                }
                Ok(None) => return self.finish().await,
                Err(error) => return Ended::Failed { error, blames_prefill: false },
            }
        }
    }

    /// Takes one piece of the engine's output; the end of the attempt if it is that. The engine's own end is
    /// only noted: its usage follows, and then the end of its stream.
    async fn take(&mut self, piece: CompletionPiece) -> Option<Ended> {
        if let Some(cached) = piece.cached_tokens {
            // After a migration the tokens so far count as prompt there, but not for the client.
            self.cached_tokens = self.cached_tokens.max(cached.min(self.request.prompt.len()));
        }
        self.engine_finish = piece.finish.or(self.engine_finish);
        if piece.token_ids.is_empty() {
            return None;
        }
        let now = Instant::now();
        if let Some(last) = self.last_piece.replace(now) {
            self.gateway.metrics.inter_token.observe(now.duration_since(last));
        }
        let mut text = String::new();
        let mut stopped = false;
        for &id in &piece.token_ids {
            self.generated.push(id);
            if !stopped && !self.is_end(id) {
                let (shown, found) = self.stop.push(&self.detokenizer.push(id));
                text.push_str(&shown);
                stopped |= found;
            }
        }
        let wanted = self.request.sampling.logprobs.map_or(0, |top| top as usize);
        self.gateway.metrics.generated_tokens.inc_by(piece.token_ids.len() as u64);
        let event = ChoicePiece {
            index: self.request.index,
            text,
            logprobs: describe(&self.request.model.text.tokenizer, &piece, wanted),
            tokens: piece.token_ids,
            finish: stopped.then_some(Finish::Stop),
            cached_tokens: self.cached_tokens,
        };
        if self.out.send(ChoiceEvent::Piece(event)).await.is_err() {
            return Some(Ended::Abandoned);
        }
        stopped.then_some(Ended::Finished)
    }

    /// The engine's stream is over: shows what was held back, and why it ended.
    async fn finish(&mut self) -> Ended {
        let finish = match self.engine_finish {
            Some(Finish::Abort) => {
                let reason = "the engine gave the request up".to_owned();
                let error = EngineError::Protocol { worker: "engine".to_owned(), reason };
                return Ended::Failed { error, blames_prefill: false };
            }
            Some(finish) => finish,
            None => {
                let reason = "the stream has no finish reason".to_owned();
                let error = EngineError::Protocol { worker: "engine".to_owned(), reason };
                return Ended::Failed { error, blames_prefill: false };
            }
        };
        let (mut text, stopped) = self.stop.push(&self.detokenizer.finish());
        if !stopped {
            text.push_str(&self.stop.finish());
        }
        let event = ChoicePiece {
            index: self.request.index,
            text,
            finish: Some(if stopped { Finish::Stop } else { finish }),
            cached_tokens: self.cached_tokens,
            ..ChoicePiece::default()
        };
        match self.out.send(ChoiceEvent::Piece(event)).await {
            Ok(()) => Ended::Finished,
            Err(_) => Ended::Abandoned,
        }
    }

    /// Whether a token ends the output and is therefore not part of its text.
    fn is_end(&self, id: u32) -> bool {
        let sampling = &self.request.sampling;
        sampling.stop_token_ids.contains(&id)
            || (!sampling.ignore_eos && self.request.model.text.eos_ids.contains(&id))
    }
}

/// The prefill leg: its stream has no text, only an end. Returns the tokens that it found in its caches, if it told them.
async fn prefill_leg(
    client: router_engines::client::EngineClient,
    (mut span, headers): (Option<LegSpan>, HeaderMap),
    id: &str,
    fields: Map<String, Value>,
    prompt: &[u32],
) -> Result<Option<usize>, EngineError> {
    let asked = async {
        let mut stream = client.complete(id, headers, &fields, prompt).await?;
        let mut cached = None;
        while let Some(piece) = stream.next().await? {
            cached = piece.cached_tokens.or(cached);
        }
        Ok(cached)
    };
    let ended: Result<Option<usize>, EngineError> = asked.await;
    if let Some(span) = &mut span {
        match &ended {
            Ok(_) => span.succeeded(),
            Err(error) => span.failed(kind_of(error)),
        }
    }
    ended
}

/// A prefill worker has done its part.
fn prefilled(route: &Route, booking: &mut Booking, cached: Option<usize>) {
    if let Some(prefill) = &route.prefill {
        prefill.worker.breaker.succeeded();
    }
    if let Some(cached) = cached {
        booking.prefill_cached_tokens(cached);
    }
}

/// The span of a leg ends with what became of it.
fn closed(span: Option<LegSpan>, ended: Ended) -> Ended {
    if let Some(mut span) = span {
        match &ended {
            Ended::Failed { error, .. } => span.failed(kind_of(error)),
            Ended::Late(_) => span.failed("late"),
            Ended::Finished => span.succeeded(),
            Ended::Abandoned => {}
        }
    }
    ended
}

fn kind_of(error: &EngineError) -> &'static str {
    match error {
        EngineError::Connection { .. } => "connection",
        EngineError::Refused(_) => "refused_by_engine",
        EngineError::Protocol { .. } => "engine_error",
    }
}

fn describe(tokenizer: &Tokenizer, piece: &CompletionPiece, wanted: usize) -> Vec<TokenLogprobs> {
    let token = |id: u32, logprob: f32| TokenLogprob {
        id,
        text: tokenizer.decode(&[id], false),
        bytes: tokenizer.bytes_of(id),
        logprob,
    };
    let pairs = piece.token_ids.iter().zip(&piece.logprobs);
    pairs
        .map(|(&id, (logprob, top))| TokenLogprobs {
            chosen: token(id, *logprob),
            top: top.iter().take(wanted).map(|&(id, logprob)| token(id, logprob)).collect(),
        })
        .collect()
}
