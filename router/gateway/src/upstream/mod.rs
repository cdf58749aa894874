//! From a request that is ready to be sent to the events of its answer, over as many workers as needed.
//!
//! A [`Generation`] is sent in attempts. Each attempt chooses workers (a [`Route`](router_fleet::Route)),
//! sends one worker the whole request, or one the prompt and one the rest (legs), and follows the events of
//! the leg that generates. Before the first event was sent to the client, a failed attempt starts over on
//! another worker; after it the answer continues on another worker, if its [`Output`] can build the
//! continuation. All engines use this path; the `Output` defines the events and the continuation: the
//! engine's own events (`answer::relayed`), or token ids of which the gateway makes the text
//! (`answer::token_output`).
//!
//! Reading order: `attempts` (routes, retries, hedges), `dispatch` (sending to workers), `leg` and
//! `scanner` (events), `stream` (events across failures), `failure`. Everything runs in the task of the
//! client's connection, so a client that disconnects drops it all, connections to engines included.

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
use router_engines::proxy_dispatch::ProxyDispatch;
use router_fleet::{Route, WorkerRun};
use router_openai::{ApiError, RawBody, Surface};

pub(crate) use self::attempts::{Attempts, attempt_buffered, attempt_headers_only};
pub(crate) use self::scanner::{EventBatch, Scanner};
pub(crate) use self::stream::{BrokenAnswer, Continuation, EventStream, Output, OutputStep};
use crate::models::Target;
use crate::service::Gateway;
use crate::traced::Tracing;

/// The worker that a request was sent to last. Only the tasks of one request use the lock, so it is not
/// contended.
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

/// State that all attempts at an answer share.
pub(crate) struct Generation {
    pub(crate) gateway: Arc<Gateway>,
    pub(crate) target: Target,
    pub(crate) surface: Surface,
    /// URL path of the request at engines.
    pub(crate) path: &'static str,
    /// The client's id of the request, for logs.
    pub(crate) request_id: String,
    /// The request id that engines see.
    pub(crate) engine_id: String,
    /// Whether the client is told which workers served the request.
    pub(crate) explains: bool,
    /// Headers for the engine.
    pub(crate) headers: HeaderMap,
    pub(crate) session: Option<u64>,
    pub(crate) salt: Option<String>,
    /// Time for which the blocks of the prompt are to be retained; zero: as long as those of any other
    /// request.
    pub(crate) retain_for: Duration,
    /// A prefill worker may compute the prompt: there is one prompt and one choice.
    pub(crate) can_split: bool,
    pub(crate) traced: Tracing,
    /// A proxy sends the leg that generates, once: there are no retries, hedges or continuations.
    pub(crate) proxy_dispatch: Option<ProxyDispatch>,
    pub(crate) last_worker: LastWorker,
    /// Attempts so far, hedges included.
    pub(crate) attempts: AtomicU32,
}

/// Request to engines: for a whole answer, or for the rest of one.
#[derive(Debug)]
pub(crate) struct EngineRequest {
    pub(crate) body: RawBody,
    /// Tokens of the prompt for the index; possibly empty.
    pub(crate) tokens: Arc<Vec<u32>>,
    /// `tokens` equal the engine's, so the cached tokens that it reports can be compared with the index.
    pub(crate) tokens_are_exact: bool,
}

impl Generation {
    /// Returns the error for failed workers. Only clients that may know the fleet are told which worker
    /// failed and how; the log has it in any case.
    fn workers_failed(&self, reason: &str) -> ApiError {
        if self.explains {
            return ApiError::unavailable(format!("The workers failed: {reason}"));
        }
        tracing::warn!(request = self.request_id, reason, "the workers failed");
        ApiError::unavailable("The workers failed.")
    }

    /// Returns the header that explains a route, if the client may have it.
    pub(crate) fn explained(&self, route: &Route) -> Option<HeaderValue> {
        let text = self.explains.then(|| route.explain())?;
        HeaderValue::from_maybe_shared(Bytes::from(text)).ok()
    }
}
