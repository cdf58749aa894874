//! A stream that ends at its request's deadline, with an error as its last event. Only requests that have a
//! deadline are wrapped.
//!
//! The body of a client that has stopped reading is not polled, so a task watches the deadline and drops
//! the stream with everything behind it; the error is delivered when the client reads again.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use axum::body::{Body, Bytes};
use axum::http::{StatusCode, header};
use axum::response::Response;
use http_body::{Body as HttpBody, Frame};
use router_openai::ApiError;
use tokio::task::JoinHandle;

use crate::Gateway;

/// Error code of a missed deadline.
pub(crate) const DEADLINE_EXCEEDED: &str = "deadline_exceeded";

/// Returns the client's error for a missed deadline.
pub(crate) fn deadline_error() -> ApiError {
    ApiError::new(
        StatusCode::GATEWAY_TIMEOUT,
        "The request was not answered within its time.",
        DEADLINE_EXCEEDED,
    )
}

/// Ends a streamed answer at its deadline, if there is one.
pub(crate) fn with_deadline(
    gateway: &Arc<Gateway>,
    deadline: Option<Instant>,
    response: Response,
) -> Response {
    let kind = response.headers().get(header::CONTENT_TYPE);
    let is_stream = kind.is_some_and(|kind| kind.as_bytes().starts_with(b"text/event-stream"));
    let Some(deadline) = deadline.filter(|_| is_stream) else { return response };
    let (head, inner) = response.into_parts();
    let shared = Arc::new(Mutex::new(Shared { inner: Some(inner), is_late: false, reader: None }));
    let (cell, gateway) = (Arc::clone(&shared), Arc::clone(gateway));
    let clock = tokio::spawn(async move {
        tokio::time::sleep_until(deadline.into()).await;
        let mut shared = cell.lock().unwrap_or_else(PoisonError::into_inner);
        let (gone, reader) = (shared.inner.take(), shared.reader.take());
        shared.is_late = gone.is_some();
        drop(shared);
        if gone.is_some() {
            gateway.metrics.late.inc();
        }
        drop(gone);
        if let Some(reader) = reader {
            reader.wake();
        }
    });
    Response::from_parts(head, Body::new(Timed { shared, clock }))
}

struct Shared {
    /// The answer; `None` once the deadline has passed or the stream has ended.
    inner: Option<Body>,
    is_late: bool,
    reader: Option<Waker>,
}

struct Timed {
    shared: Arc<Mutex<Shared>>,
    clock: JoinHandle<()>,
}

impl Drop for Timed {
    fn drop(&mut self) {
        self.clock.abort();
    }
}

impl HttpBody for Timed {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::replace(&mut shared.is_late, false) {
            let event = deadline_error().to_event();
            return Poll::Ready(Some(Ok(Frame::data(event))));
        }
        let Some(inner) = &mut shared.inner else { return Poll::Ready(None) };
        match Pin::new(inner).poll_frame(context) {
            // A body of the gateway has told its client the reason before it fails.
            Poll::Ready(frame) => {
                let frame = frame.and_then(Result::ok);
                if frame.is_none() {
                    shared.inner = None;
                }
                Poll::Ready(frame.map(Ok))
            }
            Poll::Pending => {
                shared.reader = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}
