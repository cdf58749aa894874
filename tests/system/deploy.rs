//! `kvasir deploy`: a description that runs, problems that are named, Dynamo's description field by field,
//! and workers of two generations that are never paired. Engines are mocks.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::support;
use crate::support::site::{ask, chat, mock};
use crate::support::{Process, Scratch, client, free_address, get, open, wait_for};
use serde_json::{Value, json};
use tools_mocker::{Dialect, Mock, MockConfig, Role};

fn example(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../deploy/examples").join(name);
    path.to_str().expect("a path").to_owned()
}

fn render(file: &str, more: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvasir"));
    command.args(["deploy", "render", file]).args(more).output().expect("it runs")
}

/// A script that is terminated on drop, and terminates the processes that it started.
struct Script(Child);

impl Script {
    fn stop(&mut self) {
        let _sent = Command::new("kill").arg(self.0.id().to_string()).status();
        let _ended = self.0.wait();
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        if matches!(self.0.try_wait(), Ok(None)) {
            self.stop();
        }
    }
}

fn workers(gateway: &str) -> Vec<Value> {
    let status = get(gateway, "/kvasir/status").map(|(_, body)| body).unwrap_or_default();
    let status: Value = serde_json::from_str(&status).unwrap_or_default();
    status["workers"].as_array().cloned().unwrap_or_default()
}

fn ready(gateway: &str) -> usize {
    workers(gateway).iter().filter(|worker| worker["ready"] == true).count()
}

/// Runs an example from its description to the first answer; all processes that it started end with it.
#[test]
fn a_description_runs_as_processes_until_it_is_stopped() {
    let scratch = Scratch::new("deploy-processes");
    let address = free_address();
    let port = address.rsplit(':').next().expect("a port");
    let text = std::fs::read_to_string(example("mock.toml")).expect("the example");
    let text =
        text.replace("alias = \"tiny\"\n", &format!("alias = \"tiny\"\ngateway = {{ port = {port} }}\n"));
    let file = scratch.config("mock.toml", &text);
    let began = Instant::now();
    let rendered = render(&file, &["--to", "processes"]);
    assert!(rendered.status.success(), "{rendered:?}");
    let script = scratch.config("run.sh", &String::from_utf8_lossy(&rendered.stdout));
    let mut running = Script(
        Command::new("sh")
            .arg(&script)
            .env("KVASIR", env!("CARGO_BIN_EXE_kvasir"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("sh"),
    );
    wait_for("three workers", || ready(&address) == 3);
    let (status, answer) = ask(&address, &chat(600, 1, 8));
    assert_eq!(status, 200, "{answer}");
    println!("from the description to the first answer: {:.1} s", began.elapsed().as_secs_f64());
    let roles: BTreeSet<String> =
        workers(&address).iter().filter_map(|worker| worker["role"].as_str().map(str::to_owned)).collect();
    assert_eq!(roles, ["decode", "prefill"].map(str::to_owned).into());
    let engines: Vec<String> =
        workers(&address).iter().filter_map(|worker| worker["name"].as_str().map(str::to_owned)).collect();
    running.stop();
    for place in engines.iter().chain([&address]) {
        wait_for("all of it to end", || get(place, "/health").is_err());
    }
}

#[test]
fn mistakes_are_named_and_nothing_is_rendered() {
    let scratch = Scratch::new("deploy-bad");
    for (name, text, expected) in [
        ("a.toml", "name = \"a\"\nengine = \"mock\"\nrols = 1\n", "a.toml: line 3: "),
        ("b.yaml", "name: a\nengine: mock\nrole: []\n", "b.yaml: role: there is either"),
        ("c.txt", "", "c.txt: a description ends in"),
        (
            "d.yaml",
            "kind: DynamoGraphDeployment\nmetadata: { name: d }\nspec: {}\n",
            "d.yaml: spec: there is no worker",
        ),
        (
            "e.toml",
            "name = \"e\"\nengine = \"mock\"\n[[role]]\nrole = \"both\"\n[gateway.settings.router]\ntemprature = 1.0\n",
            "e.toml: gateway.settings: ",
        ),
    ] {
        let file = scratch.config(name, text);
        let output = render(&file, &[]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(expected), "{name}: {said}");
        assert!(output.stdout.is_empty(), "{name}");
    }
    let output = render(&example("sglang-large.toml"), &["--to", "processes"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("replicas is more than 1"), "{said}");
}

#[test]
fn a_description_of_dynamos_is_taken_field_by_field() {
    let scratch = Scratch::new("deploy-dynamo");
    let output = render(&example("dynamo.yaml"), &["--to", "description"]);
    let (said, text) = (String::from_utf8_lossy(&output.stderr), String::from_utf8_lossy(&output.stdout));
    assert!(output.status.success(), "{said}");
    let count = |what: &str| said.lines().filter(|line| line.starts_with(what)).count();
    println!(
        "of Dynamo's description {} fields are taken and {} left, each with its reason",
        count("taken "),
        count("left  ")
    );
    assert!(count("taken ") >= 20 && count("left  ") >= 10, "{said}");
    // The converted description is a valid description, which renders the same manifests.
    let own = scratch.config("own.toml", &text);
    let manifests = |file: &str| String::from_utf8_lossy(&render(file, &[]).stdout).into_owned();
    let rendered = manifests(&own);
    assert!(
        rendered.contains("kind: LeaderWorkerSet") && rendered.contains("kind: StatefulSet"),
        "{rendered}"
    );
    assert_eq!(rendered, manifests(&example("dynamo.yaml")));
    let folder = scratch.config("out", "");
    std::fs::remove_file(&folder).expect("a file");
    let output = render(&example("vllm.toml"), &["--output", &folder]);
    assert!(output.status.success() && PathBuf::from(&folder).join("qwen.yaml").is_file(), "{output:?}");
}

/// The preStop hook of an engine's pod: it waits for the engine's own gauges.
#[test]
fn a_pod_that_is_deleted_ends_its_requests_first() {
    if !Command::new("python3").arg("--version").output().is_ok_and(|output| output.status.success()) {
        eprintln!("SKIPPED: no python3, which engines' images have");
        return;
    }
    let rendered = String::from_utf8_lossy(&render(&example("vllm.toml"), &[]).stdout).into_owned();
    let script = rendered
        .split("---\n")
        .filter_map(|text| serde_saphyr::from_str::<Value>(text).ok())
        .find_map(|object| {
            let container = &object["spec"]["template"]["spec"]["containers"][0];
            container["lifecycle"]["preStop"]["exec"]["command"][2].as_str().map(str::to_owned)
        })
        .expect("a hook");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    // Half a second per token.
    let config =
        MockConfig { decode_seconds_per_step: 0.5, speedup: 1.0, ..mock(Dialect::Vllm, Role::Both, false) };
    let engine = start(&runtime, config);
    let script = script.replace("127.0.0.1:8000", engine.url().trim_start_matches("http://"));
    let wait = || {
        let began = Instant::now();
        let output = Command::new("python3").args(["-c", &script]).output().expect("python3");
        assert!(output.status.success(), "{output:?}");
        began.elapsed()
    };
    let idle = wait();
    let address = engine.url().trim_start_matches("http://").to_owned();
    let body = json!({"model": "tiny", "stream": true, "max_tokens": 12,
        "messages": [{"role": "user", "content": "x"}]});
    let stream = open(&address, "/v1/chat/completions", &body).expect("a stream");
    let reader = std::thread::spawn(move || support::read_stream(stream, |_| {}));
    let is_running = || {
        let metrics = get(&address, "/metrics").map(|(_, body)| body).unwrap_or_default();
        let value = |line: &str| line.rsplit(' ').next().and_then(|value| value.parse::<f64>().ok());
        let is_running =
            |line: &str| line.starts_with("vllm:num_requests_running") && value(line) > Some(0.0);
        metrics.lines().any(is_running)
    };
    wait_for("the request to run", is_running);
    let busy = wait();
    println!(
        "the hook ends {:.1} s after an idle engine was asked, {:.1} s beside an answer of six seconds",
        idle.as_secs_f64(),
        busy.as_secs_f64()
    );
    assert!(idle < Duration::from_secs(5), "{idle:?}");
    assert!(busy > Duration::from_secs(5) && busy > idle, "{busy:?}");
    let _streamed = reader.join().expect("no panic");
}

fn start(runtime: &tokio::runtime::Runtime, config: MockConfig) -> Mock {
    let any = "127.0.0.1:0".parse().expect("an address");
    runtime.block_on(Mock::start(config, any)).expect("a mock engine")
}

/// During an update, workers of the old and the new version run side by side.
#[test]
fn prefill_and_decode_workers_of_two_generations_are_never_paired() {
    let scratch = Scratch::new("deploy-generations");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let mocks: Vec<(Mock, &str, &str)> = [
        ("old", "prefill", Role::Prefill),
        ("new", "prefill", Role::Prefill),
        ("new", "decode", Role::Decode),
        ("old", "decode", Role::Decode),
    ]
    .map(|(generation, name, role)| (start(&runtime, mock(Dialect::Vllm, role, true)), generation, name))
    .into();
    let listed = |generations: &[&str]| -> String {
        mocks
            .iter()
            .filter(|(_, generation, role)| generations.contains(generation) || *role == "decode")
            .map(|(mock, generation, role)| {
                format!(
                    "[[worker]]\nurl = \"{}\"\nrole = \"{role}\"\ngeneration = \"{generation}\"\n",
                    mock.url()
                )
            })
            .collect()
    };
    let list = scratch.config("workers.toml", &listed(&["old", "new"]));
    let config = scratch.config(
        "kvasir.toml",
        &format!("[discovery]\nfile = \"{list}\"\n[router]\nstrategy = \"random\"\ndisaggregate_above_tokens = 64\n"),
    );
    let gateway = Process::start(&["gateway", "--config", &config]);
    wait_for("four workers", || ready(&gateway.address) == 4);
    let generation_of = |name: &str| {
        mocks.iter().find(|(mock, _, _)| mock.url().ends_with(name)).map(|(_, generation, _)| *generation)
    };
    let mut pairs = BTreeSet::new();
    let routes = |pairs: &mut BTreeSet<(Option<&'static str>, Option<&'static str>)>,
                  seeds: std::ops::Range<usize>| {
        for seed in seeds {
            let (status, head, body) =
                client(&gateway.address, None, "/v1/chat/completions", Some(&chat(400, seed, 2)));
            assert_eq!(status, 200, "{body}");
            let route = head
                .lines()
                .find(|line| line.to_ascii_lowercase().starts_with("x-kvasir-route:"))
                .expect("a route");
            let part = |name: &str| {
                route
                    .split([';', ' '])
                    .find_map(|part| part.strip_prefix(name))
                    .unwrap_or_default()
                    .to_owned()
            };
            let of = |name: String| {
                generation_of(&name).map(|generation| if generation == "old" { "old" } else { "new" })
            };
            pairs.insert((of(part("prefill=")), of(part("worker="))));
        }
    };
    routes(&mut pairs, 0..40);
    println!("pairs of generations in 40 requests: {pairs:?}");
    let both = [(Some("old"), Some("old")), (Some("new"), Some("new"))];
    assert_eq!(pairs, both.into(), "both generations serve, each by itself");
    // The last prefill worker of the old version is removed: its decode workers prefill themselves.
    // Replaced atomically: half a list would be a different list.
    let anew = scratch.config("anew.toml", &listed(&["new"]));
    std::fs::rename(anew, &list).expect("the list");
    wait_for("three workers", || workers(&gateway.address).len() == 3 && ready(&gateway.address) == 3);
    let mut pairs = BTreeSet::new();
    // The prompts of 97 seeds differ.
    routes(&mut pairs, 45..85);
    assert!(pairs.contains(&(None, Some("old"))) && pairs.contains(&(Some("new"), Some("new"))), "{pairs:?}");
    assert!(!pairs.contains(&(Some("new"), Some("old"))), "{pairs:?}");
}

/// Returns the objects of manifests in the form of a cluster: resource and object.
fn manifests(text: &str, namespace: &str) -> Vec<(&'static str, Value)> {
    let read = |text: &str| -> Value { serde_saphyr::from_str(text).expect(text) };
    let documents = text.split("---\n").filter(|text| text.lines().any(|line| !line.starts_with('#')));
    documents
        .map(read)
        .map(|mut object| {
            let version = object["apiVersion"].as_str().expect("a version");
            let kind = object["kind"].as_str().expect("a kind");
            let resource = tests_apiserver::resource_of(version, kind).expect(kind).1;
            object["metadata"]["namespace"] = json!(namespace);
            (resource, object)
        })
        .collect()
}

/// Returns an object without the fields that a cluster and Helm add, and without its generation, which a
/// chart computes itself.
fn bare(object: &Value) -> Value {
    fn clean(value: &mut Value) {
        if let Value::Object(fields) = value {
            for name in [
                "kvasir/generation",
                "app.kubernetes.io/managed-by",
                "uid",
                "resourceVersion",
                "creationTimestamp",
            ] {
                fields.remove(name);
            }
            let is_helms = |name: &String| name.starts_with("meta.helm.sh/");
            // Annotations that are only Helm's are dropped.
            let is_empty = |value: &Value| value.as_object().is_some_and(|all| all.keys().all(is_helms));
            fields.retain(|name, value| !is_helms(name) && (name != "annotations" || !is_empty(value)));
            fields.values_mut().for_each(clean);
        } else if let Value::Array(values) = value {
            values.iter_mut().for_each(clean);
        }
    }
    let mut object = object.clone();
    clean(&mut object);
    object
}

const NAMESPACE: &str = "llm";

/// Returns a Python that has Helm's library, if there is one.
fn python_with_helm() -> Option<String> {
    let named = std::env::var("KVASIR_HELM_PYTHON").ok();
    named.into_iter().chain(["python3".to_owned()]).find(|python| {
        let tried = Command::new(python).args(["-c", "import helm_sdkpy"]).output();
        tried.is_ok_and(|output| output.status.success())
    })
}

/// The chart contains the manifests, and an upgrade keeps the planner's count.
#[test]
fn the_chart_is_linted_installed_and_upgraded_by_helms_own_library() {
    use std::io::{BufRead, BufReader, Write};
    let Some(python) = python_with_helm() else {
        eprintln!(
            "SKIPPED: no Python with Helm's library (pip install helm-sdkpy, Python 3.12; KVASIR_HELM_PYTHON)"
        );
        return;
    };
    let scratch = Scratch::new("deploy-helm");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    // One role whose count the planner sets, and one whose count is a value of the chart.
    let text = std::fs::read_to_string(example("vllm-disaggregated.toml")).expect("the example");
    let text = text
        .replace("max = 6\n", "workers = 2\n")
        .replace("\"--max-num-seqs\"", "\"--odd={{ .x }}\", \"--max-num-seqs\"");
    let file = scratch.config("graph.toml", &text);
    let server = runtime.block_on(tests_apiserver::ApiServer::start(1)).expect("a port");
    let kubeconfig = scratch.config("kubeconfig", &server.kubeconfig(NAMESPACE));
    let chart = format!("{file}.chart");
    assert!(render(&file, &["--to", "helm", "--output", &chart]).status.success());
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/client/helm_client.py");
    let mut helm = Command::new(python)
        .arg(script)
        .args([&kubeconfig, &chart, NAMESPACE])
        .env("HELM_DRIVER", "memory")
        // Helm's caches are private to this test.
        .env("HOME", std::path::Path::new(&file).parent().expect("a folder"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("Python");
    let mut printed = BufReader::new(helm.stdout.take().expect("stdout")).lines();
    let mut said = Vec::new();
    for line in printed.by_ref().map_while(Result::ok) {
        said.push(line);
        if said.last().is_some_and(|line| line.starts_with("ok: installed")) {
            break;
        }
    }
    println!("{}", said.join("\n"));
    assert_eq!(said.len(), 4, "{said:?}");
    let rendered = render(&file, &[]);
    let expected = manifests(&String::from_utf8_lossy(&rendered.stdout), NAMESPACE);
    let name_of = |object: &Value| object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    let stored =
        |resource: &str, name: &str| server.change(|store| store.get(resource, NAMESPACE, name).cloned());
    let label =
        |object: &Value| object["spec"]["template"]["metadata"]["labels"]["kvasir/generation"].clone();
    for (resource, object) in &expected {
        let found =
            stored(resource, &name_of(object)).unwrap_or_else(|| panic!("no {resource} {}", name_of(object)));
        assert_eq!(bare(&found), bare(object), "{resource}");
    }
    println!("ok: {} objects are there, equal to the manifests", expected.len());
    let decode = stored("deployments", "qwen-large-decode").expect("it");
    let prefill = stored("deployments", "qwen-large-prefill").expect("it");
    assert_eq!(label(&decode), label(&prefill), "one generation");
    assert_eq!((&decode["spec"]["replicas"], &prefill["spec"]["replicas"]), (&Value::Null, &json!(2)));
    // The planner sets a count; an upgrade to another image must not change it.
    server.change(|store| {
        let mut object = decode.clone();
        object["spec"]["replicas"] = json!(5);
        store.put("deployments", object);
    });
    helm.stdin.take().expect("stdin").write_all(b"\n").expect("it waits");
    let rest: Vec<String> = printed.map_while(Result::ok).collect();
    println!("{}", rest.join("\n"));
    assert!(helm.wait().expect("it ends").success(), "{rest:?}");
    let (old, new) = (label(&decode), stored("deployments", "qwen-large-decode").expect("it"));
    assert_eq!(new["spec"]["replicas"], 5, "the planner's count");
    assert_eq!(new["spec"]["template"]["spec"]["containers"][0]["image"], "registry.example/engine:2");
    assert!(label(&new).is_string() && label(&new) != old, "another image is another generation");
}

/// From the manifests to an answer: a gateway with the ConfigMap's settings and the Role's rights, and a pod
/// of the Deployment.
#[cfg(feature = "kubernetes")]
#[test]
fn a_pod_of_the_manifests_is_served_at_once_and_left_at_once() {
    let scratch = Scratch::new("deploy-pods");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let server = runtime.block_on(tests_apiserver::ApiServer::start(1)).expect("a port");
    // The example of control/deploy/README.md.
    let readme = include_str!("../../control/deploy/README.md");
    let (_, text) = readme.split_once("```toml\n# qwen.toml\n").expect("the example");
    let (text, _) = text.split_once("```").expect("its end");
    let description = scratch.config("qwen.toml", text);
    let began = Instant::now();
    let rendered = render(&description, &[]);
    let objects = manifests(&String::from_utf8_lossy(&rendered.stdout), NAMESPACE);
    server.change(|store| {
        objects.iter().for_each(|(resource, object)| drop(store.put(resource, object.clone())))
    });
    let named = |resource: &str, name: &str| {
        let found =
            objects.iter().find(|(known, object)| *known == resource && object["metadata"]["name"] == name);
        found.map(|(_, object)| object.clone()).expect("it")
    };
    let list = |value: &Value| -> Vec<String> {
        value.as_array().into_iter().flatten().filter_map(|text| text.as_str().map(str::to_owned)).collect()
    };
    // The gateway has exactly the rights of its Role.
    let role = named("roles", "qwen-gateway");
    let rules = role["rules"].as_array().expect("rules").iter().map(|rule| tests_apiserver::Rule {
        groups: list(&rule["apiGroups"]),
        resources: list(&rule["resources"]),
        names: list(&rule["resourceNames"]),
        verbs: list(&rule["verbs"]),
    });
    server.allow(rules.collect());
    let settings =
        named("configmaps", "qwen-settings")["data"]["kvasir.toml"].as_str().expect("settings").to_owned();
    // Ports of this machine; a single gateway has no peers.
    let admin = free_address();
    let settings: String = settings
        .replace("0.0.0.0:9090", &admin)
        .lines()
        .filter(|line| !line.starts_with("peers"))
        .map(|line| format!("{line}\n"))
        .collect();
    let config = scratch.config("kvasir.toml", &settings);
    let kubeconfig = scratch.config("kubeconfig", &server.kubeconfig(NAMESPACE));
    let gateway = Process::start_with(&["gateway", "--config", &config], &[("KUBECONFIG", &kubeconfig)]);
    wait_for("the gateway", || get(&gateway.address, "/livez").is_ok_and(|(status, _)| status == 200));
    println!("from the description to a running gateway: {:.1} s", began.elapsed().as_secs_f64());
    let engines: Vec<Mock> =
        (0..2).map(|_| start(&runtime, mock(Dialect::Vllm, Role::Both, false))).collect();
    let template = named("deployments", "qwen-both")["spec"]["template"].clone();
    let pod = |number: usize| {
        let mut pod = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"], "spec": template["spec"],
            "status": {
                "phase": "Running", "podIP": "127.0.0.1", "conditions": [{"type": "Ready", "status": "True"}],
            },
        });
        let port = engines[number].url().rsplit(':').next().unwrap_or_default().to_owned();
        pod["metadata"]["name"] = json!(format!("qwen-both-{number}"));
        pod["metadata"]["namespace"] = json!(NAMESPACE);
        pod["metadata"]["uid"] = json!(format!("uid-{number}"));
        // The mock engine listens on a port of this machine, and serves a different model name.
        pod["metadata"]["annotations"] = json!({"kvasir/port": port});
        pod
    };
    let body = chat(20, 1, 2);
    let appeared = Instant::now();
    server.change(|store| store.put("pods", pod(0)));
    while ask(&gateway.address, &body).0 != 200 {
        std::thread::sleep(Duration::from_millis(1));
        assert!(appeared.elapsed() < Duration::from_secs(10), "it is not served");
    }
    let served_in = appeared.elapsed();
    println!("a pod that appears is served after {:.0} ms", served_in.as_secs_f64() * 1e3);
    assert!(served_in < Duration::from_secs(2), "{served_in:?}");
    server.change(|store| store.put("pods", pod(1)));
    wait_for("two workers", || ready(&admin) == 2);
    // The pod is being deleted: requests that it got before may be in flight.
    server.change(|store| {
        let mut leaving = pod(0);
        leaving["metadata"]["deletionTimestamp"] = json!("2026-11-25T10:00:00Z");
        store.put("pods", leaving);
    });
    // 50 ms on an idle machine.
    let deleted = Instant::now();
    wait_for("one worker", || ready(&admin) == 1);
    let left_in = deleted.elapsed();
    assert!(left_in < Duration::from_secs(2), "{left_in:?}");
    let name = |number: usize| engines[number].url().trim_start_matches("http://").to_owned();
    let (mut left, mut stayed) = (0, 0);
    for seed in 0..100 {
        let (status, head, answer) =
            client(&gateway.address, None, "/v1/chat/completions", Some(&chat(20, seed, 1)));
        assert_eq!(status, 200, "{answer}");
        let head = head.to_ascii_lowercase();
        let route = head.lines().find(|line| line.starts_with("x-kvasir-route:")).expect("a route");
        left += usize::from(route.contains(&format!("worker={}", name(0))));
        stayed += usize::from(route.contains(&format!("worker={}", name(1))));
    }
    let seen = left;
    assert_eq!(left + stayed, 100, "each request names its worker");
    println!(
        "of 100 requests from {:.0} ms after its deletion on {seen} went to it",
        left_in.as_secs_f64() * 1e3
    );
    assert_eq!(seen, 0);
}

/// The configurations of every example's gateways, control services and workers pass `kvasir config check`.
#[test]
fn the_settings_of_every_example_pass_the_check() {
    let scratch = Scratch::new("deploy-check");
    let mut checked = 0;
    for name in ["dynamo.yaml", "mock.toml", "sglang-large.toml", "vllm-disaggregated.toml", "vllm.toml"] {
        let rendered = render(&example(name), &[]);
        assert!(rendered.status.success(), "{name}: {rendered:?}");
        for (resource, object) in manifests(&String::from_utf8_lossy(&rendered.stdout), NAMESPACE) {
            let Some(files) = object["data"].as_object().filter(|_| resource == "configmaps") else {
                continue;
            };
            for (file, text) in files.iter().filter(|(file, _)| file.ends_with(".toml")) {
                let path = scratch.config(file, text.as_str().expect("text"));
                let mut command = Command::new(env!("CARGO_BIN_EXE_kvasir"));
                let output = command.args(["config", "check", &path]).output().expect("it runs");
                assert!(output.status.success(), "{name}: {file}: {output:?}");
                checked += 1;
            }
        }
    }
    println!("{checked} files of settings in the examples' manifests, none with a mistake");
    assert!(checked >= 5, "each example has settings: {checked}");
}

/// Runs `kvasir control` with the settings that `kvasir deploy operator` prints.
#[cfg(feature = "kubernetes")]
#[test]
fn an_operator_makes_what_a_graph_of_the_cluster_says() {
    let scratch = Scratch::new("deploy-operator");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let server = runtime.block_on(tests_apiserver::ApiServer::start(1)).expect("a port");
    let output =
        Command::new(env!("CARGO_BIN_EXE_kvasir")).args(["deploy", "operator"]).output().expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let documents: Vec<Value> =
        text.split("\n---\n").map(|text| serde_saphyr::from_str(text).expect("YAML")).collect();
    let bytes = documents[0].to_string().len();
    println!("the custom resource's definition has {bytes} bytes");
    assert!(documents[0]["kind"] == "CustomResourceDefinition" && bytes < 30_000);
    let map = documents.iter().find(|object| object["kind"] == "ConfigMap").expect("settings");
    let listen = free_address();
    let settings = map["data"]["control.toml"].as_str().expect("settings").replace("0.0.0.0:8090", &listen);
    let config = scratch.config("control.toml", &settings);
    let kubeconfig = scratch.config("kubeconfig", &server.kubeconfig(NAMESPACE));
    let mut operator = Command::new(env!("CARGO_BIN_EXE_kvasir"));
    let operator = operator.args(["control", "--config", &config]).env("KUBECONFIG", &kubeconfig).spawn();
    let _operator = Script(operator.expect("it runs"));
    wait_for("the operator", || get(&listen, "/readyz").is_ok_and(|(status, _)| status == 200));
    let began = Instant::now();
    server.change(|store| {
        store.put(
            "kvasirgraphs",
            json!({
                "apiVersion": "kvasir.dev/v1alpha1", "kind": "KvasirGraph",
                "metadata": {"name": "try", "namespace": NAMESPACE, "uid": "u", "generation": 1},
                "spec": {"engine": "mock", "alias": "tiny", "role": [{"role": "both", "workers": 2}]},
            }),
        );
    });
    let workers = || server.change(|store| store.get("deployments", NAMESPACE, "try-both").cloned());
    wait_for("its workers", || workers().is_some_and(|workers| workers["spec"]["replicas"] == 2));
    println!("workers of a graph are there {:.0} ms after it was made", began.elapsed().as_secs_f64() * 1e3);
}
