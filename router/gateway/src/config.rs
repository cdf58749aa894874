//! Configuration of the gateway.

use std::time::Duration;

use router_engines::dialect::legs::Protocol;
use router_fleet::RoutingPolicy;
use router_trace::TraceConfig;

use crate::access::AccessConfig;
use crate::guardrail::GuardrailConfig;
use crate::models::{ModelConfig, Split};

/// Component that renders prompts and makes the text of answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TextSource {
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
    /// The gateway's own settings of each pool's model.
    pub models: Vec<ModelConfig>,
    /// Names whose requests are split among pools.
    pub splits: Vec<Split>,
    /// Protocol by which prefill and decode workers of other makes exchange KV; `None` is the make's
    /// default.
    pub protocol: Option<Protocol>,
    /// URL of MooncakeConnector's bootstrap server on a prefill worker, `*` for its host.
    pub mooncake_bootstrap: String,
    /// Access control settings.
    pub access: AccessConfig,
    /// Destination of request traces; `None` turns tracing off.
    pub trace: Option<TraceConfig>,
    /// Component that makes the text of answers.
    pub text: TextSource,
    /// Largest request body.
    pub body_bytes_max: usize,
    /// Origins whose pages may send requests from a browser (CORS); `*` is every origin.
    pub cors_origins: Vec<String>,
    /// Largest memory of all requests together: bodies, parsed forms and tokens.
    pub request_memory_max: usize,
    /// Threads that work on large bodies.
    pub compute_threads: usize,
    /// A client that reads nothing of its answer for this long is disconnected, where its connection has
    /// flow control of its own (gRPC).
    pub write_timeout: Duration,
    /// Service that checks requests and answers, if configured.
    pub guardrail: Option<GuardrailConfig>,
    /// Database that stores responses and conversations, if configured.
    pub database: Option<router_database::Config>,
    /// Largest number of batch requests in flight at a time.
    pub batch_requests_max: usize,
    /// Limits the requests in flight to what the engines can take, if that is less.
    pub follows_engines: bool,
}

/// Settings that an operator may change while a gateway runs ([`Gateway::tune`](crate::Gateway::tune)). A
/// request uses the values that are in force at each step: its own time limit when it begins, an engine's
/// time limit when the engine is asked.
#[derive(Debug, Clone, PartialEq)]
pub struct Tuning {
    /// Policy by which requests are routed to workers, in pools that have no policy of their own.
    pub routing: RoutingPolicy,
    /// Time to the first token of a stream, or to the end of an answer that is not streamed.
    pub answer_within: Duration,
    /// Longest silence of a stream that has begun; after it the stream is given up.
    pub stall: Duration,
    /// Number of times that a request may start over on another worker.
    pub retries: u32,
    /// Time without a response after which a request is sent to a second engine, too; zero is never.
    pub hedge_after: Duration,
    /// Longest total time of a request, unless its client asks for less; zero is no limit.
    pub request_time_max: Duration,
    /// Longest time that a request waits for a worker when there is none.
    pub worker_wait: Duration,
    /// The longest time for which a client may have the blocks of its prompt kept.
    pub prompt_cache_retention_max: Duration,
}
