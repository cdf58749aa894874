//! A translation of any malformed request or answer ends in a value or in an error that names a field.
//!
//! Every node of a rich example is replaced by every kind of value, one at a time.

#![allow(missing_docs)]

use router_openai::{ApiError, anthropic, responses};
use serde_json::{Value, json};

/// Returns the example with one node replaced, for each node and each kind of value.
fn variants(example: &Value) -> Vec<Value> {
    let kinds =
        [json!(null), json!(true), json!(-1), json!(u64::MAX), json!("x"), json!([]), json!([1]), json!({})];
    let mut paths = Vec::new();
    collect(example, String::new(), &mut paths);
    let mut variants = Vec::new();
    for path in paths {
        for kind in &kinds {
            let mut variant = example.clone();
            if let Some(node) = variant.pointer_mut(&path) {
                *node = kind.clone();
                variants.push(variant);
            }
        }
    }
    variants
}

fn collect(value: &Value, path: String, paths: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            fields.iter().for_each(|(name, inner)| collect(inner, format!("{path}/{name}"), paths));
        }
        Value::Array(items) => {
            items
                .iter()
                .enumerate()
                .for_each(|(index, inner)| collect(inner, format!("{path}/{index}"), paths));
        }
        _ => {}
    }
    paths.push(path);
}

/// Asserts that an error names a field of the request, or the body as a whole.
fn is_sensible(problem: &ApiError, request: &Value) {
    assert!(!problem.message.is_empty());
    assert!(problem.param.is_some() || !request.is_object(), "{problem:?} for {request}");
}

fn message_request() -> Value {
    json!({
        "model": "m", "max_tokens": 5, "system": [{ "type": "text", "text": "S" }], "stream": true,
        "thinking": { "type": "enabled", "budget_tokens": 9 }, "metadata": { "user_id": "u" },
        "stop_sequences": ["a"], "tool_choice": { "type": "tool", "name": "f" },
        "tools": [{ "name": "f", "description": "d", "input_schema": { "type": "object" }, "strict": true }],
        "output_config": { "effort": "low", "format": { "type": "json_schema", "schema": {} } },
        "messages": [
            { "role": "user", "content": [{ "type": "text", "text": "Hi" },
                { "type": "image", "source": { "type": "base64", "media_type": "image/png", "data": "AA" } }] },
            { "role": "assistant", "content": [{ "type": "thinking", "thinking": "t" },
                { "type": "tool_use", "id": "c", "name": "f", "input": {} }] },
            { "role": "user", "content": [{ "type": "tool_result", "tool_use_id": "c", "is_error": true,
                "content": [{ "type": "text", "text": "4" }] }] },
        ],
    })
}

fn response_request() -> Value {
    json!({
        "model": "m", "instructions": "S", "max_output_tokens": 5, "reasoning": { "effort": "low" },
        "text": { "format": { "type": "json_schema", "name": "n", "schema": {} } }, "include": ["a"],
        "top_logprobs": 1, "metadata": { "a": "b" }, "stream": true, "store": false, "truncation": "auto",
        "tools": [{ "type": "function", "name": "f", "parameters": {} }],
        "tool_choice": { "type": "allowed_tools", "mode": "auto", "tools": [{ "type": "function", "name": "f" }] },
        "input": [
            { "role": "user", "content": [{ "type": "input_text", "text": "x" },
                { "type": "input_image", "image_url": "u", "detail": "low" }] },
            { "type": "reasoning", "content": [{ "type": "reasoning_text", "text": "t" }] },
            { "type": "function_call", "call_id": "c", "name": "f", "arguments": "{}" },
            { "type": "function_call_output", "call_id": "c", "output": "4" },
        ],
    })
}

fn answer(kind: &str) -> Value {
    let call = json!({ "index": 0, "id": "c", "function": { "name": "f", "arguments": "{}" } });
    json!({
        "id": "chatcmpl-1", "created": 5,
        "choices": [{ kind: { "content": "a", "reasoning": "t", "tool_calls": [call] }, "finish_reason": "stop",
                      "stop_reason": "x", "logprobs": { "content": [] } }],
        "usage": { "prompt_tokens": 9, "completion_tokens": 2, "completion_tokens_details": { "reasoning_tokens": 1 },
                   "prompt_tokens_details": { "cached_tokens": 4, "created_cache_tokens": 1 } },
    })
}

#[test]
fn requests() {
    let mut accepted = [0, 0];
    for request in variants(&message_request()) {
        let _ = anthropic::Facts::of(&request);
        match anthropic::to_chat(&request) {
            Ok(_) => accepted[0] += 1,
            Err(problem) => is_sensible(&problem, &request),
        }
    }
    for request in variants(&response_request()) {
        let _ = responses::Facts::of(&request);
        match responses::to_chat(&request) {
            Ok(_) => accepted[1] += 1,
            Err(problem) => is_sensible(&problem, &request),
        }
    }
    assert!(accepted.iter().all(|&count| count > 20), "{accepted:?}");
}

#[test]
fn answers() {
    let facts = (anthropic::Facts::of(&message_request()), responses::Facts::of(&response_request()));
    for whole in variants(&answer("message")) {
        assert_eq!(anthropic::from_chat(&whole, &facts.0)["type"], "message");
        assert_eq!(responses::from_chat(&whole, &facts.1)["object"], "response");
    }
    for piece in variants(&answer("delta")) {
        let mut out = (String::new(), String::new());
        let (mut first, mut second) =
            (anthropic::Stream::new(facts.0.clone()), responses::Stream::new(facts.1.clone()));
        for chunk in [&answer("delta"), &piece] {
            first.event(chunk, &mut out.0);
            second.event(chunk, &mut out.1);
        }
        first.error(&Value::Null, &mut out.0.clone());
        let mut second_out = out.1.clone();
        second.end(&mut second_out);
        for event in second_out.split_terminator("\n\n").chain(out.0.split_terminator("\n\n")) {
            let data = event.split_once("\ndata: ").map(|(_, data)| serde_json::from_str::<Value>(data));
            assert!(matches!(data, Some(Ok(Value::Object(_)))), "{event}");
        }
    }
}
