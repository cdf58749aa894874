use std::path::PathBuf;
use std::time::Duration;

use router_policy::Policy;

/// Settings of a gateway.
#[derive(Debug, Clone)]
pub struct GatewayConfig {
    /// Name under which the model is served.
    pub model: String,
    /// URLs of the workers.
    pub workers: Vec<String>,
    /// How to choose a worker.
    pub policy: Policy,
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
    /// Prompts with more uncached tokens than this go through a prefill worker.
    pub disaggregate_above_tokens: usize,
    /// Largest request body.
    pub body_bytes_max: usize,
    /// Requests inside at a time; more are refused.
    pub requests_max: usize,
    /// How often a request may start over on another worker.
    pub retries: u32,
    /// How often workers are asked how they are.
    pub health_interval: Duration,
    /// How long a request waits for a worker when there is none.
    pub worker_wait: Duration,
}
