//! Token counts of an answer.

use serde::Deserialize;
use serde_json::{Value, json};

/// Token counts of an answer, as engines tell them and clients are told.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(from = "Wire")]
pub struct Usage {
    /// Tokens of the prompt, cached ones included.
    pub prompt: usize,
    /// Tokens generated.
    pub completion: usize,
    /// Tokens of the prompt that needed no computation, if that is told.
    pub cached: Option<usize>,
    /// Tokens of the prompt that were put into a cache, if that is told.
    pub cache_written: Option<usize>,
    /// Tokens generated as reasoning, if they are counted.
    pub reasoning: Option<usize>,
}

/// The `usage` object. Engines leave details out or set them to null.
#[derive(Deserialize, Default)]
#[serde(default)]
struct Wire {
    prompt_tokens: Option<usize>,
    completion_tokens: Option<usize>,
    prompt_tokens_details: Option<PromptDetails>,
    completion_tokens_details: Option<CompletionDetails>,
    reasoning_tokens: Option<usize>,
    // Of transcriptions:
    input_tokens: Option<usize>,
    output_tokens: Option<usize>,
    seconds: Option<f64>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct PromptDetails {
    cached_tokens: Option<usize>,
    created_cache_tokens: Option<usize>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct CompletionDetails {
    reasoning_tokens: Option<usize>,
}

impl From<Wire> for Usage {
    fn from(wire: Wire) -> Self {
        let details = wire.prompt_tokens_details.unwrap_or_default();
        let completion = wire.completion_tokens_details.unwrap_or_default();
        let of_seconds = |seconds: f64| (seconds * Self::TOKENS_PER_SECOND).ceil() as usize;
        let prompt = wire.prompt_tokens.or(wire.input_tokens).or_else(|| wire.seconds.map(of_seconds));
        Self {
            prompt: prompt.unwrap_or(0),
            completion: wire.completion_tokens.or(wire.output_tokens).unwrap_or(0),
            cached: details.cached_tokens,
            cache_written: details.created_cache_tokens,
            reasoning: completion.reasoning_tokens.or(wire.reasoning_tokens),
        }
    }
}

impl Usage {
    /// Tokens that a second of a recording counts as: OpenAI's models take one for 100 ms of it
    /// (<https://platform.openai.com/docs/guides/realtime-costs>). Engines tell transcriptions' usage in seconds.
    pub const TOKENS_PER_SECOND: f64 = 10.0;

    /// From the `usage` object of an answer; an object of another shape counts nothing.
    pub(crate) fn read(usage: &Value) -> Self {
        Self::deserialize(usage).unwrap_or_default()
    }

    /// The `usage` object.
    #[must_use]
    pub fn to_json(self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt.saturating_add(self.completion),
            "prompt_tokens_details": { "cached_tokens": self.cached.unwrap_or(0) },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usages_of_several_engines() {
        let cases = [
            (json!(null), Usage::default()),
            (
                json!({ "prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": null }),
                Usage { prompt: 9, completion: 2, ..Usage::default() },
            ),
            (
                json!({ "prompt_tokens": 9, "completion_tokens": 2, "reasoning_tokens": 1,
                        "prompt_tokens_details": { "cached_tokens": 4, "created_cache_tokens": null } }),
                Usage { prompt: 9, completion: 2, cached: Some(4), reasoning: Some(1), ..Usage::default() },
            ),
        ];
        for (usage, wanted) in cases {
            assert_eq!(Usage::read(&usage), wanted, "{usage}");
        }
    }
}
