//! SGLang, from 0.5 on.
//!
//! `/server_info` (formerly `/get_server_info`) has everything: page size, pool, publishers (rank r is the first
//! rank's port plus r), the role, and the bootstrap server's port of a prefill worker. One run is told from another by
//! the seed, which an operator may fix, and by how long the start took.
//!
//! Prefill and decode servers answer 400 to a request without a bootstrap room (`Scheduler.handle_generate_request`).
//! A decode server reports the prefill server's cached tokens plus what its own radix cache had beyond them, which is the
//! larger of both (`disaggregation/decode_schedule_batch_mixin.py`; releases before sglang#25973 add them up).

use std::hash::{DefaultHasher, Hash, Hasher};

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use http::Method;
use serde_json::Value;

use super::prometheus::Metrics;
use super::{
    Description, Dialect, Engine, Feed, Hints, Report, Role, TokenCount, feed, hinted, host_of, json, of_rank,
};
use crate::client::{EngineClient, EngineError};

/// SGLang's own default of `--disaggregation-bootstrap-port`.
const BOOTSTRAP_PORT: u16 = 8998;

#[derive(Debug)]
pub(super) struct Sglang;

async fn server_info(client: &EngineClient) -> Result<Value, EngineError> {
    match json(client, "/server_info").await {
        Ok(info) => Ok(info),
        Err(_) => json(client, "/get_server_info").await,
    }
}

fn number(info: &Value, name: &str) -> Option<u64> {
    let inner = &info["internal_states"][0][name];
    info[name].as_u64().or_else(|| inner.as_u64())
}

/// Run number of the process. Memory figures are not part of it, since they may change within a run.
fn instance(info: &Value) -> Option<u64> {
    let (seed, startup) = (number(info, "random_seed"), startup(info));
    if seed.is_none() && startup.is_empty() {
        return None;
    }
    let mut hasher = DefaultHasher::new();
    (seed, startup).hash(&mut hasher);
    Some(hasher.finish())
}

/// Most requests that one rank runs. Older releases report the sum over all ranks.
fn requests_max(info: &Value) -> Option<u32> {
    let ranks = number(info, "dp_size").unwrap_or(1).max(1);
    let of_rank = number(info, "effective_max_running_requests_per_dp");
    let most = of_rank.or_else(|| Some(number(info, "max_running_requests")? / ranks))?;
    u32::try_from(most).ok().filter(|most| *most > 0)
}

/// Durations of the parts of the start: seconds as floats, by name; empty for releases that do not report them. Nested
/// parts (CUDA graphs) are left out, since they may be made later.
fn startup(info: &Value) -> Vec<(&str, String)> {
    let told = &info["startup_time"];
    let mut parts: Vec<(&str, String)> = match told {
        Value::Object(parts) => parts
            .iter()
            .filter(|(_, took)| took.is_number())
            .map(|(name, took)| (name.as_str(), took.to_string()))
            .collect(),
        Value::Number(_) => vec![("", told.to_string())],
        _ => Vec::new(),
    };
    parts.sort();
    parts
}

fn first_feed(base: &str, info: &Value) -> Option<Feed> {
    let events = &info["kv_events"];
    let port = events["endpoint_port_base"].as_u64()?;
    let host = events["endpoint_host"].as_str().filter(|host| !host.is_empty()).unwrap_or("*");
    let endpoint = |port: u64| format!("tcp://{host}:{port}");
    let replay = events["replay_endpoint_port_base"].as_u64().map(endpoint);
    let mut feed = feed(base, &endpoint(port), replay.as_deref());
    // SGLang's publisher always listens; the host in its endpoint is the address to connect to.
    feed.bind = false;
    Some(feed)
}

fn description(base: &str, info: &Value, models: &Value, hints: &Hints) -> Description {
    let ranks = info["kv_events"]["dp_size"].as_u64().or_else(|| info["dp_size"].as_u64()).unwrap_or(1);
    let ranks = u16::try_from(ranks).unwrap_or(1).max(1);
    let first = hinted(base, hints).or_else(|| first_feed(base, info));
    let role = match info["disaggregation_mode"].as_str() {
        Some("prefill") => Role::Prefill,
        Some("decode") => Role::Decode,
        _ => Role::Both,
    };
    let page = number(info, "page_size").or_else(|| info["kv_events"]["block_size"].as_u64()).unwrap_or(1);
    let page = page.max(1) as usize;
    let port = number(info, "disaggregation_bootstrap_port").and_then(|port| u16::try_from(port).ok());
    let mut names = super::vllm::model_names(models);
    if let (true, Some(name)) = (names.is_empty(), info["served_model_name"].as_str()) {
        names.push(name.to_owned());
    }
    let context =
        models["data"][0]["max_model_len"].as_u64().or_else(|| number(info, "context_length")).unwrap_or(0);
    Description {
        engine: Engine::Sglang,
        version: info["version"].as_str().unwrap_or("unknown").to_owned(),
        models: names,
        role: Some(role),
        context_tokens: context as usize,
        block_tokens: page,
        blocks: number(info, "max_total_num_tokens").unwrap_or(0) as usize / page,
        lower_blocks: [0; 2],
        keeps_prefixes: info["disable_radix_cache"] != true,
        retains_blocks: false,
        instance: instance(info),
        feeds: (0..ranks).map(|rank| first.as_ref().map(|first| of_rank(first, rank))).collect(),
        data_plane: None,
        bootstrap: (role == Role::Prefill)
            .then(|| (host_of(base).to_owned(), port.unwrap_or(BOOTSTRAP_PORT))),
    }
}

impl Dialect for Sglang {
    fn engine(&self) -> Engine {
        Engine::Sglang
    }

    fn describe<'a>(
        &'a self,
        client: &'a EngineClient,
        hints: &'a Hints,
    ) -> BoxFuture<'a, Result<Description, EngineError>> {
        async move {
            let info = server_info(client).await?;
            let models = json(client, "/v1/models").await?;
            let description = description(client.base(), &info, &models, hints);
            if description.models.is_empty() {
                return Err(client.protocol("/v1/models names no model"));
            }
            Ok(description)
        }
        .boxed()
    }

    fn report<'a>(&'a self, client: &'a EngineClient) -> BoxFuture<'a, Result<Report, EngineError>> {
        async move {
            let info = server_info(client).await?;
            // The path exists only with `--enable-metrics`.
            let text = client.get("/metrics").await.unwrap_or_default();
            let text = String::from_utf8_lossy(&text);
            let names = ("sglang:num_running_reqs", "sglang:num_queue_reqs");
            let loads = Metrics::parse(&text).loads("dp_rank", names.0, names.1, &["sglang:token_usage"]);
            Ok(Report {
                instance: instance(&info),
                loads,
                requests_max: requests_max(&info),
                transfers: Vec::new(),
                stores: Vec::new(),
            })
        }
        .boxed()
    }

    /// `/health` has the engine generate a token: a sleeping engine would wait 20 s and report itself unhealthy.
    fn alive_asleep<'a>(&'a self, client: &'a EngineClient) -> BoxFuture<'a, Result<(), EngineError>> {
        async move {
            match client.get("/model_info").await {
                Ok(_) => Ok(()),
                Err(EngineError::Protocol { .. }) => client.get("/get_model_info").await.map(drop),
                Err(error) => Err(error),
            }
        }
        .boxed()
    }

    fn sleep_obstacle<'a>(
        &'a self,
        client: &'a EngineClient,
        _description: &'a Description,
        role: Role,
    ) -> BoxFuture<'a, Result<Option<String>, EngineError>> {
        async move {
            let info = server_info(client).await?;
            // Without a CPU copy, waking would not restore the weights.
            let is_prepared =
                info["enable_memory_saver"] == true && info["enable_weights_cpu_backup"] == true;
            let why = match (is_prepared, role) {
                (false, _) => {
                    Some("SGLang must be started with --enable-memory-saver and --enable-weights-cpu-backup")
                }
                (true, Role::Prefill | Role::Decode) => Some(
                    "SGLang's prefill and decode servers do not register their memory again when they wake",
                ),
                (true, Role::Both) => None,
            };
            Ok(why.map(str::to_owned))
        }
        .boxed()
    }

    /// Releasing memory kills a server that has requests: new ones are held back first, and the rest is ended.
    fn sleep<'a>(&'a self, client: &'a EngineClient) -> BoxFuture<'a, Result<(), EngineError>> {
        async move {
            let abort = Bytes::from_static(b"{\"mode\": \"abort\"}");
            client.ask(Method::POST, "/pause_generation", abort).await?;
            client.ask(Method::POST, "/release_memory_occupation", Bytes::from_static(b"{}")).await.map(drop)
        }
        .boxed()
    }

    /// Resuming kills a server whose memory was not released.
    fn wake<'a>(&'a self, client: &'a EngineClient) -> BoxFuture<'a, Result<(), EngineError>> {
        async move {
            client.ask(Method::POST, "/resume_memory_occupation", Bytes::from_static(b"{}")).await?;
            client.ask(Method::POST, "/continue_generation", Bytes::from_static(b"{}")).await.map(drop)
        }
        .boxed()
    }

    fn decode_needs_prefill(&self) -> bool {
        true
    }

    fn decode_reports_both(&self) -> bool {
        true
    }

    /// SGLang's `/tokenize` accepts only text; its Anthropic surface counts chats.
    fn token_count(&self) -> Option<TokenCount> {
        Some(TokenCount::Messages)
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
    fn a_prefill_server_with_two_ranks() {
        let info = json!({
            "version": "0.5.23", "page_size": 64, "max_total_num_tokens": 6400, "random_seed": 12,
            "disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 9001, "dp_size": 2,
            "kv_events": {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557,
                "replay_endpoint_port_base": 6557, "dp_size": 2, "block_size": 64},
        });
        let models = json!({"data": [{"id": "m", "owned_by": "sglang", "max_model_len": 4096}]});
        let description = description("http://h:30000", &info, &models, &Hints::default());
        assert_eq!((description.block_tokens, description.blocks), (64, 100));
        assert_eq!(description.role, Some(Role::Prefill));
        assert_eq!(description.bootstrap, Some(("h".to_owned(), 9001)));
        let events = description.feeds.iter().map(|feed| feed.as_ref().map(|feed| feed.events.as_str()));
        assert_eq!(events.collect::<Vec<_>>(), [Some("tcp://h:5557"), Some("tcp://h:5558")]);
        let other = json!({"random_seed": 13});
        assert_ne!(description.instance, instance(&other));
        assert_eq!(instance(&json!({})), None);
        assert_eq!(requests_max(&json!({"max_running_requests": 64, "dp_size": 2})), Some(32));
        let told = json!({"max_running_requests": null,
            "internal_states": [{"effective_max_running_requests_per_dp": 48}]});
        assert_eq!(requests_max(&told), Some(48));
        assert_eq!(requests_max(&json!({"max_running_requests": null})), None);
    }

    #[test]
    fn a_restart_with_the_same_seed_is_another_run() {
        let info = |startup: Value| json!({"random_seed": 42, "startup_time": startup});
        let run = |startup: Value| instance(&info(startup)).expect("a run");
        let first =
            run(json!({"tokenizer_e2e": 41.25, "scheduler_e2e": 38.5, "cuda_graph": {"decode": 0.0}}));
        let again =
            run(json!({"tokenizer_e2e": 41.75, "scheduler_e2e": 38.5, "cuda_graph": {"decode": 0.0}}));
        assert_ne!(first, again);
        // Within a run: another order, and a graph that was captured later.
        let same = run(json!({"scheduler_e2e": 38.5, "cuda_graph": {"decode": 3.5}, "tokenizer_e2e": 41.25}));
        assert_eq!(first, same);
        // Releases without start durations.
        let old = |seed: u64| instance(&json!({"random_seed": seed, "startup_time": null}));
        assert_eq!(old(42), instance(&json!({"random_seed": 42})));
        assert!(old(42).is_some() && old(42) != old(43) && old(42) != Some(first));
        assert!(instance(&json!({"startup_time": 12.5})).is_some());
    }

    #[test]
    fn a_server_without_a_radix_cache_keeps_no_prefixes() {
        let models = json!({"data": [{"id": "m", "owned_by": "sglang"}]});
        let keeps = |info: Value| description("http://h:1", &info, &models, &Hints::default()).keeps_prefixes;
        assert!(!keeps(json!({"disaggregation_mode": "decode", "disable_radix_cache": true})));
        assert!(keeps(json!({"disaggregation_mode": "decode", "disable_radix_cache": false})));
        assert!(keeps(json!({})));
    }
}
