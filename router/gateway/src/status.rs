//! The gateway's state: status and decisions as JSON, metrics for Prometheus. The routes are for
//! administrators; `service` checks that.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use router_engines::dialect::Role;
use router_engines::exposition;
use router_fleet::{GroupStatus, Pool, StoreStatus, Worker, WorkerRun, WorkerState};
use router_openai::ApiError;
use router_radix::Tier;
use serde_json::{Value, json};

use crate::Gateway;
use crate::history;
use crate::service::{json_response, unix_millis};

/// `GET /kvasir/status`.
pub(crate) async fn status(State(gateway): State<Arc<Gateway>>) -> Response {
    // `status_of` may wait for the index's writer, and while a store's large answer is being applied.
    match tokio::task::spawn_blocking(move || status_of(&gateway).to_string()).await {
        Ok(status) => json_response(StatusCode::OK, status),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// `GET /kvasir/history`: the last hour of counters.
pub(crate) async fn history(State(gateway): State<Arc<Gateway>>) -> Response {
    json_response(StatusCode::OK, gateway.history.to_json(gateway.started))
}

fn status_of(gateway: &Gateway) -> Value {
    let metrics = &gateway.metrics;
    let usage = gateway.fleet.index.write().usage();
    let workers: Vec<Value> =
        gateway.fleet.workers().values().flat_map(|worker| worker_status(gateway, worker)).collect();
    let waiting = gateway.models.gates().waiting;
    let mut status = history::sample(metrics, unix_millis(), gateway.requests_inside(), waiting);
    status["version"] = json!(env!("CARGO_PKG_VERSION"));
    let pools = gateway.fleet.pools();
    status["model"] = json!(*gateway.models.first().pool.model());
    status["models"] = pools.iter().map(|pool| pool_status(pool)).collect();
    status["problem"] = json!(pools.iter().find_map(|pool| pool.problem()));
    status["strategy"] = json!(gateway.tuning().routing.policy.strategy.name());
    status["started_unix"] = json!(gateway.started);
    status["index"] = json!({ "blocks": usage.entries, "bytes": usage.bytes, "nodes": usage.nodes });
    status["workers"] = json!(workers);
    status["shared_stores"] = stores_status(gateway);
    let (finished, lengths) = gateway.lengths.recent();
    status["lengths"] = json!({ "count": finished, "recent": lengths });
    status["plan"] = json!(gateway.plan.load().as_deref());
    status
}

/// Stores that workers share, and the groups of workers that share them.
fn stores_status(gateway: &Gateway) -> Value {
    let fleet = &gateway.fleet;
    let store = |store: StoreStatus| json!({ "url": store.url, "name": store.name, "answers": store.answers, "blocks": store.blocks });
    let group = |group: GroupStatus| {
        json!({
            "stores": group.stores, "workers": group.workers, "indexed": group.blocks, "unresolved": group.unresolved,
        })
    };
    let (stores, groups) = (fleet.stores.status(), fleet.stores.groups(&fleet.index));
    json!({
        "stores": stores.into_iter().map(store).collect::<Vec<Value>>(),
        "groups": groups.into_iter().map(group).collect::<Vec<Value>>(),
    })
}

/// The status of a worker, one entry per rank.
fn worker_status(gateway: &Gateway, worker: &Arc<Worker>) -> Vec<Value> {
    let runs = worker.runs.load();
    if runs.is_empty() {
        return vec![json!({
            "name": worker.name, "pool": worker.pool.name, "ready": false, "state": worker.state().name(),
            "reason": worker.reason(), "role": worker.spec.role.map(Role::name),
        })];
    }
    runs.iter().map(|run| live_status(gateway, worker, run)).collect()
}

fn live_status(gateway: &Gateway, worker: &Worker, run: &WorkerRun) -> Value {
    let reported = run.reported.get();
    let predictions = &run.load.predictions;
    let held = gateway.fleet.index.write().blocks_of(run.member);
    let [host, disk] = run.description.lower_blocks;
    let size_of = |tier: &Tier| match tier {
        Tier::Device => run.description.blocks,
        Tier::Host => host,
        Tier::Disk => disk,
        Tier::Remote => 0,
    };
    let pools = Tier::ALL.iter().zip(held).filter(|(tier, held)| **tier == Tier::Device || *held > 0);
    let pools = pools.map(|(tier, held)| {
        // An engine that does not report the size of a pool has 0 here.
        let size = Some(size_of(tier)).filter(|&blocks| blocks > 0);
        json!({ "tier": tier_name(*tier), "blocks": size, "indexed": held })
    });
    json!({
        "name": run.name,
        "pool": worker.pool.name,
        "ready": worker.state() == WorkerState::Ready && run.is_warm.load(Ordering::Acquire),
        "state": worker.state().name(),
        "reason": worker.reason(),
        "engine": run.description.engine.name(),
        "version": run.description.version,
        "role": run.role.name(),
        "generation": worker.spec.generation,
        "events": run.has_feed,
        "is_out": worker.breaker.is_open(Instant::now()),
        "ejections": worker.breaker.ejections.load(Ordering::Relaxed),
        "requests": run.load.own.get()[0],
        "peers_requests": run.load.peers.get()[0],
        "kv_tokens": u64::from(run.load.own.get()[2]) * run.description.block_tokens as u64,
        "engine_running": reported.running,
        "engine_waiting": reported.waiting,
        "kv_usage": reported.kv_usage,
        "slowness": run.load.factor(),
        "kernel": gateway.host_latencies.of(&worker.name),
        "pools": pools.collect::<Vec<Value>>(),
        "transfers": run.transfers.load().as_deref(),
        "predictions": {
            "requests": predictions.requests.load(Ordering::Relaxed),
            "exact": predictions.exact.load(Ordering::Relaxed),
            "predicted_tokens": predictions.predicted_tokens.load(Ordering::Relaxed),
            "reported_tokens": predictions.reported_tokens.load(Ordering::Relaxed),
        },
    })
}

fn pool_status(pool: &Pool) -> Value {
    let ready = pool.roster().iter().filter(|rank| rank.is_ready()).count();
    json!({
        "pool": pool.name, "model": *pool.model(), "aliases": pool.aliases, "ready": ready,
        "strategy": pool.routing().policy.strategy.name(), "problem": pool.problem(),
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
        return ApiError::invalid("after", "`after` is a number.").into_response();
    };
    let ranks = gateway.fleet.ranks();
    let name_of = |identity: u64| {
        let found = ranks.iter().find(|rank| rank.run.identity == identity);
        found.map(|rank| rank.run.name.clone())
    };
    json_response(StatusCode::OK, gateway.fleet.decisions().to_json(after, name_of).to_string())
}

/// `GET /metrics`.
pub(crate) async fn metrics(State(gateway): State<Arc<Gateway>>, headers: HeaderMap) -> Response {
    let text = metrics_text(&gateway);
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    let (content_type, text) = match exposition::wants_openmetrics(accept) {
        true => (exposition::OPENMETRICS, text),
        false => (exposition::CLASSIC, exposition::classic(&text)),
    };
    ([(header::CONTENT_TYPE, content_type)], text).into_response()
}

/// All metrics of the process, in OpenMetrics' text form.
pub(crate) fn metrics_text(gateway: &Gateway) -> String {
    let metrics = &gateway.metrics;
    let usage = gateway.fleet.index.write().usage();
    metrics.index_blocks.set(usage.entries as i64);
    metrics.index_bytes.set(usage.bytes as i64);
    metrics.index_nodes.set(usage.nodes as i64);
    metrics.workers_ready.set(gateway.fleet.ready_count() as i64);
    let gates = gateway.models.gates();
    metrics.running.set(gates.running.into());
    metrics.waiting.set(gates.waiting.into());
    metrics.running_max.set(gates.running_max.into());
    metrics.request_memory.set(gateway.memory.held_bytes() as i64);
    if let Some(stored) = &gateway.stored {
        metrics.stored_bytes.set(i64::try_from(stored.database.bytes()).unwrap_or(i64::MAX));
    }
    // A worker that has just left may be missing from both sums for a moment, so the counters only grow.
    let events = gateway.fleet.tracker_counters();
    metrics.event_batches.inner().fetch_max(events.batches, Ordering::Relaxed);
    metrics.event_orphans.inner().fetch_max(events.orphans, Ordering::Relaxed);
    metrics.event_resets.inner().fetch_max(events.resets, Ordering::Relaxed);
    metrics.event_broken.inner().fetch_max(events.broken, Ordering::Relaxed);
    let listeners = gateway.fleet.listener_counters();
    metrics.event_unattributed.inner().store(listeners.unattributed, Ordering::Relaxed);
    metrics.event_dropped.inner().store(listeners.dropped, Ordering::Relaxed);
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
    // One scrape at a time: each begins with an empty list of workers.
    let _turn = metrics.scraping.lock().unwrap_or_else(PoisonError::into_inner);
    metrics.forget_workers();
    gateway.fleet.pools().iter().for_each(|pool| metrics.of_pool(pool));
    for rank in gateway.fleet.ranks() {
        let ejections = rank.worker.breaker.ejections.load(Ordering::Relaxed);
        metrics.of_worker(&rank.run.name, &rank.run.load, ejections);
    }
    for (url, answers, blocks) in gateway.fleet.stores.levels() {
        metrics.of_store(url, answers, blocks);
    }
    let mut text = metrics.render();
    // The end marker stays last.
    let end = text.strip_suffix("# EOF\n").map_or(text.len(), str::len);
    let marker = text.split_off(end);
    gateway.append_metrics(&mut text);
    exposition::process(&mut text, env!("CARGO_PKG_VERSION"));
    text.push_str(&marker);
    text
}
