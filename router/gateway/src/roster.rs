//! The roster over HTTP, for administrators: lists the workers and their state, adds, drains and removes
//! them, puts them to sleep and wakes them. Changes are sent to the gateway's peers. They last until all
//! gateways have been stopped; only the configuration names workers permanently.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Path, Request, State};
use axum::http::{HeaderMap, Method, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use router_engines::dialect::Role;
use router_engines::key::ApiKey;
use router_fleet::{AddedWorker, DEFAULT_POOL, Fleet, RosterDelta, SleepError, SpecError, Worker, name_of};
use router_openai::ApiError;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::Gateway;
use crate::caller::Caller;
use crate::host_latencies;
use crate::plan;
use crate::service::json_response;

/// A change of the roster.
type Change = fn(&Arc<Fleet>, &str) -> Result<RosterDelta, SpecError>;

/// A worker to be added.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NewWorker {
    url: String,
    #[serde(default)]
    role: String,
    pool: Option<String>,
    uid: Option<String>,
    /// The key that the worker demands of callers; only this gateway shows it.
    key: Option<String>,
}

/// Returns the roster's routes. The router that merges them checks the caller's rights.
pub(crate) fn routes(gateway: &Arc<Gateway>) -> Router<Arc<Gateway>> {
    Router::new()
        .route("/kvasir/workers", get(list).post(add))
        .route("/kvasir/workers/{name}", get(one))
        .route("/kvasir/workers/{name}/drain", post(drain))
        .route("/kvasir/workers/{name}/serve", post(serve_again))
        .route("/kvasir/workers/{name}/remove", post(remove))
        .route("/kvasir/workers/{name}/sleep", post(sleep))
        .route("/kvasir/workers/{name}/wake", post(wake))
        .route("/kvasir/config", get(configuration))
        .route("/kvasir/plan", get(plan::show).post(plan::post).layer(DefaultBodyLimit::max(plan::BYTES_MAX)))
        .route(
            "/kvasir/kernel",
            post(host_latencies::post).layer(DefaultBodyLimit::max(host_latencies::BYTES_MAX)),
        )
        .route_layer(middleware::from_fn_with_state(Arc::clone(gateway), may_change))
}

/// Checks the right to change the roster, since the roster decides which engines get prompts. Changes need
/// more than reading: on a gateway with keys a key, and no page of another site in a browser that shows a
/// certificate on its own; on an open gateway a process of this machine on its own behalf, the listener on
/// a Unix socket, or another gateway's key.
async fn may_change(State(gateway): State<Arc<Gateway>>, request: Request, next: Next) -> Response {
    if request.method() == Method::GET || request.method() == Method::HEAD {
        return next.run(request).await;
    }
    let caller = Caller::of(&request);
    let is_allowed = match gateway.access.is_closed() || gateway.access.shows_peer_key(&caller) {
        true => !caller.is_foreign_page(),
        false => caller.is_local() || caller.is_at_socket(),
    };
    if !is_allowed {
        let message = "The roster of a gateway without keys is changed on its own machine.";
        return ApiError::new(StatusCode::FORBIDDEN, message, "forbidden").into_response();
    }
    next.run(request).await
}

fn shown(worker: &Worker) -> Value {
    let runs = worker.runs.load();
    let first = runs.first();
    let role = first.map(|run| run.role).or(worker.spec.role);
    json!({
        "name": worker.name,
        "url": worker.spec.url,
        "pool": worker.pool.name,
        "model": *worker.pool.model(),
        "state": worker.state().name(),
        "reason": worker.reason(),
        "draining": worker.is_draining(),
        "requests": worker.requests(),
        "peers_requests": runs.iter().map(|run| run.load.peers.get()[0]).sum::<u32>(),
        "engine": first.map(|run| run.description.engine.name()),
        "version": first.map(|run| run.description.version.clone()),
        "role": role.map(Role::name),
        "ranks": runs.len(),
    })
}

/// `GET /kvasir/workers`.
async fn list(State(gateway): State<Arc<Gateway>>) -> Response {
    let fleet = gateway.fleet();
    let spec = fleet.spec();
    let workers = fleet.workers();
    // In the order of the roster.
    let shown: Vec<Value> = spec
        .workers
        .iter()
        .filter_map(|worker| workers.get(&worker.name()))
        .map(|worker| shown(worker))
        .collect();
    let mut told = json!({ "version": spec.version, "workers": shown });
    if let Some(discovery) = gateway.discovery() {
        told["discovery"] = Value::clone(&discovery);
    }
    json_response(StatusCode::OK, told.to_string())
}

/// `GET /kvasir/workers/NAME`.
async fn one(State(gateway): State<Arc<Gateway>>, Path(name): Path<String>) -> Response {
    match gateway.fleet().workers().get(&name_of(&name)) {
        Some(worker) => json_response(StatusCode::OK, shown(worker).to_string()),
        None => refused(&SpecError::UnknownWorker(name)),
    }
}

/// Requires JSON: a page of another site can post plain text without a preflight, but not JSON.
pub(crate) fn must_be_json(headers: &HeaderMap) -> Result<(), ApiError> {
    let kind = headers.get(axum::http::header::CONTENT_TYPE);
    if kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/json")) {
        return Ok(());
    }
    let message = "The body must be JSON, with `content-type: application/json`.";
    Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message, "unsupported_media_type"))
}

/// `POST /kvasir/workers` with `{"url": …, "role": …, "pool": …, "uid": …, "key": …}`, the last four as wanted.
async fn add(State(gateway): State<Arc<Gateway>>, headers: HeaderMap, body: Bytes) -> Response {
    if let Err(error) = must_be_json(&headers) {
        return error.into_response();
    }
    let NewWorker { url, role, pool, uid, key } = match serde_json::from_slice(&body) {
        Ok(worker) => worker,
        Err(error) => {
            return ApiError::malformed(format!("The body is no worker: {error}.")).into_response();
        }
    };
    if !role.is_empty() && Role::from_name(&role).is_none() {
        let message = format!("`role` is prefill, decode or both, not {role:?}.");
        return ApiError::invalid("role", message).into_response();
    }
    let key = match key.as_deref().map(ApiKey::new) {
        Some(None) => {
            let message = "`key` is plain ASCII without blanks around it.";
            return ApiError::invalid("key", message).into_response();
        }
        Some(key) => key,
        None => None,
    };
    let pool = pool.unwrap_or_else(|| DEFAULT_POOL.to_owned());
    answered(gateway.fleet().add(AddedWorker { url, role, pool, uid }, key))
}

async fn drain(State(gateway): State<Arc<Gateway>>, Path(name): Path<String>) -> Response {
    changed(&gateway, &name, Fleet::drain)
}

async fn serve_again(State(gateway): State<Arc<Gateway>>, Path(name): Path<String>) -> Response {
    changed(&gateway, &name, Fleet::serve_again)
}

async fn remove(State(gateway): State<Arc<Gateway>>, Path(name): Path<String>) -> Response {
    changed(&gateway, &name, Fleet::remove)
}

/// `POST /kvasir/workers/NAME/sleep`: answered when the worker sleeps, which its last request may delay.
async fn sleep(State(gateway): State<Arc<Gateway>>, Path(name): Path<String>) -> Response {
    let fleet = Arc::clone(gateway.fleet());
    sleep_response(tokio::spawn(async move { fleet.put_to_sleep(&name).await })).await
}

/// `POST /kvasir/workers/NAME/wake`: answered when the worker takes requests.
async fn wake(State(gateway): State<Arc<Gateway>>, Path(name): Path<String>) -> Response {
    let fleet = Arc::clone(gateway.fleet());
    sleep_response(tokio::spawn(async move { fleet.wake(&name).await })).await
}

/// A task of its own, which continues when the client disconnects: an engine must not stay half asleep.
async fn sleep_response(turning: tokio::task::JoinHandle<Result<Duration, SleepError>>) -> Response {
    let (status, code, message) = match turning.await {
        Ok(Ok(took)) => {
            return json_response(StatusCode::OK, json!({ "seconds": took.as_secs_f64() }).to_string());
        }
        Ok(Err(SleepError::Roster(error))) => return refused(&error),
        Ok(Err(error)) => {
            let (status, code) = match &error {
                SleepError::Busy(_) => (StatusCode::CONFLICT, "busy"),
                SleepError::Requests(_) => (StatusCode::GATEWAY_TIMEOUT, "has_requests"),
                SleepError::Engine { .. } => (StatusCode::BAD_GATEWAY, "engine_failed"),
                _ => (StatusCode::CONFLICT, "cannot_sleep"),
            };
            (status, code, error.to_string())
        }
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, "failed", error.to_string()),
    };
    ApiError::new(status, message, code).into_response()
}

fn changed(gateway: &Gateway, name: &str, change: Change) -> Response {
    answered(change(gateway.fleet(), name))
}

fn answered(changed: Result<RosterDelta, SpecError>) -> Response {
    match changed {
        Ok(RosterDelta { added, replaced, removed, drained }) => json_response(
            StatusCode::OK,
            json!({ "added": added, "replaced": replaced, "removed": removed, "drained": drained })
                .to_string(),
        ),
        Err(error) => refused(&error),
    }
}

fn refused(error: &SpecError) -> Response {
    let (status, code) = match error {
        SpecError::UnknownWorker(_) => (StatusCode::NOT_FOUND, "unknown_worker"),
        _ => (StatusCode::BAD_REQUEST, "bad_roster"),
    };
    let message = error.to_string();
    ApiError::new(status, message, code).into_response()
}

/// `GET /kvasir/config`: every key with the value in force.
async fn configuration(State(gateway): State<Arc<Gateway>>) -> Response {
    match gateway.configuration() {
        Some(configuration) => json_response(StatusCode::OK, configuration.to_string()),
        None => ApiError::new(
            StatusCode::NOT_FOUND,
            "The configuration cannot be read from this gateway.",
            "not_found",
        )
        .into_response(),
    }
}
