//! Anthropic's messages API and OpenAI's responses API: a request is converted to a chat, and the chat's
//! answer back.

use std::collections::HashMap;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::http::response::Parts;
use axum::http::{StatusCode, header};
use axum::response::Response;
use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use http_body::{Body as HttpBody, Frame};
use router_openai::responses::StoredFields;
use router_openai::sse::{DONE, EventBuffer, data_of, events};
use router_openai::{ApiError, RawBody, anthropic, each_text, responses};
use serde_json::{Value, json};

use super::buffered::{Buffered, json_answer};
use crate::stored::responses::ResponseRecord;

/// Largest event that is translated.
const EVENT_BYTES_MAX: usize = 16 << 20;

/// Converts a chat's answer to another API; holds the facts of the request that this needs.
pub(crate) enum ResponseAdapter {
    Anthropic(anthropic::Facts),
    /// With the record under which the response is stored.
    Responses(responses::Facts, Option<Box<ResponseRecord>>),
}

enum Stream {
    Anthropic(Box<anthropic::Stream>),
    Responses(Box<responses::Stream>, Option<Box<ResponseRecord>>),
}

/// A complete answer, which may have to be stored before its client gets it.
pub(crate) enum Adapted {
    Done(Buffered),
    ToStore { head: Parts, response: Value, record: Box<ResponseRecord> },
}

impl Adapted {
    /// Stores the answer if necessary and returns it.
    pub(crate) async fn stored(self) -> Buffered {
        match self {
            Self::Done(answer) => answer,
            Self::ToStore { head, response, record } => with_json(&head, &record.save(response).await),
        }
    }
}

/// Returns JSON in place of the chat's body, under the same head.
fn with_json(head: &Parts, json: &Value) -> Buffered {
    let mut answer = json_answer(head.status, json.to_string());
    for (name, value) in &head.headers {
        if name != header::CONTENT_LENGTH && name != header::CONTENT_TYPE {
            answer.headers_mut().insert(name.clone(), value.clone());
        }
    }
    answer
}

pub(crate) fn parse(body: &[u8]) -> Result<Value, ApiError> {
    serde_json::from_slice(body)
        .map_err(|error| ApiError::malformed(format!("The body is not JSON: {error}.")))
}

impl ResponseAdapter {
    /// Converts a request to a chat, with the adapter for its answer.
    pub(crate) fn of_messages(request: &Value) -> Result<(Bytes, Self), ApiError> {
        let chat = anthropic::to_chat(request)?;
        Ok((chat.to_string().into(), Self::Anthropic(anthropic::Facts::of(request))))
    }

    pub(crate) fn of_responses(request: &Value) -> Result<(Bytes, Self), ApiError> {
        let chat = responses::to_chat(request)?;
        Ok((chat.to_string().into(), Self::Responses(responses::Facts::of(request), None)))
    }

    /// Converts a request that continues from these items; its response is stored if there is a record for
    /// it. The combined input is screened as if it had come in one piece: the rules may have changed since
    /// the items were stored.
    pub(crate) fn of_stored_responses(
        mut request: Value,
        items: Vec<Value>,
        fields: &StoredFields,
        mut record: Option<Box<ResponseRecord>>,
        screen: impl FnOnce(&RawBody) -> Result<(), ApiError>,
    ) -> Result<(Bytes, Self), ApiError> {
        let has_history = !items.is_empty();
        if has_history && !request["input"].is_null() {
            // Errors refer to positions of the client's own items.
            let mut alone = request.clone();
            StoredFields::apply(&mut alone, Vec::new());
            responses::to_chat(&alone)?;
        }
        if let Some(record) = &mut record {
            record.input =
                responses::input_items(&request, record.id.strip_prefix("resp_").unwrap_or(&record.id));
        }
        StoredFields::apply(&mut request, items);
        if has_history {
            screen(&RawBody::parse(request.to_string().into())?)?;
        }
        let chat = responses::to_chat(&request)?;
        let previous = fields.previous_response_id.as_deref();
        let facts = responses::Facts::of(&request);
        let facts = match &record {
            Some(record) => facts.stored(&record.id, previous, fields.conversation.as_deref()),
            None => facts.continuing(previous),
        };
        Ok((chat.to_string().into(), Self::Responses(facts, record)))
    }

    /// Applies a guardrail's replacements to the input that is stored. A text that the guardrail has not
    /// seen is not stored.
    pub(crate) fn replace_input(&mut self, replaced: &HashMap<String, String>) {
        let Self::Responses(_, Some(record)) = self else { return };
        for item in &mut record.input {
            each_text(item, &mut |text| *text = replaced.get(text).cloned().unwrap_or_default());
        }
    }

    /// Converts a chat's stream to a stream of this API.
    pub(crate) fn stream(self, chat: Response) -> Response {
        let stream = match self {
            Self::Anthropic(facts) => Stream::Anthropic(Box::new(anthropic::Stream::new(facts))),
            Self::Responses(facts, record) => {
                Stream::Responses(Box::new(responses::Stream::new(facts)), record)
            }
        };
        chat.map(|inner| {
            let buffer = EventBuffer::new(EVENT_BYTES_MAX);
            Body::new(Translated { inner, stream, buffer, storing: None, is_over: false })
        })
    }

    /// Converts a chat's answer to an answer of this API.
    pub(crate) fn buffered(self, chat: Buffered) -> Result<Adapted, ApiError> {
        let (head, bytes) = chat.into_parts();
        let answer: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        if head.status.is_success() && !answer["choices"].is_array() {
            let message = "The engine's answer is no chat completion.";
            return Err(ApiError::new(StatusCode::BAD_GATEWAY, message, "bad_answer"));
        }
        let body = match (self, head.status.is_success()) {
            (Self::Anthropic(facts), true) => anthropic::from_chat(&answer, &facts),
            (Self::Responses(facts, None), true) => responses::from_chat(&answer, &facts),
            (Self::Responses(facts, Some(record)), true) => {
                let response = responses::from_chat(&answer, &facts);
                return Ok(Adapted::ToStore { head, response, record });
            }
            (Self::Anthropic(_), false) => {
                let message = answer["error"]["message"].as_str().or_else(|| answer["message"].as_str());
                anthropic::error_body(head.status, message.unwrap_or("The request failed."))
            }
            (Self::Responses(..), false) => answer,
        };
        Ok(Adapted::Done(with_json(&head, &body)))
    }
}

/// A stream of another surface.
struct Translated {
    inner: Body,
    stream: Stream,
    buffer: EventBuffer,
    /// The response being written to the database; its client gets the completion event once it is stored.
    storing: Option<BoxFuture<'static, Value>>,
    is_over: bool,
}

impl Translated {
    fn take(&mut self, bytes: Bytes, out: &mut String) {
        let Ok(whole) = self.buffer.push(bytes) else {
            let error = json!({ "message": "An event is too large.", "type": "server_error" });
            return self.fail(&error, out);
        };
        for event in events(&whole) {
            let data = data_of(event);
            if data[..] == *DONE {
                match &mut self.stream {
                    Stream::Anthropic(stream) => stream.end(out),
                    Stream::Responses(stream, record) => match record.take() {
                        None => stream.end(out),
                        Some(record) => {
                            let response = stream.finish(out);
                            self.storing = response.map(|response| record.save(response).boxed());
                        }
                    },
                }
                self.is_over = self.storing.is_none();
                return;
            }
            // A ping has no data.
            if data.is_empty() {
                continue;
            }
            let Ok(chunk) = serde_json::from_slice::<Value>(&data) else {
                let error =
                    json!({ "message": "An event of the engine is not JSON.", "type": "server_error" });
                return self.fail(&error, out);
            };
            if let Some(error) = chunk.get("error").filter(|error| !error.is_null()) {
                return self.fail(error, out);
            }
            match &mut self.stream {
                Stream::Anthropic(stream) => stream.event(&chunk, out),
                Stream::Responses(stream, _) => stream.event(&chunk, out),
            }
        }
    }

    fn fail(&mut self, error: &Value, out: &mut String) {
        self.is_over = true;
        match &mut self.stream {
            Stream::Anthropic(stream) => stream.error(error, out),
            Stream::Responses(stream, _) => stream.error(error, out),
        }
    }
}

impl HttpBody for Translated {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let mut out = String::new();
        while out.is_empty() && !self.is_over {
            if let Some(storing) = &mut self.storing {
                let response = std::task::ready!(storing.as_mut().poll(context));
                if let Stream::Responses(stream, _) = &mut self.stream {
                    stream.complete(response, &mut out);
                }
                self.is_over = true;
                break;
            }
            match Pin::new(&mut self.inner).poll_frame(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some(Ok(frame))) => {
                    if let Ok(data) = frame.into_data() {
                        self.take(data, &mut out);
                    }
                }
                Poll::Ready(Some(Err(_)) | None) => {
                    let error = json!({ "message": "The stream broke off.", "type": "server_error" });
                    self.fail(&error, &mut out);
                }
            }
        }
        match out.is_empty() {
            true => Poll::Ready(None),
            false => Poll::Ready(Some(Ok(Frame::data(out.into())))),
        }
    }
}
