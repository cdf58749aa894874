//! The guardrail service: the texts that it gets, and the handling of requests and answers that it changes,
//! blocks or does not answer.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use crate::support;
use crate::support::site::Site;
use crate::support::{Process, Scratch, client, post};
use serde_json::{Value, json};
use tools_mocker::MockConfig;

/// Requests that the service received, with their authorization.
type Asked = Arc<Mutex<Vec<(Value, String)>>>;

/// A service that answers as `verdict` decides; without a verdict it answers with an error.
fn service(verdict: impl Fn(&Value) -> Option<Value> + Send + Sync + 'static) -> (String, Asked) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    let (asked, verdict) = (Asked::default(), Arc::new(verdict));
    let seen = Arc::clone(&asked);
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let (seen, verdict) = (Arc::clone(&seen), Arc::clone(&verdict));
            std::thread::spawn(move || while answer(&stream, &seen, &*verdict).is_some() {});
        }
    });
    (url, asked)
}

/// Answers a request; `None` if the connection has ended.
fn answer(mut stream: &TcpStream, seen: &Asked, verdict: &dyn Fn(&Value) -> Option<Value>) -> Option<()> {
    let mut reader = BufReader::new(stream);
    let (mut head, mut length, mut authorization) = (String::new(), 0, String::new());
    reader.read_line(&mut head).ok().filter(|bytes| *bytes > 0)?;
    assert!(head.starts_with("POST /beta/litellm_basic_guardrail_api "), "{head}");
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim().split_once(": ") else { break };
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = value.parse().expect("a length"),
            "authorization" => authorization = value.to_owned(),
            _ => {}
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let body: Value = serde_json::from_slice(&body).expect("JSON");
    let told = verdict(&body);
    seen.lock().expect("no panic").push((body, authorization));
    let (status, told) = told.map_or(("500 Oops", json!({})), |told| ("200 OK", told));
    let told = told.to_string();
    write!(stream, "HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{told}", told.len()).ok()
}

fn site(name: &str, url: &str, more: &str) -> Site {
    let config = format!("[guardrail]\nurl = {url:?}\ntimeout = \"2s\"\n{more}");
    let tiny = MockConfig { eos_one_in: 0, ..MockConfig::tiny().expect("a configuration") };
    Site::start(name, vec![tiny], &["--worker"], &config)
}

fn asked(gateway: &Process, path: &str, body: &Value) -> (u16, Value) {
    let (status, _, text) = client(&gateway.address, None, path, Some(body));
    (status, serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}")))
}

fn chat(text: &str) -> Value {
    json!({ "model": "tiny", "max_tokens": 8, "messages": [{ "role": "user", "content": text }] })
}

fn metric(site: &Site, name: &str) -> f64 {
    site.gateway.metric(&format!("kvasir_gateway_guardrail_{name}_total"))
}

#[test]
fn requests_and_answers_of_all_surfaces_are_checked() {
    let (url, seen) = service(|asked| {
        let is_bad = asked["texts"]
            .as_array()?
            .iter()
            .any(|text| text.as_str().is_some_and(|text| text.contains("bad")));
        Some(match is_bad {
            true => json!({ "action": "BLOCKED", "blocked_reason": "It says bad." }),
            false => json!({ "action": "NONE" }),
        })
    });
    let site = site("guardrail", &url, "");
    let surfaces = [
        ("/v1/chat/completions", chat("WORD")),
        ("/v1/completions", json!({ "model": "tiny", "max_tokens": 8, "prompt": "WORD" })),
        (
            "/v1/messages",
            json!({ "model": "tiny", "max_tokens": 8, "messages": [{ "role": "user", "content": "WORD" }] }),
        ),
        ("/v1/responses", json!({ "model": "tiny", "max_output_tokens": 8, "input": "WORD" })),
    ];
    for (path, body) in &surfaces {
        for stream in [false, true] {
            seen.lock().expect("no panic").clear();
            let with = |word: &str| {
                let mut body: Value =
                    serde_json::from_str(&body.to_string().replace("WORD", word)).expect("JSON");
                body["stream"] = stream.into();
                body
            };
            let (status, text) = post(&site.gateway.address, path, &with("good")).expect("an answer");
            assert_eq!(status, 200, "{path}: {text}");
            let checks: Vec<Value> =
                seen.lock().expect("no panic").iter().map(|(asked, _)| asked.clone()).collect();
            let kinds: Vec<&str> = checks.iter().filter_map(|asked| asked["input_type"].as_str()).collect();
            assert_eq!(kinds, ["request", "response"], "{path} {stream}");
            assert_eq!(checks[0]["texts"], json!(["good"]), "{path}");
            let answered = checks[1]["texts"][0].as_str().expect("a text");
            assert!(!answered.is_empty(), "{path}: the answer as a whole");
            assert_eq!(checks[0]["litellm_call_id"], checks[1]["litellm_call_id"]);
            let (status, text) = post(&site.gateway.address, path, &with("a bad thing")).expect("an answer");
            assert!(status == 400 && text.contains("It says bad."), "{path}: {status} {text}");
        }
    }
    assert_eq!(metric(&site, "blocked"), 8.0);
    // Contents that cannot be read do not bypass the guardrail.
    let ids = json!({ "model": "tiny", "max_tokens": 8, "prompt": [1, 2, 3] });
    let (status, refused) = asked(&site.gateway, "/v1/completions", &ids);
    assert_eq!((status, &refused["error"]["param"]), (400, &json!("prompt")));
    let hidden = json!({ "model": "tiny", "max_tokens": 8, "messages": [
        { "role": "user", "content": [{ "type": "text", "text": "x" }, { "type": "text", "text": "bad" }] }] });
    assert_eq!(asked(&site.gateway, "/v1/chat/completions", &hidden).0, 400);
    // Engines accept these; the gateway cannot parse them, so it could not check their contents.
    seen.lock().expect("no panic").clear();
    for odd in ["1e999", "\"\\ud800\""] {
        let body = format!(
            "{{\"model\":\"tiny\",\"max_tokens\":4,\"messages\":[{{\"role\":\"user\",\"content\":\"a bad thing\",\"x\":{odd}}}]}}"
        );
        let answer = support::raw(
            &site.gateway.address,
            &format!(
                "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            ),
        );
        assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("cannot be checked"), "{answer}");
    }
    assert!(seen.lock().expect("no panic").is_empty());
}

#[test]
fn an_answer_is_blocked_and_paid_for() {
    let (url, seen) = service(|asked| {
        Some(match asked["input_type"].as_str() {
            Some("response") => json!({ "action": "BLOCKED" }),
            _ => json!({ "action": "NONE" }),
        })
    });
    let site = site("guardrail-blocks", &url, "");
    let (status, answer) = asked(&site.gateway, "/v1/chat/completions", &chat("x"));
    assert_eq!((status, &answer["error"]["code"]), (400, &json!("content_filter")), "{answer}");
    let mut body = chat("x");
    body["stream"] = true.into();
    let (status, text) = post(&site.gateway.address, "/v1/chat/completions", &body).expect("an answer");
    assert!(status == 200 && text.contains("content_filter") && !text.contains("\"delta\""), "{text}");
    support::wait_for("both to be counted", || {
        site.gateway.metric("kvasir_gateway_generated_tokens_total") == 16.0
    });
    let path = site.scratch.0.join("kvasir.toml").display().to_string();
    let worker = site.mocks[0].url();
    let arguments = ["gateway", "--config", &path, "--worker", &worker];
    let keyed = Process::start_with(&arguments, &[("KVASIR_GUARDRAIL_KEY", "guard-secret")]);
    keyed.wait_healthy();
    assert_eq!(asked(&keyed, "/v1/chat/completions", &chat("x")).0, 400);
    let shown: Vec<String> = seen.lock().expect("no panic").iter().map(|(_, shown)| shown.clone()).collect();
    assert_eq!(shown, ["", "", "", "", "Bearer guard-secret", "Bearer guard-secret"]);
}

#[test]
fn a_verdict_that_does_not_fit_is_a_failure() {
    for verdict in [
        json!({ "action": "GUARDRAIL_INTERVENED", "texts": ["one", "too", "many"] }),
        json!({ "action": "GUARDRAIL_INTERVENED" }),
        json!({ "action": "GUARDRAIL_INTERVENED", "texts": ["x"], "images": ["y"] }),
        json!({ "action": "SOMETHING_ELSE" }),
        json!({}),
    ] {
        let (url, _seen) = service(move |_| Some(verdict.clone()));
        let site = site("guardrail-odd", &url, "");
        let (status, answer) = asked(&site.gateway, "/v1/chat/completions", &chat("x"));
        assert_eq!((status, metric(&site, "failed"), metric(&site, "changed")), (503, 1.0, 0.0), "{answer}");
    }
}

#[test]
fn texts_are_replaced_both_ways() {
    let (url, _seen) = service(|asked| {
        let texts = asked["texts"].as_array()?.iter().map(|text| match asked["input_type"].as_str() {
            Some("request") => text.as_str().unwrap_or_default().replace("secret", "hidden").into(),
            _ => json!("[checked]"),
        });
        Some(json!({ "action": "GUARDRAIL_INTERVENED", "texts": texts.collect::<Vec<Value>>() }))
    });
    let site = site("guardrail-changes", &url, "");
    let (status, answer) = asked(&site.gateway, "/v1/chat/completions", &chat("my secret"));
    assert_eq!((status, &answer["choices"][0]["message"]["content"]), (200, &json!("[checked]")));
    // The engine got the replaced text: the token count matches it.
    assert_eq!(
        answer["usage"]["prompt_tokens"],
        site.direct(0, &chat("my hidden"))["usage"]["prompt_tokens"]
    );
    let mut body = chat("my secret");
    body["stream"] = true.into();
    body["logprobs"] = true.into();
    let (status, text) = post(&site.gateway.address, "/v1/chat/completions", &body).expect("an answer");
    assert_eq!(status, 200);
    let events = text.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]");
    let content: String = events
        .map(|data| serde_json::from_str::<Value>(data).expect("JSON"))
        .filter_map(|event| event["choices"][0]["delta"]["content"].as_str().map(str::to_owned))
        .collect();
    assert_eq!(content, "[checked]");
    assert!(!text.contains("logprob"), "the tokens that were replaced: {text}");
    assert!(text.trim_end().ends_with("data: [DONE]") && text.contains("\"finish_reason\""), "{text}");
    let (_, message) = asked(&site.gateway, "/v1/messages", &chat("my secret"));
    assert_eq!(message["content"][0]["text"], "[checked]");
    assert_eq!(metric(&site, "changed"), 6.0);
}

#[test]
fn what_is_not_checked_is_refused_unless_it_may_pass() {
    for (on_failure, expected) in [("refuse", 503), ("pass", 200)] {
        let (url, seen) = service(|_| None);
        let more = format!("on_failure = {on_failure:?}\ncheck = \"requests\"\n");
        let site = site(&format!("guardrail-{on_failure}"), &url, &more);
        let (status, answer) = asked(&site.gateway, "/v1/chat/completions", &chat("x"));
        assert_eq!(status, expected, "{answer}");
        assert_eq!((metric(&site, "failed"), seen.lock().expect("no panic").len()), (1.0, 1));
    }
    // The service is unreachable, and without a request there is nothing to check.
    let closed = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("bound");
    let site = site("guardrail-gone", &format!("http://{closed}"), "check = \"answers\"\n");
    let (status, answer) = asked(&site.gateway, "/v1/chat/completions", &chat("x"));
    assert_eq!(status, 503, "{answer}");
    let tokens = json!({ "model": "tiny", "prompt": "x" });
    assert_eq!(asked(&site.gateway, "/tokenize", &tokens).0, 200);
}

#[test]
fn what_is_stored_and_what_is_heard_are_replaced_too() {
    let (url, seen) = service(|asked| {
        let replaced = |text: &Value| text.as_str().unwrap_or_default().replace("secret", "hidden");
        let texts: Vec<String> = asked["texts"].as_array()?.iter().map(replaced).collect();
        Some(json!({ "action": "GUARDRAIL_INTERVENED", "texts": texts }))
    });
    let folder = Scratch::new("guardrail-stored-database");
    let file = folder.0.join("documents.redb").display().to_string();
    let site = site("guardrail-stored", &url, &format!("[database]\nfile = {file:?}\n"));
    let request = json!({ "model": "tiny", "max_output_tokens": 4, "input": [
        { "role": "user", "content": "my secret" },
        { "role": "user", "content": [{ "type": "input_text", "text": "a secret part" }] }] });
    let (status, response) = asked(&site.gateway, "/v1/responses", &request);
    assert_eq!((status, &response["store"]), (200, &json!(true)), "{response}");
    let path = format!("/v1/responses/{}/input_items?order=asc", response["id"].as_str().expect("an id"));
    let (status, _, items) = client(&site.gateway.address, None, &path, None);
    assert!(status == 200 && !items.contains("secret"), "{items}");
    assert!(items.contains("my hidden") && items.contains("a hidden part"), "{items}");
    // A recording itself is not checked, but its prompt and its transcript are.
    for (format, wanted) in [("json", "prompt=hidden"), ("text", "prompt=hidden")] {
        seen.lock().expect("no panic").clear();
        let field = |name: &str, text: &str| {
            format!("--B\r\ncontent-disposition: form-data; name=\"{name}\"\r\n\r\n{text}\r\n")
        };
        let form = format!(
            "{}{}{}--B\r\ncontent-disposition: form-data; name=\"file\"; filename=\"secret.wav\"\r\n\r\nRIFF\r\n--B--\r\n",
            field("model", "tiny"),
            field("prompt", "secret"),
            field("response_format", format)
        );
        let answer = support::raw(
            &site.gateway.address,
            &format!(
                "POST /v1/audio/transcriptions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: multipart/form-data; boundary=B\r\ncontent-length: {}\r\n\r\n{form}",
                form.len()
            ),
        );
        assert!(answer.starts_with("HTTP/1.1 200") && answer.contains(wanted), "{answer}");
        // The mock engine answers with the file's name, as a model answers with the words that it hears.
        assert!(answer.contains("of hidden.wav") && !answer.contains("secret"), "{answer}");
        assert_eq!(seen.lock().expect("no panic").len(), 2, "{format}");
    }
    // Contents larger than a verdict could repeat are refused, whatever the setting for contents that cannot
    // be checked.
    let (status, refused) = asked(&site.gateway, "/v1/chat/completions", &chat(&"x".repeat(3 << 20)));
    assert_eq!((status, &refused["error"]["code"]), (413, &json!("content_too_large")));
}
