//! `kvasir deploy`: a description that runs, mistakes that are named, Dynamo's description field by field, and workers of two
//! generations that are never paired. Engines are mocks.

mod support;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::site::{ask, chat, mock};
use support::{Process, Scratch, client, free_address, get, open, wait_for};
use tools_mocker::{Dialect, Mock, MockConfig, Role};

fn example(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../deploy/examples").join(name);
    path.to_str().expect("a path").to_owned()
}

fn render(file: &str, more: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvasir"));
    command.args(["deploy", "render", file]).args(more).output().expect("it runs")
}

/// A script that is told to end when the test is over, and ends what it has started.
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

/// The README's example, from the description to the first answer, and everything that it started ends with it.
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
    // What it is taken for is a description of ours, which gives the same manifests.
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

/// What Kubernetes runs before an engine is stopped: it waits for the engine's own gauges.
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
    // Half a second a token.
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
    std::thread::sleep(Duration::from_millis(300));
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

/// An update: workers of the old and the new version beside each other.
#[test]
fn prefill_and_decode_workers_of_two_generations_are_never_paired() {
    let scratch = Scratch::new("deploy-generations");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let mocks: Vec<(Mock, &str, &str)> = [
        ("old", "prefill", Role::Prefill),
        ("old", "decode", Role::Decode),
        ("new", "prefill", Role::Prefill),
        ("new", "decode", Role::Decode),
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
        &format!("[discovery]\nfile = \"{list}\"\n[router]\ndisaggregate_above_tokens = 64\n"),
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
    // The last prefill worker of the old version goes: its decode workers compute prompts themselves.
    std::fs::write(&list, listed(&["new"])).expect("the list");
    wait_for("three workers", || workers(&gateway.address).len() == 3);
    let mut pairs = BTreeSet::new();
    routes(&mut pairs, 100..140);
    assert!(pairs.contains(&(None, Some("old"))) && pairs.contains(&(Some("new"), Some("new"))), "{pairs:?}");
    assert!(!pairs.contains(&(Some("new"), Some("old"))), "{pairs:?}");
}
