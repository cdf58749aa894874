//! Sleep: vLLM's routes of `VLLM_SERVER_DEV_MODE`, and SGLang's memory release.
//!
//! As in the engines: requests wait while the worker sleeps; the prefix cache is lost, which vLLM's events
//! report only with the first step after waking. SGLang dies when its memory is released during a request, or
//! released twice; its `/health` does not answer while it is paused. Falling asleep takes a quarter of the time
//! of waking; `/sleep` is that of `mode=wait`.

use std::sync::Arc;
use std::time::Duration;

use http::{Response, StatusCode};
use serde_json::json;

use super::answer::Payload;
use super::generate::Failure;
use super::reply;
use crate::fault::{Fault, FaultKind};
use crate::scheduler;
use crate::worker::Worker;

/// SGLang's `SGLANG_HEALTH_CHECK_TIMEOUT`.
const HEALTH_WITHIN: Duration = Duration::from_secs(20);
const CHECK_INTERVAL: Duration = Duration::from_millis(1);

fn wake_time(worker: &Worker) -> Duration {
    worker.config.wake.unwrap_or_default()
}

/// `/sleep` and `/wake_up`.
pub(super) async fn vllm(worker: &Arc<Worker>, path: &str) -> Result<Response<Payload>, Failure> {
    if path == "/sleep" {
        worker.lock().is_asleep = true;
        while !worker.lock().scheduler.running.is_empty() {
            tokio::time::sleep(CHECK_INTERVAL).await;
        }
        worker.lock().pool.clear();
        tokio::time::sleep(wake_time(worker) / 4).await;
        return Ok(reply::json(StatusCode::OK, json!({ "status": "sleeping", "level": 1 })));
    }
    tokio::time::sleep(wake_time(worker)).await;
    worker.lock().is_asleep = false;
    step(worker);
    Ok(reply::json(StatusCode::OK, json!({ "status": "awake" })))
}

/// `/pause_generation` with the mode `abort`, and `/continue_generation`.
pub(super) async fn pause(worker: &Arc<Worker>, path: &str) -> Response<Payload> {
    worker.lock().is_paused = path == "/pause_generation";
    if path == "/pause_generation" {
        while !worker.lock().scheduler.running.is_empty() {
            tokio::time::sleep(CHECK_INTERVAL).await;
        }
    } else {
        step(worker);
    }
    reply::json(StatusCode::OK, json!({ "status": "ok" }))
}

/// `/release_memory_occupation` and `/resume_memory_occupation`.
pub(super) async fn sglang(worker: &Arc<Worker>, path: &str) -> Result<Response<Payload>, Failure> {
    let releases = path == "/release_memory_occupation";
    let is_fatal = {
        let state = worker.lock();
        !state.scheduler.running.is_empty() || state.is_asleep == releases || !state.is_paused
    };
    if is_fatal {
        worker.stop();
        let dead = Fault { kind: FaultKind::Refuse, probability: 1.0, count: None, millis: 0, tokens: 0 };
        // A fault with probability 1 is always valid.
        let _armed = worker.faults.arm(dead);
        return Err(Failure::Cut);
    }
    if releases {
        release(worker);
        tokio::time::sleep(wake_time(worker) / 4).await;
    } else {
        tokio::time::sleep(wake_time(worker)).await;
        worker.lock().is_asleep = false;
    }
    Ok(reply::json(StatusCode::OK, json!(null)))
}

fn release(worker: &Worker) {
    let mut state = worker.lock();
    state.is_asleep = true;
    state.pool.clear();
    worker.publish(&mut state);
}

/// The answer of a paused SGLang to `/health`.
pub(super) async fn silent() -> Result<Response<Payload>, Failure> {
    tokio::time::sleep(HEALTH_WITHIN).await;
    Ok(reply::json(StatusCode::SERVICE_UNAVAILABLE, json!({})))
}

/// Starts the scheduler for requests that arrived during the sleep.
fn step(worker: &Arc<Worker>) {
    let mut state = worker.lock();
    let waits = !state.scheduler.waiting.is_empty();
    if waits && !std::mem::replace(&mut state.scheduler.is_stepping, true) {
        tokio::spawn(scheduler::run_steps(Arc::clone(worker)));
    }
}
