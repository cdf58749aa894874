//! What each make of engine says of itself, behind one trait.
//!
//! [`detect`] asks a worker which make it is; its [`Dialect`] then reads what routing must know: models, block size,
//! where KV events come from, role, and which prefill/decode protocol it speaks. [`Dialect::alive`] is the health check,
//! one short question; [`Dialect::report`] asks for the load, which a busy engine may take long to tell. Nothing here is on
//! a request's path; how legs are asked is in [`crate::dialect::legs`].

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

/// Makes of engines.
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
    /// As in the configuration.
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

    /// By its name in the configuration.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Native, Self::Vllm, Self::Sglang, Self::TensorRtLlm, Self::OpenAi]
            .into_iter()
            .find(|engine| engine.name() == name)
    }

    /// How to talk to it.
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

/// What a worker does.
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
    /// By its name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "prefill" => Some(Self::Prefill),
            "decode" => Some(Self::Decode),
            "both" => Some(Self::Both),
            _ => None,
        }
    }

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Both => "both",
        }
    }
}

/// How an engine is asked for the number of tokens of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenCount {
    /// vLLM's `/tokenize`, with a chat.
    Tokenize,
    /// `/v1/messages/count_tokens`, with the client's request in Anthropic's form.
    Messages,
}

impl TokenCount {
    /// The path that is asked.
    #[must_use]
    pub fn path(self) -> &'static str {
        match self {
            Self::Tokenize => "/tokenize",
            Self::Messages => "/v1/messages/count_tokens",
        }
    }
}

/// Place of events that an engine has to be asked for.
pub const POLLED: &str = "poll";

/// Where one data-parallel rank publishes its KV events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Feed {
    /// The PUB socket, or [`POLLED`].
    pub events: String,
    /// The replay socket.
    pub replay: Option<String>,
    /// The publisher connects to us, and we listen.
    pub bind: bool,
    /// The topic that it publishes under, where the engine says so.
    pub topic: Option<String>,
}

/// What a worker says of itself.
#[derive(Debug, Clone, PartialEq)]
pub struct Description {
    /// Its make.
    pub engine: Engine,
    /// Its version, as it spells it.
    pub version: String,
    /// Names under which it serves: the model first, then its adapters.
    pub models: Vec<String>,
    /// What it does, if it knows.
    pub role: Option<Role>,
    /// Longest sequence in tokens.
    pub context_tokens: usize,
    /// Tokens of a KV block.
    pub block_tokens: usize,
    /// KV blocks of one rank's pool; 0 is unknown.
    pub blocks: usize,
    /// KV blocks of its host memory and disk tiers; 0 is none or unknown.
    pub lower_blocks: [usize; 2],
    /// Whether blocks of prompts stay for later requests; without, nothing is ever cached there.
    pub keeps_prefixes: bool,
    /// Whether it retains blocks for as long as a request says: vLLM with KvasirConnector, and the reference engine with host memory.
    pub retains_blocks: bool,
    /// Identifies this run of the process; `None` when the engine tells nothing that changes with it.
    pub instance: Option<u64>,
    /// One for each data-parallel rank; `None` for a rank that publishes no events.
    pub feeds: Vec<Option<Feed>>,
    /// Where it hands blocks over: the reference engine, vLLM with KvasirConnector.
    pub data_plane: Option<DataPlaneAddress>,
    /// SGLang's bootstrap server, on a prefill worker: host and port.
    pub bootstrap: Option<(String, u16)>,
}

/// How much a worker has to do, by its own count.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct EngineLoad {
    /// Requests being computed.
    pub running: u32,
    /// Requests that wait.
    pub waiting: u32,
    /// Share of KV blocks that requests use; blocks that are only cached count as free in every engine.
    pub kv_usage: f64,
}

/// What an engine reports of itself while it runs.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Report {
    /// As in [`Description::instance`]; `None` when the report does not say.
    pub instance: Option<u64>,
    /// By rank; empty when the engine does not tell.
    pub loads: Vec<EngineLoad>,
    /// Requests that one rank runs at most, if the engine tells.
    pub requests_max: Option<u32>,
    /// Hand-offs by rank; empty when it has no data plane of Kvasir's.
    pub transfers: Vec<TransferReport>,
    /// By rank, the stores that it shares with others; none where it has none, or does not know yet.
    pub stores: Vec<Option<SharedStores>>,
}

/// Stores of other processes that an engine reads and writes blocks in (`kvasir store`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedStores {
    /// Their names, in alphabetical order.
    pub stores: Vec<String>,
    /// How the identities of its blocks begin: it tells them from those of most other models, layouts and ranks.
    pub tag: u16,
}

impl SharedStores {
    /// Whether the store with this name is one of them.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.stores.iter().any(|store| store == name)
    }
}

/// What the operator says that an engine does not.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hints {
    /// KV event endpoint of rank 0; `*` stands for the worker's host.
    pub events: Option<String>,
    /// Replay endpoint of rank 0.
    pub replay: Option<String>,
    /// Name of the model.
    pub model: Option<String>,
}

/// How one make of engine is asked.
pub trait Dialect: Debug + Send + Sync {
    /// The make.
    fn engine(&self) -> Engine;

    /// What the worker says of itself.
    fn describe<'a>(
        &'a self,
        client: &'a EngineClient,
        hints: &'a Hints,
    ) -> BoxFuture<'a, Result<Description, EngineError>>;

    /// Whether it is well: `/health` alone. [`Description::instance`], if that tells it.
    fn alive<'a>(&'a self, client: &'a EngineClient) -> BoxFuture<'a, Result<Option<u64>, EngineError>> {
        async move {
            client.get("/health").await?;
            Ok(None)
        }
        .boxed()
    }

    /// How much it has to do. It may take long, and says nothing of whether the engine is well.
    fn report<'a>(&'a self, client: &'a EngineClient) -> BoxFuture<'a, Result<Report, EngineError>>;

    /// Whether it is asleep: its memory is given back, and requests would wait until it is woken. `None` when the engine does not
    /// tell.
    fn is_asleep<'a>(
        &'a self,
        _client: &'a EngineClient,
    ) -> BoxFuture<'a, Result<Option<bool>, EngineError>> {
        async { Ok(None) }.boxed()
    }

    /// Whether it is there although it is asleep: for engines whose `/health` must not be asked then.
    fn alive_asleep<'a>(&'a self, client: &'a EngineClient) -> BoxFuture<'a, Result<(), EngineError>> {
        async move { self.alive(client).await.map(drop) }.boxed()
    }

    /// Why an engine that was started so cannot be put to sleep; `None` when it can.
    fn why_sleepless<'a>(
        &'a self,
        _client: &'a EngineClient,
        _description: &'a Description,
        _role: Role,
    ) -> BoxFuture<'a, Result<Option<String>, EngineError>> {
        let engine = self.engine().name();
        async move { Ok(Some(format!("engines of the make {engine} cannot be put to sleep"))) }.boxed()
    }

    /// Puts it to sleep. It must have no request.
    fn sleep<'a>(&'a self, client: &'a EngineClient) -> BoxFuture<'a, Result<(), EngineError>> {
        async move { Err(client.protocol("this make of engine cannot be put to sleep")) }.boxed()
    }

    /// Wakes it. An engine that is awake must not be woken.
    fn wake<'a>(&'a self, client: &'a EngineClient) -> BoxFuture<'a, Result<(), EngineError>> {
        async move { Err(client.protocol("this make of engine cannot be woken")) }.boxed()
    }

    /// Whether a completion of token ids answers with token ids, so that text can be made by the gateway.
    fn returns_token_ids(&self) -> bool {
        false
    }

    /// Whether the part in prefill/decode is fixed when a server starts: a decode server refuses every request that no
    /// prefill server computes with it, however short or cached the prompt is.
    fn decode_needs_prefill(&self) -> bool {
        false
    }

    /// Whether a decode worker reports as cached the larger of what the prefill worker had and what it had itself.
    /// Otherwise its report says nothing that can be predicted, and the prefill worker's own answer counts.
    fn decode_reports_both(&self) -> bool {
        false
    }

    /// Whether it takes fields that are not OpenAI's: salts of caches, and those that continue a message.
    fn takes_extensions(&self) -> bool {
        true
    }

    /// How it is asked for the number of tokens of a prompt, if it can be.
    fn token_count(&self) -> Option<TokenCount> {
        None
    }

    /// The header that names the data-parallel rank of a request, if there is one.
    fn rank_header(&self) -> Option<&'static str> {
        None
    }
}

/// Finds out which make a worker is.
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

/// A `GET` that answers JSON.
pub(crate) async fn json(client: &EngineClient, path: &str) -> Result<Value, EngineError> {
    let body = client.get(path).await?;
    serde_json::from_slice(&body).map_err(|error| client.protocol(format!("GET {path}: {error}")))
}

/// The same of a path that not every release has: `null` where the answer is no JSON or refuses it. That it could not be asked for
/// is an error, as is an answer that says "later": an engine that is taken for one without KV events stays so until it starts again.
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

/// An endpoint as an engine writes it, from where the gateway stands: a wildcard is the worker's host, and an
/// endpoint that names another host is one that the engine connects to. A port `+N` of the configuration is N above that of the worker's URL.
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
    // Who writes it down for a gateway means where to connect to.
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
