//! `/v1/responses`: OpenAI's newer surface, as vLLM 0.32 offers it.

use serde_json::{Value, json};

use super::answer::Answer;
use super::refusal::Refusal;
use super::request::{Body, Message, Text};
use crate::output_generator::Ending;

/// Brings a body into the form of a chat.
pub(super) fn to_chat(object: &Value) -> Result<Body<'_>, Refusal> {
    if object["background"] == true {
        return Err(Refusal::bad("background", "background can only be used when `store` is true"));
    }
    if let Some(id) = object["previous_response_id"].as_str() {
        return Err(Refusal::bad("response_id", format!("Response with id '{id}' not found.")));
    }
    let read = |value| <Text<'_> as serde::Deserialize>::deserialize(value).unwrap_or_default();
    let message =
        |role: &'static str, content| Message { role: Text(role.into()), content, ..Message::default() };
    let mut chat = Vec::new();
    if !object["instructions"].is_null() {
        chat.push(message("system", read(&object["instructions"])));
    }
    match &object["input"] {
        Value::Null => return Err(Refusal::missing("input")),
        Value::Array(items) => {
            chat.extend(items.iter().filter(|item| item["role"].is_string()).map(|item| Message {
                role: read(&item["role"]),
                content: read(&item["content"]),
                ..Message::default()
            }))
        }
        input => chat.push(message("user", read(input))),
    }
    Ok(Body {
        model: object["model"].as_str().map(|model| Text(model.into())),
        messages: Some(chat),
        max_tokens: object["max_output_tokens"].as_i64(),
        temperature: object["temperature"].as_f64(),
        stream: object["stream"].as_bool(),
        kv_transfer_params: Some(object["kv_transfer_params"].clone()).filter(|transfer| !transfer.is_null()),
        ..Body::default()
    })
}

fn is_cut(answer: &Answer) -> bool {
    answer.choices.first().is_some_and(|choice| choice.output.ending == Ending::Length)
}

fn text(answer: &Answer) -> &str {
    answer.choices.first().map_or("", |choice| choice.output.text.as_str())
}

fn item_id(answer: &Answer) -> String {
    format!("msg_{}", answer.id.trim_start_matches("resp_"))
}

fn part(text: &str) -> Value {
    json!({ "annotations": [], "text": text, "type": "output_text", "logprobs": null })
}

fn item(answer: &Answer) -> Value {
    json!({
        "id": item_id(answer), "content": [part(text(answer))], "role": "assistant",
        "status": "completed", "type": "message", "phase": null,
    })
}

fn response(answer: &Answer, status: &str, output: Value, usage: Value) -> Value {
    let incomplete = match status {
        "incomplete" => json!({ "reason": "max_output_tokens" }),
        _ => Value::Null,
    };
    json!({
        "id": answer.id, "created_at": answer.created, "incomplete_details": incomplete, "instructions": null,
        "metadata": null, "model": answer.model(), "object": "response", "output": output,
        "parallel_tool_calls": true, "temperature": 0.0, "tool_choice": "none", "tools": [], "top_p": 1.0,
        "background": false, "max_output_tokens": answer.ask.limits.max_tokens, "max_tool_calls": null,
        "previous_response_id": null, "prompt": null, "reasoning": null, "service_tier": "auto",
        "status": status, "text": null, "top_logprobs": null, "truncation": "disabled", "usage": usage,
        "user": null, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "kv_transfer_params": answer.transfer, "ec_transfer_params": null, "input_messages": null,
        "output_messages": null,
    })
}

/// A whole answer.
pub(super) fn whole(answer: &Answer) -> Value {
    let usage = answer.usage();
    let usage = json!({
        "input_tokens": usage.prompt,
        "input_tokens_details": {
            "cached_tokens": usage.cached, "cache_write_tokens": 0, "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": usage.completion,
        "output_tokens_details": {
            "reasoning_tokens": 0, "tool_output_tokens": 0, "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": usage.prompt + usage.completion,
    });
    let status = if is_cut(answer) { "incomplete" } else { "completed" };
    response(answer, status, json!([item(answer)]), usage)
}

fn event(answer: &mut Answer, name: &str, mut value: Value, out: &mut String) {
    value["sequence_number"] = answer.event.into();
    value["type"] = name.into();
    answer.event += 1;
    out.push_str("event: ");
    out.push_str(name);
    out.push_str("\ndata: ");
    out.push_str(&value.to_string());
    out.push_str("\n\n");
}

/// The first events of a stream.
pub(super) fn opening(answer: &mut Answer, out: &mut String) {
    for name in ["response.created", "response.in_progress"] {
        let response = response(answer, "in_progress", json!([]), Value::Null);
        event(answer, name, json!({ "response": response }), out);
    }
    let id = item_id(answer);
    let item = json!({
        "id": id, "content": [], "role": "assistant", "status": "in_progress", "type": "message", "phase": null,
    });
    event(answer, "response.output_item.added", json!({ "item": item, "output_index": 0 }), out);
    let part = json!({ "annotations": [], "text": "", "type": "output_text", "logprobs": [] });
    let added = json!({ "content_index": 0, "item_id": id, "output_index": 0, "part": part });
    event(answer, "response.content_part.added", added, out);
}

/// The tokens up to `to`.
pub(super) fn piece(answer: &mut Answer, index: usize, to: usize, out: &mut String) {
    let choice = &answer.choices[index];
    let words = &choice.output.text[choice.output.shown(choice.sent)..choice.output.shown(to)];
    if words.is_empty() {
        return;
    }
    let delta = json!({
        "content_index": 0, "delta": words, "item_id": item_id(answer), "logprobs": [], "output_index": 0,
    });
    event(answer, "response.output_text.delta", delta, out);
}

/// The last events of a stream.
pub(super) fn closing(answer: &mut Answer, out: &mut String) {
    let (id, words) = (item_id(answer), text(answer).to_owned());
    let done = json!({ "content_index": 0, "item_id": id, "logprobs": [], "output_index": 0, "text": words });
    event(answer, "response.output_text.done", done, out);
    let done = json!({ "content_index": 0, "item_id": id, "output_index": 0, "part": part(&words) });
    event(answer, "response.content_part.done", done, out);
    let done = json!({ "item": item(answer), "output_index": 0 });
    event(answer, "response.output_item.done", done, out);
    // Also sent for an output that was cut short: its status shows that.
    let response = whole(answer);
    event(answer, "response.completed", json!({ "response": response }), out);
}
