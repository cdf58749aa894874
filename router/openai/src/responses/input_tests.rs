//! Input items and the messages that come of them.

use serde_json::{Value, json};

use super::*;

fn translated(body: Value) -> Result<Value, ApiError> {
    messages(&NestedFields::of_body(&body)?).map(Value::Array)
}

#[test]
fn items_become_messages() {
    let user = json!({ "role": "user", "content": "Hi" });
    let call = |id: &str| json!({ "type": "function_call", "call_id": id, "name": "f", "arguments": "{}" });
    let called =
        |id: &str| json!({ "id": id, "type": "function", "function": { "name": "f", "arguments": "{}" } });
    let said = json!({ "type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
                       "content": [{ "type": "output_text", "text": "a", "annotations": [] }] });
    let thought = json!({ "type": "reasoning", "id": "rs_1", "summary": [],
                          "content": [{ "type": "reasoning_text", "text": "t" }] });
    let summary = json!({ "type": "reasoning", "summary": [{ "type": "summary_text", "text": "s" }] });
    let result = json!({ "type": "function_call_output", "call_id": "1", "output": "42" });
    let tool = json!({ "role": "tool", "tool_call_id": "1", "content": "42" });
    let cases = [
        (json!("Hi"), json!([user])),
        (json!([user]), json!([user])),
        (
            json!([{ "role": "developer", "content": "a" }, { "role": "system", "content": "b" }, user,
                   { "role": "developer", "content": "c" }]),
            json!([{ "role": "system", "content": "a\n\nb" }, user, { "role": "system", "content": "c" }]),
        ),
        (
            json!([user, thought, said, call("1"), call("2"), result, said]),
            json!([user,
                { "role": "assistant", "content": "a", "reasoning": "t", "reasoning_content": "t",
                  "tool_calls": [called("1"), called("2")] },
                tool, { "role": "assistant", "content": "a" }]),
        ),
        (
            json!([said, said, summary, call("1"), thought]),
            json!([{ "role": "assistant", "content": "a" }, { "role": "assistant", "content": "a" },
                { "role": "assistant", "content": null, "reasoning": "s", "reasoning_content": "s",
                  "tool_calls": [called("1")] }]),
        ),
        (
            json!([{ "type": "function_call_output", "call_id": "1",
                     "output": [{ "type": "input_text", "text": "4" }, { "type": "input_text", "text": "2" }] }]),
            json!([{ "role": "tool", "tool_call_id": "1", "content": "4\n2" }]),
        ),
        (
            json!([{ "role": "user", "content": [{ "type": "input_text", "text": "x" },
                { "type": "input_image", "image_url": "data:,", "detail": "low" }] }]),
            json!([{ "role": "user", "content": [{ "type": "text", "text": "x" },
                { "type": "image_url", "image_url": { "url": "data:,", "detail": "low" } }] }]),
        ),
    ];
    for (input, wanted) in cases {
        assert_eq!(translated(json!({ "input": input.clone() })), Ok(wanted), "{input}");
    }
}

#[test]
fn instructions_come_first() {
    let body = json!({ "instructions": "S", "input": [
        { "role": "developer", "content": "D" }, { "role": "user", "content": "Hi" }] });
    let wanted = json!([{ "role": "system", "content": "S\n\nD" }, { "role": "user", "content": "Hi" }]);
    assert_eq!(translated(body), Ok(wanted));
}

#[test]
fn complaints_name_the_item() {
    let cases = [
        (json!(null), "input"),
        (json!(7), "input"),
        (json!([]), "input"),
        (json!(["a"]), "input[0]"),
        (json!([{ "content": "a" }]), "input[0].role"),
        (json!([{ "role": "tool", "content": "a" }]), "input[0].role"),
        (json!([{ "role": "user" }]), "input[0].content"),
        (json!([{ "role": "user", "content": [{ "type": "input_file" }] }]), "input[0].content[0].type"),
        (
            json!([{ "role": "user", "content": [{ "type": "input_image", "file_id": "f" }] }]),
            "input[0].content[0].image_url",
        ),
        (
            json!([{ "role": "system", "content": [{ "type": "input_image", "image_url": "u" }] }]),
            "input[0].content[0].type",
        ),
        (json!([{ "type": "item_reference", "id": "msg_1" }]), "input[0].type"),
        (json!([{ "type": "web_search_call", "id": "ws_1" }]), "input[0].type"),
        (json!([{ "type": "function_call", "name": "f", "arguments": "" }]), "input[0].call_id"),
        (json!([{ "type": "function_call_output", "call_id": "1" }]), "input[0].output"),
    ];
    for (input, param) in cases {
        let problem = translated(json!({ "input": input.clone() })).expect_err("invalid");
        assert_eq!(problem.param.as_deref(), Some(param), "{input}");
    }
}
