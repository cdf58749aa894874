//! From an HTTP request to whoever serves it: `collect` when the fleet takes token ids and the gateway makes the text,
//! `relay` when the engines make it themselves.

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::Response;
use router_access::{Decision, HeaderPolicy};
use router_engines::body::RawBody;
use router_engines::client::EngineError;
use router_engines::dialect::TokenCount;
use router_engines::openai::{ApiError, KNOWN_FIELDS, Kind};
use router_tls::PeerAddr;
use router_trace::names;

use crate::TextBy;
use crate::body::{BodyKind, read};
use crate::caller::peer_of;
use crate::collect::generate;
use crate::compute::IsCancelled;
use crate::deadline::{time_is_over, until};
use crate::memory::{Footprint, held_bytes};
use crate::models::Target;
use crate::prompt;
use crate::relay::{RelayRequest, Surface, relay};
use crate::service::{Gateway, fresh_id};
use crate::stay::Stay;
use crate::traced::{self, Tracing};
use crate::translate::{Tongue, count_answer, count_request, parse};

/// With it a client says how long its request may take.
const TIMEOUT: &str = "x-request-timeout-ms";
/// Headers of clients that engines get to see.
const PASSED_ON: [&str; 4] = ["traceparent", "tracestate", "x-session-id", "accept-language"];

/// What is known of a request before its body.
#[derive(Debug)]
pub(crate) struct Head {
    /// The client's name for it: for logs, traces and the answer.
    pub(crate) request_id: String,
    /// Engines' name for it. Names in use are errors there, and requests can be aborted by them: so no client chooses one.
    pub(crate) engine_id: String,
    pub(crate) session: Option<u64>,
    pub(crate) started: Instant,
    /// When its time is over.
    pub(crate) deadline: Option<Instant>,
    /// The other end of its connection.
    pub(crate) peer: Option<PeerAddr>,
    pub(crate) traced: Tracing,
    /// For engines.
    pub(crate) headers: HeaderMap,
}

impl Head {
    fn new(request: &Request) -> Self {
        let headers = request.headers();
        let passed = PASSED_ON.iter().filter_map(|&name| {
            let value = headers.get(name)?.clone();
            Some((axum::http::HeaderName::from_static(name), value))
        });
        let engine_id = fresh_id();
        let request_id = own_id(headers).map_or_else(|| engine_id.clone(), str::to_owned);
        if request_id != engine_id {
            tracing::debug!(request = request_id, engine_id, "a request with a name of its own");
        }
        Self {
            request_id,
            engine_id,
            session: session_of(headers),
            started: Instant::now(),
            deadline: None,
            peer: peer_of(request).cloned(),
            traced: None,
            headers: passed.collect(),
        }
    }

    /// Begins the request's time and its trace.
    fn begin(&mut self, gateway: &Gateway, headers: &HeaderMap) -> Result<(), ApiError> {
        let time = time_of(headers, gateway.tuning().request_time_max)?;
        self.deadline = time.map(|time| self.started + time);
        if let Some(tracer) = &gateway.tracer {
            self.traced = traced::begin(tracer, headers, &mut self.headers, self.started);
        }
        Ok(())
    }
}

/// How long a request may take: what its client wants, but no more than the operator allows.
fn time_of(headers: &HeaderMap, most: Duration) -> Result<Option<Duration>, ApiError> {
    /// Longer ones are none; so that adding it to a time cannot overflow.
    const MOST_MS: u64 = 7 * 24 * 3600 * 1000;
    let most = (!most.is_zero()).then_some(most);
    let Some(given) = headers.get(TIMEOUT) else { return Ok(most) };
    let millis = given.to_str().ok().and_then(|text| text.trim().parse::<u64>().ok()).filter(|ms| *ms > 0);
    let Some(millis) = millis else {
        return Err(ApiError::invalid(
            TIMEOUT,
            format!("The header `{TIMEOUT}` is a number of milliseconds."),
        ));
    };
    let wanted = (millis <= MOST_MS).then(|| Duration::from_millis(millis));
    Ok(wanted.into_iter().chain(most).min())
}

/// The client's own id, if it is plain enough for logs and headers.
fn own_id(headers: &HeaderMap) -> Option<&str> {
    let given = headers.get("x-request-id").and_then(|id| id.to_str().ok());
    given.filter(|id| HeaderPolicy::default().request_id(id) == Decision::Pass)
}

/// An answer with the name of a request that got no further.
pub(crate) fn named(headers: &HeaderMap, mut response: Response) -> Response {
    name(&mut response, &own_id(headers).map_or_else(fresh_id, str::to_owned), false);
    response
}

fn name(response: &mut Response, request_id: &str, is_anthropic: bool) {
    let Ok(value) = HeaderValue::from_str(request_id) else { return };
    if is_anthropic {
        response.headers_mut().insert("request-id", value.clone());
    }
    response.headers_mut().insert("x-request-id", value);
}

/// The conversation that a request belongs to, as vLLM's clients name it.
fn session_of(headers: &HeaderMap) -> Option<u64> {
    let name = headers.get("x-session-id")?.as_bytes();
    let letters: Vec<u32> = name.iter().map(|&letter| u32::from(letter)).collect();
    Some(kvstore_block::block_hash(&letters))
}

/// A route of the OpenAI surface.
#[derive(Debug, Clone, Copy)]
struct Route {
    path: &'static str,
    surface: Surface,
    name: &'static str,
}

impl Route {
    fn body(self) -> BodyKind {
        if self.surface == Surface::Chat { BodyKind::Messages } else { BodyKind::Prompts }
    }
}

const CHAT: Route = Route { path: "/v1/chat/completions", surface: Surface::Chat, name: "chat" };
const COMPLETIONS: Route =
    Route { path: "/v1/completions", surface: Surface::Completion, name: "completions" };
const EMBEDDINGS: Route = Route { path: "/v1/embeddings", surface: Surface::Other, name: "embeddings" };
const MESSAGES: Route = Route { name: "messages", ..CHAT };
const RESPONSES: Route = Route { name: "responses", ..CHAT };
/// Counting tokens, in logs and metrics.
const COUNT: &str = "count_tokens";
const KSERVE: Route = Route { name: "kserve", ..COMPLETIONS };

pub(crate) async fn chat(State(gateway): State<Arc<Gateway>>, request: Request) -> Response {
    serve(gateway, request, CHAT).await
}

pub(crate) async fn completions(State(gateway): State<Arc<Gateway>>, request: Request) -> Response {
    serve(gateway, request, COMPLETIONS).await
}

pub(crate) async fn embeddings(State(gateway): State<Arc<Gateway>>, request: Request) -> Response {
    serve(gateway, request, EMBEDDINGS).await
}

pub(crate) async fn messages(State(gateway): State<Arc<Gateway>>, request: Request) -> Response {
    serve(gateway, request, MESSAGES).await
}

pub(crate) async fn responses(State(gateway): State<Arc<Gateway>>, request: Request) -> Response {
    serve(gateway, request, RESPONSES).await
}

pub(crate) async fn kserve(State(gateway): State<Arc<Gateway>>, request: Request) -> Response {
    serve(gateway, request, KSERVE).await
}

/// How many tokens a messages request would have; nothing is generated.
pub(crate) async fn messages_count(State(gateway): State<Arc<Gateway>>, request: Request) -> Response {
    let mut head = Head::new(&request);
    let counted = async {
        head.begin(&gateway, request.headers())?;
        let counted = async {
            let entered = Stay::enter(&gateway, request.headers(), COUNT, &head);
            let mut stay = entered.map_err(|(mut stay, error)| {
                stay.answered(error.status, error.code);
                error
            })?;
            let counted = count(&gateway, request, &mut stay).await;
            match &counted {
                Ok(_) => stay.answered(StatusCode::OK, None),
                Err(error) => stay.answered(error.status, error.code),
            }
            counted.map(count_answer)
        };
        in_time(&gateway, head.deadline, counted).await
    };
    let mut response = counted.await.unwrap_or_else(|error| Tongue::error(true, &error));
    gateway.metrics.requests.count(COUNT, response.status());
    name(&mut response, &head.request_id, true);
    response
}

async fn count(gateway: &Arc<Gateway>, request: Request, stay: &mut Stay) -> Result<usize, ApiError> {
    let (bytes, footprint) = read(gateway, request, BodyKind::Messages).await?;
    let work = gateway.work(bytes.len(), &footprint).await?;
    let access = Arc::clone(gateway);
    let counted = move |_: IsCancelled<'_>| {
        let message = RawBody::parse(bytes.clone())?;
        access.access.screen(&message)?;
        Ok::<_, ApiError>((RawBody::parse(count_request(&parse(&bytes)?)?)?, message))
    };
    let (mut chat, mut message) = work.run(counted).await??;
    drop(work);
    let asked = chat.text("model")?.map(std::borrow::Cow::into_owned);
    stay.allow(asked.as_deref())?;
    let patience = gateway.tuning().worker_wait;
    let target = gateway.target(asked.as_deref(), None, patience).await?;
    stay.allow_target(asked.as_deref(), &target)?;
    target.name_in(&mut chat)?;
    target.name_in(&mut message)?;
    let work = gateway.work(chat.len(), &footprint).await?;
    let seen = prompt::of_chat(&target.model, &chat, &work).await?;
    drop(work);
    if seen.is_exact {
        return Ok(seen.tokens.len());
    }
    if has_media(&chat) {
        let why = "The request is not only text: only generating tells how many tokens it has.";
        return Err(ApiError::new(StatusCode::NOT_FOUND, why, "not_available"));
    }
    gateway.access.clean(&mut chat, &stay.grant);
    gateway.access.clean(&mut message, &stay.grant);
    count_at_engine(&target, &chat.to_bytes(), &message.to_bytes()).await
}

/// Asks engines until one counts: those of one make answer the same.
async fn count_at_engine(target: &Target, chat: &Bytes, message: &Bytes) -> Result<usize, ApiError> {
    /// An engine that is slower is given up.
    const WITHIN: Duration = Duration::from_secs(10);
    const ENGINES_ASKED_MAX: usize = 3;
    let roster = Arc::clone(&target.model.pool.roster());
    let adapter = target.adapter.as_deref();
    let able = roster.iter().filter(|rank| rank.is_ready() && rank.serves(adapter));
    let able = able.filter_map(|rank| Some((rank, rank.run.description.engine.dialect().token_count()?)));
    let mut failure = None;
    for (rank, how) in able.take(ENGINES_ASKED_MAX) {
        let body = match how {
            TokenCount::Tokenize => chat,
            TokenCount::Messages => message,
        };
        let asked = rank.worker.client.count_tokens(how, body.clone());
        match tokio::time::timeout(WITHIN, asked).await {
            Ok(Ok(count)) => return Ok(count),
            // A release without that path.
            Ok(Err(EngineError::Refused(error))) if error.status == StatusCode::NOT_FOUND => {}
            Ok(Err(EngineError::Refused(error))) if error.status.is_client_error() => return Err(error),
            Ok(Err(error)) => failure = Some(error.to_string()),
            Err(_) => failure = Some(format!("{}: no answer within {WITHIN:?}", rank.run.name)),
        }
    }
    if let Some(failure) = failure {
        tracing::debug!(failure, "no engine counted the tokens of a prompt");
        return Err(ApiError::unavailable("The engines did not count the tokens."));
    }
    let message = "This gateway has no tokenizer of this model, and its engines count no tokens of chats: set \
                   `gateway.model_folder`.";
    Err(ApiError::new(StatusCode::NOT_FOUND, message, "not_available"))
}

async fn serve(gateway: Arc<Gateway>, request: Request, route: Route) -> Response {
    let is_anthropic = route.name == MESSAGES.name;
    let mut head = Head::new(&request);
    let answered = match head.begin(&gateway, request.headers()) {
        Ok(()) => in_time(&gateway, head.deadline, answer(&gateway, request, route, &head)).await,
        Err(error) => Err(error),
    };
    let mut response = match answered {
        Ok(response) => response,
        Err(error) => Tongue::error(is_anthropic, &error),
    };
    gateway.metrics.requests.count(route.name, response.status());
    name(&mut response, &head.request_id, is_anthropic);
    response
}

/// An answer, or that its time is over; then everything that was done for it is dropped.
async fn in_time(
    gateway: &Gateway,
    deadline: Option<Instant>,
    answered: impl Future<Output = Result<Response, ApiError>>,
) -> Result<Response, ApiError> {
    let Some(deadline) = deadline else { return answered.await };
    match tokio::time::timeout_at(deadline.into(), answered).await {
        Ok(answered) => answered,
        Err(_) => {
            gateway.metrics.late.inc();
            Err(time_is_over())
        }
    }
}

async fn answer(
    gateway: &Arc<Gateway>,
    request: Request,
    route: Route,
    head: &Head,
) -> Result<Response, ApiError> {
    let entered = Stay::enter(gateway, request.headers(), route.name, head);
    let mut stay = match entered {
        Ok(stay) => stay,
        Err((mut stay, error)) => {
            stay.answered(error.status, error.code);
            return Err(error);
        }
    };
    let taken = async {
        let (bytes, footprint) = read(gateway, request, route.body()).await?;
        let (raw, looks) = (bytes.clone(), Arc::clone(gateway));
        // Before anything is translated, so that complaints name the client's own fields.
        let screened = move |_: IsCancelled<'_>| {
            let body = RawBody::parse(raw)?;
            looks.access.screen(&body)?;
            Ok::<_, ApiError>(body)
        };
        let body = gateway.pass(bytes.len(), &footprint).run(screened).await??;
        let taken = match route.name {
            "messages" => {
                drop(body);
                translated(gateway, bytes, &footprint, Tongue::of_messages).await?
            }
            "responses" => {
                drop(body);
                translated(gateway, bytes, &footprint, Tongue::of_responses).await?
            }
            _ => (body, None),
        };
        Ok((taken, footprint))
    };
    let (body, tongue) = match taken.await {
        Ok((taken, footprint)) => {
            stay.footprint = footprint;
            taken
        }
        Err(error) => {
            let error: ApiError = error;
            stay.answered(error.status, error.code);
            return Err(error);
        }
    };
    let answered = answer_body(gateway, body, route, head, stay).await?;
    let answered = until(gateway, head.deadline, answered);
    match tongue {
        None => Ok(answered),
        Some(tongue) => Ok(tongue.answer(answered).await),
    }
}

/// A request of another surface as a chat. The client's own bytes are given up.
async fn translated(
    gateway: &Gateway,
    bytes: Bytes,
    footprint: &Footprint,
    translate: fn(&serde_json::Value) -> Result<(Bytes, Tongue), ApiError>,
) -> Result<(RawBody, Option<Tongue>), ApiError> {
    let work = gateway.work(bytes.len(), footprint).await?;
    let translated = move |_: IsCancelled<'_>| {
        let (chat, tongue) = translate(&parse(&bytes)?)?;
        Ok::<_, ApiError>((RawBody::parse(chat)?, tongue))
    };
    let (chat, tongue) = work.run(translated).await??;
    Ok((chat, Some(tongue)))
}

async fn answer_body(
    gateway: &Arc<Gateway>,
    mut body: RawBody,
    route: Route,
    head: &Head,
    mut stay: Box<Stay>,
) -> Result<Response, ApiError> {
    let aimed = async {
        let asked = body.text("model")?.map(std::borrow::Cow::into_owned);
        stay.allow(asked.as_deref())?;
        let patience = gateway.tuning().worker_wait;
        let target = gateway.target(asked.as_deref(), head.session, patience).await?;
        stay.allow_target(asked.as_deref(), &target)?;
        target.name_in(&mut body)?;
        Ok::<_, ApiError>(target)
    };
    let target = match aimed.await {
        Ok(target) => target,
        Err(error) => {
            stay.answered(error.status, error.code);
            return Err(error);
        }
    };
    let answered = match makes_text(gateway, &target, &body, route.surface) {
        true => match route.surface {
            Surface::Chat => generate(gateway, target, &body.to_bytes(), head, Kind::Chat, stay).await,
            Surface::Completion => {
                generate(gateway, target, &body.to_bytes(), head, Kind::Completion, stay).await
            }
            Surface::Other => {
                let message = "The engines behind this gateway do not do this.";
                Err((stay, ApiError::new(StatusCode::NOT_IMPLEMENTED, message, "not_implemented")))
            }
        },
        false => match relayed(gateway, target, body, route, head, &mut stay).await {
            Ok(request) => relay(gateway, request, stay).await,
            Err(error) => Err((stay, error)),
        },
    };
    answered.map_err(|(mut stay, error)| {
        stay.answered(error.status, error.code);
        error
    })
}

/// Whether the gateway makes the text of this answer.
fn makes_text(gateway: &Gateway, target: &Target, body: &RawBody, surface: Surface) -> bool {
    let pool = &target.model.pool;
    // Adapters are the engines' own.
    if target.adapter.is_some() {
        return false;
    }
    match gateway.config.text {
        TextBy::Auto => pool.is_native(),
        TextBy::Engine => false,
        TextBy::Gateway => {
            let is_made_here = || pool.is_native() || is_only_text(body);
            surface != Surface::Other && pool.speaks_ids() && is_made_here()
        }
    }
}

/// Whether a request is for text and nothing that only an engine can do: a field that is not known here may mean
/// something to it.
fn is_only_text(body: &RawBody) -> bool {
    let is_plain = |name: &str, plain: &[&str]| match body.option(name) {
        None => body.get(name).is_none(),
        Some(value) => {
            value.as_str().or_else(|| value["type"].as_str()).is_some_and(|is| plain.contains(&is))
        }
    };
    body.names().all(|name| KNOWN_FIELDS.contains(&name))
        && is_plain("response_format", &["text"])
        && is_plain("tool_choice", &["auto", "none"])
        && !has_media(body)
}

/// Whether a message of a chat has a part that is no text.
fn has_media(body: &RawBody) -> bool {
    ["\"image_url\"", "\"input_audio\"", "\"video_url\""]
        .iter()
        .any(|part| body.get("messages").is_some_and(|messages| messages.contains(part)))
}

async fn relayed(
    gateway: &Gateway,
    target: Target,
    mut body: RawBody,
    route: Route,
    head: &Head,
    stay: &mut Stay,
) -> Result<RelayRequest, ApiError> {
    let footprint = stay.footprint.clone();
    gateway.access.clean(&mut body, &stay.grant);
    let stream = body.flag("stream")?.unwrap_or(false) && route.surface != Surface::Other;
    // Nobody else needs the clock.
    let traced = head.traced.as_ref().map(|traced| (traced, Instant::now()));
    let seen = match route.surface {
        Surface::Other => prompt::Seen::default(),
        surface => {
            // What it takes is given back before the request waits for its place.
            let work = gateway.work(body.len(), &footprint).await?;
            match surface {
                Surface::Chat => prompt::of_chat(&target.model, &body, &work).await?,
                _ => prompt::of_completion(&target.model, &body, &work).await?,
            }
        }
    };
    stay.holds(held_bytes(body.len(), seen.tokens.len()));
    if let Some((traced, since)) = traced {
        traced.span(names::span::TOKENISE, since, Vec::new());
    }
    let hides_usage = stream && !body.inner_flag("stream_options", "include_usage");
    if hides_usage {
        let mut options = body.option("stream_options").filter(serde_json::Value::is_object);
        let options = options.get_or_insert_with(|| serde_json::json!({}));
        options["include_usage"] = true.into();
        body.set("stream_options", options.to_string());
    }
    // Engines read whole numbers that are written as floats.
    let number = |name: &str| {
        let number = body.option(name)?.as_f64()?;
        (number >= 0.0).then_some(number as u64)
    };
    let limits: &[&str] = match route.surface {
        Surface::Completion => &["max_tokens"],
        _ => &["max_completion_tokens", "max_tokens"],
    };
    let answer_max = limits.iter().find_map(|name| number(name)).filter(|_| route.surface != Surface::Other);
    let answer_max = answer_max.map(|most| most as usize);
    let choices = number("n").unwrap_or(1).max(number("best_of").unwrap_or(1)).max(1);
    let choices = choices.saturating_mul(seen.prompts.max(1));
    let all_tokens = seen.tokens.len().saturating_mul(seen.prompts.max(1) as usize);
    stay.admit(&target.model.gate, all_tokens, answer_max, choices as usize).await?;
    let is_one = |name: &str| body.get(name).is_none_or(|count| count == "1");
    let several = route.surface == Surface::Completion && body.get("prompt").is_some_and(has_several);
    Ok(RelayRequest {
        path: route.path,
        surface: route.surface,
        prompt_tokens: seen.is_exact.then_some(seen.tokens.len()),
        tokens: seen.tokens,
        request_id: head.request_id.clone(),
        engine_id: head.engine_id.clone(),
        explains: gateway.access.explains(&stay.grant),
        headers: head.headers.clone(),
        session: head.session,
        salt: body.text("cache_salt")?.map(std::borrow::Cow::into_owned),
        target,
        stream,
        can_split: route.surface != Surface::Other
            && body.get("use_beam_search").is_none()
            && is_one("n")
            && is_one("best_of")
            && !several,
        hides_usage,
        body,
        started: head.started,
        traced: head.traced.clone(),
        attempts: AtomicU32::new(0),
    })
}

/// Whether a prompt is an array of prompts.
fn has_several(raw: &str) -> bool {
    let inner = raw.strip_prefix('[').map(str::trim_start);
    inner.is_some_and(|inner| inner.starts_with(['[', '"']))
}
