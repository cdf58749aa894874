use std::path::PathBuf;
use std::time::Duration;

use router_engines::dialect::legs::Protocol;
use router_engines::dialect::{Engine, Hints, Role};
use router_engines::key::ApiKey;
use router_policy::Policy;
use router_trace::TraceConfig;

use crate::access::AccessConfig;
use crate::said::Formats;

/// Who makes the text of answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TextBy {
    /// The gateway, in front of the reference engine; other engines themselves.
    #[default]
    Auto,
    /// The engines.
    Engine,
    /// The gateway, where engines take and give token ids; requests that need more than text go to the engine.
    Gateway,
}

/// A worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WorkerConfig {
    /// Its URL.
    pub url: String,
    /// What it does, when the operator says so.
    pub role: Option<Role>,
    /// The key that its engine asks for.
    pub key: Option<ApiKey>,
}

impl WorkerConfig {
    /// A worker that says itself what it does.
    #[must_use]
    pub fn new(url: &str) -> Self {
        Self { url: url.to_owned(), role: None, key: None }
    }
}

/// Settings of a gateway.
#[derive(Debug, Clone)]
pub struct GatewayConfig {
    /// Name under which the model is served; `None` is what the workers say.
    pub model: Option<String>,
    /// The workers.
    pub workers: Vec<WorkerConfig>,
    /// Their make; `None` asks them.
    pub engine: Option<Engine>,
    /// What the operator says of their KV events.
    pub hints: Hints,
    /// How prefill and decode workers of other makes meet; `None` is what the make does by default.
    pub protocol: Option<Protocol>,
    /// URL of MooncakeConnector's bootstrap server on a prefill worker, `*` for its host.
    pub mooncake_bootstrap: String,
    /// The tokenizer is the model's own; without it, workers' events mean nothing to the gateway.
    pub has_tokenizer: bool,
    /// Who may do what.
    pub access: AccessConfig,
    /// Where traces of requests go, if anywhere.
    pub trace: Option<TraceConfig>,
    /// Who makes the text of answers.
    pub text: TextBy,
    /// How the model writes tool calls and reasoning, where the gateway makes the text.
    pub formats: Formats,
    /// Bytes that the index may take.
    pub index_memory_max: usize,
    /// How long a prompt is taken to be where it was routed, on workers without KV events.
    pub approximate_ttl: Duration,
    /// URLs of other gateways in front of the same workers.
    pub peers: Vec<String>,
    /// Where the index is saved for the next start.
    pub snapshot_file: Option<PathBuf>,
    /// How often it is saved.
    pub snapshot_interval: Duration,
    /// Largest request body.
    pub body_bytes_max: usize,
    /// Origins whose pages may ask from a browser (CORS); `*` is every one.
    pub cors_origins: Vec<String>,
    /// Bytes that requests may take in all: bodies, what is parsed of them, tokens.
    pub request_memory_max: usize,
    /// Threads that work on large bodies.
    pub compute_threads: usize,
    /// A client that takes nothing of its answer for so long is given up, where its connection has flow control of its
    /// own (gRPC).
    pub write_timeout: Duration,
    /// Requests inside at a time; more wait.
    pub requests_max: usize,
    /// As many requests are let in as the engines can take, if that is less.
    pub follows_engines: bool,
    /// How often workers are asked how they are.
    pub health_interval: Duration,
    /// A worker whose answer takes longer gets no new requests until it comes.
    pub health_timeout: Duration,
    /// Times `health_timeout` without an answer after which a worker is given up; at least 2.
    pub health_misses: u32,
}

/// What an operator may change while a gateway runs ([`Gateway::tune`](crate::Gateway::tune)). A request goes by what is
/// in force when it gets there: its time when it begins, its patience with an engine when that is asked.
#[derive(Debug, Clone, PartialEq)]
pub struct Tuning {
    /// How to choose a worker.
    pub policy: Policy,
    /// Prompts with more uncached tokens than this go through a prefill worker.
    pub disaggregate_above_tokens: usize,
    /// Time to the first token of a stream, or to the end of an answer that is not streamed.
    pub answer_within: Duration,
    /// A stream that has begun and says nothing for so long is given up.
    pub stall: Duration,
    /// How often a request may start over on another worker.
    pub retries: u32,
    /// A request that an engine has not begun to answer after this is sent to a second one, too; zero is never.
    pub hedge_after: Duration,
    /// Time that a request may take in all, unless its client wants it sooner; zero is any.
    pub request_time_max: Duration,
    /// How long a request waits for a worker when there is none.
    pub worker_wait: Duration,
}
