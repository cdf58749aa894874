//! Descriptions of a worker and its model, and the surfaces that generate no output.

use serde_json::{Value, json};

use super::ServerState;
use super::parsed_request::chat_prompt;
use super::refusal::Refusal;
use super::request::{Body, Prompt, Prompts};
use crate::fault::mix;
use crate::output_generator::OutputGenerator;
use crate::worker::Worker;

/// The vLLM release whose contract the mock has.
pub(super) const VLLM_VERSION: &str = "0.32.0";
const SGLANG_VERSION: &str = "0.5.20";
/// Dimensions of an embedding if the request sets none.
const DIMENSIONS: u64 = 64;
const DIMENSIONS_MAX: u64 = 8192;
/// vLLM's high-water mark of the event socket.
const EVENTS_HIGH_WATER: usize = 100_000;

pub(super) fn models(worker: &Worker) -> Value {
    let config = &worker.config;
    let owner = match config.dialect {
        crate::Dialect::Vllm => "vllm",
        crate::Dialect::Sglang => "sglang",
    };
    let entry = |id: &String, parent: Option<&String>| {
        json!({
            "id": id, "object": "model", "created": worker.started, "owned_by": owner, "root": id, "parent": parent,
            "max_model_len": parent.is_none().then_some(config.context_tokens), "permission": [],
        })
    };
    let adapters = config.adapters.iter().map(|name| entry(name, Some(&config.model)));
    let data: Vec<Value> = std::iter::once(entry(&config.model, None)).chain(adapters).collect();
    json!({ "object": "list", "data": data })
}

/// vLLM's `/kv_event_sources`.
pub(super) fn event_sources(served: &ServerState) -> Value {
    let endpoint = |port: Option<u16>| port.map(|port| format!("tcp://*:{port}"));
    json!({ "0": {
        "enable_kv_cache_events": served.addresses.events_port.is_some(),
        "publisher": if served.addresses.events_port.is_some() { "zmq" } else { "null" },
        "endpoint": endpoint(served.addresses.events_port),
        "replay_endpoint": endpoint(served.addresses.replay_port),
        "buffer_steps": crate::events::REPLAY_BATCHES,
        "hwm": EVENTS_HIGH_WATER,
        "max_queue_size": EVENTS_HIGH_WATER,
        "topic": served.worker.config.topic,
    } })
}

/// `GET /query` of a Mooncake prefill worker's bootstrap server.
pub(super) fn bootstrap(served: &ServerState) -> Value {
    let address = served.addresses.address.to_string();
    json!({ "0": { "engine_id": served.worker.engine_id, "worker_addr": { "0": { "0": address } } } })
}

/// SGLang's `/server_info`.
pub(super) fn server_info(served: &ServerState) -> Value {
    let config = &served.worker.config;
    // As in SGLang, in seconds: constant while the process runs, and different in every run.
    let run = served.worker.engine_id.bytes().fold(0, |hash, byte| mix(hash ^ u64::from(byte)));
    let took = 30.0 + (run >> 12) as f64 / (1_u64 << 52) as f64;
    let mut info = json!({
        "version": SGLANG_VERSION, "random_seed": config.seed, "disable_radix_cache": false,
        "startup_time": { "scheduler_e2e": took, "tokenizer_e2e": took + 1.0 },
        "model_path": config.model, "served_model_name": config.model,
        "page_size": config.block_tokens, "disaggregation_mode": served.role_name(),
        "disaggregation_bootstrap_port": served.addresses.address.port(), "dp_size": 1, "tp_size": 1,
        "context_length": config.context_tokens, "max_running_requests": config.batch_max,
        "max_total_num_tokens": config.usable_blocks() * config.block_tokens,
        "host": served.addresses.address.ip(), "port": served.addresses.address.port(), "kv_events": null,
    });
    if config.wake.is_some() {
        (info["enable_memory_saver"], info["enable_weights_cpu_backup"]) = (true.into(), true.into());
    }
    if let Some(port) = served.addresses.events_port {
        info["kv_events"] = json!({
            "publisher": "zmq", "endpoint_host": served.addresses.address.ip(), "endpoint_port_base": port,
            "topic": config.topic, "block_size": config.block_tokens, "dp_size": 1,
        });
        if let Some(port) = served.addresses.replay_port {
            info["kv_events"]["replay_endpoint_port_base"] = port.into();
        }
    }
    info
}

/// SGLang's `/model_info`.
pub(super) fn model_info(worker: &Worker) -> Value {
    json!({
        "model_path": worker.config.model, "tokenizer_path": worker.config.model, "is_generation": true,
        "preferred_sampling_params": null, "weight_version": "default",
    })
}

/// SGLang's `/v1/loads`.
pub(super) fn loads(worker: &Worker) -> Value {
    let stats = worker.stats();
    let used = stats.held_blocks * worker.config.block_tokens;
    let total = worker.config.usable_blocks() * worker.config.block_tokens;
    json!({ "version": SGLANG_VERSION, "dp_rank_count": 1, "loads": [{
        "dp_rank": 0, "num_running_reqs": stats.running, "num_waiting_reqs": stats.waiting,
        "num_total_reqs": stats.running + stats.waiting, "num_used_tokens": used, "max_total_num_tokens": total,
        "token_usage": used as f64 / total.max(1) as f64, "max_running_requests": worker.config.batch_max,
    }] })
}

/// `/tokenize`.
pub(super) fn tokenized(worker: &Worker, body: Body<'_>) -> Result<Value, Refusal> {
    let text = body.prompt.as_ref().and_then(|prompts| prompts.0.first());
    let tokens = match text {
        Some(Prompt::Text(text)) => {
            let ids = worker.model.text.tokenizer.encode(text, true);
            ids.map_err(|error| Refusal::bad("prompt", error.to_string()))?
        }
        _ => chat_prompt(worker, &body)?,
    };
    Ok(json!({
        "count": tokens.len(), "max_model_len": worker.config.context_tokens, "tokens": tokens,
        "token_strs": null,
    }))
}

/// `/detokenize`.
pub(super) fn detokenized(worker: &Worker, body: &Value) -> Result<Value, Refusal> {
    let tokens: Vec<u32> =
        serde_json::from_value(body["tokens"].clone()).map_err(|error| Refusal::malformed(&error))?;
    Ok(json!({ "prompt": worker.model.text.tokenizer.decode(&tokens, false) }))
}

/// `/v1/embeddings`.
pub(super) fn embeddings(worker: &Worker, body: &Value) -> Result<Value, Refusal> {
    if let Some(asked) = body["model"].as_str().filter(|asked| *asked != worker.config.model) {
        return Err(Refusal::no_such_model(asked, &worker.config.model));
    }
    let input = <Prompts<'_> as serde::Deserialize>::deserialize(&body["input"]);
    let input = input.map_err(|error| Refusal::malformed(&error))?;
    if input.0.is_empty() {
        return Err(Refusal::missing("input"));
    }
    let dimensions = body["dimensions"].as_u64().unwrap_or(DIMENSIONS).clamp(1, DIMENSIONS_MAX) as usize;
    let is_base64 = body["encoding_format"] == "base64";
    let (mut entries, mut total) = (Vec::with_capacity(input.0.len()), 0);
    for (index, prompt) in input.0.into_iter().enumerate() {
        let tokens = match prompt {
            Prompt::Tokens(tokens) => tokens,
            Prompt::Text(text) => {
                let ids = worker.model.text.tokenizer.encode(&text, true);
                ids.map_err(|error| Refusal::bad("input", error.to_string()))?
            }
        };
        total += tokens.len();
        let vector = OutputGenerator::embedding(&tokens, dimensions);
        let embedding = if is_base64 { Value::from(base64(&vector)) } else { json!(vector) };
        entries.push(json!({ "object": "embedding", "index": index, "embedding": embedding }));
    }
    Ok(json!({
        "id": format!("embd-{:016x}", worker.started), "object": "list", "created": worker.started,
        "model": worker.config.model, "data": entries,
        "usage": { "prompt_tokens": total, "total_tokens": total, "completion_tokens": 0 },
    }))
}

/// Returns the number of tokens of the texts, and a relevance for each: the share of the query's tokens in it.
fn relevances(worker: &Worker, query: &Value, texts: &[Value]) -> Result<(usize, Vec<f64>), Refusal> {
    let ids = |text: &Value| {
        let text = text.as_str().or_else(|| text["text"].as_str());
        let text = text.ok_or_else(|| Refusal::bad("documents", "texts are wanted".to_owned()))?;
        let ids = worker.model.text.tokenizer.encode(text, false);
        ids.map_err(|error| Refusal::bad("documents", error.to_string()))
    };
    let query = ids(query)?;
    let (mut total, mut relevances) = (0, Vec::with_capacity(texts.len()));
    for text in texts {
        let text = ids(text)?;
        total += query.len() + text.len();
        let found = query.iter().filter(|id| text.contains(id)).count();
        relevances.push(found as f64 / query.len().max(1) as f64);
    }
    Ok((total, relevances))
}

/// `/v1/rerank`.
pub(super) fn reranked(worker: &Worker, body: &Value) -> Result<Value, Refusal> {
    let documents = body["documents"].as_array().filter(|documents| !documents.is_empty());
    let documents = documents.ok_or_else(|| Refusal::missing("documents"))?;
    let (total, relevances) = relevances(worker, &body["query"], documents)?;
    let mut order: Vec<usize> = (0..documents.len()).collect();
    order.sort_by(|&a, &b| relevances[b].total_cmp(&relevances[a]));
    order.truncate(body["top_n"].as_u64().filter(|most| *most > 0).map_or(usize::MAX, |most| most as usize));
    let results: Vec<Value> = order
        .into_iter()
        .map(|at| {
            let text = documents[at].as_str().or_else(|| documents[at]["text"].as_str());
            json!({ "index": at, "document": { "text": text }, "relevance_score": relevances[at] })
        })
        .collect();
    Ok(json!({
        "id": format!("rerank-{:016x}", worker.started), "model": worker.config.model,
        "usage": { "prompt_tokens": total, "total_tokens": total }, "results": results,
    }))
}

/// `/v1/score`.
pub(super) fn scored(worker: &Worker, body: &Value) -> Result<Value, Refusal> {
    let list = |value: &Value| match value {
        Value::Array(texts) => texts.clone(),
        text => vec![text.clone()],
    };
    let (query, texts) = (list(&body["text_1"]), list(&body["text_2"]));
    let query = query.first().filter(|query| query.is_string()).ok_or_else(|| Refusal::missing("text_1"))?;
    let (total, relevances) = relevances(worker, query, &texts)?;
    let data: Vec<Value> = relevances
        .iter()
        .enumerate()
        .map(|(at, score)| json!({ "index": at, "object": "score", "score": score }))
        .collect();
    Ok(json!({
        "id": format!("score-{:016x}", worker.started), "object": "list", "created": worker.started,
        "model": worker.config.model, "data": data,
        "usage": { "prompt_tokens": total, "total_tokens": total },
    }))
}

/// `/v1/audio/speech`: bytes that stand for audio, and are not text.
pub(super) fn spoken(body: &Value) -> Result<Vec<u8>, Refusal> {
    let text = body["input"].as_str().ok_or_else(|| Refusal::missing("input"))?;
    let mut sound = b"RIFF\0\xff\xfe".to_vec();
    sound.extend(text.bytes().map(|byte| !byte));
    Ok(sound)
}

/// Little-endian floats in base64 (RFC 4648, section 4), which OpenAI's own client asks for.
fn base64(vector: &[f32]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for three in bytes.chunks(3) {
        let byte = |at: usize| u32::from(three.get(at).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for at in 0..4 {
            let six = (bits >> (18 - 6 * at) & 63) as usize;
            out.push(if at <= three.len() { char::from(ALPHABET[six]) } else { '=' });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    #[test]
    fn base64_is_that_of_the_rfc() {
        assert_eq!(super::base64(&[1.0, -2.5]), "AACAPwAAIMA=");
        assert_eq!(super::base64(&[1.0]), "AACAPw==");
    }
}
