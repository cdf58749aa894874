//! TensorRT-LLM's KV events: a JSON list returned by `POST /kv_cache_events`, which also removes them, so that only one
//! reader can exist. The format is that of `trtllm-serve`'s documentation; it was not yet tested against a live engine.

use router_radix::Tier;
use serde::Deserialize;
use serde_json::Value;

use crate::wire::{KvEvent, Moved, Removed, Stored};

/// One event with its number.
#[derive(Debug, Clone, PartialEq)]
pub struct Polled {
    /// Number of the event, without gaps.
    pub id: u64,
    /// Attention data-parallel rank, when the engine has several.
    pub rank: Option<u32>,
    /// Decoded events; several when blocks of one event lie in several tiers.
    pub events: Vec<KvEvent>,
}

/// Decoding error of an answer, or of an event in it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PolledError {
    /// The answer is not a list of events.
    #[error("not a list of events: {0}")]
    Answer(String),
    /// An event of the list is invalid.
    #[error("event {at}: {problem}")]
    Event {
        /// Index of the event, from 0.
        at: usize,
        /// Description of the error.
        problem: String,
    },
}

#[derive(Deserialize)]
struct RawEvent {
    event_id: u64,
    data: Value,
    window_size: Option<u64>,
    attention_dp_rank: Option<u32>,
}

#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum RawData {
    Created,
    Stored {
        parent_hash: Option<u64>,
        blocks: Vec<RawBlock>,
    },
    Removed {
        block_hashes: Vec<u64>,
    },
    Updated {
        block_hash: u64,
        cache_level: Option<RawDifference>,
    },
    #[serde(other)]
    Unknown,
}

#[derive(Deserialize)]
struct RawBlock {
    block_hash: u64,
    tokens: Vec<RawToken>,
    #[serde(default)]
    cache_level: u32,
}

#[derive(Deserialize)]
struct RawToken {
    token_id: u32,
    #[serde(default)]
    token_extra_id: u64,
}

#[derive(Deserialize)]
struct RawDifference {
    old_value: u32,
    new_value: u32,
}

fn tier(cache_level: u32) -> Tier {
    match cache_level {
        0 => Tier::Device,
        1 => Tier::Host,
        2 => Tier::Disk,
        _ => Tier::Remote,
    }
}

/// Decoder for the answers of one engine.
#[derive(Debug, Default)]
pub struct Decoder {
    /// Largest attention window. Windows are groups of layers; the largest one covers whole prefixes.
    largest_window: u64,
}

impl Decoder {
    /// Decodes one answer; an invalid event is an error of its own, and the other events are returned.
    pub fn decode(&mut self, answer: &[u8]) -> Result<Vec<Result<Polled, PolledError>>, PolledError> {
        let list: Vec<Value> =
            serde_json::from_slice(answer).map_err(|error| PolledError::Answer(error.to_string()))?;
        let event = |(at, value): (usize, Value)| {
            self.event(value).map_err(|problem| PolledError::Event { at, problem })
        };
        Ok(list.into_iter().enumerate().map(event).collect())
    }

    fn event(&mut self, value: Value) -> Result<Polled, String> {
        let raw: RawEvent = serde_json::from_value(value).map_err(|error| error.to_string())?;
        self.largest_window = self.largest_window.max(raw.window_size.unwrap_or(0));
        let is_full_attention = raw.window_size.is_none_or(|window| window == self.largest_window);
        let group = raw.window_size.map(|window| window as u32);
        let data: RawData = serde_json::from_value(raw.data).map_err(|error| error.to_string())?;
        let events = match data {
            RawData::Created | RawData::Unknown => Vec::new(),
            RawData::Stored { parent_hash, blocks } => {
                stored(parent_hash, &blocks, group, is_full_attention)?
            }
            RawData::Removed { block_hashes } => Tier::ALL
                .into_iter()
                .map(|tier| KvEvent::Removed(Removed { hashes: block_hashes.clone(), tier, group }))
                .collect(),
            RawData::Updated { block_hash, cache_level: Some(level) } if is_full_attention => {
                let (from, to) = (tier(level.old_value), tier(level.new_value));
                vec![KvEvent::Moved(Moved { hashes: vec![block_hash], from, to })]
            }
            RawData::Updated { .. } => Vec::new(),
        };
        Ok(Polled { id: raw.event_id, rank: raw.attention_dp_rank, events })
    }
}

/// Blocks of the same tier that follow each other make one event.
fn stored(
    parent: Option<u64>,
    blocks: &[RawBlock],
    group: Option<u32>,
    is_full_attention: bool,
) -> Result<Vec<KvEvent>, String> {
    let mut events = Vec::new();
    let mut before = parent;
    for run in blocks.chunk_by(|a, b| a.cache_level == b.cache_level && a.tokens.len() == b.tokens.len()) {
        let block_tokens = run[0].tokens.len();
        if block_tokens == 0 {
            return Err("a block without tokens".to_owned());
        }
        let extras = run.iter().enumerate().flat_map(|(number, block)| {
            let ids = block.tokens.iter().map(|token| token.token_extra_id).filter(|&id| id != 0);
            let mut ids: Vec<u64> = ids.collect();
            ids.dedup();
            ids.into_iter().map(move |id| (number as u32, format!("token_extra_id:{id}")))
        });
        events.push(KvEvent::Stored(Stored {
            hashes: run.iter().map(|block| block.block_hash).collect(),
            parent: before,
            tokens: run.iter().flat_map(|block| block.tokens.iter().map(|token| token.token_id)).collect(),
            block_tokens,
            tier: tier(run[0].cache_level),
            extras: extras.collect(),
            group,
            is_full_attention,
            ..Stored::default()
        }));
        before = run.last().map(|block| block.block_hash);
    }
    Ok(events)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_understood() {
        let answer = br#"[
            {"event_id": 0, "data": {"type": "created", "num_blocks_per_cache_level": [10, 5]}, "window_size": 4096},
            {"event_id": 1, "data": {"type": "stored", "parent_hash": null, "blocks": [
                {"type": "stored_block", "block_hash": 18446744073709551615, "cache_level": 0, "priority": 35,
                 "tokens": [{"type": "unique_token", "token_id": 5, "token_extra_id": 0}, {"token_id": 6, "token_extra_id": 9}]},
                {"block_hash": 12, "cache_level": 1, "tokens": [{"token_id": 7}, {"token_id": 8}]}]}, "window_size": 4096},
            {"event_id": 2, "data": {"type": "stored", "blocks": "x"}},
            {"event_id": 3, "data": {"type": "updated", "block_hash": 12, "cache_level":
                {"type": "event_diff", "old_value": 1, "new_value": 0}}, "window_size": 4096, "attention_dp_rank": 2},
            {"event_id": 4, "data": {"type": "removed", "block_hashes": [12]}, "window_size": 4096},
            {"event_id": 5, "data": {"type": "stored", "parent_hash": 1, "blocks": [
                {"block_hash": 99, "cache_level": 0, "tokens": [{"token_id": 7}]}]}, "window_size": 512},
            {"event_id": 6, "data": {"type": "something new"}}
        ]"#;
        let events = Decoder::default().decode(answer).expect("a list");
        assert_eq!(events.len(), 7);
        let of = |at: usize| &events[at].as_ref().expect("an event").events;
        assert!(of(0).is_empty() && of(6).is_empty());
        let [KvEvent::Stored(device), KvEvent::Stored(host)] = &of(1)[..] else { panic!("{:?}", of(1)) };
        assert_eq!((device.hashes[0], device.parent, &device.tokens[..]), (u64::MAX, None, &[5, 6][..]));
        assert_eq!(device.extras, [(0, "token_extra_id:9".to_owned())]);
        assert_eq!((host.tier, host.parent, host.block_tokens), (Tier::Host, Some(u64::MAX), 2));
        let error = events[2].as_ref().expect_err("blocks are no list").to_string();
        assert!(error.starts_with("event 2: invalid type: string \"x\""), "{error}");
        let moved = Moved { hashes: vec![12], from: Tier::Host, to: Tier::Device };
        assert_eq!(
            (events[3].as_ref().expect("an event").rank, &of(3)[0]),
            (Some(2), &KvEvent::Moved(moved))
        );
        assert_eq!(of(4).len(), 4, "gone from every tier");
        let KvEvent::Stored(window) = &of(5)[0] else { panic!("{:?}", of(5)) };
        assert!(!window.is_full_attention);
        assert!(Decoder::default().decode(b"{}").is_err());
    }
}
