//! The stages of a request, each a type that only the previous stage can make: `Received`, `Identified`
//! (the caller is known), `Loaded` (the body is in charged memory), `Resolved` (the model is known),
//! `Tokenized`, `Admitted` (the gate admitted the request). Routing and answering follow in `upstream` and
//! `answer`.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Instant;

use axum::body::Bytes;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use futures_util::StreamExt;
use router_openai::responses::StoredFields;
use router_openai::{
    ApiError, Entries, FORM_USAGE, KNOWN_FIELDS, Kind, RawBody, Surface, Usage, take_prompt_cache_retention,
};
use router_trace::names;

use super::body::{BodyKind, read};
use super::{RequestContext, form, prompt};
use crate::TextSource;
use crate::answer::buffered::Buffered;
use crate::answer::generated::TokenRequest;
use crate::answer::relayed::{PromptTokens, Relayed, RelayedEvents};
use crate::answer::translate::{ResponseAdapter, parse};
use crate::answer::{Answer, explain};
use crate::caller::peer_of;
use crate::compute::IsCancelled;
use crate::memory::held_bytes;
use crate::models::Target;
use crate::service::Gateway;
use crate::stored::history::History;
use crate::stored::responses::ResponseRecord;
use crate::stored::runner::DelegatedGrant;
use crate::upstream::{
    Attempts, EngineRequest, EventStream, Generation, attempt_buffered, attempt_headers_only,
};

/// Bytes of a body that count as one token where the prompt's tokens are unknown.
const BYTES_PER_TOKEN: usize = 4;
/// Bytes of a recording that count as one token: MP3 of 64 kbit/s has 8,000 bytes a second, which count as
/// [`Usage::TOKENS_PER_SECOND`].
const RECORDING_BYTES_PER_TOKEN: usize = 8_000 / Usage::TOKENS_PER_SECOND as usize;

/// The head of the request was read.
pub(super) struct Received(pub(super) Request);

/// The caller was authenticated, and its request charged to its limits.
pub(super) struct Identified(Request);

/// The body was read, and is small enough to be parsed.
pub(super) struct Loaded {
    pub(super) bytes: Bytes,
    /// The boundary of its parts, when it is a form.
    boundary: Option<String>,
}

/// The body was parsed, screened and translated; the model is known.
pub(super) struct Resolved {
    body: RawBody,
    target: Target,
    adapter: Option<ResponseAdapter>,
}

/// The prompt was turned into tokens.
pub(super) struct Tokenized {
    prepared: Prepared,
    adapter: Option<ResponseAdapter>,
}

/// The gate admitted the request.
pub(super) struct Admitted(Tokenized);

/// A request in the form that is sent to engines.
enum Prepared {
    Relayed(Box<RelayedRequest>),
    Generated(Box<TokenRequest>),
}

/// A request whose answer the engine formats itself.
struct RelayedRequest {
    target: Target,
    request: Arc<EngineRequest>,
    salt: Option<String>,
    stream: bool,
    /// A prefill worker may compute the prompt: there is one prompt and one choice.
    can_split: bool,
    /// The gateway added `stream_options.include_usage`: the usage event is taken out of the client's stream.
    hides_usage: bool,
    /// Tokens of all prompts, choices of each, and the largest number of tokens of an answer.
    prompt_tokens: usize,
    choices: usize,
    answer_max: Option<usize>,
}

impl Received {
    pub(super) fn identify(self, context: &mut RequestContext) -> Result<Identified, ApiError> {
        let acts_for = self.0.extensions().get::<DelegatedGrant>().map(|acts| Arc::clone(&acts.0));
        context.identify(self.0.headers(), peer_of(&self.0), acts_for)?;
        Ok(Identified(self.0))
    }
}

impl Identified {
    pub(super) async fn load(self, context: &mut RequestContext) -> Result<Loaded, ApiError> {
        let boundary = match context.surface.takes_recording() {
            true => Some(form::boundary_of(self.0.headers())?),
            false => None,
        };
        let kind = match context.surface.kind() {
            _ if boundary.is_some() => BodyKind::Form,
            Some(Kind::Chat) => BodyKind::Messages,
            _ => BodyKind::Prompts,
        };
        let bytes_max = context.gateway.config.body_bytes_max;
        let (bytes, footprint) = read(&context.gateway, self.0, kind, bytes_max).await?;
        context.footprint = footprint;
        Ok(Loaded { bytes, boundary })
    }
}

impl Loaded {
    pub(super) async fn resolve(mut self, context: &mut RequestContext) -> Result<Resolved, ApiError> {
        let gateway = Arc::clone(&context.gateway);
        let (raw, looks, surface) = (self.bytes.clone(), Arc::clone(&gateway), context.surface);
        let boundary = self.boundary.take();
        // Before the translation, so that errors name the client's own fields.
        let screened = move |_: IsCancelled<'_>| {
            let body = match boundary {
                Some(boundary) => form::parse(raw, boundary)?,
                None => RawBody::parse(raw)?,
            };
            looks.access.screen(&body, surface)?;
            Ok::<_, ApiError>(body)
        };
        let body = gateway.pass(self.bytes.len(), &context.footprint).run(screened).await??;
        let (mut body, adapter) = match context.surface {
            Surface::Messages => {
                drop(body);
                let translate = |request| ResponseAdapter::of_messages(&request);
                self.translate(context, 0, translate).await?
            }
            Surface::Responses => self.translate_response(context, body).await?,
            _ => {
                drop(self);
                (body, None)
            }
        };
        let asked = body.text("model")?.map(Cow::into_owned);
        context.allow(asked.as_deref())?;
        let patience = gateway.tuning().worker_wait;
        let target = gateway.target(asked.as_deref(), context.session, patience).await?;
        context.allow_target(asked.as_deref(), &target)?;
        target.name_in(&mut body)?;
        // An external service gets the client's own field unchanged; a field made from `cache_control` is
        // not passed to it.
        if !is_outside(&target) || context.surface == Surface::Messages {
            context.retain_for = take_prompt_cache_retention(&mut body)?;
        }
        Ok(Resolved { body, target, adapter })
    }

    /// Translates a request for a response to a chat, with the items from which it continues.
    async fn translate_response(
        self,
        context: &mut RequestContext,
        body: RawBody,
    ) -> Result<(RawBody, Option<ResponseAdapter>), ApiError> {
        let gateway = Arc::clone(&context.gateway);
        let Some(stored) = gateway.stored.clone() else {
            drop(body);
            return self.translate(context, 0, |request| ResponseAdapter::of_responses(&request)).await;
        };
        let fields = StoredFields::read(&body)?;
        drop(body);
        let tenant = Arc::clone(&context.grant.tenant);
        let room = gateway.config.body_bytes_max.saturating_sub(self.bytes.len());
        let history = History::read(&gateway, &stored, &tenant, &fields, room).await?;
        let bytes = history.bytes;
        context.footprint.work_bytes += history.work_bytes;
        let all_bytes = self.bytes.len() + bytes;
        if !context.resize_memory_charge(held_bytes(all_bytes, all_bytes / BYTES_PER_TOKEN)) && bytes > 0 {
            return Err(gateway.memory_in_use());
        }
        let id = format!("resp_{}", context.engine_id);
        let is_stored = ResponseRecord::is_wanted(&gateway, &fields);
        let record = is_stored.then(|| {
            let (fields, input) = (fields.clone(), Vec::new());
            Box::new(ResponseRecord { gateway: Arc::clone(&gateway), stored, tenant, id, fields, input })
        });
        let translate = move |request| {
            let (items, _place) = history.into_items()?;
            ResponseAdapter::of_stored_responses(request, items, &fields, record, |whole| {
                gateway.access.screen(whole, Surface::Responses)
            })
        };
        self.translate(context, bytes, translate).await
    }

    /// Translates a request of another API to a chat. The client's own bytes are dropped; the added bytes
    /// come from stored items.
    async fn translate(
        self,
        context: &mut RequestContext,
        more_bytes: usize,
        translate: impl FnOnce(serde_json::Value) -> Result<(Bytes, ResponseAdapter), ApiError> + Send + 'static,
    ) -> Result<(RawBody, Option<ResponseAdapter>), ApiError> {
        let work = context.gateway.work(self.bytes.len() + more_bytes, &context.footprint).await?;
        let translated = move |_: IsCancelled<'_>| {
            let (chat, adapter) = translate(parse(&self.bytes)?)?;
            Ok::<_, ApiError>((RawBody::parse(chat)?, adapter))
        };
        let (chat, adapter) = work.run(translated).await??;
        Ok((chat, Some(adapter)))
    }
}

impl Resolved {
    /// Lets the guardrail check the request and change it.
    pub(super) async fn check(mut self, context: &RequestContext) -> Result<Self, ApiError> {
        if let Some(guardrail) = &context.gateway.guardrail
            && context.surface.is_computed()
        {
            let (body, replaced) = guardrail.request(context, self.body).await?;
            self.body = body;
            if let (Some(adapter), Some(replaced)) = (&mut self.adapter, replaced) {
                adapter.replace_input(&replaced);
            }
        }
        Ok(self)
    }

    pub(super) async fn tokenize(self, context: &mut RequestContext) -> Result<Tokenized, ApiError> {
        let Self { body, target, adapter } = self;
        let kind = context.surface.kind();
        let is_unseen = context.is_headers_only();
        let checks_answers =
            context.gateway.guardrail.as_ref().is_some_and(|guardrail| guardrail.checks_answers());
        if is_unseen && (adapter.is_some() || checks_answers) {
            let message = "The proxy in front does not show answers, which this request needs (response_body_mode FULL_DUPLEX_STREAMED).";
            return Err(ApiError::new(StatusCode::NOT_IMPLEMENTED, message, "not_implemented"));
        }
        let is_made_here = |_: &Kind| !is_unseen && gateway_detokenizes(&context.gateway, &target, &body);
        let prepared = match kind.filter(is_made_here) {
            Some(kind) => {
                let bytes = body.to_bytes();
                let len = bytes.len();
                let request = TokenRequest::read(context, &target.model, bytes, kind).await?;
                if context.proxy_dispatch.is_some() && request.choices() > 1 {
                    let message =
                        "Several choices or prompts need several requests, and the proxy in front sends one.";
                    return Err(ApiError::new(StatusCode::NOT_IMPLEMENTED, message, "not_implemented"));
                }
                context.resize_memory_charge(held_bytes(len, request.prompt_tokens()));
                Prepared::Generated(Box::new(request))
            }
            None if kind.is_none() && target.model.pool.is_native() => {
                let message = "The engines behind this gateway do not serve this path.";
                return Err(ApiError::new(StatusCode::NOT_IMPLEMENTED, message, "not_implemented"));
            }
            None => Prepared::Relayed(Box::new(RelayedRequest::read(context, target, body).await?)),
        };
        Ok(Tokenized { prepared, adapter })
    }
}

impl RelayedRequest {
    async fn read(context: &mut RequestContext, target: Target, mut body: RawBody) -> Result<Self, ApiError> {
        let gateway = Arc::clone(&context.gateway);
        gateway.access.clean(&mut body, &context.grant);
        let kind = context.surface.kind();
        let can_stream = kind.is_some() || context.surface.takes_recording();
        let stream = body.flag("stream")?.unwrap_or(false) && can_stream;
        if stream && context.surface.takes_recording() && is_outside(&target) {
            // The events have another form than engines' and could be neither counted nor checked.
            let message = "`stream` must be false for this model: the service behind it streams transcriptions in a form of its own.";
            return Err(ApiError::invalid("stream", message));
        }
        // The time is only measured for the trace.
        let since = context.traced.is_some().then(Instant::now);
        let seen = match kind {
            None => prompt::PromptTokens::default(),
            Some(kind) => {
                // The working memory is released before the request waits at the gate.
                let work = gateway.work(body.len(), &context.footprint).await?;
                match kind {
                    Kind::Chat => prompt::of_chat(&target.model, &body, &work).await?,
                    Kind::Completion => prompt::of_completion(&target.model, &body, &work).await?,
                }
            }
        };
        context.resize_memory_charge(held_bytes(body.len(), seen.tokens.len()));
        if let (Some(traced), Some(since)) = (&context.traced, since) {
            traced.span(names::span::TOKENISE, since, Vec::new());
        }
        let hides_usage = stream && !context.is_headers_only() && add_usage(&mut body, context.surface)?;
        // Engines accept whole numbers that are written as floats.
        let number = |name: &str| {
            let number = body.option(name)?.as_f64()?;
            (number >= 0.0).then_some(number as u64)
        };
        let limits: &[&str] = match kind {
            None => &[],
            Some(Kind::Completion) => &["max_tokens"],
            Some(Kind::Chat) => &["max_completion_tokens", "max_tokens"],
        };
        let answer_max = limits.iter().find_map(|name| number(name)).map(|most| most as usize);
        let choices = number("n").unwrap_or(1).max(number("best_of").unwrap_or(1)).max(1);
        let choices = choices.saturating_mul(seen.prompts.max(1));
        // A prompt that cannot be tokenized counts by its length, so that it does not bypass limits.
        let prompt_tokens = match seen.tokens.len() {
            0 if context.surface.takes_recording() => body.len() / RECORDING_BYTES_PER_TOKEN,
            0 if context.surface.is_computed() => body.len() / BYTES_PER_TOKEN,
            tokens => tokens.saturating_mul(seen.prompts.max(1) as usize),
        };
        let is_one = |name: &str| body.get(name).is_none_or(|count| count == "1");
        let several = kind == Some(Kind::Completion) && body.get("prompt").is_some_and(has_several);
        let can_split = kind.is_some()
            && body.get("use_beam_search").is_none()
            && is_one("n")
            && is_one("best_of")
            && !several;
        let salt = body.text("cache_salt")?.map(Cow::into_owned);
        let request = EngineRequest { body, tokens: Arc::new(seen.tokens), tokens_are_exact: seen.is_exact };
        Ok(Self {
            target,
            request: Arc::new(request),
            salt,
            stream,
            can_split,
            hides_usage,
            prompt_tokens,
            choices: choices as usize,
            answer_max,
        })
    }

    async fn answer(self, context: &mut RequestContext) -> Result<Answer, ApiError> {
        let mut generation = context.generation(self.target, context.surface.engine_path());
        generation.salt = self.salt;
        generation.can_split = self.can_split;
        let generation = Arc::new(generation);
        if context.is_headers_only() {
            return answer_headers_only(&generation, &self.request, context).await;
        }
        if !self.stream {
            return answer_buffered(&generation, &self.request, context).await;
        }
        let prompt_tokens = self.request.tokens_are_exact.then_some(self.request.tokens.len());
        let output = Relayed::new(
            context.surface.kind(),
            &self.request,
            PromptTokens { exact: prompt_tokens, counted: self.prompt_tokens },
            self.hides_usage,
        );
        let mut stream = EventStream::new(&generation, self.request, output);
        match stream.next().await {
            Some(Ok(first)) => {
                let explained = stream.route().and_then(|route| generation.explained(route));
                Ok(Answer::Relayed(Box::new(RelayedEvents::new(stream, first)), explained))
            }
            Some(Err(failed)) => refused(failed.failure.into_answer(&generation)?, context),
            None => Err(ApiError::internal("The engine answered without an event.")),
        }
    }
}

/// Requests an answer that is not streamed.
async fn answer_buffered(
    generation: &Arc<Generation>,
    request: &Arc<EngineRequest>,
    context: &mut RequestContext,
) -> Result<Answer, ApiError> {
    let attempt =
        |route, booking| attempt_buffered(Arc::clone(generation), Arc::clone(request), route, booking);
    let answered = match Attempts::default().run(generation, request, attempt).await {
        Ok(answered) => answered,
        Err(failure) => return refused(failure.into_answer(generation)?, context),
    };
    context.first_token();
    match &answered.usage {
        Some(usage) => context.record_usage(usage),
        None if context.surface.is_computed() => context.record_estimate(),
        None => {}
    }
    context.answered(StatusCode::OK, None);
    let mut response = Buffered::new(answered.body);
    response.headers_mut().insert(header::CONTENT_TYPE, answered.content_type);
    explain(&mut response, generation.explained(&answered.route));
    Ok(Answer::Buffered(response))
}

/// Has a proxy send a request, and waits for the end of its answer, which the proxy does not show.
async fn answer_headers_only(
    generation: &Arc<Generation>,
    request: &Arc<EngineRequest>,
    context: &mut RequestContext,
) -> Result<Answer, ApiError> {
    let attempt =
        |route, booking| attempt_headers_only(Arc::clone(generation), Arc::clone(request), route, booking);
    if let Err(failure) = Attempts::default().run(generation, request, attempt).await {
        return refused(failure.into_answer(generation)?, context);
    }
    context.record_headers_only();
    context.answered(StatusCode::OK, None);
    Ok(Answer::Buffered(Buffered::new(Bytes::new())))
}

/// Relays the engine's own response to a request that the engine refused.
fn refused(response: Buffered, context: &mut RequestContext) -> Result<Answer, ApiError> {
    context.answered(response.status(), Some("refused_by_engine"));
    Ok(Answer::Buffered(response))
}

impl Tokenized {
    pub(super) async fn admit(self, context: &mut RequestContext) -> Result<Admitted, ApiError> {
        let (model, prompt_tokens, answer_max, choices) = match &self.prepared {
            Prepared::Relayed(request) => {
                (&request.target.model, request.prompt_tokens, request.answer_max, request.choices)
            }
            Prepared::Generated(request) => {
                (request.model(), request.prompt_tokens(), request.answer_max(), request.choices())
            }
        };
        let gate = Arc::clone(&model.gate);
        context.admit(&gate, prompt_tokens, answer_max, choices).await?;
        Ok(Admitted(self))
    }
}

impl Admitted {
    pub(super) async fn answer(
        self,
        context: &mut RequestContext,
    ) -> Result<(Answer, Option<ResponseAdapter>), ApiError> {
        let gateway = &context.gateway;
        gateway.retries.deposit(gateway.requests_inside());
        let answer = match self.0.prepared {
            Prepared::Relayed(request) => request.answer(context).await?,
            Prepared::Generated(request) => request.answer(context).await?,
        };
        Ok((answer, self.0.adapter))
    }
}

/// Makes the engine report its usage at the end of a stream; returns whether the client has not asked for
/// the usage.
fn add_usage(body: &mut RawBody, surface: Surface) -> Result<bool, ApiError> {
    if surface.takes_recording() {
        let is_hidden = body.flag(FORM_USAGE)? != Some(true);
        body.set(FORM_USAGE, "true");
        return Ok(is_hidden);
    }
    if body.inner_flag("stream_options", "include_usage") {
        return Ok(false);
    }
    let mut options = body.option("stream_options").filter(serde_json::Value::is_object);
    let options = options.get_or_insert_with(|| serde_json::json!({}));
    options["include_usage"] = true.into();
    body.set("stream_options", options.to_string());
    Ok(true)
}

/// Whether the model is served by an external service, which accepts only OpenAI's API.
fn is_outside(target: &Target) -> bool {
    let roster = target.model.pool.roster();
    roster.iter().any(|rank| !rank.run.description.engine.dialect().takes_extensions())
}

/// Whether the gateway makes the text of this answer.
fn gateway_detokenizes(gateway: &Gateway, target: &Target, body: &RawBody) -> bool {
    let pool = &target.model.pool;
    // Only engines know an adapter's vocabulary and template.
    if target.adapter.is_some() {
        return false;
    }
    match gateway.config.text {
        TextSource::Auto => pool.is_native(),
        TextSource::Engine => false,
        TextSource::Gateway => {
            let is_made_here = || pool.is_native() || is_only_text(body);
            pool.supports_token_ids() && is_made_here()
        }
    }
}

/// Whether a request needs only text that the gateway can make: a field unknown here may have a meaning for
/// the engine.
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

/// Whether a message of a chat has a part other than text.
pub(super) fn has_media(body: &RawBody) -> bool {
    let is_media =
        |name: &str| ["image_url", "input_audio", "video_url", "audio_url", "image", "video"].contains(&name);
    let messages = Entries::of(body.get("messages").unwrap_or_default());
    let contents = messages.flat_map(|message| Entries::of(message.value));
    let mut parts =
        contents.filter(|field| field.value.starts_with('[')).flat_map(|list| Entries::of(list.value));
    parts.any(|part| Entries::of(part.value).any(|field| field.name.is_some_and(|name| is_media(&name))))
}

/// Whether a prompt is an array of prompts.
fn has_several(raw: &str) -> bool {
    let inner = raw.strip_prefix('[').map(str::trim_start);
    inner.is_some_and(|inner| inner.starts_with(['[', '"']))
}
