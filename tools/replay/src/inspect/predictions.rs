//! Predicted against reported cached tokens: events and requests of live engines, replayed in time order.
//!
//! An event counts from the time at which it arrived; a request is predicted from the events that had arrived when it was
//! sent. Changes in between (another request computing the same blocks at that time) cannot be predicted.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail};
use kvstore_block::{PromptExtras, block_hashes};
use router_events::follower::{Follower, Step};
use router_events::tracker::Tracker;
use router_events::wire::{KvEvent, decode};
use router_radix::{Index, IndexConfig, Member, Reader};
use serde::Deserialize;
use serde_json::Value;

use super::capture::{message, text};

#[derive(Deserialize)]
struct RawRequest {
    i: u64,
    port: u64,
    t_send: f64,
    cached_tokens: usize,
    prompt_token_ids: Vec<u32>,
}

/// Predicted and reported cached tokens of one request.
#[derive(Debug, Clone, PartialEq)]
pub struct ComparedRequest {
    /// Number of the request in the capture.
    pub request: u64,
    /// Time of sending.
    pub sent: f64,
    /// Identity of the engine: its port.
    pub engine: u64,
    /// Prompt tokens.
    pub prompt: usize,
    /// Cached tokens that the index predicted.
    pub predicted: usize,
    /// Cached tokens that the engine reported.
    pub reported: usize,
}

/// Result of a replay.
#[derive(Debug, Default)]
pub struct Comparison {
    /// Every request in the order of sending.
    pub requests: Vec<ComparedRequest>,
    /// Event batches applied.
    pub batches: usize,
    /// Gaps in the sequence numbers.
    pub gaps: usize,
}

impl Comparison {
    /// Number of requests whose prediction was exact.
    #[must_use]
    pub fn exact(&self) -> usize {
        self.requests.iter().filter(|request| request.predicted == request.reported).count()
    }
}

struct Engine {
    member: Member,
    follower: Follower,
    block_tokens: usize,
}

/// A captured event with its time.
enum Entry {
    Batch { engine: u64, sequence: u64, payload: Vec<u8> },
    Request(RawRequest),
}

/// Replays a capture of events and one of requests.
pub fn compare(events: &Path, requests: &Path) -> Result<Comparison> {
    let mut entries: Vec<(f64, Entry)> = Vec::new();
    let mut block_sizes = BTreeMap::new();
    for (number, line) in text(events)?.lines().enumerate() {
        let place = || format!("{}, line {}", events.display(), number + 1);
        let line: Value = serde_json::from_str(line).with_context(place)?;
        let time = line["t"].as_f64().with_context(|| format!("{}: t is missing", place()))?;
        let topic = line["topic"].as_str().with_context(|| format!("{}: topic is missing", place()))?;
        let engine =
            port_of(topic).with_context(|| format!("{}: no port in the topic {topic:?}", place()))?;
        let message = message(&line).map_err(anyhow::Error::msg).with_context(place)?;
        let sequence = message.sequence.with_context(|| format!("{}: seq is missing", place()))?;
        if !block_sizes.contains_key(&engine) {
            block_sizes.extend(block_tokens(&message.payload).map(|size| (engine, size)));
        }
        entries.push((time, Entry::Batch { engine, sequence, payload: message.payload }));
    }
    for (number, line) in text(requests)?.lines().enumerate() {
        let place = || format!("{}, line {}", requests.display(), number + 1);
        let request: RawRequest = serde_json::from_str(line).with_context(place)?;
        entries.push((request.t_send, Entry::Request(request)));
    }
    // Stable sort: entries with equal times keep their order.
    entries.sort_by(|a, b| a.0.total_cmp(&b.0));
    replay(entries, &block_sizes)
}

fn replay(entries: Vec<(f64, Entry)>, block_sizes: &BTreeMap<u64, usize>) -> Result<Comparison> {
    let index = Index::new(IndexConfig::default());
    let mut reader = index.reader().context("a reader")?;
    let mut engines = BTreeMap::new();
    for (&engine, &block_tokens) in block_sizes {
        let member = index.write().join().context("too many engines")?;
        let follower = Follower::new(Tracker::new(member, block_tokens));
        engines.insert(engine, Engine { member, follower, block_tokens });
    }
    let mut comparison = Comparison::default();
    for (time, entry) in entries {
        match entry {
            Entry::Batch { engine, sequence, payload } => {
                let Some(engine) = engines.get_mut(&engine) else { continue };
                let step = engine.follower.live(&mut index.write(), sequence, &payload);
                if let Step::Replay { .. } = step {
                    comparison.gaps += 1;
                    engine.follower.after_replay(&mut index.write(), sequence, &payload);
                }
                comparison.batches += 1;
            }
            Entry::Request(request) => {
                let Some(engine) = engines.get(&request.port) else {
                    bail!("request {}: no events of an engine at port {}", request.i, request.port);
                };
                comparison.requests.push(predict(engine, &mut reader, request, time));
            }
        }
    }
    Ok(comparison)
}

fn predict(engine: &Engine, reader: &mut Reader, request: RawRequest, sent: f64) -> ComparedRequest {
    let (tokens, block_tokens) = (&request.prompt_token_ids, engine.block_tokens);
    let mut hashes = Vec::new();
    block_hashes(tokens, block_tokens, &PromptExtras::default(), &mut hashes);
    let leading = reader.overlaps(&hashes).device(engine.member) as usize;
    // The engine computes the last token in any case.
    let most = tokens.len().saturating_sub(1) / block_tokens;
    ComparedRequest {
        request: request.i,
        sent,
        engine: request.port,
        prompt: tokens.len(),
        predicted: leading.min(most) * block_tokens,
        reported: request.cached_tokens,
    }
}

/// Returns the port in `kv@<host>:<port>@<model>`.
fn port_of(topic: &str) -> Option<u64> {
    topic.split('@').nth(1)?.rsplit(':').next()?.parse().ok()
}

/// Block size in a payload.
fn block_tokens(payload: &[u8]) -> Option<usize> {
    decode(payload).ok()?.events.iter().find_map(|event| match event {
        KvEvent::Stored(stored) => Some(stored.block_tokens),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn topics_name_their_engine() {
        assert_eq!(port_of("kv@127.0.0.1:8132@tiny"), Some(8132));
        assert_eq!(port_of("kv@host@tiny"), None);
        assert_eq!(port_of(""), None);
    }

    /// A capture of two live engines, if it is available.
    #[test]
    fn two_live_engines_are_predicted_exactly() {
        let folder = std::env::var("KVASIR_CAPTURES").map_or_else(
            |_| {
                Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/data/engine-captures/two-engines")
            },
            std::path::PathBuf::from,
        );
        let file = |kind: &str| folder.join(format!("vllm-0.32.0-two-engines.{kind}.jsonl.gz"));
        if !file("events").exists() {
            println!("SKIPPED the predictions for two live engines: no capture in {}", folder.display());
            return;
        }
        let comparison = compare(&file("events"), &file("requests")).expect("a capture");
        assert_eq!((comparison.requests.len(), comparison.gaps), (400, 0));
        assert!(comparison.exact() >= 398, "{} of 400 exact", comparison.exact());
    }
}
