//! TensorRT-LLM's `trtllm-serve`.
//!
//! The load is in `/prometheus/metrics`; `/metrics` is a JSON list that empties when it is read, so it is left alone.
//! No reported value changes with the run of the process.

use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use super::prometheus::Metrics;
use super::{Description, Dialect, Engine, Feed, Hints, POLLED, Report, hinted, json, json_if_present};
use crate::client::{EngineClient, EngineError};

/// TensorRT-LLM's own default of `tokens_per_block`.
const BLOCK_TOKENS: usize = 32;

/// Feed of an engine whose events are polled at `POST /kv_cache_events`. The engine forgets events that it has returned, so only
/// one gateway can follow it, and the operator has to enable this.
fn polled() -> Option<Feed> {
    Some(Feed { events: POLLED.to_owned(), replay: None, bind: false, topic: None })
}

#[derive(Debug)]
pub(super) struct TensorRtLlm;

async fn metrics_text(client: &EngineClient) -> String {
    // The path exists only with iteration statistics.
    client
        .get("/prometheus/metrics")
        .await
        .map(|text| String::from_utf8_lossy(&text).into_owned())
        .unwrap_or_default()
}

impl Dialect for TensorRtLlm {
    fn engine(&self) -> Engine {
        Engine::TensorRtLlm
    }

    fn describe<'a>(
        &'a self,
        client: &'a EngineClient,
        hints: &'a Hints,
    ) -> BoxFuture<'a, Result<Description, EngineError>> {
        async move {
            let models = json(client, "/v1/models").await?;
            let names = super::vllm::model_names(&models);
            if names.is_empty() {
                return Err(client.protocol("/v1/models names no model"));
            }
            let version = json_if_present(client, "/version").await?;
            let text = metrics_text(client).await;
            let metrics = Metrics::parse(&text);
            let count = |name: &str| metrics.first(&[name]).map(|value| value as usize);
            Ok(Description {
                engine: Engine::TensorRtLlm,
                version: version["version"].as_str().unwrap_or("unknown").to_owned(),
                models: names,
                role: None,
                context_tokens: models["data"][0]["max_model_len"].as_u64().unwrap_or(0) as usize,
                block_tokens: count("trtllm_kv_cache_tokens_per_block")
                    .filter(|tokens| *tokens > 0)
                    .unwrap_or(BLOCK_TOKENS),
                blocks: count("trtllm_kv_cache_max_blocks").unwrap_or(0),
                lower_blocks: [0; 2],
                keeps_prefixes: true,
                retains_blocks: false,
                instance: None,
                feeds: vec![if hints.events.as_deref() == Some(POLLED) {
                    polled()
                } else {
                    hinted(client.base(), hints)
                }],
                data_plane: None,
                bootstrap: None,
            })
        }
        .boxed()
    }

    fn report<'a>(&'a self, client: &'a EngineClient) -> BoxFuture<'a, Result<Report, EngineError>> {
        async move {
            let text = metrics_text(client).await;
            let metrics = Metrics::parse(&text);
            let names = ("trtllm_num_requests_running", "trtllm_num_requests_waiting");
            Ok(Report {
                instance: None,
                loads: metrics.loads("rank", names.0, names.1, &["trtllm_kv_cache_utilization"]),
                requests_max: None,
                transfers: Vec::new(),
                stores: Vec::new(),
            })
        }
        .boxed()
    }
}
