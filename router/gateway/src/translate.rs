//! Anthropic's messages and OpenAI's responses: each becomes a chat, and the chat's answer becomes theirs.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::http::{StatusCode, header};
use axum::response::Response;
use bytes::{Bytes, BytesMut};
use http_body::{Body as HttpBody, Frame};
use router_engines::openai::ApiError;
use router_surfaces::{Problem, anthropic, responses};
use serde_json::{Value, json};

use crate::relay::{data_of, events};
use crate::service::json_response;

/// Largest chat answer that is translated whole.
const ANSWER_BYTES_MAX: usize = 64 << 20;

/// One of the two, with what its answer needs to know of the request.
#[derive(Debug, Clone)]
pub(crate) enum Tongue {
    Anthropic(anthropic::Facts),
    Responses(responses::Facts),
}

enum Stream {
    Anthropic(Box<anthropic::Stream>),
    Responses(Box<responses::Stream>),
}

fn invalid(problem: Problem) -> ApiError {
    match problem.param {
        Some(param) => ApiError::invalid(&param, problem.message),
        None => ApiError::malformed(problem.message),
    }
}

pub(crate) fn parse(body: &[u8]) -> Result<Value, ApiError> {
    serde_json::from_slice(body)
        .map_err(|error| ApiError::malformed(format!("The body is not JSON: {error}.")))
}

impl Tongue {
    /// A request as a chat, and how to answer it.
    pub(crate) fn of_messages(request: &Value) -> Result<(Bytes, Self), ApiError> {
        let chat = anthropic::to_chat(request).map_err(invalid)?;
        Ok((chat.to_string().into(), Self::Anthropic(anthropic::Facts::of(request))))
    }

    pub(crate) fn of_responses(request: &Value) -> Result<(Bytes, Self), ApiError> {
        let chat = responses::to_chat(request).map_err(invalid)?;
        Ok((chat.to_string().into(), Self::Responses(responses::Facts::of(request))))
    }

    fn stream(self) -> Stream {
        match self {
            Self::Anthropic(facts) => Stream::Anthropic(Box::new(anthropic::Stream::new(facts))),
            Self::Responses(facts) => Stream::Responses(Box::new(responses::Stream::new(facts))),
        }
    }

    /// An error in this tongue. Responses have the shape of all of OpenAI's.
    pub(crate) fn error(is_anthropic: bool, error: &ApiError) -> Response {
        let mut response = crate::service::error_response(error);
        if is_anthropic {
            let body = anthropic::error_body(error.status, &error.message);
            *response.body_mut() = Body::from(body.to_string());
        }
        response
    }

    /// A chat's answer as an answer of this tongue.
    pub(crate) async fn answer(self, chat: Response) -> Response {
        let is_stream = chat.headers().get(header::CONTENT_TYPE);
        let is_stream = is_stream.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
        let (head, body) = chat.into_parts();
        if is_stream && head.status == StatusCode::OK {
            let translated =
                Translated { inner: body, stream: self.stream(), partial: BytesMut::new(), is_over: false };
            return Response::from_parts(head, Body::new(translated));
        }
        let Ok(bytes) = axum::body::to_bytes(body, ANSWER_BYTES_MAX).await else {
            let error = ApiError::internal("The answer broke off.");
            return Self::error(matches!(self, Self::Anthropic(_)), &error);
        };
        let answer: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        let body = match (&self, head.status.is_success()) {
            (Self::Anthropic(facts), true) => anthropic::from_chat(&answer, facts),
            (Self::Responses(facts), true) => responses::from_chat(&answer, facts),
            (Self::Anthropic(_), false) => {
                let message = answer["error"]["message"].as_str().or_else(|| answer["message"].as_str());
                anthropic::error_body(head.status, message.unwrap_or("The request failed."))
            }
            (Self::Responses(_), false) => answer,
        };
        let mut response = json_response(head.status, body.to_string());
        for (name, value) in &head.headers {
            if name != header::CONTENT_LENGTH && name != header::CONTENT_TYPE {
                response.headers_mut().insert(name.clone(), value.clone());
            }
        }
        response
    }
}

/// How many tokens a messages request has.
pub(crate) fn count_request(request: &Value) -> Result<Bytes, ApiError> {
    anthropic::to_chat_for_count(request).map(|chat| chat.to_string().into()).map_err(invalid)
}

pub(crate) fn count_answer(tokens: usize) -> Response {
    json_response(StatusCode::OK, anthropic::count_answer(tokens as u64).to_string())
}

/// A stream in another tongue.
struct Translated {
    inner: Body,
    stream: Stream,
    partial: BytesMut,
    is_over: bool,
}

impl Translated {
    fn take(&mut self, bytes: &[u8], out: &mut String) {
        self.partial.extend_from_slice(bytes);
        let end = memchr::memmem::rfind(&self.partial, b"\n\n").map(|at| at + 2);
        let Some(end) = end.max(memchr::memmem::rfind(&self.partial, b"\r\n\r\n").map(|at| at + 4)) else {
            return;
        };
        let whole = self.partial.split_to(end);
        for event in events(&whole) {
            let data = data_of(event);
            if data == b"[DONE]" {
                self.is_over = true;
                match &mut self.stream {
                    Stream::Anthropic(stream) => stream.end(out),
                    Stream::Responses(stream) => stream.end(out),
                }
                return;
            }
            let Ok(chunk) = serde_json::from_slice::<Value>(data) else { continue };
            if chunk.get("error").is_some() {
                return self.fail(&chunk["error"], out);
            }
            match &mut self.stream {
                Stream::Anthropic(stream) => stream.event(&chunk, out),
                Stream::Responses(stream) => stream.event(&chunk, out),
            }
        }
    }

    fn fail(&mut self, error: &Value, out: &mut String) {
        self.is_over = true;
        match &mut self.stream {
            Stream::Anthropic(stream) => stream.error(error, out),
            Stream::Responses(stream) => stream.error(error, out),
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
            match Pin::new(&mut self.inner).poll_frame(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some(Ok(frame))) => {
                    if let Some(data) = frame.data_ref() {
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
