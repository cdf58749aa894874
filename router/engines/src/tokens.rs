//! Streamed completions of token ids, as engines that accept and return ids answer them.
//!
//! Source: vLLM's completion protocol with `return_token_ids` and `return_tokens_as_token_ids`, which SGLang and the
//! reference engine speak, too.

use std::collections::HashMap;

use router_openai::{Finish, Usage};
use serde::Deserialize;
use serde_json::Value;

/// The log-probability of a token, and the alternatives by falling log-probability.
pub type TokenProbability = (f32, Vec<(u32, f32)>);

/// Contents of one event of such a completion.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TokenEvent {
    /// Tokens of this event.
    pub token_ids: Vec<u32>,
    /// Probabilities, one per token, when requested.
    pub probabilities: Vec<TokenProbability>,
    /// Reason for which the output ends, in its last event.
    pub finish: Option<Finish>,
    /// Token counts so far.
    pub usage: Option<Usage>,
}

/// Fields of an event that are read; the parser skips everything else.
#[derive(Deserialize, Default)]
struct Event {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    error: Option<Value>,
}

#[derive(Deserialize, Default)]
struct Choice {
    token_ids: Option<Vec<u32>>,
    finish_reason: Option<String>,
    logprobs: Option<Logprobs>,
}

#[derive(Deserialize)]
struct Logprobs {
    #[serde(default)]
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Option<Vec<Option<HashMap<String, f32>>>>,
}

impl TokenEvent {
    /// Parses the data of an event. The error is the engine's error text, or a parse error.
    pub fn parse(data: &[u8]) -> Result<Self, String> {
        let event: Event =
            serde_json::from_slice(data).map_err(|error| format!("an event is not understood: {error}"))?;
        if let Some(error) = event.error {
            return Err(format!("the engine failed mid-stream: {error}"));
        }
        let choice = event.choices.into_iter().next().unwrap_or_default();
        Ok(Self {
            token_ids: choice.token_ids.unwrap_or_default(),
            probabilities: choice.logprobs.map(probabilities).unwrap_or_default(),
            finish: choice.finish_reason.as_deref().map(Finish::from_name),
            usage: event.usage,
        })
    }
}

fn probabilities(logprobs: Logprobs) -> Vec<TokenProbability> {
    let mut tops = logprobs.top_logprobs.unwrap_or_default().into_iter();
    let chosen = logprobs.token_logprobs.into_iter();
    chosen
        .map(|logprob| {
            let named = tops.next().flatten().unwrap_or_default().into_iter();
            let mut top: Vec<(u32, f32)> = named
                .filter_map(|(name, value)| Some((name.strip_prefix("token_id:")?.parse().ok()?, value)))
                .collect();
            top.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            (logprob.unwrap_or(0.0), top)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_of_vllm_is_understood() {
        let event = br#"{"id":"cmpl-1","choices":[{"index":0,"text":"ab","token_ids":[5,6],"finish_reason":"length",
            "logprobs":{"token_logprobs":[-0.5,-1.0],"tokens":["token_id:5","token_id:6"],
            "top_logprobs":[{"token_id:5":-0.5,"token_id:9":-0.25},{"token_id:6":-1.0}],"text_offset":[0,1]}}],
            "usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}}"#;
        let event = TokenEvent::parse(event).expect("parses");
        assert_eq!(event.token_ids, [5, 6]);
        assert_eq!(event.probabilities[0], (-0.5, vec![(9, -0.25), (5, -0.5)]));
        assert_eq!(event.finish, Some(Finish::Length));
        assert_eq!(event.usage.and_then(|usage| usage.cached), Some(4));
        assert!(TokenEvent::parse(br#"{"error":{"message":"boom"}}"#).is_err());
    }
}
