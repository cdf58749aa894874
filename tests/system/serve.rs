//! `kvasir serve` as in the quick start.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::{Scratch, free_address, get, open, post, prompt, read_stream, wait_for};
use serde_json::{Value, json};

struct Serve {
    child: Child,
    address: String,
    printed: String,
    _scratch: Scratch,
}

impl Serve {
    fn start(name: &str, config: &str) -> Self {
        let scratch = Scratch::new(name);
        let folder = format!("[transfer]\nsocket_folder = \"{}\"\n{config}", scratch.0.display());
        let path = scratch.config("kvasir.toml", &folder);
        let address = free_address();
        let mut child = Command::new(env!("CARGO_BIN_EXE_kvasir"))
            .args(["serve", "--config", &path, "--listen", &address])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("kvasir starts");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let mut printed = String::new();
        for line in lines.by_ref() {
            let line = line.expect("a line");
            printed.push_str(&line);
            printed.push('\n');
            if line.starts_with("curl") {
                break;
            }
        }
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, address, printed, _scratch: scratch }
    }

    fn signal(&self, name: &str) {
        let status = Command::new("kill").args([name, &self.child.id().to_string()]).status().expect("kill");
        assert!(status.success());
    }

    fn exit_code(&mut self, within: Duration) -> Option<i32> {
        let deadline = Instant::now() + within;
        while Instant::now() < deadline {
            if let Some(status) = self.child.try_wait().expect("wait") {
                return status.code();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("still running after {within:?}");
    }

    /// Returns the process ids of the children, from /proc.
    fn children(&self) -> Vec<(u32, String)> {
        let path = format!("/proc/{0}/task/{0}/children", self.child.id());
        let ids = std::fs::read_to_string(path).unwrap_or_default();
        let describe = |id: &str| {
            let command = std::fs::read_to_string(format!("/proc/{id}/cmdline")).unwrap_or_default();
            Some((id.parse().ok()?, command.replace('\0', " ")))
        };
        ids.split_whitespace().filter_map(describe).collect()
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _ended = self.child.wait();
    }
}

#[test]
fn one_command_serves_and_ctrl_c_drains() {
    let mut serve = Serve::start("serve", "");
    for expected in
        ["Memory plan", "sum of all workers", "gateway, prefill worker 0, decode worker 0", "curl -N http://"]
    {
        assert!(serve.printed.contains(expected), "{expected:?} is not in:\n{}", serve.printed);
    }
    let (status, body) = get(&serve.address, "/v1/models").expect("models");
    assert_eq!(status, 200);
    let models: Value = serde_json::from_str(&body).expect("JSON");
    assert_eq!(models["data"][0]["id"], "kvasir-tiny");

    // The printed curl command, executed as printed.
    let line = serve.printed.lines().find(|line| line.starts_with("curl")).expect("a curl line").to_owned();
    let curl = Command::new("sh").args(["-c", &line.replace("curl", "curl -s")]).output();
    match curl {
        Ok(output) if output.status.success() => {
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(
                text.matches("chat.completion.chunk").count() > 10 && text.ends_with("data: [DONE]\n\n"),
                "{text}"
            );
        }
        Ok(output) if output.status.code() == Some(127) => {
            eprintln!("SKIPPED the printed curl line: there is no curl here");
        }
        other => panic!("the printed curl line does not work: {other:?}"),
    }

    // Ctrl-C while a stream flows: the stream is finished first.
    let body = json!({"prompt": prompt(1, 300), "max_tokens": 300, "stream": true, "ignore_eos": true, "return_token_ids": true});
    let address = serve.address.clone();
    let reader = std::thread::spawn(move || {
        read_stream(open(&address, "/v1/completions", &body).expect("open"), |_| {})
    });
    wait_for("the stream to be inside", || {
        get(&serve.address, "/kvasir/status").is_ok_and(|(_, body)| body.contains("\"active\":1"))
    });
    serve.signal("-INT");
    let streamed = reader.join().expect("reader");
    assert_eq!((streamed.tokens.len(), streamed.is_done), (300, true), "drained, not cut");
    assert_eq!(serve.exit_code(Duration::from_secs(20)), Some(0));
}

#[test]
fn a_second_ctrl_c_stops_at_once() {
    let mut serve = Serve::start("twice", "");
    let body = json!({"prompt": prompt(1, 300), "max_tokens": 3500, "stream": true, "ignore_eos": true});
    let _stream = open(&serve.address, "/v1/completions", &body).expect("open");
    wait_for("the stream to be inside", || {
        get(&serve.address, "/kvasir/status").is_ok_and(|(_, body)| body.contains("\"active\":1"))
    });
    serve.signal("-INT");
    std::thread::sleep(Duration::from_millis(200));
    let children = serve.children();
    assert_eq!(children.len(), 3, "{children:?}");
    let started = Instant::now();
    serve.signal("-INT");
    assert_eq!(serve.exit_code(Duration::from_secs(5)), Some(130));
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
    wait_for("the children to be gone", || {
        children.iter().all(|(id, _)| {
            std::fs::read_to_string(format!("/proc/{id}/cmdline"))
                .map_or(true, |command| !command.contains("kvasir"))
        })
    });
}

#[test]
fn a_worker_that_dies_is_started_again() {
    let serve = Serve::start("restart", "[serve]\nprefill_workers = 0\ndecode_workers = 2\n");
    let workers = |serve: &Serve| {
        serve.children().into_iter().filter(|(_, command)| command.contains(" worker ")).collect::<Vec<_>>()
    };
    let before = workers(&serve);
    assert_eq!(before.len(), 2, "{before:?}");
    let status = Command::new("kill").args(["-9", &before[0].0.to_string()]).status().expect("kill");
    assert!(status.success());
    // Requests are served meanwhile.
    for _ in 0..5 {
        let body = json!({"prompt": [65, 66, 67], "max_tokens": 2});
        let (status, body) = post(&serve.address, "/v1/completions", &body).expect("an answer");
        assert_eq!(status, 200, "{body}");
    }
    wait_for("the worker to be back", || {
        let now = workers(&serve);
        now.len() == 2 && now.iter().all(|(id, _)| *id != before[0].0)
    });
    wait_for("both to be ready", || {
        get(&serve.address, "/kvasir/status")
            .is_ok_and(|(_, body)| body.matches("\"ready\":true").count() == 2)
    });
}

#[test]
fn tokens_are_counted_on_the_quick_start() {
    let serve = Serve::start("count", "[serve]\nprefill_workers = 0\n");
    let message = json!({
        "model": "kvasir-tiny", "system": "Be brief.", "messages": [{"role": "user", "content": "Where is Köln?"}],
    });
    let (status, text) = post(&serve.address, "/v1/messages/count_tokens", &message).expect("an answer");
    let counted: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(status, 200, "{counted}");
    let chat = json!({"max_tokens": 1, "messages": [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is Köln?"}]});
    let (status, text) = post(&serve.address, "/v1/chat/completions", &chat).expect("an answer");
    let answer: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!((status, &answer["usage"]["prompt_tokens"]), (200, &counted["input_tokens"]), "{answer}");
    let mut other = message;
    other["model"] = "another".into();
    let (status, _) = post(&serve.address, "/v1/messages/count_tokens", &other).expect("an answer");
    assert_eq!(status, 404, "a model that is not served has no tokens");
}

#[test]
fn an_occupied_port_is_a_clear_error() {
    let occupied = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = occupied.local_addr().expect("bound").to_string();
    let output = Command::new(env!("CARGO_BIN_EXE_kvasir"))
        .args(["serve", "--listen", &address])
        .output()
        .expect("runs");
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains(&format!("cannot listen on {address}")), "{error}");
}
