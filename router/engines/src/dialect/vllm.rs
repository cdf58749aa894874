//! vLLM, from 0.9 on.
//!
//! `/v1/models` has the names and the context length, `/metrics` the cache's configuration in the labels of
//! `vllm:cache_config_info` and the time at which the process began, `/kv_event_sources` (0.31 and later) the
//! publishers by data-parallel rank; before that, the operator names the endpoint. vLLM does not say whether it
//! computes prompts or generates: `kv_role` is the launcher's affair, so the operator does. Where its connector is
//! KvasirConnector, the labels of `vllm:kvasir_data_plane` say where it hands blocks over, and those of
//! `vllm:kvasir_shared_stores` which stores it shares with others.

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use http::Method;
use serde_json::Value;

use super::prometheus::{Metrics, Sample};
use super::{
    Description, Dialect, Engine, Feed, Hints, Report, Role, SharedStores, TokenCount, feed, hinted, json,
    json_if_present, of_rank, transfers,
};
use crate::client::{EngineClient, EngineError};
use crate::handoff::DataPlaneAddress;

const BLOCK_TOKENS: usize = 16;

#[derive(Debug)]
pub(super) struct Vllm;

/// Run number of the process: the bits of its start time in seconds.
pub(super) fn started(metrics: &Metrics<'_>) -> Option<u64> {
    metrics.first(&["process_start_time_seconds"]).map(f64::to_bits)
}

pub(super) fn model_names(models: &Value) -> Vec<String> {
    let entries = models["data"].as_array().map_or(&[][..], Vec::as_slice);
    let (adapters, bases): (Vec<&Value>, Vec<&Value>) =
        entries.iter().partition(|entry| entry["parent"].is_string());
    let names = bases.into_iter().chain(adapters);
    names.filter_map(|entry| entry["id"].as_str().map(str::to_owned)).collect()
}

/// Major and minor number of a version; `None` for one of another form, such as a build from source.
fn release(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.split('.').map(str::parse);
    match (numbers.next()?, numbers.next()?) {
        (Ok(major), Ok(minor)) if (major, minor) != (0, 0) => Some((major, minor)),
        _ => None,
    }
}

/// The data plane of a vLLM with KvasirConnector: the addresses of process 0. Process n listens on the port plus n.
fn data_plane(metrics: &Metrics<'_>) -> Option<DataPlaneAddress> {
    // A server may have only the later ranks of a larger engine: the first rank that it reports counts.
    let rank =
        |sample: &Sample<'_>| sample.label("engine").and_then(|rank| rank.parse::<u32>().ok()).unwrap_or(0);
    let told = metrics.samples("vllm:kvasir_data_plane").min_by_key(rank)?;
    let address = |name: &str| told.label(name).filter(|text| !text.is_empty()).map(str::to_owned);
    Some(DataPlaneAddress {
        host: address("host")?,
        cuda_ipc: address("cuda_ipc"),
        shm: address("shm"),
        tcp: address("tcp"),
        rdma: address("rdma").iter().flat_map(|all| all.split(',')).map(str::to_owned).collect(),
        processes: told.label("processes")?.parse().ok()?,
    })
}

/// Limits of data-parallel ranks and stores that are read: an engine's text is not trusted.
const RANKS_MAX: usize = 1024;
const STORES_MAX: usize = 1024;

/// Whether the engine has a KvasirConnector that handles `kvasir_retain_seconds`; one without a store ignores it. The metric's
/// type is listed from the engine's start on; where several API servers share their metrics, once it has a value.
fn retains_blocks(text: &str) -> bool {
    text.lines().any(|line| line.starts_with("# TYPE vllm:kvasir_store_retained "))
}

/// The stores that a vLLM with KvasirConnector shares with others, by rank.
fn shared_stores(metrics: &Metrics<'_>) -> Vec<Option<SharedStores>> {
    let mut ranks = Vec::new();
    for sample in metrics.samples("vllm:kvasir_shared_stores") {
        let rank = sample.label("engine").and_then(|rank| rank.parse().ok()).unwrap_or(0_usize);
        let tag = sample.label("tag").and_then(|tag| u16::from_str_radix(tag, 16).ok());
        let (Some(names), Some(tag)) = (sample.label("stores").filter(|names| !names.is_empty()), tag) else {
            continue;
        };
        // Value 0: the weights were updated, and blocks with the reported names are not found in the stores.
        if rank >= RANKS_MAX || sample.value == 0.0 {
            continue;
        }
        let mut stores: Vec<String> = names.split(',').take(STORES_MAX).map(str::to_owned).collect();
        stores.sort_unstable();
        stores.dedup();
        if ranks.len() <= rank {
            ranks.resize(rank + 1, None);
        }
        ranks[rank] = Some(SharedStores { stores, tag });
    }
    ranks
}

/// Feeds from the answer of `/kv_event_sources`, by rank.
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
        // Every rank has the same configuration, and adds its number to the port.
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
            let version = json_if_present(client, "/version").await?;
            let text = client.get("/metrics").await?;
            let text = String::from_utf8_lossy(&text);
            // Releases before 0.31 do not have the path.
            let sources = json_if_present(client, "/kv_event_sources").await?;
            let metrics = Metrics::parse(&text);
            let cache = metrics.samples("vllm:cache_config_info").next();
            let label =
                |name: &str| -> Option<usize> { cache.and_then(|cache| cache.label(name)?.parse().ok()) };
            let mut feeds = feeds(client.base(), &sources);
            let ranks = feeds.len().max(metrics.samples("vllm:cache_config_info").count()).max(1);
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
                retains_blocks: retains_blocks(&text),
                instance: started(&metrics),
                feeds,
                data_plane: data_plane(&metrics),
                bootstrap: None,
            })
        }
        .boxed()
    }

    fn report<'a>(&'a self, client: &'a EngineClient) -> BoxFuture<'a, Result<Report, EngineError>> {
        async move {
            let text = client.get("/metrics").await?;
            let text = String::from_utf8_lossy(&text);
            let metrics = Metrics::parse(&text);
            let names = ("vllm:num_requests_running", "vllm:num_requests_waiting");
            let usage = ["vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"];
            Ok(Report {
                instance: started(&metrics),
                loads: metrics.loads("engine", names.0, names.1, &usage),
                requests_max: None,
                transfers: transfers::reports(&metrics, &transfers::VLLM),
                stores: shared_stores(&metrics),
            })
        }
        .boxed()
    }

    /// The sleep routes exist only with `VLLM_SERVER_DEV_MODE=1`.
    fn is_asleep<'a>(&'a self, client: &'a EngineClient) -> BoxFuture<'a, Result<Option<bool>, EngineError>> {
        async move {
            let Some(body) = client.get_if_present("/is_sleeping").await? else { return Ok(None) };
            let told: Value = serde_json::from_slice(&body).unwrap_or_default();
            let is_asleep = told["is_sleeping"].as_bool();
            is_asleep.map(Some).ok_or_else(|| client.protocol("/is_sleeping answered no boolean is_sleeping"))
        }
        .boxed()
    }

    fn sleep_obstacle<'a>(
        &'a self,
        client: &'a EngineClient,
        description: &'a Description,
        role: Role,
    ) -> BoxFuture<'a, Result<Option<String>, EngineError>> {
        async move {
            if self.is_asleep(client).await?.is_none() {
                let needs = "vLLM must be started with --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1";
                return Ok(Some(needs.to_owned()));
            }
            // Before 0.17, a request that arrives while the engine sleeps kills it.
            let why = match release(&description.version) {
                Some(version) if version < (0, 17) => {
                    Some("vLLM before 0.17 dies of requests that come while it sleeps")
                }
                Some(version) if version < (0, 33) && role != Role::Both => {
                    Some("vLLM before 0.33 does not register its memory for hand-offs again when it wakes")
                }
                _ => None,
            };
            Ok(why.map(str::to_owned))
        }
        .boxed()
    }

    /// Level 1: weights move to host memory, blocks are dropped. With `wait`, a request that arrived after all is finished
    /// first; the answer comes when the memory is free.
    fn sleep<'a>(&'a self, client: &'a EngineClient) -> BoxFuture<'a, Result<(), EngineError>> {
        async move {
            client.ask(Method::POST, "/sleep?level=1&mode=wait", Bytes::new()).await?;
            match self.is_asleep(client).await? {
                Some(true) => Ok(()),
                _ => Err(client.protocol("/sleep was answered, and it does not sleep")),
            }
        }
        .boxed()
    }

    /// Wakes all parts at once: before 0.30 an engine that is woken in parts computes with memory that is not mapped.
    fn wake<'a>(&'a self, client: &'a EngineClient) -> BoxFuture<'a, Result<(), EngineError>> {
        async move {
            client.ask(Method::POST, "/wake_up", Bytes::new()).await?;
            match self.is_asleep(client).await? {
                Some(true) => Err(client.protocol("/wake_up was answered, and it still sleeps")),
                _ => Ok(()),
            }
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
        // An engine that connects reports its topic, which identifies it.
        let feeds = super::feeds("http://h:1", &json!({"0": connecting, "1": connecting}));
        let told: Vec<_> = feeds.iter().flatten().map(|feed| (feed.events.as_str(), feed.bind)).collect();
        assert_eq!(told, [("tcp://gateway:5557", true), ("tcp://gateway:5558", true)]);
        assert!(feeds.iter().flatten().all(|feed| feed.topic.as_deref() == Some("kv@10.0.0.7:8000@m")));
    }

    #[test]
    fn a_connector_says_where_it_hands_blocks_over() {
        let metrics = "# TYPE vllm:kvasir_data_plane gauge\n\
            vllm:kvasir_data_plane{engine=\"1\",host=\"b/1:2\",model_name=\"m\",processes=\"2\",rdma=\"\",shm=\"\",tcp=\"10.0.0.2:7402\"} 1.0\n\
            vllm:kvasir_data_plane{cuda_ipc=\"/tmp/y.sock\",engine=\"0\",host=\"b/1:2\",model_name=\"m\",processes=\"2\",rdma=\"10.0.1.2:1,10.0.2.2:2\",shm=\"/tmp/x.sock\",tcp=\"10.0.0.2:7400\"} 1.0\n";
        let expected = DataPlaneAddress {
            host: "b/1:2".to_owned(),
            cuda_ipc: Some("/tmp/y.sock".to_owned()),
            shm: Some("/tmp/x.sock".to_owned()),
            tcp: Some("10.0.0.2:7400".to_owned()),
            rdma: vec!["10.0.1.2:1".to_owned(), "10.0.2.2:2".to_owned()],
            processes: 2,
        };
        assert_eq!(data_plane(&Metrics::parse(metrics)), Some(expected));
        let later = metrics.replace("engine=\"0\"", "engine=\"2\"");
        assert_eq!(
            data_plane(&Metrics::parse(&later)).and_then(|place| place.tcp),
            Some("10.0.0.2:7402".to_owned()),
            "of rank 1"
        );
        assert_eq!(
            data_plane(&Metrics::parse(&metrics.replace("processes=\"2\"", "processes=\"many\""))),
            None
        );
        assert_eq!(data_plane(&Metrics::parse("vllm:num_requests_running{engine=\"0\"} 0.0\n")), None);
    }

    #[test]
    fn a_connector_that_retains_blocks_is_known_by_its_metric() {
        let described =
            "# HELP vllm:kvasir_store_retained Blocks.\n# TYPE vllm:kvasir_store_retained gauge\n";
        assert!(retains_blocks(described));
        assert!(!retains_blocks(
            "# TYPE vllm:kvasir_store_retained_more gauge\nvllm:kvasir_store_blocks 1.0\n"
        ));
    }

    #[test]
    fn a_connector_says_which_stores_it_shares() {
        let metrics = "# TYPE vllm:kvasir_shared_stores gauge\n\
            vllm:kvasir_shared_stores{engine=\"1\",model_name=\"m\",stores=\"n1,n0\",tag=\"0a1f\"} 1.0\n";
        let expected = SharedStores { stores: vec!["n0".to_owned(), "n1".to_owned()], tag: 0x0a1f };
        assert_eq!(shared_stores(&Metrics::parse(metrics)), [None, Some(expected)]);
        for (from, to) in [
            ("} 1.0", "} 0.0"),
            ("0a1f", "10a1f"),
            ("0a1f", "stage"),
            ("n1,n0", ""),
            ("engine=\"1\"", "engine=\"9999\""),
        ] {
            assert_eq!(shared_stores(&Metrics::parse(&metrics.replace(from, to))), [], "{to}");
        }
    }

    #[test]
    fn versions_are_compared_by_their_numbers() {
        assert_eq!(release("0.32.0"), Some((0, 32)));
        assert_eq!(release("1.2.0rc1"), Some((1, 2)));
        assert_eq!(release("dev"), None);
        assert_eq!(release("0.0.0+unknown"), None);
    }

    #[test]
    fn the_model_comes_before_its_adapters() {
        let models =
            json!({"data": [{"id": "lora", "parent": "m"}, {"id": "m", "parent": null}, {"id": "alias"}]});
        assert_eq!(model_names(&models), ["m", "alias", "lora"]);
    }
}
