//! Adjusts the number of workers on this machine to the planner's decision.
//!
//! A worker to be removed is drained first: the gateway sends it no new requests, and its process is stopped
//! when its last request has ended. Workers that are still starting are removed first, then the worker with
//! the smallest cache.

use std::collections::HashMap;
use std::fmt;
use std::time::{Duration, Instant};

use anyhow::Result;
use bytes::Bytes;
use control_config::Settings;
use control_planner::{WorkerCounts, WorkerRole};
use http::Method;
use router_engines::client::{EngineClient, EngineError};
use router_engines::key::ApiKey;
use rustix::process::Signal;
use serde_json::{Value, json};

use crate::Role;
use crate::planning::{FleetObservation, ObservedWorker, Observer, Planning, PoolCounts, post};
use crate::secret;
use crate::serve::WORKERS_STOP_WITHIN;
use crate::serve::local_fleet::{LocalFleet, LocalWorker};

/// Interval between two polls of draining workers.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
const ANSWER_WITHIN: Duration = Duration::from_millis(500);
/// Consecutive idle polls after which a worker is stopped: a decode worker may still fetch blocks that it has
/// computed.
const IDLE_LOOKS: u32 = 2;

/// Most workers on this machine.
pub(super) fn workers_max(settings: &Settings) -> u64 {
    let (serve, planner) = (&settings.serve, &settings.planner);
    let at_start = serve.prefill_workers + serve.decode_workers;
    if planner.mode != "act" {
        return at_start;
    }
    let prefill = if serve.prefill_workers == 0 { 0 } else { planner.prefill_max };
    at_start.max(prefill + planner.decode_max)
}

fn role_of(role: WorkerRole) -> Role {
    match role {
        WorkerRole::Both => Role::Both,
        WorkerRole::Prefill => Role::Prefill,
        WorkerRole::Decode => Role::Decode,
    }
}

pub(super) struct Scaling {
    planning: Planning,
    observer: Observer,
    client: EngineClient,
    /// Key that the workers of this process require of callers.
    worker_key: String,
    is_acting: bool,
    interval: Duration,
    drain: Duration,
    decided: Instant,
    looked: Instant,
}

impl Scaling {
    /// Returns `None` if the planner is off.
    pub(super) fn new(settings: &Settings, client: EngineClient, peer_key: &str) -> Result<Option<Self>> {
        let planner = &settings.planner;
        if planner.mode == "off" {
            return Ok(None);
        }
        let own = secret::of_worker(settings, false)?;
        let now = Instant::now();
        Ok(Some(Self {
            worker_key: own.as_ref().map_or(peer_key, ApiKey::text).to_owned(),
            planning: Planning::new(planner, settings.serve.prefill_workers > 0),
            observer: Observer::new(vec![client.clone()]),
            client,
            is_acting: planner.mode == "act",
            interval: planner.interval,
            drain: planner.drain,
            decided: now,
            looked: now,
        }))
    }

    pub(super) async fn tick(&mut self, fleet: &mut LocalFleet<'_>) {
        if self.looked.elapsed() >= CHECK_INTERVAL
            && fleet.workers.iter().any(|worker| worker.draining_since.is_some())
        {
            self.looked = Instant::now();
            self.end_drained(fleet).await;
        }
        if self.decided.elapsed() < self.interval {
            return;
        }
        self.decided = Instant::now();
        let Some(seen) = self.observer.observe().await else { return };
        let counts = self.counts(fleet, &seen);
        let decisions = self.planning.decide(&seen, &counts);
        if self.is_acting {
            let roles = self.planning.roles().to_vec();
            for (role, decision) in roles.into_iter().zip(&decisions) {
                self.set(fleet, role_of(role), decision.wanted as usize, &seen).await;
            }
            self.add_to_gateway(fleet).await;
        }
        post(&self.client, &self.planning.to_json(&decisions, &counts)).await;
    }

    /// Updates which workers have become ready, and counts the workers by role.
    fn counts(&self, fleet: &mut LocalFleet<'_>, seen: &FleetObservation) -> Vec<PoolCounts> {
        let seen: HashMap<&str, &ObservedWorker> =
            seen.workers.iter().map(|worker| (worker.name.as_str(), worker)).collect();
        let count = |&role: &WorkerRole| {
            let mut counts = PoolCounts::default();
            let WorkerCounts { ready: takes, starting, draining, .. } = &mut counts.workers;
            for worker in fleet.workers.iter_mut().filter(|worker| worker.role == role_of(role)) {
                let is_ready = seen.get(name(worker)).is_some_and(|seen| seen.is_ready);
                // An administrator drained or removed the worker.
                let is_sent_away = seen.get(name(worker)).map_or(worker.is_known, |seen| seen.is_draining);
                if is_sent_away && worker.draining_since.is_none() && self.is_acting {
                    worker.draining_since = Some(Instant::now());
                }
                if worker.was_ready && !is_ready {
                    // The worker was restarted.
                    (worker.was_ready, worker.asked) = (false, Instant::now());
                }
                let age = worker.asked.elapsed().as_secs_f64();
                if worker.draining_since.is_some() || is_sent_away {
                    *draining += 1;
                    continue;
                }
                counts.in_force += 1;
                if is_ready {
                    *takes += 1;
                    if !std::mem::replace(&mut worker.was_ready, true) {
                        counts.started_in.push(age);
                    }
                } else {
                    *starting += 1;
                    counts.starting_for.push(age);
                }
            }
            counts
        };
        self.planning.roles().iter().map(count).collect()
    }

    /// Starts or drains workers of a role until there are `wanted`.
    async fn set(&self, fleet: &mut LocalFleet<'_>, role: Role, wanted: usize, seen: &FleetObservation) {
        loop {
            let staying: Vec<usize> = (0..fleet.workers.len())
                .filter(|&at| fleet.workers[at].role == role && fleet.workers[at].draining_since.is_none())
                .collect();
            if staying.len() < wanted {
                // Starting may fail for lack of processes or files; the next round tries again.
                if let Err(error) = fleet.add(role, None) {
                    tracing::warn!("a worker cannot be added: {error:#}");
                    break;
                }
            } else if staying.len() > wanted {
                let least = staying.into_iter().min_by(|&a, &b| {
                    let (a, b) = (value(&fleet.workers[a], seen), value(&fleet.workers[b], seen));
                    a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)).then(a.2.total_cmp(&b.2))
                });
                let Some(at) = least else { break };
                let worker = &fleet.workers[at];
                // If the gateway does not answer, the drain is requested again later; a restarted gateway no
                // longer has the worker.
                let _asked_again = self.change(&format!("{}/drain", path(worker))).await;
                fleet.workers[at].draining_since = Some(Instant::now());
            } else {
                break;
            }
        }
        fleet.update_gateway_arguments();
    }

    /// Adds workers to the gateway that it does not have yet.
    async fn add_to_gateway(&self, fleet: &mut LocalFleet<'_>) {
        for worker in
            fleet.workers.iter_mut().filter(|worker| !worker.is_known && worker.draining_since.is_none())
        {
            let body = json!({ "url": worker.url, "role": worker.role.name(), "key": self.worker_key });
            match self.ask("/kvasir/workers", body.to_string().into()).await {
                Ok(()) => worker.is_known = true,
                Err(error) => tracing::warn!("{}: the gateway did not take it: {error}", worker.service.name),
            }
        }
    }

    /// Stops draining workers that have no more requests or whose drain time is over.
    async fn end_drained(&self, fleet: &mut LocalFleet<'_>) {
        let told = tokio::time::timeout(ANSWER_WITHIN, self.client.get("/kvasir/workers")).await;
        let Some(told) = told.ok().and_then(Result::ok) else { return };
        let Ok(told) = serde_json::from_slice::<Value>(&told) else { return };
        let requests = |worker: &LocalWorker| {
            let all = told["workers"].as_array().into_iter().flatten();
            let shown = all.into_iter().find(|shown| shown["name"] == name(worker))?;
            let count = |key: &str| shown[key].as_u64().unwrap_or(0);
            Some((count("requests") + count("peers_requests"), shown["draining"] == true))
        };
        let mut at = 0;
        while at < fleet.workers.len() {
            let worker = &mut fleet.workers[at];
            let Some(since) = worker.draining_since else {
                at += 1;
                continue;
            };
            let (count, is_draining) = requests(worker).unwrap_or((0, true));
            if !is_draining {
                let _asked_again = self.change(&format!("{}/drain", path(worker))).await;
            }
            worker.idle_polls = if count == 0 && is_draining { worker.idle_polls + 1 } else { 0 };
            let may_end = worker.idle_polls >= IDLE_LOOKS || (is_draining && since.elapsed() >= self.drain);
            match worker.stopping {
                None if may_end => {
                    worker.service.signal(Signal::TERM);
                    worker.stopping = Some(Instant::now());
                }
                Some(stopping) if worker.service.has_ended() => {
                    tracing::debug!("{} has ended after {:?}", worker.service.name, stopping.elapsed());
                    // An unknown worker needs no removal; if the gateway did not answer, the removal is
                    // requested again.
                    if !matches!(
                        self.change(&format!("{}/remove", path(worker))).await,
                        Err(GatewayRequestError::Failed(_))
                    ) {
                        fleet.workers.remove(at);
                        continue;
                    }
                }
                Some(stopping) if stopping.elapsed() >= WORKERS_STOP_WITHIN => {
                    eprintln!("\r{} did not stop in time and is killed", worker.service.name);
                    worker.service.signal(Signal::KILL);
                }
                _ => {}
            }
            at += 1;
        }
    }

    async fn change(&self, path: &str) -> Result<(), GatewayRequestError> {
        self.ask(path, Bytes::from_static(b"{}")).await
    }

    async fn ask(&self, path: &str, body: Bytes) -> Result<(), GatewayRequestError> {
        match tokio::time::timeout(ANSWER_WITHIN, self.client.ask(Method::POST, path, body)).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(EngineError::Refused(error))) => Err(GatewayRequestError::Refused(error.message)),
            Ok(Err(error)) => Err(GatewayRequestError::Failed(error.to_string())),
            Err(_) => Err(GatewayRequestError::Failed("no answer in time".to_owned())),
        }
    }
}

/// Error of a request to the gateway.
#[derive(Debug)]
enum GatewayRequestError {
    /// The gateway refused, with this reason.
    Refused(String),
    /// The gateway was not reached or did not answer.
    Failed(String),
}

impl fmt::Display for GatewayRequestError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Refused(reason) | Self::Failed(reason)) = self;
        formatter.write_str(reason)
    }
}

/// Returns the name that the gateway gives to a worker.
fn name(worker: &LocalWorker) -> &str {
    worker.url.trim_start_matches("http://")
}

fn path(worker: &LocalWorker) -> String {
    format!("/kvasir/workers/{}", name(worker))
}

/// Sort key of a worker for removal: whether it is ready, its cached blocks, its requests.
fn value(worker: &LocalWorker, seen: &FleetObservation) -> (bool, f64, f64) {
    let known = seen.workers.iter().find(|seen| seen.name == name(worker));
    known.map_or((false, 0.0, 0.0), |seen| (seen.is_ready, seen.cached_blocks, seen.requests))
}
