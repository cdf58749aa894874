//! Configuration changes under a running gateway: live keys take effect at once, other keys are reported and
//! wait for a restart, and a file with mistakes changes nothing.

use std::time::{Duration, Instant};

use crate::support::site::{Site, chat, mock};
use crate::support::{get, wait_for};
use serde_json::Value;
use tools_mocker::{Dialect, Fault, FaultKind, Role};

fn strategy(site: &Site) -> String {
    let (_, body) = get(&site.gateway.address, "/kvasir/status").expect("the status");
    let status: Value = serde_json::from_str(&body).expect("JSON");
    status["strategy"].as_str().unwrap_or_default().to_owned()
}

#[test]
fn live_keys_count_at_once_and_mistakes_change_nothing() {
    let mocks = vec![mock(Dialect::Vllm, Role::Both, false), mock(Dialect::Vllm, Role::Both, false)];
    let config = "[gateway]\n[router]\nstrategy = \"round-robin\"\n";
    let site = Site::start("live", mocks, &["--worker", "--worker"], config);
    assert_eq!(strategy(&site), "round-robin");
    let file = site.scratch.0.join("kvasir.toml");
    let original = std::fs::read_to_string(&file).expect("the file");
    let write = |text: &str| std::fs::write(&file, text).expect("the file");
    let metric = |name: &str| site.gateway.metric(&format!("kvasir_gateway_config_{name}"));

    // Two live keys and one that is not.
    let hang = Fault { kind: FaultKind::Hang, probability: 1.0, count: None, millis: 0, tokens: 3 };
    site.mocks.iter().for_each(|mock| mock.fault(hang.clone()).expect("a fault"));
    let changed = original
        .replace("round-robin", "least-loaded")
        .replace("[gateway]\n", "[gateway]\nrequest_time_max = \"300ms\"\nthreads = 7\n");
    write(&changed);
    wait_for("the file to be read", || strategy(&site) == "least-loaded");
    assert_eq!((metric("changes_total"), metric("refused_total"), metric("waiting")), (1.0, 0.0, 1.0));
    let started = Instant::now();
    let (status, _) = site.chat(&chat(20, 1, 4));
    assert_eq!(status, 504, "a request has 300 ms");
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());

    // A mistake beside a valid key: neither takes effect. A signal makes the gateway read the file at once.
    write(&changed.replace("least-loaded", "random").replace("threads = 7", "threads = \"many\""));
    site.gateway.signal("-HUP");
    wait_for("the mistakes to be found", || metric("refused_total") == 1.0);
    assert_eq!((strategy(&site), metric("changes_total")), ("least-loaded".to_owned(), 1.0));

    // A file with which no gateway could start, or an empty file, also changes nothing; both are observed for
    // a while.
    write(&changed.replace("[router]\n", "[access]\njwks_file = \"a\"\njwks_url = \"http://b\"\n[router]\n"));
    wait_for("the contradiction to be found", || metric("refused_total") == 2.0);
    write("");
    site.gateway.signal("-HUP");
    std::thread::sleep(Duration::from_millis(2500));
    assert_eq!((metric("refused_total"), metric("changes_total")), (2.0, 1.0), "each file counts once");
    assert_eq!(strategy(&site), "least-loaded");

    // Another file takes its place, by renaming.
    let other = site.scratch.config("other.toml", &changed.replace("least-loaded", "random"));
    std::fs::rename(other, &file).expect("renamed");
    wait_for("the other file to be read", || strategy(&site) == "random");
    assert_eq!(metric("changes_total"), 2.0);

    // Back to the initial settings: no key waits any more, and requests have no time limit again.
    site.mocks.iter().for_each(tools_mocker::Mock::heal);
    write(&original);
    site.gateway.signal("-HUP");
    wait_for("the file to be read", || strategy(&site) == "round-robin");
    assert_eq!((metric("changes_total"), metric("waiting")), (3.0, 0.0));
    let (status, answer) = site.chat(&chat(20, 2, 4));
    assert_eq!(status, 200, "{answer}");
}
