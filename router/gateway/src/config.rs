use std::time::Duration;

use router_policy::{Strategy, Weights};

/// Settings of a gateway.
#[derive(Debug, Clone)]
pub struct GatewayConfig {
    /// Name under which the model is served.
    pub model: String,
    /// URLs of the workers.
    pub workers: Vec<String>,
    /// How to choose a worker.
    pub strategy: Strategy,
    /// Weights of the cost.
    pub weights: Weights,
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
