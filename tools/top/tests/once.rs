//! One frame of a gateway over real HTTP, and of gateways that do not answer properly.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tools_top::{TopConfig, TopError, View, once, run};

/// Answer of the gateway to the `n`th request (from 0) with this head: status line and body.
type Answers = dyn Fn(usize, &str) -> (&'static str, String) + Send + Sync;

struct Gateway {
    address: String,
    /// The heads of all requests.
    heard: Arc<Mutex<Vec<String>>>,
}

/// Serves until the test's process ends; with `closes`, each connection for one request only.
fn gateway(
    closes: bool,
    answers: impl Fn(usize, &str) -> (&'static str, String) + Send + Sync + 'static,
) -> Gateway {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = format!("http://{}", listener.local_addr().expect("bound"));
    let heard = Arc::new(Mutex::new(Vec::new()));
    let (hears, answers): (_, Arc<Answers>) = (Arc::clone(&heard), Arc::new(answers));
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let (hears, answers) = (Arc::clone(&hears), Arc::clone(&answers));
            std::thread::spawn(move || serve(stream, closes, &hears, answers.as_ref()));
        }
    });
    Gateway { address, heard }
}

fn serve(stream: TcpStream, closes: bool, heard: &Mutex<Vec<String>>, answers: &Answers) {
    let mut reader = BufReader::new(&stream);
    loop {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if reader.read_line(&mut head).unwrap_or(0) == 0 {
                return;
            }
        }
        let number = {
            let mut heard = heard.lock().expect("not poisoned");
            heard.push(head.clone());
            heard.len() - 1
        };
        let (status, body) = answers(number, &head);
        let answer = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        // Closing without an announcement, as after an idle timeout.
        if (&stream).write_all(answer.as_bytes()).is_err() || closes {
            return;
        }
    }
}

fn status(requests: u64) -> String {
    format!(
        r#"{{"version":"0.1.0","model":"qwen3","strategy":"predicted-time","started_unix":1760000000,
        "now_unix_ms":1760000100000,"active":3,"waiting":0,"requests":{requests},"prompt_tokens":1000,
        "cached_tokens":640,"generated_tokens":10,"workers":[
        {{"name":"127.0.0.1:8001","ready":true,"engine":"vllm","kv_usage":0.31,"requests":2}},
        {{"name":"evil\u001b[2J","ready":false}}]}}"#
    )
}

const DECISIONS: &str = r#"{"last":811,"decisions":[{"sequence":811,"unix_ms":1760000099000,
    "worker":"127.0.0.1:8001","prefill":null,"blocks":32,"overlap_blocks":20,"predicted_ms":12.1,
    "runner_up":null,"reason":"20 of 32 blocks are here"}]}"#;

fn healthy(number: usize, head: &str) -> (&'static str, String) {
    if head.starts_with("GET /kvasir/status ") {
        ("200 OK", status(100 + number as u64))
    } else if head.starts_with("GET /kvasir/decisions?after=811 ") {
        ("200 OK", r#"{"last":811,"decisions":[]}"#.to_owned())
    } else if head.starts_with("GET /kvasir/decisions ") {
        ("200 OK", DECISIONS.to_owned())
    } else {
        ("404 Not Found", String::new())
    }
}

fn config(gateway: &str, key: Option<&str>) -> TopConfig {
    TopConfig {
        gateway: gateway.to_owned(),
        key: key.map(str::to_owned),
        tls: None,
        interval: Duration::from_millis(100),
        view: View::Overview,
    }
}

#[test]
fn one_frame_shows_figures_since_the_gateways_start() {
    for closes in [false, true] {
        let gateway = gateway(closes, healthy);
        let frame = once(config(&gateway.address, Some("sk-boss")), 100, 30).expect("a frame");
        for part in [
            "kvasir 0.1.0  model qwen3  strategy predicted-time  up 1m40s",
            "127.0.0.1:8001",
            "evil\u{fffd}[2J",
            "20 of 32 blocks are here",
            "all 64%",
            "latency, since start",
            "1  all 1 ",
        ] {
            assert!(frame.contains(part), "{part:?} is missing in:\n{frame}");
        }
        assert_eq!(frame.lines().count(), 30);
        assert!(!frame.contains('\u{1b}'), "{frame:?}");
        let heard = gateway.heard.lock().expect("not poisoned");
        let asked: Vec<&str> = heard.iter().map(|head| head.split(' ').nth(1).unwrap_or_default()).collect();
        assert!(asked.starts_with(&["/kvasir/status", "/kvasir/decisions"]), "{asked:?}");
        let host = gateway.address.trim_start_matches("http://");
        for head in heard.iter() {
            let head = head.to_lowercase();
            assert!(head.contains("authorization: bearer sk-boss\r\n"), "{head}");
            assert!(head.contains(&format!("host: {host}\r\n")), "{head}");
        }
    }
}

#[test]
fn a_gateway_without_decisions_is_shown() {
    let gateway = gateway(false, |number, head| match head.contains("/decisions") {
        true => ("404 Not Found", r#"{"error":{"message":"There is no such\u001b path."}}"#.to_owned()),
        false => healthy(number, head),
    });
    let frame = once(config(&gateway.address, None), 100, 30).expect("a frame");
    let part = "GET /kvasir/decisions answered 404 Not Found: There is no such\u{fffd} path.";
    assert!(frame.contains(part) && frame.contains("127.0.0.1:8001"), "{frame}");
}

#[test]
fn a_closed_gateway_says_how_to_get_in() {
    for (status, key, part) in [
        ("401 Unauthorized", None, "wants an administrator's key"),
        ("401 Unauthorized", Some("sk-nobody"), "does not know this key"),
        ("403 Forbidden", Some("sk-bob"), "not an administrator's"),
    ] {
        let gateway = gateway(false, move |_, _| (status, "{}".to_owned()));
        let error = once(config(&gateway.address, key), 80, 24).expect_err("refused");
        assert!(matches!(error, TopError::Refused { .. }), "{error:?}");
        let message = error.to_string();
        assert!(message.contains(part) && message.contains("--key-file or KVASIR_KEY"), "{message}");
        assert!(!message.contains("sk-"), "{message}");
    }
}

#[test]
fn answers_that_are_no_status() {
    for (status, body, part) in [
        ("200 OK", "no JSON", "is not understood"),
        ("200 OK", r#"{"workers":"\u001b[2J"}"#, "is not understood"),
        ("500 Internal Server Error", r#"{"error":{"message":"boom"}}"#, "500 Internal Server Error: boom"),
        ("302 Found", "", "302 Found"),
    ] {
        let gateway = gateway(false, move |_, _| (status, body.to_owned()));
        let message = once(config(&gateway.address, None), 80, 24).expect_err(part).to_string();
        assert!(message.contains("GET /kvasir/status") && message.contains(part), "{message}");
        assert!(!message.contains('\u{1b}'), "{message:?}");
    }
    let gateway = gateway(true, |_, _| ("\u{1b}\r\n", String::new()));
    let error = once(config(&gateway.address, None), 80, 24).expect_err("no HTTP");
    assert!(matches!(error, TopError::Connection { .. }), "{error:?}");
}

#[test]
fn nobody_listens() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = format!("http://{}", listener.local_addr().expect("bound"));
    drop(listener);
    let error = once(config(&address, None), 80, 24).expect_err("refused");
    assert!(matches!(error, TopError::Connection { .. }), "{error:?}");
    assert!(error.to_string().contains("refused"), "{error}");
}

#[test]
fn what_cannot_be_used_is_refused_before_anything_is_asked() {
    let gateway = gateway(false, healthy);
    let config = config(&gateway.address, None);
    for (width, height) in [(0, 24), (80, 0), (u16::MAX, u16::MAX)] {
        let error = once(config.clone(), width, height).expect_err("no such frame");
        assert!(matches!(error, TopError::Config { what: "size of the frame", .. }), "{error:?}");
    }
    let https = TopConfig { gateway: "https://h:1".to_owned(), ..config.clone() };
    assert!(matches!(once(https.clone(), 80, 24), Err(TopError::Config { .. })));
    assert!(matches!(run(https), Err(TopError::Config { .. })));
    assert!(gateway.heard.lock().expect("not poisoned").is_empty());
}
