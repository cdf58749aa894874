//! Shutdown of a gateway: requests in flight are finished until the drain time is over, and idle clients do
//! not delay the end.

use std::io::Read;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::support;
use crate::support::site::{Site, chat, mock};
use crate::support::{free_address, open, wait_for};
use tools_mocker::{Dialect, Fault, FaultKind, MockConfig, Role};

fn ended(site: &mut Site, within: Duration) -> (Option<i32>, Duration) {
    let started = Instant::now();
    while started.elapsed() < within {
        if let Some(status) = site.gateway.child.try_wait().expect("wait") {
            return (status.code(), started.elapsed());
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("still running after {within:?}");
}

fn site(name: &str, drain: &str, mock: MockConfig) -> (Site, String) {
    let grpc = free_address();
    let scratch = std::env::temp_dir().join(format!("kvasir-test-{name}-{}.snapshot", std::process::id()));
    let config = format!(
        "[gateway]\nthreads = 4\ngrpc_listen = {grpc:?}\nsnapshot_file = {:?}\nsnapshot_interval = \"1h\"\n[serve]\ndrain = {drain:?}\n",
        scratch.display().to_string()
    );
    (Site::start(name, vec![mock], &["--worker"], &config), grpc)
}

fn snapshot(name: &str) -> std::path::PathBuf {
    std::env::temp_dir().join(format!("kvasir-test-{name}-{}.snapshot", std::process::id()))
}

#[test]
fn silent_connections_hold_nothing_up_and_answers_are_finished() {
    let slow = MockConfig { decode_seconds_per_step: 0.05, ..mock(Dialect::Vllm, Role::Both, true) };
    let (mut site, grpc) = site("drain-silent", "20s", slow);
    let silent: Vec<TcpStream> = [&site.gateway.address, &grpc]
        .into_iter()
        .flat_map(|address| (0..6).map(move |_| TcpStream::connect(address).expect("a connection")))
        .collect();
    let mut streams: Vec<TcpStream> = (0..6)
        .map(|number| {
            let mut body = chat(10, number, 20);
            body["stream"] = true.into();
            open(&site.gateway.address, "/v1/chat/completions", &body).expect("sent")
        })
        .collect();
    wait_for("all to be inside", || {
        support::get(&site.gateway.address, "/kvasir/status")
            .is_ok_and(|(_, text)| text.contains("\"active\":6"))
    });
    site.gateway.signal("-TERM");
    std::thread::sleep(Duration::from_millis(100));
    assert!(TcpStream::connect(&site.gateway.address).is_err(), "nobody new is let in");
    for stream in &mut streams {
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        assert!(answer.contains("[DONE]"), "{answer}");
    }
    let (code, took) = ended(&mut site, Duration::from_secs(10));
    assert_eq!(code, Some(0));
    assert!(took < Duration::from_secs(3), "{took:?} after the last answer");
    assert!(snapshot("drain-silent").exists(), "the index was saved");
    drop(silent);
    let _gone = std::fs::remove_file(snapshot("drain-silent"));
}

#[test]
fn what_never_ends_is_cut_off_and_a_second_signal_waits_for_nothing() {
    for (name, drain, signals, most) in
        [("drain-time", "1s", 1, Duration::from_secs(4)), ("drain-twice", "60s", 2, Duration::from_secs(4))]
    {
        let (mut site, _) = site(name, drain, mock(Dialect::Vllm, Role::Both, true));
        let hang = Fault { kind: FaultKind::Hang, probability: 1.0, count: None, millis: 0, tokens: 0 };
        site.mocks[0].fault(hang).expect("a fault");
        let held = open(&site.gateway.address, "/v1/chat/completions", &chat(10, 1, 4)).expect("sent");
        wait_for("it to be inside", || {
            support::get(&site.gateway.address, "/kvasir/status")
                .is_ok_and(|(_, text)| text.contains("\"active\":1"))
        });
        for _ in 0..signals {
            site.gateway.signal("-TERM");
            std::thread::sleep(Duration::from_millis(200));
        }
        let (code, took) = ended(&mut site, Duration::from_secs(20));
        assert_eq!(code, Some(0), "{name}");
        assert!(took < most, "{name}: {took:?}");
        assert!(snapshot(name).exists(), "{name}: the index was saved all the same");
        drop(held);
        let _gone = std::fs::remove_file(snapshot(name));
    }
}

#[test]
fn on_sigterm_the_gateway_is_unready_at_once_and_goes_on_accepting() {
    let config = "[drain]\nunready_for = \"2s\"\n";
    let mut site =
        Site::start("lame-duck", vec![mock(Dialect::Vllm, Role::Both, false)], &["--worker"], config);
    let status = |path: &str| support::get(&site.gateway.address, path).expect("an answer").0;
    assert_eq!((status("/livez"), status("/readyz"), status("/health")), (200, 200, 200));
    site.gateway.signal("-TERM");
    let since = Instant::now();
    wait_for("it to be unready", || status("/readyz") == 503);
    assert_eq!((status("/livez"), status("/health")), (200, 503));
    assert_eq!(site.chat(&chat(10, 1, 4)).0, 200, "what comes all the same is served");
    assert!(since.elapsed() < Duration::from_secs(2), "the test was too slow to see it");
    let (code, _) = ended(&mut site, Duration::from_secs(20));
    assert!(since.elapsed() >= Duration::from_secs(2), "the port was open for the time that was set");
    assert_eq!(code, Some(0));
}

#[test]
fn a_new_gateway_takes_the_port_over() {
    let config = "[gateway]\nreuse_port = true\n";
    let mut site =
        Site::start("take-over", vec![mock(Dialect::Vllm, Role::Both, false)], &["--worker"], config);
    let (address, url) = (site.gateway.address.clone(), site.mocks[0].url());
    let path = site.scratch.0.join("kvasir.toml").display().to_string();
    let start = |config: &str| {
        let arguments = ["gateway", "--config", config, "--worker", &url, "--listen", &address];
        std::process::Command::new(env!("CARGO_BIN_EXE_kvasir"))
            .args(arguments)
            .stdin(std::process::Stdio::null())
            .spawn()
            .expect("kvasir starts")
    };
    let alone = site.scratch.config("alone.toml", "");
    let mut refused = start(&alone);
    assert!(!refused.wait().expect("its end").success(), "without the setting the address is taken");
    let port = address.rsplit(':').next().and_then(|port| port.parse::<u16>().ok()).expect("a port");
    // proc(5): the local address in hexadecimal digits, no remote one, state 0A (TCP_LISTEN).
    let listeners = || {
        let table = std::fs::read_to_string("/proc/net/tcp").expect("the table");
        table.lines().filter(|line| line.contains(&format!(":{port:04X} 00000000:0000 0A"))).count()
    };
    let before = listeners();
    let mut next = start(&path);
    wait_for("both to listen", || listeners() == 2 * before);
    site.gateway.signal("-TERM");
    ended(&mut site, Duration::from_secs(20));
    for number in 0..20 {
        assert_eq!(site.chat(&chat(10, number, 2)).0, 200, "the new one answers at the same address");
    }
    next.kill().expect("kill");
    next.wait().expect("its end");
}
