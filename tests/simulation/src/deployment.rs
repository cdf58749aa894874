//! Engines that are pods of a Deployment: the behaviour of Kubernetes' controllers, over a double of the API
//! server.

use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use tests_apiserver::ApiServer;

use crate::kernel::{Nanos, SECOND};
use crate::oracle::{Oracle, Violation};

/// Namespace of all objects.
pub(crate) const NAMESPACE: &str = "llm";
/// Name of the Deployment, and prefix of its pods' names.
pub(crate) const NAME: &str = "decode";
/// Label `app` of the pods.
pub(crate) const APP: &str = "vllm";

/// Shortest time between the request to delete a pod and its removal, so that gateways learn of the deletion
/// first.
const LEAVES_AFTER: Nanos = 2 * SECOND;
/// Time after which a pod that still has requests is removed.
const GRACE: Nanos = 30 * SECOND;
/// Every timestamp of an object; no decision depends on it.
const DATE: &str = "2026-01-01T00:00:00Z";

/// A pod, which is the engine of the same index.
#[derive(Debug, Clone)]
struct Pod {
    name: String,
    /// Time at which its deletion was requested; `None`: it stays.
    leaving_since: Option<Nanos>,
}

/// Engines to start and to stop.
#[derive(Debug, Default)]
pub(crate) struct ScaleActions {
    pub(crate) start: Vec<usize>,
    pub(crate) stop: Vec<usize>,
}

pub(crate) struct Deployment {
    server: Arc<ApiServer>,
    /// Pods by index of the engine.
    pods: Vec<Option<Pod>>,
    addresses: Vec<String>,
    pods_created: usize,
    /// Lower and upper bound of the replicas.
    replicas_min_max: (u64, u64),
    /// Replicas at the last look, and whether the last change was a fall.
    last_replicas: u64,
    was_lowered: bool,
    reversals: u64,
}

impl Deployment {
    /// Creates a Deployment with this many replicas and no pods yet.
    pub(crate) fn new(server: Arc<ApiServer>, replicas: u8, addresses: Vec<String>) -> Self {
        let object = json!({
            "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"namespace": NAMESPACE, "name": NAME, "uid": NAME},
            "spec": {"replicas": replicas, "selector": {"matchLabels": {"app": APP}}},
            "status": {"replicas": replicas},
        });
        server.change(|store| store.put("deployments", object));
        let replicas_min_max = (1, addresses.len() as u64);
        Self {
            server,
            pods: vec![None; addresses.len()],
            addresses,
            pods_created: 0,
            replicas_min_max,
            last_replicas: replicas.into(),
            was_lowered: false,
            reversals: 0,
        }
    }

    pub(crate) fn server(&self) -> Arc<ApiServer> {
        Arc::clone(&self.server)
    }

    /// Whether the engine is a pod that is not being deleted.
    pub(crate) fn is_staying(&self, engine: usize) -> bool {
        self.pods[engine].as_ref().is_some_and(|pod| pod.leaving_since.is_none())
    }

    /// Whether the engine is a pod.
    pub(crate) fn is_pod(&self, engine: usize) -> bool {
        self.pods[engine].is_some()
    }

    /// Returns the replicas of the Deployment.
    pub(crate) fn replicas(&self) -> Result<u64> {
        self.server.change(|store| {
            let deployment = store.get("deployments", NAMESPACE, NAME).context("the Deployment is gone")?;
            deployment["spec"]["replicas"].as_u64().context("the Deployment says no number of pods")
        })
    }

    /// Takes one step towards the replicas of the Deployment; returns an error if they are out of bounds.
    /// `is_idle` tells whether an engine has no request.
    pub(crate) fn reconcile(&mut self, now: Nanos, is_idle: impl Fn(usize) -> bool) -> Result<ScaleActions> {
        let replicas = self.replicas()?;
        let (fewest, most) = self.replicas_min_max;
        let what = format!("{replicas} engines were asked for, and {fewest} to {most} are allowed");
        ensure!((fewest..=most).contains(&replicas), Violation::new(Oracle::Scaling, what));
        self.count_reversal(replicas);
        let staying = (0..self.pods.len()).filter(|engine| self.is_staying(*engine)).count();
        let start = self.create_missing((replicas as usize).saturating_sub(staying));
        self.mark_surplus(staying.saturating_sub(replicas as usize), now);
        Ok(ScaleActions { start, stop: self.remove_drained(now, is_idle) })
    }

    /// Number of rises that followed a fall.
    pub(crate) fn reversals(&self) -> u64 {
        self.reversals
    }

    fn count_reversal(&mut self, replicas: u64) {
        if replicas > self.last_replicas {
            self.reversals += u64::from(self.was_lowered);
            self.was_lowered = false;
        } else if replicas < self.last_replicas {
            self.was_lowered = true;
        }
        self.last_replicas = replicas;
    }

    fn create_missing(&mut self, count: usize) -> Vec<usize> {
        let places = (0..self.pods.len()).filter(|engine| !self.is_pod(*engine)).take(count);
        let places: Vec<usize> = places.collect();
        places.iter().for_each(|engine| self.create(*engine));
        places
    }

    /// Requests the deletion of pods, those with the highest indices first.
    fn mark_surplus(&mut self, count: usize, now: Nanos) {
        for _ in 0..count {
            let last = (0..self.pods.len()).rev().find(|engine| self.is_staying(*engine));
            let Some(pod) = last.and_then(|engine| self.pods[engine].as_mut()) else { return };
            pod.leaving_since = Some(now);
            let name = pod.name.clone();
            self.server.change(|store| {
                if let Some(mut pod) = store.get("pods", NAMESPACE, &name).cloned() {
                    pod["metadata"]["deletionTimestamp"] = json!(DATE);
                    store.put("pods", pod);
                }
            });
        }
    }

    fn remove_drained(&mut self, now: Nanos, is_idle: impl Fn(usize) -> bool) -> Vec<usize> {
        let mut removed = Vec::new();
        for engine in 0..self.pods.len() {
            let since = self.pods[engine].as_ref().and_then(|pod| pod.leaving_since);
            let is_over = since
                .is_some_and(|since| now >= since + LEAVES_AFTER && is_idle(engine) || now >= since + GRACE);
            if is_over && let Some(pod) = self.pods[engine].take() {
                self.server.change(|store| store.delete("pods", NAMESPACE, &pod.name));
                removed.push(engine);
            }
        }
        removed
    }

    fn create(&mut self, engine: usize) {
        self.pods_created += 1;
        let name = format!("{NAME}-{}", self.pods_created);
        let pod = pod(&name, &self.addresses[engine]);
        self.server.change(|store| store.put("pods", pod));
        self.pods[engine] = Some(Pod { name, leaving_since: None });
    }
}

fn pod(name: &str, address: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"namespace": NAMESPACE, "name": name, "uid": name, "labels": {"app": APP}, "creationTimestamp": DATE},
        "status": {"phase": "Running", "podIP": address, "conditions": [
            {"type": "Ready", "status": "True", "lastTransitionTime": DATE}]},
    })
}
