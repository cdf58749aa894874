//! Overhead of a gateway: the same chats directly to a mock engine and through gateways in front of it, in turn.
//!
//! Without `--side`, mock, gateway and client run in this process, each on its own threads. With it, they are
//! processes started beforehand (as `bench/peers/gateways.sh` does), and this is only the client; for a side
//! with a process id the processor time is reported too. All of them share the machine's cores, so a rate is
//! that of all of them together.

mod load;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use axum::Router;
use axum::body::Body;
use axum::routing::{get, post};
use axum::serve::ListenerExt;
use clap::Args;
use router_engines::client::WorkerDescription;
use router_engines::dialect::Hints;
use router_engines::handoff::DataPlaneAddress;
use router_engines::key::EngineKeys;
use router_fleet::{DEFAULT_POOL, Fleet, FleetConfig, PoolConfig, RoutingPolicy, WorkerSpec};
use router_gateway::{
    AccessConfig, Formats, Gateway, GatewayConfig, ModelConfig, TextSource, Tuning, router,
};
use router_policy::Policy;
use router_tokens::ModelText;
use serde_json::json;
use tokio::net::TcpListener;
use tools_mocker::{Mock, MockConfig};

use self::load::{Requests, closed_loop, open_loop};
use crate::measure::{Latencies, median};
use crate::results::{self, Better};

pub(crate) const MODEL: &str = "mock";
const TOKENS: usize = 8;

/// The sides, and the requests sent to them.
#[derive(Args, Clone)]
pub struct GatewayArgs {
    /// A side: NAME=HOST:PORT or NAME=HOST:PORT@PID. The others are compared with the first.
    #[arg(long = "side", value_name = "NAME=HOST:PORT[@PID]")]
    sides: Vec<String>,
    /// Name of the model.
    #[arg(long, default_value = "tiny")]
    model: String,
    /// Size of a request in bytes.
    #[arg(long, default_value_t = 1200)]
    bytes: usize,
    /// Stream the answers.
    #[arg(long)]
    stream: bool,
    /// Connections of the closed loop.
    #[arg(long, default_value = "64", value_delimiter = ',')]
    connections: Vec<usize>,
    /// Requests per second of the open loop.
    #[arg(long, default_value = "1000", value_delimiter = ',')]
    rates: Vec<f64>,
    /// Rounds; the median is reported.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Seconds of a closed loop.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Number of different prompts.
    #[arg(long, default_value_t = 256)]
    prompts: usize,
}

impl GatewayArgs {
    pub(crate) fn with_defaults() -> Self {
        Self {
            sides: Vec::new(),
            model: "tiny".to_owned(),
            bytes: 1200,
            stream: false,
            connections: vec![64],
            rates: vec![1000.0],
            rounds: 5,
            seconds: 2.0,
            prompts: 256,
        }
    }
}

struct Side {
    name: String,
    address: String,
    process: Option<u32>,
}

impl Side {
    fn parse(text: &str) -> Result<Self> {
        let (name, rest) = text.split_once('=').with_context(|| format!("--side {text}: no NAME="))?;
        let (address, process) = match rest.split_once('@') {
            Some((address, process)) => (
                address,
                Some(process.parse().with_context(|| format!("--side {text}: {process:?} is no process"))?),
            ),
            None => (rest, None),
        };
        Ok(Self { name: name.to_owned(), address: address.trim_start_matches("http://").to_owned(), process })
    }

    /// Processor seconds of the process and its children so far.
    fn processor_seconds(&self) -> Option<f64> {
        let of = |process: u32| -> Option<(f64, u32)> {
            let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
            let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
            let ticks = |at: usize| fields.get(at).and_then(|field| field.parse::<f64>().ok());
            // utime and stime are the 14th and 15th of `man 5 proc`, in hundredths of a second on Linux.
            Some(((ticks(11)? + ticks(12)?) / 100.0, fields.get(1)?.parse().ok()?))
        };
        let process = self.process?;
        let mut sum = of(process)?.0;
        for entry in std::fs::read_dir("/proc").ok()?.flatten() {
            let id = entry.file_name().to_string_lossy().parse::<u32>().ok();
            if let Some((seconds, parent)) = id.and_then(of)
                && parent == process
            {
                sum += seconds;
            }
        }
        Some(sum)
    }
}

pub(crate) fn run(smoke: bool, args: &GatewayArgs) -> Result<()> {
    let threads = |name: &str, count: usize| {
        tokio::runtime::Builder::new_multi_thread()
            .worker_threads(count)
            .thread_name(name.to_owned())
            .enable_all()
            .build()
    };
    let client = threads("client", 1)?;
    if !args.sides.is_empty() {
        let sides = args.sides.iter().map(|side| Side::parse(side)).collect::<Result<Vec<_>>>()?;
        return client.block_on(compare(smoke, args, &sides));
    }
    let (backend, middle) = (threads("mock", 1)?, threads("gateway", 2)?);
    let mock = backend.block_on(async {
        Mock::start(MockConfig::tiny()?, "127.0.0.1:0".parse()?).await.map_err(anyhow::Error::from)
    })?;
    let url = mock.url();
    let gateway = middle.block_on(gateway_over(std::slice::from_ref(&url), "tiny"))?;
    let side = |name: &str, url: &str| Side {
        name: name.to_owned(),
        address: url.trim_start_matches("http://").to_owned(),
        process: None,
    };
    let sides = [side("direct", &url), side("kvasir", &gateway)];
    client.block_on(compare(smoke, args, &sides))?;
    for runtime in [middle, backend] {
        runtime.shutdown_background();
    }
    Ok(())
}

/// Figures of one side.
struct Measured {
    rates: Vec<Vec<f64>>,
    processor: Vec<f64>,
    whole: Vec<Latencies>,
    first: Vec<Latencies>,
}

async fn compare(smoke: bool, args: &GatewayArgs, sides: &[Side]) -> Result<()> {
    let kind = if args.stream { "streamed" } else { "whole" };
    println!(
        "# gateway: chats of {} bytes, {TOKENS} tokens, {kind} answers, {} prompts",
        args.bytes, args.prompts
    );
    let requests = Arc::new(Requests::chats(&args.model, args.bytes, TOKENS, args.stream, args.prompts));
    let rounds = if smoke { 1 } else { args.rounds };
    let period = Duration::from_secs_f64(if smoke { 0.1 } else { args.seconds });
    let latencies = |count: usize| (0..count).map(|_| Latencies::new()).collect::<Result<Vec<_>>>();
    let mut all = Vec::new();
    for side in sides {
        // A side is ready once it answers; the slow first requests (connections, caches) are not measured.
        let warm_up = closed_loop(&side.address, &requests, 4, period / 4).await;
        warm_up.with_context(|| format!("{}: the first requests", side.name))?;
        all.push(Measured {
            rates: vec![Vec::new(); args.connections.len()],
            processor: Vec::new(),
            whole: latencies(args.rates.len())?,
            first: latencies(args.rates.len())?,
        });
    }
    for round in 0..rounds {
        // The sides take turns in going first.
        let order: Vec<usize> = (0..sides.len()).map(|turn| (round + turn) % sides.len()).collect();
        for (at, &connections) in args.connections.iter().enumerate() {
            for &which in &order {
                let (side, measured) = (&sides[which], &mut all[which]);
                let before = side.processor_seconds();
                let rate = closed_loop(&side.address, &requests, connections, period).await;
                let rate = rate.with_context(|| side.name.clone())?;
                measured.rates[at].push(rate);
                if let (Some(before), Some(after)) = (before, side.processor_seconds()) {
                    measured.processor.push((after - before) / (rate * period.as_secs_f64()) * 1e3);
                }
            }
        }
        for (at, &rate) in args.rates.iter().enumerate() {
            let count = if smoke { 20 } else { (rate * args.seconds) as u64 };
            for &which in &order {
                let (side, measured) = (&sides[which], &mut all[which]);
                let (whole, first) = (&mut measured.whole[at], &mut measured.first[at]);
                open_loop(&side.address, &requests, rate, count, whole, first)
                    .await
                    .with_context(|| side.name.clone())?;
            }
        }
    }
    report(args, sides, all);
    Ok(())
}

fn report(args: &GatewayArgs, sides: &[Side], all: Vec<Measured>) {
    let baseline: Vec<f64> = all
        .first()
        .map_or(Vec::new(), |first| first.whole.iter().map(|latencies| latencies.at(0.5)).collect());
    for (side, mut measured) in sides.iter().zip(all) {
        for (connections, rates) in args.connections.iter().zip(std::mem::take(&mut measured.rates)) {
            let row = format!("{}, {connections} connections", side.name);
            results::add("gateway", &row, ("requests/s", Better::Higher), &rates);
            println!("{:<14} {connections:>5} connections: {:>8.0} requests/s", side.name, median(rates));
        }
        if !measured.processor.is_empty() {
            let row = format!("{}, processor", side.name);
            results::add("gateway", &row, ("s per 1,000 requests", Better::Lower), &measured.processor);
            let seconds = median(measured.processor);
            println!("{:<14} processor seconds per 1,000 requests: {seconds:.3}", side.name);
        }
        for (at, rate) in args.rates.iter().enumerate() {
            let (whole, first) = (&measured.whole[at], &measured.first[at]);
            results::add_latencies("gateway", &format!("{}, whole answer at {rate}/s", side.name), whole);
            results::add_latencies("gateway", &format!("{}, first byte at {rate}/s", side.name), first);
            println!(
                "{:<14} at {rate:>6}/s: whole {} (added p50 {:.0} us), first byte {}",
                side.name,
                whole.render(),
                (whole.at(0.5) - baseline[at]) / 1e3,
                first.render(),
            );
        }
    }
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
        lower_blocks: [0; 2],
        instance: 1,
        events: None,
        replay: None,
        data_plane: DataPlaneAddress {
            host: String::new(),
            cuda_ipc: None,
            shm: None,
            tcp: None,
            rdma: Vec::new(),
            processes: 1,
        },
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

/// A gateway for measurements: no limits of its own, no retries.
pub(crate) fn config(text: ModelText) -> GatewayConfig {
    GatewayConfig {
        models: vec![ModelConfig {
            pool: DEFAULT_POOL.to_owned(),
            text,
            formats: Formats::default(),
            requests_max: 1 << 20,
            fallback: Vec::new(),
        }],
        splits: Vec::new(),
        protocol: None,
        mooncake_bootstrap: String::new(),
        access: AccessConfig::default(),
        trace: None,
        text: TextSource::Auto,
        body_bytes_max: 16 << 20,
        cors_origins: Vec::new(),
        request_memory_max: 8 << 30,
        compute_threads: 4,
        write_timeout: Duration::from_secs(60),
        guardrail: None,
        database: None,
        batch_requests_max: 1,
        follows_engines: false,
    }
}

/// A fleet without workers, of one pool.
pub(crate) fn fleet_config(model: &str) -> FleetConfig {
    FleetConfig {
        pools: vec![PoolConfig {
            name: DEFAULT_POOL.to_owned(),
            model: Some(model.to_owned()),
            engine: None,
            aliases: Vec::new(),
            has_tokenizer: true,
            routing: tuning().routing,
            strategy: None,
        }],
        hints: Hints::default(),
        keys: EngineKeys::default(),
        tls: None,
        index_memory_max: 1 << 30,
        approximate_ttl: Duration::from_secs(120),
        peers: Vec::new(),
        stores: Vec::new(),
        peer_key: None,
        snapshot_file: None,
        snapshot_interval: Duration::from_secs(30),
        health_interval: Duration::from_secs(1),
        health_timeout: Duration::from_secs(5),
        health_misses: 3,
    }
}

/// A fleet of these workers.
pub(crate) fn fleet_of(config: FleetConfig, workers: &[String]) -> Result<Arc<Fleet>> {
    let fleet = Fleet::start(config, 1);
    fleet.configure(workers.iter().map(|url| WorkerSpec::new(url)).collect())?;
    Ok(fleet)
}

/// Tuning of the gateway that is measured.
pub(crate) fn tuning() -> Tuning {
    Tuning {
        routing: RoutingPolicy { policy: Policy::default(), disaggregate_above_tokens: usize::MAX },
        answer_within: Duration::from_secs(600),
        stall: Duration::from_secs(60),
        retries: 0,
        hedge_after: Duration::ZERO,
        request_time_max: Duration::ZERO,
        worker_wait: Duration::from_secs(5),
        prompt_cache_retention_max: Duration::ZERO,
    }
}

pub(crate) async fn gateway_over(workers: &[String], model: &str) -> Result<String> {
    let fleet = fleet_of(fleet_config(model), workers)?;
    let gateway = Gateway::new(config(ModelText::tiny()?), tuning(), fleet).map_err(anyhow::Error::msg)?;
    listen(router(gateway)).await
}
