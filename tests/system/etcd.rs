//! Engines that `kvasir register` puts into etcd: a real gateway, mock engines and a real etcd.

mod support;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use support::etcd::Etcd;
use support::load::Load;
use support::site::{Site, mock};
use support::{get, wait_for};
use tools_mocker::{Dialect, Role};

/// `kvasir register` beside an engine; it is killed when the test is over.
struct Register(Child);

impl Register {
    fn start(etcd: &Etcd, url: &str, more: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_kvasir"))
            .args(["register", url, "--etcd", &etcd.url()])
            .args(more)
            .stdout(Stdio::piped())
            .spawn()
            .expect("kvasir register");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let is_written = lines.any(|line| line.is_ok_and(|line| line.ends_with(" written")));
        assert!(is_written, "{url} is registered");
        // What it prints later is read, so that it can go on.
        std::thread::spawn(move || lines.for_each(drop));
        Self(child)
    }

    fn terminate(&mut self) {
        let sent = Command::new("kill").args(["-TERM", &self.0.id().to_string()]).status();
        assert!(sent.is_ok_and(|status| status.success()));
    }
}

impl Drop for Register {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _gone = self.0.kill();
        let _status = self.0.wait();
    }
}

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

/// Workers come, etcd dies for `KVASIR_SECONDS` and comes back with nothing, everyone who registers workers dies: no request fails.
/// A worker that leaves gets none from then on.
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
    // Who registered the first worker dies: nobody vouches for it, and it answers.
    registered[0].0.kill().expect("killed");
    wait_for("its lease to run out", || site.gateway.metric("kvasir_discovery_suspect") == 1.0);
    let before = site.mocks[0].stats().requests;
    wait_for("requests all the same", || site.mocks[0].stats().requests > before + 20);
    // The second one says goodbye.
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
