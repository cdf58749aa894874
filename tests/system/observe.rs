//! Observability of requests: traces in a collector, the terminal view, and KServe clients.

#[path = "../../router/trace/tests/collector/mod.rs"]
mod collector;
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};

use crate::support;
use crate::support::site::{Site, chat, mock};
use crate::support::{Cluster, free_address, get, post, prompt, request, wait_for};
use collector::{Collector, CollectorReply, find, text};
use opentelemetry_proto::tonic::common::v1::any_value::Value as Told;
use opentelemetry_proto::tonic::trace::v1::Span;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tools_mocker::{Dialect, Mock, Role};

fn trace_config(endpoint: &str) -> String {
    format!("[trace]\nendpoint = {endpoint:?}\nsample_ratio = 1.0\n")
}

/// Returns the spans of the next trace with this root, after `after` other spans.
fn spans_of(collector: &Collector, after: usize, root: &str) -> Vec<Span> {
    let mut found = Vec::new();
    wait_for("the trace", || {
        let all = collector.spans().split_off(after);
        let Some(last) = all.iter().rfind(|span| span.name == root) else { return false };
        found = all.iter().filter(|span| span.trace_id == last.trace_id).cloned().collect();
        true
    });
    found
}

fn named<'a>(spans: &'a [Span], name: &str) -> &'a Span {
    let names: Vec<&str> = spans.iter().map(|span| span.name.as_str()).collect();
    spans.iter().find(|span| span.name == name).unwrap_or_else(|| panic!("no {name} among {names:?}"))
}

fn number(span: &Span, key: &str) -> Option<i64> {
    match find(&span.attributes, key) {
        Some(Told::IntValue(number)) => Some(*number),
        _ => None,
    }
}

/// Asserts that every span lies within its parent, and that all spans but the root have one.
fn is_a_tree(spans: &[Span]) {
    for span in spans {
        assert!(span.start_time_unix_nano <= span.end_time_unix_nano, "{}", span.name);
        let parent = spans.iter().find(|parent| parent.span_id == span.parent_span_id);
        match parent {
            None => assert_eq!(span.kind, 2, "{} is the server's", span.name),
            Some(parent) => assert!(
                parent.start_time_unix_nano <= span.start_time_unix_nano
                    && span.end_time_unix_nano <= parent.end_time_unix_nano,
                "{} within {}",
                span.name,
                parent.name
            ),
        }
    }
}

#[test]
fn a_collector_gets_what_prometheus_would() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let collector = runtime.block_on(Collector::start("127.0.0.1:0", CollectorReply::Refuses));
    let config = format!("{}metrics_interval = \"200ms\"\n", trace_config(&collector.endpoint()));
    let site =
        Site::start("otlp-metrics", vec![mock(Dialect::Vllm, Role::Both, false)], &["--worker"], &config);
    assert_eq!(site.chat(&chat(20, 1, 8)).0, 200);
    // A collector that refuses for a while loses no spans.
    std::thread::sleep(std::time::Duration::from_millis(500));
    *collector.reply.lock().expect("no panic") = CollectorReply::Takes;
    let last =
        || collector.received.lock().expect("no panic").metrics.last().map(|(_, request)| request.clone());
    wait_for("metrics", || last().is_some());
    let request = last().expect("one came");
    let of = &request.resource_metrics[0];
    let resource = of.resource.as_ref().expect("a resource");
    assert_eq!(find(&resource.attributes, "service.name"), Some(&text("kvasir")));
    let metrics = &of.scope_metrics[0].metrics;
    let names: std::collections::BTreeSet<&str> = metrics.iter().map(|metric| metric.name.as_str()).collect();
    let scraped = get(&site.gateway.address, "/metrics").expect("metrics").1;
    let families = scraped.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
    let families: std::collections::BTreeSet<&str> = families
        .map(|name| name.strip_suffix("_total").unwrap_or(name))
        // Families without a series are not sent.
        .filter(|name| scraped.lines().any(|line| line.starts_with(*name)))
        .collect();
    assert!(names.is_subset(&families) && names.len() > 40, "{names:?}\n{families:?}");
    let requests = metrics.iter().find(|metric| metric.name == "kvasir_gateway_requests").expect("requests");
    let Some(opentelemetry_proto::tonic::metrics::v1::metric::Data::Sum(sum)) = &requests.data else {
        panic!("a counter")
    };
    let [point] = sum.data_points.as_slice() else { panic!("one series: {sum:?}") };
    assert_eq!(find(&point.attributes, "surface"), Some(&text("chat")));
    assert_eq!(
        point.value,
        Some(opentelemetry_proto::tonic::metrics::v1::number_data_point::Value::AsDouble(1.0))
    );
}

#[test]
fn a_hand_off_is_one_trace_with_its_transfer() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let collector = runtime.block_on(Collector::start("127.0.0.1:0", CollectorReply::Takes));
    let config = format!("[router]\ndisaggregate_above_tokens = 64\n{}", trace_config(&collector.endpoint()));
    let cluster = Cluster::start("traced", &["prefill", "decode"], &config);
    cluster.complete(&request(&prompt(1, 400), 8));
    let root = format!("text_completion {}", support::MODEL);
    let spans = spans_of(&collector, 0, &root);
    is_a_tree(&spans);
    let (prefill, decode, moved) =
        (named(&spans, "prefill"), named(&spans, "decode"), named(&spans, "kv_transfer"));
    assert_eq!((prefill.kind, decode.kind), (3, 3), "calls of others");
    assert_eq!(number(moved, "kvasir.transfer.blocks"), Some(25));
    assert!(moved.end_time_unix_nano > prefill.start_time_unix_nano);
    let top = named(&spans, &root);
    assert_eq!(number(top, "gen_ai.usage.input_tokens"), Some(400));
    assert_eq!(number(top, "gen_ai.usage.output_tokens"), Some(8));
    assert_eq!(number(top, "http.response.status_code"), Some(200));
    assert_eq!(top.events.iter().filter(|event| event.name == "first_token").count(), 1);
    let route = named(&spans, "route");
    assert_eq!(number(route, "kvasir.blocks"), Some(25));
    assert!(find(&route.attributes, "kvasir.prefill_worker").is_some());
}

/// Proxies bytes to an engine and records its requests.
async fn recording_proxy(engine: String) -> (String, Arc<Mutex<String>>) {
    let recorded = Arc::new(Mutex::new(String::new()));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let keeping = Arc::clone(&recorded);
    tokio::spawn(async move {
        loop {
            let (outside, _) = listener.accept().await.expect("a client");
            let inside = tokio::net::TcpStream::connect(&engine).await.expect("the engine");
            let (mut from, mut back) = outside.into_split();
            let (mut answers, mut to) = inside.into_split();
            let keeping = Arc::clone(&keeping);
            tokio::spawn(async move {
                let mut buffer = vec![0; 64 << 10];
                while let Ok(count @ 1..) = from.read(&mut buffer).await {
                    keeping.lock().expect("lock").push_str(&String::from_utf8_lossy(&buffer[..count]));
                    if to.write_all(&buffer[..count]).await.is_err() {
                        break;
                    }
                }
            });
            tokio::spawn(async move { tokio::io::copy(&mut answers, &mut back).await });
        }
    });
    (format!("http://{address}"), recorded)
}

#[test]
fn callers_and_engines_are_of_one_trace() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let collector = runtime.block_on(Collector::start("127.0.0.1:0", CollectorReply::Takes));
    let listen = "127.0.0.1:0".parse().expect("an address");
    let engine =
        runtime.block_on(Mock::start(mock(Dialect::Vllm, Role::Both, false), listen)).expect("a mock");
    let plain = engine.url().trim_start_matches("http://").to_owned();
    let (url, recorded) = runtime.block_on(recording_proxy(plain));
    let scratch = support::Scratch::new("callers");
    let config = format!("[gateway]\nhealth_interval = \"100ms\"\n{}", trace_config(&collector.endpoint()));
    let path = scratch.config("kvasir.toml", &config);
    let gateway = support::Process::start(&["gateway", "--config", &path, "--worker", &url]);
    gateway.wait_healthy();
    let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
    let ask = |headers: &str| {
        let body = chat(20, 1, 4).to_string();
        recorded.lock().expect("lock").clear();
        let answer = support::raw(
            &gateway.address,
            &format!(
                "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}content-length: {}\r\n\r\n{body}",
                body.len()
            ),
        );
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
        let recorded = recorded.lock().expect("lock").to_ascii_lowercase();
        let asked = recorded.split("post /v1/chat/completions").nth(1).expect("the request").to_owned();
        let of = |name: &str| {
            let line = asked.lines().find_map(|line| line.strip_prefix(name));
            line.map(|value| value.trim_start_matches(':').trim().to_owned())
        };
        (of("traceparent"), of("tracestate"))
    };
    let (parent, state) = ask(&format!("traceparent: 00-{trace}-00f067aa0ba902b7-01\r\ntracestate: a=1\r\n"));
    let parent = parent.expect("the engine is told");
    let spans = spans_of(&collector, 0, "chat tiny");
    is_a_tree(&spans);
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let decode = named(&spans, "decode");
    assert_eq!(parent, format!("00-{trace}-{}-01", hex(&decode.span_id)), "below the leg");
    assert_eq!(state.as_deref(), Some("a=1"));
    let root = named(&spans, "chat tiny");
    assert_eq!(
        (hex(&root.trace_id), hex(&root.parent_span_id)),
        (trace.to_owned(), "00f067aa0ba902b7".to_owned())
    );
    for name in ["tokenise", "queue", "route"] {
        named(&spans, name);
    }
    assert_eq!(find(&root.attributes, "gen_ai.request.model"), Some(&text("tiny")));
    let said = format!("{spans:?}");
    assert!(!said.contains("word1"), "nothing of the prompt");

    // If a caller's trace is not sampled, neither are its spans here nor its engine's.
    let count = collector.spans().len();
    let (parent, _) = ask(&format!("traceparent: 00-{trace}-00f067aa0ba902b7-00\r\n"));
    assert_eq!(parent, Some(format!("00-{trace}-00f067aa0ba902b7-00")));
    // A failed request has an error span.
    let fault = tools_mocker::Fault {
        kind: tools_mocker::FaultKind::Error,
        probability: 1.0,
        count: None,
        millis: 0,
        tokens: 0,
    };
    engine.fault(fault).expect("a fault");
    let (status, _) = post(&gateway.address, "/v1/chat/completions", &chat(20, 2, 4)).expect("an answer");
    assert_eq!(status, 500);
    let spans = spans_of(&collector, count, "chat tiny");
    let failed = named(&spans, "decode");
    assert_eq!(failed.status.as_ref().map(|status| status.code), Some(2));
    assert_eq!(find(&failed.attributes, "error.type"), Some(&text("engine_error")));
    assert!(named(&spans, "chat tiny").events.iter().any(|event| event.name == "retry"));
    runtime.shutdown_background();
}

/// Engines refuse request ids that are in use, and abort requests by id.
#[test]
fn a_clients_name_for_a_request_never_reaches_an_engine() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let scratch = support::Scratch::new("names");
    let folder = format!("[transfer]\nsocket_folder = {:?}\n", scratch.0.display().to_string());
    let config = scratch.config("kvasir.toml", &format!("[gateway]\nhealth_interval = \"100ms\"\n{folder}"));
    let listen = "127.0.0.1:0".parse().expect("an address");
    let engine =
        runtime.block_on(Mock::start(mock(Dialect::Vllm, Role::Both, false), listen)).expect("a mock");
    // The gateway relays the text of one engine and makes the text of the other.
    let worker =
        support::Process::start(&["worker", "--role", "both", "--threads", "1", "--config", &config]);
    worker.wait_healthy();
    for plain in [engine.url().trim_start_matches("http://").to_owned(), worker.address.clone()] {
        let (url, recorded) = runtime.block_on(recording_proxy(plain));
        let gateway = support::Process::start(&["gateway", "--config", &config, "--worker", &url]);
        gateway.wait_healthy();
        let body = json!({"prompt": "Hello", "max_tokens": 2, "vllm_xargs": {"kvasir_resumed_tokens": 3}});
        let body = body.to_string();
        for _ in 0..2 {
            let answer = support::raw(
                &gateway.address,
                &format!(
                    "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx-request-id: mine-1\r\ncontent-length: {}\r\n\r\n{body}",
                    body.len()
                ),
            );
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
            assert!(answer.contains("x-request-id: mine-1\r\n"), "{answer}");
        }
        let recorded = recorded.lock().expect("lock").to_ascii_lowercase();
        let names: Vec<&str> =
            recorded.lines().filter_map(|line| line.strip_prefix("x-request-id: ")).collect();
        assert!(names.len() == 2 && names[0] != names[1] && names[0].len() >= 32, "{names:?}");
        assert!(!recorded.contains("mine-1"), "{recorded}");
        assert!(!recorded.contains("kvasir_resumed_tokens"), "the gateway's alone: {recorded}");
    }
    runtime.shutdown_background();
}

#[test]
fn top_shows_a_gateway() {
    let mocks = vec![mock(Dialect::Vllm, Role::Both, true), mock(Dialect::Vllm, Role::Both, false)];
    let site = Site::start("top", mocks, &["--worker", "--worker"], "");
    for number in 0..4 {
        assert_eq!(site.chat(&chat(60, number, 4)).0, 200);
    }
    let top = |arguments: &[&str]| {
        let output =
            Command::new(env!("CARGO_BIN_EXE_kvasir")).arg("top").args(arguments).output().expect("runs");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.success(), text(&output.stdout), text(&output.stderr))
    };
    let (is_good, frame, errors) = top(&[&site.gateway.address, "--interval", "200"]);
    assert!(is_good, "{errors}");
    for engine in &site.mocks {
        let name = engine.url().trim_start_matches("http://").to_owned();
        assert!(frame.contains(&name), "{name}\n{frame}");
    }
    assert!(frame.contains("tiny") && frame.contains("blocks are here"), "{frame}");
    let (is_good, _, errors) = top(&[&free_address()]);
    assert!(!is_good && errors.contains("refused"), "{errors}");
}

#[test]
fn kserve_clients_are_content() {
    let asked = Command::new("python3").args(["-c", "import tritonclient.grpc"]).output();
    if !asked.is_ok_and(|output| output.status.success()) {
        eprintln!("SKIPPED the KServe clients' test: no tritonclient (pip install 'tritonclient[grpc]')");
        return;
    }
    let grpc = free_address();
    let config = format!("[gateway]\ngrpc_listen = {grpc:?}\n");
    let cluster = Cluster::start("kserve", &["both", "both"], &config);
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/client/kserve_client.py");
    let output =
        Command::new("python3").arg(script).args([&grpc, support::MODEL]).output().expect("python3 runs");
    let printed = String::from_utf8_lossy(&output.stdout);
    println!("{printed}");
    assert!(output.status.success(), "{printed}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(printed.matches("ok: ").count() >= 12, "{printed}");
    let (_, metrics) = get(&cluster.gateway.address, "/metrics").expect("metrics");
    let lines = metrics.lines().filter(|line| line.contains("surface=\"kserve\""));
    let counted: f64 = lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum();
    assert!(counted >= 50.0, "{counted}");
}

#[test]
fn every_metric_is_documented_and_moves() {
    // Steps take a moment, so that a stream arrives in several pieces.
    let mock = || tools_mocker::MockConfig {
        decode_seconds_per_step: 0.004,
        ..mock(Dialect::Vllm, Role::Both, true)
    };
    let mocks = vec![mock(), mock()];
    let scratch = support::Scratch::new("metrics");
    let log = scratch.0.join("audit.jsonl").display().to_string();
    let store = store_of_two_blocks();
    let config = format!(
        "[gateway]\nstores = [{store:?}]\nhedge_after = \"200ms\"\nstall = \"500ms\"\nrequests_max = 2\n[access]\nwaiting_max = 1\nwait_max = \"300ms\"\n\
         audit_file = {log:?}\n[router]\nstrategy = \"round-robin\"\n"
    );
    let site = Site::start("metrics-site", mocks, &["--worker", "--worker"], &config);
    let scrape = || get(&site.gateway.address, "/metrics").expect("metrics").1;
    let values = |text: &str| -> std::collections::BTreeMap<String, f64> {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let mut sums = std::collections::BTreeMap::new();
        for line in lines {
            let Some((name, value)) = line.rsplit_once(' ') else { continue };
            let name = name.split('{').next().unwrap_or(name).to_owned();
            *sums.entry(name).or_insert(0.0) += value.parse::<f64>().unwrap_or(0.0);
        }
        sums
    };
    let first = values(&scrape());
    let mut highest = first.clone();
    let mut note = |text: &str| {
        for (name, value) in values(text) {
            let seen = highest.entry(name).or_insert(value);
            *seen = seen.max(value);
        }
    };
    let fault = |which: usize, kind: tools_mocker::FaultKind, tokens: u64| {
        let fault =
            tools_mocker::Fault { kind, probability: 1.0, count: None, millis: 0, tokens: tokens as _ };
        site.mocks[which].fault(fault).expect("a fault");
    };
    use tools_mocker::FaultKind;
    // Plain requests, streamed and not, sent twice, so that there are cache hits.
    for number in 0..12 {
        let mut body = chat(80, number % 3, 12);
        body["stream"] = (number % 2 == 0).into();
        assert_eq!(post(&site.gateway.address, "/v1/chat/completions", &body).expect("an answer").0, 200);
        note(&scrape());
    }
    // One stream continues on another worker; one cannot.
    fault(0, FaultKind::DieMidStream, 3);
    let mut body = chat(40, 50, 12);
    body["stream"] = true.into();
    for _ in 0..2 {
        assert_eq!(post(&site.gateway.address, "/v1/chat/completions", &body).expect("an answer").0, 200);
    }
    fault(1, FaultKind::DieMidStream, 3);
    body["response_format"] = json!({"type": "json_object"});
    assert_eq!(post(&site.gateway.address, "/v1/chat/completions", &body).expect("an answer").0, 200);
    // Engines whose reports contradict their caches lose the index's trust.
    site.mocks.iter().for_each(Mock::heal);
    site.mocks.iter().enumerate().for_each(|(which, _)| fault(which, FaultKind::WrongCached, 0));
    for number in 0..90 {
        let mut body = chat(80, number % 3, 2);
        body["stream"] = false.into();
        assert_eq!(post(&site.gateway.address, "/v1/chat/completions", &body).expect("an answer").0, 200);
    }
    note(&scrape());
    // A worker that only fails is taken out of service; a slow one is hedged; deadlines pass; slots run out.
    site.mocks.iter().for_each(Mock::heal);
    fault(0, FaultKind::Error, 0);
    for number in 0..14 {
        let _whatever = post(&site.gateway.address, "/v1/chat/completions", &chat(10, number, 2));
    }
    site.mocks.iter().for_each(Mock::heal);
    site.mocks.iter().enumerate().for_each(|(which, _)| fault(which, FaultKind::Hang, 0));
    let late = |body: &Value| {
        let body = body.to_string();
        support::raw_open(
            &site.gateway.address,
            &format!(
                "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nx-request-timeout-ms: 1500\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            ),
        )
    };
    let held: Vec<_> = (0..4).map(|number| late(&chat(20, 60 + number, 2))).collect();
    for _ in 0..40 {
        note(&scrape());
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    drop(held);
    site.mocks.iter().for_each(Mock::heal);
    // Events with unknown parents, and a restarted feed, are covered by the tests of events; here these
    // metrics stay 0.
    wait_for("everything to settle", || {
        let text = scrape();
        note(&text);
        values(&text).get("kvasir_gateway_active_requests") == Some(&0.0)
    });
    let document = std::fs::read_to_string(
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../router/gateway/METRICS.md"),
    )
    .expect("METRICS.md");
    let mut documented: Vec<(String, bool)> = Vec::new();
    for line in document.lines().filter(|line| line.starts_with("| `")) {
        let name = line.split('`').nth(1).expect("a name").to_owned();
        documented.push((name, line.contains("(still")));
    }
    let served: std::collections::BTreeSet<String> = scrape()
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE "))
        .filter_map(|line| line.split(' ').next())
        // The classic text format names a counter by its sample, the document by its family.
        .map(|name| name.strip_suffix("_total").unwrap_or(name).to_owned())
        .collect();
    let names: std::collections::BTreeSet<String> = documented.iter().map(|(name, _)| name.clone()).collect();
    assert_eq!(names, served, "METRICS.md and /metrics");
    for (name, is_still) in documented.iter().filter(|(_, is_still)| !is_still) {
        let of = |values: &std::collections::BTreeMap<String, f64>| {
            [name.clone(), format!("{name}_total"), format!("{name}_count")]
                .iter()
                .filter_map(|name| values.get(name))
                .sum::<f64>()
        };
        assert!(of(&highest) > of(&first) || is_level(name, of(&highest)), "{name} never moved ({is_still})");
    }
}

/// Starts a store that always reports two blocks to gateways.
fn store_of_two_blocks() -> String {
    use std::io::{Read, Write};
    let mut log = router_events::store_changes::ChangeLog::new("n0", 1);
    (1..=2).for_each(|number| log.set_held(kvstore_block::BlockIdentity([number; 16]), 0, true));
    let body = serde_json::to_string(&log.changes(Default::default())).expect("JSON");
    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("a connection");
            // A poll waits for changes.
            std::thread::sleep(std::time::Duration::from_millis(100));
            let _asked = stream.read(&mut [0; 4096]);
            let _gone = stream.write_all(format!("{head}{body}").as_bytes());
        }
    });
    url
}

/// Whether a metric is a gauge that has a value from the start.
fn is_level(name: &str, value: f64) -> bool {
    const LEVELS: [&str; 6] = [
        "workers_ready",
        "index_bytes",
        "learned_slowness_ratio",
        "learned_seconds_per_token",
        "shared_store_answers",
        "shared_store_blocks",
    ];
    LEVELS.iter().any(|level| name.ends_with(level)) && value > 0.0
}

#[test]
fn a_first_chat_runs_to_the_end_of_the_context_and_is_seen() {
    let config = "[engine]\ncontext_tokens = 160\n[host_tier]\ncapacity = \"4 MiB\"\n";
    let cluster = Cluster::start("first-chat", &["both"], config);
    let body = json!({"model": support::MODEL, "messages": [{"role": "user", "content": "Hello"}], "seed": 1,
        "ignore_eos": true});
    let (status, answer) = post(&cluster.gateway.address, "/v1/chat/completions", &body).expect("an answer");
    assert_eq!(status, 200, "{answer}");
    let answer: Value = serde_json::from_str(&answer).expect("JSON");
    assert_eq!(answer["usage"]["total_tokens"], 160, "no limit is the context's: {}", answer["usage"]);
    let gaps = cluster.gateway.metric("kvasir_gateway_inter_token_seconds_count");
    assert!(gaps > 100.0, "gaps between tokens count in front of every engine: {gaps}");
    let (_, status) = get(&cluster.gateway.address, "/kvasir/status").expect("the status");
    let status: Value = serde_json::from_str(&status).expect("JSON");
    wait_for("the host tier's size", || {
        let (_, status) = get(&cluster.gateway.address, "/kvasir/status").expect("the status");
        let status: Value = serde_json::from_str(&status).expect("JSON");
        let pools = status["workers"][0]["pools"].as_array().cloned().unwrap_or_default();
        pools
            .iter()
            .any(|pool| pool["tier"] == "host" && pool["blocks"].as_u64().is_some_and(|blocks| blocks > 0))
    });
    let (code, history) = get(&cluster.gateway.address, "/kvasir/history").expect("the history");
    let history: Value = serde_json::from_str(&history).expect("JSON");
    assert_eq!((code, &history["started_unix"]), (200, &status["started_unix"]));
    assert!(history["samples"].as_array().is_some_and(|samples| !samples.is_empty()), "{history}");
}

/// The metrics of every role satisfy the rules of `promtool check metrics`, and promtool itself if it is
/// installed.
#[test]
fn metrics_of_every_role_have_one_naming_scheme_types_and_help() {
    let cluster = Cluster::start("scheme", &["both"], "[host_tier]\ncapacity = \"4 MiB\"\n");
    cluster.complete(&request(&prompt(1, 40), 4));
    let scratch = support::Scratch::new("scheme-store");
    let path = scratch.config(
        "store",
        "[store]\nresp = []\npool = \"1 MiB\"\nslot = \"16 KiB\"\nlisten = \"127.0.0.1:0\"\n",
    );
    let store = support::Process::start(&["store", "--config", &path]);
    store.wait_healthy();
    for address in [&cluster.gateway.address, &cluster.workers[0].address, &store.address] {
        let (status, text) = get(address, "/metrics").expect("metrics");
        assert_eq!(status, 200);
        let declared = |kind: &str| -> std::collections::BTreeMap<String, String> {
            let lines = text.lines().filter_map(|line| line.strip_prefix(kind)?.split_once(' '));
            lines.map(|(name, rest)| (name.to_owned(), rest.to_owned())).collect()
        };
        let (types, helps) = (declared("# TYPE "), declared("# HELP "));
        assert_eq!(types.keys().collect::<Vec<_>>(), helps.keys().collect::<Vec<_>>(), "each has both");
        assert!(
            types.keys().all(|name| name.starts_with("kvasir_") || name.starts_with("process_")),
            "{types:?}"
        );
        assert!(types.contains_key("kvasir_build_info") && types.contains_key("process_open_fds"));
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let name = line.split(['{', ' ']).next().expect("a name");
            let family = ["_bucket", "_sum", "_count"].iter().find_map(|end| {
                name.strip_suffix(end)
                    .filter(|family| types.get(*family).is_some_and(|kind| kind == "histogram"))
            });
            let kind = types.get(family.unwrap_or(name)).unwrap_or_else(|| panic!("{name} has no type"));
            assert_eq!(name.ends_with("_total"), kind == "counter", "{name} is a {kind}");
        }
        let mut promtool = match Command::new("promtool")
            .args(["check", "metrics"])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped())
            .stderr(std::process::Stdio::piped())
            .spawn()
        {
            Ok(promtool) => promtool,
            Err(_) => {
                eprintln!("SKIPPED promtool check metrics: there is no promtool here");
                continue;
            }
        };
        std::io::Write::write_all(&mut promtool.stdin.take().expect("piped"), text.as_bytes()).expect("sent");
        let out = promtool.wait_with_output().expect("its end");
        let said = [out.stdout, out.stderr].concat();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&said));
    }
}

/// Kernel statistics of an engine are printed, and shown on the gateway.
#[test]
fn why_an_engine_is_slow_is_seen_from_the_kernel() {
    let site = Site::start("observe-kernel", vec![mock(Dialect::Vllm, Role::Both, true)], &["--worker"], "");
    let name = site.mocks[0].url().trim_start_matches("http://").to_owned();
    let load = support::load::Load::start(&site.gateway.address, 50);
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_kvasir"))
        .args(["top", "--kernel", "--once", "--tell", "--interval", "2000", &site.gateway.address])
        .output()
        .expect("kvasir top");
    let answered = load.end();
    let (printed, said) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    let is_off =
        ["built without eBPF", "needs CAP_", "CONFIG_DEBUG_INFO_BTF", "PID namespace", "answer_begins"];
    if !output.status.success() && is_off.iter().any(|part| said.contains(part)) {
        println!("SKIPPED: {}", said.trim());
        return;
    }
    assert!(output.status.success(), "{said}");
    println!("{answered} requests; {printed}");
    let line = printed.lines().find(|line| line.starts_with(&name)).expect("a line for the engine");
    let rate: f64 = line.split_whitespace().nth(2).and_then(|rate| rate.parse().ok()).expect("requests/s");
    // Health checks and load queries are requests as well.
    assert!(rate > 20.0, "{printed}");
    let (_, status) = get(&site.gateway.address, "/kvasir/status").expect("a status");
    let status: Value = serde_json::from_str(&status).expect("JSON");
    let kernel = &status["workers"][0]["kernel"];
    assert!(kernel["first_byte_p50_ms"].as_f64().is_some_and(|time| time > 0.0), "{kernel}");
    assert!(
        kernel["processes"].as_u64().is_some_and(|count| count > 0) && kernel["why"].is_string(),
        "{kernel}"
    );
}
