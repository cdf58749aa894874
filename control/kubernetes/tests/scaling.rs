//! Workloads that are counted and scaled, and control services that elect one of them, over the double of the API server.
//! Time is simulated, and no socket is used.

#![forbid(unsafe_code)]

use std::time::Duration;

use control_kubernetes::{KubernetesLease, ScaleError, ScaleTarget, Workload};
use kube::Client;
use serde_json::{Value, json};
use tests_apiserver::{ApiServer, Faults, Rule};
use tokio::sync::watch;
use tokio::task::JoinHandle;

const NAMESPACE: &str = "llm";

fn cluster() -> (ApiServer, Client) {
    let server = ApiServer::new(1);
    let client = Client::new(server.router(), NAMESPACE);
    server.change(|store| {
        store.put(
            "deployments",
            json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"namespace": NAMESPACE, "name": "decode"},
                "spec": {"replicas": 2, "selector": {"matchLabels": {"app": "vllm"}}}, "status": {"replicas": 2}}),
        );
    });
    (server, client)
}

fn pod(name: &str, app: &str, ready: bool) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"namespace": NAMESPACE, "name": name, "uid": name, "labels": {"app": app},
            "creationTimestamp": "2026-11-25T10:00:00Z"},
        "status": {"phase": "Running", "podIP": format!("10.0.0.{}", name.len()), "conditions": [
            {"type": "Ready", "status": if ready { "True" } else { "False" }, "lastTransitionTime": "2026-11-25T10:01:00Z"}]}})
}

fn workload(client: &Client) -> Workload {
    Workload::new(client, None, ScaleTarget::parse("Deployment/decode").expect("a target"))
}

#[tokio::test(start_paused = true)]
async fn replicas_are_read_with_their_pods_and_set_unless_they_have_changed() {
    let (server, client) = cluster();
    for (name, app, ready) in [("a", "vllm", true), ("bb", "vllm", false), ("ccc", "other", true)] {
        server.change(|store| store.put("pods", pod(name, app, ready)));
    }
    let mut workload = workload(&client);
    let counts = workload.read().await.expect("the server answers");
    assert_eq!((counts.replicas, counts.ready, counts.starting_for.len(), counts.draining), (2, 1, 1, 0));
    workload.set(3, &counts).await.expect("nothing has changed");
    let replicas = || {
        server.change(|store| {
            store.get("deployments", NAMESPACE, "decode").expect("it")["spec"]["replicas"].clone()
        })
    };
    assert_eq!(replicas(), 3);
    // One of two leaders, which does not know yet that it has lost the lease.
    let stale = workload.set(9, &counts).await;
    assert!(matches!(stale, Err(ScaleError::Stale(_))), "{stale:?}");
    assert_eq!(replicas(), 3);
    workload.set_deletion_costs(|ip| (ip == "10.0.0.1").then_some(7)).await.expect("pods can be patched");
    let cost = |name: &str| {
        server.change(|store| {
            let pod = store.get("pods", NAMESPACE, name).expect("the pod");
            pod["metadata"]["annotations"]["controller.kubernetes.io/pod-deletion-cost"].clone()
        })
    };
    assert_eq!((cost("a"), cost("bb")), (json!("7"), Value::Null));
    server.set_down(true);
    assert!(matches!(workload.read().await, Err(ScaleError::Failed { .. })));
}

#[tokio::test(start_paused = true)]
async fn a_right_that_is_missing_is_named() {
    let (server, client) = cluster();
    let list = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<String>>();
    let read_only = Rule {
        groups: list(&["*"]),
        resources: list(&["*"]),
        verbs: list(&["get", "list"]),
        ..Rule::default()
    };
    server.allow(vec![read_only]);
    let mut workload = workload(&client);
    let counts = workload.read().await.expect("reading is allowed");
    let error = workload.set(3, &counts).await.expect_err("patching is not");
    let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
    assert!(
        error.to_string().contains("Deployment/decode") && cause.contains("deployments/scale is forbidden"),
        "{error}: {cause}"
    );
    assert_eq!(
        server.calls(),
        ["get apps deployments/scale", "list core pods", "patch apps deployments/scale"]
    );
}

struct Candidate {
    leads: watch::Receiver<bool>,
    task: JoinHandle<()>,
}

impl Candidate {
    fn start(client: &Client, identity: &str) -> Self {
        let (sender, leads) = watch::channel(false);
        let lease = KubernetesLease::new(client.clone(), None, "kvasir-control", identity);
        Self { leads, task: tokio::spawn(control_discovery::election::run(lease, sender)) }
    }

    fn leads(&self) -> bool {
        *self.leads.borrow()
    }

    async fn within(&mut self, seconds: u64) -> Duration {
        let began = tokio::time::Instant::now();
        let elected =
            tokio::time::timeout(Duration::from_secs(seconds), self.leads.wait_for(|leads| *leads)).await;
        assert!(elected.is_ok(), "not within {seconds} s");
        began.elapsed()
    }
}

#[tokio::test(start_paused = true)]
async fn one_leads_at_a_time_and_another_takes_over() {
    let (server, client) = cluster();
    let (mut first, mut second) = (Candidate::start(&client, "first"), Candidate::start(&client, "second"));
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(first.leads() != second.leads(), "one of them leads");
    if second.leads() {
        std::mem::swap(&mut first, &mut second);
    }
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert!(first.leads() && !second.leads(), "it is renewed");
    // Killed: the Lease is not released.
    first.task.abort();
    let after_death = second.within(30).await;
    assert!(after_death >= Duration::from_secs(10), "{after_death:?}");
    // Stopped: the Lease is released.
    let mut third = Candidate::start(&client, "third");
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(second.leads() && !third.leads());
    let Candidate { leads, task } = second;
    drop(leads);
    task.await.expect("it ends");
    let after_release = third.within(5).await;
    println!("a new leader {after_death:?} after the old one died, {after_release:?} after it was stopped");
    // The API server is down: a leader gives up before another process could take over.
    server.set_down(true);
    tokio::time::sleep(Duration::from_secs(11)).await;
    assert!(!third.leads());
    server.set_down(false);
    third.within(5).await;
}

/// There are never two leaders, whatever the server does.
#[tokio::test(start_paused = true)]
async fn there_are_never_two_leaders_under_faults() {
    let (server, client) = cluster();
    server.set_faults(Faults { fail: 200, throttle: 100, ..Faults::default() });
    let candidates: Vec<Candidate> =
        ["a", "b", "c"].iter().map(|identity| Candidate::start(&client, identity)).collect();
    let (mut led, mut changes, mut last) = (0, 0, None);
    for second in 0..3_000_u64 {
        if second % 97 == 0 {
            server.set_down(true);
        } else if second % 97 == 20 {
            server.set_down(false);
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        let leaders: Vec<usize> = (0..3).filter(|at| candidates[*at].leads()).collect();
        assert!(leaders.len() < 2, "second {second}: {leaders:?}");
        led += leaders.len();
        if !leaders.is_empty() && last != leaders.first().copied() {
            (last, changes) = (leaders.first().copied(), changes + 1);
        }
    }
    println!("of 3000 s under faults {led} s with a leader, {changes} changes");
    assert!(led > 1_000 && changes > 1, "{led} {changes}");
}
