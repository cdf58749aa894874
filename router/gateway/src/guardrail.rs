//! A service that checks requests and answers (a guardrail), by LiteLLM's Generic Guardrail API: the
//! gateway sends it texts, and it passes them, replaces them, or blocks the request.
//!
//! A request is checked when its model is known, as the chat or the prompt that engines will get, so that
//! all APIs are checked alike. An answer is checked as a whole; a stream is held back until its end. Source
//! of the format: <https://docs.litellm.ai/docs/adding_provider/generic_guardrail_api>.

use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{StatusCode, header};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use http_body::{Body as HttpBody, Frame};
use router_engines::client::EngineClient;
use router_engines::key::ApiKey;
use router_engines::upstream::Upstream;
use router_openai::sse::{DONE, data_of, events};
use router_openai::{
    ApiError, RawBody, TEXT_FIELDS, each_text_of_field, has_token_ids, media, replace_texts_of_answer,
    texts_of_answer,
};
use router_tls::ClientTls;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::answer::buffered::Buffered;
use crate::compute::IsCancelled;
use crate::memory::Footprint;
use crate::metrics::Metrics;
use crate::request::RequestContext;
use crate::service::Gateway;

/// URL path of the guardrail API.
const PATH: &str = "/beta/litellm_basic_guardrail_api";
/// Largest stream that is held back.
const HELD_BYTES_MAX: usize = 16 << 20;
/// Largest text of one check. A verdict repeats the text, with escapes up to three times as long, and is
/// read up to 8 MiB.
const TEXT_BYTES_MAX: usize = 2 << 20;

/// Every checked text of a request, with the text that takes its place (the same where the guardrail did not change it).
pub(crate) type Replaced = HashMap<String, String>;

/// Settings of the service.
#[derive(Debug, Clone)]
pub struct GuardrailConfig {
    /// URL of the guardrail, without the path.
    pub url: String,
    /// Bearer key that the guardrail expects.
    pub key: Option<ApiKey>,
    /// Whether requests are checked.
    pub requests: bool,
    /// Whether answers are checked.
    pub answers: bool,
    /// Longest wait for the guardrail's verdict.
    pub timeout: Duration,
    /// Whether contents pass while the guardrail fails; else they are refused with 503.
    pub passes_on_failure: bool,
}

#[derive(Debug)]
pub(crate) struct Guardrail {
    client: EngineClient,
    config: GuardrailConfig,
}

/// The guardrail's answer.
#[derive(Deserialize)]
struct Verdict {
    action: Action,
    blocked_reason: Option<String>,
    texts: Option<Vec<String>>,
    images: Option<Value>,
}

#[derive(Deserialize)]
enum Action {
    #[serde(rename = "NONE")]
    Pass,
    #[serde(rename = "BLOCKED")]
    Block,
    #[serde(rename = "GUARDRAIL_INTERVENED")]
    Replace,
}

fn is_json(answer: &Buffered) -> bool {
    let kind = answer.headers().get(header::CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/json"))
}

fn unreadable() -> ApiError {
    let message = "The engine's answer cannot be checked: it is not JSON.";
    ApiError::new(StatusCode::BAD_GATEWAY, message, "bad_answer")
}

/// The request of a check.
#[derive(Debug, Clone)]
pub(crate) struct Subject {
    footprint: Footprint,
    request_id: String,
    key: Arc<str>,
    tenant: Arc<str>,
}

impl Subject {
    fn of(context: &RequestContext) -> Self {
        let grant = &context.grant;
        Self {
            footprint: context.footprint.clone(),
            request_id: context.request_id.clone(),
            key: Arc::clone(&grant.name),
            tenant: Arc::clone(&grant.tenant),
        }
    }
}

/// Parses a field. Engines may accept what this parser rejects (halves of surrogate pairs, very long
/// numbers): such a field is refused, since it would reach them unchecked.
fn checkable(body: &RawBody, name: &str) -> Result<Option<Value>, ApiError> {
    let Some(text) = body.get(name) else { return Ok(None) };
    let value = serde_json::from_str(text);
    value.map(Some).map_err(|error| ApiError::invalid(name, format!("`{name}` cannot be checked: {error}.")))
}

/// The texts of a request that a model reads.
#[derive(Default)]
struct RequestTexts {
    fields: Vec<(&'static str, Value)>,
    texts: Vec<String>,
    images: Vec<String>,
}

impl RequestTexts {
    fn of(body: &RawBody) -> Result<Self, ApiError> {
        let mut this = Self::default();
        for name in TEXT_FIELDS {
            let Some(mut value) = checkable(body, name)? else { continue };
            if has_token_ids(&value) {
                let message = format!("`{name}` must be text: token ids cannot be checked.");
                return Err(ApiError::invalid(name, message));
            }
            each_text_of_field(name, &mut value, &mut |text| this.texts.push(text.clone()));
            this.images.extend(media(&value).into_iter().map(str::to_owned));
            this.fields.push((name, value));
        }
        Ok(this)
    }

    /// Replaces the texts in the body.
    fn replaced(self, mut body: RawBody, texts: Vec<String>) -> RawBody {
        let mut texts = texts.into_iter();
        for (name, mut value) in self.fields {
            each_text_of_field(name, &mut value, &mut |text| {
                if let Some(other) = texts.next() {
                    *text = other;
                }
            });
            body.set(name, value.to_string());
        }
        body
    }
}

impl Guardrail {
    pub(crate) fn new(config: GuardrailConfig, tls: Option<&Arc<ClientTls>>) -> Self {
        let upstream = Upstream::with_key(&config.url, tls, config.key.as_ref());
        Self { client: EngineClient::over(&upstream), config }
    }

    /// Checks a request; returns the body for engines, and the replacement of every checked text; `None` when the
    /// guardrail replaced nothing.
    pub(crate) async fn request(
        &self,
        context: &RequestContext,
        body: RawBody,
    ) -> Result<(RawBody, Option<Replaced>), ApiError> {
        if !self.config.requests {
            return Ok((body, None));
        }
        let work = context.gateway.work(body.len(), &context.footprint).await?;
        let read = move |_: IsCancelled<'_>| {
            let tools = checkable(&body, "tools")?;
            RequestTexts::of(&body).map(|texts| (body, texts, tools))
        };
        let (body, mut found, tools) = work.run(read).await??;
        let asked = json!({ "images": found.images, "tools": tools });
        let (before, subject) = (std::mem::take(&mut found.texts), Subject::of(context));
        match self.check(&context.gateway.metrics, &subject, "request", &before, asked).await? {
            None => Ok((body, None)),
            Some(texts) => {
                let replace = move |_: IsCancelled<'_>| {
                    let replaced = before.into_iter().zip(texts.iter().cloned()).collect();
                    (found.replaced(body, texts), Some(replaced))
                };
                work.run(replace).await
            }
        }
    }

    /// Checks a chat completion or a completion.
    pub(crate) async fn answer(
        &self,
        context: &RequestContext,
        answer: Buffered,
    ) -> Result<Buffered, ApiError> {
        let is_text = context.surface.kind().is_some() || context.surface.takes_recording();
        if !self.config.answers || !answer.status().is_success() || !is_text {
            return Ok(answer);
        }
        let work = context.gateway.answer_work(answer.body(), &context.footprint).await?;
        let bytes = answer.body().clone();
        // A transcription may be plain text.
        let is_plain = context.surface.takes_recording() && !is_json(&answer);
        let parse = move |_: IsCancelled<'_>| match is_plain {
            true => std::str::from_utf8(&bytes).ok().map(|text| json!({ "text": text })),
            false => serde_json::from_slice(&bytes).ok(),
        };
        let mut whole = [work.run(parse).await?.ok_or_else(unreadable)?];
        let is_changed =
            self.check_answer(&context.gateway.metrics, &Subject::of(context), &mut whole).await?;
        let [whole] = whole;
        Ok(match (is_changed, whole) {
            (false, _) => answer,
            (true, Value::Object(mut whole)) if is_plain => match whole.remove("text") {
                Some(Value::String(text)) => answer.map(|_| text.into()),
                _ => return Err(unreadable()),
            },
            (true, whole) => answer.map(|_| whole.to_string().into()),
        })
    }

    /// Whether answers are checked.
    pub(crate) fn checks_answers(&self) -> bool {
        self.config.answers
    }

    /// Returns the request of a stream's check, if answers are checked.
    pub(crate) fn subject_of_stream(&self, context: &RequestContext) -> Option<Subject> {
        self.config.answers.then(|| Subject::of(context))
    }

    /// Holds a stream back until it is checked.
    pub(crate) fn stream(gateway: Arc<Gateway>, subject: Subject, inner: Body) -> Body {
        let state = State::Holding { inner, held: Vec::new() };
        Body::new(CheckedStream { gateway, subject, state })
    }

    /// Checks the pieces of an answer; returns whether they were changed.
    async fn check_answer(
        &self,
        metrics: &Metrics,
        subject: &Subject,
        pieces: &mut [Value],
    ) -> Result<bool, ApiError> {
        let found = texts_of_answer(pieces);
        let (places, texts): (Vec<_>, Vec<_>) = found.into_iter().unzip();
        match self.check(metrics, subject, "response", &texts, json!({})).await? {
            None => Ok(false),
            Some(texts) => {
                let texts: BTreeMap<_, _> = places.into_iter().zip(texts).collect();
                replace_texts_of_answer(pieces, texts);
                Ok(true)
            }
        }
    }

    /// Sends texts to the guardrail. `None` passes the texts, `Some` holds one replacement per text.
    async fn check(
        &self,
        metrics: &Metrics,
        subject: &Subject,
        kind: &str,
        texts: &[String],
        more: Value,
    ) -> Result<Option<Vec<String>>, ApiError> {
        let count = texts.len();
        if texts.iter().map(|text| text.len() + 4).sum::<usize>() > TEXT_BYTES_MAX {
            let message = "There is too much text to be checked.";
            return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message, "content_too_large"));
        }
        let mut asked = json!({
            "texts": texts,
            "input_type": kind,
            "litellm_call_id": subject.request_id,
            "request_data": { "user_api_key_alias": &*subject.key, "user_api_key_team_id": &*subject.tenant },
            "additional_provider_specific_params": {},
        });
        if let (Value::Object(asked), Value::Object(more)) = (&mut asked, more) {
            asked.extend(more.into_iter().filter(|(_, value)| !value.is_null()));
        }
        let call = self.client.post(PATH, asked.to_string().into());
        let verdict = match tokio::time::timeout(self.config.timeout, call).await {
            Ok(Ok(answer)) => serde_json::from_slice::<Verdict>(&answer).map_err(|error| error.to_string()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err(format!("no answer within {:?}", self.config.timeout)),
        };
        match verdict {
            Err(reason) => self.failed(metrics, &reason),
            Ok(Verdict { action: Action::Pass, .. }) => Ok(None),
            Ok(Verdict { action: Action::Replace, texts: Some(texts), images: None, .. })
                if texts.len() == count =>
            {
                metrics.guardrail_changed.inc();
                Ok(Some(texts))
            }
            Ok(Verdict { action: Action::Replace, .. }) => {
                self.failed(metrics, "it replaces something else than the texts that it got")
            }
            Ok(Verdict { action: Action::Block, blocked_reason, .. }) => {
                metrics.guardrail_blocked.inc();
                let message = blocked_reason.unwrap_or_else(|| "The content was blocked.".to_owned());
                Err(ApiError::new(StatusCode::BAD_REQUEST, message, "content_filter"))
            }
        }
    }

    /// Handles a failed guardrail: an error, unless unchecked contents may pass.
    fn failed(&self, metrics: &Metrics, reason: &str) -> Result<Option<Vec<String>>, ApiError> {
        metrics.guardrail_failed.inc();
        tracing::warn!(reason, url = self.config.url, "the guardrail failed");
        match self.config.passes_on_failure {
            true => Ok(None),
            false => Err(ApiError::unavailable("The content could not be checked.")),
        }
    }
}

enum State {
    Holding {
        inner: Body,
        held: Vec<u8>,
    },
    /// The body is kept, so that its request, with memory and place, ends after the check.
    Checking {
        checking: BoxFuture<'static, Bytes>,
        _inner: Body,
    },
    Over,
}

/// A stream that is held back until it is checked.
struct CheckedStream {
    gateway: Arc<Gateway>,
    subject: Subject,
    state: State,
}

/// Returns the JSON of events, without `[DONE]`; `None` when an event is not JSON.
fn pieces(events_of_stream: &[u8]) -> Option<Vec<Value>> {
    let data = events(events_of_stream).map(data_of);
    let told = data.filter(|data| !data.is_empty() && data[..] != *DONE);
    told.map(|data| serde_json::from_slice(&data).ok()).collect()
}

/// Returns the checked events of a stream.
async fn checked(gateway: Arc<Gateway>, subject: Subject, held: Bytes) -> Result<Bytes, ApiError> {
    let Some(guardrail) = &gateway.guardrail else { return Ok(held) };
    let work = gateway.answer_work(&held, &subject.footprint).await?;
    let all = held.clone();
    let Some(mut pieces) = work.run(move |_: IsCancelled<'_>| pieces(&all)).await? else {
        return Err(unreadable());
    };
    if !guardrail.check_answer(&gateway.metrics, &subject, &mut pieces).await? {
        return Ok(held);
    }
    let mut out = String::with_capacity(held.len());
    for piece in &pieces {
        out.push_str(&format!("data: {piece}\n\n"));
    }
    if events(&held).last().is_some_and(|last| data_of(last)[..] == *DONE) {
        out.push_str("data: [DONE]\n\n");
    }
    Ok(out.into())
}

impl HttpBody for CheckedStream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        let events = loop {
            match &mut this.state {
                State::Over => return Poll::Ready(None),
                State::Checking { checking, .. } => break ready!(checking.as_mut().poll(context)),
                State::Holding { inner, held } => {
                    if let Some(Ok(frame)) = ready!(Pin::new(inner).poll_frame(context)) {
                        let Ok(data) = frame.into_data() else { continue };
                        held.extend_from_slice(&data);
                        if held.len() > HELD_BYTES_MAX {
                            break ApiError::internal("The answer is too large to be checked.").to_event();
                        }
                        if !this.subject.footprint.resize(held.len()) {
                            break this.gateway.memory_in_use().to_event();
                        }
                        continue;
                    }
                    let State::Holding { inner, held } = std::mem::replace(&mut this.state, State::Over)
                    else {
                        return Poll::Ready(None);
                    };
                    let checking = checked(Arc::clone(&this.gateway), this.subject.clone(), held.into());
                    let checking =
                        checking.map(|checked| checked.unwrap_or_else(|error| error.to_event())).boxed();
                    this.state = State::Checking { checking, _inner: inner };
                }
            }
        };
        this.state = State::Over;
        Poll::Ready(Some(Ok(Frame::data(events))))
    }
}
