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
        let prompt = wire.prompt_tokens_details.unwrap_or_default();
        let completion = wire.completion_tokens_details.unwrap_or_default();
        Self {
            prompt: wire.prompt_tokens.unwrap_or(0),
            completion: wire.completion_tokens.unwrap_or(0),
            cached: prompt.cached_tokens,
            cache_written: prompt.created_cache_tokens,
            reasoning: completion.reasoning_tokens.or(wire.reasoning_tokens),
        }
    }
}

impl Usage {
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
