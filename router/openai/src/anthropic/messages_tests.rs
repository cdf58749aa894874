//! Conversations and what becomes of them.

use serde_json::{Value, json};

use super::*;

fn translated(system_prompt: Value, messages: Value) -> Result<(Value, bool), ApiError> {
    let body = json!({ "system": system_prompt, "messages": messages });
    let fields = NestedFields::of_body(&body)?;
    let mut out: Vec<Value> = system(&fields)?.into_iter().collect();
    let continues = conversation(&fields, &mut out)?;
    Ok((Value::Array(out), continues))
}

#[test]
fn system_prompts() {
    let cases = [
        (json!(null), json!(null)),
        (json!("S"), json!("S")),
        (json!([{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }]), json!("a\nb")),
        (
            json!([{ "type": "text", "text": "x-anthropic-billing-header: cch=1;" },
                   { "type": "text", "text": "b", "cache_control": { "type": "ephemeral" } }]),
            json!("b"),
        ),
    ];
    for (given, wanted) in cases {
        let (messages, _) =
            translated(given, json!([{ "role": "user", "content": "Hi" }])).expect("valid messages");
        let told = if messages[0]["role"] == "system" { &messages[0]["content"] } else { &Value::Null };
        assert_eq!(*told, wanted);
    }
}

#[test]
fn a_user_turn() {
    let png =
        json!({ "type": "image", "source": { "type": "base64", "media_type": "image/png", "data": "AA" } });
    let seen = json!({ "type": "image_url", "image_url": { "url": "data:image/png;base64,AA" } });
    let text = |text: &str| json!({ "type": "text", "text": text });
    let result = |content: Value| json!({ "type": "tool_result", "tool_use_id": "t", "content": content });
    let tool = |text: &str| json!({ "role": "tool", "tool_call_id": "t", "content": text });
    let user = |content: Value| json!({ "role": "user", "content": content });
    let plain =
        json!({ "type": "document", "source": { "type": "text", "media_type": "text/plain", "data": "D" } });
    let cases = [
        (json!("Hi"), json!([user(json!("Hi"))])),
        (json!([text("a"), text("b")]), json!([user(json!("a\nb"))])),
        (json!([plain, text("b")]), json!([user(json!("D\nb"))])),
        (json!([text("a"), png]), json!([user(json!([text("a"), seen]))])),
        (json!([result(json!("42"))]), json!([tool("42")])),
        (json!([result(json!(null))]), json!([tool("")])),
        (json!([text("x"), result(json!([text("4"), text("2")]))]), json!([tool("4\n2"), user(json!("x"))])),
        (json!([result(json!([png]))]), json!([tool(""), user(json!([seen]))])),
        (json!([{ "type": "tool_result", "tool_use_id": "t", "is_error": true }]), json!([tool("Error")])),
    ];
    for (content, wanted) in cases {
        let got = translated(json!(null), json!([{ "role": "user", "content": content.clone() }]));
        assert_eq!(got, Ok((wanted, false)), "{content}");
    }
}

#[test]
fn an_assistant_turn() {
    let text = json!({ "type": "text", "text": "a" });
    let thinking = json!({ "type": "thinking", "thinking": "t", "signature": "s" });
    let redacted = json!({ "type": "redacted_thinking", "data": "zz" });
    let call = json!({ "type": "tool_use", "id": "c", "name": "f", "input": { "x": 1 } });
    let called =
        json!({ "id": "c", "type": "function", "function": { "name": "f", "arguments": "{\"x\":1}" } });
    let cases = [
        (json!("a"), json!({ "role": "assistant", "content": "a" }), true),
        (json!([text, text]), json!({ "role": "assistant", "content": "aa" }), true),
        (json!([call]), json!({ "role": "assistant", "content": null, "tool_calls": [called] }), false),
        (
            json!([redacted, thinking, text, call]),
            json!({ "role": "assistant", "content": "a", "reasoning": "t", "reasoning_content": "t",
                    "tool_calls": [called] }),
            false,
        ),
    ];
    for (content, wanted, continues) in cases {
        let got = translated(json!(null), json!([{ "role": "assistant", "content": content.clone() }]));
        assert_eq!(got, Ok((json!([wanted]), continues)), "{content}");
    }
    let answered = json!([{ "role": "assistant", "content": "a" }, { "role": "user", "content": "b" }]);
    assert!(!translated(json!(null), answered).expect("valid").1);
}

#[test]
fn complaints_name_the_block() {
    let cases = [
        (json!([]), "messages"),
        (json!([7]), "messages[0]"),
        (json!([{ "content": "a" }]), "messages[0].role"),
        (json!([{ "role": "tool", "content": "a" }]), "messages[0].role"),
        (json!([{ "role": "user" }]), "messages[0].content"),
        (json!([{ "role": "user", "content": 7 }]), "messages[0].content"),
        (json!([{ "role": "user", "content": [{ "type": "text" }] }]), "messages[0].content[0].text"),
        (json!([{ "role": "user", "content": [{ "type": "audio" }] }]), "messages[0].content[0].type"),
        (
            json!([{ "role": "user", "content": [{ "type": "image", "source": { "type": "file" } }] }]),
            "messages[0].content[0].source.type",
        ),
        (
            json!([{ "role": "assistant", "content": [{ "type": "tool_use", "id": "c", "name": "f", "input": 1 }] }]),
            "messages[0].content[0].input",
        ),
        (
            json!([{ "role": "user", "content": [{ "type": "tool_result", "content": "a" }] }]),
            "messages[0].content[0].tool_use_id",
        ),
    ];
    for (messages, param) in cases {
        let problem = translated(json!(null), messages.clone()).expect_err("invalid");
        assert_eq!(problem.param.as_deref(), Some(param), "{messages}");
    }
}
