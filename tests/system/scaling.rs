//! `kvasir serve` with `[planner] mode = "act"`: growing and falling demand makes it start and drain workers,
//! and no request fails. `kvasir control` plans for the same gateway from outside.

use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::support;
use crate::support::{Scratch, free_address, get, open, read_stream, wait_for};
use serde_json::{Value, json};

/// With one request at a time and a twentieth of the capacity in use, a few requests per second are too many
/// for one worker on any machine.
const CONFIG: &str = r#"
[serve]
prefill_workers = 0
decode_workers = 1
[planner]
mode = "act"
interval = "300ms"
start_time = "2s"
down_after = "2s"
decode_max = 3
utilisation = 0.05
running_max = 1
seasons = []
"#;

struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let _ended = self.0.kill();
        let _ended = self.0.wait();
    }
}

fn kvasir(arguments: &[&str]) -> KillOnDrop {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvasir"));
    command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null());
    KillOnDrop(command.spawn().expect("kvasir starts"))
}

fn told(address: &str, path: &str) -> Value {
    match get(address, path) {
        Ok((200, body)) => serde_json::from_str(&body).expect("JSON"),
        _ => Value::Null,
    }
}

/// Returns the number of workers in the roster, and of those that take requests.
fn workers(address: &str) -> (usize, usize) {
    let told = told(address, "/kvasir/workers");
    let all = told["workers"].as_array().cloned().unwrap_or_default();
    (all.len(), all.iter().filter(|worker| worker["state"] == "ready").count())
}

fn children(of: u32) -> usize {
    let path = format!("/proc/{of}/task/{of}/children");
    std::fs::read_to_string(path).unwrap_or_default().split_whitespace().count()
}

/// Streams chats until it is told to stop; counts those that did not end completely.
fn client(address: String, stop: Arc<AtomicBool>, answered: Arc<AtomicU64>, failed: Arc<AtomicU64>) {
    let mut number = 0;
    while !stop.load(Ordering::Relaxed) {
        number += 1;
        let body = json!({
            "model": "kvasir-tiny", "stream": true, "max_tokens": 24, "ignore_eos": true,
            "messages": [{ "role": "user", "content": format!("Hello number {number}") }],
        });
        let stream = open(&address, "/v1/chat/completions", &body).expect("the gateway accepts");
        let answer = read_stream(stream, |_| {});
        let counter = if answer.is_done && answer.error.is_none() { &answered } else { &failed };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn workers_come_with_demand_and_go_with_it_and_no_request_fails() {
    let scratch = Scratch::new("scaling");
    let text = format!("[transfer]\nsocket_folder = \"{}\"\n{CONFIG}", scratch.0.display());
    let config = scratch.config("kvasir.toml", &text);
    let address = free_address();
    let serve = kvasir(&["serve", "--config", &config, "--listen", &address]);
    wait_for("one worker", || workers(&address) == (1, 1));
    let (stop, answered, failed) = <(Arc<AtomicBool>, Arc<AtomicU64>, Arc<AtomicU64>)>::default();
    let clients: Vec<_> = (0..6)
        .map(|_| {
            let (address, stop) = (address.clone(), Arc::clone(&stop));
            let (answered, failed) = (Arc::clone(&answered), Arc::clone(&failed));
            std::thread::spawn(move || client(address, stop, answered, failed))
        })
        .collect();
    wait_for("three workers that take requests", || workers(&address) == (3, 3));
    std::thread::sleep(Duration::from_secs(3));
    let plan = told(&address, "/kvasir/plan");
    assert_eq!((&plan["mode"], &plan["pools"][0]["wanted"]), (&json!("act"), &json!(3)), "{plan}");
    let busy = support::metrics(&address);
    assert!((busy["kvasir_planner_wanted"] - 3.0).abs() < f64::EPSILON);
    // One client stays for a while, so that workers drain with requests in flight.
    stop.store(true, Ordering::Relaxed);
    clients.into_iter().for_each(|client| client.join().expect("a client"));
    stop.store(false, Ordering::Relaxed);
    let slow = {
        let (address, stop) = (address.clone(), Arc::clone(&stop));
        let (answered, failed) = (Arc::clone(&answered), Arc::clone(&failed));
        std::thread::spawn(move || client(address, stop, answered, failed))
    };
    std::thread::sleep(Duration::from_secs(2));
    stop.store(true, Ordering::Relaxed);
    slow.join().expect("a client");
    wait_for("one worker again", || workers(&address) == (1, 1) && children(serve.0.id()) == 2);
    let plan = told(&address, "/kvasir/plan");
    let changes = plan["changes"].as_array().expect("changes");
    let counts: Vec<(u64, u64)> = changes
        .iter()
        .map(|change| (change["from"].as_u64().expect("a count"), change["to"].as_u64().expect("a count")))
        .collect();
    assert!(counts.iter().any(|(from, to)| to > from) && counts.iter().any(|(from, to)| to < from), "{plan}");
    let (answered, failed) = (answered.load(Ordering::Relaxed), failed.load(Ordering::Relaxed));
    println!("{answered} streams ended whole, {failed} failed; changes {counts:?}");
    assert!(answered > 50 && failed == 0, "{answered} answered, {failed} failed");
}

#[test]
fn control_advises_a_gateway_and_explains() {
    let scratch = Scratch::new("control");
    let config = scratch.config("kvasir.toml", "[planner]\ninterval = \"200ms\"\n");
    let (_mock, engine) = mock_engine();
    let address = free_address();
    let _gateway = kvasir(&["gateway", "--listen", &address, "--worker", &engine]);
    wait_for("the worker", || workers(&address) == (1, 1));
    let explain = || Command::new(env!("CARGO_BIN_EXE_kvasir")).args(["plan", "explain", &address]).output();
    let before = explain().expect("kvasir runs");
    let error = String::from_utf8_lossy(&before.stderr).into_owned();
    assert!(!before.status.success() && error.contains("no plan"), "{error}");
    let control = kvasir(&["control", "--gateway", &address, "--config", &config]);
    wait_for("a plan", || told(&address, "/kvasir/plan")["pools"][0]["ready"] == 1);
    let after = explain().expect("kvasir runs");
    let text = String::from_utf8_lossy(&after.stdout).into_owned();
    assert!(after.status.success() && text.starts_with("both: 1 worker, the pool's minimum"), "{text}");
    // The control service may exit: requests continue.
    drop(control);
    let body =
        json!({ "model": "tiny", "messages": [{ "role": "user", "content": "Hello" }], "max_tokens": 4 });
    let (status, _) = support::post_json(&address, "/v1/chat/completions", &body);
    assert_eq!(status, 200);
    let (status, refused) = support::post_json(&address, "/kvasir/plan", &json!({ "mode": "rule" }));
    assert_eq!(status, 400, "{refused}");
}

/// Starts a mock engine; returns it with its URL.
fn mock_engine() -> (KillOnDrop, String) {
    let address = free_address();
    let mock = kvasir(&["mock", "--listen", &address]);
    wait_for("the mock engine", || get(&address, "/health").is_ok_and(|answer| answer.0 == 200));
    (mock, format!("http://{address}"))
}
