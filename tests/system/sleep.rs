//! Engines that are put to sleep and woken: by an administrator, by a direct request to the engine, and by
//! the control service as demand grows and falls.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::support::load::Load;
use crate::support::site::{Site, chat, mock};
use crate::support::{get, post_json, wait_for};
use serde_json::{Value, json};
use tools_mocker::{Dialect, MockConfig, Role};

const WAKE: Duration = Duration::from_millis(300);

fn sleeper(dialect: Dialect) -> MockConfig {
    MockConfig { wake: Some(WAKE), ..mock(dialect, Role::Both, true) }
}

fn kvasir(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvasir")).args(arguments).output().expect("kvasir")
}

/// Runs `kvasir workers COMMAND NAME`; returns its output.
fn workers(site: &Site, command: &str, which: usize) -> Result<String, String> {
    let name = name(site, which);
    let output = kvasir(&["workers", "--gateway", &site.gateway.address, command, &name]);
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

fn name(site: &Site, which: usize) -> String {
    site.mocks[which].url().trim_start_matches("http://").to_owned()
}

fn state(site: &Site, which: usize) -> String {
    let (_, body) =
        get(&site.gateway.address, &format!("/kvasir/workers/{}", name(site, which))).expect("an answer");
    let told: Value = serde_json::from_str(&body).expect("JSON");
    told["state"].as_str().unwrap_or_default().to_owned()
}

/// Sends a request directly to an engine.
fn ask(site: &Site, which: usize, path: &str) -> Value {
    post_json(&name(site, which), path, &json!({})).1
}

#[test]
fn a_worker_sleeps_and_wakes_under_load_and_no_request_fails() {
    for dialect in [Dialect::Vllm, Dialect::Sglang] {
        let name = format!("sleep-{dialect:?}").to_lowercase();
        let engines = (0..2).map(|_| sleeper(dialect)).collect();
        let site = Site::start(&name, engines, &["--worker", "--worker"], "");
        let load = Load::start(&site.gateway.address, 100);
        site.ask_until("both to be in use", |site| site.mocks.iter().all(|mock| mock.stats().requests > 5));
        let printed = workers(&site, "sleep", 0).expect("it sleeps");
        assert!(printed.contains("sleeps"), "{printed}");
        wait_for("the gateway to see it", || state(&site, 0) == "sleeping");
        let before = site.mocks[0].stats();
        std::thread::sleep(Duration::from_secs(2));
        let after = site.mocks[0].stats();
        assert_eq!((before.requests, after.waiting), (after.requests, 0), "{dialect:?}");
        assert_eq!((state(&site, 0).as_str(), after.known_blocks), ("sleeping", 0));
        assert!(workers(&site, "sleep", 0).is_ok(), "it sleeps already");
        let woken = Instant::now();
        let printed = workers(&site, "wake", 0).expect("it wakes");
        assert!(woken.elapsed() >= WAKE && printed.contains("takes requests after"), "{printed}");
        site.ask_until("requests", |site| site.mocks[0].stats().requests > after.requests + 5);
        let error = workers(&site, "wake", 0).expect_err("an engine that is awake may die of it");
        assert!(error.contains("does not sleep"), "{error}");
        let answered = load.end();
        println!(
            "{dialect:?}: asleep and awake again under 100 requests/s: {answered} requests, 0 failed; {}",
            printed.trim()
        );
        // The index holds only the engine's present blocks, and none from before its sleep.
        let asked = chat(200, 77, 1);
        let first = site.chat(&asked).1;
        let second = site.chat(&asked).1;
        let cached =
            |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
        assert!(cached(&second) > cached(&first), "{first} {second}");
    }
}

#[test]
fn an_engine_that_somebody_else_put_to_sleep_gets_no_requests() {
    let site = Site::start(
        "sleep-foreign",
        vec![sleeper(Dialect::Vllm), sleeper(Dialect::Vllm)],
        &["--worker", "--worker"],
        "",
    );
    let load = Load::start(&site.gateway.address, 100);
    site.ask_until("both to be in use", |site| site.mocks.iter().all(|mock| mock.stats().requests > 5));
    // Requests that arrive before the gateway has noticed wait in the engine; the gateway moves them to
    // another one.
    ask(&site, 0, "/sleep?level=1");
    wait_for("the gateway to see it", || state(&site, 0) == "sleeping");
    wait_for("what waited there to be taken elsewhere", || site.mocks[0].stats().waiting == 0);
    ask(&site, 0, "/wake_up");
    wait_for("the gateway to see it", || state(&site, 0) == "ready");
    let before = site.mocks[0].stats().requests;
    site.ask_until("requests", |site| site.mocks[0].stats().requests > before + 5);
    println!(
        "put to sleep and woken by somebody else under 100 requests/s: {} requests, 0 failed",
        load.end()
    );
}

/// SGLang does not report whether it sleeps: an engine that was restarted while asleep is detected as a new
/// run, and serves.
#[test]
fn an_engine_that_starts_again_while_it_sleeps_serves() {
    let mut site = Site::start(
        "sleep-restart",
        vec![sleeper(Dialect::Sglang), sleeper(Dialect::Sglang)],
        &["--worker", "--worker"],
        "",
    );
    workers(&site, "sleep", 0).expect("it sleeps");
    wait_for("the gateway to see it", || state(&site, 0) == "sleeping");
    let address = name(&site, 0).parse().expect("an address");
    let old = site.mocks.remove(0);
    site.runtime.block_on(old.stop());
    // A new run at the same address, awake.
    let again = site.runtime.block_on(tools_mocker::Mock::start(sleeper(Dialect::Sglang), address));
    site.mocks.insert(0, again.expect("the port is free again"));
    wait_for("it to serve", || state(&site, 0) == "ready");
    let load = Load::start(&site.gateway.address, 50);
    site.ask_until("requests", |site| site.mocks[0].stats().requests > 5);
    println!("an SGLang that started again while asleep serves: {} requests, 0 failed", load.end());
}

#[test]
fn what_cannot_sleep_is_refused_with_the_reason() {
    for (dialect, part) in
        [(Dialect::Vllm, "--enable-sleep-mode"), (Dialect::Sglang, "--enable-weights-cpu-backup")]
    {
        let name = format!("sleepless-{dialect:?}").to_lowercase();
        let site = Site::start(&name, vec![mock(dialect, Role::Both, true)], &["--worker"], "");
        let error = workers(&site, "sleep", 0).expect_err("it cannot sleep");
        assert!(error.contains(part), "{error}");
        let (status, answer) = post_json(&site.gateway.address, "/kvasir/workers/nobody:1/sleep", &json!({}));
        assert_eq!(status, 404, "{answer}");
        assert_eq!(
            (state(&site, 0).as_str(), site.chat(&chat(9, 1, 2)).0),
            ("ready", 200),
            "it serves as before"
        );
    }
    let prefill = MockConfig { role: Role::Prefill, ..sleeper(Dialect::Sglang) };
    let decode = MockConfig { role: Role::Decode, ..sleeper(Dialect::Sglang) };
    let site =
        Site::start("sleepless-phases", vec![prefill, decode], &["--prefill-worker", "--decode-worker"], "");
    let error = workers(&site, "sleep", 0).expect_err("its memory would not be registered");
    assert!(error.contains("register"), "{error}");
}

/// Receives the posts of the webhook.
fn sink() -> (String, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}/scale", listener.local_addr().expect("an address"));
    let bodies: Arc<Mutex<Vec<String>>> = Arc::default();
    let kept = Arc::clone(&bodies);
    // The thread ends with the test's process.
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let mut reader = BufReader::new(stream);
            loop {
                let (mut length, mut line) = (0, String::new());
                while reader.read_line(&mut line).is_ok_and(|count| count > 2) {
                    let lower = line.to_ascii_lowercase();
                    if let Some(value) = lower.strip_prefix("content-length:") {
                        length = value.trim().parse().unwrap_or(0);
                    }
                    line.clear();
                }
                let mut body = vec![0; length];
                if length == 0 || reader.read_exact(&mut body).is_err() {
                    break;
                }
                kept.lock().expect("no panic").push(String::from_utf8_lossy(&body).into_owned());
                let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}";
                if reader.get_mut().write_all(answer).is_err() {
                    break;
                }
            }
        }
    });
    (url, bodies)
}

struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let _ended = self.0.kill();
        let _ended = self.0.wait();
    }
}

/// The control service keeps one worker asleep, wakes it when demand grows, and puts one to sleep again
/// afterwards.
#[test]
fn the_control_service_wakes_spares_before_it_asks_for_more() {
    let engines = (0..3).map(|_| sleeper(Dialect::Vllm)).collect();
    let site = Site::start("sleep-spares", engines, &["--worker"; 3], "");
    let (webhook, told) = sink();
    let config = format!(
        "[planner]\nmode = \"act\"\nactuator = \"webhook\"\nspares = 1\ninterval = \"300ms\"\nstart_time = \"500ms\"\n\
         down_after = \"2s\"\ndecode_max = 3\nutilisation = 0.05\nrunning_max = 1\nseasons = []\nhistory = \"0s\"\n\
         [control]\nlisten = \"\"\nwebhook = {webhook:?}\n"
    );
    let path = site.scratch.config("control.toml", &config);
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvasir"));
    command.args(["control", "--gateway", &site.gateway.address, "--config", &path]);
    let _control =
        KillOnDrop(command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().expect("kvasir control"));
    let asleep = || (0..3).filter(|which| state(&site, *which) == "sleeping").count();
    wait_for("a spare", || asleep() == 1);
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(asleep(), 1, "one spare, not more");
    let began = Instant::now();
    let load = Load::start(&site.gateway.address, 60);
    wait_for("the spare to be woken", || asleep() == 0 && site.ready() == 3);
    let woken = began.elapsed();
    wait_for("all three to be wanted", || {
        told.lock().expect("no panic").iter().any(|body| body.contains("\"wanted\":4"))
    });
    let plan = get(&site.gateway.address, "/kvasir/plan").expect("a plan").1;
    let answered = load.end();
    wait_for("a spare again", || asleep() == 1);
    println!(
        "a spare takes requests {woken:?} after demand grew; {answered} requests, 0 failed; the plan then: {plan}"
    );
}
