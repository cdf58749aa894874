//! The last plan that a planner posted: desired workers and reasons. The gateway shows it to administrators
//! and does not act on it.

use std::fmt::Write;
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use router_engines::exposition;
use router_openai::ApiError;
use serde::{Deserialize, Serialize};

use crate::Gateway;
use crate::roster::must_be_json;
use crate::service::{json_response, unix_millis};

/// Largest plan in bytes.
pub(crate) const BYTES_MAX: usize = 64 << 10;
/// Largest numbers of pools, changes and trials of a plan.
const POOLS_MAX: usize = 64;
const CHANGES_MAX: usize = 64;
const TRIALS_MAX: usize = 64;
/// Age in milliseconds from which a plan is no longer exported as metrics.
const STALE_AFTER_MS: u64 = 60_000;

/// Body of `POST /kvasir/plan`.
#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Plan {
    /// `advise` or `act`.
    mode: String,
    /// Arrival time, set by the gateway.
    #[serde(default)]
    unix_ms: u64,
    pools: Vec<PoolPlan>,
    /// The last changes, oldest first.
    #[serde(default)]
    changes: Vec<Change>,
}

#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct PoolPlan {
    pool: String,
    wanted: u32,
    ready: u32,
    starting: u32,
    draining: u32,
    #[serde(default)]
    sleeping: u32,
    stuck: u32,
    /// Reason as a label for metrics; `text` is a sentence.
    reason: String,
    text: String,
    /// Requests per second.
    rate: f64,
    /// Requests per second of one worker within the service level, once it is known.
    capacity: Option<f64>,
    /// Number of workers that the demand requires.
    need: Option<f64>,
    utilisation: f64,
    horizon_seconds: f64,
    /// Results of replaying recorded demand: share of the capacity that was used, share of requests in
    /// time, mean count of workers.
    #[serde(default)]
    trials: Vec<[f64; 3]>,
}

#[derive(Debug, Clone, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Change {
    unix_ms: u64,
    pool: String,
    from: u32,
    to: u32,
    text: String,
}

/// `GET /kvasir/plan`.
pub(crate) async fn show(State(gateway): State<Arc<Gateway>>) -> Response {
    match gateway.plan.load_full() {
        Some(plan) => match serde_json::to_string(&*plan) {
            Ok(text) => json_response(StatusCode::OK, text),
            Err(error) => ApiError::malformed(error.to_string()).into_response(),
        },
        None => ApiError::new(StatusCode::NOT_FOUND, "No planner has posted a plan here.", "not_found")
            .into_response(),
    }
}

/// `POST /kvasir/plan`.
pub(crate) async fn post(State(gateway): State<Arc<Gateway>>, headers: HeaderMap, body: Bytes) -> Response {
    if let Err(error) = must_be_json(&headers) {
        return error.into_response();
    }
    match parse(&body) {
        Ok(mut plan) => {
            plan.unix_ms = unix_millis();
            gateway.plan.store(Some(Arc::new(plan)));
            json_response(StatusCode::OK, "{}".to_owned())
        }
        Err(problem) => ApiError::malformed(format!("The body is no plan: {problem}.")).into_response(),
    }
}

fn parse(body: &[u8]) -> Result<Plan, String> {
    let plan: Plan = serde_json::from_slice(body).map_err(|error| error.to_string())?;
    if !["advise", "act"].contains(&plan.mode.as_str()) {
        return Err(format!("`mode` is advise or act, not {:?}", plan.mode));
    }
    if plan.pools.len() > POOLS_MAX || plan.changes.len() > CHANGES_MAX {
        return Err(format!("at most {POOLS_MAX} pools and {CHANGES_MAX} changes are taken"));
    }
    if plan.pools.iter().any(|pool| pool.trials.len() > TRIALS_MAX) {
        return Err(format!("at most {TRIALS_MAX} trials of a pool are taken"));
    }
    let mut names = std::collections::HashSet::new();
    match plan.pools.iter().find(|pool| !names.insert(&pool.pool)) {
        Some(twice) => Err(format!("the pool {:?} is there twice", twice.pool)),
        None => Ok(plan),
    }
}

/// Appends the series of a plan that is not stale.
pub(crate) fn append_metrics(plan: &Plan, out: &mut String) {
    if unix_millis().saturating_sub(plan.unix_ms) > STALE_AFTER_MS {
        return;
    }
    type Series = (&'static str, &'static str, fn(&PoolPlan) -> Option<f64>);
    let series: [Series; 8] = [
        ("wanted", "Workers that the planner wants", |pool| Some(pool.wanted.into())),
        ("sleeping", "Workers that are kept asleep, and woken first", |pool| Some(pool.sleeping.into())),
        ("stuck", "Workers that have been starting for more than twice the usual time", |pool| {
            Some(pool.stuck.into())
        }),
        ("demand", "Requests per second", |pool| Some(pool.rate)),
        ("capacity", "Requests per second of one worker within the service level", |pool| pool.capacity),
        ("need", "Workers that demand asks for, before limits", |pool| pool.need),
        ("utilisation", "Share of the capacity that is used", |pool| Some(pool.utilisation)),
        (
            "horizon_seconds",
            "How far ahead demand is looked at: the time that the next worker needs to wake or to start, and one interval",
            |pool| Some(pool.horizon_seconds),
        ),
    ];
    for (name, help, value) in series {
        let values: Vec<(&str, f64)> =
            plan.pools.iter().filter_map(|pool| Some((pool.pool.as_str(), value(pool)?))).collect();
        if values.is_empty() {
            continue;
        }
        // Writing to a String cannot fail.
        let _written =
            writeln!(out, "# HELP kvasir_planner_{name} {help}.\n# TYPE kvasir_planner_{name} gauge");
        for (pool, value) in values {
            let pool = exposition::label("pool", pool);
            let _written = writeln!(out, "kvasir_planner_{name}{{{pool}}} {value}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: &str = r#"{"mode": "act", "pools": [{"pool": "bo\"th", "wanted": 3, "ready": 1, "starting": 1,
        "draining": 0, "stuck": 0, "reason": "demand", "text": "by demand", "rate": 2.5, "capacity": null, "need": 2.75,
        "utilisation": 0.7, "horizon_seconds": 12.5}], "changes": []}"#;

    #[test]
    fn a_plan_is_taken_as_it_is_described_and_shown_in_metrics() {
        let mut plan = parse(PLAN.as_bytes()).expect("a plan");
        plan.unix_ms = unix_millis();
        let mut text = String::new();
        append_metrics(&plan, &mut text);
        assert!(text.contains("kvasir_planner_wanted{pool=\"bo\\\"th\"} 3\n"), "{text}");
        assert!(text.contains("kvasir_planner_need{pool=\"bo\\\"th\"} 2.75\n"), "{text}");
        assert!(!text.contains("planner_capacity"), "not known is no series: {text}");
        plan.unix_ms -= STALE_AFTER_MS + 1000;
        text.clear();
        append_metrics(&plan, &mut text);
        assert_eq!(text, "", "a planner that is gone");
    }

    #[test]
    fn what_is_no_plan_is_refused_with_the_reason() {
        let with = |from: &str, to: &str| parse(PLAN.replace(from, to).as_bytes()).expect_err("no plan");
        assert!(with("\"act\"", "\"rule\"").contains("advise or act"));
        assert!(with("\"wanted\": 3", "\"wanted\": -3").contains("-3"));
        assert!(with("\"wanted\"", "\"wanting\"").contains("wanting"));
        let many = format!("[{}]", ["{}"; 3].join(","));
        assert!(with("\"changes\": []", &format!("\"changes\": {many}")).contains("unix_ms"));
    }
}
