//! Time limits of requests: deadlines of clients and operators, hedged attempts beside slow first ones, and
//! limits for clients that do not read or send too much.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::support;
use crate::support::site::{Site, chat, mock, streamed};
use crate::support::{get, open, post};
use serde_json::{Value, json};
use tools_mocker::{Dialect, Fault, FaultKind, Mock, MockConfig, Role};

fn forever(kind: FaultKind, millis: u64) -> Fault {
    Fault { kind, probability: 1.0, count: None, millis, tokens: 3 }
}

/// Sends a request with an additional header; returns the raw answer.
fn asked(address: &str, header: &str, body: &Value) -> String {
    let body = body.to_string();
    let mut stream = TcpStream::connect(address).expect("a connection");
    stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a timeout");
    write!(
        stream,
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{header}content-length: {}\r\n\r\n{body}",
        body.len()
    )
    .expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer
}

#[test]
fn a_request_ends_with_its_time() {
    let site = Site::start("deadline", vec![mock(Dialect::Vllm, Role::Both, false)], &["--worker"], "");
    let address = &site.gateway.address;
    let body = chat(20, 1, 8);
    // A sufficient deadline changes nothing.
    let answer = asked(address, "x-request-timeout-ms: 30000\r\n", &body);
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    for bad in ["soon", "0", "-5", "1.5"] {
        let answer = asked(address, &format!("x-request-timeout-ms: {bad}\r\n"), &body);
        assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("x-request-timeout-ms"), "{answer}");
    }
    // Before the first byte: an explicit error, in time.
    site.mocks[0].fault(forever(FaultKind::Hang, 0)).expect("a fault");
    let started = Instant::now();
    let answer = asked(address, "x-request-timeout-ms: 300\r\n", &body);
    let took = started.elapsed();
    assert!(answer.starts_with("HTTP/1.1 504") && answer.contains("deadline_exceeded"), "{answer}");
    assert!((Duration::from_millis(290)..Duration::from_secs(3)).contains(&took), "{took:?}");
    // In the middle of a stream: its last event is the error.
    site.mocks[0].heal();
    site.mocks[0].fault(forever(FaultKind::Stall, 0)).expect("a fault");
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let answer = asked(address, "x-request-timeout-ms: 400\r\n", &streamed);
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\"content\""), "{answer}");
    assert!(answer.contains("deadline_exceeded") && !answer.contains("[DONE]"), "{answer}");
    assert_eq!(site.gateway.metric("kvasir_gateway_deadline_exceeded_total"), 2.0);
    support::wait_for("everything to be given back", || {
        get(address, "/kvasir/status").is_ok_and(|(_, text)| text.contains("\"active\":0"))
            && site.mocks.iter().all(|mock| mock.stats().running == 0)
    });
}

#[test]
fn an_operator_may_bound_all_requests() {
    let config = "[gateway]\nrequest_time_max = \"300ms\"\n";
    let site = Site::start("time-max", vec![mock(Dialect::Vllm, Role::Both, false)], &["--worker"], config);
    site.mocks[0].fault(forever(FaultKind::Hang, 0)).expect("a fault");
    let answer = asked(&site.gateway.address, "x-request-timeout-ms: 60000\r\n", &chat(20, 1, 8));
    assert!(answer.starts_with("HTTP/1.1 504"), "{answer}");
}

#[test]
fn a_slow_worker_is_hedged_when_that_is_wanted() {
    let mocks = || vec![mock(Dialect::Vllm, Role::Both, false), mock(Dialect::Vllm, Role::Both, false)];
    let config = "[gateway]\nhedge_after = \"150ms\"\n[router]\nstrategy = \"round-robin\"\n";
    let site = Site::start("hedge", mocks(), &["--worker", "--worker"], config);
    site.mocks[0].fault(forever(FaultKind::Hang, 0)).expect("a fault");
    for number in 0..8 {
        let mut body = chat(20, number, 6);
        let expected = site.direct(1, &body)["choices"][0]["message"]["content"].clone();
        let started = Instant::now();
        let (status, answer) = site.chat(&body);
        assert_eq!((status, &answer["choices"][0]["message"]["content"]), (200, &expected));
        body["stream"] = true.into();
        let answer = asked(&site.gateway.address, "", &body);
        assert!(answer.contains("[DONE]"), "{answer}");
        assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    }
    // A hedged attempt also takes a round-robin turn, so more than every second request may start at the
    // hanging worker.
    let hedged = site.gateway.metric("kvasir_gateway_hedged_total");
    assert!((8.0..=16.0).contains(&hedged), "{hedged}");
    support::wait_for("the losers to be given up", || {
        site.mocks.iter().all(|mock: &Mock| mock.stats().running == 0)
    });
    // The hedged attempt fails: the first attempt's answer is still used, and only two failures are an error.
    site.mocks[1].fault(forever(FaultKind::Error, 0)).expect("a fault");
    site.mocks[0].heal();
    for number in 0..4 {
        assert_eq!(site.chat(&chat(20, 40 + number, 6)).0, 200);
    }

    // Off by default.
    let site = Site::start("no-hedge", mocks(), &["--worker", "--worker"], "");
    let slow = forever(FaultKind::Slow, 60);
    site.mocks.iter().for_each(|mock| mock.fault(slow.clone()).expect("a fault"));
    assert_eq!(site.chat(&chat(20, 1, 6)).0, 200);
    assert_eq!(site.gateway.metric("kvasir_gateway_hedged_total"), 0.0);
}

#[test]
fn decisions_are_told_with_their_reasons() {
    let mocks = vec![mock(Dialect::Vllm, Role::Both, true), mock(Dialect::Vllm, Role::Both, true)];
    let site = Site::start("decisions", mocks, &["--worker", "--worker"], "");
    let body = chat(80, 1, 4);
    assert_eq!(site.chat(&body).0, 200);
    let told = |after: &str| -> Value {
        let (status, text) =
            get(&site.gateway.address, &format!("/kvasir/decisions{after}")).expect("an answer");
        assert_eq!(status, 200, "{text}");
        serde_json::from_str(&text).expect("JSON")
    };
    support::wait_for("the second to find the blocks", || {
        assert_eq!(site.chat(&body).0, 200);
        let all = told("");
        let last = all["decisions"].as_array().and_then(|all| all.last().cloned()).expect("a decision");
        last["overlap_blocks"].as_u64() > Some(2)
    });
    let all = told("");
    let last = all["decisions"].as_array().and_then(|all| all.last()).expect("a decision");
    assert_eq!(last["sequence"], all["last"]);
    assert_eq!(last["candidates"], 2);
    let reason = last["reason"].as_str().expect("a reason");
    assert!(reason.contains("blocks are here; the next best has 0"), "{reason}");
    assert_ne!(last["runner_up"]["worker"], last["worker"]);
    let none = told(&format!("?after={}", all["last"]));
    assert_eq!(none["decisions"], json!([]));
    assert_eq!(get(&site.gateway.address, "/kvasir/decisions?after=x").expect("an answer").0, 400);
    // The status reports the workers' pools, and its histograms count the served requests.
    let status: Value =
        serde_json::from_str(&get(&site.gateway.address, "/kvasir/status").expect("a status").1)
            .expect("JSON");
    let served = all["last"].as_u64().expect("a number") + 1;
    assert_eq!(status["histograms"]["time_to_first_token"]["count"], served);
    assert_eq!(status["histograms"]["routing"]["count"], served);
    assert_eq!((&status["requests"], &status["failed"]), (&json!(served), &json!(0)));
    let pools = |worker: &Value| worker["pools"][0]["indexed"].as_u64().unwrap_or(0);
    let workers = status["workers"].as_array().expect("workers");
    assert!(workers.iter().map(pools).sum::<u64>() >= 5, "{status}");
    assert!(workers.iter().all(|worker| worker["pools"][0]["blocks"].as_u64() > Some(16)), "{status}");
}

/// Returns engines with this step time.
fn steps_of(millis: f64, count: usize) -> Vec<MockConfig> {
    let mock = MockConfig { decode_seconds_per_step: millis / 1e3, ..mock(Dialect::Vllm, Role::Both, false) };
    vec![mock; count]
}

/// Returns the number of requests that all engines have received.
fn taken(site: &Site) -> u64 {
    site.mocks.iter().map(|mock| mock.stats().requests).sum()
}

/// Runs this many streams of this many tokens concurrently; each must be complete.
fn stream_all(site: &Site, streams: usize, tokens: usize) {
    let address = &site.gateway.address;
    std::thread::scope(|scope| {
        let started: Vec<_> = (0..streams)
            .map(|number| scope.spawn(move || streamed(address, &chat(12, number, tokens))))
            .collect();
        for stream in started {
            stream.join().expect("a reader").expect("a whole stream");
        }
    });
    let generated: u64 = site.mocks.iter().map(|mock| mock.stats().generation_tokens).sum();
    assert_eq!(generated, (streams * tokens) as u64);
}

#[test]
fn forty_streams_outlive_health_answers_of_seven_seconds() {
    let config = "[router]\nstrategy = \"round-robin\"\n";
    let site = Site::start("slow-health", steps_of(30.0, 2), &["--worker", "--worker"], config);
    site.mocks.iter().for_each(|mock| mock.fault(forever(FaultKind::SlowHealth, 7000)).expect("a fault"));
    stream_all(&site, 40, 300);
    assert_eq!(taken(&site), 40, "each request is sent once");
    assert_eq!(site.gateway.metric("kvasir_gateway_migrations_total"), 0.0);
}

#[test]
fn a_stream_that_flows_outlives_a_health_check_that_is_never_answered() {
    let config = "[gateway]\nhealth_timeout = \"1s\"\nhealth_misses = 2\nworker_wait = \"300ms\"\n";
    let site = Site::start("no-health", steps_of(20.0, 1), &["--worker"], config);
    site.mocks[0].fault(forever(FaultKind::SlowHealth, 600_000)).expect("a fault");
    stream_all(&site, 8, 150);
    assert_eq!(taken(&site), 8, "each request is sent once");
    // The worker is considered dead by now: it gets no new request until it answers.
    assert_eq!(site.chat(&chat(10, 50, 4)).0, 503);
    site.mocks[0].heal();
    support::wait_for("the worker to be back", || site.ready() == 1);
    assert_eq!(site.chat(&chat(10, 51, 4)).0, 200);
}

#[test]
fn metrics_that_hang_take_no_worker_out() {
    for dialect in [Dialect::Vllm, Dialect::Sglang] {
        let site = Site::start("slow-metrics", vec![mock(dialect, Role::Both, false)], &["--worker"], "");
        site.mocks[0].fault(forever(FaultKind::SlowMetrics, 600_000)).expect("a fault");
        let started = Instant::now();
        while started.elapsed() < Duration::from_secs(3) {
            assert_eq!(site.ready(), 1, "{dialect:?}");
            std::thread::sleep(Duration::from_millis(50));
        }
        assert_eq!(site.chat(&chat(10, 1, 4)).0, 200);
    }
}

#[test]
fn a_first_token_after_eight_seconds_is_no_stall_of_three() {
    let config = "[gateway]\nstall = \"3s\"\n";
    let site = Site::start("first-token", steps_of(1.0, 2), &["--worker", "--worker"], config);
    let slow = Fault { count: Some(1), ..forever(FaultKind::Slow, 8000) };
    site.mocks.iter().for_each(|mock| mock.fault(slow.clone()).expect("a fault"));
    streamed(&site.gateway.address, &chat(20, 1, 8)).expect("a whole stream");
    assert_eq!(taken(&site), 1, "one request is sent");
    assert_eq!(site.gateway.metric("kvasir_gateway_migrations_total"), 0.0);
}

#[test]
fn a_queue_at_an_engine_is_not_its_fault_and_nothing_in_it_is_sent_again() {
    let busy = || MockConfig { batch_max: 1, ..steps_of(10.0, 1).remove(0) };
    let config =
        "[gateway]\nanswer_within = \"300ms\"\nstall = \"100ms\"\n[router]\nstrategy = \"round-robin\"\n";
    let site = Site::start("queue", vec![busy(), busy()], &["--worker", "--worker"], config);
    let mut long = chat(20, 1, 2000);
    long["stream"] = true.into();
    // Other clients hold the only slot of each engine for 20 s.
    let held: Vec<TcpStream> = site
        .mocks
        .iter()
        .map(|mock| open(&mock.address().to_string(), "/v1/chat/completions", &long).expect("sent"))
        .collect();
    support::wait_for("the engines to be busy", || site.mocks.iter().all(|mock| mock.stats().running == 1));
    // More failures than a circuit breaker tolerates, on each engine.
    for number in 0..12 {
        let mut body = chat(20, 10 + number, 8);
        body["stream"] = (number % 2 == 0).into();
        let (status, answer) = post(&site.gateway.address, "/v1/chat/completions", &body).expect("an answer");
        assert!(status == 503 && answer.contains("no answer within 300 ms"), "{status} {answer}");
    }
    assert_eq!(taken(&site), 2 + 12, "each request is sent once");
    assert_eq!(site.gateway.metric("kvasir_gateway_migrations_total"), 0.0);
    assert_eq!(site.gateway.metric("kvasir_gateway_ejections_total"), 0.0);
    assert_eq!(site.ready(), 2);
    drop(held);
    support::wait_for("the engines to be free", || site.mocks.iter().all(|mock| mock.stats().running == 0));
    assert_eq!(site.chat(&chat(20, 90, 4)).0, 200);
}

#[test]
fn a_client_that_stops_reading_gives_its_place_and_its_engine_back() {
    let slow = MockConfig {
        decode_seconds_per_step: 0.0005,
        context_tokens: 120_000,
        blocks: 8192,
        ..mock(Dialect::Vllm, Role::Both, false)
    };
    let config = "[gateway]\nwrite_timeout = \"1s\"\nrequests_max = 1\n[access]\nwait_max = \"100ms\"\n";
    let site = Site::start("unread", vec![slow], &["--worker"], config);
    let mut body = chat(5, 1, 100_000);
    body["stream"] = true.into();
    let mut stopped =
        support::open(&site.gateway.address, "/v1/chat/completions", &body).expect("a connection");
    stopped.read_exact(&mut [0; 64]).expect("the answer begins");
    // The stopped stream holds the only slot.
    assert_eq!(site.chat(&chat(5, 2, 2)).0, 503);
    // The stream would take a minute.
    let since = Instant::now();
    support::wait_for("its place", || site.chat(&chat(5, 3, 2)).0 == 200);
    assert!(since.elapsed() < Duration::from_secs(20), "{:?}", since.elapsed());
    support::wait_for("its engine", || site.mocks[0].stats().running == 0);
    drop(stopped);
}

#[test]
fn bodies_of_nested_lists_are_refused_and_hold_nothing() {
    let site = Site::start("nested", vec![mock(Dialect::Vllm, Role::Both, false)], &["--worker"], "");
    let address = site.gateway.address.clone();
    let lists = "[],".repeat(3 << 20);
    let send = |path: &str, field: &str| {
        let body = format!("{{\"model\":\"tiny\",\"max_tokens\":1,\"{field}\":[{lists}[]]}}");
        let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n");
        support::raw(&address, &format!("{head}content-length: {}\r\n\r\n{body}", body.len()))
    };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            for (path, field) in [
                ("/v1/chat/completions", "messages"),
                ("/v1/messages", "messages"),
                ("/v1/responses", "input"),
            ] {
                let send = &send;
                scope.spawn(move || {
                    let answer = send(path, field);
                    assert!(answer.starts_with("HTTP/1.1 400"), "{path}: {answer}");
                    assert!(answer.contains("131072 objects, lists"), "{path}: {answer}");
                });
            }
        }
    });
    assert_eq!(site.gateway.metric("kvasir_gateway_request_memory_bytes"), 0.0);
    assert_eq!(site.mocks[0].stats().running, 0);
    assert_eq!(site.chat(&chat(20, 1, 2)).0, 200);
}
