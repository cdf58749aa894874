//! A client of the API: asks once, reads as it is told to, and says how the exchange ended.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::catalog::Exchange;
use crate::kernel::{self, Nanos};

/// How a client behaves.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ClientBehaviour {
    /// What it shows to be let in.
    pub(crate) key: Option<&'static str>,
    pub(crate) streams: bool,
    /// Goes away after so many milliseconds.
    pub(crate) leaves_after: Option<u64>,
    /// Pauses so many milliseconds between two reads.
    pub(crate) pause: u64,
}

/// How an exchange ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// As the reference says.
    Right,
    /// Refused with this status and a proper error.
    Refused(u16),
    /// A stream that began rightly and ended with an error event.
    Broken,
    /// The connection could not be made, or was cut before the end.
    Cut,
    /// The client went away.
    Left,
    /// The client has heard nothing for as long as clients wait.
    GaveUp,
    /// Something that must never be.
    Wrong(String),
}

/// An exchange that is over.
#[derive(Debug, Clone)]
pub(crate) struct Ended {
    pub(crate) outcome: Outcome,
    /// When, in simulated time.
    pub(crate) at: Nanos,
    /// Tokens of the prompt that the engine had in its cache, where a right answer says so.
    pub(crate) cached: Option<u64>,
}

/// How long clients wait for the end. An answer that the gateway still works on comes sooner, or ends with an error.
const PATIENCE: Duration = Duration::from_secs(300);

/// Asks, and compares what comes with the reference.
pub(crate) async fn ask(
    address: SocketAddr,
    exchange: &Exchange,
    behaviour: ClientBehaviour,
    id: u64,
) -> Ended {
    let mut bytes = Vec::with_capacity(4096);
    let talk = talk(address, exchange, behaviour, id, &mut bytes);
    let (limit, end) = match behaviour.leaves_after {
        None => (PATIENCE, Outcome::GaveUp),
        Some(millis) => (Duration::from_millis(millis), Outcome::Left),
    };
    let mut cached = None;
    let outcome = match tokio::time::timeout(limit, talk).await {
        Ok(true) => judge(&bytes, exchange, behaviour, &mut cached),
        Ok(false) => judge_part(&bytes, exchange, behaviour, Outcome::Cut),
        Err(_) => judge_part(&bytes, exchange, behaviour, end),
    };
    Ended { outcome, at: kernel::now(), cached }
}

/// Sends the request and reads to the end; false when there is none.
async fn talk(
    address: SocketAddr,
    exchange: &Exchange,
    behaviour: ClientBehaviour,
    id: u64,
    bytes: &mut Vec<u8>,
) -> bool {
    let mut body = json!({
        "model": "tiny", "messages": exchange.messages, "max_tokens": exchange.tokens_max, "stream": behaviour.streams,
        "temperature": 0,
    });
    if behaviour.streams {
        body["stream_options"] = json!({"include_usage": true});
    }
    let body = body.to_string();
    let request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\nx-request-id: r{id}\r\nconnection: close\r\n\
         content-type: application/json\r\n{}content-length: {}\r\n\r\n{body}",
        authorization(behaviour.key),
        body.len()
    );
    let Ok(mut stream) = TcpStream::connect(address).await else { return false };
    if stream.write_all(request.as_bytes()).await.is_err() {
        return false;
    }
    loop {
        match stream.read_buf(bytes).await {
            Ok(0) => return true,
            Ok(_) if behaviour.pause > 0 => tokio::time::sleep(Duration::from_millis(behaviour.pause)).await,
            Ok(_) => {}
            Err(_) => return false,
        }
    }
}

fn authorization(key: Option<&str>) -> String {
    key.map_or_else(String::new, |key| format!("authorization: Bearer {key}\r\n"))
}

/// An answer without its end must be a beginning of the right one.
fn judge_part(bytes: &[u8], exchange: &Exchange, behaviour: ClientBehaviour, end: Outcome) -> Outcome {
    let Some((head, content)) = split(bytes) else { return end };
    if behaviour.streams && head.starts_with("HTTP/1.1 200") {
        let events = Events::read(&dechunk(content).0);
        if !exchange.answer.starts_with(&events.text) {
            return Outcome::Wrong(format!("a cut stream says {:?} for {:?}", events.text, exchange.answer));
        }
    }
    end
}

fn split(bytes: &[u8]) -> Option<(String, &[u8])> {
    let end = bytes.windows(4).position(|end| end == b"\r\n\r\n")?;
    Some((String::from_utf8_lossy(&bytes[..end]).into_owned(), &bytes[end + 4..]))
}

/// The content of a chunked body, and whether it has its end.
fn dechunk(mut content: &[u8]) -> (Vec<u8>, bool) {
    let mut whole = Vec::new();
    loop {
        let Some(line) = content.windows(2).position(|end| end == b"\r\n") else { return (whole, false) };
        let size = std::str::from_utf8(&content[..line]).ok();
        let Some(size) = size.and_then(|size| usize::from_str_radix(size.trim(), 16).ok()) else {
            return (whole, false);
        };
        content = &content[line + 2..];
        if size == 0 {
            return (whole, true);
        }
        if content.len() < size + 2 {
            whole.extend_from_slice(&content[..size.min(content.len())]);
            return (whole, false);
        }
        whole.extend_from_slice(&content[..size]);
        content = &content[size + 2..];
    }
}

#[derive(Default)]
struct Events {
    text: String,
    is_done: bool,
    has_error: bool,
    ids: Vec<Value>,
    beginnings: usize,
    finish_reasons: Vec<String>,
    usage: Option<(u64, u64)>,
    cached: Option<u64>,
    after_done: bool,
    malformed: Option<String>,
}

impl Events {
    fn read(content: &[u8]) -> Self {
        let mut events = Self::default();
        // A line without its end may be half a line.
        let lines = content.split(|byte| *byte == b'\n');
        let count = lines.clone().count();
        for line in lines.take(count.saturating_sub(1)) {
            let Some(data) = line.strip_prefix(b"data: ") else { continue };
            events.after_done |= events.is_done;
            if data == b"[DONE]" {
                events.is_done = true;
                continue;
            }
            let Ok(event) = serde_json::from_slice::<Value>(data) else {
                events.malformed = Some(String::from_utf8_lossy(data).into_owned());
                return events;
            };
            events.take(&event);
        }
        events
    }

    fn take(&mut self, event: &Value) {
        if event["error"].is_object() {
            self.has_error = true;
            return;
        }
        if !self.ids.contains(&event["id"]) {
            self.ids.push(event["id"].clone());
        }
        if let (Some(prompt), Some(completion)) =
            (event["usage"]["prompt_tokens"].as_u64(), event["usage"]["completion_tokens"].as_u64())
        {
            self.usage = Some((prompt, completion));
            self.cached = cached(event);
        }
        let choice = &event["choices"][0];
        self.beginnings += usize::from(choice["delta"]["role"].is_string());
        self.text.push_str(choice["delta"]["content"].as_str().unwrap_or_default());
        if let Some(reason) = choice["finish_reason"].as_str() {
            self.finish_reasons.push(reason.to_owned());
        }
    }
}

/// What an answer says of its prompt's tokens.
fn cached(answer: &Value) -> Option<u64> {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64()
}

fn judge(bytes: &[u8], exchange: &Exchange, behaviour: ClientBehaviour, cached: &mut Option<u64>) -> Outcome {
    let Some((head, content)) = split(bytes) else { return Outcome::Cut };
    let Some(status) = head.get(9..12).and_then(|status| status.parse::<u16>().ok()) else {
        return Outcome::Wrong(format!("no status in {head:?}"));
    };
    let is_chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    let length = head
        .to_ascii_lowercase()
        .lines()
        .find_map(|line| line.strip_prefix("content-length: ")?.parse::<usize>().ok());
    let (content, is_whole) = match (is_chunked, length) {
        (true, _) => dechunk(content),
        (false, Some(length)) => (content.to_vec(), content.len() == length),
        (false, None) => return Outcome::Wrong(format!("neither chunks nor a length in {head:?}")),
    };
    if !is_whole {
        return judge_part(bytes, exchange, behaviour, Outcome::Cut);
    }
    if status != 200 {
        let message = serde_json::from_slice::<Value>(&content).ok();
        // Engines' own errors are passed on as they are, and some makes have the message at the top.
        let is_error =
            |message: &Value| message["error"]["message"].is_string() || message["message"].is_string();
        return match message.filter(is_error) {
            Some(_) => Outcome::Refused(status),
            None => Outcome::Wrong(format!(
                "status {status} without an error: {}",
                String::from_utf8_lossy(&content)
            )),
        };
    }
    match behaviour.streams {
        true => judge_stream(&content, exchange, cached),
        false => judge_whole(&content, exchange, cached),
    }
}

fn judge_whole(content: &[u8], exchange: &Exchange, cached_tokens: &mut Option<u64>) -> Outcome {
    let Ok(answer) = serde_json::from_slice::<Value>(content) else {
        return Outcome::Wrong(format!("an answer that is no JSON: {}", String::from_utf8_lossy(content)));
    };
    *cached_tokens = cached(&answer);
    let choice = &answer["choices"][0];
    let usage = (answer["usage"]["prompt_tokens"].as_u64(), answer["usage"]["completion_tokens"].as_u64());
    let wanted = (Some(exchange.prompt_tokens), Some(exchange.completion_tokens));
    let text = choice["message"]["content"].as_str();
    let reason = choice["finish_reason"].as_str();
    if text != Some(exchange.answer.as_str()) {
        return Outcome::Wrong(format!("the answer is {text:?} for {:?}", exchange.answer));
    }
    if usage != wanted || reason != Some(exchange.finish_reason.as_str()) {
        return Outcome::Wrong(format!("usage {usage:?} for {wanted:?}, finish_reason {reason:?}"));
    }
    Outcome::Right
}

fn judge_stream(content: &[u8], exchange: &Exchange, cached_tokens: &mut Option<u64>) -> Outcome {
    let events = Events::read(content);
    *cached_tokens = events.cached;
    if !exchange.answer.starts_with(&events.text) {
        return Outcome::Wrong(format!("a stream says {:?} for {:?}", events.text, exchange.answer));
    }
    if let Some(malformed) = events.malformed {
        return Outcome::Wrong(format!("an event that is no JSON: {malformed}"));
    }
    if events.ids.len() > 1 || events.beginnings > 1 || events.finish_reasons.len() > 1 || events.after_done {
        return Outcome::Wrong(format!(
            "a stream with ids {:?}, {} beginnings, ends {:?}, events after the end: {}",
            events.ids, events.beginnings, events.finish_reasons, events.after_done
        ));
    }
    if events.has_error {
        return if events.finish_reasons.is_empty() {
            Outcome::Broken
        } else {
            Outcome::Wrong("an error after the end of the answer".to_owned())
        };
    }
    if !events.is_done {
        return Outcome::Wrong("a stream that ends without its end".to_owned());
    }
    let wanted = Some((exchange.prompt_tokens, exchange.completion_tokens));
    if events.text != exchange.answer
        || events.usage != wanted
        || events.finish_reasons != [exchange.finish_reason.as_str()]
    {
        return Outcome::Wrong(format!(
            "a whole stream says {:?} for {:?}, usage {:?} for {wanted:?}, ends {:?}",
            events.text, exchange.answer, events.usage, events.finish_reasons
        ));
    }
    Outcome::Right
}

/// Sends a request of its own to an engine, whatever comes of it.
pub(crate) async fn nudge(address: SocketAddr, text: &str) {
    let body = json!({"model": "tiny", "prompt": text, "max_tokens": 1}).to_string();
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: engine\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    );
    let exchange = async {
        let mut stream = TcpStream::connect(address).await.ok()?;
        stream.write_all(request.as_bytes()).await.ok()?;
        stream.read_to_end(&mut Vec::new()).await.ok()
    };
    // A lost event is found by the check of the index that follows.
    let _answered = tokio::time::timeout(Duration::from_secs(30), exchange).await;
}

/// Gets a page; `None` when there is no answer with status 200 in time.
pub(crate) async fn get(address: SocketAddr, path: &str, key: Option<&str>) -> Option<String> {
    let request =
        format!("GET {path} HTTP/1.1\r\nhost: node\r\n{}connection: close\r\n\r\n", authorization(key));
    let exchange = async {
        let mut stream = TcpStream::connect(address).await.ok()?;
        stream.write_all(request.as_bytes()).await.ok()?;
        let mut bytes = Vec::new();
        stream.read_to_end(&mut bytes).await.ok()?;

        let (head, content) = split(&bytes)?;
        let is_chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
        let content = if is_chunked { dechunk(content).0 } else { content.to_vec() };
        head.starts_with("HTTP/1.1 200").then(|| String::from_utf8_lossy(&content).into_owned())
    };
    tokio::time::timeout(Duration::from_secs(5), exchange).await.ok()?
}
