//! A client of the API: sends one request, reads with the given behaviour, and reports how the exchange
//! ended.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

use crate::answers::{Answer, Surface, is_error};
use crate::catalog::Exchange;
use crate::kernel::{self, Nanos};
use crate::model::MODEL_NAME;
use crate::oracle::Oracle;

/// Behaviour of a client.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ClientBehaviour {
    /// API key of the client; `None`: no key.
    pub(crate) key: Option<&'static str>,
    pub(crate) surface: Surface,
    pub(crate) streams: bool,
    /// Milliseconds after which the client disconnects; `None`: it stays.
    pub(crate) leaves_after: Option<u64>,
    /// Pause between two reads, in milliseconds.
    pub(crate) pause: u64,
}

/// Outcome of an exchange.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The answer equals the reference.
    Correct,
    /// Refused with this status and a well-formed error.
    Refused(u16),
    /// A stream with a correct beginning that ended with an error event.
    Broken,
    /// The connection could not be made, or was closed before the end of the answer.
    Cut,
    /// The client disconnected.
    ClientLeft,
    /// The exchange had not ended within the time that clients wait.
    TimedOut,
    /// An outcome that must never occur: the oracle that it violates, and a description.
    Wrong(Oracle, String),
}

/// A finished exchange.
#[derive(Debug, Clone)]
pub(crate) struct ExchangeResult {
    pub(crate) surface: Surface,
    pub(crate) outcome: Outcome,
    /// End of the exchange, in simulated time.
    pub(crate) at: Nanos,
    /// Prompt tokens that were in the engine's cache, if a correct answer reports them.
    pub(crate) cached: Option<u64>,
}

/// Longest time that clients wait for the end. A gateway that is still working ends the answer earlier, or
/// reports an error.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(300);

/// Sends the request, and compares the answer with the reference.
pub(crate) async fn ask(
    address: SocketAddr,
    exchange: &Exchange,
    behaviour: ClientBehaviour,
    id: u64,
) -> ExchangeResult {
    let mut bytes = Vec::with_capacity(4096);
    let talk = talk(address, exchange, behaviour, id, &mut bytes);
    let (limit, end) = match behaviour.leaves_after {
        None => (EXCHANGE_TIMEOUT, Outcome::TimedOut),
        Some(millis) => (Duration::from_millis(millis), Outcome::ClientLeft),
    };
    let mut cached = None;
    let outcome = match tokio::time::timeout(limit, talk).await {
        Ok(true) => judge(&bytes, exchange, behaviour, &mut cached),
        Ok(false) => judge_part(&bytes, exchange, behaviour, Outcome::Cut),
        Err(_) => judge_part(&bytes, exchange, behaviour, end),
    };
    ExchangeResult { surface: behaviour.surface, outcome, at: kernel::now(), cached }
}

/// Sends the request and reads to the end; returns false if there is none.
async fn talk(
    address: SocketAddr,
    exchange: &Exchange,
    behaviour: ClientBehaviour,
    id: u64,
    bytes: &mut Vec<u8>,
) -> bool {
    let body = behaviour.surface.body(exchange, behaviour.streams).to_string();
    let request = format!(
        "POST {} HTTP/1.1\r\nhost: gateway\r\nx-request-id: r{id}\r\nconnection: close\r\n\
         content-type: application/json\r\n{}content-length: {}\r\n\r\n{body}",
        behaviour.surface.path(),
        authorization(behaviour.key),
        body.len()
    );
    let Ok(mut stream) = connect(address, behaviour).await else { return false };
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

/// Receive buffer of a slow reader, in bytes: a few events of a stream, so that the gateway's writes find it full.
const SLOW_READERS_BUFFER: u32 = 1024;

async fn connect(address: SocketAddr, behaviour: ClientBehaviour) -> std::io::Result<TcpStream> {
    if behaviour.pause == 0 {
        return TcpStream::connect(address).await;
    }
    let socket = TcpSocket::new_v4()?;
    socket.set_recv_buffer_size(SLOW_READERS_BUFFER)?;
    socket.connect(address).await
}

fn authorization(key: Option<&str>) -> String {
    key.map_or_else(String::new, |key| format!("authorization: Bearer {key}\r\n"))
}

/// Judges an incomplete answer: the part of a stream that has arrived must be a valid beginning of the reference.
fn judge_part(bytes: &[u8], exchange: &Exchange, behaviour: ClientBehaviour, end: Outcome) -> Outcome {
    let Some((head, content)) = split(bytes) else { return end };
    if behaviour.streams && head.starts_with("HTTP/1.1 200") {
        let answer = Answer::of_stream(behaviour.surface, &dechunk(content).0);
        if let Some(wrong) = answer.violation(exchange) {
            return wrong;
        }
    }
    end
}

fn split(bytes: &[u8]) -> Option<(String, &[u8])> {
    let end = bytes.windows(4).position(|end| end == b"\r\n\r\n")?;
    Some((String::from_utf8_lossy(&bytes[..end]).into_owned(), &bytes[end + 4..]))
}

/// Returns the content of a chunked body, and whether it has its end.
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

fn judge(bytes: &[u8], exchange: &Exchange, behaviour: ClientBehaviour, cached: &mut Option<u64>) -> Outcome {
    let Some((head, content)) = split(bytes) else { return Outcome::Cut };
    let Some(status) = head.get(9..12).and_then(|status| status.parse::<u16>().ok()) else {
        return Outcome::Wrong(Oracle::OneEnd, format!("no status in {head:?}"));
    };
    let is_chunked = head.to_ascii_lowercase().contains("transfer-encoding: chunked");
    let length = head
        .to_ascii_lowercase()
        .lines()
        .find_map(|line| line.strip_prefix("content-length: ")?.parse::<usize>().ok());
    let (content, is_whole) = match (is_chunked, length) {
        (true, _) => dechunk(content),
        (false, Some(length)) => (content.to_vec(), content.len() == length),
        (false, None) => {
            return Outcome::Wrong(Oracle::OneEnd, format!("neither chunks nor a length in {head:?}"));
        }
    };
    if !is_whole {
        return judge_part(bytes, exchange, behaviour, Outcome::Cut);
    }
    if status != 200 {
        return match is_error(behaviour.surface, &content) {
            true => Outcome::Refused(status),
            false => {
                let content = String::from_utf8_lossy(&content);
                Outcome::Wrong(Oracle::OneEnd, format!("status {status} without an error: {content}"))
            }
        };
    }
    let answer = match behaviour.streams {
        true => Answer::of_stream(behaviour.surface, &content),
        false => Answer::of_whole(behaviour.surface, &content),
    };
    *cached = answer.cached;
    answer.judge(exchange)
}

/// Sends a completion request directly to an engine and ignores the outcome.
pub(crate) async fn post_completion(address: SocketAddr, text: &str) {
    let body = json!({"model": MODEL_NAME, "prompt": text, "max_tokens": 1}).to_string();
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
    // A lost event is detected by the following check of the index.
    let _answered = tokio::time::timeout(Duration::from_secs(30), exchange).await;
}

/// Gets a page; `None` without an answer of status 200 in time.
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
