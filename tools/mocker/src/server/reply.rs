//! Responses with their headers.

use http::{HeaderValue, StatusCode, header};
use hyper::Response;

use super::answer::Payload;

pub(super) const JSON: HeaderValue = HeaderValue::from_static("application/json");
pub(super) const EVENT_STREAM: HeaderValue = HeaderValue::from_static("text/event-stream; charset=utf-8");
pub(super) const METRICS: HeaderValue = HeaderValue::from_static("text/plain; version=1.0.0; charset=utf-8");

/// A response of this kind.
pub(super) fn with(status: StatusCode, kind: HeaderValue, payload: Payload) -> Response<Payload> {
    let mut response = Response::new(payload);
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

/// A JSON answer.
pub(super) fn json(status: StatusCode, body: impl std::fmt::Display) -> Response<Payload> {
    with(status, JSON, Payload::from_text(body.to_string()))
}

/// 200 with bytes of some kind.
pub(super) fn bytes(kind: &'static str, bytes: Vec<u8>) -> Response<Payload> {
    with(StatusCode::OK, HeaderValue::from_static(kind), Payload::Whole(Some(bytes.into())))
}

/// 200 and nothing else.
pub(super) fn empty() -> Response<Payload> {
    Response::new(Payload::Whole(None))
}
