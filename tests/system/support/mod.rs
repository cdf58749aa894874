//! Shared code of the system tests: real `kvasir` processes, and a small blocking HTTP client that can
//! disconnect in the middle of a stream.
#![allow(unreachable_pub, missing_docs)] // A module of a test binary, not an interface.

#[allow(dead_code, reason = "the tests of control/etcd include this file as well, and use the rest")]
pub mod etcd;
pub mod load;
pub mod register;
pub mod site;

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

pub const MODEL: &str = "kvasir-tiny";
const READY_WITHIN: Duration = Duration::from_secs(60);

/// A process that is killed on drop, however the test ends.
pub struct Process {
    pub child: Child,
    pub address: String,
    arguments: Vec<String>,
    variables: Vec<(&'static str, String)>,
}

impl Process {
    pub fn start(arguments: &[&str]) -> Self {
        Self::start_with(arguments, &[])
    }

    /// Starts a process on an address that other processes must know in advance.
    pub fn start_at(address: &str, arguments: &[&str]) -> Self {
        Self::spawn(address.to_owned(), arguments, &[])
    }

    /// Starts a process with additional environment variables.
    pub fn start_with(arguments: &[&str], variables: &[(&'static str, &str)]) -> Self {
        Self::spawn(free_address(), arguments, variables)
    }

    /// Starts a process with additional environment variables, on an address that other processes must know
    /// in advance.
    pub fn start_with_at(address: &str, arguments: &[&str], variables: &[(&'static str, &str)]) -> Self {
        Self::spawn(address.to_owned(), arguments, variables)
    }

    fn spawn(address: String, arguments: &[&str], variables: &[(&'static str, &str)]) -> Self {
        let mut arguments: Vec<String> = arguments.iter().map(|&argument| argument.to_owned()).collect();
        arguments.extend(["--listen".to_owned(), address.clone()]);
        let variables: Vec<(&'static str, String)> =
            variables.iter().map(|&(name, value)| (name, value.to_owned())).collect();
        let child = spawn(&arguments, &variables);
        Self { child, address, arguments, variables }
    }

    pub fn restart(&mut self) {
        self.child = spawn(&self.arguments, &self.variables);
    }

    pub fn signal(&self, name: &str) {
        let status = Command::new("kill").args([name, &self.child.id().to_string()]).status().expect("kill");
        assert!(status.success());
    }

    /// Sends SIGTERM, and waits until the process has exited.
    pub fn stop(&mut self) {
        self.signal("-TERM");
        self.child.wait().expect("its end");
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn kill(&mut self) {
        self.child.kill().expect("kill -9");
        self.child.wait().expect("its end");
    }

    pub fn wait_healthy(&self) {
        wait_for(&format!("{} to be healthy", self.address), || {
            get(&self.address, "/health").is_ok_and(|(status, _)| status == 200)
        });
    }

    pub fn metrics(&self) -> HashMap<String, f64> {
        metrics(&self.address)
    }

    pub fn metric(&self, name: &str) -> f64 {
        let all = self.metrics();
        *all.get(name).unwrap_or_else(|| panic!("no metric {name} among {:?}", all.keys()))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _ended = self.child.wait();
    }
}

fn spawn(arguments: &[String], variables: &[(&'static str, String)]) -> Child {
    // `KVASIR` names another build: costs are measured with a release build.
    let binary = std::env::var_os("KVASIR").unwrap_or_else(|| env!("CARGO_BIN_EXE_kvasir").into());
    Command::new(binary)
        .args(arguments)
        .envs(variables.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .spawn()
        .expect("kvasir starts")
}

/// Returns an address below the system's range of ephemeral ports (`ip_local_port_range`): until a process
/// binds it, and while that process is down, no connection of another test can take it.
pub fn free_address() -> String {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    loop {
        let at = std::process::id() as usize * 64 + NEXT.fetch_add(1, Ordering::SeqCst);
        let address = format!("127.0.0.1:{}", 20_000 + at % 10_000);
        if TcpListener::bind(&address).is_ok() {
            return address;
        }
    }
}

pub fn wait_for(what: &str, mut done: impl FnMut() -> bool) {
    let started = Instant::now();
    while !done() {
        assert!(started.elapsed() < READY_WITHIN, "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A scratch folder that is removed on drop.
pub struct Scratch(pub PathBuf);

impl Scratch {
    pub fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("kvasir-test-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("scratch folder");
        Self(folder)
    }

    pub fn config(&self, name: &str, text: &str) -> String {
        let path = self.0.join(name);
        std::fs::write(&path, text).expect("config file");
        path.display().to_string()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _gone = std::fs::remove_dir_all(&self.0);
    }
}

/// Workers and a gateway in front of them.
pub struct Cluster {
    pub workers: Vec<Process>,
    pub gateway: Process,
    _scratch: Scratch,
}

impl Cluster {
    /// Starts one worker for each role; all processes use `config`.
    pub fn start(name: &str, roles: &[&str], config: &str) -> Self {
        let scratch = Scratch::new(name);
        let common = format!("[transfer]\nsocket_folder = \"{}\"\n", scratch.0.display());
        let config = match config.contains("[transfer]") {
            true => config.replace("[transfer]\n", &common),
            false => format!("{config}\n{common}"),
        };
        let path = scratch.config("kvasir.toml", &config);
        let workers: Vec<Process> = roles
            .iter()
            .map(|role| Process::start(&["worker", "--role", role, "--threads", "1", "--config", &path]))
            .collect();
        workers.iter().for_each(Process::wait_healthy);
        let urls: Vec<String> = workers.iter().map(Process::url).collect();
        let mut arguments = vec!["gateway", "--config", &path];
        arguments.extend(urls.iter().flat_map(|url| ["--worker", url.as_str()]));
        let gateway = Process::start(&arguments);
        let cluster = Self { workers, gateway, _scratch: scratch };
        cluster.wait_ready(roles.len());
        cluster
    }

    pub fn wait_ready(&self, workers: usize) {
        wait_for("the workers to be ready", || {
            let Ok((200, body)) = get(&self.gateway.address, "/kvasir/status") else { return false };
            let status: Value = serde_json::from_str(&body).unwrap_or_default();
            let ready = status["workers"]
                .as_array()
                .map_or(0, |workers| workers.iter().filter(|worker| worker["ready"] == true).count());
            ready == workers
        });
    }

    pub fn complete(&self, body: &Value) -> Value {
        let (status, text) = post(&self.gateway.address, "/v1/completions", body).expect("an answer");
        assert_eq!(status, 200, "{text}");
        serde_json::from_str(&text).expect("JSON")
    }
}

/// Returns a deterministic request for tokens with log-probabilities.
pub fn request(prompt: &[u32], max_tokens: usize) -> Value {
    json!({
        "model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.8, "seed": 42, "ignore_eos": true,
        "logprobs": 3, "return_token_ids": true, "return_tokens_as_token_ids": true,
    })
}

/// Returns printable tokens of the built-in model, drawn from a seed.
pub fn prompt(seed: u64, len: usize) -> Vec<u32> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..len).map(|_| 0x20 + random.u64(..0x5F) as u32).collect()
}

// --- HTTP ---

pub fn get(address: &str, path: &str) -> std::io::Result<(u16, String)> {
    let head = format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
    whole(exchange(address, &head, "")?)
}

pub fn post(address: &str, path: &str, body: &Value) -> std::io::Result<(u16, String)> {
    whole(open(address, path, body)?)
}

/// Returns the status of an answer and its JSON.
pub fn post_json(address: &str, path: &str, body: &Value) -> (u16, Value) {
    let (status, text) = post(address, path, body).expect("an answer");
    (status, serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}")))
}

/// Sends a request; the caller reads the answer.
pub fn open(address: &str, path: &str, body: &Value) -> std::io::Result<TcpStream> {
    let body = body.to_string();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    exchange(address, &head, &body)
}

/// Sends a request with a key; returns the status, the head and the body of its answer. Without a body it is
/// a `GET`.
pub fn client(address: &str, key: Option<&str>, path: &str, body: Option<&Value>) -> (u16, String, String) {
    let authorization = key.map_or(String::new(), |key| format!("authorization: Bearer {key}\r\n"));
    let method = if body.is_some() { "POST" } else { "GET" };
    let body = body.map_or(String::new(), Value::to_string);
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n{authorization}content-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    let mut text = String::new();
    let mut stream = exchange(address, &head, &body).expect("a connection");
    stream.read_to_string(&mut text).expect("an answer");
    let (head, body) = text.split_once("\r\n\r\n").expect("a head");
    let status = head.split(' ').nth(1).and_then(|code| code.parse().ok()).expect("a status");
    (status, head.to_owned(), body.to_owned())
}

/// Sends a raw request; the caller reads the answer.
pub fn raw_open(address: &str, request: &str) -> TcpStream {
    exchange(address, request, "").expect("a connection")
}

/// Sends a raw request; returns the whole answer.
pub fn raw(address: &str, request: &str) -> String {
    let mut answer = Vec::new();
    raw_open(address, request).read_to_end(&mut answer).expect("an answer");
    // Snapshots are not valid text.
    String::from_utf8_lossy(&answer).into_owned()
}

fn exchange(address: &str, head: &str, body: &str) -> std::io::Result<TcpStream> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(Duration::from_secs(120)))?;
    stream.write_all(format!("{head}{body}").as_bytes())?;
    Ok(stream)
}

fn whole(mut stream: TcpStream) -> std::io::Result<(u16, String)> {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    let (head, body) = text.split_once("\r\n\r\n").ok_or(std::io::ErrorKind::UnexpectedEof)?;
    let status =
        head.split(' ').nth(1).and_then(|code| code.parse().ok()).ok_or(std::io::ErrorKind::InvalidData)?;
    let is_chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    Ok((status, if is_chunked { unchunked(body) } else { body.to_owned() }))
}

fn unchunked(mut rest: &str) -> String {
    let mut out = String::new();
    while let Some((size, after)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size.trim(), 16).unwrap_or(0);
        let Some(chunk) = after.get(..size).filter(|_| size > 0) else { break };
        out.push_str(chunk);
        rest = after[size..].trim_start_matches("\r\n");
    }
    out
}

/// The events of a streamed answer, in order. (Chunk sizes are lines that do not start with `data:`.)
pub struct Events(BufReader<TcpStream>);

impl Events {
    pub fn new(stream: TcpStream) -> Self {
        Self(BufReader::new(stream))
    }

    /// Returns the status line and headers, before the first event.
    pub fn head(&mut self) -> String {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") && self.0.read_line(&mut head).is_ok_and(|read| read > 0) {}
        head
    }

    /// Returns the unread rest of the answer, unparsed.
    pub fn rest(&mut self) -> String {
        let mut rest = String::new();
        let _whole = self.0.read_to_string(&mut rest);
        rest
    }

    pub fn next_data(&mut self) -> Option<String> {
        loop {
            let mut line = String::new();
            if self.0.read_line(&mut line).ok()? == 0 {
                return None;
            }
            if let Some(data) = line.strip_prefix("data: ") {
                return Some(data.trim_end().to_owned());
            }
        }
    }
}

/// A stream read to its end: tokens, text, and finish reason.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Streamed {
    pub tokens: Vec<u64>,
    pub text: String,
    pub finish: Option<String>,
    pub is_done: bool,
    pub error: Option<String>,
}

pub fn read_stream(stream: TcpStream, mut after_piece: impl FnMut(usize)) -> Streamed {
    let mut events = Events::new(stream);
    let mut out = Streamed::default();
    while let Some(data) = events.next_data() {
        if data == "[DONE]" {
            out.is_done = true;
            continue;
        }
        let event: Value = serde_json::from_str(&data).expect("an event is JSON");
        if !event["error"].is_null() {
            out.error = Some(event["error"].to_string());
        }
        let choice = &event["choices"][0];
        out.text.push_str(choice["text"].as_str().unwrap_or_default());
        out.tokens.extend(choice["token_ids"].as_array().into_iter().flatten().filter_map(Value::as_u64));
        if let Some(finish) = choice["finish_reason"].as_str() {
            out.finish = Some(finish.to_owned());
        }
        after_piece(out.tokens.len());
    }
    out
}

pub fn metrics(address: &str) -> HashMap<String, f64> {
    let (status, text) = get(address, "/metrics").expect("metrics");
    assert_eq!(status, 200);
    text.lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| {
            let (name, value) = line.rsplit_once(' ')?;
            let name = name.split('{').next()?;
            Some((name.to_owned(), value.parse().ok()?))
        })
        .collect()
}

/// Returns the resources that an idle worker still holds; an empty list means no leak.
pub fn leaks(worker: &str) -> Vec<String> {
    let (status, _) = post(worker, "/reset_prefix_cache", &json!({})).expect("the worker answers");
    assert_eq!(status, 200);
    let held = || {
        let metrics = metrics(worker);
        [
            "kvasir_engine_requests_running",
            "kvasir_engine_requests_waiting",
            "kvasir_engine_kv_slots_used",
            "kvasir_engine_kv_slots_cached",
            "kvasir_transfer_open",
            "kvasir_transfer_quarantined_slots",
            "kvasir_host_leased_slots",
        ]
        .into_iter()
        .filter(|name| metrics[*name] != 0.0)
        .map(|name| format!("{name} = {}", metrics[name]))
        .collect::<Vec<String>>()
    };
    // The cache is cleared on the engine's thread, and offloads take time: polls for a short while.
    let deadline = Instant::now() + Duration::from_secs(2);
    loop {
        let held = held();
        if held.is_empty() || Instant::now() > deadline {
            return held;
        }
        let _again = post(worker, "/reset_prefix_cache", &json!({}));
        std::thread::sleep(Duration::from_millis(20));
    }
}
