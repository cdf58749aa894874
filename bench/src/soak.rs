//! Many requests through mock engines with faults. Each is answered as an engine without faults would have
//! answered it, or refused with a proper error; at the end no slot, no connection and no memory is left in use.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use router_fleet::FleetConfig;
use router_gateway::{Gateway, Tuning, router};
use router_tokens::ModelText;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tools_mocker::{Fault, FaultKind, Mock, MockConfig};

use crate::gateway::{config, fleet_config, fleet_of, listen, tuning};
use crate::results::{self, Better};

const WORKERS: usize = 8;
const CLIENTS: u64 = 64;
pub(crate) const PROMPTS: u64 = 200;
const TOKENS: usize = 12;
/// Longest wait for the end of an answer. A longer one would be a stream that the gateway has forgotten.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);

/// SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014).
pub(crate) fn mix(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn faults() -> Vec<Fault> {
    let fault = |kind, probability, millis, tokens| Fault { kind, probability, count: None, millis, tokens };
    vec![
        fault(FaultKind::Error, 0.01, 0, 1),
        fault(FaultKind::Overloaded, 0.005, 0, 1),
        fault(FaultKind::Corrupt, 0.005, 0, 1),
        fault(FaultKind::DieMidStream, 0.01, 0, 4),
        fault(FaultKind::Refuse, 0.002, 0, 1),
        fault(FaultKind::Stall, 0.0002, 0, 3),
        fault(FaultKind::Hang, 0.0001, 0, 1),
    ]
}

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum RequestKind {
    Whole,
    Streamed,
    Completion,
    /// The client disconnects after the first bytes.
    DisconnectsEarly,
}

pub(crate) fn body(prompt: u64, kind: RequestKind) -> String {
    let text = format!("prompt {prompt} {}", "word ".repeat((prompt % 50) as usize));
    let stream = matches!(kind, RequestKind::Streamed | RequestKind::DisconnectsEarly);
    match kind {
        RequestKind::Completion => {
            json!({"model": "tiny", "prompt": text, "max_tokens": TOKENS, "stream": stream})
        }
        _ => json!({"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": TOKENS,
            "stream": stream}),
    }
    .to_string()
}

/// Result of a request: a text, an error status, or an early end.
pub(crate) enum Answer {
    Text(String),
    Refused(u16),
    /// A stream that started and ended with an error event.
    Broken,
    Disconnected,
}

pub(crate) async fn exchange(stream: &mut TcpStream, body: &str, kind: RequestKind) -> Result<Answer> {
    let path = if kind == RequestKind::Completion { "/v1/completions" } else { "/v1/chat/completions" };
    let request = format!(
        "POST {path} HTTP/1.1\r\nhost: soak\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).await?;
    let mut bytes = Vec::with_capacity(4096);
    loop {
        if stream.read_buf(&mut bytes).await? == 0 {
            bail!("the connection was closed after {} bytes", bytes.len());
        }
        if kind == RequestKind::DisconnectsEarly {
            return Ok(Answer::Disconnected);
        }
        let Some(head) = bytes.windows(4).position(|end| end == b"\r\n\r\n") else { continue };
        let text = std::str::from_utf8(&bytes[..head])?.to_ascii_lowercase();
        let content = &bytes[head + 4..];
        let length =
            text.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse::<usize>().ok());
        let is_whole = match length {
            Some(length) => content.len() >= length,
            None => content.ends_with(b"0\r\n\r\n"),
        };
        if is_whole {
            let status: u16 = text.get(9..12).context("no status")?.parse()?;
            return parse_answer(status, content, length.is_none());
        }
    }
}

fn parse_answer(status: u16, content: &[u8], is_chunked: bool) -> Result<Answer> {
    if status != 200 {
        let error: Value = serde_json::from_slice(content).context("an error that is no JSON")?;
        ensure!(error["error"]["message"].is_string(), "an error without a message: {error}");
        return Ok(Answer::Refused(status));
    }
    if !is_chunked {
        let answer: Value = serde_json::from_slice(content).context("an answer that is no JSON")?;
        let choice = &answer["choices"][0];
        let text = choice["message"]["content"].as_str().or_else(|| choice["text"].as_str());
        return Ok(Answer::Text(text.context("an answer without text")?.to_owned()));
    }
    let mut text = String::new();
    let mut is_done = false;
    let (mut id, mut beginnings) = (Value::Null, 0);
    for line in content.split(|&byte| byte == b'\n') {
        let Some(data) = line.strip_prefix(b"data: ") else { continue };
        if data == b"[DONE]" {
            is_done = true;
            continue;
        }
        let event: Value = serde_json::from_slice(data).context("an event that is no JSON")?;
        if event["error"].is_object() {
            return Ok(Answer::Broken);
        }
        ensure!(id.is_null() || id == event["id"], "an answer with two ids");
        id = event["id"].clone();
        beginnings += u32::from(event["choices"][0]["delta"]["role"].is_string());
        text.push_str(event["choices"][0]["delta"]["content"].as_str().unwrap_or_default());
    }
    ensure!(is_done, "a stream that ended without its end");
    ensure!(beginnings == 1, "a stream with {beginnings} beginnings");
    Ok(Answer::Text(text))
}

/// Resident memory in MiB, and open descriptors of this process.
pub(crate) fn footprint() -> Result<(u64, usize)> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let resident = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:")?.split_whitespace().next()?.parse::<u64>().ok());
    Ok((resident.context("VmRSS")? / 1024, std::fs::read_dir("/proc/self/fd")?.count()))
}

#[derive(Default)]
struct Tally {
    correct: AtomicU64,
    broken: AtomicU64,
    disconnected: AtomicU64,
    refused: std::sync::Mutex<BTreeMap<u16, u64>>,
}

pub(crate) fn run(requests: u64, seed: u64) -> Result<()> {
    println!(
        "# soak: {requests} requests, seed {seed}, {WORKERS} mock workers with faults, {CLIENTS} clients"
    );
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(soak(requests, seed))
}

async fn soak(requests: u64, seed: u64) -> Result<()> {
    let mut mocks = Vec::new();
    for number in 0..WORKERS {
        // An early end of the output would hide a wrong continuation.
        let config = MockConfig { seed: seed + number as u64, eos_one_in: 0, ..MockConfig::tiny()? };
        mocks.push(Mock::start(config, "127.0.0.1:0".parse()?).await?);
    }
    let urls: Vec<String> = mocks.iter().map(Mock::url).collect();
    let fleet_config = FleetConfig { health_interval: Duration::from_millis(200), ..fleet_config("tiny") };
    let second = Duration::from_secs(1);
    let tuning = Tuning { retries: 3, stall: second, answer_within: 2 * second, ..tuning() };
    let fleet = fleet_of(fleet_config, &urls)?;
    let gateway = Gateway::new(config(ModelText::tiny()?), tuning, fleet).map_err(anyhow::Error::msg)?;
    let address = listen(router(Arc::clone(&gateway))).await?.trim_start_matches("http://").to_owned();
    let expected = expected_answers(&address).await?;
    for (mock, fault) in mocks.iter().flat_map(|mock| faults().into_iter().map(move |fault| (mock, fault))) {
        mock.fault(fault)?;
    }
    let (expected, tally) = (Arc::new(expected), Arc::new(Tally::default()));
    // Growth of a warm-up (connections, memory of allocators) is not a leak: the first tenth is not compared.
    drive(&address, requests / 10, seed, &expected, &tally).await?;
    let before = footprint()?;
    let started = Instant::now();
    drive(&address, requests - requests / 10, seed ^ 1, &expected, &tally).await?;
    let rate = (requests - requests / 10) as f64 / started.elapsed().as_secs_f64();
    mocks.iter().for_each(Mock::heal);
    wait_until_idle(&gateway, &mocks.iter().collect::<Vec<_>>()).await?;
    let after = footprint()?;
    let refused = tally.refused.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
    let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
    let clean = refused.values().sum::<u64>() + get(&tally.broken);
    let failed = 100.0 * clean as f64 / requests as f64;
    results::add("soak", "requests", ("1/s", Better::Higher), &[rate]);
    results::add("soak", "requests that failed cleanly", ("%", Better::Lower), &[failed]);
    println!(
        "answered rightly {}, cleanly failed {clean} (streams that ended with an error {}, by status {refused:?}), \
         left by the client {}",
        get(&tally.correct),
        get(&tally.broken),
        get(&tally.disconnected)
    );
    println!(
        "memory {} MiB before, {} after; descriptors {} before, {} after; requests inside {}; all workers idle",
        before.0,
        after.0,
        before.1,
        after.1,
        gateway.requests_inside()
    );
    ensure!(get(&tally.correct) + clean + get(&tally.disconnected) == requests, "requests were lost");
    ensure!(clean * 20 < requests, "more than one in twenty failed");
    // Idle connections are kept, up to the most ever in use at a time, with both their ends in this process; a
    // run of this length has all of them before its second part.
    let kept = 2 * WORKERS * CLIENTS as usize + 200;
    let more = if requests >= 100_000 { 500 } else { kept };
    ensure!(after.1 < before.1 + more, "descriptors are left over");
    // With a million requests a leak of 60 bytes each would exceed this.
    ensure!(after.0 < before.0 + 32 + requests / 50_000, "memory is left over");
    Ok(())
}

/// Returns the answers without faults to each prompt: to a chat, and to a completion.
pub(crate) async fn expected_answers(address: &str) -> Result<Vec<Vec<String>>> {
    let mut expected = Vec::new();
    for prompt in 0..PROMPTS {
        let mut both = Vec::new();
        for kind in [RequestKind::Whole, RequestKind::Completion] {
            let mut stream = TcpStream::connect(address).await?;
            match exchange(&mut stream, &body(prompt, kind), kind).await? {
                Answer::Text(text) => both.push(text),
                _ => bail!("no answer without faults"),
            }
        }
        expected.push(both);
    }
    Ok(expected)
}

async fn drive(
    address: &str,
    requests: u64,
    seed: u64,
    expected: &Arc<Vec<Vec<String>>>,
    tally: &Arc<Tally>,
) -> Result<()> {
    let next = Arc::new(AtomicU64::new(0));
    let started = Instant::now();
    let clients = (0..CLIENTS).map(|_| {
        let (address, next) = (address.to_owned(), Arc::clone(&next));
        let (expected, tally) = (Arc::clone(expected), Arc::clone(tally));
        tokio::spawn(async move {
            let mut stream = None;
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= requests {
                    return anyhow::Ok(());
                }
                if number > 0 && number % 100_000 == 0 {
                    println!("{number} of {requests} after {:.0} s", started.elapsed().as_secs_f64());
                }
                let draw = mix(seed ^ number.wrapping_mul(0x2545_f491_4f6c_dd1d));
                let kind = match draw % 100 {
                    0..45 => RequestKind::Whole,
                    45..80 => RequestKind::Streamed,
                    80..98 => RequestKind::Completion,
                    _ => RequestKind::DisconnectsEarly,
                };
                let prompt = (draw >> 32) % PROMPTS;
                let mut connection = match stream.take() {
                    Some(connection) => connection,
                    None => TcpStream::connect(&address).await?,
                };
                let body = body(prompt, kind);
                let exchanged = exchange(&mut connection, &body, kind);
                let answer = tokio::time::timeout(ANSWER_WITHIN, exchanged).await;
                let answer = answer.with_context(|| format!("request {number}: no end of its answer"))?;
                match answer.with_context(|| format!("request {number}"))? {
                    Answer::Text(text) => {
                        let correct =
                            &expected[prompt as usize][usize::from(kind == RequestKind::Completion)];
                        ensure!(text == *correct, "request {number}: {text:?} instead of {correct:?}");
                        tally.correct.fetch_add(1, Ordering::Relaxed);
                    }
                    Answer::Refused(status) => {
                        let mut refused =
                            tally.refused.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                        *refused.entry(status).or_default() += 1;
                    }
                    Answer::Broken => drop(tally.broken.fetch_add(1, Ordering::Relaxed)),
                    Answer::Disconnected => {
                        tally.disconnected.fetch_add(1, Ordering::Relaxed);
                        continue;
                    }
                }
                stream = Some(connection);
            }
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await??;
    }
    Ok(())
}

/// Waits until the gateway and the mocks are idle.
pub(crate) async fn wait_until_idle(gateway: &Gateway, mocks: &[&Mock]) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let busy: usize =
            mocks.iter().map(|mock| mock.stats()).map(|stats| stats.running + stats.waiting).sum();
        let inside = gateway.requests_inside();
        if busy == 0 && inside == 0 && gateway.booked() == 0 {
            return Ok(());
        }
        ensure!(
            Instant::now() < deadline,
            "left over: {busy} requests in workers, {inside} in the gateway, {} booked",
            gateway.booked()
        );
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
