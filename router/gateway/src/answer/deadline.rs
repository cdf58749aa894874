//! A stream that ends when its request's time is over, with an error as its last event. Only requests that have a
//! deadline are wrapped so.
//!
//! A client that has stopped reading is not asked for more, so nobody would look at the clock: a task does, and drops the
//! stream with everything that was done for it; the error waits until the client reads again.

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

/// What a client is told then.
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
    /// Gone when the time is over, or the stream.
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
            // A body of ours that fails has told its client why.
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
