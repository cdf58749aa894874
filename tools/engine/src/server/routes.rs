//! The routes, and the checks before a request is submitted to the engine.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{Query, Request as HttpRequest, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};
use router_engines::client::WorkerDescription;
use router_engines::connector_params::{RETAIN_SECONDS, SHARED_BLOCKS};
use router_engines::exposition;
use router_engines::handoff::{DataPlaneAddress, Handoff};
use router_engines::intake::{Intake, IntakeError, ReceivedBody};
use router_engines::key::ApiKey;
use router_openai::{
    Answer, ApiError, ChatRequest, CompletionRequest, Kind, Prompt, Sampling, ToolChoice, model_list,
};
use router_openai::{JsonCounts, JsonLimits};
use serde_json::{Value, json};
use tools_grammar::{Grammar, GrammarError};

use super::answer::{Job, respond};
use super::metrics;
use crate::{EngineHandle, Request, SubmitError};

/// Limits of a body's JSON, equal to a gateway's.
const BODY_LIMITS: JsonLimits = JsonLimits { nodes: 128 << 10, numbers: 1 << 20, depth: 128 };

/// State shared by the routes.
pub struct WorkerState {
    /// The engine.
    pub engine: EngineHandle,
    /// Description of this worker.
    pub description: WorkerDescription,
    /// The KV slots.
    pub slots: Arc<dataplane_memory::SlotPool>,
    /// Unix time of the start.
    pub started: u64,
    /// Largest request body in bytes.
    pub body_bytes_max: usize,
    /// Key that every request except health checks must carry; `None`: no key is required.
    pub key: Option<ApiKey>,
    /// Transports that may be used to fetch blocks, best first: `shm`, `tcp`.
    pub transports: Vec<&'static str>,
    /// Appends further metrics to the engine's own.
    pub more_metrics: Box<dyn Fn(&mut String) + Send + Sync>,
}

type Shared = Arc<WorkerState>;

/// Time within which a body must be complete.
const BODY_WITHIN: Duration = Duration::from_secs(60);
/// Largest sum of the bytes of all bodies that are being received or parsed.
const BODIES_BYTES_MAX: usize = 256 << 20;

/// The worker's routes.
pub fn router(state: WorkerState) -> Router {
    let intake = Intake::new(state.body_bytes_max, BODIES_BYTES_MAX, BODY_WITHIN);
    let key = state.key.clone();
    let routes = Router::new()
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat))
        .route("/tokenize", post(tokenize))
        .route("/v1/models", get(models))
        .route("/health", get(health))
        .route("/ping", get(health))
        .route(
            "/version",
            get(|| async {
                json_response(StatusCode::OK, json!({ "version": env!("CARGO_PKG_VERSION") }).to_string())
            }),
        )
        .route("/metrics", get(metrics))
        .route("/kv_event_sources", get(event_sources))
        .route("/reset_prefix_cache", post(reset_cache))
        .route("/kvasir/worker", get(describe))
        .fallback(|| async {
            let error = ApiError::new(StatusCode::NOT_FOUND, "There is no such path.", "not_found");
            error_response(&error)
        })
        .layer(Extension(Arc::new(intake)))
        .with_state(Arc::new(state));
    match key {
        Some(key) => routes.layer(middleware::from_fn_with_state(key, check_key)),
        None => routes,
    }
}

/// Refuses a request without the worker's key, before its body is read. Health checks need none.
async fn check_key(State(key): State<ApiKey>, request: HttpRequest, next: Next) -> Response {
    let is_health_check = matches!(request.uri().path(), "/health" | "/ping");
    if is_health_check || key.is_shown_in(request.headers()) {
        return next.run(request).await;
    }
    let message = "This worker requires its key: `Authorization: Bearer KEY`.";
    let mut response = error_response(&ApiError::new(StatusCode::UNAUTHORIZED, message, "invalid_api_key"));
    response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    response
}

pub(super) fn json_response(status: StatusCode, body: String) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

pub(super) fn error_response(error: &ApiError) -> Response {
    json_response(error.status, error.to_json())
}

async fn health(State(state): State<Shared>) -> StatusCode {
    if state.engine.is_alive() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

async fn models(State(state): State<Shared>) -> Response {
    let list = model_list(&state.description.model, state.started, state.engine.context_tokens());
    json_response(StatusCode::OK, list.to_string())
}

async fn describe(State(state): State<Shared>) -> Response {
    json_response(StatusCode::OK, json!(state.description).to_string())
}

async fn event_sources(State(state): State<Shared>) -> Response {
    let source = json!({
        "enable_kv_cache_events": state.description.events.is_some(),
        "publisher": "zmq",
        "endpoint": state.description.events,
        "replay_endpoint": state.description.replay,
        "topic": "",
    });
    json_response(StatusCode::OK, json!({ "0": source }).to_string())
}

async fn reset_cache(State(state): State<Shared>) -> StatusCode {
    state.engine.clear_cache();
    StatusCode::OK
}

/// `GET /metrics`; `names=vllm` adds vLLM's names.
async fn metrics(
    State(state): State<Shared>,
    Query(query): Query<Vec<(String, String)>>,
    headers: HeaderMap,
) -> Response {
    let with_vllm = query.iter().any(|(key, value)| key == "names" && value == "vllm");
    let mut text = metrics::render(&state, with_vllm);
    (state.more_metrics)(&mut text);
    exposition::process(&mut text, env!("CARGO_PKG_VERSION"));
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    let (content_type, text) = match exposition::wants_openmetrics(accept) {
        true => (exposition::OPENMETRICS, text + "# EOF\n"),
        false => (exposition::CLASSIC, exposition::classic(&text)),
    };
    ([(header::CONTENT_TYPE, content_type)], text).into_response()
}

/// vLLM's `/tokenize`: the token ids of a text (`prompt`) or of a chat (`messages`), and their number.
async fn tokenize(
    State(state): State<Shared>,
    Extension(intake): Extension<Arc<Intake>>,
    request: HttpRequest,
) -> Response {
    let body = receive(&intake, request).await;
    match body.and_then(|body| tokens_of(&state, &body.bytes)) {
        Ok(ids) => {
            let answer = json!({
                "count": ids.len(), "max_model_len": state.engine.context_tokens(), "tokens": ids, "token_strs": null,
            });
            json_response(StatusCode::OK, answer.to_string())
        }
        Err(error) => error_response(&error),
    }
}

fn tokens_of(state: &Shared, body: &[u8]) -> Result<Vec<u32>, ApiError> {
    let fields: Value = serde_json::from_slice(body)
        .map_err(|error| ApiError::malformed(format!("The body is not JSON: {error}.")))?;
    check_model(state, fields["model"].as_str())?;
    if let Some(text) = fields["prompt"].as_str() {
        let adds_special = fields["add_special_tokens"].as_bool().unwrap_or(true);
        let ids = state.engine.text().tokenizer.encode(text, adds_special);
        return ids.map_err(|error| ApiError::invalid("prompt", error.to_string()));
    }
    let continues = fields["continue_final_message"].as_bool().unwrap_or(false);
    let chat = ChatRequest::parse(body)?;
    let encoded = state.engine.text().encode_conversation(
        chat.messages,
        chat.add_generation_prompt,
        continues,
        &chat.template_extras,
    );
    Ok(encoded.map_err(|error| ApiError::invalid("messages", error.to_string()))?.ids)
}

async fn completions(
    State(state): State<Shared>,
    Extension(intake): Extension<Arc<Intake>>,
    headers: HeaderMap,
    request: HttpRequest,
) -> Response {
    let body = receive(&intake, request).await;
    let started = match body.and_then(|body| CompletionRequest::parse(&body.bytes)) {
        Ok(request) => start_completion(&state, &headers, request).await,
        Err(error) => Err(error),
    };
    respond(started).await
}

async fn chat(
    State(state): State<Shared>,
    Extension(intake): Extension<Arc<Intake>>,
    headers: HeaderMap,
    request: HttpRequest,
) -> Response {
    let body = receive(&intake, request).await;
    let started = match body.and_then(|body| ChatRequest::parse(&body.bytes)) {
        Ok(request) => start_chat(&state, &headers, request).await,
        Err(error) => Err(error),
    };
    respond(started).await
}

async fn receive(intake: &Intake, request: HttpRequest) -> Result<ReceivedBody, ApiError> {
    let body = intake.receive(request.into_body()).await.map_err(|error| match error {
        IntakeError::TooLarge => {
            let message = format!("The body is larger than {} bytes.", intake.body_bytes_max());
            ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message, "body_too_large")
        }
        IntakeError::Full => ApiError::unavailable("Too many bytes of requests are being received."),
        IntakeError::Slow => {
            let message = format!("The body did not arrive within {} s.", BODY_WITHIN.as_secs());
            ApiError::new(StatusCode::REQUEST_TIMEOUT, message, "body_too_slow")
        }
        IntakeError::Broken => ApiError::malformed("The body broke off."),
    })?;
    // A tree of values takes up to a hundred times the bytes of its text.
    JsonCounts::of(&body.bytes, &BODY_LIMITS)
        .map_err(|excess| ApiError::new(StatusCode::BAD_REQUEST, excess, "body_too_complex"))?;
    Ok(body)
}

fn answer_id(headers: &HeaderMap, prefix: &str) -> String {
    let given = headers.get("x-request-id").and_then(|id| id.to_str().ok());
    format!("{prefix}-{}", given.map_or_else(|| format!("{:016x}", fresh_number()), str::to_owned))
}

fn fresh_number() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}

fn now() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

async fn start_completion(
    state: &Shared,
    headers: &HeaderMap,
    request: CompletionRequest,
) -> Result<Job, ApiError> {
    check_model(state, request.model.as_deref())?;
    let mut prompts = Vec::with_capacity(request.prompts.len());
    for prompt in &request.prompts {
        let ids = match prompt {
            Prompt::Tokens(ids) => ids.clone(),
            Prompt::Text(text) => tokenise(state, text)?,
        };
        check_prompt(state, "prompt", &ids)?;
        prompts.push(ids);
    }
    let answer = Answer::new(
        Kind::Completion,
        answer_id(headers, "cmpl"),
        now(),
        &state.description.model,
        request.tokens_as_ids,
    );
    let echo = request.echo.then(|| {
        prompts.iter().map(|ids| state.engine.text().tokenizer.decode(ids, true)).collect::<Vec<_>>()
    });
    let transfer = TransferParams::parse(request.kv_transfer_params.as_ref(), &prompts, &request.sampling)?;
    let grammar = compile_grammar(state, &prompts, &request.sampling, transfer.handoff.as_ref()).await?;
    let salt = request.cache_salt.as_deref();
    let generations = submit(state, &prompts, &request.sampling, salt, transfer, grammar)?;
    Ok(Job {
        answer,
        generations,
        echo,
        prompt_tokens: prompts.iter().map(Vec::len).sum(),
        stream: request.stream,
        include_usage: request.include_usage,
        early_usage: request.continuous_usage,
        return_token_ids: request.return_token_ids,
        wants_logprobs: request.sampling.logprobs.is_some(),
        tokenizer: state.engine.text().tokenizer.clone(),
        is_chat: false,
    })
}

async fn start_chat(state: &Shared, headers: &HeaderMap, request: ChatRequest) -> Result<Job, ApiError> {
    check_model(state, request.model.as_deref())?;
    if matches!(request.tool_choice, ToolChoice::Required | ToolChoice::Named(_)) {
        let message =
            "A worker supports no `tool_choice` other than `none` and `auto`: send the request to a gateway.";
        return Err(ApiError::invalid("tool_choice", message));
    }
    let ids = state
        .engine
        .text()
        .encode_conversation(request.messages, request.add_generation_prompt, false, &request.template_extras)
        .map_err(|error| ApiError::invalid("messages", error.to_string()))?
        .ids;
    check_prompt(state, "messages", &ids)?;
    let answer =
        Answer::new(Kind::Chat, answer_id(headers, "chatcmpl"), now(), &state.description.model, false);
    let prompts = [ids];
    let transfer = TransferParams::parse(request.kv_transfer_params.as_ref(), &prompts, &request.sampling)?;
    let grammar = compile_grammar(state, &prompts, &request.sampling, transfer.handoff.as_ref()).await?;
    let salt = request.cache_salt.as_deref();
    let generations = submit(state, &prompts, &request.sampling, salt, transfer, grammar)?;
    Ok(Job {
        answer,
        generations,
        echo: None,
        prompt_tokens: prompts[0].len(),
        stream: request.stream,
        include_usage: request.include_usage,
        early_usage: false,
        return_token_ids: request.return_token_ids,
        wants_logprobs: request.sampling.logprobs.is_some(),
        tokenizer: state.engine.text().tokenizer.clone(),
        is_chat: true,
    })
}

fn check_model(state: &Shared, model: Option<&str>) -> Result<(), ApiError> {
    match model {
        Some(model) if model != state.description.model => Err(ApiError::no_such_model(model)),
        _ => Ok(()),
    }
}

fn tokenise(state: &Shared, text: &str) -> Result<Vec<u32>, ApiError> {
    let ids = state.engine.text().tokenizer.encode(text, true);
    ids.map_err(|error| ApiError::invalid("prompt", error.to_string()))
}

fn check_prompt(state: &Shared, param: &str, ids: &[u32]) -> Result<(), ApiError> {
    let context = state.engine.context_tokens();
    if ids.is_empty() {
        return Err(ApiError::invalid(param, format!("`{param}` has no tokens.")));
    }
    if ids.len() >= context {
        return Err(ApiError::context_length(param, ids.len(), context));
    }
    match ids.iter().find(|&&id| id as usize >= state.engine.vocabulary()) {
        Some(id) => Err(ApiError::invalid(
            param,
            format!(
                "`{param}` has token id {id}, but the vocabulary ends at {}.",
                state.engine.vocabulary() - 1
            ),
        )),
        None => Ok(()),
    }
}

/// A request's `kv_transfer_params`.
struct TransferParams {
    /// The request's part in a hand-off; `None` without one.
    handoff: Option<Handoff>,
    /// Time for which the blocks are retained; zero: no longer than any other's.
    retain_for: Duration,
}

impl TransferParams {
    fn parse(transfer: Option<&Value>, prompts: &[Vec<u32>], sampling: &Sampling) -> Result<Self, ApiError> {
        let seconds = transfer.and_then(|transfer| transfer[RETAIN_SECONDS].as_u64()).unwrap_or(0);
        // Parameters for KvasirConnector, which the gateway sends beside a hand-off.
        let is_beside = |name: &String| [RETAIN_SECONDS, SHARED_BLOCKS].contains(&name.as_str());
        let names = transfer.and_then(Value::as_object).map(|named| named.keys());
        let is_of_handoff = names.is_none_or(|mut names| !names.all(is_beside));
        let handoff = handoff_of(transfer.filter(|_| is_of_handoff), prompts, sampling)?;
        Ok(Self { handoff, retain_for: Duration::from_secs(seconds) })
    }
}

/// Parses the request's part in a hand-off, if it has one.
fn handoff_of(
    transfer: Option<&Value>,
    prompts: &[Vec<u32>],
    sampling: &Sampling,
) -> Result<Option<Handoff>, ApiError> {
    let Some(transfer) = transfer else { return Ok(None) };
    let Some(handoff) = Handoff::from_json(transfer) else {
        return Err(ApiError::invalid(
            "kv_transfer_params",
            "`kv_transfer_params` is of a dialect that this engine does not speak.",
        ));
    };
    if prompts.len() > 1 || sampling.n > 1 {
        return Err(ApiError::invalid("kv_transfer_params", "A hand-off is for one prompt and one choice."));
    }
    Ok(Some(handoff))
}

/// Compiles the grammar of the output, if it has one. A prefill leg has no output.
async fn compile_grammar(
    state: &Shared,
    prompts: &[Vec<u32>],
    sampling: &Sampling,
    handoff: Option<&Handoff>,
) -> Result<Option<Grammar>, ApiError> {
    let is_prefill = matches!(handoff, Some(Handoff::Prefill { .. }));
    let Some(output) = sampling.structured.as_ref().filter(|_| !is_prefill) else { return Ok(None) };
    let resumed = match (sampling.resumed_tokens, prompts) {
        (0, _) => Vec::new(),
        (count, [prompt]) => prompt[prompt.len().saturating_sub(count)..].to_vec(),
        _ => {
            return Err(ApiError::invalid(
                "vllm_xargs",
                "`vllm_xargs.kvasir_resumed_tokens` needs exactly one prompt.",
            ));
        }
    };
    let compiled = state.engine.compile_grammar(output, resumed).await;
    compiled.map(Some).map_err(|error| match error {
        GrammarError::Schema(why) => {
            ApiError::invalid(output.param, format!("The schema cannot be used: {why}."))
        }
        GrammarError::Resumed(why) => {
            ApiError::invalid("vllm_xargs", format!("The output so far does not follow the schema: {why}."))
        }
        GrammarError::Full => ApiError::unavailable("Too many requests wait for a grammar."),
        GrammarError::Failed(why) => ApiError::internal(format!("Compiling the grammar failed: {why}.")),
    })
}

/// Submits one generation for each prompt and choice, in the order of their indexes.
fn submit(
    state: &Shared,
    prompts: &[Vec<u32>],
    sampling: &Sampling,
    salt: Option<&str>,
    transfer: TransferParams,
    grammar: Option<Grammar>,
) -> Result<Vec<crate::OutputStream>, ApiError> {
    let TransferParams { handoff, retain_for } = transfer;
    let (push_to, fetch_from) = match handoff {
        None => (None, None),
        Some(Handoff::Prefill { transfer_id, .. }) => (Some(transfer_id), None),
        Some(Handoff::Decode { transfer_id, from, .. }) => {
            (None, choose_path(state, &from)?.map(|path| (transfer_id, path)))
        }
    };
    let mut generations = Vec::new();
    for prompt in prompts {
        for choice in 0..sampling.n {
            let mut sampling = sampling.clone();
            // Choices of one seeded request differ from each other, but not from run to run.
            sampling.seed = sampling.seed.map(|seed| seed.wrapping_add(u64::from(choice)));
            let request = Request {
                prompt: prompt.clone(),
                sampling,
                extras: salt.map(str::to_owned).into_iter().collect(),
                push_to,
                fetch_from: fetch_from.clone(),
                retain_for,
                grammar: grammar.clone(),
            };
            generations.push(state.engine.submit(request).map_err(|error| match error {
                SubmitError::Full => ApiError::unavailable("The engine's queue is full."),
                SubmitError::Stopped => ApiError::unavailable("The engine is stopping."),
            })?);
        }
    }
    Ok(generations)
}

/// Path to the prefill worker: shared memory on the same host; else its RDMA rails, with TCP as a fallback if all of them
/// fail. `None` when the worker is on another host and listens on loopback only: the prompt is then computed here.
fn choose_path(state: &Shared, from: &DataPlaneAddress) -> Result<Option<String>, ApiError> {
    let has = |transport: &str| state.transports.contains(&transport);
    let here = &state.description.data_plane;
    let same_host = from.host == here.host;
    if has("shm")
        && same_host
        && let Some(path) = &from.shm
    {
        return Ok(Some(format!("shm:{path}")));
    }
    let all = from;
    let from = &from.reachable_from(here);
    let rails = from.rdma.iter().filter(|_| has("rdma")).map(|address| format!("rdma:{address}"));
    let tcp = from.tcp.iter().filter(|_| has("tcp")).map(|address| format!("tcp:{address}"));
    let path: Vec<String> = rails.chain(tcp).collect();
    if path.is_empty() && from != all {
        tracing::warn!(
            host = all.host,
            "a prefill worker on another host listens on loopback only (transfer.listen, rdma.listen): prompts are \
             computed here"
        );
        return Ok(None);
    }
    if path.is_empty() {
        return Err(ApiError::invalid("kv_transfer_params", "No transport reaches the prefill worker."));
    }
    Ok(Some(path.join(",")))
}

impl IntoResponse for super::answer::Stream {
    fn into_response(self) -> Response {
        let headers =
            [(header::CONTENT_TYPE, "text/event-stream; charset=utf-8"), (header::CACHE_CONTROL, "no-cache")];
        (headers, Body::from_stream(self)).into_response()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test]
    async fn bodies_that_make_large_trees_are_refused_before_they_are_parsed() {
        let intake = Intake::new(16 << 20, 16 << 20, Duration::from_secs(5));
        let receive = async |text: String| {
            let request = HttpRequest::new(axum::body::Body::from(text));
            receive(&intake, request).await.map(|body| body.bytes.len()).map_err(|error| error.status)
        };
        let lists = format!("{{\"prompt\": [{}[]]}}", "[],".repeat(200_000));
        assert_eq!(receive(lists).await, Err(StatusCode::BAD_REQUEST));
        assert_eq!(receive("[".repeat(200)).await, Err(StatusCode::BAD_REQUEST));
        let ids = format!("{{\"prompt\": [{}1]}}", "1,".repeat(200_000));
        assert_eq!(receive(ids.clone()).await, Ok(ids.len()));
    }
}
