/// Bounds of an engine.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Tokens computed in one step at most.
    pub batch_tokens_max: usize,
    /// Requests running at a time.
    pub sequences_max: usize,
    /// Requests waiting at a time; more are refused.
    pub waiting_max: usize,
    /// Longest sequence, at most the model's own limit.
    pub context_tokens: usize,
    /// Threads for matrix products and attention.
    pub threads: usize,
    /// How long a decode leg waits for its blocks before it computes them itself.
    pub transfer_deadline: std::time::Duration,
    /// Copy blocks to the store as soon as they are complete, not when their slots are needed.
    pub offload_at_once: bool,
    /// KV events carry token ids, for routers that need them, in place of the hashes that Kvasir's gateway looks for.
    pub event_tokens: bool,
}
