//! Mock engines and a gateway in front of them.

use std::path::PathBuf;

use serde_json::{Value, json};
use tools_mocker::{Dialect, Mock, MockConfig, Role};

use super::{Events, Process, Scratch, get, open, post_json, wait_for};

pub fn model_folder() -> String {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/golden/llama");
    folder.display().to_string()
}

/// Mock engines and a gateway in front of them.
pub struct Site {
    pub runtime: tokio::runtime::Runtime,
    pub mocks: Vec<Mock>,
    pub gateway: Process,
    pub scratch: Scratch,
}

pub fn mock(dialect: Dialect, role: Role, events: bool) -> MockConfig {
    let tokenizer = router_tokens::ModelText::from_folder(std::path::Path::new(&model_folder()));
    MockConfig {
        dialect,
        role,
        events,
        eos_one_in: 0,
        tokenizer: tokenizer.expect("the fixture's tokenizer"),
        ..MockConfig::tiny().expect("a configuration")
    }
}

impl Site {
    /// Starts a gateway with mock engines as arguments of `flags`, in order; `"URL1"` in the configuration
    /// stands for the URL of the second one.
    pub fn start(name: &str, mocks: Vec<MockConfig>, flags: &[&str], config: &str) -> Self {
        let is_named = |at: usize| at < flags.len() || config.contains(&format!("URL{at}\""));
        let named = (0..mocks.len()).filter(|at| is_named(*at)).count();
        Self::start_some(name, mocks, flags, config, named)
    }

    /// Starts a site of which only this many workers will ever be ready.
    pub fn start_some(
        name: &str,
        mocks: Vec<MockConfig>,
        flags: &[&str],
        config: &str,
        ready: usize,
    ) -> Self {
        let scratch = Scratch::new(name);
        let is_tiny = mocks.iter().all(|mock| mock.tokenizer.eos_ids == [257]);
        let folder = if is_tiny { String::new() } else { model_folder() };
        let folder = format!("[gateway]\nhealth_interval = \"100ms\"\nmodel_folder = {folder:?}\n");
        let config = match config.contains("[gateway]") {
            true => config.replace("[gateway]\n", &folder),
            false => format!("{folder}{config}"),
        };
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let mocks: Vec<Mock> = mocks
            .into_iter()
            .map(|config| {
                let listen = "127.0.0.1:0".parse().expect("an address");
                runtime.block_on(Mock::start(config, listen)).expect("a mock engine")
            })
            .collect();
        let urls: Vec<String> = mocks.iter().map(Mock::url).collect();
        let mut config = config.replace("FIRST", &urls[0]);
        for (at, url) in urls.iter().enumerate() {
            config = config.replace(&format!("URL{at}\""), &format!("{url}\""));
        }
        let path = scratch.config("kvasir.toml", &config);
        let mut arguments = vec!["gateway", "--config", &path];
        for (url, flag) in urls.iter().zip(flags) {
            arguments.extend([*flag, url.as_str()]);
        }
        let gateway = Process::start(&arguments);
        let site = Self { runtime, mocks, gateway, scratch };
        wait_for("the engines to be ready", || site.ready() == ready);
        site
    }

    pub fn ready(&self) -> usize {
        // An open gateway answers without a key; a gateway with keys is queried by its own test.
        match get(&self.gateway.address, "/kvasir/status") {
            Ok((200, body)) => {
                let status: Value = serde_json::from_str(&body).unwrap_or_default();
                let workers = status["workers"].as_array().cloned().unwrap_or_default();
                workers.iter().filter(|worker| worker["ready"] == true).count()
            }
            Ok((401 | 403, _))
                if get(&self.gateway.address, "/health").is_ok_and(|(status, _)| status == 200) =>
            {
                self.mocks.len()
            }
            _ => 0,
        }
    }

    /// Sends batches of eight concurrent requests until `is_so` holds. A single request may always be routed
    /// to the same engine.
    pub fn ask_until(&self, what: &str, is_so: impl Fn(&Self) -> bool) {
        // Prompts that no previous call used.
        let asked: u64 = self.mocks.iter().map(|mock| mock.stats().requests).sum();
        let mut seed = 100_000 + asked as usize;
        wait_for(what, || {
            std::thread::scope(|scope| {
                for number in 0..8 {
                    let address = &self.gateway.address;
                    scope.spawn(move || assert_eq!(ask(address, &chat(8, seed + number, 24)).0, 200));
                }
            });
            seed += 8;
            is_so(self)
        });
    }

    pub fn chat(&self, body: &Value) -> (u16, Value) {
        ask(&self.gateway.address, body)
    }

    pub fn direct(&self, which: usize, body: &Value) -> Value {
        let url = self.mocks[which].url();
        let (status, answer) = ask(url.trim_start_matches("http://"), body);
        assert_eq!(status, 200, "{answer}");
        answer
    }
}

/// Runs a script with the official OpenAI client against a gateway; `things` checks must pass. Prints a
/// message and skips without that client.
pub fn official_client(script: &str, gateway: &Process, things: usize) {
    let asked = std::process::Command::new("python3").args(["-c", "import openai"]).output();
    if !asked.is_ok_and(|output| output.status.success()) {
        eprintln!("SKIPPED {script}: `python3 -c 'import openai'` fails here (pip install openai)");
        return;
    }
    let script = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/client").join(script);
    let mut command = std::process::Command::new("python3");
    let output = command.arg(script).args([&gateway.url(), "tiny"]).output().expect("python3 runs");
    let printed = String::from_utf8_lossy(&output.stdout);
    println!("{printed}");
    assert!(output.status.success(), "{printed}\n{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(printed.matches("ok: ").count(), things, "{printed}");
}

pub fn ask(address: &str, body: &Value) -> (u16, Value) {
    post_json(address, "/v1/chat/completions", body)
}

pub fn chat(words: usize, seed: usize, max_tokens: usize) -> Value {
    let text: Vec<String> = (0..words).map(|at| format!("word{}", (at * 7 + seed * 13) % 97)).collect();
    json!({"model": "tiny", "messages": [{"role": "user", "content": text.join(" ")}],
        "max_tokens": max_tokens, "temperature": 0})
}

/// Returns the text of a streamed chat, or the error that ended it.
pub fn streamed(address: &str, body: &Value) -> Result<(String, String), String> {
    let mut body = body.clone();
    body["stream"] = true.into();
    let mut events = Events::new(open(address, "/v1/chat/completions", &body).expect("a connection"));
    let head = events.head();
    assert!(head.starts_with("HTTP/1.1 200"), "{head}{}", events.rest());
    let (mut text, mut id, mut is_done, mut roles) = (String::new(), String::new(), false, 0);
    while let Some(data) = events.next_data() {
        if data == "[DONE]" {
            is_done = true;
            continue;
        }
        let event: Value = serde_json::from_str(&data).expect("an event is JSON");
        if event["error"].is_object() {
            return Err(event["error"]["message"].as_str().unwrap_or_default().to_owned());
        }
        if id.is_empty() {
            id = event["id"].as_str().unwrap_or_default().to_owned();
        }
        assert_eq!(event["id"], id.as_str(), "one answer has one id");
        assert!(event.get("usage").is_none_or(Value::is_null), "nobody asked for a usage: {event}");
        roles += usize::from(event["choices"][0]["delta"]["role"].is_string());
        text.push_str(event["choices"][0]["delta"]["content"].as_str().unwrap_or_default());
    }
    assert!(is_done && roles == 1, "done: {is_done}, roles: {roles}");
    Ok((text, id))
}
