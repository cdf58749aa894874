//! Discovery: workers of a file or a DNS name are added, changed and removed while the gateway serves, and
//! mistakes change nothing.

use std::path::Path;
use std::time::Duration;

use crate::support;
use crate::support::site::{Site, chat, mock};
use crate::support::{Scratch, get, wait_for};
use serde_json::Value;
use tools_mocker::{Dialect, MockConfig, Role};

fn vllm() -> MockConfig {
    mock(Dialect::Vllm, Role::Both, true)
}

/// A gateway that discovers its workers in this file.
fn site(name: &str, file: &Path, mocks: usize, more: &str) -> Site {
    let config = format!("[discovery]\nfile = {:?}\n{more}", file.display().to_string());
    let site = Site::start_some(name, (0..mocks).map(|_| vllm()).collect(), &[], &config, 0);
    wait_for("the gateway", || get(&site.gateway.address, "/livez").is_ok());
    site
}

fn write(file: &Path, workers: &[(String, &str)]) {
    let worker = |(url, more): &(String, &str)| format!("[[worker]]\nurl = {url:?}\n{more}\n");
    // The whole file is replaced at once, as editors and mounted ConfigMaps do.
    let new = file.with_extension("new");
    std::fs::write(&new, workers.iter().map(worker).collect::<String>()).expect("written");
    std::fs::rename(&new, file).expect("renamed");
}

fn workers(site: &Site) -> Value {
    let (status, body) = get(&site.gateway.address, "/kvasir/workers").expect("an answer");
    assert_eq!(status, 200, "{body}");
    serde_json::from_str(&body).expect("JSON")
}

/// Returns the state of the worker at this address; null if there is none.
fn state(site: &Site, url: &str) -> Value {
    let told = workers(site);
    let found = told["workers"].as_array().into_iter().flatten().find(|worker| worker["url"] == *url);
    found.map_or(Value::Null, |worker| worker["state"].clone())
}

fn source(site: &Site) -> Value {
    workers(site)["discovery"]["sources"][0].clone()
}

fn requests(site: &Site, which: usize) -> u64 {
    site.mocks[which].stats().requests
}

fn ask(site: &Site, count: usize, seed: usize) {
    for number in 0..count {
        let (status, answer) = site.chat(&chat(12, seed + number, 2));
        assert_eq!(status, 200, "{answer}");
    }
}

#[test]
fn a_file_is_the_roster_and_mistakes_in_it_change_nothing() {
    let folder = Scratch::new("discovery-file-list");
    let file = folder.0.join("workers.toml");
    write(&file, &[]);
    let site = site("discovery-file", &file, 2, "guard_share = 1.0\n");
    let urls: Vec<String> = site.mocks.iter().map(tools_mocker::Mock::url).collect();
    let (status, _) = site.chat(&chat(5, 0, 2));
    assert_eq!(status, 503, "there is no worker yet");

    write(&file, &[(urls[0].clone(), "")]);
    wait_for("the first worker", || site.ready() == 1);
    ask(&site, 4, 0);
    write(&file, &[(urls[0].clone(), "draining = true"), (urls[1].clone(), "uid = \"pod-1\"")]);
    wait_for("the second worker", || {
        state(&site, &urls[1]) == "ready" && state(&site, &urls[0]) == "draining"
    });
    let before = requests(&site, 0);
    ask(&site, 8, 100);
    assert_eq!(requests(&site, 0), before, "a worker that drains gets no request");
    assert!(requests(&site, 1) >= 8);

    // A mistake: the file's error is shown with its line, and the workers stay.
    std::fs::write(&file, "[[worker]]\nurl = \"http://a:1\"\nrole = 7\n").expect("written");
    wait_for("the mistake to be shown", || source(&site)["error"].is_string());
    let error = source(&site)["error"].to_string();
    assert!(error.contains("workers.toml: line 3"), "{error}");
    assert_eq!(site.gateway.metric("kvasir_discovery_failing"), 1.0);
    ask(&site, 2, 200);

    // A worker of an unknown pool is left out with a message; the others are used.
    write(&file, &[(urls[1].clone(), "uid = \"pod-1\""), (urls[0].clone(), "pool = \"none\"")]);
    wait_for("the mistake to be mended", || source(&site)["error"].is_null());
    let told = workers(&site);
    assert_eq!(told["workers"].as_array().map(Vec::len), Some(1), "{told}");
    let refused = told["discovery"]["refused"][0].to_string();
    assert!(refused.contains(&urls[0]) && refused.contains("none"), "{refused}");
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_kvasir"))
        .args(["workers", "--gateway", &site.gateway.address])
        .output()
        .expect("kvasir workers");
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(printed.contains("workers.toml: 2 workers\n") && printed.contains("left out: "), "{printed}");

    // A different identity at the same address is a different worker: the state of the previous one is
    // dropped.
    wait_for("it to be ready", || state(&site, &urls[1]) == "ready");
    write(&file, &[(urls[1].clone(), "uid = \"pod-1\"")]);
    wait_for("the mistake to be mended", || {
        workers(&site)["discovery"]["refused"].as_array().is_some_and(Vec::is_empty)
    });
    let version = workers(&site)["version"].as_u64();
    write(&file, &[(urls[1].clone(), "uid = \"pod-2\"")]);
    wait_for("the new worker", || workers(&site)["version"].as_u64() > version);
    wait_for("it to be ready", || state(&site, &urls[1]) == "ready");
    ask(&site, 2, 300);
    write(&file, &[]);
    wait_for("no worker", || workers(&site)["workers"].as_array().is_some_and(Vec::is_empty));
    assert_eq!(site.gateway.metric("kvasir_discovery_workers"), 0.0);
}

#[test]
fn a_list_that_lacks_most_workers_is_not_believed_while_they_answer() {
    let folder = Scratch::new("discovery-guard-list");
    let file = folder.0.join("workers.toml");
    write(&file, &[]);
    let mut site = site("discovery-guard", &file, 2, "guard_time = \"12s\"\n");
    let urls: Vec<String> = site.mocks.iter().map(tools_mocker::Mock::url).collect();
    let all = [(urls[0].clone(), ""), (urls[1].clone(), "")];
    write(&file, &all);
    wait_for("both workers", || site.ready() == 2);
    write(&file, &[]);
    wait_for("both to be suspect", || site.gateway.metric("kvasir_discovery_suspect") == 2.0);
    let began = std::time::Instant::now();
    ask(&site, 8, 0);
    // One of the workers is killed: the health check detects it.
    drop(site.mocks.remove(0));
    wait_for("one to be down", || site.ready() == 1);
    ask(&site, 4, 100);
    assert!(began.elapsed() < Duration::from_secs(12), "this machine is too slow for the test's times");
    wait_for("the guard's time to be over", || {
        workers(&site)["workers"].as_array().is_some_and(Vec::is_empty)
    });
}

#[test]
fn addresses_of_a_name_are_workers() {
    let mut mocks = vec![vllm()];
    let site = {
        let listen = "127.0.0.1:0".parse().expect("an address");
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let mock =
            runtime.block_on(tools_mocker::Mock::start(mocks.remove(0), listen)).expect("a mock engine");
        let port = mock.url().rsplit_once(':').expect("a port").1.to_owned();
        let scratch = Scratch::new("discovery-dns");
        let config = format!(
            "[gateway]\nhealth_interval = \"100ms\"\nmodel_folder = {:?}\n[discovery]\ndns = [\"http://localhost:{port}\"]\n",
            support::site::model_folder()
        );
        let path = scratch.config("kvasir.toml", &config);
        let gateway = support::Process::start(&["gateway", "--config", &path]);
        Site { runtime, mocks: vec![mock], gateway, scratch }
    };
    // The name's IPv6 address may also become a worker, at which no engine answers.
    wait_for("the worker behind the name", || site.ready() == 1);
    ask(&site, 4, 0);
    assert!(source(&site)["source"].to_string().contains("dns localhost:"));
}

#[test]
fn bad_sources_stop_the_start_and_name_their_key() {
    let scratch = Scratch::new("discovery-bad");
    for (text, part) in [
        ("[discovery]\ndns = [\"engines:8000\"]\n", "discovery.dns: \"engines:8000\" is not of the form"),
        ("[discovery]\ndns_pool = \"none\"\n", "kvasir.toml:1: discovery.dns_pool: \"none\" is no pool"),
        ("[discovery]\nfiles = \"a\"\n", "did you mean `file`?"),
        ("", "no workers: give --worker URL"),
    ] {
        let path = scratch.config("kvasir.toml", text);
        let output = std::process::Command::new(env!("CARGO_BIN_EXE_kvasir"))
            .args(["gateway", "--config", &path, "--listen", "127.0.0.1:0"])
            .output()
            .expect("kvasir gateway");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains(part), "{text}: {said}");
    }
}
