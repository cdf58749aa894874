//! A client with little overhead: requests are prepared beforehand, sockets are plain, and answers are read
//! only for their end.
//!
//! Open loop: each request has a due time, independent of earlier ones, and is timed from it, so that a stall
//! counts for every request behind it. If the client itself is late by less than its timer's two milliseconds,
//! the request is timed from when it was sent. Closed loop: each connection sends as soon as it has its answer.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::measure::Latencies;

/// Requests with different prompts, used in turn.
pub(super) struct Requests(Vec<Vec<u8>>);

impl Requests {
    /// Creates chats of about `bytes` bytes with `max_tokens` output tokens; the first half of each prompt is
    /// common to all.
    pub(super) fn chats(model: &str, bytes: usize, max_tokens: usize, stream: bool, count: usize) -> Self {
        let words = |from: usize, bytes: usize| {
            let mut text = String::with_capacity(bytes + 8);
            for number in from.. {
                if text.len() >= bytes {
                    break;
                }
                text.push_str("word");
                text.push_str(&(number % 977).to_string());
                text.push(' ');
            }
            text
        };
        let shared = words(0, bytes / 2);
        let request = |number: usize| {
            let own = words(number * 7919, bytes.saturating_sub(bytes / 2 + 200));
            let body = format!(
                "{{\"model\":\"{model}\",\"messages\":[{{\"role\":\"system\",\"content\":\"{shared}\"}},\
                 {{\"role\":\"user\",\"content\":\"{number} {own}\"}}],\"max_tokens\":{max_tokens},\"stream\":{stream}}}"
            );
            let head = format!(
                "POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
                body.len()
            );
            [head.into_bytes(), body.into_bytes()].concat()
        };
        Self((0..count).map(request).collect())
    }

    fn get(&self, turn: u64) -> &[u8] {
        &self.0[turn as usize % self.0.len()]
    }
}

struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
    have: usize,
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|window| window == what)
}

impl Connection {
    async fn open(address: &str) -> Result<Self> {
        let stream = TcpStream::connect(address).await.with_context(|| format!("connecting to {address}"))?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, buffer: vec![0; 64 << 10], have: 0 })
    }

    async fn more(&mut self) -> Result<()> {
        if self.have == self.buffer.len() {
            self.buffer.resize(self.have * 2, 0);
        }
        let count = self.stream.read(&mut self.buffer[self.have..]).await?;
        if count == 0 {
            bail!("the connection was closed in the middle of an answer");
        }
        self.have += count;
        Ok(())
    }

    /// Sends a request and reads its answer to the end. Returns the arrival time of the first body byte.
    async fn exchange(&mut self, request: &[u8]) -> Result<Instant> {
        self.stream.write_all(request).await?;
        self.have = 0;
        let head = loop {
            self.more().await?;
            if let Some(at) = find(&self.buffer[..self.have], b"\r\n\r\n") {
                break at + 4;
            }
        };
        let text = std::str::from_utf8(&self.buffer[..head])?;
        if !text.starts_with("HTTP/1.1 200") {
            bail!("not 200: {}", String::from_utf8_lossy(&self.buffer[..self.have]));
        }
        let length = text.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().ok())?
        });
        let mut first = (self.have > head).then(Instant::now);
        loop {
            let body = &self.buffer[head..self.have];
            let is_whole = match length {
                Some(length) => body.len() >= length,
                None => body.ends_with(b"\r\n0\r\n\r\n") || body == b"0\r\n\r\n",
            };
            if is_whole {
                return Ok(first.unwrap_or_else(Instant::now));
            }
            self.more().await?;
            first.get_or_insert_with(Instant::now);
        }
    }
}

/// Returns the answers per second of `connections` connections that are never idle.
pub(super) async fn closed_loop(
    address: &str,
    requests: &Arc<Requests>,
    connections: usize,
    period: Duration,
) -> Result<f64> {
    let turn = Arc::new(AtomicU64::new(0));
    let mut tasks = Vec::with_capacity(connections);
    let mut opened = Vec::with_capacity(connections);
    for _ in 0..connections {
        opened.push(Connection::open(address).await?);
    }
    let start = Instant::now();
    for mut connection in opened {
        let (requests, turn) = (Arc::clone(requests), Arc::clone(&turn));
        tasks.push(tokio::spawn(async move {
            let mut done = 0_u64;
            while start.elapsed() < period {
                let request = requests.get(turn.fetch_add(1, Ordering::Relaxed));
                connection.exchange(request).await?;
                done += 1;
            }
            anyhow::Ok(done)
        }));
    }
    let mut done = 0;
    for task in tasks {
        done += task.await??;
    }
    Ok(done as f64 / start.elapsed().as_secs_f64())
}

/// Returns the latencies under a fixed rate: of the whole answer, and to its first byte. Connections are kept;
/// a request that finds none free opens one.
pub(super) async fn open_loop(
    address: &str,
    requests: &Arc<Requests>,
    rate: f64,
    count: u64,
    whole: &mut Latencies,
    first: &mut Latencies,
) -> Result<()> {
    let free: Arc<std::sync::Mutex<Vec<Connection>>> = Arc::default();
    let take = |free: &std::sync::Mutex<Vec<Connection>>| {
        free.lock().unwrap_or_else(std::sync::PoisonError::into_inner).pop()
    };
    for _ in 0..8 {
        let connection = Connection::open(address).await?;
        free.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(connection);
    }
    let start = Instant::now() + Duration::from_millis(5);
    let mut tasks = Vec::with_capacity(count as usize);
    for number in 0..count {
        let due = start + Duration::from_secs_f64(number as f64 / rate);
        tokio::time::sleep_until(due.into()).await;
        // Within the timer's resolution, the actual time of sending counts.
        let sent = Instant::now().min(due + Duration::from_millis(2));
        let connection = take(&free);
        let (requests, free, address) = (Arc::clone(requests), Arc::clone(&free), address.to_owned());
        tasks.push(tokio::spawn(async move {
            let mut connection = match connection {
                Some(connection) => connection,
                None => Connection::open(&address).await?,
            };
            let first = connection.exchange(requests.get(number)).await?;
            let times = (sent.elapsed(), first.duration_since(sent.min(first)));
            free.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(connection);
            anyhow::Ok(times)
        }));
    }
    for task in tasks {
        let (took, began) = task.await??;
        whole.record(took);
        first.record(began);
    }
    Ok(())
}
