//! Chat streams and the events that come of them.

use serde_json::{Value, json};

use super::*;

fn stream() -> Stream {
    Stream::new(Facts::of(&json!({ "model": "m" })))
}

fn chunk(delta: Value, finish: Value) -> Value {
    let choice = json!({ "index": 0, "delta": delta, "finish_reason": finish });
    json!({ "id": "chatcmpl-7", "created": 5, "choices": [choice] })
}

fn call(index: u64, id: Value, name: Value, arguments: &str) -> Value {
    let call = json!({ "index": index, "id": id, "function": { "name": name, "arguments": arguments } });
    chunk(json!({ "tool_calls": [call] }), json!(null))
}

/// The events as JSON; each is named by its type, and they are numbered without a gap.
fn events(out: &str) -> Vec<Value> {
    let read = |(number, event): (usize, &str)| {
        let (name, data) = event.split_once('\n').expect("two lines");
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").expect("data")).expect("JSON");
        assert_eq!(name.strip_prefix("event: "), data["type"].as_str());
        assert_eq!(data["sequence_number"], number);
        data
    };
    out.split_terminator("\n\n").enumerate().map(read).collect()
}

fn types(events: &[Value]) -> Vec<&str> {
    events
        .iter()
        .map(|event| {
            event["type"].as_str().and_then(|kind| kind.strip_prefix("response.")).unwrap_or("error")
        })
        .collect()
}

#[test]
fn text_cut_by_the_limit() {
    let (mut stream, mut out) = (stream(), String::new());
    stream.event(&chunk(json!({ "role": "assistant", "content": "" }), json!(null)), &mut out);
    let logprob = json!({ "token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [] });
    let mut piece = chunk(json!({ "content": "a\"\n" }), json!(null));
    piece["choices"][0]["logprobs"] = json!({ "content": [logprob] });
    stream.event(&piece, &mut out);
    stream.event(&chunk(json!({ "content": "b" }), json!("length")), &mut out);
    let usage = json!({ "prompt_tokens": 9, "completion_tokens": 2 });
    stream.event(&json!({ "id": "chatcmpl-7", "choices": [], "usage": usage }), &mut out);
    stream.end(&mut out);
    stream.end(&mut out);
    let events = events(&out);
    let wanted = [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ];
    assert_eq!(types(&events), wanted);
    assert_eq!(events[4]["delta"], "a\"\n");
    assert_eq!(events[4]["logprobs"], json!([logprob]));
    assert_eq!(events[6]["text"], "a\"\nb");
    let response = &events[9]["response"];
    assert_eq!(response["id"], "resp_7");
    assert_eq!(response["status"], "incomplete");
    assert_eq!(response["usage"]["total_tokens"], 11);
    assert_eq!(response["output"], json!([events[8]["item"]]));
    assert_eq!(response["output"][0]["status"], "incomplete");
}

#[test]
fn items_follow_each_other_and_the_whole_says_the_same() {
    let (mut stream, mut out) = (stream(), String::new());
    for piece in [
        chunk(json!({ "role": "assistant", "content": "" }), json!(null)),
        chunk(json!({ "reasoning": "h" }), json!(null)),
        chunk(json!({ "reasoning_content": "m" }), json!(null)),
        chunk(json!({ "content": "x" }), json!(null)),
        call(0, json!("c0"), json!("f"), ""),
        call(0, json!(null), json!(null), "{\"a\":1}"),
        call(1, json!(null), json!("g"), "{}"),
        call(0, json!(null), json!(null), "too late"),
        chunk(json!({}), json!("tool_calls")),
    ] {
        stream.event(&piece, &mut out);
    }
    stream.end(&mut out);
    let events = events(&out);
    let wanted = [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ];
    assert_eq!(types(&events), wanted);
    let calls = json!([
        { "id": "c0", "function": { "name": "f", "arguments": "{\"a\":1}" } },
        { "function": { "name": "g", "arguments": "{}" } },
    ]);
    let message = json!({ "reasoning": "hm", "content": "x", "tool_calls": calls });
    let choice = json!({ "message": message, "finish_reason": "tool_calls" });
    let whole = json!({ "id": "chatcmpl-7", "created": 5, "choices": [choice] });
    let facts = Facts::of(&json!({ "model": "m" }));
    assert_eq!(events.last().expect("an event")["response"], crate::responses::from_chat(&whole, &facts));
}

#[test]
fn nothing_is_still_a_response() {
    let (mut stream, mut out) = (stream(), String::new());
    stream.end(&mut out);
    let events = events(&out);
    assert_eq!(types(&events).last(), Some(&"completed"));
    assert_eq!(events.last().expect("an event")["response"]["output"][0]["content"][0]["text"], "");
}

#[test]
fn an_error_is_the_end() {
    let error = json!({ "error": { "message": "x", "code": 500 } });
    let (mut early, mut out) = (stream(), String::new());
    early.error(&error, &mut out);
    early.end(&mut out);
    assert_eq!(types(&events(&out)), ["error"]);

    let (mut late, mut out) = (stream(), String::new());
    late.event(&chunk(json!({ "content": "b" }), json!(null)), &mut out);
    late.error(&error, &mut out);
    late.event(&chunk(json!({ "content": "c" }), json!(null)), &mut out);
    late.end(&mut out);
    let events = events(&out);
    let last = events.last().expect("an event");
    assert_eq!(last["type"], "response.failed");
    assert_eq!(last["response"]["error"], json!({ "code": "server_error", "message": "x" }));
    assert_eq!(last["response"]["output"][0]["status"], "incomplete");
}
