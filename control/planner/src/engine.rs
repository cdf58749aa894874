//! Durations of an engine's steps, and the limits of its batch and its KV cache.
//!
//! A step computes a chunk of prompt tokens and one token of every running request. Its duration is a sum of five terms;
//! AIConfigurator's tables of vLLM on an H100 are within 5 % of it for decoding and within 12 % for prompts.

/// Duration of a step in seconds, term by term. No coefficient is negative.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepTime {
    /// Fixed part of every step.
    pub base: f64,
    /// For each running request.
    pub per_request: f64,
    /// For each token of KV that running requests hold.
    pub per_kv_token: f64,
    /// For each prompt token of the chunk.
    pub per_prompt_token: f64,
    /// For the square of a prompt's tokens: a chunk from token `a` to token `b` takes `b² − a²` of these.
    pub per_prompt_square: f64,
}

impl StepTime {
    /// Seconds of a step that only decodes: `requests` running requests that hold `kv_tokens` tokens together.
    #[must_use]
    pub fn decode(&self, requests: f64, kv_tokens: f64) -> f64 {
        self.base + self.per_request * requests + self.per_kv_token * kv_tokens
    }

    /// Seconds that prompt tokens `from..to` of one request add to a step.
    #[must_use]
    pub fn prefill(&self, from: f64, to: f64) -> f64 {
        self.per_prompt_token * (to - from) + self.per_prompt_square * (to * to - from * from)
    }

    /// Returns the step time with all terms multiplied by `factor`.
    #[must_use]
    pub fn times(self, factor: f64) -> Self {
        Self {
            base: self.base * factor,
            per_request: self.per_request * factor,
            per_kv_token: self.per_kv_token * factor,
            per_prompt_token: self.per_prompt_token * factor,
            per_prompt_square: self.per_prompt_square * factor,
        }
    }
}

/// Engine of one worker.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Engine {
    /// Durations of the engine's steps.
    pub step: StepTime,
    /// Capacity of the KV cache, in tokens.
    pub kv_tokens: f64,
    /// Most prompt tokens and running requests of one step (`max_num_batched_tokens`).
    pub batch_tokens: f64,
    /// Most requests that run at a time (`max_num_seqs`).
    pub running_max: usize,
}

impl Default for Engine {
    /// vLLM with Qwen3-32B on two H100 by tensor parallelism: the fit to AIConfigurator's tables of 0.12.0.
    fn default() -> Self {
        Self {
            step: StepTime {
                base: 13.78e-3,
                per_request: 0.0236e-3,
                per_kv_token: 4.233e-8,
                per_prompt_token: 0.0368e-3,
                per_prompt_square: 2.9e-9,
            },
            kv_tokens: 350_000.0,
            batch_tokens: 8192.0,
            running_max: 256,
        }
    }
}

/// Service level: the share of requests that must be in time, and the time limits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ServiceLevel {
    /// Time to first token, in seconds.
    pub ttft: f64,
    /// Mean inter-token latency of an answer, in seconds.
    pub itl: f64,
    /// Share of requests that must meet both, from 0 to 1.
    pub attainment: f64,
}

/// Phases of a request that a worker computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum WorkerRole {
    /// Prefill and decode.
    #[default]
    Both,
    /// Prefill only: a request leaves with its first token, and only the TTFT is judged.
    Prefill,
    /// Decode only: a request arrives with its prompt's KV, and only the ITL is judged.
    Decode,
}

impl WorkerRole {
    /// Returns the name in settings and tables.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Both => "both",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}
