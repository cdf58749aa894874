//! An engine whose KV events are polled (TensorRT-LLM's API, as documented): requests are routed by its
//! events, and its blocks are dropped when it restarts or an event is missing.

use std::collections::{HashSet, VecDeque};
use std::path::Path;
use std::sync::{Arc, Mutex};

use crate::support;
use crate::support::site::{chat, model_folder};
use crate::support::{Process, Scratch, wait_for};
use axum::Router;
use axum::routing::{get, post};
use serde_json::{Map, Value, json};

const BLOCK_TOKENS: usize = 16;

/// Events that were not yet polled, the number of the next event, and the prompts that the engine holds.
#[derive(Default)]
struct EngineEvents {
    events: VecDeque<Value>,
    next: u64,
    held: HashSet<Vec<u32>>,
}

impl EngineEvents {
    fn say(&mut self, data: Value) {
        let id = self.next;
        self.next += 1;
        self.events.push_back(json!({ "event_id": id, "data": data, "window_size": 4096 }));
    }
}

fn tokens_of(request: &Value) -> Vec<u32> {
    let text = router_tokens::ModelText::from_folder(Path::new(&model_folder())).expect("the tokenizer");
    let encoded = text.encode_conversation(request["messages"].clone(), true, false, &Map::new());
    encoded.expect("a prompt").ids
}

/// Returns the blocks of a prompt with engine-specific hashes: any number will do, as long as prefixes
/// differ.
fn stored(tokens: &[u32]) -> Value {
    let mut name = 7_u64;
    let blocks: Vec<Value> = tokens
        .chunks_exact(BLOCK_TOKENS)
        .map(|block| {
            name = block
                .iter()
                .fold(name, |name, &token| (name ^ u64::from(token)).wrapping_mul(0x100_0000_01B3));
            let ids: Vec<Value> =
                block.iter().map(|id| json!({ "token_id": id, "token_extra_id": 0 })).collect();
            json!({ "block_hash": name, "cache_level": 0, "priority": 35, "tokens": ids })
        })
        .collect();
    json!({ "type": "stored", "parent_hash": null, "blocks": blocks })
}

async fn engine(told: Arc<Mutex<EngineEvents>>) -> String {
    let (asked, served) = (Arc::clone(&told), told);
    let models = json!({ "object": "list", "data": [{ "id": "tiny", "object": "model", "owned_by": "tensorrt_llm" }] });
    let models = models.to_string();
    let metrics =
        format!("trtllm_kv_cache_tokens_per_block {BLOCK_TOKENS}\ntrtllm_kv_cache_max_blocks 4096\n");
    let routes = Router::new()
        .route("/v1/models", get(move || async move { models }))
        .route("/version", get(|| async { "{\"version\":\"1.2.0\"}" }))
        .route("/health", get(|| async { "" }))
        .route("/prometheus/metrics", get(move || async move { metrics }))
        .route(
            "/kv_cache_events",
            post(move || async move {
                let events: Vec<Value> = asked.lock().expect("lock").events.drain(..).collect();
                Value::from(events).to_string()
            }),
        )
        .route(
            "/v1/chat/completions",
            post(move |body: String| async move {
                let request: Value = serde_json::from_str(&body).expect("JSON");
                let tokens = tokens_of(&request);
                {
                    let mut told = served.lock().expect("lock");
                    if told.held.insert(tokens.clone()) {
                        told.say(stored(&tokens));
                    }
                }
                json!({
                    "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "tiny",
                    "choices": [{ "index": 0, "message": { "role": "assistant", "content": "yes" }, "finish_reason": "stop" }],
                    "usage": { "prompt_tokens": tokens.len(), "completion_tokens": 1, "total_tokens": tokens.len() + 1 },
                })
                .to_string()
            }),
        );
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    tokio::spawn(async move { axum::serve(listener, routes).await });
    url
}

/// Returns the number of blocks of a prompt that the engine holds according to the index.
fn overlap(gateway: &Process, words: usize, seed: usize) -> u64 {
    let (status, head, _) =
        support::client(&gateway.address, None, "/v1/chat/completions", Some(&chat(words, seed, 1)));
    assert_eq!(status, 200);
    let blocks = head.split("overlap_blocks=").nth(1).and_then(|rest| rest.split('/').next());
    blocks.and_then(|blocks| blocks.parse().ok()).unwrap_or_else(|| panic!("no overlap in {head}"))
}

#[test]
fn polled_events_are_followed() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let told = Arc::new(Mutex::new(EngineEvents::default()));
    told.lock().expect("lock").say(json!({ "type": "created", "num_blocks_per_cache_level": [4096] }));
    let url = runtime.block_on(engine(Arc::clone(&told)));
    let scratch = Scratch::new("trtllm");
    let config = format!(
        "[gateway]\nhealth_interval = \"100ms\"\nkv_events = \"poll\"\nmodel_folder = {:?}\n",
        model_folder()
    );
    let path = scratch.config("kvasir.toml", &config);
    let gateway = Process::start(&["gateway", "--config", &path, "--worker", &url]);
    gateway.wait_healthy();
    let (_, status) = support::get(&gateway.address, "/kvasir/status").expect("a status");
    let status: Value = serde_json::from_str(&status).expect("JSON");
    assert_eq!(
        (&status["workers"][0]["engine"], &status["workers"][0]["events"]),
        (&json!("tensorrt-llm"), &json!(true))
    );
    assert_eq!(overlap(&gateway, 80, 1), 0);
    let tokens = tokens_of(&chat(80, 1, 1));
    let whole = (tokens.len() / BLOCK_TOKENS) as u64;
    assert!(whole > 4);
    wait_for("its blocks to be known", || overlap(&gateway, 80, 1) == whole);
    // The engine drops one block in the middle: the blocks after it are unusable.
    let gone = stored(&tokens)["blocks"][2]["block_hash"].clone();
    told.lock().expect("lock").say(json!({ "type": "removed", "block_hashes": [gone] }));
    wait_for("the removal", || overlap(&gateway, 80, 1) == 2);
    // An event number is missing: all known blocks are dropped.
    let created = json!({ "type": "created", "num_blocks_per_cache_level": [4096] });
    {
        let mut told = told.lock().expect("lock");
        told.next += 5;
        told.say(created.clone());
    }
    wait_for("everything to be forgotten", || overlap(&gateway, 80, 1) == 0);
    assert!(gateway.metric("kvasir_gateway_kv_event_resets_total") >= 1.0);
    told.lock().expect("lock").held.clear();
    wait_for("its blocks to be known again", || overlap(&gateway, 80, 1) == whole);
    // A new run counts from 0, and holds no blocks.
    {
        let mut told = told.lock().expect("lock");
        let held = told.held.clone();
        *told = EngineEvents { held, ..EngineEvents::default() };
        told.say(created);
    }
    wait_for("the other life to be noticed", || overlap(&gateway, 80, 1) == 0);
}
