//! The gateway in front of engines without any Kvasir code: mock engines that imitate vLLM and SGLang.

use std::io::Read;
use std::net::Shutdown;
use std::path::PathBuf;

use crate::support;
use crate::support::site::{Site, ask, chat, mock, streamed};
use crate::support::{Cluster, Events, Scratch, get, open, post, wait_for};
use serde_json::{Value, json};
use tools_mocker::{Dialect, Fault, FaultKind, Mock, MockConfig, Role};

#[test]
fn vllm_engines_are_routed_by_their_events() {
    let mocks = vec![mock(Dialect::Vllm, Role::Both, true), mock(Dialect::Vllm, Role::Both, true)];
    let site = Site::start(
        "vllm-events",
        mocks,
        &["--worker", "--worker"],
        "[router]\nstrategy = \"round-robin\"\n",
    );
    let mut conversations: Vec<Vec<Value>> = (0..8)
        .map(|number| chat(60 + number * 11, number, 1)["messages"].as_array().cloned().unwrap_or_default())
        .collect();
    for turn in 0..48 {
        let conversation = &mut conversations[turn % 8];
        let body = json!({"model": "tiny", "messages": conversation, "max_tokens": 6});
        let (status, answer) = site.chat(&body);
        assert_eq!(status, 200, "{answer}");
        conversation.push(answer["choices"][0]["message"].clone());
        conversation.push(json!({"role": "user", "content": format!("and turn {turn}?")}));
        // The blocks of a turn are indexed before the next turn of the same conversation.
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    let sum = |name: &str| sum_over_workers(&site, name);
    println!(
        "{} of {} requests exactly as predicted, {} tokens cached",
        sum("kvasir_gateway_cache_prediction_exact_total"),
        sum("kvasir_gateway_cache_prediction_requests_total"),
        sum("kvasir_gateway_cache_prediction_reported_tokens_total"),
    );
    assert_eq!(sum("kvasir_gateway_cache_prediction_requests_total"), 48.0);
    assert_eq!(sum("kvasir_gateway_cache_prediction_exact_total"), 48.0);
    assert!(sum("kvasir_gateway_cache_prediction_reported_tokens_total") > 2000.0);
}

/// The sum of a metric of the gateway over its labels.
fn sum_over_workers(site: &Site, name: &str) -> f64 {
    let (_, metrics) = get(&site.gateway.address, "/metrics").expect("metrics");
    let of = metrics.lines().filter(|line| line.split('{').next() == Some(name));
    of.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
}

/// Tokens of the prompt that the engine had in its cache.
fn cached_tokens(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0)
}

/// Blocks in the index, of all workers' own pools.
fn indexed_blocks(site: &Site) -> u64 {
    let (_, text) = get(&site.gateway.address, "/kvasir/status").expect("a status");
    let status: Value = serde_json::from_str(&text).expect("JSON");
    let workers = status["workers"].as_array().expect("workers");
    workers.iter().filter_map(|worker| worker["pools"][0]["indexed"].as_u64()).sum()
}

#[test]
fn adapters_are_routed_by_name_and_have_blocks_of_their_own() {
    let tuned = MockConfig { adapters: vec!["tuned".to_owned()], ..mock(Dialect::Vllm, Role::Both, true) };
    let mocks = vec![tuned, mock(Dialect::Vllm, Role::Both, true)];
    let site =
        Site::start("adapters", mocks, &["--worker", "--worker"], "[router]\nstrategy = \"round-robin\"\n");
    let (_, list) = get(&site.gateway.address, "/v1/models").expect("models");
    let list: Value = serde_json::from_str(&list).expect("JSON");
    let names: Vec<&str> =
        list["data"].as_array().expect("a list").iter().filter_map(|model| model["id"].as_str()).collect();
    assert_eq!(names, ["tiny", "tuned"]);
    let ask = |model: &str| {
        let mut body = chat(80, 3, 4);
        body["model"] = model.into();
        let (status, answer) = site.chat(&body);
        // The blocks of a request are indexed before the next one.
        let known = || site.mocks.iter().map(|mock| mock.stats().known_blocks as u64).sum::<u64>();
        wait_for("the blocks to be indexed", || indexed_blocks(&site) == known());
        (status, answer)
    };
    // Requests for the adapter reach only the engine that has it, although the strategy takes turns.
    for turn in 0..6 {
        let (status, answer) = ask("tuned");
        assert_eq!((status, answer["model"].as_str()), (200, Some("tuned")), "{answer}");
        assert_eq!(cached_tokens(&answer) > 64, turn > 0, "turn {turn}: {answer}");
    }
    let requests = || [site.mocks[0].stats().requests, site.mocks[1].stats().requests];
    assert_eq!(requests(), [6, 0]);
    // The same prompt for the model itself: neither engine has its blocks, and both are asked.
    for turn in 0..4 {
        let (status, answer) = ask("tiny");
        assert_eq!((status, answer["model"].as_str()), (200, Some("tiny")), "{answer}");
        assert_eq!(cached_tokens(&answer) > 64, turn > 1, "turn {turn}: {answer}");
    }
    assert_eq!(requests(), [8, 2]);
    let compared =
        ["kvasir_gateway_cache_prediction_requests_total", "kvasir_gateway_cache_prediction_exact_total"]
            .map(|name| sum_over_workers(&site, name));
    assert_eq!(compared, [10.0, 10.0], "what was predicted is what the engines reported");
    let (status, answer) = ask("unknown");
    assert_eq!(status, 404, "{answer}");
}

#[test]
fn engines_without_events_are_routed_by_the_prompts_sent_to_them() {
    let mocks = vec![mock(Dialect::Vllm, Role::Both, false), mock(Dialect::Vllm, Role::Both, false)];
    let site =
        Site::start("no-events", mocks, &["--worker", "--worker"], "[router]\napproximate_ttl = \"8s\"\n");
    assert_eq!(indexed_blocks(&site), 0);
    for turn in 0..3 {
        for number in 0..6 {
            let (status, answer) = site.chat(&chat(100, number, 2));
            assert_eq!(status, 200, "{answer}");
            assert_eq!(cached_tokens(&answer) > 64, turn > 0, "turn {turn} of {number}: {answer}");
        }
        // Prompts are recorded a few milliseconds after they were routed.
        wait_for("the prompts to be recorded", || indexed_blocks(&site) > 6 * 6);
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    wait_for("the blocks to be forgotten", || indexed_blocks(&site) == 0);
}

#[test]
fn prefill_and_decode_meet_in_each_makes_way() {
    for (name, dialect, handoff, flags) in [
        ("nixl", Dialect::Vllm, "auto", ["--prefill-worker", "--decode-worker"]),
        ("mooncake", Dialect::Vllm, "mooncake", ["--prefill-worker", "--decode-worker"]),
        ("kvasir", Dialect::Vllm, "auto", ["--prefill-worker", "--decode-worker"]),
        ("sglang", Dialect::Sglang, "auto", ["--worker", "--worker"]),
    ] {
        let side = |role| MockConfig { has_data_plane: name == "kvasir", ..mock(dialect, role, false) };
        let mocks = vec![side(Role::Prefill), side(Role::Decode)];
        // A mock's bootstrap server is the mock itself.
        let config = format!(
            "[gateway]\nhandoff = \"{handoff}\"\nmooncake_bootstrap = \"FIRST\"\n[router]\ndisaggregate_above_tokens = 16\n"
        );
        let site = Site::start(name, mocks, &flags, &config);
        // A mock with both roles gives the expected answer: an engine's answer does not depend on its role.
        let listen = "127.0.0.1:0".parse().expect("an address");
        let both = site.runtime.block_on(Mock::start(mock(dialect, Role::Both, false), listen));
        let both = both.expect("a mock engine");
        let direct = |body: &Value| {
            let (status, answer) = ask(&both.address().to_string(), body);
            assert_eq!(status, 200, "{answer}");
            answer
        };
        for number in 0..10 {
            let body = chat(20 + number * 9, number, 8);
            let (status, answer) = site.chat(&body);
            assert_eq!(status, 200, "{name}: {answer}");
            let expected = direct(&body);
            let text =
                |answer: &Value| answer["choices"][0]["message"]["content"].as_str().map(str::to_owned);
            assert_eq!(text(&answer), text(&expected), "{name}");
            // A different prompt, because the decode worker now holds the previous one.
            let body = chat(20 + number * 9, number + 50, 8);
            let (whole, _) = streamed(&site.gateway.address, &body).expect("a stream");
            let expected = direct(&body);
            assert_eq!(Some(whole), text(&expected), "{name}");
        }
        assert_eq!(site.gateway.metric("kvasir_gateway_disaggregated_total"), 20.0, "{name}");
        wait_for("no block to be held for nobody", || {
            site.mocks.iter().all(|mock| mock.stats().leased_blocks == 0)
        });
        // Without the prefill worker the decode worker does everything, except with SGLang.
        let dead = Fault { kind: FaultKind::Error, probability: 1.0, count: None, millis: 0, tokens: 1 };
        site.mocks[0].fault(dead).expect("a fault");
        let body = chat(50, 99, 8);
        let (status, answer) = site.chat(&body);
        if dialect == Dialect::Sglang {
            assert!(status >= 500, "{name}: {status} {answer}");
            continue;
        }
        assert_eq!(status, 200, "{name}: {answer}");
        assert_eq!(answer["choices"][0]["message"], direct(&body)["choices"][0]["message"], "{name}");
    }
}

fn sglang_pair() -> Vec<MockConfig> {
    vec![mock(Dialect::Sglang, Role::Prefill, true), mock(Dialect::Sglang, Role::Decode, true)]
}

#[test]
fn an_sglang_decode_server_never_gets_a_request_alone() {
    let config = "[gateway]\nworker_wait = \"300ms\"\n";
    let mut site = Site::start("sglang-pairs", sglang_pair(), &["--worker", "--worker"], config);
    let address = site.gateway.address.clone();
    // Prompts below the threshold, and prompts that the decode server already holds: a request to only one of
    // the servers would be a 400.
    for number in 0..8 {
        let body = chat(4 + number * 4, number, 6);
        for _ in 0..3 {
            let (status, answer) = site.chat(&body);
            assert_eq!(status, 200, "{answer}");
            // The events of this request arrive before the next one.
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
    assert_eq!(site.gateway.metric("kvasir_gateway_disaggregated_total"), 24.0);
    // Without a prefill server requests wait, and then fail because no worker is available.
    let prefill = site.mocks.remove(0);
    let place = prefill.address();
    site.runtime.block_on(prefill.stop());
    for number in 0..3 {
        let (status, answer) = site.chat(&chat(10, 70 + number, 4));
        assert_eq!(status, 503, "{answer}");
    }
    assert_eq!(get(&address, "/health").expect("an answer").0, 503);
    let again = site.runtime.block_on(Mock::start(mock(Dialect::Sglang, Role::Prefill, true), place));
    site.mocks.insert(0, again.expect("a mock engine"));
    wait_for("the prefill server to be back", || get(&address, "/health").is_ok_and(|(code, _)| code == 200));
    let (status, answer) = site.chat(&chat(10, 80, 4));
    assert_eq!(status, 200, "{answer}");
    // Without a decode server requests fail as well.
    let decode = site.mocks.remove(1);
    site.runtime.block_on(decode.stop());
    let (status, answer) = site.chat(&chat(10, 90, 4));
    assert_eq!(status, 503, "{answer}");
}

#[test]
fn an_sglang_server_that_starts_again_with_its_seed_is_another_run() {
    let engine = MockConfig { seed: 7, ..mock(Dialect::Sglang, Role::Both, true) };
    let mut site = Site::start("sglang-seed", vec![engine.clone()], &["--worker"], "");
    let address = site.gateway.address.clone();
    let pool = || {
        let (_, text) = get(&address, "/kvasir/status").expect("a status");
        let status: Value = serde_json::from_str(&text).expect("JSON");
        status["workers"][0]["pools"][0].clone()
    };
    let (status, answer) = site.chat(&chat(80, 1, 4));
    assert_eq!(status, 200, "{answer}");
    wait_for("its blocks to be known", || pool()["indexed"].as_u64() > Some(3));
    let first = site.mocks.remove(0);
    let place = first.address();
    site.runtime.block_on(first.stop());
    let smaller = MockConfig { blocks: 3000, ..engine };
    let again = site.runtime.block_on(Mock::start(smaller, place)).expect("a mock engine");
    site.mocks.push(again);
    wait_for("its blocks to be forgotten and its size to be new", || {
        let pool = pool();
        pool["blocks"] == 3000 && pool["indexed"] == 0
    });
}

#[test]
fn hand_offs_are_predicted_and_told_alike() {
    let nixl = vec![mock(Dialect::Vllm, Role::Prefill, true), mock(Dialect::Vllm, Role::Decode, true)];
    for (name, mocks, flags) in [
        ("sglang-predictions", sglang_pair(), ["--worker", "--worker"]),
        ("nixl-predictions", nixl, ["--prefill-worker", "--decode-worker"]),
    ] {
        let site = Site::start(name, mocks, &flags, "[router]\ndisaggregate_above_tokens = 0\n");
        let address = &site.gateway.address;
        let mut conversations: Vec<Vec<Value>> = (0..6)
            .map(|number| {
                chat(40 + number * 11, number, 1)["messages"].as_array().cloned().unwrap_or_default()
            })
            .collect();
        for turn in 0..30 {
            let conversation = &mut conversations[turn % 6];
            let body = json!({"model": "tiny", "messages": conversation, "max_tokens": 6});
            let path = "/v1/chat/completions";
            let (status, head, text) = support::client(address, None, path, Some(&body));
            assert_eq!(status, 200, "{text}");
            let (_, told) = get(address, "/kvasir/decisions").expect("decisions");
            let told: Value = serde_json::from_str(&told).expect("JSON");
            let last = told["decisions"].as_array().and_then(|all| all.last()).expect("a decision");
            let overlap = head.split("overlap_blocks=").nth(1).and_then(|rest| rest.split('/').next());
            assert_eq!(
                overlap.and_then(|blocks| blocks.parse::<u64>().ok()),
                last["overlap_blocks"].as_u64()
            );
            assert!(last["prefill"].is_string(), "{last}");
            let answer: Value = serde_json::from_str(&text).expect("JSON");
            conversation.push(answer["choices"][0]["message"].clone());
            conversation.push(json!({"role": "user", "content": format!("and turn {turn}?")}));
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        let (_, text) = get(address, "/kvasir/status").expect("a status");
        let status: Value = serde_json::from_str(&text).expect("JSON");
        let workers = status["workers"].as_array().expect("workers");
        let sum = |field: &str| -> u64 {
            workers.iter().filter_map(|worker| worker["predictions"][field].as_u64()).sum()
        };
        assert_eq!((sum("requests"), sum("exact")), (30, 30), "{name}: {status}");
        assert_eq!(sum("predicted_tokens"), sum("reported_tokens"), "{name}");
        assert!(sum("reported_tokens") > 1000, "{name}: {status}");
    }
}

#[test]
fn a_stream_goes_on_with_another_engine() {
    // With one token per byte, an engine that gets the text so far has exactly the generated tokens.
    let tiny = MockConfig { eos_one_in: 0, ..MockConfig::tiny().expect("a configuration") };
    let mocks = vec![tiny.clone(), tiny];
    let config = "[gateway]\nstall = \"300ms\"\n[router]\nstrategy = \"round-robin\"\n";
    let site = Site::start("going-on", mocks, &["--worker", "--worker"], config);
    for kind in [FaultKind::DieMidStream, FaultKind::Stall, FaultKind::Corrupt, FaultKind::Error] {
        for number in 0..4 {
            let body = chat(30, number, 12);
            let expected = site.direct(1, &body)["choices"][0]["message"]["content"].clone();
            let fault = Fault { kind, probability: 1.0, count: Some(1), millis: 0, tokens: 5 };
            site.mocks[0].fault(fault.clone()).expect("a fault");
            site.mocks[1].fault(fault).expect("a fault");
            let (text, _) = streamed(&site.gateway.address, &body).expect("a whole stream");
            assert_eq!(expected, text.as_str(), "{kind:?}");
            site.mocks.iter().for_each(Mock::heal);
        }
    }
    assert!(site.gateway.metric("kvasir_gateway_migrations_total") >= 16.0);
    // A stream that cannot be continued ends with an error event.
    let die = Fault { kind: FaultKind::DieMidStream, probability: 1.0, count: None, millis: 0, tokens: 1 };
    site.mocks.iter().for_each(|mock| mock.fault(die.clone()).expect("a fault"));
    let mut body = chat(30, 7, 12);
    body["response_format"] = json!({"type": "json_object"});
    let error = streamed(&site.gateway.address, &body).expect_err("an error in the stream");
    assert!(error.contains("guided decoding"), "{error}");
}

#[test]
fn refusals_are_the_engines_and_busy_engines_are_avoided() {
    let mocks = vec![mock(Dialect::Vllm, Role::Both, false), mock(Dialect::Vllm, Role::Both, false)];
    let site = Site::start("refusals", mocks, &["--worker", "--worker"], "");
    let (status, answer) = site.chat(&json!({"model": "tiny", "messages": [], "max_tokens": -3}));
    assert_eq!(status, 400, "{answer}");
    assert!(answer["error"]["message"].is_string(), "{answer}");
    let (status, answer) =
        site.chat(&json!({"model": "nobody", "messages": [{"role": "user", "content": "x"}]}));
    assert_eq!((status, &answer["error"]["code"]), (404, &json!("model_not_found")));
    let (status, _) = post(&site.gateway.address, "/v1/chat/completions", &json!([1])).expect("an answer");
    assert_eq!(status, 400);
    let busy = Fault { kind: FaultKind::Overloaded, probability: 1.0, count: None, millis: 0, tokens: 1 };
    site.mocks[0].fault(busy.clone()).expect("a fault");
    for number in 0..6 {
        assert_eq!(site.chat(&chat(10, number, 4)).0, 200);
    }
    site.mocks[1].fault(busy).expect("a fault");
    let (status, answer) = site.chat(&chat(10, 1, 4));
    assert_eq!(status, 503, "{answer}");
    // An unknown field is passed to the engine; a field that controls transfers is not.
    site.mocks.iter().for_each(Mock::heal);
    let mut body = chat(40, 3, 4);
    body["kv_transfer_params"] =
        json!({"do_remote_prefill": true, "remote_engine_id": "x", "remote_request_id": "y"});
    body["future_field"] = json!({"a": [1.50]});
    assert_eq!(site.chat(&body).0, 200, "the engine never saw the transfer");
}

#[test]
fn keys_limits_and_salts() {
    let scratch = Scratch::new("keys");
    let made = |name: &str, tenant: &str| router_access::new_key(name, tenant).expect("a key");
    let (alice, bob, boss) = (made("alice", "acme"), made("bob", "globex"), made("boss", "acme"));
    let limited = alice.lines.replace("models = [\"*\"]", "models = [\"tiny\"]\nrequests_per_minute = 6");
    let admin = boss.lines.replace("[[key]]\n", "[[key]]\nadmin = true\n");
    let keys = scratch.0.join("keys.toml");
    std::fs::write(&keys, format!("{limited}\n{}\n{admin}\n", bob.lines)).expect("the keys");
    let audit = scratch.0.join("audit.jsonl");
    let config = format!(
        "[access]\nkeys_file = {:?}\naudit_file = {:?}\n",
        keys.display().to_string(),
        audit.display().to_string()
    );
    let site = Site::start("access", vec![mock(Dialect::Vllm, Role::Both, false)], &["--worker"], &config);
    let address = site.gateway.address.clone();
    let ask = |key: Option<&str>, path: &str, body: Option<&Value>| -> (u16, String, Value) {
        let client = support::client(&address, key, path, body);
        let value = serde_json::from_str(&client.2).unwrap_or_default();
        (client.0, client.1, value)
    };
    let path = "/v1/chat/completions";
    let body = chat(60, 1, 4);
    assert_eq!(ask(None, path, Some(&body)).0, 401);
    assert_eq!(ask(Some("kvasir-nonsense"), path, Some(&body)).0, 401);
    let cached = |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    let (status, head, first) = ask(Some(&alice.secret), path, Some(&body));
    assert_eq!(status, 200, "{first}");
    assert!(head.contains("x-ratelimit-remaining-requests: 5"), "{head}");
    let again = ask(Some(&alice.secret), path, Some(&body)).2;
    assert!(cached(&again) > Some(0), "a tenant has its own cache: {again}");
    let other = ask(Some(&bob.secret), path, Some(&body)).2;
    assert_eq!(cached(&other), Some(0), "nobody else's: {other}");
    let mut forged = body.clone();
    forged["cache_salt"] = "guess".into();
    assert_eq!(
        cached(&ask(Some(&bob.secret), path, Some(&forged)).2),
        cached(&again),
        "a client's salt is not its own to choose"
    );
    let mut last = (0, String::new(), Value::Null);
    for _ in 0..6 {
        last = ask(Some(&alice.secret), path, Some(&body));
    }
    assert_eq!((last.0, &last.2["error"]["code"]), (429, &json!("rate_limit_exceeded")));
    assert!(last.1.to_ascii_lowercase().contains("retry-after: "), "{}", last.1);
    assert_eq!(ask(Some(&bob.secret), "/kvasir/status", None).0, 403);
    assert_eq!(ask(Some(&boss.secret), "/kvasir/status", None).0, 200);
    assert_eq!(ask(None, "/health", None).0, 200);
    // A key that is removed from the file becomes invalid shortly after; an invalid file changes nothing.
    std::fs::write(&keys, "[[key]]\nnonsense = 1\n").expect("the keys");
    std::thread::sleep(std::time::Duration::from_millis(2500));
    assert_eq!(ask(Some(&bob.secret), path, Some(&body)).0, 200);
    std::fs::write(&keys, admin).expect("the keys");
    wait_for("the key to be void", || ask(Some(&bob.secret), path, Some(&body)).0 == 401);
    let log = std::fs::read_to_string(&audit).expect("the audit log");
    assert!(log.lines().count() >= 10 && !log.contains("word"), "no prompt in it");
    assert!(log.lines().all(|line| serde_json::from_str::<Value>(line).is_ok()));
    assert!(log.contains("\"tenant\":\"acme\"") && log.contains("\"status\":429"), "{log}");
    drop(site.runtime);
}

#[test]
fn what_endangers_engines_is_refused_by_its_path() {
    let site = Site::start("dangers", vec![mock(Dialect::Vllm, Role::Both, false)], &["--worker"], "");
    // The gateway makes the text itself.
    let native = Cluster::start("dangers-native", &["both"], "");
    let with = |part: Value| json!([{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]);
    let image = |url: &str| with(json!({"type": "image_url", "image_url": {"url": url}}));
    let plain = || json!([{"role": "user", "content": "x"}]);
    let url = "messages[0].content[1].image_url.url";
    let cases = [
        (json!({"chat_template": "{{ 1 }}", "messages": plain()}), "chat_template"),
        (
            json!({"chat_template_kwargs": {"tokenize": true}, "messages": plain()}),
            "chat_template_kwargs.tokenize",
        ),
        (json!({"documents": [{"text": "x"}], "messages": plain()}), "documents"),
        (json!({"mm_processor_kwargs": {"num_crops": 4096}, "messages": plain()}), "mm_processor_kwargs"),
        (json!({"prompt_embeds": "AAAA", "messages": plain()}), "prompt_embeds"),
        (json!({"session_params": {"id": "other"}, "messages": plain()}), "session_params"),
        (
            json!({"messages": with(json!({"type": "image_embeds", "image_embeds": "AAAA"}))}),
            "messages[0].content[1].image_embeds",
        ),
        (json!({"messages": image("http://169.254.169.254/latest/meta-data")}), url),
        (json!({"messages": image("http://[::ffff:10.0.0.1]/")}), url),
        (json!({"messages": image("http://0x7f.1:8000/")}), url),
        (json!({"messages": image("https://localhost/")}), url),
        (json!({"messages": image("file:///etc/passwd")}), url),
    ];
    for address in [&site.gateway.address, &native.gateway.address] {
        for (body, param) in &cases {
            let (status, answer) = ask(address, body);
            assert_eq!((status, &answer["error"]["param"]), (400, &json!(param)), "{body}: {answer}");
        }
        let message = json!({"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": [
            {"type": "image", "source": {"type": "url", "url": "http://10.0.0.1/x.png"}}]}]});
        let (status, text) = post(address, "/v1/messages", &message).expect("an answer");
        assert!(status == 400 && text.contains("messages[0].content[0].source.url"), "{text}");
        let response = json!({"model": "tiny", "input": [{"role": "user", "content": [
            {"type": "input_image", "image_url": "http://10.0.0.1/x.png"}]}]});
        let (status, text) = post(address, "/v1/responses", &response).expect("an answer");
        assert!(status == 400 && text.contains("input[0].content[0].image_url"), "{text}");
        let harmless =
            json!({"messages": plain(), "max_tokens": 2, "chat_template_kwargs": {"enable_thinking": false}});
        assert_eq!(ask(address, &harmless).0, 200);
    }
    let (status, answer) =
        site.chat(&json!({"messages": image("https://example.com/cat.png"), "max_tokens": 2}));
    assert_eq!(status, 200, "{answer}");
}

#[test]
fn a_prompt_that_was_sent_is_charged_though_its_client_left() {
    let scratch = Scratch::new("charged");
    let config = mock(Dialect::Vllm, Role::Both, false);
    let body = chat(800, 1, 4);
    let words = body["messages"][0]["content"].as_str().expect("a text");
    let tokens = config.tokenizer.tokenizer.encode(words, false).expect("tokens").len();
    let key = router_access::new_key("alice", "acme").expect("a key");
    // Enough for one and a half prompts: once the first is charged, a second one is possible only after 20 s.
    let limit = format!("models = [\"*\"]\ntokens_per_minute = {}", tokens * 3 / 2);
    let keys = scratch.config("keys.toml", &key.lines.replace("models = [\"*\"]", &limit));
    let audit = scratch.0.join("audit.jsonl");
    let access = format!("[access]\nkeys_file = {keys:?}\naudit_file = {:?}\n", audit.display().to_string());
    let site = Site::start("charged-site", vec![config], &["--worker"], &access);
    let hang = Fault { kind: FaultKind::Hang, probability: 1.0, count: None, millis: 0, tokens: 1 };
    site.mocks[0].fault(hang).expect("a fault");
    let text = body.to_string();
    let left = support::raw_open(
        &site.gateway.address,
        &format!(
            "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {}\r\ncontent-length: {}\r\n\r\n{text}",
            key.secret,
            text.len()
        ),
    );
    wait_for("the engine to have it", || {
        site.mocks[0].stats().faults.get("hang").is_some_and(|count| *count > 0)
    });
    drop(left);
    let line = || std::fs::read_to_string(&audit).ok().filter(|log| log.ends_with('\n'));
    wait_for("its line in the log", || line().is_some());
    let line: Value = serde_json::from_str(line().expect("the log").trim()).expect("one line");
    assert_eq!(line["status"], 499, "{line}");
    assert!(line["prompt_tokens"].as_u64() >= Some(tokens as u64), "{line}");
    site.mocks[0].heal();
    let again =
        support::client(&site.gateway.address, Some(&key.secret), "/v1/chat/completions", Some(&body));
    assert_eq!(again.0, 429, "{}", again.2);
}

#[test]
fn which_workers_a_request_met_is_for_administrators() {
    let scratch = Scratch::new("explained");
    let made = |name: &str| router_access::new_key(name, "acme").expect("a key");
    let (alice, boss) = (made("alice"), made("boss"));
    let admin = boss.lines.replace("[[key]]\n", "[[key]]\nadmin = true\n");
    let keys = scratch.config("keys.toml", &format!("{}\n{admin}\n", alice.lines));
    let config = format!("[gateway]\nretries = 0\n[access]\nkeys_file = {keys:?}\n");
    let site =
        Site::start("explained-site", vec![mock(Dialect::Vllm, Role::Both, false)], &["--worker"], &config);
    let name = site.mocks[0].url().trim_start_matches("http://").to_owned();
    let asked = |key: &str| {
        support::client(&site.gateway.address, Some(key), "/v1/chat/completions", Some(&chat(10, 1, 4)))
    };
    let (to_boss, to_alice) = (asked(&boss.secret), asked(&alice.secret));
    assert_eq!((to_boss.0, to_alice.0), (200, 200));
    assert!(to_boss.1.contains("x-kvasir-route: worker="), "{}", to_boss.1);
    assert!(!to_alice.1.contains("x-kvasir-route") && !to_alice.1.contains(&name), "{}", to_alice.1);
    let die = Fault { kind: FaultKind::DieMidStream, probability: 1.0, count: None, millis: 0, tokens: 1 };
    site.mocks[0].fault(die).expect("a fault");
    let (to_boss, to_alice) = (asked(&boss.secret), asked(&alice.secret));
    assert_eq!((to_boss.0, to_alice.0), (503, 503));
    assert!(to_boss.2.contains(&name), "{}", to_boss.2);
    assert!(to_alice.2.contains("The workers failed") && !to_alice.2.contains(&name), "{}", to_alice.2);
}

#[test]
fn bodies_that_cannot_be_read_say_why() {
    let site = Site::start("bodies", vec![mock(Dialect::Vllm, Role::Both, false)], &["--worker"], "");
    let address = &site.gateway.address;
    let head = |more: &str| {
        format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{more}\r\n")
    };
    for text in [
        format!("{}{{\"model\"", head("content-length: 90\r\n")),
        format!("{}9\r\n{{\"model\"", head("transfer-encoding: chunked\r\n")),
        format!("{}zz\r\n{{}}", head("transfer-encoding: chunked\r\n")),
    ] {
        let mut stream = support::raw_open(address, &text);
        // A server that has read enough may already have closed the connection.
        let _closed = stream.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        let _reset = stream.read_to_end(&mut answer);
        let answer = String::from_utf8_lossy(&answer);
        assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("incomplete_body"), "{text}\n{answer}");
    }
    let body = chat(10, 1, 4).to_string();
    let encoded = |encoding: &str| {
        let head = head(&format!("content-encoding: {encoding}\r\ncontent-length: {}\r\n", body.len()));
        support::raw(address, &format!("{head}{body}"))
    };
    for encoding in ["gzip", "identity, zstd"] {
        let answer = encoded(encoding);
        assert!(
            answer.starts_with("HTTP/1.1 415") && answer.contains("accept-encoding: identity"),
            "{answer}"
        );
    }
    let answer = encoded("Identity");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[test]
fn paths_that_do_not_exist_answer_with_the_requests_id() {
    let site = Site::start("no-path", vec![mock(Dialect::Vllm, Role::Both, false)], &["--worker"], "");
    let asked = |request: &str, id: &str| {
        let head =
            format!("{request} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{id}content-length: 0\r\n\r\n");
        support::raw(&site.gateway.address, &head)
    };
    for (request, status) in [
        ("GET /nowhere", 404),
        ("GET /v1/models/nobody", 404),
        ("GET /v1/chat/completions", 405),
        ("DELETE /v1/models", 405),
    ] {
        let own = asked(request, "x-request-id: mine-1\r\n");
        assert!(
            own.starts_with(&format!("HTTP/1.1 {status}")) && own.contains("x-request-id: mine-1\r\n"),
            "{own}"
        );
        let fresh = asked(request, "");
        assert!(fresh.contains("x-request-id: "), "{fresh}");
    }
}

#[test]
fn messages_and_responses_over_chats() {
    let site = Site::start("surfaces", vec![mock(Dialect::Vllm, Role::Both, false)], &["--worker"], "");
    let chat_body = chat(12, 4, 8);
    let expected = site.direct(0, &chat_body)["choices"][0]["message"]["content"].clone();
    let content = chat_body["messages"][0]["content"].clone();
    let message =
        json!({"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": content}]});
    let (status, text) = post(&site.gateway.address, "/v1/messages", &message).expect("an answer");
    let answer: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!((status, &answer["type"]), (200, &json!("message")), "{answer}");
    assert_eq!(answer["content"][0]["text"], expected);
    let (status, text) =
        post(&site.gateway.address, "/v1/messages", &json!({"model": "tiny"})).expect("an answer");
    let answer: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!((status, &answer["type"]), (400, &json!("error")), "{answer}");
    let (status, text) =
        post(&site.gateway.address, "/v1/messages/count_tokens", &message).expect("an answer");
    let counted: Value = serde_json::from_str(&text).expect("JSON");
    let usage = site.direct(0, &chat_body)["usage"]["prompt_tokens"].clone();
    assert_eq!((status, &counted["input_tokens"]), (200, &usage), "{counted}");
    let response = json!({"model": "tiny", "max_output_tokens": 8, "input": content, "stream": true});
    let mut events =
        Events::new(open(&site.gateway.address, "/v1/responses", &response).expect("a connection"));
    assert!(events.head().starts_with("HTTP/1.1 200"));
    let mut text = String::new();
    let mut last = Value::Null;
    while let Some(data) = events.next_data() {
        last = serde_json::from_str(&data).expect("JSON");
        if last["type"] == "response.output_text.delta" {
            text.push_str(last["delta"].as_str().unwrap_or_default());
        }
    }
    assert_eq!(expected, text.as_str());
    assert_eq!(last["type"], "response.incomplete", "{last}");
}

/// Clients set in their API's own fields how long their prompts' blocks are kept; engines with
/// KvasirConnector receive it.
#[test]
fn how_long_blocks_are_kept_is_the_clients_choice_within_the_operators_limit() {
    let with = MockConfig { has_data_plane: true, ..mock(Dialect::Vllm, Role::Both, false) };
    let site = Site::start("retention", vec![with], &["--worker"], "");
    let asked = |site: &Site, path: &str, body: &Value| {
        let before = site.mocks[0].stats().retain_seconds;
        let (status, text) = post(&site.gateway.address, path, body).expect("an answer");
        (status, site.mocks[0].stats().retain_seconds - before, text)
    };
    let mut number = 0;
    let mut chat_with = |retention: Value| {
        number += 1;
        let mut body = chat(40, number, 4);
        body["prompt_cache_retention"] = retention;
        body
    };
    for (retention, seconds) in
        [(json!("5m"), 300), (json!("24h"), 3600), (json!("in_memory"), 0), (json!(null), 0)]
    {
        let (status, told, text) = asked(&site, "/v1/chat/completions", &chat_with(retention.clone()));
        assert_eq!((status, told), (200, seconds), "{retention}: {text}");
    }
    let (status, told, text) = asked(&site, "/v1/chat/completions", &chat_with(json!("forever")));
    assert_eq!((status, told), (400, 0), "{text}");
    assert!(text.contains("prompt_cache_retention") && text.contains("forever"), "{text}");
    let content = chat(40, 50, 4)["messages"][0]["content"].clone();
    let block = json!({"type": "text", "text": content, "cache_control": {"type": "ephemeral", "ttl": "1h"}});
    let message =
        json!({"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": [block]}]});
    let (status, told, text) = asked(&site, "/v1/messages", &message);
    assert_eq!((status, told), (200, 3600), "{text}");
    let response =
        json!({"model": "tiny", "max_output_tokens": 4, "input": content, "prompt_cache_retention": "24h"});
    let (status, told, text) = asked(&site, "/v1/responses", &response);
    assert_eq!((status, told), (200, 3600), "{text}");
    let completion =
        json!({"model": "tiny", "max_tokens": 4, "prompt": content, "prompt_cache_retention": "60s"});
    let (status, told, text) = asked(&site, "/v1/completions", &completion);
    assert_eq!((status, told), (200, 60), "{text}");
    // An operator who has turned retention off, and an engine without retention.
    let with = MockConfig { has_data_plane: true, ..mock(Dialect::Vllm, Role::Both, false) };
    let config = "[gateway]\nprompt_cache_retention_max = \"0s\"\n";
    let site = Site::start("retention-off", vec![with], &["--worker"], config);
    let (status, told, text) = asked(&site, "/v1/chat/completions", &chat_with(json!("24h")));
    assert_eq!((status, told), (200, 0), "{text}");
    let site = Site::start("retention-none", vec![mock(Dialect::Vllm, Role::Both, false)], &["--worker"], "");
    let (status, told, text) = asked(&site, "/v1/chat/completions", &chat_with(json!("24h")));
    assert_eq!((status, told), (200, 0), "{text}");
}

#[test]
fn engines_count_tokens_where_the_gateway_has_no_tokenizer() {
    for (name, dialect) in [("count-vllm", Dialect::Vllm), ("count-sglang", Dialect::Sglang)] {
        let tiny = MockConfig { dialect, eos_one_in: 0, ..MockConfig::tiny().expect("a configuration") };
        let site = Site::start(name, vec![tiny], &["--worker"], "");
        let count = |message: &Value| {
            let answer = post(&site.gateway.address, "/v1/messages/count_tokens", message);
            let (status, text) = answer.expect("an answer");
            (status, serde_json::from_str::<Value>(&text).expect("JSON"))
        };
        let chat_body = chat(12, 4, 8);
        let usage = site.direct(0, &chat_body)["usage"]["prompt_tokens"].clone();
        let message = json!({"model": "tiny", "messages": chat_body["messages"].clone()});
        let (status, counted) = count(&message);
        assert_eq!((status, &counted["input_tokens"]), (200, &usage), "{name}: {counted}");
        let image =
            json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}});
        let message = json!({"model": "tiny", "messages": [{"role": "user", "content": [image]}]});
        assert_eq!(count(&message).0, 404, "{name}: an image's tokens are known to nobody before");
    }
}

#[test]
fn the_official_clients_are_content() {
    let has = |package: &str| {
        let asked = std::process::Command::new("python3").args(["-c", &format!("import {package}")]).output();
        asked.is_ok_and(|output| output.status.success())
    };
    if !has("openai") || !has("anthropic") {
        eprintln!(
            "SKIPPED the clients' test: `python3 -c 'import openai, anthropic'` fails here (pip install openai anthropic)"
        );
        return;
    }
    let tiny = || MockConfig { eos_one_in: 0, ..MockConfig::tiny().expect("a configuration") };
    let site = Site::start("clients", vec![tiny(), tiny()], &["--worker", "--worker"], "");
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/client/engines_client.py");
    let mut command = std::process::Command::new("python3");
    let output = command.arg(script).args([&site.gateway.url(), "tiny"]).output().expect("python3 runs");
    let printed = String::from_utf8_lossy(&output.stdout);
    println!("{printed}");
    assert!(output.status.success(), "{printed}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(printed.matches("ok: ").count() >= 20, "{printed}");
}

/// The served model must not depend on the engine that answers first.
#[test]
fn two_models_without_a_choice_are_refused_by_name() {
    let scratch = Scratch::new("two-models");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let start = |model: &str| {
        let config = MockConfig { model: model.to_owned(), ..mock(Dialect::Vllm, Role::Both, false) };
        let listen = "127.0.0.1:0".parse().expect("an address");
        runtime.block_on(Mock::start(config, listen)).expect("a mock engine")
    };
    let mocks = [start("alpha"), start("beta")];
    let gateway = |key: &str| {
        let text = format!("[gateway]\nhealth_interval = \"100ms\"\nworker_wait = \"300ms\"\n{key}");
        let path = scratch.config("kvasir.toml", &text);
        let urls = [mocks[0].url(), mocks[1].url()];
        support::Process::start(&["gateway", "--config", &path, "--worker", &urls[0], "--worker", &urls[1]])
    };
    let status = |gateway: &support::Process| -> Value {
        let (_, text) = get(&gateway.address, "/kvasir/status").unwrap_or_default();
        serde_json::from_str(&text).unwrap_or_default()
    };
    let ask = |gateway: &support::Process| -> (u16, String) {
        let mut body = chat(10, 1, 4);
        body["model"] = "alpha".into();
        post(&gateway.address, "/v1/chat/completions", &body).expect("an answer")
    };
    let names_both = |text: &str| ["alpha", "beta", "gateway.model"].iter().all(|part| text.contains(part));

    let undecided = gateway("");
    wait_for("the problem to be seen", || status(&undecided)["problem"].is_string());
    let problem = status(&undecided)["problem"].to_string();
    assert!(names_both(&problem), "{problem}");
    assert!(mocks.iter().all(|mock| problem.contains(&mock.address().to_string())), "{problem}");
    let (health, text) = get(&undecided.address, "/health").expect("an answer");
    assert!(health == 503 && names_both(&text), "{health} {text}");
    let (refused, text) = ask(&undecided);
    assert!(refused == 503 && names_both(&text), "{refused} {text}");
    assert_eq!(mocks[0].stats().requests + mocks[1].stats().requests, 0);

    let decided = gateway("model = \"alpha\"\n");
    wait_for("the one worker to be ready", || {
        get(&decided.address, "/health").is_ok_and(|(code, _)| code == 200)
    });
    assert_eq!(ask(&decided).0, 200);
    assert_eq!(status(&decided)["problem"], Value::Null);
    assert_eq!((mocks[0].stats().requests, mocks[1].stats().requests), (1, 0));
}

#[test]
fn requests_wait_in_the_gateway_and_not_at_the_engines() {
    let engine = MockConfig {
        batch_max: 8,
        decode_seconds_per_step: 0.005,
        ..mock(Dialect::Sglang, Role::Both, false)
    };
    let site = Site::start("follow-engines", vec![engine], &["--worker"], "");
    let places = || site.gateway.metric("kvasir_gateway_running_requests_max");
    // The capacity that the engine reports, plus one eighth.
    wait_for("the engine's places to be known", || places() == 9.0);
    let address = &site.gateway.address;
    let mut most = 0;
    std::thread::scope(|scope| {
        let asked: Vec<_> = (0..40)
            .map(|number| scope.spawn(move || support::site::ask(address, &chat(20, number, 40)).0))
            .collect();
        while asked.iter().any(|asked| !asked.is_finished()) {
            let stats = site.mocks[0].stats();
            most = most.max(stats.running + stats.waiting);
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        for asked in asked {
            assert_eq!(asked.join().expect("an answer"), 200);
        }
    });
    assert!((8..=9).contains(&most), "{most} requests at an engine of 8 places");
    assert_eq!(site.mocks[0].stats().requests, 40);
}

#[test]
fn pages_of_named_origins_may_ask_from_a_browser_and_no_others() {
    let vllm = || vec![mock(Dialect::Vllm, Role::Both, false)];
    let site =
        Site::start("cors", vllm(), &["--worker"], "[gateway]\ncors_origins = [\"https://chat.house\"]\n");
    let closed = Site::start("no-cors", vllm(), &["--worker"], "");
    let preflight = |site: &Site, origin: &str| {
        let head = "OPTIONS /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
                    access-control-request-method: POST\r\n\
                    access-control-request-headers: authorization,content-type,x-stainless-lang\r\n";
        support::raw(&site.gateway.address, &format!("{head}origin: {origin}\r\n\r\n")).to_lowercase()
    };
    let allowed = preflight(&site, "https://chat.house");
    assert!(allowed.starts_with("http/1.1 200"), "{allowed}");
    assert!(allowed.contains("access-control-allow-origin: https://chat.house\r\n"), "{allowed}");
    assert!(
        allowed.contains("x-stainless-lang") && allowed.contains("access-control-allow-methods:"),
        "{allowed}"
    );
    assert!(!preflight(&site, "https://evil.example").contains("access-control-allow-origin"));
    assert!(preflight(&closed, "https://chat.house").starts_with("http/1.1 405"));
    let body = chat(10, 1, 2).to_string();
    let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\norigin: https://chat.house\r\n";
    let answer = support::raw(
        &site.gateway.address,
        &format!("{head}content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len()),
    );
    assert!(answer.contains("access-control-allow-origin: https://chat.house"), "{answer}");
}

/// A request over HTTP/2 with prior knowledge, in frames (RFC 9113, section 4): HEADERS without compression
/// for `GET /livez`, and the answer's `:status 200` from the static table.
#[test]
fn http2_is_spoken_on_the_port_of_the_api() {
    use std::io::{Read, Write};
    let site = Site::start("h2c", vec![mock(Dialect::Vllm, Role::Both, false)], &["--worker"], "");
    let mut stream = std::net::TcpStream::connect(&site.gateway.address).expect("a connection");
    stream.set_read_timeout(Some(std::time::Duration::from_secs(5))).expect("a timeout");
    let mut sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
    sent.extend([0, 0, 0, 4, 0, 0, 0, 0, 0]);
    // RFC 7541: `:method GET` is 2 of the static table, `:scheme http` 6, `:path` 4 and `:authority` 1 with literal values.
    let mut headers = vec![0x82, 0x86, 0x04, 6];
    headers.extend(b"/livez");
    headers.extend([0x01, 1, b'x']);
    sent.extend([0, 0, headers.len() as u8, 1, 0x5, 0, 0, 0, 1]);
    sent.extend(&headers);
    stream.write_all(&sent).expect("sent");
    let mut got = Vec::new();
    let mut piece = [0; 1024];
    let is_answered = |got: &[u8]| {
        let mut rest = got;
        while let [a, b, c, kind, _, _, _, _, _, more @ ..] = rest {
            let length = usize::from(*a) << 16 | usize::from(*b) << 8 | usize::from(*c);
            if more.len() < length {
                return false;
            }
            // 8 of the static table is `:status 200`.
            if *kind == 1 && more[..length].contains(&0x88) {
                return true;
            }
            rest = &more[length..];
        }
        false
    };
    while !is_answered(&got) {
        let count = stream.read(&mut piece).expect("frames");
        assert!(count > 0, "closed after {got:?}");
        got.extend(&piece[..count]);
    }
}
