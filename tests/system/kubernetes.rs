//! Workers in pods: a real gateway, mock engines, and a double of the API server.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::etcd::Etcd;
use crate::support::load::Load;
use crate::support::register::Register;
use crate::support::site::{ask, chat, mock, model_folder};
use crate::support::{Process, Scratch, free_address, get, wait_for};
use serde_json::{Value, json};
use tests_apiserver::ApiServer;
use tools_mocker::{Dialect, Mock, Role};

const NAMESPACE: &str = "llm";

/// A gateway that discovers its workers at the double.
struct Cluster {
    /// Runs the double and the mock engines.
    runtime: tokio::runtime::Runtime,
    server: ApiServer,
    mocks: Vec<Mock>,
    gateway: Process,
    _scratch: Scratch,
}

impl Cluster {
    fn start(name: &str, mocks: usize, discovery: &str) -> Self {
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let server = runtime.block_on(ApiServer::start(1)).expect("a port");
        let mocks: Vec<Mock> = (0..mocks).map(|_| engine(&runtime, "127.0.0.1:0")).collect();
        let scratch = Scratch::new(name);
        let kubeconfig = scratch.config("kubeconfig", &server.kubeconfig(NAMESPACE));
        // Tests with few pods use a shorter interval, so that they do not wait a second for each.
        let interval = if mocks.len() > 1 { "100ms" } else { "1s" };
        let config = format!(
            "[gateway]\nhealth_interval = {interval:?}\nmodel_folder = {:?}\n[discovery]\n{discovery}",
            model_folder()
        );
        let path = scratch.config("kvasir.toml", &config);
        let gateway = Process::start_with(&["gateway", "--config", &path], &[("KUBECONFIG", &kubeconfig)]);
        let cluster = Self { runtime, server, mocks, gateway, _scratch: scratch };
        wait_for("the gateway", || get(&cluster.gateway.address, "/livez").is_ok());
        cluster
    }

    fn put(&self, pod: Value) {
        self.server.change(|store| store.put("pods", pod));
    }

    /// Returns the pod of a mock engine.
    fn pod(&self, which: usize, uid: &str) -> Value {
        pod(&format!("engine-{which}"), uid, "127.0.0.1", &port(&self.mocks[which]))
    }

    fn workers(&self) -> Vec<Value> {
        let (_, body) = get(&self.gateway.address, "/kvasir/workers").expect("an answer");
        let told: Value = serde_json::from_str(&body).expect("JSON");
        told["workers"].as_array().cloned().unwrap_or_default()
    }

    fn ready(&self) -> usize {
        self.workers().iter().filter(|worker| worker["state"] == "ready").count()
    }

    fn requests(&self, which: usize) -> u64 {
        self.mocks[which].stats().requests
    }

    /// Returns the sources in the status of discovery.
    fn sources(&self) -> Vec<Value> {
        let (_, body) = get(&self.gateway.address, "/kvasir/workers").expect("an answer");
        let told: Value = serde_json::from_str(&body).expect("JSON");
        told["discovery"]["sources"].as_array().cloned().unwrap_or_default()
    }

    fn error(&self) -> Value {
        self.sources().first().map_or(Value::Null, |source| source["error"].clone())
    }
}

/// Starts a mock engine that listens on this address.
fn engine(runtime: &tokio::runtime::Runtime, listen: &str) -> Mock {
    let listen = listen.parse().expect("an address");
    runtime.block_on(Mock::start(mock(Dialect::Vllm, Role::Both, true), listen)).expect("a mock engine")
}

fn port(engine: &Mock) -> String {
    engine.url().rsplit_once(':').expect("a port").1.to_owned()
}

fn pod(name: &str, uid: &str, ip: &str, port: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"namespace": NAMESPACE, "name": name, "uid": uid, "labels": {"app": "vllm"},
            "annotations": {"kvasir/port": port}},
        "status": {"phase": "Running", "podIP": ip, "conditions": [{"type": "Ready", "status": "True"}]}})
}

fn not_ready(mut pod: Value) -> Value {
    pod["status"]["conditions"][0]["status"] = json!("False");
    pod
}

fn deleted(mut pod: Value) -> Value {
    pod["metadata"]["deletionTimestamp"] = json!("2026-11-24T10:00:00Z");
    pod
}

/// A pod that fails its readiness probe, or is deleted, gets no new request from then on.
#[test]
fn a_pod_that_leaves_gets_no_new_request() {
    let config = "selector = \"app=vllm\"\n[router]\nstrategy = \"round-robin\"\n";
    let cluster = Cluster::start("k8s-leave", 2, config);
    cluster.put(cluster.pod(0, "a"));
    cluster.put(cluster.pod(1, "b"));
    wait_for("both pods", || cluster.ready() == 2);
    let load = Load::start(&cluster.gateway.address, 200);
    let mut lags = Vec::new();
    let (mut served, mut since) = (0, cluster.requests(0));
    for round in 0..40 {
        let leaves =
            if round % 2 == 0 { not_ready(cluster.pod(0, "a")) } else { deleted(cluster.pod(0, "a")) };
        std::thread::sleep(Duration::from_millis(60));
        let (left, before) = (Instant::now(), cluster.requests(0));
        served += before - since;
        cluster.put(leaves);
        let (mut last, mut seen) = (Duration::ZERO, before);
        while left.elapsed() < Duration::from_millis(150) {
            let now = cluster.requests(0);
            if now > seen {
                (last, seen) = (left.elapsed(), now);
            }
            std::thread::sleep(Duration::from_micros(500));
        }
        lags.push(last);
        cluster.put(cluster.pod(0, "a"));
        wait_for("it to be back", || cluster.ready() == 2);
        since = cluster.requests(0);
    }
    let answered = load.end();
    lags.sort();
    println!(
        "last new request after a pod left, 40 times at 200 requests/s: p50 {:?}, p99 {:?}; {served} requests went there in \
         the 60 ms before each; {answered} requests, 0 failed",
        lags[lags.len() / 2],
        lags[lags.len() - 1]
    );
    assert!(served >= 40, "the pod must have been in use: {served}");
    // The value is printed; a busy machine must not cause a failure.
    assert!(lags[lags.len() / 2] < Duration::from_millis(100), "{lags:?}");
}

/// The API server is down, ends watches, and restarts without the pods: no request fails.
#[test]
fn an_api_server_that_is_away_or_lies_fails_no_request() {
    let seconds = std::env::var("KVASIR_SECONDS").ok().and_then(|seconds| seconds.parse().ok()).unwrap_or(6);
    let config = "selector = \"app=vllm\"\nguard_time = \"1h\"\n";
    let cluster = Cluster::start("k8s-away", 3, config);
    (0..3).for_each(|which| cluster.put(cluster.pod(which, "a")));
    wait_for("the pods", || cluster.ready() == 3);
    let load = Load::start(&cluster.gateway.address, 200);
    cluster.server.set_down(true);
    wait_for("it to be noticed", || cluster.error().is_string());
    std::thread::sleep(Duration::from_secs(seconds));
    assert_eq!(cluster.workers().len(), 3, "the roster stays");
    cluster.server.set_down(false);
    wait_for("it to be back", || cluster.error().is_null());
    // A backup without the pods is restored: a successful but wrong list.
    cluster.server.change(tests_apiserver::Store::clear_without_events);
    wait_for("the guard", || cluster.gateway.metric("kvasir_discovery_suspect") == 3.0);
    std::thread::sleep(Duration::from_secs(1));
    wait_for("all of them, which answer their health checks", || cluster.ready() == 3);
    // The pods are reported again, one of them with another identity.
    cluster.put(cluster.pod(0, "a"));
    cluster.put(cluster.pod(1, "new"));
    wait_for("two to be trusted again", || cluster.gateway.metric("kvasir_discovery_suspect") == 1.0);
    let answered = load.end();
    assert!(answered > 100, "{answered}");
    println!("API server away for {seconds} s and restored without its pods: {answered} requests, 0 failed");
}

/// A control service that plans for a gateway; it is killed on drop.
struct Control(Child);

impl Control {
    fn start(gateway: &str, config: &str) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvasir"));
        let command = command.args(["control", "--gateway", gateway, "--config", config]);
        Self(command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("kvasir control"))
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        // The process may already have exited.
        let _gone = self.0.kill();
        let _status = self.0.wait();
    }
}

/// The control service, etcd and the API server are down at the same time for `KVASIR_SECONDS`, and come
/// back: no request fails.
#[test]
fn control_etcd_and_the_api_server_are_away_and_no_request_fails() {
    let Some(mut etcd) = Etcd::start("k8s-all-etcd", &[]) else { return };
    let seconds = std::env::var("KVASIR_SECONDS").ok().and_then(|seconds| seconds.parse().ok()).unwrap_or(6);
    let discovery =
        format!("selector = \"app=vllm\"\nguard_time = \"1h\"\n[etcd]\nendpoints = [{:?}]\n", etcd.url());
    let cluster = Cluster::start("k8s-all", 3, &discovery);
    (0..2).for_each(|which| cluster.put(cluster.pod(which, "a")));
    let _registered = Register::start(&etcd, &cluster.mocks[2].url(), &[]);
    wait_for("two pods and a registered worker", || cluster.ready() == 3);
    let scratch = Scratch::new("k8s-all-control");
    let config = scratch.config(
        "control.toml",
        &format!("[planner]\ninterval = \"300ms\"\n[control]\nlisten = \"{}\"\n", free_address()),
    );
    let address = &cluster.gateway.address;
    let planned_at = || {
        let (_, body) = get(address, "/kvasir/plan").unwrap_or_default();
        serde_json::from_str::<Value>(&body).ok().and_then(|plan| plan["unix_ms"].as_u64()).unwrap_or(0)
    };
    let control = Control::start(address, &config);
    wait_for("a plan", || planned_at() > 0);
    let load = Load::start(address, 200);
    drop(control);
    etcd.kill();
    cluster.server.set_down(true);
    let failing = || cluster.sources().iter().filter(|source| source["error"].is_string()).count();
    wait_for("both to be noticed", || failing() == 2);
    let last_plan = planned_at();
    std::thread::sleep(Duration::from_secs(seconds));
    assert_eq!((cluster.ready(), planned_at()), (3, last_plan), "workers stay, and nobody plans");
    etcd.restart_empty();
    cluster.server.set_down(false);
    let _control = Control::start(address, &config);
    wait_for("both to be read again", || failing() == 0);
    wait_for("a plan again", || planned_at() > last_plan);
    let sum = |of: &str| cluster.sources().iter().filter_map(|source| source[of].as_u64()).sum::<u64>();
    wait_for("all workers to be reported again", || (sum("workers"), sum("suspect")) == (3, 0));
    assert_eq!(cluster.ready(), 3);
    let answered = load.end();
    println!("control, etcd and the API server away for {seconds} s: {answered} requests at 200/s, 0 failed");
}

/// A pod with the same name and address and another UID is a different worker; a pod whose labels change
/// leaves the selection.
#[test]
fn pods_are_told_apart_by_uid_and_selected_by_labels() {
    let cluster = Cluster::start("k8s-uid", 2, "inference_pool = \"llama\"\n");
    wait_for("the missing pool to be told", || cluster.error().to_string().contains("llama"));
    cluster.server.change(|store| {
        store.put(
            "inferencepools",
            json!({"apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool",
            "metadata": {"namespace": NAMESPACE, "name": "llama"},
            "spec": {"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": 8000}]}}),
        );
    });
    cluster.put(cluster.pod(0, "first"));
    cluster.put(cluster.pod(1, "other"));
    wait_for("both pods", || cluster.ready() == 2);
    for number in 0..6 {
        assert_eq!(ask(&cluster.gateway.address, &chat(40, number % 2, 2)).0, 200);
    }
    let version = || {
        let (_, body) = get(&cluster.gateway.address, "/kvasir/workers").expect("an answer");
        serde_json::from_str::<Value>(&body).expect("JSON")["version"].as_u64()
    };
    let before = version();
    cluster.put(cluster.pod(0, "first"));
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(version(), before, "the same pod is no change");
    cluster.put(cluster.pod(0, "second"));
    wait_for("the new pod", || version() > before && cluster.ready() == 2);
    let mut unlabelled = cluster.pod(1, "other");
    unlabelled["metadata"]["labels"]["app"] = json!("none");
    cluster.put(unlabelled);
    wait_for("the pod to leave the selection", || cluster.workers().len() == 1);
    // The pool's selector changes: its pods are replaced at once, although most of the previous ones are
    // missing.
    cluster.server.change(|store| {
        store.put(
            "inferencepools",
            json!({"apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool",
            "metadata": {"namespace": NAMESPACE, "name": "llama"},
            "spec": {"selector": {"matchLabels": {"app": "none"}}, "targetPorts": [{"number": 8000}]}}),
        );
    });
    let url = cluster.mocks[1].url();
    wait_for("the pool's other pod", || {
        let workers = cluster.workers();
        workers.len() == 1 && workers[0]["url"] == *url && workers[0]["state"] == "ready"
    });
    assert_eq!(cluster.gateway.metric("kvasir_discovery_suspect"), 0.0);
    cluster.server.change(|store| store.delete("pods", NAMESPACE, "engine-1"));
    wait_for("the last pod to be gone", || cluster.workers().is_empty());
}

/// A thousand pods, a hundred changes a second: prints the cost of following them, and checks that the roster
/// is right at the end. With `KVASIR_PODS=answer` an engine answers at every address, and is health-checked
/// each second.
#[test]
fn a_thousand_pods_change_a_hundred_times_a_second() {
    const PODS: usize = 1_000;
    let cluster = Cluster::start("k8s-many", 1, "selector = \"app=vllm\"\n[serve]\n");
    let memory = || cluster.gateway.metric("process_resident_memory_bytes") / f64::from(1 << 20);
    let empty = memory();
    let is_answered = std::env::var("KVASIR_PODS").is_ok_and(|pods| pods == "answer");
    let everywhere = is_answered.then(|| engine(&cluster.runtime, "0.0.0.0:0"));
    // Without a listener, pods are starting: this measures only discovery and the fleet's work for such
    // workers.
    let port = everywhere.as_ref().map_or("9".to_owned(), port);
    let address = |number: usize| format!("127.1.{}.{}", number / 250, 1 + number % 250);
    let uid = |number: usize, round: usize| format!("{number}-{round}");
    let began = Instant::now();
    cluster.server.change(|store| {
        for number in 0..PODS {
            store.put(
                "pods",
                not_ready(pod(&format!("pod-{number}"), &uid(number, 0), &address(number), &port)),
            );
        }
    });
    wait_for("all pods", || cluster.workers().len() == PODS);
    let listed = began.elapsed();
    let cpu = || cluster.gateway.metric("process_cpu_seconds_total");
    // Waits until health checks of workers without an answer are at their longest interval.
    std::thread::sleep(Duration::from_secs(12));
    let (idle, started) = (cpu(), Instant::now());
    std::thread::sleep(Duration::from_secs(5));
    let idle = (cpu() - idle) / started.elapsed().as_secs_f64();
    let seconds = 10;
    let (busy, started) = (cpu(), Instant::now());
    for change in 0..100 * seconds {
        let number = change * 7 % PODS;
        // One in ten is another pod under the same name; the others change their readiness.
        let round = if change % 10 == 0 { change + 1 } else { 0 };
        let changed = pod(&format!("pod-{number}"), &uid(number, round), &address(number), &port);
        cluster.put(if change % 2 == 0 { not_ready(changed) } else { changed });
        std::thread::sleep(
            (Duration::from_millis(10) * (change as u32 + 1)).saturating_sub(started.elapsed()),
        );
    }
    let busy = (cpu() - busy) / started.elapsed().as_secs_f64();
    cluster.server.change(|store| {
        (0..PODS / 2).for_each(|number| {
            assert!(store.delete("pods", NAMESPACE, &format!("pod-{number}")));
        })
    });
    wait_for("half of them to be gone", || cluster.workers().len() == PODS / 2);
    let memory = memory();
    println!(
        "{PODS} pods that {}: in the roster after {listed:?}; of a core {:.1} % without changes, {:.1} % more with 100 changes/s; \
         {memory:.0} MiB, {empty:.0} before the first pod",
        if is_answered { "answer" } else { "do not answer" },
        idle * 100.0,
        (busy - idle) * 100.0
    );
    assert!(listed < Duration::from_secs(20), "{listed:?}");
}

#[test]
fn without_a_cluster_the_start_says_so() {
    let output = Command::new(env!("CARGO_BIN_EXE_kvasir"))
        .args(["gateway", "--service-discovery", "--selector", "app=vllm", "--listen", "127.0.0.1:0"])
        .env("KUBECONFIG", "/nonexistent")
        .env_remove("KUBERNETES_SERVICE_HOST")
        .output()
        .expect("kvasir gateway");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("no Kubernetes API"), "{said}");
}
