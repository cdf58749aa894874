//! Several gateways in front of the same workers, and restarted gateways.
//!
//! Two gateways see each other's requests and compute the same sums; the state of a gateway that is killed is
//! dropped. A restarted gateway, with a snapshot file or with a peer, knows the locations of prefixes before
//! it reports that it is ready. The index's predictions equal the engines' reports.

use std::time::Duration;

use crate::support::{Events, Process, Scratch, get, open, post, prompt, request, wait_for};
use serde_json::{Value, json};

fn status(gateway: &Process) -> Value {
    let (code, body) = get(&gateway.address, "/kvasir/status").expect("a status");
    assert_eq!(code, 200);
    serde_json::from_str(&body).expect("JSON")
}

/// (own, peers') requests over all workers, as a gateway sees them.
fn requests(gateway: &Process) -> (u64, u64) {
    let status = status(gateway);
    let sum = |name: &str| {
        let workers = status["workers"].as_array().expect("workers");
        workers.iter().filter_map(|worker| worker[name].as_u64()).sum()
    };
    (sum("requests"), sum("peers_requests"))
}

fn ready(gateway: &Process) -> usize {
    match get(&gateway.address, "/kvasir/status") {
        Ok((200, body)) => {
            let status: Value = serde_json::from_str(&body).unwrap_or_default();
            let workers = status["workers"].as_array().cloned().unwrap_or_default();
            workers.iter().filter(|worker| worker["ready"] == true).count()
        }
        _ => 0,
    }
}

/// Returns the overlap that a gateway sees for a prompt, from its answer's header.
fn overlap(gateway: &Process, tokens: &[u32]) -> u64 {
    let mut body = request(tokens, 1);
    body["stream"] = json!(true);
    let mut events = Events::new(open(&gateway.address, "/v1/completions", &body).expect("open"));
    let head = events.head();
    while events.next_data().is_some_and(|data| data != "[DONE]") {}
    let blocks = head.split("overlap_blocks=").nth(1).and_then(|rest| rest.split('/').next());
    blocks.and_then(|blocks| blocks.parse().ok()).unwrap_or_else(|| panic!("no overlap in {head}"))
}

fn complete(gateway: &Process, tokens: &[u32]) {
    let (code, text) = post(&gateway.address, "/v1/completions", &request(tokens, 2)).expect("an answer");
    assert_eq!(code, 200, "{text}");
}

struct Site {
    workers: Vec<Process>,
    scratch: Scratch,
}

impl Site {
    fn new(name: &str) -> Self {
        let scratch = Scratch::new(name);
        let config = format!("[transfer]\nsocket_folder = \"{}\"\n", scratch.0.display());
        let path = scratch.config("worker.toml", &config);
        let worker = || Process::start(&["worker", "--role", "both", "--threads", "1", "--config", &path]);
        let workers = vec![worker(), worker()];
        workers.iter().for_each(Process::wait_healthy);
        Self { workers, scratch }
    }

    fn gateway(&self, name: &str, config: &str) -> Process {
        let path = self.scratch.config(name, config);
        let urls: Vec<String> = self.workers.iter().map(Process::url).collect();
        let mut arguments = vec!["gateway", "--config", &path];
        arguments.extend(urls.iter().flat_map(|url| ["--worker", url.as_str()]));
        Process::start(&arguments)
    }
}

#[test]
fn two_gateways_see_each_others_requests() {
    let site = Site::new("peers");
    // Each needs the other's address before it starts: the first gets its peer by a restart.
    let mut a = site.gateway("a.toml", "[gateway]\npeers = [\"http://127.0.0.1:1\"]\n");
    let b = site.gateway("b.toml", &format!("[gateway]\npeers = [\"{}\"]\n", a.url()));
    a.kill();
    // All gateways of a Deployment have one configuration: the gateway finds itself among its peers.
    site.scratch.config("a.toml", &format!("[gateway]\npeers = [\"{}\", \"{}\"]\n", a.url(), b.url()));
    a.restart();
    wait_for("both to be ready", || ready(&a) == 2 && ready(&b) == 2);

    let streams: Vec<_> = (0..6)
        .map(|number| {
            let gateway = if number % 2 == 0 { &a } else { &b };
            let mut body = request(&prompt(number, 40), 3900);
            body["stream"] = json!(true);
            open(&gateway.address, "/v1/completions", &body).expect("open")
        })
        .collect();
    wait_for("the sums to be the same", || requests(&a) == (3, 3) && requests(&b) == (3, 3));
    // Requests are spread over both workers although neither gateway sent more than three.
    let busiest =
        site.workers.iter().map(|worker| worker.metric("kvasir_engine_requests_running") as u64).max();
    assert!(busiest <= Some(4), "{busiest:?} of 6 on one of two workers");
    drop(streams);
    wait_for("nothing to be left", || requests(&a) == (0, 0) && requests(&b) == (0, 0));

    let stream = {
        let mut body = request(&prompt(9, 40), 3900);
        body["stream"] = json!(true);
        open(&a.address, "/v1/completions", &body).expect("open")
    };
    wait_for("b to hear of it", || requests(&b) == (0, 1));
    a.kill();
    wait_for("the dead gateway to be forgotten", || requests(&b) == (0, 0));
    drop(stream);
    let (code, body) = post(&b.address, "/kvasir/loads", &json!({ "gateway": 1 })).expect("an answer");
    assert_eq!(code, 400, "{body}");
}

#[test]
fn a_gateway_that_starts_again_is_warm_before_it_is_ready() {
    let site = Site::new("restart");
    let file = site.scratch.0.join("index.snapshot").display().to_string();
    let config = format!("[gateway]\nsnapshot_file = \"{file}\"\nsnapshot_interval = \"1s\"\n");
    let mut a = site.gateway("a.toml", &config);
    wait_for("the workers", || ready(&a) == 2);
    let prompts: Vec<Vec<u32>> = (0..8).map(|number| prompt(100 + number, 400)).collect();
    prompts.iter().for_each(|tokens| complete(&a, tokens));
    wait_for("the index to know them", || prompts.iter().all(|tokens| overlap(&a, tokens) >= 24));

    // The saved index equals the present one.
    wait_for("the snapshot to be written", || std::fs::metadata(&file).is_ok_and(|file| file.len() > 4000));
    a.kill();
    a.restart();
    a.wait_healthy();
    wait_for("the workers", || ready(&a) == 2);
    for tokens in &prompts {
        assert!(overlap(&a, tokens) >= 24, "known again at once");
    }

    // A damaged file is reported, and the feed's replay restores the index.
    a.kill();
    std::fs::write(&file, b"KVSNAP01 and then something else").expect("written");
    a.restart();
    wait_for("the workers", || ready(&a) == 2);
    assert!(prompts.iter().all(|tokens| overlap(&a, tokens) >= 24));

    // A second gateway takes over the first one's index.
    let b = site.gateway("b.toml", &format!("[gateway]\npeers = [\"{}\"]\n", a.url()));
    wait_for("the workers", || ready(&b) == 2);
    assert!(prompts.iter().all(|tokens| overlap(&b, tokens) >= 24));

    // The predictions equal the reports for each worker.
    std::thread::sleep(Duration::from_millis(300));
    prompts.iter().for_each(|tokens| complete(&b, tokens));
    let (_, all) = get(&b.address, "/metrics").expect("metrics");
    let sum = |name: &str| -> f64 {
        let lines = all.lines().filter(|line| line.starts_with(name));
        lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    };
    let (compared, exact) = (
        sum("kvasir_gateway_cache_prediction_requests_total{"),
        sum("kvasir_gateway_cache_prediction_exact_total{"),
    );
    assert!(compared >= 16.0, "{compared} compared");
    assert_eq!(exact, compared, "{all:?}");
    println!("{exact} of {compared} requests exactly as predicted");
}
