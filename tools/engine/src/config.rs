//! Configuration of the reference engine.

/// Limits and settings of an engine.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Largest number of tokens computed in one step.
    pub batch_tokens_max: usize,
    /// Largest number of running requests.
    pub sequences_max: usize,
    /// Largest number of waiting requests; further ones are refused.
    pub waiting_max: usize,
    /// Longest sequence in tokens, at most the model's own limit.
    pub context_tokens: usize,
    /// Number of threads for matrix products and attention.
    pub threads: usize,
    /// Longest wait of a decode leg for its blocks before it computes them itself.
    pub transfer_deadline: std::time::Duration,
    /// Whether blocks are copied to the store as soon as they are complete, instead of when their slots are needed.
    pub offload_at_once: bool,
    /// Whether KV events carry token ids, for routers that need them, in place of the hashes that Kvasir's gateway looks up.
    pub event_tokens: bool,
}
