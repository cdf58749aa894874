use std::time::Duration;

use router_engines::dialect::legs::Protocol;
use router_fleet::RoutingPolicy;
use router_trace::TraceConfig;

use crate::access::AccessConfig;
use crate::guardrail::GuardrailConfig;
use crate::models::{ModelConfig, Split};

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

/// Settings of a gateway.
#[derive(Debug, Clone)]
pub struct GatewayConfig {
    /// What the gateway itself knows of the model of each pool.
    pub models: Vec<ModelConfig>,
    /// Names whose requests are split among pools.
    pub splits: Vec<Split>,
    /// How prefill and decode workers of other makes meet; `None` is what the make does by default.
    pub protocol: Option<Protocol>,
    /// URL of MooncakeConnector's bootstrap server on a prefill worker, `*` for its host.
    pub mooncake_bootstrap: String,
    /// Who may do what.
    pub access: AccessConfig,
    /// Where traces of requests go, if anywhere.
    pub trace: Option<TraceConfig>,
    /// Who makes the text of answers.
    pub text: TextBy,
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
    /// A service that checks requests and answers, if there is one.
    pub guardrail: Option<GuardrailConfig>,
    /// Where responses and conversations are stored, if anywhere.
    pub database: Option<router_database::Config>,
    /// Requests of batches that are inside at a time.
    pub batch_requests_max: usize,
    /// As many requests are let in as the engines can take, if that is less.
    pub follows_engines: bool,
}

/// What an operator may change while a gateway runs ([`Gateway::tune`](crate::Gateway::tune)). A request goes by what is
/// in force when it gets there: its time when it begins, its patience with an engine when that is asked.
#[derive(Debug, Clone, PartialEq)]
pub struct Tuning {
    /// How requests are given to workers, in pools that have no policy of their own.
    pub routing: RoutingPolicy,
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
    /// The longest time for which a client may have the blocks of its prompt kept.
    pub prompt_cache_retention_max: Duration,
}
