//! What is shown of the gateway: status and decisions as JSON, metrics for Prometheus. Its routes are for administrators;
//! `service` sees to that.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use router_engines::exposition;
use router_engines::openai::ApiError;
use router_radix::Tier;
use serde_json::{Value, json};

use crate::Gateway;
use crate::history;
use crate::service::{error_response, json_response, unix_millis};
use crate::worker::{Live, Worker};

/// `GET /kvasir/status`.
pub(crate) async fn status(State(gateway): State<Arc<Gateway>>) -> Response {
    json_response(StatusCode::OK, status_of(&gateway).to_string())
}

/// `GET /kvasir/history`: the last hour of counters.
pub(crate) async fn history(State(gateway): State<Arc<Gateway>>) -> Response {
    json_response(StatusCode::OK, gateway.history.to_json(gateway.started))
}

fn status_of(gateway: &Gateway) -> Value {
    let metrics = &gateway.metrics;
    let usage = gateway.fleet.index.write().usage();
    let workers: Vec<Value> =
        gateway.fleet.workers.iter().flat_map(|worker| worker_status(gateway, worker)).collect();
    let waiting = gateway.access.gate.stats().waiting;
    let mut status = history::sample(metrics, unix_millis(), gateway.requests_inside(), waiting);
    status["version"] = json!(env!("CARGO_PKG_VERSION"));
    status["model"] = json!(gateway.model());
    status["problem"] = json!(gateway.fleet.model.problem());
    status["strategy"] = json!(gateway.tuning().policy.strategy.name());
    status["started_unix"] = json!(gateway.started);
    status["index"] = json!({ "blocks": usage.entries, "bytes": usage.bytes, "nodes": usage.nodes });
    status["workers"] = json!(workers);
    status
}

/// A worker: each rank by itself.
fn worker_status(gateway: &Gateway, worker: &Arc<Worker>) -> Vec<Value> {
    let lives = worker.lives.load();
    if !worker.is_ready() {
        return vec![json!({ "name": worker.name, "ready": false })];
    }
    lives.iter().map(|live| live_status(gateway, worker, live)).collect()
}

fn live_status(gateway: &Gateway, worker: &Worker, live: &Live) -> Value {
    let reported = live.reported.get();
    let audit = &live.load.audit;
    let held = gateway.fleet.index.write().blocks_of(live.member);
    let [host, disk] = live.description.lower_blocks;
    let size_of = |tier: &Tier| match tier {
        Tier::Device => live.description.blocks,
        Tier::Host => host,
        Tier::Disk => disk,
        Tier::Remote => 0,
    };
    let pools = Tier::ALL.iter().zip(held).filter(|(tier, held)| **tier == Tier::Device || *held > 0);
    let pools = pools.map(|(tier, held)| {
        // An engine that does not say how large a pool is has 0 here.
        let size = Some(size_of(tier)).filter(|&blocks| blocks > 0);
        json!({ "tier": tier_name(*tier), "blocks": size, "indexed": held })
    });
    json!({
        "name": live.name,
        "ready": live.is_warm.load(Ordering::Acquire),
        "engine": live.description.engine.name(),
        "version": live.description.version,
        "role": live.role.name(),
        "events": live.has_feed,
        "is_out": worker.breaker.is_open(Instant::now()),
        "ejections": worker.breaker.ejections.load(Ordering::Relaxed),
        "requests": live.load.own.get()[0],
        "peers_requests": live.load.peers.get()[0],
        "engine_running": reported.running,
        "engine_waiting": reported.waiting,
        "kv_usage": reported.kv_usage,
        "slowness": live.load.factor(),
        "pools": pools.collect::<Vec<Value>>(),
        "audit": {
            "requests": audit.requests.load(Ordering::Relaxed),
            "exact": audit.exact.load(Ordering::Relaxed),
            "predicted_tokens": audit.predicted_tokens.load(Ordering::Relaxed),
            "reported_tokens": audit.reported_tokens.load(Ordering::Relaxed),
        },
    })
}

fn tier_name(tier: Tier) -> &'static str {
    match tier {
        Tier::Device => "device",
        Tier::Host => "host",
        Tier::Disk => "disk",
        Tier::Remote => "remote",
    }
}

/// `GET /kvasir/decisions?after=SEQUENCE`.
pub(crate) async fn decisions(
    State(gateway): State<Arc<Gateway>>,
    Query(query): Query<Vec<(String, String)>>,
) -> Response {
    let after = query.iter().find(|(key, _)| key == "after").map(|(_, value)| value.parse::<u64>());
    let Ok(after) = after.transpose() else {
        return error_response(&ApiError::invalid("after", "`after` is a number."));
    };
    let roster = gateway.fleet.roster.load();
    let name_of = |identity: u64| {
        let found = roster.iter().find(|picked| picked.live.identity == identity);
        found.map(|picked| picked.live.name.clone())
    };
    json_response(StatusCode::OK, gateway.chooser.decisions.to_json(after, name_of).to_string())
}

/// `GET /metrics`.
pub(crate) async fn metrics(State(gateway): State<Arc<Gateway>>, headers: HeaderMap) -> Response {
    let metrics = &gateway.metrics;
    let usage = gateway.fleet.index.write().usage();
    metrics.index_blocks.set(usage.entries as i64);
    metrics.index_bytes.set(usage.bytes as i64);
    metrics.index_nodes.set(usage.nodes as i64);
    metrics.workers_ready.set(gateway.fleet.ready_count() as i64);
    metrics.waiting.set(gateway.access.gate.stats().waiting.into());
    metrics.running_max.set(gateway.access.gate.running_max().into());
    metrics.request_memory.set(gateway.memory.held_bytes() as i64);
    let events = gateway.fleet.tracker_counters();
    metrics.event_batches.inner().store(events.batches, Ordering::Relaxed);
    metrics.event_orphans.inner().store(events.orphans, Ordering::Relaxed);
    metrics.event_resets.inner().store(events.resets, Ordering::Relaxed);
    metrics.event_broken.inner().store(events.broken, Ordering::Relaxed);
    let listeners = gateway.fleet.listeners.counters();
    metrics.event_unattributed.inner().store(listeners.unattributed, Ordering::Relaxed);
    metrics.event_dropped.inner().store(listeners.dropped, Ordering::Relaxed);
    if let Some(error) = gateway.fleet.speeds.prediction_error() {
        metrics.prediction_error.set(error);
    }
    if let Some(audit) = &gateway.access.audit {
        let log = audit.counters();
        metrics.log_written.inner().store(log.written, Ordering::Relaxed);
        metrics.log_dropped.inner().store(log.dropped, Ordering::Relaxed);
        metrics.log_lost.inner().store(log.lost, Ordering::Relaxed);
    }
    if let Some(tracer) = &gateway.tracer {
        let spans = tracer.counters();
        metrics.spans_exported.inner().store(spans.exported, Ordering::Relaxed);
        metrics.spans_dropped.inner().store(spans.dropped, Ordering::Relaxed);
        metrics.spans_failed.inner().store(spans.failed, Ordering::Relaxed);
    }
    if let Some(tls) = &gateway.config.access.server_tls {
        let handshakes = tls.counts();
        metrics.certificate_expires.set(tls.expires_unix() as i64);
        metrics.handshakes.inner().store(handshakes.completed, Ordering::Relaxed);
        metrics.handshakes_failed.inner().store(handshakes.failed + handshakes.timed_out, Ordering::Relaxed);
    }
    metrics.seconds_per_token.set(gateway.fleet.speeds.get().per_token);
    for picked in gateway.fleet.roster.load().iter() {
        let ejections = picked.worker.breaker.ejections.load(Ordering::Relaxed);
        metrics.of_worker(&picked.live.name, &picked.live.load, ejections);
    }
    let mut text = metrics.render();
    // The end marker stays last.
    let end = text.strip_suffix("# EOF\n").map_or(text.len(), str::len);
    let marker = text.split_off(end);
    gateway.append_metrics(&mut text);
    exposition::process(&mut text, env!("CARGO_PKG_VERSION"));
    text.push_str(&marker);
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    let (content_type, text) = match exposition::wants_openmetrics(accept) {
        true => (exposition::OPENMETRICS, text),
        false => (exposition::CLASSIC, exposition::classic(&text)),
    };
    ([(header::CONTENT_TYPE, content_type)], text).into_response()
}
