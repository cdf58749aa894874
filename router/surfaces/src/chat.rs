//! Reading chat completions, whole and in pieces, as the engines write them.
//!
//! Engines differ: reasoning is called `reasoning` (vLLM) or `reasoning_content` (SGLang, TensorRT-LLM), a matched stop
//! string `stop_reason` (vLLM) or `matched_stop` (SGLang), and details of the usage may be absent or null.
//! Source: <https://platform.openai.com/docs/api-reference/chat>.

use serde_json::Value;

/// Token counts of an answer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    /// Tokens of the prompt, cached ones included.
    pub(crate) prompt: u64,
    /// Tokens generated.
    pub(crate) completion: u64,
    /// Tokens of the prompt that came from a cache.
    pub(crate) cached: u64,
    /// Tokens of the prompt that were put into a cache.
    pub(crate) created: u64,
    /// Tokens generated as reasoning, if the engine counts them.
    pub(crate) reasoning: Option<u64>,
}

impl Usage {
    /// From the `usage` object; what is absent counts as 0.
    pub(crate) fn read(usage: &Value) -> Self {
        let count = |value: &Value| value.as_u64().unwrap_or(0);
        let prompt = &usage["prompt_tokens_details"];
        let details = usage["completion_tokens_details"]["reasoning_tokens"].as_u64();
        Self {
            prompt: count(&usage["prompt_tokens"]),
            completion: count(&usage["completion_tokens"]),
            cached: count(&prompt["cached_tokens"]),
            created: count(&prompt["created_cache_tokens"]),
            reasoning: details.or(usage["reasoning_tokens"].as_u64()),
        }
    }
}

/// The reasoning of a message or a delta, unless empty.
pub(crate) fn reasoning(message: &Value) -> Option<&str> {
    text_of(&message["reasoning"]).or_else(|| text_of(&message["reasoning_content"]))
}

/// The text of a message or a delta, unless empty.
pub(crate) fn content(message: &Value) -> Option<&str> {
    text_of(&message["content"])
}

/// The tool calls of a message or a delta.
pub(crate) fn tool_calls(message: &Value) -> &[Value] {
    message["tool_calls"].as_array().map_or(&[], Vec::as_slice)
}

/// The stop string that ended a choice.
pub(crate) fn stop_string(choice: &Value) -> Option<&str> {
    choice["stop_reason"].as_str().or_else(|| choice["matched_stop"].as_str())
}

/// An answer's id without the prefix that says which surface it is from.
pub(crate) fn bare_id(answer: &Value) -> &str {
    let id = answer["id"].as_str().unwrap_or_default();
    id.strip_prefix("chatcmpl-").unwrap_or(id)
}

/// The message of an error in any of the shapes that engines and the gateway use.
pub(crate) fn error_message(error: &Value) -> &str {
    let inner = if error["error"].is_object() { &error["error"] } else { error };
    inner["message"].as_str().or_else(|| error["error"].as_str()).unwrap_or("The engine failed.")
}

/// The HTTP status that an error names as its code.
pub(crate) fn error_status(error: &Value) -> Option<u16> {
    let inner = if error["error"].is_object() { &error["error"] } else { error };
    inner["code"].as_u64().and_then(|code| u16::try_from(code).ok())
}

fn text_of(value: &Value) -> Option<&str> {
    value.as_str().filter(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

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
                Usage { prompt: 9, completion: 2, cached: 4, reasoning: Some(1), ..Usage::default() },
            ),
        ];
        for (usage, wanted) in cases {
            assert_eq!(Usage::read(&usage), wanted, "{usage}");
        }
    }

    #[test]
    fn errors_of_every_shape() {
        let cases = [
            (json!({ "error": { "message": "a", "code": 500 } }), "a", Some(500)),
            (json!({ "message": "b", "code": "invalid_value" }), "b", None),
            (json!({ "error": "c" }), "c", None),
            (json!({}), "The engine failed.", None),
        ];
        for (error, message, status) in cases {
            assert_eq!((error_message(&error), error_status(&error)), (message, status), "{error}");
        }
    }
}
