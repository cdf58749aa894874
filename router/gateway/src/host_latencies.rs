//! Times that the kernels of engines' machines measure (`kvasir top --kernel --tell`): shown beside the
//! workers, and to a planner, which explains late answers with them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use router_fleet::name_of;
use router_openai::ApiError;
use serde::{Deserialize, Serialize};

use crate::Gateway;
use crate::roster::must_be_json;
use crate::service::json_response;

/// Largest body in bytes.
pub(crate) const BYTES_MAX: usize = 256 << 10;
/// Largest number of workers whose times are kept.
const WORKERS_MAX: usize = 4096;
/// Longest name: a host name has at most 253 bytes.
const NAME_MAX: usize = 280;
/// Longest reason, in bytes.
const WHY_MAX: usize = 400;
/// Age from which times are no longer shown.
const STALE_AFTER: Duration = Duration::from_secs(30);

/// Times of one engine, in milliseconds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct EngineHostTimes {
    processes: u32,
    requests: u64,
    first_byte_p50_ms: Option<f64>,
    first_byte_p99_ms: Option<f64>,
    read_late_p99_ms: Option<f64>,
    run_queue_p99_ms: Option<f64>,
    disk_read_p99_ms: Option<f64>,
    resent_per_second: f64,
    /// Reason why the engine's answers are late; empty when no reason is known.
    why: String,
}

/// Body of `POST /kvasir/kernel`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Told {
    workers: HashMap<String, EngineHostTimes>,
}

/// The latest times of each engine.
#[derive(Debug, Default)]
pub(crate) struct HostLatencies(Mutex<HashMap<String, (Instant, EngineHostTimes)>>);

impl HostLatencies {
    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, (Instant, EngineHostTimes)>> {
        // Each entry is consistent even after a panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the times of a worker, unless they are stale.
    pub(crate) fn of(&self, name: &str) -> Option<EngineHostTimes> {
        let known = self.lock();
        known.get(name).filter(|(at, _)| at.elapsed() < STALE_AFTER).map(|(_, times)| times.clone())
    }

    fn take(&self, told: HashMap<String, EngineHostTimes>) -> Result<(), String> {
        let mut known = self.lock();
        known.retain(|_, (at, _)| at.elapsed() < STALE_AFTER);
        for (name, times) in &told {
            if name.len() > NAME_MAX {
                return Err(format!("a worker's name has at most {NAME_MAX} bytes"));
            }
            if times.why.len() > WHY_MAX {
                return Err(format!("{name:?}: `why` has at most {WHY_MAX} bytes"));
            }
        }
        for (name, times) in told {
            let name = name_of(&name);
            if !known.contains_key(&name) && known.len() >= WORKERS_MAX {
                return Err(format!("at most {WORKERS_MAX} workers are kept"));
            }
            known.insert(name, (Instant::now(), times));
        }
        Ok(())
    }
}

/// `POST /kvasir/kernel`.
pub(crate) async fn post(State(gateway): State<Arc<Gateway>>, headers: HeaderMap, body: Bytes) -> Response {
    if let Err(error) = must_be_json(&headers) {
        return error.into_response();
    }
    let taken = serde_json::from_slice::<Told>(&body).map_err(|error| error.to_string());
    match taken.and_then(|told| gateway.host_latencies.take(told.workers)) {
        Ok(()) => json_response(StatusCode::OK, "{}".to_owned()),
        Err(problem) => {
            ApiError::malformed(format!("The body is no list of engines with their times: {problem}."))
                .into_response()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(why: &str) -> EngineHostTimes {
        let text = format!(
            "{{\"processes\": 2, \"requests\": 9, \"first_byte_p50_ms\": 1.5, \"first_byte_p99_ms\": null, \"read_late_p99_ms\": null, \
             \"run_queue_p99_ms\": 20, \"disk_read_p99_ms\": null, \"resent_per_second\": 0, \"why\": {why:?}}}"
        );
        serde_json::from_str(&text).expect("times")
    }

    #[test]
    fn the_last_word_counts_and_there_are_bounds() {
        let known = HostLatencies::default();
        known.take(HashMap::from([("A:1".to_owned(), times(""))])).expect("room");
        known.take(HashMap::from([("a:1".to_owned(), times("slow"))])).expect("room");
        assert_eq!(known.of("a:1"), Some(times("slow")));
        assert_eq!(known.of("b:1"), None);
        assert!(known.take(HashMap::from([("a:1".to_owned(), times(&"x".repeat(WHY_MAX + 1)))])).is_err());
        let many = (0..WORKERS_MAX).map(|number| (format!("w{number}:1"), times(""))).collect();
        assert!(known.take(many).is_err(), "there is one already");
    }
}
