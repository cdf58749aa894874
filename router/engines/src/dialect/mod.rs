//! Descriptions, health and load of each kind of engine, behind one trait.
//!
//! [`detect`] finds out which engine a worker runs; its [`Dialect`] then reads what routing needs: models, block size, KV
//! event endpoints, role, and prefill/decode protocol. [`Dialect::alive`] is the health check, one short request;
//! [`Dialect::report`] requests the load, which a busy engine may answer late. Nothing here is on a request's path; the
//! bodies of legs are made in [`crate::dialect::legs`].

pub mod legs;
mod native;
mod openai;
mod prometheus;
mod sglang;
mod tensorrt_llm;
mod transfers;
mod vllm;

use std::fmt::Debug;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde_json::Value;

pub use self::transfers::{RailReport, StageReport, TransferReport};
use crate::client::{EngineClient, EngineError};
use crate::handoff::DataPlaneAddress;

/// Kinds of engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// The reference engine.
    Native,
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
    /// TensorRT-LLM.
    TensorRtLlm,
    /// A service outside the cluster that speaks OpenAI's API.
    OpenAi,
}

impl Engine {
    /// Name in the configuration.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Native => "native",
            Self::Vllm => "vllm",
            Self::Sglang => "sglang",
            Self::TensorRtLlm => "tensorrt-llm",
            Self::OpenAi => "openai",
        }
    }

    /// Returns the engine with this name in the configuration.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Native, Self::Vllm, Self::Sglang, Self::TensorRtLlm, Self::OpenAi]
            .into_iter()
            .find(|engine| engine.name() == name)
    }

    /// Protocol of the engine.
    #[must_use]
    pub fn dialect(self) -> &'static dyn Dialect {
        match self {
            Self::Native => &native::Native,
            Self::Vllm => &vllm::Vllm,
            Self::Sglang => &sglang::Sglang,
            Self::TensorRtLlm => &tensorrt_llm::TensorRtLlm,
            Self::OpenAi => &openai::OpenAi,
        }
    }
}

/// Role of a worker in prefill/decode disaggregation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Computes prompts and hands their blocks over.
    Prefill,
    /// Generates; computes short prompts itself.
    Decode,
    /// Computes and generates.
    Both,
}

impl Role {
    /// Returns the role with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "prefill" => Some(Self::Prefill),
            "decode" => Some(Self::Decode),
            "both" => Some(Self::Both),
            _ => None,
        }
    }

    /// Name of the role.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Both => "both",
        }
    }
}

/// Ways to request the number of tokens of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenCount {
    /// vLLM's `/tokenize`, with a chat.
    Tokenize,
    /// `/v1/messages/count_tokens`, with the client's request in Anthropic's form.
    Messages,
}

impl TokenCount {
    /// Path of the request.
    #[must_use]
    pub fn path(self) -> &'static str {
        match self {
            Self::Tokenize => "/tokenize",
            Self::Messages => "/v1/messages/count_tokens",
        }
    }
}

/// Value of [`Feed::events`] for events that the gateway polls over HTTP.
pub const POLLED: &str = "poll";

/// KV event endpoints of one data-parallel rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Feed {
    /// Endpoint of the PUB socket, or [`POLLED`].
    pub events: String,
    /// Endpoint of the replay socket.
    pub replay: Option<String>,
    /// Whether the gateway listens and the publisher connects.
    pub bind: bool,
    /// Topic of the publisher, if the engine reports it.
    pub topic: Option<String>,
}

/// Description of a worker.
#[derive(Debug, Clone, PartialEq)]
pub struct Description {
    /// Engine of the worker.
    pub engine: Engine,
    /// Version text of the engine.
    pub version: String,
    /// Names of the model and its adapters, the model first.
    pub models: Vec<String>,
    /// Role, if the worker reports it.
    pub role: Option<Role>,
    /// Longest sequence in tokens.
    pub context_tokens: usize,
    /// Tokens of a KV block.
    pub block_tokens: usize,
    /// KV blocks of one rank's pool; 0 is unknown.
    pub blocks: usize,
    /// KV blocks in host memory and on disk; 0: no such tier, or unknown.
    pub lower_blocks: [usize; 2],
    /// Whether the engine caches prefixes for later requests.
    pub keeps_prefixes: bool,
    /// Whether the engine retains blocks for the time in a request: vLLM with KvasirConnector, the reference engine with host memory.
    pub retains_blocks: bool,
    /// Number of this run of the process; `None` when the engine reports nothing that changes with it.
    pub instance: Option<u64>,
    /// KV event endpoints by data-parallel rank; `None` for a rank that publishes no events.
    pub feeds: Vec<Option<Feed>>,
    /// Addresses of the data plane for hand-offs: the reference engine, vLLM with KvasirConnector.
    pub data_plane: Option<DataPlaneAddress>,
    /// SGLang's bootstrap server, on a prefill worker: host and port.
    pub bootstrap: Option<(String, u16)>,
}

/// Load of one rank, by the engine's own count.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct EngineLoad {
    /// Requests being computed.
    pub running: u32,
    /// Requests waiting in the engine's queue.
    pub waiting: u32,
    /// Share of KV blocks that requests use; blocks that are only cached count as free in every engine.
    pub kv_usage: f64,
}

/// State that an engine reports while it runs.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Report {
    /// Run number as in [`Description::instance`]; `None` when the report has none.
    pub instance: Option<u64>,
    /// Loads by rank; empty when the engine does not report them.
    pub loads: Vec<EngineLoad>,
    /// Most requests that one rank runs, if the engine reports it.
    pub requests_max: Option<u32>,
    /// Hand-offs by rank; empty when the engine does not use Kvasir's data plane.
    pub transfers: Vec<TransferReport>,
    /// Shared stores by rank; `None` when the rank has none, or does not know them yet.
    pub stores: Vec<Option<SharedStores>>,
}

/// Stores of other processes that an engine reads and writes blocks in (`kvasir store`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedStores {
    /// Names of the stores, in alphabetical order.
    pub stores: Vec<String>,
    /// First two bytes of the identities of the engine's blocks: distinguishes most other models, layouts and ranks.
    pub tag: u16,
}

impl SharedStores {
    /// Whether the list contains this store.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.stores.iter().any(|store| store == name)
    }
}

/// Settings given by the operator for engines that do not report them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hints {
    /// KV event endpoint of rank 0; `*` stands for the worker's host.
    pub events: Option<String>,
    /// Replay endpoint of rank 0.
    pub replay: Option<String>,
    /// Name of the model.
    pub model: Option<String>,
}

/// Protocol of one kind of engine.
pub trait Dialect: Debug + Send + Sync {
    /// The engine.
    fn engine(&self) -> Engine;

    /// Requests the worker's description.
    fn describe<'a>(
        &'a self,
        client: &'a EngineClient,
        hints: &'a Hints,
    ) -> BoxFuture<'a, Result<Description, EngineError>>;

    /// Requests `/health` alone. Returns [`Description::instance`] if the answer contains it.
    fn alive<'a>(&'a self, client: &'a EngineClient) -> BoxFuture<'a, Result<Option<u64>, EngineError>> {
        async move {
            client.get("/health").await?;
            Ok(None)
        }
        .boxed()
    }

    /// Requests the load. The answer may take long, and does not show whether the engine is healthy.
    fn report<'a>(&'a self, client: &'a EngineClient) -> BoxFuture<'a, Result<Report, EngineError>>;

    /// Whether the engine is asleep: its memory is released, and requests would wait until it is woken. `None` when the engine
    /// does not report it.
    fn is_asleep<'a>(
        &'a self,
        _client: &'a EngineClient,
    ) -> BoxFuture<'a, Result<Option<bool>, EngineError>> {
        async { Ok(None) }.boxed()
    }

    /// Checks that a sleeping engine is alive, for engines whose `/health` must not be requested then.
    fn alive_asleep<'a>(&'a self, client: &'a EngineClient) -> BoxFuture<'a, Result<(), EngineError>> {
        async move { self.alive(client).await.map(drop) }.boxed()
    }

    /// Reason for which an engine with this description cannot be put to sleep; `None` when it can.
    fn sleep_obstacle<'a>(
        &'a self,
        _client: &'a EngineClient,
        _description: &'a Description,
        _role: Role,
    ) -> BoxFuture<'a, Result<Option<String>, EngineError>> {
        let engine = self.engine().name();
        async move { Ok(Some(format!("engines of the make {engine} cannot be put to sleep"))) }.boxed()
    }

    /// Puts the engine to sleep. It must have no request.
    fn sleep<'a>(&'a self, client: &'a EngineClient) -> BoxFuture<'a, Result<(), EngineError>> {
        async move { Err(client.protocol("this make of engine cannot be put to sleep")) }.boxed()
    }

    /// Wakes the engine. It must not be awake.
    fn wake<'a>(&'a self, client: &'a EngineClient) -> BoxFuture<'a, Result<(), EngineError>> {
        async move { Err(client.protocol("this make of engine cannot be woken")) }.boxed()
    }

    /// Whether completions return token ids, so that the gateway can make the text.
    fn returns_token_ids(&self) -> bool {
        false
    }

    /// Whether the prefill/decode role is fixed when a server starts: a decode server refuses every request that no prefill
    /// server computes with it, however short or cached the prompt is.
    fn decode_needs_prefill(&self) -> bool {
        false
    }

    /// Whether a decode worker reports as cached the larger of the prefill worker's and its own cached tokens. Otherwise its
    /// report is not predictable, and the prefill worker's own answer counts.
    fn decode_reports_both(&self) -> bool {
        false
    }

    /// Whether the engine accepts fields that are not OpenAI's: cache salts, and the fields that continue a message.
    fn takes_extensions(&self) -> bool {
        true
    }

    /// Request that counts the tokens of a prompt; `None`: the engine has none.
    fn token_count(&self) -> Option<TokenCount> {
        None
    }

    /// Name of the header with a request's data-parallel rank, if the engine has one.
    fn rank_header(&self) -> Option<&'static str> {
        None
    }
}

/// Detects which engine a worker runs.
pub async fn detect(client: &EngineClient) -> Result<Engine, EngineError> {
    if client.get("/kvasir/worker").await.is_ok() {
        return Ok(Engine::Native);
    }
    let models = json(client, "/v1/models").await?;
    let owner = models["data"][0]["owned_by"].as_str().unwrap_or_default();
    match owner {
        "vllm" => Ok(Engine::Vllm),
        "sglang" => Ok(Engine::Sglang),
        "tensorrt_llm" => Ok(Engine::TensorRtLlm),
        other => Err(client.protocol(format!(
            "/v1/models names the owner {other:?}, which is no engine that is known; set `gateway.engine`"
        ))),
    }
}

/// Sends a `GET` and parses the JSON answer.
pub(crate) async fn json(client: &EngineClient, path: &str) -> Result<Value, EngineError> {
    let body = client.get(path).await?;
    serde_json::from_slice(&body).map_err(|error| client.protocol(format!("GET {path}: {error}")))
}

/// As [`json`], for a path that not every release has: `null` when the answer is a refusal or no JSON. A failed connection
/// and a temporary refusal are errors: an engine taken for one without KV events stays so until it starts again.
pub(crate) async fn json_if_present(client: &EngineClient, path: &str) -> Result<Value, EngineError> {
    let body = client.get_optional(path).await?;
    Ok(body.and_then(|body| serde_json::from_slice(&body).ok()).unwrap_or_default())
}

/// Host of a worker's URL, with the port if it has one.
#[must_use]
pub fn authority_of(base: &str) -> &str {
    let authority = base.split("://").nth(1).unwrap_or(base);
    authority.split('/').next().unwrap_or(authority)
}

/// Host of a worker's URL, without port.
#[must_use]
pub fn host_of(base: &str) -> &str {
    let authority = authority_of(base);
    match authority.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
        _ => authority,
    }
}

/// Port of a worker's URL.
fn port_of(base: &str) -> u16 {
    let usual = if base.starts_with("https:") { 443 } else { 80 };
    authority_of(base).rsplit_once(':').and_then(|(_, port)| port.parse().ok()).unwrap_or(usual)
}

/// Converts an endpoint as the engine writes it: a wildcard becomes the worker's host, and for an endpoint with another host
/// the gateway listens. A port `+N` of the configuration is N above that of the worker's URL.
pub(crate) fn feed(base: &str, events: &str, replay: Option<&str>) -> Feed {
    let is_wild = |endpoint: &str| {
        ["*", "0.0.0.0", "[::]", "::"].iter().any(|wild| {
            endpoint.strip_prefix("tcp://").is_some_and(|rest| rest.starts_with(&format!("{wild}:")))
        })
    };
    let here = |endpoint: &str| {
        if !is_wild(endpoint) {
            return endpoint.to_owned();
        }
        let port = endpoint.rsplit(':').next().unwrap_or_default();
        match port.strip_prefix('+').and_then(|distance| distance.parse::<u16>().ok()) {
            Some(distance) => format!("tcp://{}:{}", host_of(base), port_of(base).saturating_add(distance)),
            None => format!("tcp://{}:{port}", host_of(base)),
        }
    };
    // vLLM's rule: it listens on wildcards, `ipc` and `inproc`, and connects to anything else.
    let bind = events.starts_with("tcp://") && !is_wild(events);
    let replay = replay.filter(|replay| !replay.is_empty()).map(here);
    Feed { events: here(events), replay, bind, topic: None }
}

/// The feed of a later rank: ports count up from the first rank's.
pub(crate) fn of_rank(feed: &Feed, rank: u16) -> Feed {
    let moved = |endpoint: &str| match endpoint.rsplit_once(':') {
        Some((host, port)) => match port.parse::<u16>().ok().and_then(|port| port.checked_add(rank)) {
            Some(port) => format!("{host}:{port}"),
            None => endpoint.to_owned(),
        },
        None => endpoint.to_owned(),
    };
    Feed {
        events: moved(&feed.events),
        replay: feed.replay.as_deref().map(moved),
        bind: feed.bind,
        topic: feed.topic.clone(),
    }
}

/// The operator's hints as a feed, if there are any.
pub(crate) fn hinted(base: &str, hints: &Hints) -> Option<Feed> {
    let events = hints.events.as_deref()?;
    if events == POLLED {
        tracing::warn!(
            worker = base,
            "this engine publishes its events and is not asked for them; they are not followed"
        );
        return None;
    }
    let mut feed = feed(base, events, hints.replay.as_deref());
    // The operator's endpoint is always one to connect to.
    feed.bind = false;
    Some(feed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_seen_from_the_gateway() {
        let base = "http://10.0.0.7:8000";
        for (events, expected, bind) in [
            ("tcp://*:5557", "tcp://10.0.0.7:5557", false),
            ("tcp://0.0.0.0:5557", "tcp://10.0.0.7:5557", false),
            ("tcp://[::]:5557", "tcp://10.0.0.7:5557", false),
            ("tcp://gateway:5557", "tcp://gateway:5557", true),
            ("tcp://*:+1000", "tcp://10.0.0.7:9000", false),
            ("ipc:///tmp/kv", "ipc:///tmp/kv", false),
        ] {
            let feed = feed(base, events, Some("tcp://*:5558"));
            assert_eq!((feed.events.as_str(), feed.bind), (expected, bind));
            assert_eq!(feed.replay.as_deref(), Some("tcp://10.0.0.7:5558"));
        }
        assert_eq!(host_of("http://[::1]:80/x"), "[::1]");
        assert_eq!(host_of("http://name"), "name");
        assert_eq!(authority_of("http://[::1]:80/x"), "[::1]:80");
        let second = of_rank(&feed(base, "tcp://*:5557", None), 2);
        assert_eq!(second.events, "tcp://10.0.0.7:5559");
    }
}
