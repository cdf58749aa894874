//! `kvasir control` with `mode = "act"`: on a Deployment of a double of Kubernetes' API server, and through
//! KEDA's external scaler. Engines are mocks.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::support::site::{ask, chat, mock, model_folder};
use crate::support::{Process, Scratch, free_address, get, wait_for};
use serde_json::{Value, json};
use tests_apiserver::{ApiServer, Rule};
use tools_mocker::{Dialect, Mock, Role};

const NAMESPACE: &str = "llm";
const COST: &str = "controller.kubernetes.io/pod-deletion-cost";

/// With one request at a time and a twentieth of the capacity in use, a few requests per second are too many
/// for one worker.
const PLANNER: &str = r#"
[planner]
mode = "act"
actuator = "kubernetes"
decode_target = "Deployment/decode"
deletion_cost = true
interval = "300ms"
start_time = "2s"
down_after = "2s"
decode_max = 3
utilisation = 0.05
running_max = 1
seasons = []
"#;

/// A child process that is killed on drop.
struct KillOnDrop(Child);

impl KillOnDrop {
    fn start(arguments: &[&str], kubeconfig: &str) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvasir"));
        command.args(arguments).env("KUBECONFIG", kubeconfig).stdin(Stdio::null()).stdout(Stdio::null());
        Self(command.spawn().expect("kvasir starts"))
    }
}

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let _ended = self.0.kill();
        let _ended = self.0.wait();
    }
}

/// The controllers of a Deployment: pods are created up to its replicas, and surplus pods with the lowest
/// deletion cost are deleted; a deleted pod ends when its engine is idle.
struct Deployment {
    server: Arc<ApiServer>,
    runtime: tokio::runtime::Runtime,
    pods: Vec<(Mock, String, Option<Instant>)>,
    made: u8,
}

impl Deployment {
    fn reconcile(&mut self) {
        let replicas = self.server.change(|store| {
            let deployment = store.get("deployments", NAMESPACE, "decode").expect("the Deployment");
            deployment["spec"]["replicas"].as_u64().expect("a count") as usize
        });
        let staying = self.pods.iter().filter(|pod| pod.2.is_none()).count();
        for _ in staying..replicas {
            self.made += 1;
            let ip = Ipv4Addr::new(127, 0, 7, self.made);
            let engine = mock(Dialect::Vllm, Role::Both, true);
            let mock = self.runtime.block_on(Mock::start(engine, (ip, 0).into())).expect("a mock engine");
            let name = format!("decode-{}", self.made);
            let port = mock.address().port().to_string();
            let now = "2026-11-25T10:00:00Z";
            let pod = json!({"apiVersion": "v1", "kind": "Pod",
                "metadata": {"namespace": NAMESPACE, "name": name, "uid": name, "labels": {"app": "vllm"},
                    "creationTimestamp": now, "annotations": {"kvasir/port": port}},
                "status": {"phase": "Running", "podIP": ip.to_string(), "conditions": [
                    {"type": "Ready", "status": "True", "lastTransitionTime": now}]}});
            self.server.change(|store| store.put("pods", pod));
            self.pods.push((mock, name, None));
        }
        for _ in replicas..staying {
            let cost = |name: &str| {
                self.server.change(|store| {
                    let pod = store.get("pods", NAMESPACE, name).expect("the pod");
                    pod["metadata"]["annotations"][COST]
                        .as_str()
                        .and_then(|cost| cost.parse().ok())
                        .unwrap_or(0_i64)
                })
            };
            let least = (0..self.pods.len())
                .filter(|at| self.pods[*at].2.is_none())
                .min_by_key(|at| cost(&self.pods[*at].1))
                .expect("a pod");
            let name = self.pods[least].1.clone();
            self.server.change(|store| {
                let mut pod = store.get("pods", NAMESPACE, &name).expect("the pod").clone();
                pod["metadata"]["deletionTimestamp"] = json!("2026-11-25T10:00:00Z");
                store.put("pods", pod);
            });
            self.pods[least].2 = Some(Instant::now());
        }
        let ended = |pod: &(Mock, String, Option<Instant>)| {
            pod.2.is_some_and(|since| since.elapsed() > Duration::from_millis(300))
                && pod.0.stats().running == 0
        };
        while let Some(at) = self.pods.iter().position(ended) {
            let (mock, name, _) = self.pods.swap_remove(at);
            self.server.change(|store| store.delete("pods", NAMESPACE, &name));
            self.runtime.block_on(mock.stop());
        }
    }
}

fn role() -> Vec<Rule> {
    let list = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<String>>();
    let rule = |group: &str, resource: &str, names: &[&str], verbs: &[&str]| Rule {
        groups: list(&[group]),
        resources: list(&[resource]),
        names: list(names),
        verbs: list(verbs),
    };
    vec![
        rule("", "pods", &[], &["get", "list", "watch", "patch"]),
        rule("apps", "deployments/scale", &["decode"], &["get", "patch"]),
        rule("coordination.k8s.io", "leases", &[], &["create"]),
        rule("coordination.k8s.io", "leases", &["kvasir-control"], &["get", "update"]),
    ]
}

fn told(address: &str, path: &str) -> Value {
    match get(address, path) {
        Ok((200, body)) => serde_json::from_str(&body).expect("JSON"),
        _ => Value::Null,
    }
}

#[test]
fn a_deployment_follows_demand_one_of_two_controls_acts_and_a_hand_is_respected() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let server = Arc::new(runtime.block_on(ApiServer::start(1)).expect("a port"));
    server.allow(role());
    server.change(|store| {
        store.put(
            "deployments",
            json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"namespace": NAMESPACE, "name": "decode"},
                "spec": {"replicas": 1, "selector": {"matchLabels": {"app": "vllm"}}}}),
        );
    });
    let stop = Arc::new(AtomicBool::new(false));
    let controller = {
        let (server, stop) = (Arc::clone(&server), Arc::clone(&stop));
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Runtime::new().expect("a runtime");
            let mut deployment = Deployment { server, runtime, pods: Vec::new(), made: 0 };
            while !stop.load(Ordering::SeqCst) {
                deployment.reconcile();
                std::thread::sleep(Duration::from_millis(50));
            }
        })
    };
    let scratch = Scratch::new("actuators");
    let kubeconfig = scratch.config("kubeconfig", &server.kubeconfig(NAMESPACE));
    let config = format!(
        "[gateway]\nhealth_interval = \"100ms\"\nmodel_folder = {:?}\n[discovery]\nselector = \"app=vllm\"\n",
        model_folder()
    );
    let path = scratch.config("gateway.toml", &config);
    let gateway = Process::start_with(&["gateway", "--config", &path], &[("KUBECONFIG", &kubeconfig)]);
    let address = gateway.address.clone();
    let ready = || {
        let workers = told(&address, "/kvasir/workers")["workers"].as_array().cloned().unwrap_or_default();
        workers.iter().filter(|worker| worker["state"] == "ready").count()
    };
    wait_for("the first pod", || ready() == 1);
    let report = [free_address(), free_address()];
    let control = |which: usize| {
        let listen = &report[which];
        let text = format!("{PLANNER}[control]\nlisten = {listen:?}\nleader = \"lease\"\n");
        let path = scratch.config(&format!("control-{which}.toml"), &text);
        KillOnDrop::start(&["control", "--gateway", &address, "--config", &path], &kubeconfig)
    };
    let mut controls = [control(0), control(1)];
    let leads = |which: usize| {
        let text = get(&report[which], "/metrics").map(|answer| answer.1).unwrap_or_default();
        text.contains("kvasir_control_leader 1")
    };
    wait_for("both to be ready", || {
        (0..2).all(|at| get(&report[at], "/readyz").is_ok_and(|answer| answer.0 == 200))
    });
    wait_for("a leader", || leads(0) != leads(1));
    let replicas = || {
        server.change(|store| {
            store.get("deployments", NAMESPACE, "decode").expect("it")["spec"]["replicas"].as_u64()
        })
    };
    let load = |clients: usize, until: &dyn Fn() -> bool| {
        let (over, answered) = (AtomicBool::new(false), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for number in 0..clients {
                let (over, answered, address) = (&over, &answered, &address);
                scope.spawn(move || {
                    for sent in 0.. {
                        if over.load(Ordering::SeqCst) {
                            return;
                        }
                        let (status, answer) = ask(address, &chat(8, number * 1_000 + sent, 24));
                        assert_eq!(status, 200, "{answer}");
                        answered.fetch_add(1, Ordering::SeqCst);
                    }
                });
            }
            // A failed wait must not leave the clients running.
            let waited = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                wait_for("the count to follow", until)
            }));
            over.store(true, Ordering::SeqCst);
            waited.expect("in time");
        });
        answered.load(Ordering::SeqCst)
    };
    let mut answered = load(6, &|| replicas() == Some(3) && ready() == 3);
    // The leader is killed: the other control service takes over.
    let leader = usize::from(leads(1));
    let _ended = controls[leader].0.kill();
    let other = 1 - leader;
    let died = Instant::now();
    wait_for("the other to lead", || leads(other));
    println!("the other control leads {:?} after the leader was killed", died.elapsed());
    // Requests are in flight while pods are deleted.
    let until = Instant::now() + Duration::from_secs(2);
    answered += load(1, &|| Instant::now() > until);
    wait_for("one pod again", || replicas() == Some(1) && ready() == 1);
    let plan = told(&address, "/kvasir/plan");
    assert_eq!((&plan["mode"], &plan["pools"][0]["pool"]), (&json!("act"), &json!("both")), "{plan}");
    // The Deployment is scaled by hand: the count stays, and the plan gives the reason.
    server.change(|store| {
        let mut deployment = store.get("deployments", NAMESPACE, "decode").expect("it").clone();
        deployment["spec"]["replicas"] = json!(2);
        store.put("deployments", deployment);
    });
    wait_for("the second pod", || ready() == 2);
    wait_for("the plan to say so", || told(&address, "/kvasir/plan")["pools"][0]["reason"] == "manual_hold");
    std::thread::sleep(Duration::from_secs(3));
    assert_eq!(replicas(), Some(2));
    let calls = server.calls();
    assert!(calls.iter().any(|call| call == "patch core pods"), "deletion costs were set: {calls:?}");
    println!("{answered} requests, 0 failed; the API server was asked for: {}", calls.join(", "));
    let _ended = controls[other].0.kill();
    stop.store(true, Ordering::SeqCst);
    controller.join().expect("no panic");
}

/// KEDA's protocol through Python's gRPC, with an autoscaler that has the default tolerance.
#[test]
fn keda_is_told_what_its_autoscaler_will_carry_out() {
    let has_package = Command::new("python3").args(["-c", "import grpc, google.protobuf"]).output();
    if !has_package.is_ok_and(|output| output.status.success()) {
        eprintln!(
            "SKIPPED: `python3 -c 'import grpc, google.protobuf'` fails here (pip install grpcio protobuf)"
        );
        return;
    }
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/client/keda_client.py");
    let output =
        Command::new("python3").arg(script).arg(env!("CARGO_BIN_EXE_kvasir")).output().expect("python3 runs");
    let printed = String::from_utf8_lossy(&output.stdout);
    println!("{printed}");
    assert!(output.status.success(), "{printed}\n{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(printed.matches("ok: ").count(), 6, "{printed}");
}

#[test]
fn settings_that_cannot_be_carried_out_are_refused_by_name() {
    let scratch = Scratch::new("actuators-bad");
    let refused = |text: &str| {
        let path = scratch.config("bad.toml", &format!("[planner]\nmode = \"act\"\n{text}"));
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvasir"));
        let output = command
            .args(["control", "--config", &path])
            .env("KUBECONFIG", "/nonexistent")
            .output()
            .expect("it runs");
        assert!(!output.status.success(), "{text}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    for (text, expected) in [
        ("", "planner.actuator"),
        ("actuator = \"webhook\"\n", "control.webhook"),
        ("actuator = \"webhook\"\n[control]\nwebhook = \"scaler\"\n", "control.webhook"),
        ("actuator = \"keda\"\n[control]\nkeda_listen = \"8091\"\n", "control.keda_listen"),
        ("actuator = \"keda\"\n[control]\nleader = \"lease\"\n", "control.leader"),
    ] {
        let said = refused(text);
        assert!(said.contains(expected), "{text}: {said}");
    }
}
