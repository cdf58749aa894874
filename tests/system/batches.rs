//! Files and batches: answered like single requests, across a killed gateway, until they are cancelled, with
//! the key of the client that created them, and after all other requests.

use std::io::{Read, Write};
use std::time::Duration;

use crate::support;
use crate::support::site::{Site, official_client};
use crate::support::{Process, Scratch, client, raw, wait_for};
use serde_json::{Value, json};
use tools_mocker::{Fault, FaultKind, MockConfig};

fn asked(gateway: &Process, key: Option<&str>, path: &str, body: Option<&Value>) -> (u16, Value) {
    let (status, _, text) = client(&gateway.address, key, path, body);
    (status, serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}")))
}

fn text_of(gateway: &Process, key: Option<&str>, path: &str) -> String {
    let (status, _, text) = client(&gateway.address, key, path, None);
    assert_eq!(status, 200, "{text}");
    text
}

/// Uploads a file; returns its id.
fn upload(gateway: &Process, key: Option<&str>, content: &str) -> String {
    let authorization = key.map_or(String::new(), |key| format!("authorization: Bearer {key}\r\n"));
    let body = format!(
        "--B\r\ncontent-disposition: form-data; name=\"file\"; filename=\"f.jsonl\"\r\n\r\n{content}\r\n\
         --B\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--B--\r\n"
    );
    let answer = raw(
        &gateway.address,
        &format!(
            "POST /v1/files HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{authorization}content-type: multipart/form-data; boundary=B\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        ),
    );
    let (head, body) = answer.split_once("\r\n\r\n").expect("an answer");
    assert!(head.starts_with("HTTP/1.1 200"), "{answer}");
    let file: Value = serde_json::from_str(body).expect("JSON");
    file["id"].as_str().expect("an id").to_owned()
}

fn lines(count: usize) -> String {
    let line = |number: usize| {
        let messages = json!([{ "role": "user", "content": format!("question {number}") }]);
        let body = json!({ "model": "tiny", "max_tokens": 4, "messages": messages });
        json!({ "custom_id": format!("r{number}"), "method": "POST", "url": "/v1/chat/completions", "body": body })
    };
    (0..count).map(|number| format!("{}\n", line(number))).collect()
}

fn begin(gateway: &Process, key: Option<&str>, file: &str) -> String {
    let body =
        json!({ "input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h" });
    let (status, batch) = asked(gateway, key, "/v1/batches", Some(&body));
    assert_eq!(status, 200, "{batch}");
    format!("/v1/batches/{}", batch["id"].as_str().expect("an id"))
}

fn site(name: &str, more: &str) -> (Scratch, Site) {
    let scratch = Scratch::new(&format!("{name}-database"));
    let file = scratch.0.join("documents.redb").display().to_string();
    let config = format!("[database]\nfile = {file:?}\n{more}");
    let tiny = MockConfig { eos_one_in: 0, ..MockConfig::tiny().expect("a configuration") };
    (scratch, Site::start(name, vec![tiny], &["--worker"], &config))
}

fn slow(site: &Site, millis: u64) {
    let fault = Fault { kind: FaultKind::Slow, probability: 1.0, count: None, millis, tokens: 1 };
    site.mocks[0].fault(fault).expect("a fault");
}

fn counts(batch: &Value) -> [u64; 3] {
    ["total", "completed", "failed"].map(|name| batch["request_counts"][name].as_u64().expect("a count"))
}

#[test]
fn the_official_client_is_content_with_batches() {
    let (_folder, site) = site("batches-client", "");
    official_client("batches_client.py", &site.gateway, 4);
}

#[test]
fn a_batch_goes_on_after_its_gateway_was_killed() {
    let (_folder, mut site) = site("batches-killed", "batch_requests = 4\n");
    slow(&site, 20);
    let file = upload(&site.gateway, None, &lines(400));
    let path = begin(&site.gateway, None, &file);
    let done = |gateway: &Process| counts(&asked(gateway, None, &path, None).1)[1];
    wait_for("the first answers", || done(&site.gateway) >= 64);
    site.gateway.kill();
    site.gateway.restart();
    wait_for("the gateway", || site.ready() == 1);
    let before = done(&site.gateway);
    assert!((64..400).contains(&before), "{before}");
    site.mocks[0].heal();
    wait_for("its end", || asked(&site.gateway, None, &path, None).1["status"] == "completed");
    let (_, batch) = asked(&site.gateway, None, &path, None);
    assert_eq!(counts(&batch), [400, 400, 0], "{batch}");
    let output = format!("/v1/files/{}/content", batch["output_file_id"].as_str().expect("a file"));
    let names: Vec<String> = text_of(&site.gateway, None, &output)
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("JSON")["custom_id"].to_string())
        .collect();
    let expected: Vec<String> = (0..400).map(|number| format!("\"r{number}\"")).collect();
    assert_eq!(names, expected, "each once, in order");
}

#[test]
fn a_cancelled_batch_keeps_what_was_answered() {
    let (_folder, site) = site("batches-cancelled", "batch_requests = 2\n");
    slow(&site, 20);
    let file = upload(&site.gateway, None, &lines(2000));
    let path = begin(&site.gateway, None, &file);
    wait_for("the first answers", || counts(&asked(&site.gateway, None, &path, None).1)[1] >= 64);
    let (status, batch) = asked(&site.gateway, None, &format!("{path}/cancel"), Some(&json!({})));
    assert_eq!((status, &batch["status"]), (200, &json!("cancelling")));
    wait_for("its end", || asked(&site.gateway, None, &path, None).1["status"] == "cancelled");
    let (_, batch) = asked(&site.gateway, None, &path, None);
    let [total, completed, failed] = counts(&batch);
    assert!(total == 2000 && (64..2000).contains(&completed) && failed == 0, "{batch}");
    let output = format!("/v1/files/{}/content", batch["output_file_id"].as_str().expect("a file"));
    assert_eq!(text_of(&site.gateway, None, &output).lines().count() as u64, completed);
    wait_for("the engine to be idle", || site.mocks[0].stats().running == 0);
    // A second cancellation changes nothing.
    let (_, again) = asked(&site.gateway, None, &format!("{path}/cancel"), Some(&json!({})));
    assert_eq!(again["status"], "cancelled");
}

#[test]
fn a_batch_works_with_the_key_of_whoever_began_it() {
    let scratch = Scratch::new("batches-keys");
    let made = |name: &str| router_access::new_key(name, name).expect("a key");
    let (alice, bob) = (made("alice"), made("bob"));
    let keys = scratch.config("keys.toml", &format!("{}\n{}\n", alice.lines, bob.lines));
    let audit = scratch.0.join("audit.jsonl");
    let more = format!("[access]\nkeys_file = {keys:?}\naudit_file = {:?}\n", audit.display().to_string());
    let (_folder, site) = site("batches-keys", &format!("batch_requests = 2\n{more}"));
    let (key, other) = (Some(alice.secret.as_str()), Some(bob.secret.as_str()));
    let file = upload(&site.gateway, key, &lines(3));
    let path = begin(&site.gateway, key, &file);
    wait_for("its end", || asked(&site.gateway, key, &path, None).1["status"] == "completed");
    let log = || std::fs::read_to_string(&audit).unwrap_or_default();
    wait_for("the audit log", || log().lines().filter(|line| line.contains("\"alice\"")).count() == 3);
    // Another tenant does not see the batch.
    assert_eq!(asked(&site.gateway, other, &path, None).0, 404);
    assert_eq!(asked(&site.gateway, other, &format!("{path}/cancel"), Some(&json!({}))).0, 404);
    assert_eq!(asked(&site.gateway, other, &format!("/v1/files/{file}"), None).0, 404);
    assert_eq!(asked(&site.gateway, other, "/v1/files", None).1["data"], json!([]));
    let stolen =
        json!({ "input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h" });
    assert_eq!(asked(&site.gateway, other, "/v1/batches", Some(&stolen)).0, 400);
    // A batch ends with its key.
    slow(&site, 100);
    let file = upload(&site.gateway, key, &lines(500));
    let path = begin(&site.gateway, key, &file);
    wait_for("its start", || asked(&site.gateway, key, &path, None).1["status"] == "in_progress");
    std::fs::write(&keys, format!("{}\n", bob.lines)).expect("the keys");
    wait_for("the key to be void", || client(&site.gateway.address, key, "/v1/files", None).0 == 401);
    wait_for("the engine to be idle", || site.mocks[0].stats().running == 0);
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(site.mocks[0].stats().running, 0);
    std::fs::write(&keys, format!("{}\n{}\n", alice.lines, bob.lines)).expect("the keys");
    wait_for("the key to be good", || client(&site.gateway.address, key, "/v1/files", None).0 == 200);
    let (_, batch) = asked(&site.gateway, key, &path, None);
    assert_eq!(batch["status"], "failed");
    let why = batch["errors"]["data"][0]["message"].as_str().expect("a reason");
    assert!(why.contains("not valid any more"), "{why}");
}

/// Parts of an upload other than the file are not buffered while waiting for the file part.
#[test]
fn an_upload_without_a_file_in_it_ends_early() {
    let (_folder, site) = site("upload-head", "");
    let endless = [
        // Before the first part, in a part's header, and in a part that is not the file.
        String::new(),
        "--B\r\nx: ".to_owned(),
        "--B\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\n".to_owned(),
    ];
    for begin in endless {
        let head = "POST /v1/files HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: multipart/form-data; boundary=B\r\ncontent-length: 190000000\r\n\r\n";
        let mut stream = support::raw_open(&site.gateway.address, &format!("{head}{begin}"));
        let mut sender = stream.try_clone().expect("a socket");
        let sending = std::thread::spawn(move || {
            let piece = vec![b'x'; 1 << 16];
            let mut sent = 0_usize;
            while sent < 180_000_000 && sender.write_all(&piece).is_ok() {
                sent += piece.len();
            }
            sent
        });
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).expect("an answer");
        assert_eq!(&answer, b"HTTP/1.1 400", "{begin}");
        drop(stream);
        let sent = sending.join().expect("sent");
        assert!(sent < 64 << 20, "{sent} bytes were taken");
    }
    assert_eq!(upload(&site.gateway, None, &lines(1)).get(..5), Some("file-"));
}

#[test]
fn metadata_of_a_batch_is_bounded() {
    let (_folder, site) = site("batch-metadata", "");
    let file = upload(&site.gateway, None, &lines(1));
    let batch = |metadata: Value| {
        let body = json!({ "input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h", "metadata": metadata });
        asked(&site.gateway, None, "/v1/batches", Some(&body))
    };
    let long: serde_json::Map<String, Value> =
        (0..16).map(|number| (number.to_string(), "ä".repeat(512).into())).collect();
    let (status, refused) = batch(Value::Object(long));
    assert_eq!((status, &refused["error"]["param"]), (400, &json!("metadata")), "{refused}");
    assert_eq!(batch(json!({ "a": "b" })).0, 200);
}

/// A tenant runs at most two batches at a time.
#[test]
fn a_batch_that_waits_for_its_turn_is_cancelled_at_once() {
    let (_folder, site) = site("batches-waiting", "batch_requests = 2\n");
    slow(&site, 100);
    let file = upload(&site.gateway, None, &lines(2000));
    let running = [begin(&site.gateway, None, &file), begin(&site.gateway, None, &file)];
    let status = |path: &str| asked(&site.gateway, None, path, None).1["status"].clone();
    wait_for("two that run", || running.iter().all(|path| status(path) == "in_progress"));
    let waiting = begin(&site.gateway, None, &file);
    assert_eq!(asked(&site.gateway, None, &format!("{waiting}/cancel"), Some(&json!({}))).0, 200);
    wait_for("its end", || status(&waiting) == "cancelled");
    assert!(running.iter().all(|path| status(path) == "in_progress"), "they go on");
}
