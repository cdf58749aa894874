//! The items of a response's output. Their ids are the answer's id and their place in it.

use serde_json::{Value, json};

use crate::chat;

/// Whether an item is still being made, is whole, or was cut short.
pub(super) type Status = &'static str;

/// An item's id; each kind of item has its own prefix.
pub(super) fn id(prefix: &str, chat: &Value, place: usize) -> String {
    format!("{prefix}_{}_{place}", chat::bare_id(chat))
}

/// The engine's id of a call, or one made from the answer's.
pub(super) fn call_id(chat: &Value, call: &Value, place: usize) -> String {
    let given = call["id"].as_str().filter(|id| !id.is_empty());
    given.map_or_else(|| id("call", chat, place), str::to_owned)
}

pub(super) fn text_part(text: &str, logprobs: &[Value]) -> Value {
    json!({ "type": "output_text", "text": text, "annotations": [], "logprobs": logprobs })
}

pub(super) fn reasoning_part(text: &str) -> Value {
    json!({ "type": "reasoning_text", "text": text })
}

pub(super) fn message(id: &str, content: &[Value], status: Status) -> Value {
    json!({ "id": id, "type": "message", "role": "assistant", "status": status, "content": content })
}

pub(super) fn reasoning(id: &str, content: &[Value], status: Status) -> Value {
    json!({ "id": id, "type": "reasoning", "summary": [], "status": status, "content": content })
}

pub(super) fn call(id: &str, call_id: &str, name: &str, arguments: &str, status: Status) -> Value {
    json!({
        "id": id, "type": "function_call", "call_id": call_id, "name": name, "arguments": arguments,
        "status": status,
    })
}

/// The log-probabilities of a choice, or of a piece of one, in the same shape as chat has them.
pub(super) fn logprobs(choice: &Value) -> &[Value] {
    choice["logprobs"]["content"].as_array().map_or(&[], Vec::as_slice)
}
