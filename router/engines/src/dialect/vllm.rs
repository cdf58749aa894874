//! vLLM, from 0.9 on.
//!
//! `/v1/models` has the names and the context length, `/metrics` the cache's configuration in the labels of
//! `vllm:cache_config_info` and the time at which the process began, `/kv_event_sources` (0.31 and later) the
//! publishers by data-parallel rank; before that, the operator names the endpoint. vLLM does not say whether it
//! computes prompts or generates: `kv_role` is the launcher's affair, so the operator does.

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde_json::Value;

use super::prometheus::{first, loads, samples};
use super::{Description, Dialect, Engine, Feed, Hints, Report, TokenCount, feed, hinted, json, of_rank};
use crate::client::{EngineClient, EngineError};

const BLOCK_TOKENS: usize = 16;

#[derive(Debug)]
pub(super) struct Vllm;

/// The run of the process: the time at which it began, in nanoseconds as far as the number goes.
pub(super) fn started(metrics: &str) -> Option<u64> {
    first(metrics, &["process_start_time_seconds"]).map(f64::to_bits)
}

pub(super) fn model_names(models: &Value) -> Vec<String> {
    let entries = models["data"].as_array().map_or(&[][..], Vec::as_slice);
    let (adapters, bases): (Vec<&Value>, Vec<&Value>) =
        entries.iter().partition(|entry| entry["parent"].is_string());
    let names = bases.into_iter().chain(adapters);
    names.filter_map(|entry| entry["id"].as_str().map(str::to_owned)).collect()
}

/// What `/kv_event_sources` says, by rank.
fn feeds(base: &str, sources: &Value) -> Vec<Option<Feed>> {
    let Some(sources) = sources.as_object() else { return Vec::new() };
    let mut ranks: Vec<(u16, &Value)> =
        sources.iter().filter_map(|(rank, source)| Some((rank.parse().ok()?, source))).collect();
    ranks.sort_by_key(|(rank, _)| *rank);
    let first = ranks.first().and_then(|(_, source)| source["endpoint"].as_str());
    let one = |(rank, source): &(u16, &Value)| {
        let is_zmq = source["enable_kv_cache_events"] == true && source["publisher"] == "zmq";
        let endpoint = source["endpoint"].as_str().filter(|_| is_zmq)?;
        let topic = source["topic"].as_str().map(str::to_owned);
        let feed = Feed { topic, ..feed(base, endpoint, source["replay_endpoint"].as_str()) };
        // Every rank is given the same configuration, and adds its number to the port.
        Some(if *rank > 0 && Some(endpoint) == first { of_rank(&feed, *rank) } else { feed })
    };
    ranks.iter().map(one).collect()
}

impl Dialect for Vllm {
    fn engine(&self) -> Engine {
        Engine::Vllm
    }

    fn describe<'a>(
        &'a self,
        client: &'a EngineClient,
        hints: &'a Hints,
    ) -> BoxFuture<'a, Result<Description, EngineError>> {
        async move {
            let models = json(client, "/v1/models").await?;
            let names = model_names(&models);
            if names.is_empty() {
                return Err(client.protocol("/v1/models names no model"));
            }
            let version = json(client, "/version").await.unwrap_or_default();
            let metrics = client.get("/metrics").await?;
            let metrics = String::from_utf8_lossy(&metrics);
            let cache = samples(&metrics, "vllm:cache_config_info").next();
            let label =
                |name: &str| -> Option<usize> { cache.and_then(|cache| cache.label(name)?.parse().ok()) };
            // Releases before 0.31 have no such path.
            let sources = json(client, "/kv_event_sources").await.unwrap_or_default();
            let mut feeds = feeds(client.base(), &sources);
            let ranks = feeds.len().max(samples(&metrics, "vllm:cache_config_info").count()).max(1);
            feeds.resize(ranks, None);
            if let Some(first) = hinted(client.base(), hints) {
                feeds = (0..ranks).map(|rank| Some(of_rank(&first, rank as u16))).collect();
            }
            Ok(Description {
                engine: Engine::Vllm,
                version: version["version"].as_str().unwrap_or("unknown").to_owned(),
                context_tokens: models["data"][0]["max_model_len"].as_u64().unwrap_or(0) as usize,
                models: names,
                role: None,
                block_tokens: label("block_size").unwrap_or(BLOCK_TOKENS),
                blocks: label("num_gpu_blocks_override").or_else(|| label("num_gpu_blocks")).unwrap_or(0),
                lower_blocks: [0; 2],
                keeps_prefixes: true,
                instance: started(&metrics),
                feeds,
                data_plane: None,
                bootstrap: None,
            })
        }
        .boxed()
    }

    fn report<'a>(&'a self, client: &'a EngineClient) -> BoxFuture<'a, Result<Report, EngineError>> {
        async move {
            let metrics = client.get("/metrics").await?;
            let metrics = String::from_utf8_lossy(&metrics);
            let names = ("vllm:num_requests_running", "vllm:num_requests_waiting");
            let usage = ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"];
            Ok(Report {
                instance: started(&metrics),
                loads: loads(&metrics, "engine", names.0, names.1, &usage),
                requests_max: None,
            })
        }
        .boxed()
    }

    fn returns_token_ids(&self) -> bool {
        true
    }

    fn token_count(&self) -> Option<TokenCount> {
        Some(TokenCount::Tokenize)
    }

    fn rank_header(&self) -> Option<&'static str> {
        Some("x-data-parallel-rank")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn publishers_by_rank() {
        let source = json!({"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557",
            "replay_endpoint": "tcp://*:6557", "topic": ""});
        let off = json!({"enable_kv_cache_events": false, "publisher": "null"});
        let mut connecting = source.clone();
        connecting["endpoint"] = "tcp://gateway:5557".into();
        connecting["topic"] = "kv@10.0.0.7:8000@m".into();
        let feeds = feeds("http://h:1", &json!({"1": source, "0": source, "2": off}));
        let events: Vec<Option<&str>> =
            feeds.iter().map(|feed| feed.as_ref().map(|feed| feed.events.as_str())).collect();
        assert_eq!(events, [Some("tcp://h:5557"), Some("tcp://h:5558"), None]);
        assert_eq!(feeds[1].as_ref().and_then(|feed| feed.replay.as_deref()), Some("tcp://h:6558"));
        assert!(feeds.iter().flatten().all(|feed| !feed.bind && feed.topic.as_deref() == Some("")));
        // An engine that connects says by which topic it can be told from others.
        let feeds = super::feeds("http://h:1", &json!({"0": connecting, "1": connecting}));
        let told: Vec<_> = feeds.iter().flatten().map(|feed| (feed.events.as_str(), feed.bind)).collect();
        assert_eq!(told, [("tcp://gateway:5557", true), ("tcp://gateway:5558", true)]);
        assert!(feeds.iter().flatten().all(|feed| feed.topic.as_deref() == Some("kv@10.0.0.7:8000@m")));
    }

    #[test]
    fn the_model_comes_before_its_adapters() {
        let models =
            json!({"data": [{"id": "lora", "parent": "m"}, {"id": "m", "parent": null}, {"id": "alias"}]});
        assert_eq!(model_names(&models), ["m", "alias", "lora"]);
    }
}
