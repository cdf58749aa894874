//! Converts a whole chat completion to a message.

use serde_json::{Map, Value, json};

use crate::{Usage, chat};

/// Fields of a request that its answer repeats or depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// The model as the client named it.
    pub model: String,
    /// Tokens of the prompt, which a stream reports at its start; 0 if not known before the answer.
    pub prompt_tokens: usize,
    /// Whether the client wants to see the model's thinking.
    pub shows_thinking: bool,
}

impl Facts {
    /// Reads the facts of a request that [`super::to_chat`] has accepted.
    #[must_use]
    pub fn of(request: &Value) -> Self {
        let thinking = &request["thinking"];
        Self {
            model: request["model"].as_str().unwrap_or_default().to_owned(),
            prompt_tokens: 0,
            shows_thinking: thinking["type"].as_str().is_some_and(|kind| kind != "disabled")
                && thinking["display"] != "omitted",
        }
    }
}

/// Converts a whole chat completion to a message.
#[must_use]
pub fn from_chat(answer: &Value, facts: &Facts) -> Value {
    let choice = &answer["choices"][0];
    let (stop_reason, stop_sequence) = stop(choice, !chat::tool_calls(&choice["message"]).is_empty());
    json!({
        "id": message_id(answer),
        "type": "message",
        "role": "assistant",
        "model": facts.model,
        "content": content(answer, &choice["message"], facts),
        "stop_reason": stop_reason,
        "stop_sequence": stop_sequence,
        "usage": usage(Usage::read(&answer["usage"])),
    })
}

/// The answer to `count_tokens`.
#[must_use]
pub fn count_answer(prompt_tokens: usize) -> Value {
    json!({ "input_tokens": prompt_tokens })
}

fn content(answer: &Value, message: &Value, facts: &Facts) -> Vec<Value> {
    let mut blocks = Vec::new();
    if let Some(thinking) = chat::reasoning(message).filter(|_| facts.shows_thinking) {
        blocks.push(json!({ "type": "thinking", "thinking": thinking, "signature": "" }));
    }
    if let Some(text) = chat::content(message) {
        blocks.push(json!({ "type": "text", "text": text }));
    }
    let calls = chat::tool_calls(message).iter().enumerate();
    blocks.extend(calls.map(|(index, call)| {
        let function = &call["function"];
        let input = input(function["arguments"].as_str().unwrap_or_default());
        let name = function["name"].as_str().unwrap_or_default();
        json!({ "type": "tool_use", "id": call_id(answer, call, index), "name": name, "input": input })
    }));
    if blocks.is_empty() {
        // Clients read the first block without checking that it exists.
        blocks.push(json!({ "type": "text", "text": "" }));
    }
    blocks
}

/// Parses a call's arguments, which must be an object; other text (a call cut off by the token limit) is returned as text.
fn input(arguments: &str) -> Value {
    if arguments.trim().is_empty() {
        return Value::Object(Map::new());
    }
    match serde_json::from_str(arguments) {
        Ok(object @ Value::Object(_)) => object,
        _ => json!({ "arguments": arguments }),
    }
}

pub(super) fn message_id(answer: &Value) -> String {
    format!("msg_{}", chat::bare_id(answer))
}

/// The engine's id of a call, or one made from the answer's.
pub(super) fn call_id(answer: &Value, call: &Value, index: usize) -> String {
    let given = call["id"].as_str().filter(|id| !id.is_empty());
    given.map_or_else(|| format!("toolu_{}_{index}", chat::bare_id(answer)), str::to_owned)
}

/// Stop reason of a choice, and the stop sequence that ended it.
pub(super) fn stop(choice: &Value, has_calls: bool) -> (&'static str, Option<&str>) {
    match choice["finish_reason"].as_str() {
        Some("length") => ("max_tokens", None),
        Some("content_filter") => ("refusal", None),
        Some("tool_calls" | "function_call") => ("tool_use", None),
        // A call that `tool_choice` forced by name ends with `stop`.
        _ if has_calls => ("tool_use", None),
        _ => match chat::stop_string(choice) {
            Some(matched) => ("stop_sequence", Some(matched)),
            None => ("end_turn", None),
        },
    }
}

/// Splits the prompt's tokens into three counts: read from a cache, written to one, and neither.
pub(super) fn usage(usage: Usage) -> Value {
    let (cached, written) = (usage.cached.unwrap_or(0), usage.cache_written.unwrap_or(0));
    let mut counts = json!({
        "input_tokens": usage.prompt.saturating_sub(cached).saturating_sub(written),
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion,
    });
    if let Some(thinking) = usage.reasoning {
        counts["output_tokens_details"] = json!({ "thinking_tokens": thinking });
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(choice: Value) -> Value {
        let answer = json!({ "id": "chatcmpl-7", "choices": [choice], "usage": {
            "prompt_tokens": 20, "completion_tokens": 3,
            "prompt_tokens_details": { "cached_tokens": 8, "created_cache_tokens": 2 } } });
        from_chat(&answer, &Facts::of(&json!({ "model": "m", "thinking": { "type": "adaptive" } })))
    }

    #[test]
    fn a_whole_message() {
        let choice = json!({ "message": { "content": "Hi", "reasoning": "Hm" }, "finish_reason": "stop" });
        let wanted = json!({
            "id": "msg_7", "type": "message", "role": "assistant", "model": "m",
            "content": [{ "type": "thinking", "thinking": "Hm", "signature": "" }, { "type": "text", "text": "Hi" }],
            "stop_reason": "end_turn", "stop_sequence": null,
            "usage": { "input_tokens": 10, "cache_creation_input_tokens": 2, "cache_read_input_tokens": 8,
                       "output_tokens": 3 },
        });
        assert_eq!(told(choice), wanted);
    }

    #[test]
    fn why_it_ended() {
        let call = json!([{ "id": "c", "function": { "name": "f", "arguments": "{}" } }]);
        let cases = [
            (json!({ "finish_reason": "stop", "stop_reason": null }), "end_turn", json!(null)),
            (json!({ "finish_reason": "stop", "stop_reason": 128_009 }), "end_turn", json!(null)),
            (json!({ "finish_reason": "stop", "stop_reason": "zz" }), "stop_sequence", json!("zz")),
            (json!({ "finish_reason": "stop", "matched_stop": "zz" }), "stop_sequence", json!("zz")),
            (json!({ "finish_reason": "length" }), "max_tokens", json!(null)),
            (json!({ "finish_reason": "tool_calls" }), "tool_use", json!(null)),
            (json!({ "finish_reason": "content_filter" }), "refusal", json!(null)),
            (json!({ "finish_reason": null }), "end_turn", json!(null)),
            (json!({ "finish_reason": "stop", "message": { "tool_calls": call } }), "tool_use", json!(null)),
        ];
        for (choice, reason, sequence) in cases {
            let message = told(choice.clone());
            assert_eq!(message["stop_reason"], reason, "{choice}");
            assert_eq!(message["stop_sequence"], sequence, "{choice}");
        }
    }

    #[test]
    fn arguments_become_an_object() {
        let cases = [
            ("", json!({})),
            ("{\"x\":1}", json!({ "x": 1 })),
            ("{\"x\":", json!({ "arguments": "{\"x\":" })),
            ("[1]", json!({ "arguments": "[1]" })),
        ];
        for (arguments, wanted) in cases {
            let call = json!({ "function": { "name": "f", "arguments": arguments } });
            let message = told(json!({ "message": { "content": null, "tool_calls": [call] } }));
            let block = json!({ "type": "tool_use", "id": "toolu_7_0", "name": "f", "input": wanted });
            assert_eq!(message["content"], json!([block]));
        }
    }

    #[test]
    fn thinking_can_be_hidden_and_nothing_is_still_a_block() {
        let answer = json!({ "choices": [{ "message": { "content": "", "reasoning_content": "Hm" } }] });
        for (thinking, kind) in [("disabled", "text"), ("enabled", "thinking")] {
            let facts = Facts::of(&json!({ "model": "m", "thinking": { "type": thinking } }));
            let message = from_chat(&answer, &facts);
            assert_eq!(message["content"].as_array().map(Vec::len), Some(1));
            assert_eq!(message["content"][0]["type"], kind);
        }
    }
}
