//! HTTP: requests in, answers out.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use router_engines::openai::{
    Answer, ApiError, ChatRequest, CompletionRequest, Finish, Kind, Prompt, Sampling, TokenLogprobs, Usage,
    model_list,
};
use router_tokens::ModelText;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::GatewayConfig;
use crate::choice::{ChoiceEvent, ChoicePiece, ChoiceRequest, run};
use crate::fleet::Fleet;
use crate::metrics::Metrics;
use crate::routing::{Booking, Chooser, Route, Wanted};

/// Events that may wait between the choices and the connection.
const EVENTS_MAX: usize = 64;
/// A client that sends its body more slowly gives its place to others.
const BODY_WITHIN: Duration = Duration::from_secs(60);
/// Texts longer than this are tokenised off the async threads.
const INLINE_TEXT_BYTES: usize = 16 << 10;

/// Everything that the gateway's routes share.
pub struct Gateway {
    pub(crate) config: GatewayConfig,
    pub(crate) text: ModelText,
    pub(crate) fleet: Arc<Fleet>,
    pub(crate) metrics: Metrics,
    chooser: Chooser,
    inside: AtomicUsize,
    started: u64,
}

impl Gateway {
    /// A gateway over a fleet.
    #[must_use]
    pub fn new(config: GatewayConfig, text: ModelText, fleet: Arc<Fleet>) -> Arc<Self> {
        Arc::new(Self {
            config,
            text,
            fleet,
            metrics: Metrics::new(),
            chooser: Chooser::default(),
            inside: AtomicUsize::new(0),
            started: unix_time(),
        })
    }

    /// Requests inside now.
    #[must_use]
    pub fn requests_inside(&self) -> usize {
        self.inside.load(Ordering::Relaxed)
    }

    pub(crate) fn route(&self, wanted: &Wanted<'_>) -> Option<(Route, Booking)> {
        let (route, booking) = self.chooser.route(&self.fleet, &self.config, wanted)?;
        self.metrics.routing_microseconds.observe(route.decided_in.as_secs_f64() * 1e6);
        Some((route, booking))
    }

    /// Longest sequence that every ready worker takes; 0 when none is ready.
    pub(crate) fn context_tokens(&self) -> usize {
        let ready = self.fleet.workers.iter().filter_map(|worker| worker.ready());
        ready.map(|live| live.description.context_tokens).min().unwrap_or(0)
    }
}

/// Counts a request as inside until it is dropped.
struct Inside(Arc<Gateway>);

impl Inside {
    fn enter(gateway: &Arc<Gateway>) -> Result<Self, ApiError> {
        let before = gateway.inside.fetch_add(1, Ordering::Relaxed);
        let this = Self(Arc::clone(gateway));
        gateway.metrics.active.inc();
        if before >= gateway.config.requests_max {
            return Err(ApiError::unavailable("Too many requests are being served."));
        }
        Ok(this)
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.inside.fetch_sub(1, Ordering::Relaxed);
        self.0.metrics.active.dec();
    }
}

/// The gateway's routes.
pub fn router(gateway: Arc<Gateway>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(completions))
        .route("/v1/models", get(models))
        .route("/v1/models/{*model}", get(model))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .route("/kvasir/status", get(status))
        .route("/kvasir/snapshot", get(snapshot))
        .route("/kvasir/loads", post(loads))
        .fallback(|| async {
            error_response(&ApiError {
                status: StatusCode::NOT_FOUND,
                message: "There is no such path.".to_owned(),
                param: None,
                code: Some("not_found"),
            })
        })
        .with_state(gateway)
}

async fn models(State(gateway): State<Arc<Gateway>>) -> Response {
    let list = model_list(&gateway.config.model, gateway.started, gateway.context_tokens());
    json_response(StatusCode::OK, list.to_string())
}

async fn model(State(gateway): State<Arc<Gateway>>, Path(name): Path<String>) -> Response {
    if name != gateway.config.model {
        return error_response(&ApiError::no_such_model(&name));
    }
    let list = model_list(&gateway.config.model, gateway.started, gateway.context_tokens());
    json_response(StatusCode::OK, list["data"][0].to_string())
}

async fn health(State(gateway): State<Arc<Gateway>>) -> StatusCode {
    if gateway.fleet.can_serve() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

async fn metrics(State(gateway): State<Arc<Gateway>>) -> Response {
    let metrics = &gateway.metrics;
    let usage = gateway.fleet.index.write().usage();
    metrics.index_blocks.set(usage.entries as i64);
    metrics.index_bytes.set(usage.bytes as i64);
    metrics.index_nodes.set(usage.nodes as i64);
    metrics.workers_ready.set(gateway.fleet.ready_count() as i64);
    let events = gateway.fleet.tracker_counters();
    metrics.event_batches.set(events.batches as i64);
    metrics.event_orphans.set(events.orphans as i64);
    metrics.event_resets.set(events.resets as i64);
    metrics.event_broken.set(events.broken as i64);
    if let Some(error) = gateway.fleet.speeds.prediction_error() {
        metrics.prediction_error.set(error);
    }
    metrics.seconds_per_token.set(gateway.fleet.speeds.get().per_token);
    for picked in gateway.fleet.roster.load().iter() {
        metrics.of_worker(&picked.worker.name, &picked.live.load);
    }
    let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, content_type)], metrics.render()).into_response()
}

/// The index as bytes, for a gateway that starts.
async fn snapshot(State(gateway): State<Arc<Gateway>>) -> Response {
    match tokio::task::spawn_blocking(move || crate::warm::save(&gateway.fleet)).await {
        Ok(bytes) => ([(header::CONTENT_TYPE, "application/octet-stream")], bytes).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// What another gateway has sent where.
async fn loads(State(gateway): State<Arc<Gateway>>, body: Bytes) -> Response {
    let refused = |message: String| {
        let status = StatusCode::BAD_REQUEST;
        error_response(&ApiError { status, message, param: None, code: Some("bad_loads") })
    };
    if gateway.config.peers.is_empty() {
        return refused("This gateway has no peers: set `gateway.peers`.".to_owned());
    }
    match gateway.fleet.peers.receive(&gateway.fleet, &body, Instant::now()) {
        Ok(()) => json_response(StatusCode::OK, "{}".to_owned()),
        Err(problem) => refused(problem),
    }
}

async fn status(State(gateway): State<Arc<Gateway>>) -> Response {
    let workers: Vec<Value> = gateway
        .fleet
        .workers
        .iter()
        .map(|worker| match worker.ready() {
            None => json!({ "name": worker.name, "ready": false }),
            Some(live) => json!({
                "name": worker.name,
                "ready": true,
                "role": live.description.role,
                "requests": live.load.own.get()[0],
                "peers_requests": live.load.peers.get()[0],
            }),
        })
        .collect();
    let body = json!({
        "active": gateway.requests_inside(),
        "generated_tokens": gateway.metrics.generated_tokens.get(),
        "prompt_tokens": gateway.metrics.prompt_tokens.get(),
        "cached_tokens": gateway.metrics.cached_tokens.get(),
        "migrations": gateway.metrics.migrations.get(),
        "disaggregated": gateway.metrics.disaggregated.get(),
        "workers": workers,
    });
    json_response(StatusCode::OK, body.to_string())
}

async fn chat(State(gateway): State<Arc<Gateway>>, request: Request) -> Response {
    serve(gateway, request, Kind::Chat).await
}

async fn completions(State(gateway): State<Arc<Gateway>>, request: Request) -> Response {
    serve(gateway, request, Kind::Completion).await
}

async fn serve(gateway: Arc<Gateway>, request: Request, kind: Kind) -> Response {
    let request_id = request_id(request.headers());
    let mut response = match answer(&gateway, request, kind, &request_id).await {
        Ok(response) => response,
        Err(error) => error_response(&error),
    };
    let surface = if kind == Kind::Chat { "chat" } else { "completions" };
    let labels = vec![("surface", surface.to_owned()), ("status", response.status().as_str().to_owned())];
    gateway.metrics.requests.get_or_create(&labels).inc();
    if let Ok(value) = HeaderValue::from_str(&request_id) {
        response.headers_mut().insert("x-request-id", value);
    }
    response
}

/// The client's own id, if it is a sane header value, else a fresh one.
fn request_id(headers: &HeaderMap) -> String {
    let given = headers.get("x-request-id").and_then(|id| id.to_str().ok());
    match given.filter(|id| !id.is_empty() && id.len() <= 128) {
        Some(id) => id.to_owned(),
        None => format!("{:016x}{:016x}", fresh_number(), fresh_number()),
    }
}

/// A number that nobody can guess or repeat.
pub(crate) fn fresh_number() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}

fn unix_time() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

fn json_response(status: StatusCode, body: String) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

fn error_response(error: &ApiError) -> Response {
    let mut response = json_response(error.status, error.to_json());
    if error.status == StatusCode::SERVICE_UNAVAILABLE {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    }
    response
}

/// A request in the form that both surfaces share.
struct Normal {
    prompts: Vec<Arc<Vec<u32>>>,
    echo: Vec<String>,
    sampling: Sampling,
    salt: Option<String>,
    stream: bool,
    include_usage: bool,
    return_token_ids: bool,
    tokens_as_ids: bool,
}

async fn answer(
    gateway: &Arc<Gateway>,
    request: Request,
    kind: Kind,
    request_id: &str,
) -> Result<Response, ApiError> {
    let started = Instant::now();
    let inside = Inside::enter(gateway)?;
    let limit = gateway.config.body_bytes_max;
    let too_large = || ApiError {
        status: StatusCode::PAYLOAD_TOO_LARGE,
        message: format!("The body is larger than {limit} bytes, or broke off."),
        param: None,
        code: Some("body_too_large"),
    };
    let too_slow = || ApiError {
        status: StatusCode::REQUEST_TIMEOUT,
        message: format!("The body did not arrive within {} s.", BODY_WITHIN.as_secs()),
        param: None,
        code: Some("body_too_slow"),
    };
    let session = session_of(request.headers());
    let body = axum::body::to_bytes(request.into_body(), limit);
    let body =
        tokio::time::timeout(BODY_WITHIN, body).await.map_err(|_| too_slow())?.map_err(|_| too_large())?;
    let normal = match kind {
        Kind::Chat => normal_chat(gateway, &body).await?,
        Kind::Completion => normal_completion(gateway, &body).await?,
    };
    let param = if kind == Kind::Chat { "messages" } else { "prompt" };
    check_prompts(gateway, param, &normal)?;
    let (out, events) = mpsc::channel(EVENTS_MAX);
    let mut explained = None;
    let mut index = 0;
    for prompt in &normal.prompts {
        for _ in 0..normal.sampling.n {
            // Booked before the next choice is routed, so that a burst does not follow one prefix to one worker.
            let (route, booking) = wait_for_route(gateway, prompt, normal.salt.as_deref(), session).await?;
            explained.get_or_insert_with(|| route.explain());
            let mut sampling = normal.sampling.clone();
            // Every choice has a seed, so that an interrupted one can be continued as it would have gone on.
            let seed = sampling.seed.unwrap_or_else(fresh_number);
            sampling.seed = Some(seed.wrapping_add(u64::from(index % normal.sampling.n)));
            sampling.n = 1;
            let choice = ChoiceRequest {
                index,
                request_id: format!("{request_id}-{index}"),
                prompt: Arc::clone(prompt),
                sampling,
                salt: normal.salt.clone(),
                session,
            };
            tokio::spawn(run(Arc::clone(gateway), choice, (route, booking), out.clone()));
            index += 1;
        }
    }
    drop(out);
    let prefix = if kind == Kind::Chat { "chatcmpl" } else { "cmpl" };
    let answer = Answer::new(
        kind,
        format!("{prefix}-{request_id}"),
        unix_time(),
        &gateway.config.model,
        normal.tokens_as_ids,
    );
    let collector = Collector {
        gateway: Arc::clone(gateway),
        answer,
        kind,
        choices: index,
        usage: Usage { prompt: normal.prompts.iter().map(|prompt| prompt.len()).sum(), ..Usage::default() },
        normal,
        events,
        started,
        _inside: inside,
    };
    let mut response =
        if collector.normal.stream { collector.streamed().await? } else { collector.whole().await? };
    if let Some(value) = explained.and_then(|text| HeaderValue::from_str(&text).ok()) {
        response.headers_mut().insert("x-kvasir-route", value);
    }
    Ok(response)
}

async fn normal_chat(gateway: &Arc<Gateway>, body: &Bytes) -> Result<Normal, ApiError> {
    let request = ChatRequest::parse(body)?;
    check_model(gateway, request.model.as_deref())?;
    let text = gateway.text.clone();
    let (messages, extras, generate) =
        (request.messages, request.template_extras, request.add_generation_prompt);
    let ids = off_thread(body.len(), move || text.encode_chat(&messages, generate, &extras))
        .await?
        .map_err(|error| ApiError::invalid("messages", error.to_string()))?;
    Ok(Normal {
        prompts: vec![Arc::new(ids)],
        echo: Vec::new(),
        sampling: request.sampling,
        salt: request.cache_salt,
        stream: request.stream,
        include_usage: request.include_usage,
        return_token_ids: request.return_token_ids,
        tokens_as_ids: false,
    })
}

async fn normal_completion(gateway: &Arc<Gateway>, body: &Bytes) -> Result<Normal, ApiError> {
    let request = CompletionRequest::parse(body)?;
    check_model(gateway, request.model.as_deref())?;
    let mut prompts = Vec::with_capacity(request.prompts.len());
    let mut echo = Vec::new();
    for prompt in request.prompts {
        let ids = match prompt {
            Prompt::Tokens(ids) => {
                if request.echo {
                    echo.push(gateway.text.tokenizer.decode(&ids, false));
                }
                ids
            }
            Prompt::Text(text) => {
                if request.echo {
                    echo.push(text.clone());
                }
                let tokenizer = gateway.text.tokenizer.clone();
                off_thread(text.len(), move || tokenizer.encode(&text, true))
                    .await?
                    .map_err(|error| ApiError::invalid("prompt", error.to_string()))?
            }
        };
        prompts.push(Arc::new(ids));
    }
    Ok(Normal {
        prompts,
        echo,
        sampling: request.sampling,
        salt: request.cache_salt,
        stream: request.stream,
        include_usage: request.include_usage,
        return_token_ids: request.return_token_ids,
        tokens_as_ids: request.tokens_as_ids,
    })
}

/// Runs short work here and long work on a thread of its own.
async fn off_thread<T: Send + 'static>(
    bytes: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ApiError> {
    if bytes <= INLINE_TEXT_BYTES {
        return Ok(work());
    }
    tokio::task::spawn_blocking(work).await.map_err(|error| ApiError::internal(error.to_string()))
}

fn check_model(gateway: &Gateway, model: Option<&str>) -> Result<(), ApiError> {
    match model {
        Some(model) if model != gateway.config.model => Err(ApiError::no_such_model(model)),
        _ => Ok(()),
    }
}

fn check_prompts(gateway: &Gateway, param: &str, normal: &Normal) -> Result<(), ApiError> {
    let context = gateway.context_tokens();
    for prompt in &normal.prompts {
        if prompt.is_empty() {
            return Err(ApiError::invalid(param, format!("`{param}` has no tokens.")));
        }
        if context > 0 && prompt.len() >= context {
            return Err(ApiError::context_length(param, prompt.len(), context));
        }
    }
    Ok(())
}

/// The conversation that a request belongs to, as vLLM's clients name it.
fn session_of(headers: &HeaderMap) -> Option<u64> {
    let name = headers.get("x-session-id")?.as_bytes();
    let letters: Vec<u32> = name.iter().map(|&letter| u32::from(letter)).collect();
    Some(kvstore_block::block_hash(&letters))
}

/// A worker may be restarting: wait a moment before giving up.
async fn wait_for_route(
    gateway: &Gateway,
    tokens: &[u32],
    salt: Option<&str>,
    session: Option<u64>,
) -> Result<(Route, Booking), ApiError> {
    let deadline = tokio::time::Instant::now() + gateway.config.worker_wait;
    loop {
        let changed = gateway.fleet.changed.notified();
        if let Some(routed) =
            gateway.route(&Wanted { tokens, salt, session, without_prefill: false, avoid: &[] })
        {
            return Ok(routed);
        }
        if tokio::time::timeout_at(deadline, changed).await.is_err() {
            return Err(ApiError::unavailable("No worker is available."));
        }
    }
}

/// Makes an answer of the choices' events.
struct Collector {
    gateway: Arc<Gateway>,
    answer: Answer,
    kind: Kind,
    choices: u32,
    usage: Usage,
    normal: Normal,
    events: mpsc::Receiver<ChoiceEvent>,
    started: Instant,
    _inside: Inside,
}

impl Collector {
    fn count(&mut self, piece: &ChoicePiece) {
        if self.usage.completion == 0 && !piece.tokens.is_empty() {
            self.gateway.metrics.time_to_first_token.observe(self.started.elapsed().as_secs_f64());
        }
        self.usage.completion += piece.tokens.len();
        self.usage.cached = self.usage.cached.max(piece.cached_tokens);
    }

    fn account(&self) {
        self.gateway.metrics.prompt_tokens.inc_by(self.usage.prompt as u64);
        self.gateway.metrics.cached_tokens.inc_by(self.usage.cached as u64);
    }

    fn echo_of(&self, index: u32) -> &str {
        self.normal.echo.get((index / self.normal.sampling.n) as usize).map_or("", String::as_str)
    }

    async fn whole(mut self) -> Result<Response, ApiError> {
        #[derive(Default, Clone)]
        struct Output {
            text: String,
            tokens: Vec<u32>,
            logprobs: Vec<TokenLogprobs>,
            finish: Option<Finish>,
        }
        let mut outputs = vec![Output::default(); self.choices as usize];
        for index in 0..self.choices {
            outputs[index as usize].text = self.echo_of(index).to_owned();
        }
        while let Some(event) = self.events.recv().await {
            let piece = match event {
                ChoiceEvent::Failed(error) => return Err(error),
                ChoiceEvent::Piece(piece) => piece,
            };
            self.count(&piece);
            let output = &mut outputs[piece.index as usize];
            output.text.push_str(&piece.text);
            output.tokens.extend(piece.tokens);
            output.logprobs.extend(piece.logprobs);
            output.finish = output.finish.or(piece.finish);
        }
        self.account();
        let wants_logprobs = self.normal.sampling.logprobs.is_some();
        let choices = outputs.iter().zip(0..).map(|(output, index)| {
            let finish =
                output.finish.ok_or_else(|| ApiError::internal("An output ended without a reason."))?;
            let logprobs = wants_logprobs.then_some(output.logprobs.as_slice());
            let tokens = self.normal.return_token_ids.then_some(output.tokens.as_slice());
            Ok(self.answer.choice(index, &output.text, logprobs, tokens, finish))
        });
        let choices = choices.collect::<Result<Vec<_>, ApiError>>()?;
        Ok(json_response(StatusCode::OK, self.answer.whole(choices, self.usage).to_string()))
    }

    /// Waits for the first event, so that a failure before any token is a proper error.
    async fn streamed(mut self) -> Result<Response, ApiError> {
        let first = match self.events.recv().await {
            Some(ChoiceEvent::Failed(error)) => return Err(error),
            first => first,
        };
        let mut head = String::new();
        for index in 0..self.choices {
            if self.kind == Kind::Chat {
                head.push_str(&self.answer.role_piece(index));
            } else if !self.echo_of(index).is_empty() {
                head.push_str(&self.answer.piece(index, self.echo_of(index), &[], 0, None, None));
            }
        }
        let offsets = (0..self.choices).map(|index| self.echo_of(index).chars().count()).collect();
        let mut stream = Stream { collector: self, offsets, next: Some(head), is_over: false };
        if let Some(ChoiceEvent::Piece(piece)) = first {
            stream.piece(&piece);
        }
        let headers =
            [(header::CONTENT_TYPE, "text/event-stream; charset=utf-8"), (header::CACHE_CONTROL, "no-cache")];
        Ok((headers, Body::from_stream(stream)).into_response())
    }
}

/// The body of a streamed answer. Pieces that are ready together leave together.
struct Stream {
    collector: Collector,
    offsets: Vec<usize>,
    next: Option<String>,
    is_over: bool,
}

impl Stream {
    fn piece(&mut self, piece: &ChoicePiece) {
        self.collector.count(piece);
        let offset = &mut self.offsets[piece.index as usize];
        let tokens = self.collector.normal.return_token_ids.then_some(piece.tokens.as_slice());
        let event = self.collector.answer.piece(
            piece.index,
            &piece.text,
            &piece.logprobs,
            *offset,
            tokens,
            piece.finish,
        );
        *offset += piece.text.chars().count();
        // A token whose text is held back has nothing to say, unless ids or log-probabilities are wanted.
        if !piece.text.is_empty() || piece.finish.is_some() || tokens.is_some() || !piece.logprobs.is_empty()
        {
            self.next.get_or_insert_default().push_str(&event);
        }
    }

    fn end(&mut self) {
        self.is_over = true;
        self.collector.account();
        let next = self.next.get_or_insert_default();
        if self.collector.normal.include_usage {
            next.push_str(&self.collector.answer.usage_piece(self.collector.usage));
        }
        next.push_str("data: [DONE]\n\n");
    }
}

impl futures_util::Stream for Stream {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        while !self.is_over {
            match self.collector.events.poll_recv(context) {
                Poll::Pending => break,
                Poll::Ready(Some(ChoiceEvent::Piece(piece))) => self.piece(&piece),
                Poll::Ready(Some(ChoiceEvent::Failed(error))) => {
                    self.is_over = true;
                    let event = format!("data: {}\n\n", error.to_json());
                    self.next.get_or_insert_default().push_str(&event);
                }
                Poll::Ready(None) => self.end(),
            }
        }
        match (self.next.take(), self.is_over) {
            (Some(text), _) => Poll::Ready(Some(Ok(text.into()))),
            (None, true) => Poll::Ready(None),
            (None, false) => Poll::Pending,
        }
    }
}
