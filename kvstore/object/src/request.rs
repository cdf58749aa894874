//! One request to the store, within its bounds: the caller's deadline, the timeout of one attempt, the
//! requests in flight, the budget of retries, the breaker.
//!
//! A failure is classified by the status that the HTTP layer saw and by the variant of the client's error. The
//! error's text is dropped here: it may repeat what a server or a proxy sent.

use std::error::Error as _;
use std::time::Duration;

use object_store::Error as StoreError;
use tokio::time::{Instant, sleep, timeout_at};

use crate::backend::{LastStatus, SEEN};
use crate::error::{FailureCause, ObjectError, Operation};
use crate::metrics::add;
use crate::tier::ObjectTier;

/// A failed attempt.
struct Failure {
    cause: FailureCause,
    status: Option<u16>,
}

impl FailureCause {
    /// Whether the same request may succeed a little later.
    fn is_transient(self) -> bool {
        matches!(self, Self::SlowDown | Self::Server | Self::Connection | Self::Timeout | Self::Io(_))
    }

    /// Whether the failure is an answer of a working store.
    fn is_answer(self) -> bool {
        matches!(self, Self::NotFound | Self::Precondition | Self::NotImplemented | Self::OutOfRange)
    }
}

impl ObjectTier {
    /// Makes a request, and retries it if a retry may help and the budget allows it.
    pub(crate) async fn request<T, F>(
        &self,
        operation: Operation,
        key: &str,
        deadline: Instant,
        mut request: impl FnMut() -> F,
    ) -> Result<T, ObjectError>
    where
        F: Future<Output = object_store::Result<T>>,
    {
        let counters = &*self.counters;
        add(&counters.requests, 1);
        self.budget.deposit();
        let mut attempts = 0;
        loop {
            let failed = |cause, status| Err(self.error(operation, key, cause, status, attempts));
            let Ok(permit) = timeout_at(deadline, self.in_flight.acquire()).await else {
                add(&counters.deadlines, 1);
                return failed(FailureCause::Deadline, None);
            };
            let started = Instant::now();
            if started >= deadline {
                add(&counters.deadlines, 1);
                return failed(FailureCause::Deadline, None);
            }
            if !self.breaker.admits(started) {
                add(&counters.breaker_rejections, 1);
                return failed(FailureCause::BreakerOpen, None);
            }
            attempts += 1;
            let failure = match self.attempt(started, deadline, request()).await {
                Ok(value) => {
                    self.breaker.succeeded();
                    return Ok(value);
                }
                Err(failure) => failure,
            };
            drop(permit);
            if failure.cause.is_answer() {
                self.breaker.succeeded();
            } else {
                add(&counters.failures, 1);
                let hurried = failure.cause == FailureCause::Deadline
                    && started.elapsed() < self.config.breaker_wait_max;
                if !hurried && self.breaker.failed(Instant::now()) {
                    add(&counters.breaker_opened, 1);
                }
            }
            let pause = self.jitter.pause(self.config.backoff, self.config.backoff_max, attempts);
            let failed = |cause| Err(self.error(operation, key, cause, failure.status, attempts));
            if failure.cause == FailureCause::Deadline {
                add(&counters.deadlines, 1);
                return failed(failure.cause);
            }
            if !failure.cause.is_transient() || attempts >= self.config.attempts_max {
                return failed(failure.cause);
            }
            if Instant::now() + pause >= deadline {
                add(&counters.deadlines, 1);
                return failed(failure.cause);
            }
            if !self.budget.withdraw() {
                add(&counters.retries_denied, 1);
                return failed(failure.cause);
            }
            add(&counters.retries, 1);
            sleep(pause).await;
        }
    }

    async fn attempt<T>(
        &self,
        started: Instant,
        deadline: Instant,
        request: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T, Failure> {
        let limit = started + self.config.request_timeout;
        let observed = SEEN.scope(LastStatus::default(), async {
            let result = request.await;
            SEEN.with(|seen| result.map_err(|error| classify(&error, seen)))
        });
        match timeout_at(limit.min(deadline), observed).await {
            Ok(result) => result,
            Err(_) => {
                let cause = if deadline <= limit { FailureCause::Deadline } else { FailureCause::Timeout };
                Err(Failure { cause, status: None })
            }
        }
    }

    pub(crate) fn error(
        &self,
        operation: Operation,
        key: &str,
        cause: FailureCause,
        status: Option<u16>,
        attempts: u32,
    ) -> ObjectError {
        let bucket = self.backend.name.clone();
        ObjectError::Request { operation, bucket, key: key.to_owned(), status, cause, attempts }
    }
}

fn classify(error: &StoreError, seen: &LastStatus) -> Failure {
    let status = seen.status();
    let cause = match (status, error) {
        (Some(404), _) | (None, StoreError::NotFound { .. }) => FailureCause::NotFound,
        (Some(412), _) => FailureCause::Precondition,
        // Some stores answer 304 to If-None-Match; 409 reports a concurrent writer.
        (Some(304), _) => FailureCause::Precondition,
        (None, StoreError::AlreadyExists { .. } | StoreError::Precondition { .. }) => {
            FailureCause::Precondition
        }
        (Some(501), _) => FailureCause::NotImplemented,
        (Some(401 | 403), _) => FailureCause::Denied,
        (Some(416), _) => FailureCause::OutOfRange,
        (Some(429 | 503), _) => FailureCause::SlowDown,
        (Some(300..=399 | 400 | 402 | 405..=408 | 410..=428 | 430..=499), _) => FailureCause::Denied,
        (Some(200..=299), _) => FailureCause::Connection,
        (Some(_), _) => FailureCause::Server,
        (None, _) if seen.timed_out() => FailureCause::Timeout,
        (None, StoreError::PermissionDenied { .. } | StoreError::Unauthenticated { .. }) => {
            FailureCause::Denied
        }
        (None, error) => no_answer(error),
    };
    Failure { cause, status }
}

/// Classifies a failure without an HTTP status: a failed connection, or an error of the directory backend.
fn no_answer(error: &StoreError) -> FailureCause {
    let mut source = error.source();
    let mut http = false;
    while let Some(inner) = source {
        http |= inner.is::<object_store::client::HttpError>();
        if !http && let Some(io) = inner.downcast_ref::<std::io::Error>() {
            return match io.kind() {
                std::io::ErrorKind::NotFound => FailureCause::NotFound,
                std::io::ErrorKind::PermissionDenied => FailureCause::Denied,
                std::io::ErrorKind::UnexpectedEof => FailureCause::OutOfRange,
                _ => FailureCause::Io(io.raw_os_error().unwrap_or(0)),
            };
        }
        source = inner.source();
    }
    // The directory backend returns no I/O error when a range lies outside of a file that became shorter.
    let directory = matches!(error, StoreError::Generic { store, .. } if *store == "LocalFileSystem");
    if directory && !http { FailureCause::OutOfRange } else { FailureCause::Connection }
}

/// Returns the instant `limit` from now.
pub(crate) fn after(limit: Duration) -> Instant {
    Instant::now() + limit
}
