//! Failures of an attempt: the reason, the worker at fault, and the client's error when no further attempt
//! is made.

use std::time::{Duration, Instant};

use axum::http::{HeaderValue, StatusCode, header};
use bytes::Bytes;
use router_engines::client::refusal;
use router_engines::dialect::Engine;
use router_engines::upstream::UpstreamError;
use router_fleet::{RankRef, Route};
use router_openai::ApiError;
use serde_json::Value;

use super::Generation;
use crate::answer::buffered::Buffered;

/// Whether an engine reports overload rather than an error.
fn is_busy(status: StatusCode) -> bool {
    matches!(status.as_u16(), 408 | 425 | 429 | 503 | 529)
}

/// Whether an engine reports, in vLLM's words, that it does not serve this model.
fn lacks_model(body: &[u8], model: &str) -> bool {
    let Ok(answer) = serde_json::from_slice::<Value>(body) else { return false };
    // vLLM before 0.10 has the message at the top level.
    let message = &answer.get("error").unwrap_or(&answer)["message"];
    message.as_str().is_some_and(|text| text.contains(&format!("The model `{model}` does not exist")))
}

/// An engine's response with an error status.
#[derive(Debug)]
pub(super) struct Refusal {
    pub(super) status: StatusCode,
    pub(super) content_type: Option<HeaderValue>,
    pub(super) body: Bytes,
}

/// A failed attempt.
#[derive(Debug)]
pub(crate) struct Failure {
    /// Description that names the worker.
    pub(crate) reason: String,
    pub(crate) blames_prefill: bool,
    /// Counts against the worker, for the circuit breaker.
    pub(crate) is_workers: bool,
    /// The worker could not be reached, or its connection broke off.
    pub(crate) is_connection: bool,
    /// A retry on another worker may succeed.
    pub(crate) is_retryable: bool,
    /// The worker no longer serves the model that it last reported: it is another run.
    is_other_model: bool,
    refusal: Option<Box<Refusal>>,
    /// Error for the client, where no worker failed.
    error: Option<Box<ApiError>>,
}

impl Failure {
    fn of_worker(reason: String) -> Self {
        Self {
            reason,
            blames_prefill: false,
            is_workers: true,
            is_connection: false,
            is_retryable: true,
            is_other_model: false,
            refusal: None,
            error: None,
        }
    }

    pub(super) fn connection(error: &UpstreamError) -> Self {
        Self { is_connection: true, ..Self::of_worker(error.to_string()) }
    }

    /// A proxy that was to send the request returned no answer, or only part of it. The cause may be the
    /// proxy's client, so no worker is blamed.
    pub(super) fn of_proxy(reason: String) -> Self {
        Self { is_workers: false, is_retryable: false, ..Self::of_worker(reason) }
    }

    pub(super) fn protocol(rank: &RankRef, reason: impl std::fmt::Display) -> Self {
        Self::of_worker(format!("{}: {reason}", rank.run.name))
    }

    pub(super) fn hung(rank: &RankRef) -> Self {
        Self { is_connection: true, ..Self::protocol(rank, "it does not answer") }
    }

    /// The worker went silent in the middle of an answer.
    pub(super) fn stalled(rank: &RankRef, reason: impl std::fmt::Display) -> Self {
        Self { is_connection: true, ..Self::protocol(rank, reason) }
    }

    /// No first token in time for a request that was sent to the worker at `sent`. A queue is not the
    /// engine's fault, and a queued request may still be computed: only a worker that reports no request at
    /// all has lost this one.
    pub(super) fn late(rank: &RankRef, limit: Duration, sent: Instant) -> Self {
        let is_lost = rank.run.reported.is_idle_since(sent);
        let reason = format!("no answer within {} ms", limit.as_millis());
        Self { is_workers: is_lost, is_retryable: is_lost, ..Self::protocol(rank, reason) }
    }

    /// The prefill worker died while its blocks were being fetched.
    pub(super) fn gone(prefill: &RankRef) -> Self {
        let reason = "the prefill worker disconnected before its blocks were transferred";
        Self { is_connection: true, ..Self::protocol(prefill, reason) }.of_prefill()
    }

    /// The engine refused the request. A fault in the request remains on any other worker.
    pub(super) fn refused(rank: &RankRef, refusal: Refusal) -> Self {
        let (busy, status) = (is_busy(refusal.status), refusal.status);
        let failed = Self::protocol(rank, format!("it answered {status}"));
        // The key is the gateway's, not the client's: the client cannot correct it and must not see it.
        if status == StatusCode::UNAUTHORIZED || status == StatusCode::PROXY_AUTHENTICATION_REQUIRED {
            return failed;
        }
        // The worker reported that it serves its pool's model, and has been restarted since: its answer is
        // not relayed. An adapter that was unloaded is the client's concern, as is an error of a service
        // outside the cluster.
        let is_own = rank.run.description.engine != Engine::OpenAi;
        let model = rank.worker.pool.model();
        if status == StatusCode::NOT_FOUND && is_own && lacks_model(&refusal.body, &model) {
            let reason = "it no longer serves the model";
            return Self { is_workers: false, is_other_model: true, ..Self::protocol(rank, reason) };
        }
        Self {
            is_workers: status.is_server_error() && !busy,
            is_retryable: busy || status.is_server_error(),
            refusal: Some(Box::new(refusal)),
            ..failed
        }
    }

    /// The answer exceeds the size limit. It would be as large on another worker.
    pub(super) fn too_large(rank: &RankRef, bytes_max: usize) -> Self {
        let reason = format!("an answer of more than {bytes_max} bytes");
        Self { is_workers: false, is_retryable: false, ..Self::protocol(rank, reason) }
    }

    /// No worker was available.
    pub(super) fn without_worker(error: ApiError) -> Self {
        let reason = error.message.clone();
        Self {
            is_workers: false,
            is_retryable: false,
            error: Some(Box::new(error)),
            ..Self::of_worker(reason)
        }
    }

    #[must_use]
    pub(super) fn of_prefill(mut self) -> Self {
        self.blames_prefill = true;
        self
    }

    /// A failure of another endpoint than the picked one blames no worker.
    #[must_use]
    pub(super) fn unattributed_if(self, is_elsewhere: bool) -> Self {
        Self {
            is_workers: self.is_workers && !is_elsewhere,
            is_other_model: self.is_other_model && !is_elsewhere,
            ..self
        }
    }

    /// Silence behind a proxy: a client that does not read, or does not end its body, looks the same from here, so no worker is
    /// blamed.
    #[must_use]
    pub(super) fn behind_proxy(self, is_behind_proxy: bool) -> Self {
        match is_behind_proxy {
            true => Self { is_workers: false, is_retryable: false, ..self },
            false => self,
        }
    }

    /// Returns the worker at fault.
    pub(super) fn at_fault<'a>(&self, route: &'a Route) -> &'a RankRef {
        match &route.prefill {
            Some(prefill) if self.blames_prefill => prefill,
            _ => &route.decode,
        }
    }

    /// Counts the failure against the worker at fault.
    pub(super) fn record_on_breaker(&self, route: &Route) {
        if self.is_other_model {
            self.at_fault(route).worker.mark_possibly_restarted();
        }
        if !self.is_workers {
            return;
        }
        let rank = self.at_fault(route);
        if rank.worker.breaker.failed(Instant::now()) {
            tracing::warn!(worker = rank.run.name, "circuit breaker opened after consecutive failures");
        }
        if self.is_connection {
            rank.worker.suspect();
        }
    }

    /// Converts the failure into the client's answer, with the engine's own response if it sent one.
    pub(crate) fn into_answer(self, generation: &Generation) -> Result<Buffered, ApiError> {
        let Some(refusal) = self.refusal.filter(|refusal| !refusal.body.is_empty()) else {
            return Err(self.error.map_or_else(|| generation.workers_failed(&self.reason), |error| *error));
        };
        let status = refusal.status;
        let mut response = Buffered::new(refusal.body);
        *response.status_mut() = status;
        let kind = refusal.content_type.unwrap_or(HeaderValue::from_static("application/json"));
        response.headers_mut().insert(header::CONTENT_TYPE, kind);
        if status == StatusCode::SERVICE_UNAVAILABLE || status == StatusCode::TOO_MANY_REQUESTS {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        Ok(response)
    }

    /// Converts the failure into an error of the gateway.
    pub(crate) fn into_error(self, generation: &Generation) -> ApiError {
        match (self.refusal, self.error) {
            (Some(refused), _) => refusal(refused.status, &refused.body),
            (None, Some(error)) => *error,
            (None, None) => generation.workers_failed(&self.reason),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::lacks_model;

    #[test]
    fn an_engine_that_lacks_the_model_itself_says_so_by_its_name() {
        let said = [
            // vLLM 0.10 and later, and before.
            r#"{"error":{"message":"The model `a` does not exist.","type":"NotFoundError","param":"model","code":404}}"#,
            r#"{"object":"error","message":"The model `a` does not exist.","type":"NotFoundError","param":null,"code":404}"#,
        ];
        said.iter().for_each(|body| assert!(lacks_model(body.as_bytes(), "a"), "{body}"));
        let other = [
            r#"{"error":{"message":"The model `adapter` does not exist.","param":"model","code":404}}"#,
            r#"{"error":{"message":"Response with id 'a' not found.","param":"response_id","code":404}}"#,
            r#"{"detail":"Not Found"}"#,
            "no JSON",
        ];
        other.iter().for_each(|body| assert!(!lacks_model(body.as_bytes(), "a"), "{body}"));
    }
}
