//! Mocks over HTTP, as a gateway sees them.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use bytes::Bytes;
use router_engines::client::EngineClient;
use router_engines::tokens::TokenEvent;
use router_events::wire::{KvEvent, decode};
use router_openai::sse;
use router_zmtp::{DealerSocket, Limits, SubSocket};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tools_mocker::{Dialect, Fault, FaultKind, LoadFailure, Mock, MockConfig, MockStats, Role, fleet};

const WITHIN: Duration = Duration::from_secs(10);

fn config() -> MockConfig {
    MockConfig { eos_one_in: 0, ..MockConfig::tiny().expect("tiny") }
}

async fn start(config: MockConfig) -> Mock {
    Mock::start(config, "127.0.0.1:0".parse().expect("address")).await.expect("starts")
}

async fn connect(mock: &Mock, path: &str, body: &Value) -> TcpStream {
    let mut stream = TcpStream::connect(mock.address()).await.expect("connects");
    let body = body.to_string();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    // A listener that resets connections may have done so before this write.
    let _reset = stream.write_all((head + &body).as_bytes()).await;
    stream
}

/// Status and whole text of an answer; 0 when the connection was cut before its end.
async fn exchange(mock: &Mock, path: &str, body: &Value) -> (u16, String) {
    let mut stream = connect(mock, path, body).await;
    let mut bytes = Vec::new();
    let read = tokio::time::timeout(WITHIN, stream.read_to_end(&mut bytes)).await.expect("in time");
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return (0, String::new()) };
    let is_cut = read.is_err() || head.contains("chunked") && !text.ends_with("\r\n0\r\n\r\n");
    (if is_cut { 0 } else { head[9..12].parse().expect("status") }, body.to_owned())
}

async fn post(mock: &Mock, path: &str, body: Value) -> Value {
    let (status, text) = exchange(mock, path, &body).await;
    assert_eq!(status, 200, "{path}: {text}");
    serde_json::from_str(&text).expect("JSON")
}

fn chat(words: &str, max_tokens: usize) -> Value {
    json!({ "messages": [{ "role": "user", "content": words }], "max_tokens": max_tokens })
}

fn text(answer: &Value) -> &str {
    answer["choices"][0]["message"]["content"].as_str().expect("text")
}

async fn until(mock: &Mock, what: impl Fn(&MockStats) -> bool) -> MockStats {
    let started = Instant::now();
    while !what(&mock.stats()) {
        assert!(started.elapsed() < WITHIN, "{:?}", mock.stats());
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    mock.stats()
}

fn slow() -> MockConfig {
    MockConfig { decode_seconds_per_step: 0.005, ..config() }
}

#[tokio::test]
async fn workers_say_the_same_and_continuations_go_on() {
    let (one, two) = (start(config()).await, start(MockConfig { seed: 9, ..slow() }).await);
    let whole = post(&one, "/v1/chat/completions", chat("hello", 24)).await;
    assert_eq!(text(&whole), text(&post(&two, "/v1/chat/completions", chat("hello", 24)).await));
    let cut = post(&one, "/v1/chat/completions", chat("hello", 10)).await;
    let mut rest = chat("hello", 14);
    rest["messages"]
        .as_array_mut()
        .expect("array")
        .push(json!({ "role": "assistant", "content": text(&cut) }));
    rest["continue_final_message"] = true.into();
    rest["add_generation_prompt"] = false.into();
    let rest = post(&two, "/v1/chat/completions", rest).await;
    assert_eq!(text(&whole), format!("{}{}", text(&cut), text(&rest)));
    // Token by token, as the gateway reads them.
    let client = EngineClient::new(&two.url(), None);
    let request = json!({ "prompt": [5, 6, 7], "max_tokens": 9, "stream": true, "return_token_ids": true, "logprobs": 2,
        "return_tokens_as_token_ids": true, "stream_options": { "include_usage": true } });
    let answer = client.post("/v1/completions", request.to_string().into()).await.expect("an answer");
    let (mut ids, mut pieces, mut cached) = (Vec::new(), 0, None);
    for event in sse::events(&answer) {
        let data = sse::data_of(event);
        if data[..] == *sse::DONE {
            break;
        }
        let event = TokenEvent::parse(&data).expect("an event");
        assert!(event.token_ids.is_empty() || event.probabilities[0].1.len() == 2);
        ids.extend(event.token_ids);
        pieces += 1;
        cached = cached.or(event.usage.and_then(|usage| usage.cached));
    }
    let body = json!({ "prompt": [5, 6, 7], "max_tokens": 9, "return_token_ids": true });
    let same = post(&one, "/v1/completions", body).await;
    assert_eq!(json!(ids), same["choices"][0]["token_ids"]);
    assert_eq!((pieces, cached), (10, Some(0)), "one piece for each token, and the usage");
    assert!(client.is_healthy().await);
}

#[tokio::test]
async fn cached_tokens_follow_the_rules_and_blocks_are_evicted() {
    let small = MockConfig { block_tokens: 4, blocks: 17, context_tokens: 64, ..config() };
    let mock = start(small).await;
    let cached = async |ids: Vec<u32>| {
        let answer = post(&mock, "/v1/completions", json!({ "prompt": ids, "max_tokens": 1 })).await;
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("count")
    };
    let prompt = |first: u32, len: u32| (first..first + len).collect::<Vec<_>>();
    assert_eq!(cached(prompt(0, 16)).await, 0);
    assert_eq!(cached(prompt(0, 16)).await, 12, "the last token is never cached");
    assert_eq!(cached(prompt(0, 17)).await, 16);
    for other in 1..5 {
        cached(prompt(50 * other, 40)).await;
    }
    assert_eq!(cached(prompt(0, 17)).await, 0, "evicted");
    let salted = json!({ "prompt": prompt(0, 17), "max_tokens": 1, "cache_salt": "a" });
    let answer = post(&mock, "/v1/completions", salted).await;
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    assert_eq!(mock.stats().held_blocks, 0);
}

#[tokio::test]
async fn events_and_their_replay_add_up_to_the_pool() {
    for dialect in [Dialect::Vllm, Dialect::Sglang] {
        let base = MockConfig { block_tokens: 4, blocks: 40, context_tokens: 128, events: true, ..config() };
        let mock = start(MockConfig { dialect, ..base }).await;
        mock.fault(Fault { count: Some(1), ..Fault::new(FaultKind::DropEvents) }).expect("armed");
        let (events, replay) = mock.event_endpoints();
        let events = events.expect("events");
        let mut feed = SubSocket::connect(&events, b"", Limits::SUBSCRIBER).await.expect("connects");
        tokio::time::sleep(Duration::from_millis(200)).await;
        for first in 0..12_u32 {
            let prompt: Vec<u32> = (first % 5 * 20..first % 5 * 20 + 60).collect();
            post(&mock, "/v1/completions", json!({ "prompt": prompt, "max_tokens": 9 })).await;
        }
        let batches = mock.stats().event_batches;
        let replay = replay.expect("replay");
        let mut dealer = DealerSocket::connect(&replay, Limits::SUBSCRIBER).await.expect("connects");
        let ask = [Bytes::new(), Bytes::copy_from_slice(&0_u64.to_be_bytes())];
        dealer.send(&ask).await.expect("sends");
        let mut held: HashMap<u64, usize> = HashMap::new();
        for sequence in 0..batches {
            let frames = dealer.recv().await.expect("reply");
            assert_eq!(frames[frames.len() - 2][..], sequence.to_be_bytes());
            let batch = decode(&frames[frames.len() - 1]).expect("decodes");
            assert!(batch.broken.is_empty() && batch.skipped == 0);
            for event in batch.events {
                match event {
                    KvEvent::Stored(stored) => {
                        assert_eq!(stored.tokens.len(), stored.hashes.len() * 4);
                        stored.hashes.iter().for_each(|hash| *held.entry(*hash).or_default() += 1);
                    }
                    KvEvent::Removed(removed) => {
                        removed.hashes.iter().for_each(|hash| *held.get_mut(hash).expect("stored") -= 1);
                    }
                    _ => held.clear(),
                }
            }
        }
        assert_eq!(held.values().sum::<usize>(), mock.stats().cached_blocks, "{dialect:?}");
        let first = tokio::time::timeout(WITHIN, feed.recv()).await.expect("in time").expect("batch");
        assert_eq!(first[1][..], 1_u64.to_be_bytes(), "the first batch was dropped by the fault");
        mock.stop().await;
    }
}

#[tokio::test]
async fn a_client_that_goes_away_frees_its_place() {
    for (path, stream) in [("/v1/chat/completions", true), ("/v1/chat/completions", false)] {
        let mock = start(slow()).await;
        let mut body = chat("hello", 20_000);
        body["stream"] = stream.into();
        let client = connect(&mock, path, &body).await;
        let stats = until(&mock, |stats| stats.running == 1 && stats.generation_tokens > 2).await;
        assert!(stats.held_blocks > 0);
        drop(client);
        let stats = until(&mock, |stats| stats.aborted == 1).await;
        assert_eq!((stats.running, stats.held_blocks), (0, 0));
    }
}

#[tokio::test]
async fn batches_are_bounded_and_time_is_kept() {
    let mock = start(MockConfig { batch_max: 2, waiting_max: 1, ..slow() }).await;
    let started = Instant::now();
    let body = chat("x", 20);
    let (one, two) = tokio::join!(
        exchange(&mock, "/v1/chat/completions", &body),
        exchange(&mock, "/v1/chat/completions", &body)
    );
    let took = started.elapsed().as_millis();
    assert_eq!((one.0, two.0), (200, 200));
    assert!((95..400).contains(&took), "20 steps of 5 ms took {took} ms");
    let long = chat("x", 5000);
    let _running = (
        connect(&mock, "/v1/chat/completions", &long).await,
        connect(&mock, "/v1/chat/completions", &long).await,
    );
    until(&mock, |stats| stats.running == 2).await;
    let _waiting = connect(&mock, "/v1/chat/completions", &long).await;
    until(&mock, |stats| stats.waiting == 1).await;
    assert_eq!(exchange(&mock, "/v1/chat/completions", &long).await.0, 503);
}

#[tokio::test]
async fn each_fault_shows() {
    let mock = start(config()).await;
    let arm = |json: Value| mock.fault(serde_json::from_value(json).expect("fault")).expect("armed");
    let body = chat("hello", 8);
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let path = "/v1/chat/completions";
    for (fault, body, status) in [
        ("error", &body, 500),
        ("overloaded", &body, 503),
        ("die_mid_stream", &body, 0),
        ("die_mid_stream", &streamed, 0),
        ("refuse", &body, 0),
    ] {
        arm(json!({ "kind": fault, "count": 1, "tokens": 3 }));
        let (got, text) = exchange(&mock, path, body).await;
        assert_eq!(got, status, "{fault}: {text}");
        let contents = text.matches("\"delta\":{\"content\"").count();
        assert_eq!(contents, if fault == "die_mid_stream" && body == &streamed { 3 } else { 0 }, "{text}");
    }
    arm(json!({ "kind": "corrupt", "count": 1 }));
    assert!(serde_json::from_str::<Value>(&exchange(&mock, path, &body).await.1).is_err());
    arm(json!({ "kind": "wrong_cached", "count": 1 }));
    let answer = post(&mock, path, body.clone()).await;
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["usage"]["prompt_tokens"]);
    arm(json!({ "kind": "slow", "count": 8, "millis": 10 }));
    let started = Instant::now();
    post(&mock, path, body.clone()).await;
    assert!(started.elapsed() >= Duration::from_millis(80));
    for (fault, question) in [("slow_health", "/health"), ("slow_metrics", "/metrics")] {
        arm(json!({ "kind": fault, "count": 1, "millis": 80 }));
        let started = Instant::now();
        EngineClient::new(&mock.url(), None).get(question).await.expect("an answer");
        assert!(started.elapsed() >= Duration::from_millis(80), "{fault}");
    }
    for fault in ["hang", "stall"] {
        arm(json!({ "kind": fault, "count": 1, "tokens": 2 }));
        let mut stream = connect(&mock, path, &streamed).await;
        let (mut bytes, mut buffer) = (Vec::new(), [0; 4096]);
        while let Ok(Ok(count)) =
            tokio::time::timeout(Duration::from_millis(300), stream.read(&mut buffer)).await
        {
            assert!(count > 0, "{fault}: the connection stays open");
            bytes.extend_from_slice(&buffer[..count]);
        }
        let contents = String::from_utf8_lossy(&bytes).matches("\"delta\":{\"content\"").count();
        assert_eq!(contents, if fault == "stall" { 2 } else { 0 });
    }
    let armed = post(&mock, "/mock/faults", json!({ "kind": "error" })).await;
    assert_eq!((armed["armed"].as_bool(), exchange(&mock, path, &body).await.0), (Some(true), 500));
    mock.heal();
    assert_eq!(exchange(&mock, path, &body).await.0, 200);
    let shown = mock.stats().faults;
    assert!(shown.iter().all(|(kind, count)| (*count > 0) != (*kind == "drop_events")), "{shown:?}");
}

#[tokio::test]
async fn a_nixl_pair_meets_and_leases_end() {
    let lease = Duration::from_millis(200);
    let prefill = start(MockConfig { role: Role::Prefill, seed: 71, lease, ..config() }).await;
    let decode = start(MockConfig { role: Role::Decode, seed: 72, ..slow() }).await;
    let path = "/v1/chat/completions";
    let words = "many words ".repeat(20);
    let whole = post(&decode, path, chat(&words, 12)).await;
    let mut first = chat(&words, 1);
    first["kv_transfer_params"] = json!({ "do_remote_decode": true, "do_remote_prefill": false });
    let offered = post(&prefill, path, first.clone()).await["kv_transfer_params"].clone();
    assert_eq!((&offered["do_remote_prefill"], &offered["transfer_mode"]), (&json!(true), &json!("pull")));
    assert!(prefill.stats().leased_blocks > 10);
    let mut second = chat(&words, 12);
    second["kv_transfer_params"] = offered;
    assert_eq!(text(&post(&decode, path, second.clone()).await), text(&whole));
    let stats = prefill.stats();
    assert_eq!((stats.leased_blocks, stats.held_blocks, stats.pulled), (0, 0, 1));
    assert!(decode.stats().external_hits > 0);
    assert_eq!(exchange(&decode, path, &second).await.0, 500, "fetched already");
    post(&prefill, path, first).await;
    until(&prefill, |stats| stats.leases_expired == 1 && stats.held_blocks == 0).await;
    let lenient = start(MockConfig { load_failure: LoadFailure::Recompute, ..config() }).await;
    assert_eq!(text(&post(&lenient, path, second.clone()).await), text(&whole));
    // Mooncake: both legs at once.
    let leg = |is_prefill: bool, tokens| {
        let mut body = chat(&words, tokens);
        body["kv_transfer_params"] = json!({ "do_remote_decode": is_prefill, "do_remote_prefill": !is_prefill,
            "transfer_id": "xfer-test-1", "remote_bootstrap_addr": prefill.url() });
        body
    };
    let (one, two) = tokio::join!(post(&prefill, path, leg(true, 1)), post(&decode, path, leg(false, 12)));
    assert!(one["kv_transfer_params"].is_null());
    assert_eq!((text(&two), prefill.stats().pulled), (text(&whole), 2));
}

#[tokio::test]
async fn an_sglang_room_meets_or_times_out() {
    let sglang = MockConfig { dialect: Dialect::Sglang, ..config() };
    let prefill = start(MockConfig { role: Role::Prefill, seed: 81, ..sglang.clone() }).await;
    let bootstrap_timeout = Duration::from_millis(100);
    let alone = start(sglang.clone()).await;
    let decode = start(MockConfig { role: Role::Decode, seed: 82, bootstrap_timeout, ..sglang }).await;
    let path = "/v1/chat/completions";
    let mut body = chat("hello", 12);
    let whole = post(&alone, path, body.clone()).await;
    assert!(whole["choices"][0]["matched_stop"].is_null());
    for half in [&prefill, &decode] {
        let (status, text) = exchange(half, path, &body).await;
        assert_eq!(status, 400, "neither takes a request alone: {text}");
        assert!(text.contains("without bootstrap room id"), "{text}");
    }
    body["bootstrap_host"] = "127.0.0.1".into();
    body["bootstrap_room"] = json!(9_167_002_654_051_182_467_u64);
    let (_, two) = tokio::join!(post(&prefill, path, body.clone()), post(&decode, path, body.clone()));
    assert_eq!((text(&two), prefill.stats().pulled), (text(&whole), 1));
    assert_eq!(prefill.stats().held_blocks, 0);
    assert_eq!(exchange(&decode, path, &body).await.0, 500);
    let client = EngineClient::new(&prefill.url(), None);
    let info: Value = serde_json::from_slice(&client.get("/server_info").await.expect("info")).expect("JSON");
    assert_eq!((&info["disaggregation_mode"], &info["page_size"]), (&json!("prefill"), &json!(16)));
    let metrics = client.get("/metrics").await.expect("metrics");
    assert!(String::from_utf8_lossy(&metrics).contains("sglang:num_running_reqs{"));
    for path in ["/health", "/health_generate", "/model_info", "/v1/models", "/v1/loads"] {
        client.get(path).await.expect(path);
    }
}

#[tokio::test]
async fn the_other_surfaces_answer_in_their_shapes() {
    let mock = start(config()).await;
    let messages =
        json!({ "max_tokens": 5, "system": "s", "messages": [{ "role": "user", "content": "hi" }] });
    let answer = post(&mock, "/v1/messages", messages.clone()).await;
    assert_eq!(
        (&answer["stop_reason"], &answer["usage"]["output_tokens"]),
        (&json!("max_tokens"), &json!(5))
    );
    for (path, mut body, names) in [
        ("/v1/messages", messages, ["message_start", "content_block_delta", "message_stop"]),
        (
            "/v1/responses",
            json!({ "input": "hi", "max_output_tokens": 5 }),
            ["response.created", "response.output_text.delta", "response.completed"],
        ),
    ] {
        body["stream"] = true.into();
        let (status, text) = exchange(&mock, path, &body).await;
        assert!(status == 200 && names.iter().all(|name| text.contains(name)), "{text}");
    }
    let answer = post(&mock, "/v1/responses", json!({ "input": "hi", "max_output_tokens": 5 })).await;
    assert_eq!((&answer["status"], &answer["usage"]["output_tokens"]), (&json!("incomplete"), &json!(5)));
    let tool = json!({ "type": "function", "function": { "name": "f", "parameters": { "type": "object",
        "properties": { "x": { "type": "integer" } }, "required": ["x"] } } });
    let mut body = chat("hi", 50);
    (body["tools"], body["tool_choice"]) = (json!([tool]), json!("required"));
    let answer = post(&mock, "/v1/chat/completions", body).await;
    let call = &answer["choices"][0]["message"]["tool_calls"][0]["function"];
    assert_eq!((&call["name"], &call["arguments"]), (&json!("f"), &json!("{\"x\":0}")));
    assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls");
    let mut body = chat("hi", 50);
    body["response_format"] = json!({ "type": "json_schema", "json_schema": { "name": "s", "schema": {
        "type": "object", "properties": { "a": { "type": "boolean" } }, "required": ["a"] } } });
    assert_eq!(text(&post(&mock, "/v1/chat/completions", body).await), "{\"a\":true}");
    let embedded = post(&mock, "/v1/embeddings", json!({ "input": ["a", "b"] })).await;
    assert_eq!(embedded["data"][1]["embedding"].as_array().map(Vec::len), Some(64));
    let counted = post(&mock, "/tokenize", json!({ "prompt": "abc" })).await;
    let text = post(&mock, "/detokenize", json!({ "tokens": counted["tokens"] })).await;
    assert_eq!((&counted["count"], &text["prompt"]), (&json!(3), &json!("abc")));
    let mut several = chat("hi", 4);
    (several["n"], several["logprobs"], several["top_logprobs"]) = (json!(2), json!(true), json!(3));
    let answer = post(&mock, "/v1/chat/completions", several).await;
    assert_eq!(answer["choices"].as_array().map(Vec::len), Some(2));
    assert_eq!(
        answer["choices"][1]["logprobs"]["content"][3]["top_logprobs"].as_array().map(Vec::len),
        Some(3)
    );
    let path = "/v1/chat/completions";
    for (body, status) in [
        (json!({ "model": "nope", "messages": [{ "role": "user", "content": "x" }] }), 404),
        (json!({ "max_tokens": "x" }), 400),
        (json!({}), 400),
        (chat("x", 0), 400),
        (chat(&"x".repeat(40_000), 1), 400),
        (chat(&"x".repeat(33 << 20), 1), 413),
    ] {
        let (got, text) = exchange(&mock, path, &body).await;
        assert!(got == status || status == 413 && got == 0, "{text}");
        let is_told = serde_json::from_str::<Value>(&text).is_ok_and(|body| body["error"]["code"] == status);
        assert!(is_told || got == 0, "{text}");
    }
    let client = EngineClient::new(&mock.url(), None);
    let metrics = client.get("/metrics").await.expect("metrics");
    let metrics = String::from_utf8_lossy(&metrics).into_owned();
    assert!(
        metrics.contains("vllm:num_requests_running{engine=\"0\",model_name=\"tiny\"} 0.0\n"),
        "{metrics}"
    );
    assert!(metrics.contains("block_size=\"16\"") && metrics.contains("num_gpu_blocks=\"4096\""));
    for path in ["/health", "/ping", "/version", "/v1/models", "/kv_event_sources", "/query", "/mock/stats"] {
        client.get(path).await.expect(path);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_workers_start_at_once() {
    let started = Instant::now();
    let mocks = fleet(config(), 1000).await.expect("starts");
    let took = started.elapsed();
    assert!(took < Duration::from_secs(2), "{took:?}");
    let answer = post(&mocks[999], "/v1/chat/completions", chat("hello", 4)).await;
    assert_eq!(text(&answer), text(&post(&mocks[0], "/v1/chat/completions", chat("hello", 4)).await));
}
