//! Converts a whole chat completion to a response.

use serde_json::Value;

use super::facts::{Facts, State};
use super::items;
use crate::{Usage, chat};

/// Converts a whole chat completion to a response.
#[must_use]
pub fn from_chat(answer: &Value, facts: &Facts) -> Value {
    let choice = &answer["choices"][0];
    let state = State::of(choice, Usage::read(&answer["usage"]));
    let mut output = output(answer, choice);
    // In an incomplete response the last item was cut short.
    if let (State::Incomplete(..), Some(last)) = (state, output.last_mut()) {
        last["status"] = "incomplete".into();
    }
    facts.response(answer, state, output)
}

fn output(answer: &Value, choice: &Value) -> Vec<Value> {
    let message = &choice["message"];
    let mut output = Vec::new();
    if let Some(thoughts) = chat::reasoning(message) {
        let id = items::id("rs", answer, output.len());
        output.push(items::reasoning(&id, &[items::reasoning_part(thoughts)], "completed"));
    }
    let calls = chat::tool_calls(message);
    let text = chat::content(message).or_else(|| (calls.is_empty() && output.is_empty()).then_some(""));
    if let Some(text) = text {
        let id = items::id("msg", answer, output.len());
        output.push(items::message(&id, &[items::text_part(text, items::logprobs(choice))], "completed"));
    }
    for call in calls {
        let place = output.len();
        let (id, call_id) = (items::id("fc", answer, place), items::call_id(answer, call, place));
        let text = |name: &str| call["function"][name].as_str().unwrap_or_default();
        output.push(items::call(&id, &call_id, text("name"), text("arguments"), "completed"));
    }
    output
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn told(request: Value, choice: Value) -> Value {
        let answer = json!({ "id": "chatcmpl-7", "created": 5, "choices": [choice], "usage": {
            "prompt_tokens": 20, "completion_tokens": 3, "prompt_tokens_details": { "cached_tokens": 8 } } });
        from_chat(&answer, &Facts::of(&request))
    }

    #[test]
    fn a_whole_response() {
        let request = json!({ "model": "m", "input": "Hi", "temperature": 0.5, "metadata": { "a": "b" },
            "tools": [{ "type": "function", "name": "f" }], "user": "u" });
        let choice = json!({ "message": { "content": "Hi", "reasoning": "Hm" }, "finish_reason": "stop" });
        let wanted = json!({
            "id": "resp_7", "object": "response", "created_at": 5, "status": "completed", "error": null,
            "incomplete_details": null,
            "output": [
                { "id": "rs_7_0", "type": "reasoning", "summary": [], "status": "completed",
                  "content": [{ "type": "reasoning_text", "text": "Hm" }] },
                { "id": "msg_7_1", "type": "message", "role": "assistant", "status": "completed",
                  "content": [{ "type": "output_text", "text": "Hi", "annotations": [], "logprobs": [] }] },
            ],
            "usage": { "input_tokens": 20, "input_tokens_details": { "cached_tokens": 8, "cache_write_tokens": 0 },
                "output_tokens": 3, "output_tokens_details": { "reasoning_tokens": 0 }, "total_tokens": 23 },
            "model": "m", "instructions": null, "max_output_tokens": null, "max_tool_calls": null,
            "parallel_tool_calls": true, "prompt_cache_key": null, "reasoning": null, "safety_identifier": null,
            "temperature": 0.5, "top_logprobs": null, "top_p": null, "user": "u",
            "text": { "format": { "type": "text" } },
            "tools": [{ "type": "function", "name": "f", "description": null, "parameters": null, "strict": null }],
            "tool_choice": "auto", "metadata": { "a": "b" }, "service_tier": "default", "truncation": "disabled",
            "background": false, "store": false, "previous_response_id": null,
        });
        assert_eq!(told(request, choice), wanted);
    }

    #[test]
    fn how_it_ended() {
        let cases = [
            ("stop", "completed", json!(null)),
            ("tool_calls", "completed", json!(null)),
            ("length", "incomplete", json!({ "reason": "max_output_tokens" })),
            ("content_filter", "incomplete", json!({ "reason": "content_filter" })),
        ];
        for (finish, status, details) in cases {
            let choice = json!({ "message": { "content": "Hi" }, "finish_reason": finish });
            let response = told(json!({ "model": "m" }), choice);
            assert_eq!(response["status"], status);
            assert_eq!(response["incomplete_details"], details);
            assert_eq!(response["output"][0]["status"], status);
        }
    }

    #[test]
    fn calls_and_nothing() {
        let call = json!({ "id": "c", "function": { "name": "f", "arguments": "{}" } });
        let nameless = json!({ "function": { "name": "g", "arguments": "" } });
        let choice = json!({ "message": { "content": null, "tool_calls": [call, nameless] } });
        let response = told(json!({ "model": "m" }), choice);
        let wanted = [
            json!({ "id": "fc_7_0", "type": "function_call", "call_id": "c", "name": "f", "arguments": "{}",
                    "status": "completed" }),
            json!({ "id": "fc_7_1", "type": "function_call", "call_id": "call_7_1", "name": "g", "arguments": "",
                    "status": "completed" }),
        ];
        assert_eq!(response["output"], json!(wanted));
        let empty = told(json!({ "model": "m" }), json!({ "message": { "content": "" } }));
        assert_eq!(empty["output"][0]["content"][0]["text"], "");
    }
}
