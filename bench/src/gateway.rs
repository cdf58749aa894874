//! What the gateway adds: the same streamed completion, directly from a mock worker and through the gateway.
//!
//! Latency is open-loop: requests start at a fixed rate whether or not earlier ones have ended, and each is
//! timed from the moment that it was due, so that a stall counts for everybody behind it. Client, gateway and
//! worker share this process and its cores, so the throughput is that of all three together.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use axum::Router;
use axum::body::Body;
use axum::routing::{get, post};
use axum::serve::ListenerExt;
use router_engines::client::{EngineClient, WorkerDescription};
use router_engines::handoff::DataPlaneAddress;
use router_engines::dialect::Hints;
use router_gateway::{Fleet, Formats, Gateway, GatewayConfig, TextBy, WorkerConfig, router};
use router_policy::Policy;
use router_tokens::ModelText;
use serde_json::{Map, Value, json};
use tokio::net::TcpListener;
use tokio::time::Instant;

use crate::measure::{Latencies, median};

pub(crate) const MODEL: &str = "mock";
const TOKENS: usize = 8;
/// Token ids of the built-in tokenizer, so about 1.2 KB of text and 5 KB of JSON.
const PROMPT: [u32; 1200] = [101; 1200];
const CONCURRENT: usize = 64;

pub(crate) fn run(smoke: bool) -> Result<()> {
    println!(
        "# gateway: prompts of {} ids, {TOKENS} streamed tokens, a mock worker, one process",
        PROMPT.len()
    );
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(measure(smoke))
}

pub(crate) async fn listen(routes: Router) -> Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    let listener = listener.tap_io(|stream| {
        let _gone = stream.set_nodelay(true);
    });
    tokio::spawn(async move { axum::serve(listener, routes).await });
    Ok(url)
}

/// A worker that answers every completion with the same events at once.
pub(crate) fn mock_worker() -> Router {
    let description = WorkerDescription {
        role: "both".to_owned(),
        model: MODEL.to_owned(),
        context_tokens: 1 << 20,
        block_tokens: 16,
        blocks: 1 << 20,
        instance: 1,
        events: None,
        replay: None,
        data_plane: DataPlaneAddress { host: String::new(), shm: None, tcp: None },
    };
    let mut events: Vec<String> = (0..TOKENS)
        .map(|at| json!({"choices": [{"index": 0, "text": "A", "token_ids": [65 + at], "finish_reason": null}]}))
        .map(|event| format!("data: {event}\n\n"))
        .collect();
    let finish = json!({"choices": [{"index": 0, "text": "", "token_ids": [], "finish_reason": "length"}]});
    events.push(format!("data: {finish}\n\n"));
    events.push("data: [DONE]\n\n".to_owned());
    let events = Arc::new(events);
    let complete = move || {
        let events: Vec<Result<String, Infallible>> = events.iter().cloned().map(Ok).collect();
        async move { Body::from_stream(futures_util::stream::iter(events)) }
    };
    Router::new()
        .route("/kvasir/worker", get(move || async move { json!(description).to_string() }))
        .route("/v1/completions", post(complete))
}

pub(crate) async fn gateway_over(workers: &[String]) -> Result<String> {
    let config = GatewayConfig {
        model: Some(MODEL.to_owned()),
        workers: workers.iter().map(|url| WorkerConfig::new(url)).collect(),
        engine: None,
        hints: Hints::default(),
        protocol: None,
        mooncake_bootstrap: String::new(),
        has_tokenizer: true,
        text: TextBy::Auto,
        formats: Formats::default(),
        stall: Duration::from_secs(60),
        policy: Policy::default(),
        index_memory_max: 1 << 30,
        approximate_ttl: Duration::from_secs(120),
        peers: Vec::new(),
        snapshot_file: None,
        snapshot_interval: Duration::from_secs(30),
        disaggregate_above_tokens: usize::MAX,
        body_bytes_max: 1 << 20,
        requests_max: 1 << 20,
        retries: 0,
        health_interval: Duration::from_secs(1),
        worker_wait: Duration::from_secs(5),
    };
    let fleet = Fleet::start(&config);
    let gateway = Gateway::new(config, ModelText::tiny()?, fleet);
    listen(router(gateway)).await
}

fn body() -> Map<String, Value> {
    let fields = json!({
        "model": MODEL, "max_tokens": TOKENS,
        "stream": true, "return_token_ids": true,
    });
    fields.as_object().cloned().unwrap_or_default()
}

async fn complete(client: &EngineClient, fields: &Map<String, Value>) -> Result<usize> {
    let mut stream = client.complete("bench", fields, &PROMPT).await?;
    let mut tokens = 0;
    while let Some(piece) = stream.next().await? {
        tokens += piece.token_ids.len();
    }
    Ok(tokens)
}

async fn measure(smoke: bool) -> Result<()> {
    let worker = listen(mock_worker()).await?;
    let gateway = gateway_over(std::slice::from_ref(&worker)).await?;
    let clients = [("direct", EngineClient::new(&worker)), ("gateway", EngineClient::new(&gateway))];
    let fields = Arc::new(body());
    for (name, client) in &clients {
        let tokens = complete(client, &fields).await.with_context(|| format!("{name}, first request"))?;
        anyhow::ensure!(tokens == TOKENS, "{name}: {tokens} tokens");
    }
    let rounds = if smoke { 1 } else { 7 };
    let mut latencies = [Latencies::new()?, Latencies::new()?];
    let mut rates = [Vec::new(), Vec::new()];
    for _ in 0..rounds {
        for (which, (_, client)) in clients.iter().enumerate() {
            let requests = if smoke { 20 } else { 600 };
            open_loop(client, &fields, requests, &mut latencies[which]).await?;
            let period = Duration::from_millis(if smoke { 50 } else { 1000 });
            rates[which].push(closed_loop(client, &fields, period).await?);
        }
    }
    let [direct, through] = &latencies;
    println!("open loop, 300 requests/s, p50 / p99 / p99.9 of the whole answer:");
    println!("direct   {}", direct.render());
    println!(
        "gateway  {}  (added at p50: {:.0} us)",
        through.render(),
        (through.at(0.5) - direct.at(0.5)) / 1e3
    );
    let [direct, through] = rates.map(median);
    println!(
        "closed loop, {CONCURRENT} at a time: direct {direct:.0}/s, gateway {through:.0}/s, ratio {:.2}",
        through / direct
    );
    Ok(())
}

async fn open_loop(
    client: &EngineClient,
    fields: &Arc<Map<String, Value>>,
    requests: u32,
    latencies: &mut Latencies,
) -> Result<()> {
    const PERIOD: Duration = Duration::from_micros(1_000_000 / 300);
    let start = Instant::now();
    let mut answers = Vec::new();
    for number in 0..requests {
        let due = start + PERIOD * number;
        tokio::time::sleep_until(due).await;
        let (client, fields) = (client.clone(), Arc::clone(fields));
        // The timer is only so exact: what counts is the moment at which the request was really sent, if the
        // process was on time, and when it was due, if it was late for other reasons.
        let sent = Instant::now().min(due + Duration::from_millis(2));
        answers.push(tokio::spawn(async move {
            complete(&client, &fields).await?;
            anyhow::Ok(sent.elapsed())
        }));
    }
    for answer in answers {
        latencies.record(answer.await??);
    }
    Ok(())
}

async fn closed_loop(
    client: &EngineClient,
    fields: &Arc<Map<String, Value>>,
    period: Duration,
) -> Result<f64> {
    let start = Instant::now();
    let tasks: Vec<_> = (0..CONCURRENT)
        .map(|_| {
            let (client, fields) = (client.clone(), Arc::clone(fields));
            tokio::spawn(async move {
                let mut done = 0_u32;
                while start.elapsed() < period {
                    complete(&client, &fields).await?;
                    done += 1;
                }
                anyhow::Ok(done)
            })
        })
        .collect();
    let mut total = 0;
    for task in tasks {
        total += task.await??;
    }
    Ok(f64::from(total) / start.elapsed().as_secs_f64())
}
