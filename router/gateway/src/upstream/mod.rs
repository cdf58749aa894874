//! From a request that is ready to the events of its answer, over as many workers as that takes.
//!
//! A [`Generation`] is asked for in attempts. Each attempt chooses workers (a [`Route`](router_fleet::Route)), asks one for
//! everything, or one for the prompt and one for the rest (legs), and follows the events of the leg that generates. Before the
//! first event has gone to the client a failed attempt starts over elsewhere; after it the answer goes on elsewhere, if its
//! [`Output`] can say how. All engines go this way; what their events are and how an answer is continued is the `Output`'s:
//! the engine's own events (`answer::relayed`), or token ids of which the text is made here (`answer::token_output`).
//!
//! Reading order: `attempts` (routes, retries, hedges), `dispatch` (asking workers), `leg` and `scanner` (what comes), `stream`
//! (following it over failures), `failure`. Everything runs in the task of the client's connection, so a client that goes away
//! drops it all, connections to engines included.

mod attempts;
mod dispatch;
mod failure;
mod leg;
mod scanner;
mod stream;

use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::http::{HeaderMap, HeaderValue};
use bytes::Bytes;
use router_engines::handover::Handover;
use router_fleet::{Route, WorkerRun};
use router_openai::{ApiError, RawBody, Surface};

pub(crate) use self::attempts::{Attempts, attempt_buffered, attempt_unseen};
pub(crate) use self::scanner::{EventBatch, Scanner};
pub(crate) use self::stream::{BrokenAnswer, Continuation, EventStream, Output, OutputStep};
use crate::models::Target;
use crate::service::Gateway;
use crate::traced::Tracing;

/// The worker that a request was sent to last. One request's tasks alone look at it, so nobody waits for the lock.
#[derive(Debug, Clone, Default)]
pub(crate) struct LastWorker(Arc<Mutex<Option<Arc<WorkerRun>>>>);

impl LastWorker {
    pub(crate) fn set(&self, run: &Arc<WorkerRun>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(run));
    }

    pub(crate) fn get(&self) -> Option<Arc<WorkerRun>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// What all attempts at an answer have in common.
pub(crate) struct Generation {
    pub(crate) gateway: Arc<Gateway>,
    pub(crate) target: Target,
    pub(crate) surface: Surface,
    /// Where engines are asked.
    pub(crate) path: &'static str,
    /// For logs.
    pub(crate) request_id: String,
    /// Engines' name for it.
    pub(crate) engine_id: String,
    /// The client is told which workers it met.
    pub(crate) explains: bool,
    /// For the engine.
    pub(crate) headers: HeaderMap,
    pub(crate) session: Option<u64>,
    pub(crate) salt: Option<String>,
    /// How long the blocks of the prompt are to be retained; zero: as long as those of any other.
    pub(crate) retain_for: Duration,
    /// A prefill worker may compute the prompt: there is one prompt and one choice.
    pub(crate) can_split: bool,
    pub(crate) traced: Tracing,
    /// A proxy sends the leg that generates, once: there are no retries, hedges or continuations.
    pub(crate) handover: Option<Handover>,
    pub(crate) last_worker: LastWorker,
    /// Attempts so far, hedges included.
    pub(crate) attempts: AtomicU32,
}

/// What engines are asked for: all of an answer, or what is still to come of it.
#[derive(Debug)]
pub(crate) struct EngineRequest {
    pub(crate) body: RawBody,
    /// What the prompt looks like to the index; possibly empty.
    pub(crate) tokens: Arc<Vec<u32>>,
    /// `tokens` equal the engine's, so the cached tokens that it reports can be compared with the index.
    pub(crate) tokens_are_exact: bool,
}

impl Generation {
    /// The workers failed. Which of them, and how, is for those who may know the fleet; else it is in the log.
    fn workers_failed(&self, reason: &str) -> ApiError {
        if self.explains {
            return ApiError::unavailable(format!("The workers failed: {reason}"));
        }
        tracing::warn!(request = self.request_id, reason, "the workers failed");
        ApiError::unavailable("The workers failed.")
    }

    /// What is told of a route.
    pub(crate) fn explained(&self, route: &Route) -> Option<HeaderValue> {
        let text = self.explains.then(|| route.explain())?;
        HeaderValue::from_maybe_shared(Bytes::from(text)).ok()
    }
}
