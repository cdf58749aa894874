//! Configuration of a mock engine.

use std::time::Duration;

use router_tokens::ModelText;

use crate::MockError;

/// Engine whose HTTP surface, metrics and event format the mock has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Dialect {
    /// vLLM 0.32.
    #[default]
    Vllm,
    /// SGLang 0.5.20 and later.
    Sglang,
}

/// Legs of a hand-off that the worker runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Role {
    /// Both legs.
    #[default]
    Both,
    /// The prefill leg only.
    Prefill,
    /// The decode leg only.
    Decode,
}

/// Reaction of a decode worker to missing blocks of a hand-off (`kv_load_failure_policy`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LoadFailure {
    /// Answers 500.
    #[default]
    Fail,
    /// Computes the prompt itself.
    Recompute,
}

/// Configuration of one mock engine.
#[derive(Debug, Clone)]
pub struct MockConfig {
    /// Engine whose surface the mock has.
    pub dialect: Dialect,
    /// Name of the model.
    pub model: String,
    /// vLLM: names of the LoRA adapters. A prompt for one has blocks of its own; its output is the model's.
    pub adapters: Vec<String>,
    /// Tokens per KV block.
    pub block_tokens: usize,
    /// KV blocks as reported in the metrics. vLLM never uses block 0, so one block fewer can hold KV.
    pub blocks: usize,
    /// Longest sequence in tokens.
    pub context_tokens: usize,
    /// Most requests that run at once.
    pub batch_max: usize,
    /// Most requests that wait; further ones are refused with 503.
    pub waiting_max: usize,
    /// Seconds of a step per prompt token that it computes.
    pub prefill_seconds_per_token: f64,
    /// Seconds of a step per running request.
    pub decode_seconds_per_request: f64,
    /// Constant part of every step, in seconds.
    pub decode_seconds_per_step: f64,
    /// Seconds of a step per token of KV that running requests hold.
    pub decode_seconds_per_kv_token: f64,
    /// Seconds per squared prompt token: computing tokens `a` to `b` takes `b² − a²` times this.
    pub prefill_seconds_per_square: f64,
    /// Divisor of all these times. If all of them are zero, a request is answered at once.
    pub speedup: f64,
    /// Whether KV events are published.
    pub events: bool,
    /// Whether missed events can be requested again; needs `events`.
    pub replay: bool,
    /// Topic of the events.
    pub topic: String,
    /// Legs of a hand-off that the worker runs.
    pub role: Role,
    /// Seed of faults and ids. Outputs do not depend on it.
    pub seed: u64,
    /// An output ends early at one token in this many; 0 means never.
    pub eos_one_in: u64,
    /// Tokenizer and chat template.
    pub tokenizer: ModelText,
    /// Time for which a prefill's blocks wait to be fetched.
    pub lease: Duration,
    /// vLLM: whether the connector is KvasirConnector, which has a store and reports its hand-off address in
    /// the metrics.
    pub has_data_plane: bool,
    /// Time for which one leg of a hand-off waits for the other.
    pub bootstrap_timeout: Duration,
    /// Reaction to missing blocks of a hand-off.
    pub load_failure: LoadFailure,
    /// Largest request body in bytes; larger bodies are refused with 413.
    pub body_bytes_max: usize,
    /// vLLM: whether the metrics report the start time of the process, which distinguishes its runs.
    pub tells_start: bool,
    /// Time to wake up; `None`: the engine was started without sleep mode.
    pub wake: Option<Duration>,
}

impl MockConfig {
    /// Returns a vLLM worker of the built-in tiny model that answers at once and publishes no events.
    pub fn tiny() -> Result<Self, MockError> {
        Ok(Self {
            dialect: Dialect::Vllm,
            model: "tiny".to_owned(),
            adapters: Vec::new(),
            block_tokens: 16,
            blocks: 4096,
            context_tokens: 32_768,
            batch_max: 256,
            waiting_max: 4096,
            prefill_seconds_per_token: 0.0,
            decode_seconds_per_request: 0.0,
            decode_seconds_per_step: 0.0,
            decode_seconds_per_kv_token: 0.0,
            prefill_seconds_per_square: 0.0,
            speedup: 1.0,
            events: false,
            replay: true,
            topic: String::new(),
            role: Role::Both,
            seed: 0,
            eos_one_in: 512,
            tokenizer: ModelText::tiny().map_err(|error| MockError::Config(error.to_string()))?,
            lease: Duration::from_secs(30),
            has_data_plane: false,
            bootstrap_timeout: Duration::from_secs(300),
            load_failure: LoadFailure::Fail,
            body_bytes_max: 32 << 20,
            tells_start: true,
            wake: None,
        })
    }

    /// Whether simulated work takes no time.
    #[must_use]
    pub fn is_instant(&self) -> bool {
        let times = [
            self.prefill_seconds_per_token,
            self.decode_seconds_per_request,
            self.decode_seconds_per_step,
            self.decode_seconds_per_kv_token,
            self.prefill_seconds_per_square,
        ];
        times == [0.0; 5]
    }

    /// Number of blocks that can hold KV.
    #[must_use]
    pub fn usable_blocks(&self) -> usize {
        match self.dialect {
            Dialect::Vllm => self.blocks.saturating_sub(1),
            Dialect::Sglang => self.blocks,
        }
    }

    /// Checks the configuration. The error lists all problems.
    pub(crate) fn check(&self) -> Result<(), MockError> {
        let positive = |value: f64| value.is_finite() && value >= 0.0;
        let rules = [
            (self.block_tokens > 0, "`block_tokens` must not be 0"),
            (self.batch_max > 0, "`batch_max` must not be 0"),
            (u32::try_from(self.blocks).is_ok(), "`blocks` must fit into 32 bits"),
            (self.context_tokens > 1, "`context_tokens` must be more than 1"),
            (
                self.usable_blocks() * self.block_tokens >= self.context_tokens,
                "`blocks` must hold a sequence of `context_tokens`",
            ),
            (positive(self.prefill_seconds_per_token), "`prefill_seconds_per_token` must not be negative"),
            (positive(self.decode_seconds_per_request), "`decode_seconds_per_request` must not be negative"),
            (positive(self.decode_seconds_per_step), "`decode_seconds_per_step` must not be negative"),
            (
                positive(self.decode_seconds_per_kv_token),
                "`decode_seconds_per_kv_token` must not be negative",
            ),
            (positive(self.prefill_seconds_per_square), "`prefill_seconds_per_square` must not be negative"),
            (
                self.adapters.is_empty() || self.dialect == Dialect::Vllm,
                "`adapters` need the dialect of vLLM",
            ),
            (!self.adapters.contains(&self.model), "`adapters` must not have the model's name"),
            (self.speedup > 0.0 && self.speedup.is_finite(), "`speedup` must be positive"),
        ];
        let broken: Vec<&str> = rules.iter().filter(|rule| !rule.0).map(|rule| rule.1).collect();
        if broken.is_empty() { Ok(()) } else { Err(MockError::Config(broken.join("; "))) }
    }
}
