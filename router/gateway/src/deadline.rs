//! A stream that ends when its request's time is over, with an error as its last event. Only requests that have a
//! deadline are wrapped so.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use axum::body::{Body, Bytes};
use axum::http::{StatusCode, header};
use axum::response::Response;
use http_body::{Body as HttpBody, Frame};
use router_engines::openai::ApiError;
use router_surfaces::anthropic;
use tokio::time::Sleep;

use crate::Gateway;

/// What a client is told then.
pub(crate) fn time_is_over() -> ApiError {
    ApiError::new(
        StatusCode::GATEWAY_TIMEOUT,
        "The request was not answered within its time.",
        "deadline_exceeded",
    )
}

/// Ends a streamed answer at its deadline.
pub(crate) fn until(
    gateway: &Arc<Gateway>,
    deadline: Instant,
    is_anthropic: bool,
    response: Response,
) -> Response {
    let kind = response.headers().get(header::CONTENT_TYPE);
    if !kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream")) {
        return response;
    }
    let (head, inner) = response.into_parts();
    let sleep = Box::pin(tokio::time::sleep_until(deadline.into()));
    let body = Timed { gateway: Arc::clone(gateway), inner: Some(inner), sleep, is_anthropic };
    Response::from_parts(head, Body::new(body))
}

struct Timed {
    gateway: Arc<Gateway>,
    /// Gone when the time is over, and with it everything that was done for it.
    inner: Option<Body>,
    sleep: Pin<Box<Sleep>>,
    is_anthropic: bool,
}

impl HttpBody for Timed {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        let Some(inner) = &mut this.inner else { return Poll::Ready(None) };
        if let Poll::Ready(frame) = Pin::new(inner).poll_frame(context) {
            // A body of ours that fails has told its client why.
            return Poll::Ready(frame.and_then(Result::ok).map(Ok));
        }
        if this.sleep.as_mut().poll(context).is_pending() {
            return Poll::Pending;
        }
        this.inner = None;
        this.gateway.metrics.late.inc();
        let error = time_is_over();
        let event = if this.is_anthropic {
            format!("event: error\ndata: {}\n\n", anthropic::error_body(error.status, &error.message))
        } else {
            format!("data: {}\n\n", error.to_json())
        };
        Poll::Ready(Some(Ok(Frame::data(event.into()))))
    }
}
