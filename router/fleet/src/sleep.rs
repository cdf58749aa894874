//! Workers that are put to sleep and woken, by an administrator or a planner.
//!
//! An engine that sleeps keeps its process and has given its GPU's memory back; waking takes seconds where a start takes
//! minutes. The gateway that is asked does it; its peers learn of it as of every other change (`changes`):
//!
//! ```text
//!        drain                 no request for IDLE_FOR                 the engine's answer
//! Ready ───────▶ Draining ──────────────────────────▶ (its sleep call) ──────────────────▶ Sleeping
//!   ▲                                                                                         │
//!   └── serve ◀── first token of a request of one token ◀── (its wake call) ◀────────────────┘ wake
//! ```
//!
//! Requests from outside this fleet's gateways are seen in the engine's own count. An engine that reports whether it is asleep
//! (vLLM) is authoritative; a call that fails is reverted, and the worker serves again. For an engine that does not report it
//! (SGLang) the gateways rely on the desired state `Sleep`, which names the run of the process: a process that has restarted is awake.
//! SGLang exits when it is woken twice, so after a failure no further sleep or wake call is made until it restarts.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::Method;
use router_engines::client::EngineError;
use router_engines::dialect::{Dialect, Engine, detect};
use serde_json::json;

use crate::changes::DesiredState;
use crate::fleet::Fleet;
use crate::spec::{SpecError, name_of};
use crate::state::WorkerState;
use crate::worker::Worker;

/// Interval between two checks of a worker's requests.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// Time without requests before a worker is put to sleep: a peer may not have learned of the drain yet.
const IDLE_FOR: Duration = Duration::from_secs(1);
/// Longest wait for the worker's requests to end.
const DRAIN_MAX: Duration = Duration::from_secs(600);
/// Time limit of a sleep call, which copies all weights to the host, and of a wake call.
const TURN_MAX: Duration = Duration::from_secs(300);
/// Time limit of the first token after waking, and of the wait until the worker takes requests.
const WARM_MAX: Duration = Duration::from_secs(60);

/// Longest time of a sleep or wake request: draining, two calls to the engine (the second one reverts the first), and the
/// status queries in between.
pub const SLEEP_REQUEST_MAX: Duration =
    Duration::from_secs(DRAIN_MAX.as_secs() + 2 * TURN_MAX.as_secs() + 5 * WARM_MAX.as_secs());

/// Failure to put a worker to sleep or to wake it.
#[derive(Debug, thiserror::Error)]
pub enum SleepError {
    /// The worker is not in the roster, or the roster cannot be changed.
    #[error(transparent)]
    Roster(#[from] SpecError),
    /// Another sleep or wake call for the worker is running.
    #[error("{0} is being put to sleep or woken already")]
    Busy(String),
    /// The worker cannot be put to sleep or woken in its present state.
    #[error("{worker}: {reason}")]
    Refused {
        /// The worker's name.
        worker: String,
        /// Reason, in words.
        reason: String,
    },
    /// The worker's requests did not end in time; it serves again.
    #[error("{0} still has requests after {DRAIN_MAX:?}")]
    Requests(String),
    /// The engine failed.
    #[error("{worker}: {reason}")]
    Engine {
        /// The worker's name.
        worker: String,
        /// The engine's answer.
        reason: String,
    },
}

const UNCERTAIN: &str = "a call to sleep or wake it failed, and its engine does not tell whether it sleeps: it has to be started again";

/// Held while a worker is put to sleep or woken; allows one such call at a time.
struct SleepGuard(Arc<Worker>);

impl SleepGuard {
    fn begin(worker: &Arc<Worker>) -> Result<Self, SleepError> {
        match worker.is_sleep_call_running.swap(true, Ordering::AcqRel) {
            true => Err(SleepError::Busy(worker.name.clone())),
            false => Ok(Self(Arc::clone(worker))),
        }
    }
}

impl Drop for SleepGuard {
    fn drop(&mut self) {
        self.0.is_sleep_call_running.store(false, Ordering::Release);
    }
}

impl Fleet {
    /// Puts a worker to sleep after its requests have ended. Returns the time that the engine took. A sleeping worker stays so.
    pub async fn put_to_sleep(self: &Arc<Self>, name: &str) -> Result<Duration, SleepError> {
        let worker = self.named(name)?;
        let _guard = SleepGuard::begin(&worker)?;
        if worker.state() == WorkerState::Sleeping {
            return Ok(Duration::ZERO);
        }
        let refused = |reason: String| SleepError::Refused { worker: worker.name.clone(), reason };
        if worker.is_sleep_state_unknown.load(Ordering::Acquire) {
            return Err(refused(UNCERTAIN.to_owned()));
        }
        let runs = worker.runs.load_full();
        let Some(first) = runs.first() else {
            return Err(refused("the worker has not described itself yet".to_owned()));
        };
        let dialect = first.description.engine.dialect();
        let asked = dialect.sleep_obstacle(&worker.client, &first.description, first.role);
        if let Some(reason) = within(WARM_MAX, &worker, asked).await? {
            return Err(refused(reason));
        }
        let told = within(WARM_MAX, &worker, dialect.is_asleep(&worker.client)).await?;
        if told == Some(true) {
            return Ok(Duration::ZERO);
        }
        let tells = told.is_some();
        let was_draining = worker.is_draining();
        self.set_desired_state(name, DesiredState::Drain)?;
        let serve_again = || match was_draining {
            true => Ok(()),
            false => self.set_desired_state(name, DesiredState::Serve).map(drop),
        };
        if !is_idle_within(&worker, dialect, DRAIN_MAX).await {
            if !worker.is_draining() {
                return Err(refused("the drain was cancelled by a request to serve".to_owned()));
            }
            serve_again()?;
            return Err(SleepError::Requests(worker.name.clone()));
        }
        if !tells {
            self.request_sleep(name, first.description.instance)?;
        }
        let began = Instant::now();
        let slept = within(TURN_MAX, &worker, dialect.sleep(&worker.client)).await;
        let took = began.elapsed();
        if let Err(error) = slept {
            tracing::warn!(worker = worker.name, "{error}");
            if tells {
                // The engine may be half asleep: the scheduler is stopped, and the memory is still held.
                let is_asleep = within(WARM_MAX, &worker, dialect.is_asleep(&worker.client)).await;
                if matches!(is_asleep, Ok(Some(true))) {
                    let _taken_back = within(TURN_MAX, &worker, dialect.wake(&worker.client)).await;
                }
                serve_again()?;
            } else {
                worker.is_sleep_state_unknown.store(true, Ordering::Release);
                self.set_desired_state(name, DesiredState::Drain)?;
            }
            worker.check_health_now();
            return Err(error);
        }
        tracing::info!(worker = worker.name, ?took, "worker sleeps");
        worker.check_health_now();
        if tells {
            // Peers see the sleep with their next health check, so waking needs no message to them.
            tokio::time::sleep(self.config.health_interval * 2 + IDLE_FOR).await;
            serve_again()?;
        }
        Ok(took)
    }

    /// Wakes a worker. Returns the time until it takes requests.
    pub async fn wake(self: &Arc<Self>, name: &str) -> Result<Duration, SleepError> {
        let worker = self.named(name)?;
        let _guard = SleepGuard::begin(&worker)?;
        let began = Instant::now();
        if worker.state() != WorkerState::Sleeping {
            let reason = format!("it does not sleep: it is {}", worker.state().name());
            return Err(SleepError::Refused { worker: worker.name.clone(), reason });
        }
        if worker.is_sleep_state_unknown.load(Ordering::Acquire) {
            return Err(SleepError::Refused { worker: worker.name.clone(), reason: UNCERTAIN.to_owned() });
        }
        let engine = match worker.pool.engine() {
            Some(engine) => engine,
            None => within(WARM_MAX, &worker, detect(&worker.client)).await?,
        };
        // The engine's state may have changed since the last health check.
        let is_asleep = within(WARM_MAX, &worker, engine.dialect().is_asleep(&worker.client)).await?;
        if is_asleep != Some(false) {
            within(TURN_MAX, &worker, engine.dialect().wake(&worker.client)).await.inspect_err(|error| {
                tracing::warn!(worker = worker.name, "{error}");
                worker.is_sleep_state_unknown.store(is_asleep.is_none(), Ordering::Release);
            })?;
        }
        // Kernels are loaded with the first request, and only then vLLM reports that its blocks are gone.
        if let Err(error) = within(WARM_MAX, &worker, first_token(&worker, engine)).await {
            tracing::warn!(worker = worker.name, "the first request after waking failed: {error}");
        }
        self.set_desired_state(name, DesiredState::Serve)?;
        worker.check_health_now();
        while worker.state() != WorkerState::Ready
            && !worker.is_removed()
            && began.elapsed() < TURN_MAX + WARM_MAX
        {
            tokio::time::sleep(CHECK_INTERVAL / 10).await;
        }
        let took = began.elapsed();
        if worker.state() != WorkerState::Ready {
            let reason = format!("it is awake, and is {} after {took:?}", worker.state().name());
            return Err(SleepError::Engine { worker: worker.name.clone(), reason });
        }
        tracing::info!(worker = worker.name, ?took, "worker woke");
        Ok(took)
    }

    fn named(&self, name: &str) -> Result<Arc<Worker>, SpecError> {
        let found = self.workers().get(&name_of(name)).map(Arc::clone);
        found.ok_or_else(|| SpecError::UnknownWorker(name.to_owned()))
    }
}

fn failed(worker: &Worker, error: &EngineError) -> SleepError {
    SleepError::Engine { worker: worker.name.clone(), reason: error.to_string() }
}

async fn within<T>(
    most: Duration,
    worker: &Worker,
    call: impl Future<Output = Result<T, EngineError>>,
) -> Result<T, SleepError> {
    match tokio::time::timeout(most, call).await {
        Ok(answered) => answered.map_err(|error| failed(worker, &error)),
        Err(_) => {
            let reason = format!("no answer within {most:?}");
            Err(SleepError::Engine { worker: worker.name.clone(), reason })
        }
    }
}

/// Whether all gateways and the engine itself have seen no request for [`IDLE_FOR`], before `most` has passed.
async fn is_idle_within(worker: &Worker, dialect: &dyn Dialect, most: Duration) -> bool {
    let began = Instant::now();
    let mut idle_since: Option<Instant> = None;
    while began.elapsed() < most && !worker.is_removed() && worker.is_draining() {
        let runs = worker.runs.load_full();
        let of_gateways: u32 = runs.iter().map(|run| run.load.own.get()[0] + run.load.peers.get()[0]).sum();
        // For an engine that does not report its load the gateways' counts decide.
        let reported = match of_gateways {
            0 => tokio::time::timeout(CHECK_INTERVAL * 10, dialect.report(&worker.client)).await.ok(),
            _ => None,
        };
        let is_idle = match reported {
            Some(Ok(report)) => report.loads.iter().all(|load| load.running == 0 && load.waiting == 0),
            _ => false,
        };
        if !is_idle {
            idle_since = None;
        } else if idle_since.get_or_insert_with(Instant::now).elapsed() >= IDLE_FOR {
            return true;
        }
        tokio::time::sleep(CHECK_INTERVAL).await;
    }
    false
}

/// Has the engine generate one token.
async fn first_token(worker: &Worker, engine: Engine) -> Result<(), EngineError> {
    let name = worker.pool.model.name().map(|name| name.to_string()).unwrap_or_default();
    let body = match engine {
        Engine::Sglang | Engine::Vllm => json!({ "model": name, "prompt": "Hello", "max_tokens": 1 }),
        _ => return Ok(()),
    };
    worker.client.ask(Method::POST, "/v1/completions", Bytes::from(body.to_string())).await.map(drop)
}
