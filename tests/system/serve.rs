//! `kvasir serve` as a newcomer uses it.

mod support;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use support::{
    Cluster, Events, MODEL, Scratch, free_address, get, open, post, prompt, read_stream, wait_for,
};

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

    /// Process ids of the children, from /proc.
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

    // The printed curl line, run as printed.
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

fn place_schema() -> Value {
    json!({
        "type": "object", "properties": {
            "city": {"enum": ["Köln", "Paris"]}, "stars": {"type": "integer", "minimum": 1, "maximum": 5},
        }, "required": ["city", "stars"], "additionalProperties": false,
    })
}

fn assert_is_place(text: &Value) {
    let place: Value = serde_json::from_str(text.as_str().expect("a text")).expect("JSON");
    let members = place.as_object().expect("an object");
    assert!(members.len() == 2 && ["Köln", "Paris"].map(Value::from).contains(&members["city"]), "{place}");
    assert!(members["stars"].as_i64().is_some_and(|stars| (1..=5).contains(&stars)), "{place}");
}

fn asked(address: &str, path: &str, body: &Value) -> (u16, Value) {
    let (status, text) = post(address, path, body).expect("an answer");
    (status, serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}")))
}

/// The built-in model's weights are random: what it says within a schema is the grammar's doing.
#[test]
fn answers_follow_their_schemas_on_every_surface() {
    let serve = Serve::start("schemas", "");
    let format = json!({"type": "json_schema", "json_schema": {"name": "place", "schema": place_schema()}});
    for seed in 0..5 {
        let body = json!({"messages": [{"role": "user", "content": "Where?"}], "max_tokens": 200, "seed": seed,
            "min_tokens": 150, "n": 2, "response_format": format});
        let (status, answer) = asked(&serve.address, "/v1/chat/completions", &body);
        assert_eq!(status, 200, "{answer}");
        for choice in answer["choices"].as_array().expect("choices") {
            assert_eq!(choice["finish_reason"], "stop", "{answer}");
            assert_is_place(&choice["message"]["content"]);
        }
    }
    let body = json!({"prompt": "Where?", "max_tokens": 200, "response_format": format});
    let (status, answer) = asked(&serve.address, "/v1/completions", &body);
    assert_eq!(status, 200, "{answer}");
    assert_is_place(&answer["choices"][0]["text"]);
    let body = json!({"model": MODEL, "input": "Where?", "max_output_tokens": 200,
        "text": {"format": {"type": "json_schema", "name": "place", "schema": place_schema()}}});
    let (status, answer) = asked(&serve.address, "/v1/responses", &body);
    assert_eq!(status, 200, "{answer}");
    assert_is_place(&answer["output"][0]["content"][0]["text"]);
    for schema in [json!(5), json!({"type": "object", "properties": 5}), json!({"type": "nothing"})] {
        let body = json!({"messages": [{"role": "user", "content": "Where?"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "bad", "schema": schema}}});
        let (status, answer) = asked(&serve.address, "/v1/chat/completions", &body);
        assert_eq!((status, &answer["error"]["param"]), (400, &json!("response_format")), "{answer}");
    }
}

#[test]
fn forced_tools_are_called() {
    let serve = Serve::start("forced", "");
    let unit = json!({"type": "object", "properties": {"unit": {"enum": ["c", "f"]}}, "required": ["unit"],
        "additionalProperties": false});
    let tool = |name: &str| json!({"type": "function", "function": {"name": name, "parameters": unit}});
    let body = |choice: Value, seed: u64| {
        json!({"messages": [{"role": "user", "content": "How warm?"}], "max_tokens": 300, "seed": seed,
            "tools": [tool("inside"), tool("outside")], "tool_choice": choice, "parallel_tool_calls": false})
    };
    let is_unit = |arguments: &Value| {
        let arguments: Value = serde_json::from_str(arguments.as_str().expect("a text")).expect("JSON");
        assert!(arguments == json!({"unit": "c"}) || arguments == json!({"unit": "f"}), "{arguments}");
    };
    for seed in 0..4 {
        let (status, answer) = asked(&serve.address, "/v1/chat/completions", &body("required".into(), seed));
        let choice = &answer["choices"][0];
        assert_eq!((status, &choice["finish_reason"]), (200, &json!("tool_calls")), "{answer}");
        let calls = choice["message"]["tool_calls"].as_array().expect("calls");
        let name = calls[0]["function"]["name"].as_str();
        assert!(calls.len() == 1 && matches!(name, Some("inside" | "outside")), "{answer}");
        is_unit(&calls[0]["function"]["arguments"]);
        let named = json!({"type": "function", "function": {"name": "outside"}});
        let (status, answer) = asked(&serve.address, "/v1/chat/completions", &body(named, seed));
        let call = &answer["choices"][0]["message"]["tool_calls"][0]["function"];
        assert_eq!((status, &call["name"]), (200, &json!("outside")), "{answer}");
        is_unit(&call["arguments"]);
    }
    let mut streamed = body("required".into(), 9);
    streamed["stream"] = true.into();
    let mut events =
        Events::new(open(&serve.address, "/v1/chat/completions", &streamed).expect("a connection"));
    assert!(events.head().starts_with("HTTP/1.1 200"));
    let (mut arguments, mut finish) = (String::new(), Value::Null);
    while let Some(data) = events.next_data().filter(|data| data != "[DONE]") {
        let event: Value = serde_json::from_str(&data).expect("JSON");
        let delta = &event["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"];
        arguments.push_str(delta.as_str().unwrap_or_default());
        if event["choices"][0]["finish_reason"].is_string() {
            finish = event["choices"][0]["finish_reason"].clone();
        }
    }
    assert_eq!(finish, "tool_calls");
    is_unit(&arguments.into());
    let message = json!({"model": MODEL, "max_tokens": 300, "messages": [{"role": "user", "content": "How warm?"}],
        "tools": [{"name": "inside", "input_schema": unit}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": true}});
    let (status, answer) = asked(&serve.address, "/v1/messages", &message);
    assert_eq!((status, &answer["stop_reason"]), (200, &json!("tool_use")), "{answer}");
    assert_eq!(
        (&answer["content"][0]["type"], &answer["content"][0]["name"]),
        (&json!("tool_use"), &json!("inside"))
    );
    let mut bad = body("required".into(), 0);
    bad["tools"][0]["function"]["parameters"] =
        json!({"type": "object", "properties": {"a": {"type": "no"}}});
    let (status, answer) = asked(&serve.address, "/v1/chat/completions", &bad);
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("tools")), "{answer}");
    bad["tools"] = json!([]);
    let (status, answer) = asked(&serve.address, "/v1/chat/completions", &bad);
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("tool_choice")), "{answer}");
}

#[test]
fn a_resumed_answer_stays_within_its_schema() {
    let cluster = Cluster::start("resumed", &["both"], "");
    let ask = |prompt: &[u32], resumed: usize| {
        let body = json!({"model": MODEL, "prompt": prompt, "max_tokens": 200, "seed": 11, "return_token_ids": true,
            "structured_outputs": {"json": place_schema()}, "vllm_xargs": {"kvasir_resumed_tokens": resumed}});
        // The worker itself: a gateway says so only of what it resumes.
        let (status, answer) = asked(&cluster.workers[0].address, "/v1/completions", &body);
        let ids: Vec<u32> =
            serde_json::from_value(answer["choices"][0]["token_ids"].clone()).unwrap_or_default();
        (status, ids, answer)
    };
    let start = prompt(3, 40);
    let (status, whole, answer) = ask(&start, 0);
    assert_eq!(status, 200, "{answer}");
    assert_is_place(&answer["choices"][0]["text"]);
    for at in [1, 5, whole.len() - 1] {
        let so_far: Vec<u32> = start.iter().chain(&whole[..at]).copied().collect();
        let (status, rest, answer) = ask(&so_far, at);
        assert_eq!((status, rest.as_slice()), (200, &whole[at..]), "behind {at} tokens: {answer}");
    }
    let (status, _, answer) = ask(&start, 40);
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("vllm_xargs")), "{answer}");
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
