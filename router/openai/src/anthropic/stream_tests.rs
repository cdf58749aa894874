//! Chat streams and the events that come of them.

use serde_json::{Value, json};

use super::*;

fn stream() -> Stream {
    Stream::new(Facts::of(&json!({ "model": "m", "thinking": { "type": "enabled" } })))
}

fn chunk(delta: Value, finish: Value) -> Value {
    json!({ "id": "chatcmpl-7", "choices": [{ "index": 0, "delta": delta, "finish_reason": finish }] })
}

fn call(index: u64, id: Value, name: Value, arguments: &str) -> Value {
    let call = json!({ "index": index, "id": id, "function": { "name": name, "arguments": arguments } });
    chunk(json!({ "tool_calls": [call] }), json!(null))
}

/// The events as JSON; each is named by its type.
fn events(out: &str) -> Vec<Value> {
    out.split_terminator("\n\n")
        .map(|event| {
            let (name, data) = event.split_once('\n').expect("two lines");
            let data: Value = serde_json::from_str(data.strip_prefix("data: ").expect("data")).expect("JSON");
            assert_eq!(name.strip_prefix("event: "), data["type"].as_str());
            data
        })
        .collect()
}

/// The events in short: start, delta and stop with index and what is new.
fn short(out: &str) -> Vec<String> {
    let told = |event: &Value| match event["type"].as_str().unwrap_or_default() {
        "content_block_start" => {
            format!("+{} {}", event["index"], event["content_block"]["type"].as_str().unwrap_or_default())
        }
        "content_block_delta" => {
            let fields = event["delta"].as_object().expect("an object");
            format!("{} {}", event["index"], fields.values().nth(1).expect("a value"))
        }
        "content_block_stop" => format!("-{}", event["index"]),
        "message_delta" => format!("{}", event["delta"]["stop_reason"]),
        other => other.to_owned(),
    };
    events(out).iter().map(told).collect()
}

#[test]
fn text_with_a_stop_sequence() {
    let (mut stream, mut out) = (stream(), String::new());
    stream.event(&chunk(json!({ "role": "assistant", "content": "" }), json!(null)), &mut out);
    stream.event(&chunk(json!({ "content": "a\"\n" }), json!(null)), &mut out);
    let mut last = chunk(json!({ "content": "b" }), json!("stop"));
    last["choices"][0]["stop_reason"] = json!("zz");
    stream.event(&last, &mut out);
    let usage = json!({ "prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": { "cached_tokens": 4 } });
    stream.event(&json!({ "id": "chatcmpl-7", "choices": [], "usage": usage }), &mut out);
    stream.end(&mut out);
    let events = events(&out);
    assert_eq!(events[0]["message"]["id"], "msg_7");
    assert_eq!(events[2]["delta"], json!({ "type": "text_delta", "text": "a\"\n" }));
    let wanted = json!({
        "type": "message_delta", "delta": { "stop_reason": "stop_sequence", "stop_sequence": "zz" },
        "usage": { "input_tokens": 5, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4,
                   "output_tokens": 2 },
    });
    assert_eq!(events[5], wanted);
    assert_eq!(events.len(), 7);
}

#[test]
fn blocks_follow_each_other() {
    let (mut stream, mut out) = (stream(), String::new());
    for piece in [
        chunk(json!({ "role": "assistant", "content": "" }), json!(null)),
        chunk(json!({ "reasoning": "h" }), json!(null)),
        chunk(json!({ "reasoning_content": "m" }), json!(null)),
        chunk(json!({ "content": "x" }), json!(null)),
        call(0, json!("c0"), json!("f"), ""),
        call(0, json!(null), json!(null), "{\"a\":"),
        call(0, json!(null), json!(null), "1}"),
        call(1, json!("c1"), json!("g"), "{}"),
        call(0, json!(null), json!(null), "too late"),
        chunk(json!({}), json!("tool_calls")),
    ] {
        stream.event(&piece, &mut out);
    }
    stream.end(&mut out);
    let wanted = [
        "message_start",
        "+0 thinking",
        "0 \"h\"",
        "0 \"m\"",
        "-0",
        "+1 text",
        "1 \"x\"",
        "-1",
        "+2 tool_use",
        "2 \"{\\\"a\\\":\"",
        "2 \"1}\"",
        "-2",
        "+3 tool_use",
        "3 \"{}\"",
        "-3",
        "\"tool_use\"",
        "message_stop",
    ];
    assert_eq!(short(&out), wanted);
}

#[test]
fn nothing_is_still_a_message() {
    let (mut stream, mut out) = (stream(), String::new());
    stream.end(&mut out);
    stream.end(&mut out);
    assert_eq!(short(&out), ["message_start", "+0 text", "-0", "\"end_turn\"", "message_stop"]);
}

#[test]
fn an_error_is_the_end() {
    let cases = [
        (json!({ "error": { "message": "x", "type": "InternalServerError", "code": 500 } }), "api_error"),
        (json!({ "error": { "message": "x", "code": 503 } }), "overloaded_error"),
        (json!({ "error": { "message": "x", "code": "unavailable" } }), "api_error"),
    ];
    for (error, kind) in cases {
        let (mut stream, mut out) = (stream(), String::new());
        stream.error(&error, &mut out);
        stream.event(&chunk(json!({ "content": "b" }), json!(null)), &mut out);
        stream.end(&mut out);
        assert_eq!(events(&out), [json!({ "type": "error", "error": { "type": kind, "message": "x" } })]);
    }
}
