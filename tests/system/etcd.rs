//! Engines that `kvasir register` registers in etcd: a real gateway, mock engines and a real etcd.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::etcd::Etcd;
use crate::support::load::Load;
use crate::support::register::Register;
use crate::support::site::{Site, mock};
use crate::support::{get, wait_for};
use tools_mocker::{Dialect, Role};

fn site(name: &str, etcd: &Etcd, mocks: usize) -> Site {
    let config = format!(
        "[discovery]\nguard_time = \"1h\"\n[router]\nstrategy = \"round-robin\"\n[etcd]\nendpoints = [\"{}\"]\n",
        etcd.url()
    );
    let mocks = (0..mocks).map(|_| mock(Dialect::Vllm, Role::Both, true)).collect();
    let site = Site::start_some(name, mocks, &[], &config, 0);
    wait_for("the gateway", || get(&site.gateway.address, "/livez").is_ok());
    site
}

/// Workers are registered, etcd is down for `KVASIR_SECONDS` and restarts empty, and all registering
/// processes are killed: no request fails. A worker that leaves gets no request from then on.
#[test]
fn an_etcd_that_is_away_fails_no_request() {
    let Some(mut etcd) = Etcd::start("etcd-system", &[]) else { return };
    let seconds = std::env::var("KVASIR_SECONDS").ok().and_then(|seconds| seconds.parse().ok()).unwrap_or(5);
    let site = site("etcd-away", &etcd, 3);
    let urls: Vec<String> = site.mocks.iter().map(tools_mocker::Mock::url).collect();
    let mut registered: Vec<Register> =
        urls.iter().map(|url| Register::start(&etcd, url, &["--drain", "1"])).collect();
    wait_for("the workers", || site.ready() == 3);
    let load = Load::start(&site.gateway.address, 200);
    etcd.kill();
    wait_for("it to be noticed", || site.gateway.metric("kvasir_discovery_failing") == 1.0);
    std::thread::sleep(Duration::from_secs(seconds));
    assert_eq!(site.ready(), 3);
    etcd.restart_empty();
    wait_for("it to be read again", || site.gateway.metric("kvasir_discovery_failing") == 0.0);
    wait_for("all to be registered again", || {
        site.gateway.metric("kvasir_discovery_suspect") == 0.0
            && site.gateway.metric("kvasir_discovery_workers") == 3.0
    });
    // The process that registered the first worker is killed: its lease expires, and the worker still
    // answers.
    registered[0].kill();
    wait_for("its lease to run out", || site.gateway.metric("kvasir_discovery_suspect") == 1.0);
    let before = site.mocks[0].stats().requests;
    wait_for("requests all the same", || site.mocks[0].stats().requests > before + 20);
    // The second worker deregisters.
    registered[1].terminate();
    let told = Instant::now();
    let (mut last, mut count) = (Duration::ZERO, site.mocks[1].stats().requests);
    while told.elapsed() < Duration::from_millis(900) {
        let now = site.mocks[1].stats().requests;
        if now > count {
            (last, count) = (told.elapsed(), now);
        }
        std::thread::sleep(Duration::from_micros(500));
    }
    wait_for("it to be gone", || site.gateway.metric("kvasir_discovery_workers") == 2.0);
    let answered = load.end();
    println!(
        "etcd killed for {seconds} s and back without its keys, a registrar killed: {answered} requests at 200/s, 0 failed; \
         the last new request {last:?} after a worker's registrar was told to stop"
    );
    assert!(last < Duration::from_millis(500), "{last:?}");
}

/// A network namespace behind a link that can be cut; removed on drop.
struct Namespace {
    name: String,
    link: String,
}

fn ip(arguments: &[&str]) -> bool {
    Command::new("ip").args(arguments).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

impl Namespace {
    /// Returns `None`, with a printed message, if namespaces are not allowed.
    fn start() -> Option<Self> {
        let number = std::process::id();
        let (name, link) = (format!("kvasir-{number}"), format!("kv{number}"));
        let peer = format!("{link}p");
        if !ip(&["netns", "add", &name]) {
            eprintln!("SKIPPED the network split: `ip netns add` fails here (needs iproute2 and root)");
            return None;
        }
        let namespace = Self { name, link };
        let (name, link) = (namespace.name.as_str(), namespace.link.as_str());
        for arguments in [
            &["link", "add", link, "type", "veth", "peer", "name", &peer, "netns", name][..],
            &["address", "add", "10.231.7.1/30", "dev", link],
            &["link", "set", link, "up"],
            &["-n", name, "address", "add", "10.231.7.2/30", "dev", &peer],
            &["-n", name, "link", "set", &peer, "up"],
            &["-n", name, "link", "set", "lo", "up"],
        ] {
            if !ip(arguments) {
                eprintln!("SKIPPED the network split: `ip {}` fails here", arguments.join(" "));
                return None;
            }
        }
        Some(namespace)
    }

    fn set_cut(&self, is_cut: bool) {
        assert!(ip(&["link", "set", &self.link, if is_cut { "down" } else { "up" }]));
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _gone = ip(&["link", "delete", &self.link]);
        let _gone = ip(&["netns", "delete", &self.name]);
    }
}

/// The network between etcd and everything else is cut silently for `KVASIR_SECONDS`: no request fails.
#[test]
fn a_network_that_is_split_from_etcd_fails_no_request() {
    // Longer than the leases of the registrations.
    let seconds = std::env::var("KVASIR_SECONDS").ok().and_then(|seconds| seconds.parse().ok()).unwrap_or(10);
    let Some(namespace) = Namespace::start() else { return };
    let place = Some((namespace.name.as_str(), "10.231.7.2"));
    let Some(etcd) = Etcd::start_in("etcd-split", place, &[]) else { return };
    let site = site("etcd-split", &etcd, 2);
    let _registered: Vec<Register> =
        site.mocks.iter().map(|mock| Register::start(&etcd, &mock.url(), &[])).collect();
    wait_for("the workers", || site.ready() == 2);
    let load = Load::start(&site.gateway.address, 200);
    namespace.set_cut(true);
    let cut = Instant::now();
    wait_for("it to be noticed", || site.gateway.metric("kvasir_discovery_failing") == 1.0);
    let noticed = cut.elapsed();
    std::thread::sleep(Duration::from_secs(seconds));
    assert_eq!(site.ready(), 2);
    namespace.set_cut(false);
    wait_for("etcd to be read again", || site.gateway.metric("kvasir_discovery_failing") == 0.0);
    wait_for("both to be registered", || {
        site.gateway.metric("kvasir_discovery_suspect") == 0.0
            && site.gateway.metric("kvasir_discovery_workers") == 2.0
    });
    let answered = load.end();
    println!(
        "the network to etcd was cut for {:?}, which was noticed after {noticed:?}: {answered} requests at 200/s, 0 failed",
        cut.elapsed()
    );
}

#[test]
fn what_cannot_be_registered_is_refused_by_name() {
    let run = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_kvasir")).arg("register").args(arguments).output();
        let output = output.expect("kvasir register");
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    for (arguments, part) in [
        (&["http://a:1"][..], "no endpoint of etcd"),
        (&["a:1", "--etcd", "http://127.0.0.1:2379"], "a:1"),
        (&["http://a:1", "--etcd", "127.0.0.1:2379"], "127.0.0.1:2379"),
        (&["http://a:1", "--etcd", "http://127.0.0.1:2379", "--role", "boss"], "boss"),
    ] {
        let said = run(arguments);
        assert!(said.contains(part), "{arguments:?}: {said}");
    }
}
