//! `kvasir profile`: measures a running engine, and writes the `[planner]` values for it.
//!
//! First, prompts of random words, of which nothing is cached, run one at a time to measure times to first
//! token; then several requests run concurrently, with short and long prompts, to measure inter-token
//! latencies. Other requests at the same time distort the results.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use clap::Args;
use control_planner::{DecodeSample, MeasuredEngine, PromptSample};
use futures_util::future::try_join_all;
use http_body_util::BodyExt;
use router_engines::client::EngineClient;
use router_engines::dialect::{Hints, detect};
use router_engines::upstream::{Call, Upstream};
use router_openai::sse;
use serde_json::{Value, json};

use crate::secret;

/// Tokens of the prompts that run one at a time: within the tokens that most engines compute in one step.
const PROMPTS: [usize; 6] = [256, 512, 1024, 2048, 4096, 8000];
/// Measurements of each prompt; the smallest is used, because disturbances only add time.
const REPEATS: usize = 4;
/// Concurrent requests, and tokens of the prompt of each.
const LOADS: [(usize, usize); 6] = [(1, 128), (8, 128), (32, 128), (4, 4000), (16, 2000), (32, 4000)];
/// Tokens of each answer.
const ANSWER: usize = 96;
/// Longest time for one request.
const REQUEST_WITHIN: Duration = Duration::from_secs(120);

#[derive(Args)]
pub(crate) struct ProfileArgs {
    /// The engine, as http://HOST:PORT. It should have no other requests.
    engine: String,
    /// Model to measure, if the engine serves several.
    #[arg(long)]
    model: Option<String>,
    /// Also write the values into this file.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
}

pub(crate) fn run(arguments: &ProfileArgs) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    runtime.block_on(profile(arguments))
}

async fn profile(arguments: &ProfileArgs) -> Result<ExitCode> {
    let key = secret::variable(secret::ENGINE_KEY)?;
    let upstream = Upstream::with_key(arguments.engine.trim_end_matches('/'), None, key.as_ref());
    let client = EngineClient::over(&upstream);
    let engine = detect(&client).await.with_context(|| arguments.engine.clone())?;
    let description = engine.dialect().describe(&client, &Hints::default()).await?;
    let model = match &arguments.model {
        Some(model) => model.clone(),
        None => description.models.first().context("the engine serves no model")?.clone(),
    };
    let kv_tokens = description.blocks * description.block_tokens;
    eprintln!("{} {} serves {model}: {} tokens of KV", engine.name(), description.version, kv_tokens);
    let mut probe = Probe { upstream, model, words: 1.0, seed: seed() };
    probe.learn_words().await?;
    let context = description.context_tokens.saturating_sub(ANSWER + 64);
    let mut prompts = Vec::new();
    for tokens in PROMPTS.into_iter().filter(|tokens| *tokens <= context) {
        let mut times = Vec::new();
        for _ in 0..REPEATS {
            times.push(probe.ask(tokens, 1).await?);
        }
        let least = times.iter().min_by_key(|timed| timed.first).context("no answer")?;
        eprintln!("  a prompt of {} tokens: {:.2} ms", least.prompt, least.first.as_secs_f64() * 1e3);
        prompts.push(PromptSample { tokens: least.prompt as f64, seconds: least.first.as_secs_f64() });
    }
    let mut decodes = Vec::new();
    let fits = |&(requests, tokens): &(usize, usize)| {
        tokens <= context && (kv_tokens == 0 || requests * (tokens + ANSWER) <= kv_tokens * 9 / 10)
    };
    for (requests, tokens) in LOADS.into_iter().filter(fits) {
        let sample = probe.side_by_side(requests, tokens).await?;
        eprintln!(
            "  {requests} answers side by side, {:.0} tokens of KV: {:.2} ms between tokens",
            sample.kv_tokens,
            sample.seconds * 1e3
        );
        decodes.push(sample);
    }
    let measured = MeasuredEngine::fit(&prompts, &decodes).map_err(anyhow::Error::msg)?;
    let text = settings(arguments, &measured, kv_tokens);
    print!("{text}");
    if let Some(file) = &arguments.output {
        std::fs::write(file, &text).with_context(|| format!("{}", file.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns a different seed for each run, so that no prompt of an earlier run is cached.
fn seed() -> u64 {
    router_gateway::random_number()
}

/// Formats the values as in `kvasir.toml`.
fn settings(arguments: &ProfileArgs, measured: &MeasuredEngine, kv_tokens: usize) -> String {
    let step = &measured.step;
    let [prompts, decodes] = measured.errors.map(|error| error * 100.0);
    let mut text = format!(
        "# Measured by `kvasir profile {}`. Largest errors of the fit: {prompts:.1} % of the times to the first token, {decodes:.1} % of\n\
         # those between tokens. A request takes {:.2} ms beside its prompt's own time.\n[planner]\n",
        arguments.engine,
        measured.first * 1e3
    );
    let terms = [
        ("step_base_us", step.base),
        ("step_per_request_us", step.per_request),
        ("step_per_kv_token_us", step.per_kv_token),
        ("step_per_prompt_token_us", step.per_prompt_token),
        ("step_per_prompt_square_us", step.per_prompt_square),
    ];
    for (name, seconds) in terms {
        // Six digits exceed the precision of the measurement.
        let micros = format!("{:.6}", seconds * 1e6);
        let micros = micros.trim_end_matches('0');
        let whole = if micros.ends_with('.') { "0" } else { "" };
        text.push_str(&format!("{name} = {micros}{whole}\n"));
    }
    if kv_tokens > 0 {
        text.push_str(&format!("kv_tokens = {kv_tokens}\n"));
    }
    text
}

/// Measured times of one answer.
#[derive(Debug, Clone)]
struct Timed {
    /// Tokens of the prompt, as counted by the engine.
    prompt: usize,
    /// Time from the request to the first token.
    first: Duration,
    /// Arrival time of each token.
    tokens: Vec<Instant>,
}

struct Probe {
    upstream: Arc<Upstream>,
    model: String,
    /// Words per token.
    words: f64,
    seed: u64,
}

impl Probe {
    /// Measures how many tokens random words are.
    async fn learn_words(&mut self) -> Result<()> {
        let timed = self.ask(256, 1).await?;
        ensure!(timed.prompt > 16, "the engine counts {} tokens for 256 words", timed.prompt);
        self.words = 256.0 / timed.prompt as f64;
        Ok(())
    }

    fn request(&mut self, tokens: usize, answer: usize) -> (Arc<Upstream>, Call) {
        let count = (tokens as f64 * self.words).round().max(1.0) as usize;
        let mut text = String::with_capacity(count * 5);
        for _ in 0..count {
            self.seed =
                self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // Common words in a random order that no cache holds.
            const WORDS: [&str; 16] = [
                "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world",
                "school", "state", "family", "student", "group",
            ];
            text.push_str(WORDS[(self.seed >> 60) as usize]);
            text.push(' ');
        }
        let body = json!({
            "model": self.model, "prompt": text, "max_tokens": answer, "min_tokens": answer, "temperature": 0,
            "ignore_eos": true, "stream": true, "stream_options": {"include_usage": true},
        });
        (Arc::clone(&self.upstream), Call::json("/v1/completions", Bytes::from(body.to_string())))
    }

    async fn ask(&mut self, tokens: usize, answer: usize) -> Result<Timed> {
        let (upstream, call) = self.request(tokens, answer);
        timed(upstream, call).await
    }

    /// Returns the median inter-token latency while all of `requests` answers were running.
    async fn side_by_side(&mut self, requests: usize, tokens: usize) -> Result<DecodeSample> {
        let calls: Vec<(Arc<Upstream>, Call)> = (0..requests).map(|_| self.request(tokens, ANSWER)).collect();
        let answers = try_join_all(calls.into_iter().map(|(upstream, call)| timed(upstream, call))).await?;
        let began = answers.iter().filter_map(|timed| timed.tokens.first()).max().copied();
        let ended = answers.iter().filter_map(|timed| timed.tokens.last()).min().copied();
        let (Some(began), Some(ended)) = (began, ended) else { bail!("an answer without a token") };
        let (mut gaps, mut held) = (Vec::new(), 0.0);
        for timed in &answers {
            let is_within = |at: &&Instant| (began..=ended).contains(*at);
            let within: Vec<&Instant> = timed.tokens.iter().filter(is_within).collect();
            gaps.extend(within.windows(2).map(|pair| (*pair[1] - *pair[0]).as_secs_f64()));
            let before = timed.tokens.iter().filter(|at| **at < began).count();
            held += timed.prompt as f64 + before as f64 + within.len() as f64 / 2.0;
        }
        if gaps.len() < 8 {
            bail!(
                "{requests} answers of {ANSWER} tokens were not under way together: the engine runs fewer at a time"
            );
        }
        gaps.sort_by(f64::total_cmp);
        Ok(DecodeSample { requests: requests as f64, kv_tokens: held, seconds: gaps[gaps.len() / 2] })
    }
}

/// Sends a request, and records the arrival times of its tokens.
async fn timed(upstream: Arc<Upstream>, call: Call) -> Result<Timed> {
    let sent = Instant::now();
    let answer = async {
        let reply = upstream.send(&call).await?;
        let status = reply.status();
        let mut body = reply.into_body();
        if !status.is_success() {
            let said = body.whole(64 << 10).await.unwrap_or_default();
            bail!("the engine answered {status}: {}", String::from_utf8_lossy(&said));
        }
        let mut splitter = sse::EventBuffer::new(1 << 20);
        let (mut tokens, mut prompt) = (Vec::new(), None);
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame?.into_data() else { continue };
            let now = Instant::now();
            let whole = splitter.push(data).context("an event of more than a mebibyte")?;
            for event in sse::events(&whole) {
                let Ok(event) = serde_json::from_slice::<Value>(&sse::data_of(event)) else { continue };
                if let Some(counted) = event["usage"]["prompt_tokens"].as_u64() {
                    prompt = Some(counted as usize);
                }
                if event["choices"].as_array().is_some_and(|choices| !choices.is_empty()) {
                    tokens.push(now);
                }
            }
        }
        let prompt = prompt.context("the engine tells no usage (stream_options.include_usage)")?;
        let first = tokens.first().context("an answer without a token")?.duration_since(sent);
        Ok(Timed { prompt, first, tokens })
    };
    tokio::time::timeout(REQUEST_WITHIN, answer).await.context("no answer within two minutes")?
}
