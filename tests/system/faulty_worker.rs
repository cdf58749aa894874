//! Workers with failures that a real worker cannot be made to show on demand: they exit after their last
//! token, do not answer, or hang with all connections open.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::support::{
    Cluster, MODEL, Process, Scratch, Streamed, open, post, prompt, read_stream, request, wait_for,
};
use serde_json::{Value, json};

/// Behaviour of a fake worker for a completion.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    /// Sends all requested tokens, then closes the connection without finish reason and `[DONE]`.
    AfterTheLastToken,
    /// Sends the finish reason, but no `[DONE]`.
    AfterTheFinish,
    /// Sends the end-of-sequence token, then closes the connection.
    AfterTheEnd,
    /// Answers 500.
    Refuses,
}

/// Starts a minimal fake worker. Returns its URL and the count of completions that it has received.
fn fake_worker(fault: Fault) -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let count = Arc::clone(&count);
            std::thread::spawn(move || serve_one(stream, fault, &count));
        }
    });
    (url, asked)
}

fn serve_one(mut stream: TcpStream, fault: Fault, asked: &AtomicUsize) {
    let mut reader = BufReader::new(stream.try_clone().expect("clone"));
    let mut first = String::new();
    let (mut line, mut length) = (String::new(), 0);
    if reader.read_line(&mut first).is_err() {
        return;
    }
    while reader.read_line(&mut line).is_ok_and(|bytes| bytes > 2) {
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().expect("a length");
        }
        line.clear();
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).expect("the body");
    let answer = if first.starts_with("GET") {
        let description = json!({
            "role": "both", "model": MODEL, "context_tokens": 4000, "block_tokens": 16, "blocks": 100,
            "instance": 1, "events": null, "replay": null, "data_plane": { "host": "x" },
        });
        format!(
            "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{description}",
            description.to_string().len()
        )
    } else if fault == Fault::Refuses {
        asked.fetch_add(1, Ordering::SeqCst);
        "HTTP/1.1 500 Oops\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}".to_owned()
    } else {
        asked.fetch_add(1, Ordering::SeqCst);
        let wanted: Value = serde_json::from_slice(&body).expect("JSON");
        completion(fault, wanted["max_tokens"].as_u64().expect("max_tokens"))
    };
    let _gone = stream.write_all(answer.as_bytes());
}

fn completion(fault: Fault, tokens: u64) -> String {
    let mut out = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n".to_owned();
    let mut event = |choice: Value| {
        let event = format!("data: {}\n\n", json!({ "choices": [choice] }));
        out.push_str(&format!("{:x}\r\n{event}\r\n", event.len()));
    };
    let count = if fault == Fault::AfterTheEnd { 3 } else { tokens };
    for _ in 0..count {
        event(json!({ "index": 0, "text": "A", "token_ids": [65], "finish_reason": null }));
    }
    match fault {
        Fault::AfterTheFinish => {
            event(json!({ "index": 0, "text": "", "token_ids": [], "finish_reason": "length" }))
        }
        Fault::AfterTheEnd => {
            event(json!({ "index": 0, "text": "", "token_ids": [257], "finish_reason": null }))
        }
        _ => {}
    }
    out
}

/// Starts a gateway for the given workers.
fn gateway(name: &str, workers: &[&str]) -> (Process, Scratch) {
    let scratch = Scratch::new(name);
    let config =
        scratch.config("kvasir.toml", "[gateway]\nhealth_interval = \"50ms\"\nworker_wait = \"500ms\"\n");
    let mut arguments = vec!["gateway", "--log", "error", "--config", &config];
    arguments.extend(workers.iter().flat_map(|url| ["--worker", url]));
    let gateway = Process::start(&arguments);
    gateway.wait_healthy();
    (gateway, scratch)
}

fn ask(gateway: &Process, tokens: usize) -> Streamed {
    let body = json!({
        "model": MODEL, "prompt": [72, 105], "max_tokens": tokens, "stream": true, "return_token_ids": true,
    });
    read_stream(open(&gateway.address, "/v1/completions", &body).expect("open"), |_| {})
}

#[test]
fn death_after_the_last_token_is_an_end_and_no_migration() {
    for (fault, tokens, text, finish) in [
        (Fault::AfterTheLastToken, 4, "AAAA", "length"),
        (Fault::AfterTheFinish, 4, "AAAA", "length"),
        (Fault::AfterTheEnd, 9, "AAA", "stop"),
    ] {
        let (url, asked) = fake_worker(fault);
        let (gateway, _scratch) = gateway("last-token", &[&url]);
        let streamed = ask(&gateway, tokens);
        assert_eq!((streamed.text.as_str(), streamed.finish.as_deref()), (text, Some(finish)));
        assert!(streamed.is_done && streamed.error.is_none(), "{streamed:?}");
        assert_eq!(asked.load(Ordering::SeqCst), 1, "nothing was left to ask for");
    }
}

#[test]
fn a_worker_that_only_refuses_is_an_error_after_some_tries() {
    let (url, asked) = fake_worker(Fault::Refuses);
    let (gateway, _scratch) = gateway("refuses", &[&url]);
    let body = json!({ "model": MODEL, "prompt": "x", "max_tokens": 2 });
    let (status, text) = post(&gateway.address, "/v1/completions", &body).expect("an answer");
    assert_eq!(status, 500, "{text}");
    assert!(text.contains("the engine answered 500"), "{text}");
    assert_eq!(asked.load(Ordering::SeqCst), 4, "the first try and three more");
}

/// A stopped process keeps its connections open: only its silence reveals it.
#[test]
fn a_hung_worker_is_given_up_and_its_streams_go_on() {
    let config = "[gateway]\nhealth_interval = \"100ms\"\nhealth_timeout = \"1s\"\n";
    let cluster = Cluster::start("hung", &["both", "both"], config);
    let mut body = request(&prompt(3, 50), 1500);
    body["stream"] = json!(true);
    body["logprobs"] = json!(null);
    let undisturbed =
        read_stream(open(&cluster.gateway.address, "/v1/completions", &body).expect("open"), |_| {});
    let flowing = Arc::new(AtomicUsize::new(0));
    let (address, count, again) = (cluster.gateway.address.clone(), Arc::clone(&flowing), body.clone());
    let reader = std::thread::spawn(move || {
        let socket = open(&address, "/v1/completions", &again).expect("open");
        read_stream(socket, |tokens| count.store(tokens, Ordering::SeqCst))
    });
    wait_for("tokens", || flowing.load(Ordering::SeqCst) > 5);
    let busy = |worker: &&Process| worker.metric("kvasir_engine_requests_running") > 0.0;
    let victim = cluster.workers.iter().find(busy).expect("a busy worker");
    let signal = |name: &str| {
        let status = Command::new("kill").args([name, &victim.child.id().to_string()]).status();
        assert!(status.expect("kill").success());
    };
    signal("-STOP");
    let stopped = Instant::now();
    let disturbed = reader.join().expect("reader");
    let took = stopped.elapsed();
    signal("-CONT");
    assert_eq!(disturbed, undisturbed);
    println!("a stopped worker was given up; its stream was complete {:.1} s later", took.as_secs_f64());
    assert!(took < Duration::from_secs(20), "{took:?}");
}
