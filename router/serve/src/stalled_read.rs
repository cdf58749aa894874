//! The body of an answer, aborted when its client does not read it.
//!
//! HTTP/2 has flow control per call: a client that stops reading one leaves the connection as it is, and no write fails. Then
//! no further frame is polled, and the request would hold its place and its engine for ever. If the frame after a delivered
//! one is not polled in time, the answer is aborted: its source is dropped, and the client finds the call reset if it reads
//! again.
//!
//! While a poll waits for the backend's next frame, the time does not run.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, sleep_until};

/// Largest frame that is delivered: HTTP/2 keeps one for a client whose window is closed, without a time limit.
const FRAME_BYTES_MAX: usize = 16 << 10;

struct Shared {
    /// The source; `None` when it was aborted, or is complete.
    inner: Option<Body>,
    /// Rest of a frame that is larger than [`FRAME_BYTES_MAX`].
    rest: Bytes,
    /// Time at which the last frame was delivered, if no other was polled since.
    taken: Option<Instant>,
    is_given_up: bool,
}

/// An answer that is aborted when its next frame is not polled in time.
pub struct StalledReadBody {
    shared: Arc<Mutex<Shared>>,
    clock: JoinHandle<()>,
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl StalledReadBody {
    /// Aborts `inner` when no frame is polled within `limit` after the last delivered one.
    #[must_use]
    pub fn new(inner: Body, limit: Duration) -> Self {
        let shared = Shared {
            inner: Some(inner),
            rest: Bytes::new(),
            taken: Some(Instant::now()),
            is_given_up: false,
        };
        let shared = Arc::new(Mutex::new(shared));
        let clock = tokio::spawn(watch(Arc::clone(&shared), limit));
        Self { shared, clock }
    }
}

async fn watch(shared: Arc<Mutex<Shared>>, limit: Duration) {
    loop {
        let due = lock(&shared).taken.map(|taken| taken + limit);
        match due {
            None => sleep(limit).await,
            Some(due) if due > Instant::now() => sleep_until(due).await,
            Some(due) => {
                let mut shared = lock(&shared);
                // A frame may have been polled since the first check.
                if shared.taken.is_some_and(|taken| taken + limit <= due) {
                    shared.is_given_up = true;
                    shared.rest = Bytes::new();
                    let given_up = shared.inner.take();
                    drop(shared);
                    drop(given_up);
                    return;
                }
            }
        }
    }
}

impl Drop for StalledReadBody {
    fn drop(&mut self) {
        self.clock.abort();
    }
}

impl HttpBody for StalledReadBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let mut shared = lock(&self.shared);
        shared.taken = None;
        if std::mem::take(&mut shared.is_given_up) {
            return Poll::Ready(Some(Err(axum::Error::new("the answer was not read in time"))));
        }
        if shared.rest.is_empty() {
            let Some(inner) = &mut shared.inner else { return Poll::Ready(None) };
            match std::task::ready!(Pin::new(inner).poll_frame(context)) {
                None => {
                    shared.inner = None;
                    return Poll::Ready(None);
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(bytes) => shared.rest = bytes,
                    Err(other) => {
                        shared.taken = Some(Instant::now());
                        return Poll::Ready(Some(Ok(other)));
                    }
                },
            }
        }
        shared.taken = Some(Instant::now());
        let count = shared.rest.len().min(FRAME_BYTES_MAX);
        let piece = shared.rest.split_to(count);
        Poll::Ready(Some(Ok(Frame::data(piece))))
    }

    fn is_end_stream(&self) -> bool {
        let shared = lock(&self.shared);
        shared.rest.is_empty() && shared.inner.as_ref().map_or(!shared.is_given_up, HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let shared = lock(&self.shared);
        match &shared.inner {
            // A part of the announced body has been delivered.
            Some(inner) if shared.rest.is_empty() => inner.size_hint(),
            _ => SizeHint::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::future::poll_fn;

    use futures_util::{StreamExt, stream};

    use super::*;

    const LIMIT: Duration = Duration::from_millis(60);

    /// A body of `frames` frames that keeps a clone of `held` until it is dropped.
    fn body(frames: usize, held: &Arc<()>) -> Body {
        let held = Arc::clone(held);
        let frames = stream::iter(0..frames).map(move |_| {
            let _held = &held;
            Ok::<_, Infallible>("frame")
        });
        Body::from_stream(frames)
    }

    async fn next(body: &mut StalledReadBody) -> Option<Result<Frame<Bytes>, axum::Error>> {
        poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await
    }

    async fn freed(held: &Arc<()>) {
        let free = async {
            while Arc::strong_count(held) > 1 {
                sleep(LIMIT / 10).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), free).await.expect("given up");
    }

    #[tokio::test]
    async fn an_answer_that_is_not_read_is_given_up() {
        let held = Arc::new(());
        let mut stalled_read = StalledReadBody::new(body(1000, &held), LIMIT);
        assert!(next(&mut stalled_read).await.is_some_and(|frame| frame.is_ok()));
        freed(&held).await;
        assert!(next(&mut stalled_read).await.is_some_and(|frame| frame.is_err()));
        assert!(next(&mut stalled_read).await.is_none());
        // A body that is never read is aborted, too.
        let never = StalledReadBody::new(body(1, &held), LIMIT);
        freed(&held).await;
        drop(never);
    }

    #[tokio::test]
    async fn a_backend_that_takes_its_time_is_waited_for() {
        let held = Arc::new(());
        let slow = stream::once(async {
            sleep(LIMIT * 4).await;
            Ok::<_, Infallible>("late")
        });
        let mut stalled_read = StalledReadBody::new(Body::from_stream(slow), LIMIT);
        assert!(next(&mut stalled_read).await.is_some_and(|frame| frame.is_ok()));
        assert!(next(&mut stalled_read).await.is_none());
        // A body that is read to its end is freed, too.
        let mut stalled_read = StalledReadBody::new(body(100, &held), LIMIT);
        let mut frames = 0;
        while let Some(frame) = next(&mut stalled_read).await {
            frame.expect("a frame");
            frames += 1;
        }
        assert_eq!((frames, Arc::strong_count(&held)), (100, 1));
    }
}
