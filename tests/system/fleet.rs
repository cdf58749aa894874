//! A changing fleet: workers are added, drained, replaced and removed while requests run, by administrators
//! and by the configuration, and peers are notified; several models are behind one gateway, with splits,
//! aliases and fallbacks.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::support;
use crate::support::site::{Site, ask, chat, mock, streamed};
use crate::support::{Process, get, post_json, wait_for};
use serde_json::{Value, json};
use tools_mocker::{Dialect, Fault, FaultKind, MockConfig, Role};

fn engine() -> MockConfig {
    mock(Dialect::Vllm, Role::Both, true)
}

fn named(model: &str) -> MockConfig {
    MockConfig { model: model.to_owned(), ..engine() }
}

fn workers(gateway: &Process) -> Vec<Value> {
    let (status, body) = get(&gateway.address, "/kvasir/workers").expect("an answer");
    assert_eq!(status, 200, "{body}");
    let told: Value = serde_json::from_str(&body).expect("JSON");
    told["workers"].as_array().cloned().expect("workers")
}

fn state(gateway: &Process, name: &str) -> String {
    let all = workers(gateway);
    let found = all.iter().find(|worker| worker["name"] == name);
    found.and_then(|worker| worker["state"].as_str()).unwrap_or("none").to_owned()
}

fn name_of(url: &str) -> String {
    url.trim_start_matches("http://").to_owned()
}

fn kvasir(arguments: &[&str]) -> (bool, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_kvasir")).args(arguments).output().expect("the program");
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
    (output.status.success(), text.concat())
}

/// Returns the number of requests that an engine has started.
fn served(site: &Site, which: usize) -> u64 {
    site.mocks[which].stats().requests
}

#[test]
fn workers_are_added_drained_and_removed_while_the_gateway_runs() {
    let site = Site::start("fleet-admin", vec![engine(), engine()], &["--worker"], "");
    let (first, second) = (name_of(&site.mocks[0].url()), name_of(&site.mocks[1].url()));
    let address = site.gateway.address.clone();
    assert_eq!(workers(&site.gateway).len(), 1);

    let (ok, said) = kvasir(&["workers", "add", &site.mocks[1].url(), "--gateway", &address]);
    assert!(ok && said.contains("added"), "{said}");
    wait_for("the second worker", || state(&site.gateway, &second) == "ready");
    let (ok, shown) = kvasir(&["workers", "--gateway", &address]);
    assert!(ok && shown.lines().count() == 3 && shown.contains(&second), "{shown}");

    // The first worker is drained during a stream: the stream continues, and no new request is sent there.
    let slow = Fault { kind: FaultKind::Slow, probability: 1.0, count: None, millis: 50, tokens: 0 };
    site.mocks[0].fault(slow).expect("a fault");
    let (ok, said) = kvasir(&["drain", &second, "--gateway", &address]);
    assert!(ok, "{said}");
    let stream = {
        let address = address.clone();
        std::thread::spawn(move || streamed(&address, &chat(30, 1, 30)))
    };
    wait_for("the stream to be at the first", || workers(&site.gateway)[0]["requests"] == 1);
    let (ok, said) = kvasir(&["drain", &second, "--undo", "--gateway", &address]);
    assert!(ok && said.contains("serves again"), "{said}");
    let (ok, said) = kvasir(&["drain", &first, "--wait", "--timeout", "30", "--gateway", &address]);
    assert!(ok && said.contains("1 requests left") && said.contains("drained after"), "{said}");
    let (text, _) = stream.join().expect("a thread").expect("a whole stream");
    assert!(!text.is_empty());
    assert_eq!(state(&site.gateway, &first), "draining");
    let before = (served(&site, 0), served(&site, 1));
    for seed in 0..8 {
        let (status, answer) = site.chat(&chat(20, seed, 3));
        assert_eq!(status, 200, "{answer}");
    }
    assert_eq!((served(&site, 0) - before.0, served(&site, 1) - before.1), (0, 8));

    // The worker is removed from list, metrics and snapshot without a trace.
    let (ok, said) = kvasir(&["workers", "remove", &first, "--gateway", &address]);
    assert!(ok && said.contains("removed"), "{said}");
    assert_eq!(workers(&site.gateway).len(), 1);
    let (_, metrics) = get(&address, "/metrics").expect("metrics");
    assert!(metrics.contains(&second) && !metrics.contains(&first), "{metrics}");
    assert_eq!(site.chat(&chat(20, 1, 3)).0, 200);

    // Mistakes are reported by name.
    let (ok, said) = kvasir(&["drain", "nobody:1", "--gateway", &address]);
    assert!(!ok && said.contains("there is no worker \"nobody:1\""), "{said}");
    for (body, part) in [
        (json!({ "url": "node:8000" }), "http://HOST:PORT"),
        (json!({ "url": "http://a:1", "role": "boss" }), "prefill, decode or both"),
        (json!({ "url": "http://a:1", "pool": "none" }), "\"none\""),
        (json!({ "uri": "http://a:1" }), "url"),
    ] {
        let (status, answer) = post_json(&address, "/kvasir/workers", &body);
        assert!(status == 400 && answer.to_string().contains(part.trim_matches('"')), "{status} {answer}");
    }
    assert_eq!(workers(&site.gateway).len(), 1);
}

#[test]
fn worker_keys_of_the_configuration_count_at_once_and_a_worker_that_comes_back_is_another() {
    let config = "[gateway]\nworkers = [\"URL0\"]\n";
    let mut site = Site::start("fleet-live", vec![engine(), engine()], &[], config);
    let (first, second) = (site.mocks[0].url(), site.mocks[1].url());
    let file = site.scratch.0.join("kvasir.toml");
    let original = std::fs::read_to_string(&file).expect("the file");
    let only = format!("workers = [{first:?}]");
    let write = |list: &str| std::fs::write(&file, original.replace(&only, list)).expect("the file");
    write(&format!("workers = [{first:?}, {second:?}]"));
    wait_for("the second worker", || state(&site.gateway, &name_of(&second)) == "ready");
    // A draining worker keeps its state when the file changes.
    let (ok, said) = kvasir(&["drain", &name_of(&second), "--gateway", &site.gateway.address]);
    assert!(ok, "{said}");
    write(&format!("workers = [{second:?}]"));
    wait_for("the first worker to leave", || workers(&site.gateway).len() == 1);
    assert_eq!(state(&site.gateway, &name_of(&second)), "draining");
    write(&format!("workers = [{second:?}, {first:?}]"));
    wait_for("the first worker to come back", || state(&site.gateway, &name_of(&first)) == "ready");
    assert_eq!(site.chat(&chat(20, 1, 3)).0, 200);

    // Another process at the address of the first: the state of the previous one is dropped.
    let blocks = |gateway: &Process| {
        let (_, body) = get(&gateway.address, "/kvasir/status").expect("a status");
        let status: Value = serde_json::from_str(&body).expect("JSON");
        status["index"]["blocks"].as_u64().expect("blocks")
    };
    wait_for("blocks of the first worker", || blocks(&site.gateway) > 0);
    let address = site.mocks[0].address();
    let gone = site.mocks.remove(0);
    site.runtime.block_on(gone.stop());
    wait_for("the first worker to be missed", || state(&site.gateway, &name_of(&first)) == "down");
    let fresh = site.runtime.block_on(tools_mocker::Mock::start(engine(), address)).expect("the same port");
    site.mocks.insert(0, fresh);
    wait_for("the new process", || state(&site.gateway, &name_of(&first)) == "ready");
    wait_for("the index to forget the old one", || blocks(&site.gateway) == 0);
    assert_eq!(site.chat(&chat(20, 1, 3)).0, 200);
}

#[test]
fn peers_hear_of_what_administrators_change() {
    let scratch = support::Scratch::new("fleet-peers");
    let site = Site::start("fleet-peers", vec![engine(), engine()], &["--worker"], "");
    let (first, second) = (site.mocks[0].url(), site.mocks[1].url());
    let other = support::free_address();
    let one_config = format!(
        "[gateway]\nhealth_interval = \"100ms\"\nmodel_folder = {:?}\npeers = [\"http://{other}\"]\n",
        support::site::model_folder()
    );
    let one = scratch.config("one.toml", &one_config);
    let one = Process::start(&["gateway", "--config", &one, "--worker", &first]);
    let two = scratch.config("two.toml", &one_config.replace(&format!("http://{other}"), &one.url()));
    let mut two = Process::start_at(&other, &["gateway", "--config", &two, "--worker", &first]);
    for gateway in [&one, &two] {
        gateway.wait_healthy();
    }
    let (ok, said) = kvasir(&["workers", "add", &second, "--gateway", &one.address]);
    assert!(ok, "{said}");
    wait_for("the peer to hear of it", || state(&two, &name_of(&second)) == "ready");
    let (ok, said) = kvasir(&["drain", &name_of(&first), "--gateway", &two.address]);
    assert!(ok, "{said}");
    wait_for("the first gateway to hear of it", || state(&one, &name_of(&first)) == "draining");
    // A restarted gateway gets all changes from its peer.
    two.kill();
    two.restart();
    two.wait_healthy();
    wait_for("the roster to come back", || {
        state(&two, &name_of(&first)) == "draining" && state(&two, &name_of(&second)) == "ready"
    });
}

#[test]
fn several_models_stand_behind_one_gateway() {
    let config = "[gateway]\nworkers = [\"URL0\"]\nfallback = [\"beta\"]\n\
                  [[pool]]\nname = \"beta\"\naliases = [\"b\"]\nworkers = [\"URL1\"]\n\
                  [[pool]]\nname = \"next\"\nmodel = \"alpha\"\nworkers = [\"URL2\"]\n\
                  [[split]]\nmodel = \"mix\"\npools = [\"gateway=90\", \"beta=10\"]\n";
    // The third worker serves a different model than its pool: it is shown, and gets no requests.
    let mocks = vec![named("alpha"), named("beta"), named("gamma")];
    let site = Site::start_some("fleet-models", mocks, &[], config, 2);
    let address = site.gateway.address.clone();
    let (_, body) = get(&address, "/v1/models").expect("models");
    let listed: Value = serde_json::from_str(&body).expect("JSON");
    let ids: Vec<&str> =
        listed["data"].as_array().expect("models").iter().filter_map(|model| model["id"].as_str()).collect();
    assert_eq!(ids, ["alpha", "beta", "b", "mix"]);
    let wrong =
        workers(&site.gateway).into_iter().find(|worker| worker["pool"] == "next").expect("the third");
    assert_eq!(wrong["state"], "down");
    assert!(wrong["reason"].as_str().is_some_and(|reason| reason.contains("gamma")), "{wrong}");

    let asked = |model: &str, seed: usize| {
        let mut body = chat(20, seed, 3);
        body["model"] = model.into();
        ask(&address, &body)
    };
    // Each name is routed to its own pool, under the name that the pool's engines use.
    for (model, engine) in [("alpha", "alpha"), ("beta", "beta"), ("b", "beta")] {
        let (status, answer) = asked(model, 1);
        assert_eq!((status, answer["model"].as_str()), (200, Some(engine)), "{answer}");
    }
    let (status, answer) = asked("delta", 1);
    assert_eq!((status, answer["error"]["code"].as_str()), (404, Some("model_not_found")), "{answer}");
    let mut nameless = chat(20, 1, 3);
    nameless.as_object_mut().expect("an object").remove("model");
    let (status, answer) = ask(&address, &nameless);
    assert!(status == 400 && answer.to_string().contains("/v1/models"), "{answer}");

    // Weights of 90 and 10.
    let before = (served(&site, 0), served(&site, 1));
    for seed in 0..300 {
        assert_eq!(asked("mix", seed).0, 200);
    }
    let canary = served(&site, 1) - before.1;
    assert_eq!(served(&site, 0) - before.0 + canary, 300);
    // Mean 30, standard deviation 5.2.
    assert!((8..=56).contains(&canary), "{canary} of 300");

    // A pool that is down falls back, and serves again when its worker is back.
    let (ok, said) = kvasir(&["drain", &name_of(&site.mocks[0].url()), "--gateway", &address]);
    assert!(ok, "{said}");
    let (status, answer) = asked("alpha", 2);
    assert_eq!((status, answer["model"].as_str()), (200, Some("beta")), "{answer}");
    let (ok, said) = kvasir(&["drain", &name_of(&site.mocks[0].url()), "--undo", "--gateway", &address]);
    assert!(ok, "{said}");
    let (_, answer) = asked("alpha", 3);
    assert_eq!(answer["model"], "alpha");
    let (_, shown) = get(&address, "/kvasir/config").expect("the configuration");
    let shown: Value = serde_json::from_str(&shown).expect("JSON");
    assert_eq!(shown["pool"][0]["name"], "\"beta\"");
}

#[test]
fn a_service_outside_the_cluster_takes_over_without_being_asked_for_its_health() {
    let config = "[gateway]\nworkers = [\"URL0\"]\nfallback = [\"outside\"]\nengine_key_file = \"KEYS\"\n\
                  [[pool]]\nname = \"outside\"\nmodel = \"big\"\nengine = \"openai\"\nworkers = [\"URL1\"]\n";
    let keys = support::Scratch::new("fleet-outside-keys");
    let path = keys.config("keys", "s3cret\n");
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o600))
        .expect("permissions");
    let site =
        Site::start("fleet-outside", vec![engine(), named("big")], &[], &config.replace("KEYS", &path));
    let (status, answer) = site.chat(&chat(20, 1, 3));
    assert_eq!((status, answer["model"].as_str()), (200, Some("tiny")), "{answer}");
    let mut salted = chat(20, 1, 3);
    salted["cache_salt"] = "x".into();
    site.mocks[0]
        .fault(Fault { kind: FaultKind::Refuse, probability: 1.0, count: None, millis: 0, tokens: 0 })
        .expect("a fault");
    wait_for("the worker to be missed", || state(&site.gateway, &name_of(&site.mocks[0].url())) == "down");
    let (status, answer) = site.chat(&salted);
    assert_eq!((status, answer["model"].as_str()), (200, Some("big")), "{answer}");
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(state(&site.gateway, &name_of(&site.mocks[1].url())), "ready");
}

#[test]
fn a_key_that_a_service_refuses_is_no_clients_matter() {
    use std::io::{Read, Write};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut request = [0; 65_536];
            let _read = stream.read(&mut request);
            let said = r#"{"error":{"message":"Incorrect API key: s3cr**"}}"#;
            let _sent = write!(
                stream,
                "HTTP/1.1 401 Unauthorized\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{said}",
                said.len()
            );
        }
    });
    let config = format!(
        "[gateway]\nworkers = [\"URL0\"]\nexplain = \"none\"\n\
         [[pool]]\nname = \"outside\"\nmodel = \"big\"\nengine = \"openai\"\nworkers = [{url:?}]\n"
    );
    let site = Site::start_some("fleet-401", vec![engine()], &[], &config, 2);
    for stream in [false, true] {
        let mut body = chat(20, 1, 3);
        body["model"] = "big".into();
        body["stream"] = stream.into();
        let (status, text) =
            support::post(&site.gateway.address, "/v1/chat/completions", &body).expect("an answer");
        assert_eq!(status, 503, "{text}");
        assert!(!text.contains("API key"), "{text}");
    }
}

/// Open streams throughout a rolling restart.
const STREAMS: usize = 200;
const ENGINES: usize = 8;

/// Keeps [`STREAMS`] streams open until `is_over`; returns how many ended completely, each with the same text
/// as without restarts.
fn keep_streams(
    address: &str,
    expected: &Arc<Vec<String>>,
    is_over: &Arc<AtomicBool>,
) -> Vec<JoinHandle<usize>> {
    let one = |number: usize| {
        let (address, expected, is_over) = (address.to_owned(), Arc::clone(expected), Arc::clone(is_over));
        std::thread::spawn(move || {
            let mut whole = 0;
            while !is_over.load(Ordering::Relaxed) {
                let seed = (number + whole * 7) % expected.len();
                let (text, _) = streamed(&address, &chat(20, seed, 30)).expect("a whole stream");
                assert_eq!(text, expected[seed], "stream {number}, seed {seed}");
                whole += 1;
            }
            whole
        })
    };
    (0..STREAMS).map(one).collect()
}

/// Restarts every engine at its address, one after the other; if `drains`, after its last request has ended.
fn roll(site: &mut Site, config: &MockConfig, drains: bool) {
    for at in 0..ENGINES {
        let name = name_of(&site.mocks[at].url());
        if drains {
            let (ok, said) =
                kvasir(&["drain", &name, "--wait", "--timeout", "60", "--gateway", &site.gateway.address]);
            assert!(ok, "{said}");
        }
        let address = site.mocks[at].address();
        let gone = site.mocks.remove(at);
        site.runtime.block_on(gone.stop());
        let fresh =
            site.runtime.block_on(tools_mocker::Mock::start(config.clone(), address)).expect("its port");
        site.mocks.insert(at, fresh);
        if drains {
            let (ok, said) = kvasir(&["drain", &name, "--undo", "--gateway", &site.gateway.address]);
            assert!(ok, "{said}");
        }
        // Waits until this engine serves again, which its own streams show, before the next one is restarted.
        wait_for("the engine to serve again", || {
            site.mocks[at].stats().requests > 0 && state(&site.gateway, &name) == "ready"
        });
    }
}

#[test]
fn a_rolling_restart_fails_no_stream_with_draining_and_with_kills() {
    let config = MockConfig { decode_seconds_per_step: 0.03, batch_max: 256, ..engine() };
    let mocks = vec![config.clone(); ENGINES];
    let flags = ["--worker"; ENGINES];
    // With token ids a stream continues exactly as without the restart. There are few prompts: routed by
    // cached blocks, one engine would get most of them.
    let config_of_gateway =
        "[gateway]\nretries = 8\ntext = \"gateway\"\n[router]\nstrategy = \"least-loaded\"\n";
    let mut site = Site::start("fleet-rolling", mocks, &flags, config_of_gateway);
    let texts = (0..20).map(|seed| {
        let (text, _) = streamed(&site.gateway.address, &chat(20, seed, 30)).expect("a stream");
        text
    });
    let expected = Arc::new(texts.collect::<Vec<String>>());
    for drains in [true, false] {
        let before = site.gateway.metric("kvasir_gateway_migrations_total");
        let is_over = Arc::new(AtomicBool::new(false));
        let streams = keep_streams(&site.gateway.address, &expected, &is_over);
        wait_for("the streams to be open", || {
            site.gateway.metric("kvasir_gateway_active_requests") >= STREAMS as f64 * 0.9
        });
        roll(&mut site, &config, drains);
        is_over.store(true, Ordering::Relaxed);
        let whole: usize = streams.into_iter().map(|stream| stream.join().expect("no stream failed")).sum();
        let moved = site.gateway.metric("kvasir_gateway_migrations_total") - before;
        println!("draining {drains}: {whole} streams ended whole, {moved} went on elsewhere, 0 failed");
        // A drained engine has no stream to continue elsewhere; a killed one has.
        assert!(if drains { moved < ENGINES as f64 } else { moved >= 25.0 }, "{moved}");
        assert_eq!(site.gateway.metric("kvasir_gateway_broken_streams_total"), 0.0);
    }
}
