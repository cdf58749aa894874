//! `/v1/messages`: Anthropic's surface, as vLLM 0.32 offers it.

use serde_json::{Value, json};

use super::answer::{Answer, Choice};
use super::refusal::Refusal;
use super::request::{Body, Message, Stops, Text};
use crate::output_generator::Ending;

/// Brings a body into the form of a chat.
pub(super) fn to_chat(object: &Value) -> Result<Body<'_>, Refusal> {
    let Some(messages) = object["messages"].as_array() else { return Err(Refusal::missing("messages")) };
    let mut chat = Vec::with_capacity(messages.len() + 1);
    let read = |value| <Text<'_> as serde::Deserialize>::deserialize(value).unwrap_or_default();
    match &object["system"] {
        Value::Null => {}
        // Unlike the blocks of a message, those of the system prompt are joined without a separator.
        Value::Array(blocks) => {
            let text: String = blocks.iter().filter_map(|block| block["text"].as_str()).collect();
            chat.push(Message {
                role: Text("system".into()),
                content: Text(text.into()),
                ..Message::default()
            });
        }
        system => {
            chat.push(Message { role: Text("system".into()), content: read(system), ..Message::default() });
        }
    }
    for message in messages {
        let role = read(&message["role"]);
        if !matches!(role.0.as_ref(), "user" | "assistant" | "system") {
            return Err(Refusal::bad("messages", "Input should be 'user', 'assistant' or 'system'"));
        }
        chat.push(Message { role, content: read(&message["content"]), ..Message::default() });
    }
    let stops = object["stop_sequences"].as_array();
    let stops = stops.map(|stops| stops.iter().filter_map(Value::as_str).map(str::to_owned).collect());
    Ok(Body {
        model: object["model"].as_str().map(|model| Text(model.into())),
        messages: Some(chat),
        max_tokens: object["max_tokens"].as_i64(),
        temperature: object["temperature"].as_f64(),
        stream: object["stream"].as_bool(),
        stop: stops.map(Stops::Several),
        ..Body::default()
    })
}

/// The answer to `/v1/messages/count_tokens`.
pub(super) fn counted(tokens: usize) -> Value {
    json!({ "input_tokens": tokens, "context_management": { "original_input_tokens": tokens } })
}

fn stop(choice: &Choice) -> (&'static str, Value) {
    match &choice.output.ending {
        Ending::Length => ("max_tokens", Value::Null),
        Ending::StopString(stop) => ("stop_sequence", Value::from(stop.as_str())),
        Ending::Eos | Ending::StopToken(_) => ("end_turn", Value::Null),
    }
}

fn usage(answer: &Answer) -> Value {
    let usage = answer.usage();
    let block_tokens = answer.worker.config.block_tokens;
    let created = (usage.prompt / block_tokens * block_tokens).saturating_sub(usage.cached);
    json!({
        "input_tokens": usage.prompt.saturating_sub(created + usage.cached),
        "output_tokens": usage.completion,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": usage.cached,
    })
}

/// A whole answer.
pub(super) fn whole(answer: &Answer) -> String {
    let Some(choice) = answer.choices.first() else { return String::new() };
    let (reason, sequence) = stop(choice);
    let mut message = json!({
        "id": answer.id, "type": "message", "role": "assistant",
        "content": [{ "type": "text", "text": choice.output.text }],
        "model": answer.model(), "stop_reason": reason,
    });
    if !sequence.is_null() {
        message["stop_sequence"] = sequence;
    }
    message["usage"] = usage(answer);
    message.to_string()
}

fn event(name: &str, value: &Value, out: &mut String) {
    out.push_str("event: ");
    out.push_str(name);
    out.push_str("\ndata: ");
    out.push_str(&value.to_string());
    out.push_str("\n\n");
}

/// The first events of a stream.
pub(super) fn opening(answer: &Answer, out: &mut String) {
    let start = json!({ "type": "message_start", "message": {
        "id": answer.id, "type": "message", "role": "assistant", "content": [],
        "model": answer.model(), "stop_reason": null, "stop_sequence": null,
        "usage": { "input_tokens": answer.usage().prompt, "output_tokens": 0 },
    } });
    event("message_start", &start, out);
    let block =
        json!({ "type": "content_block_start", "content_block": { "type": "text", "text": "" }, "index": 0 });
    event("content_block_start", &block, out);
}

/// The tokens up to `to`.
pub(super) fn piece(answer: &Answer, index: usize, to: usize, out: &mut String) {
    let choice = &answer.choices[index];
    let words = &choice.output.text[choice.output.shown(choice.sent)..choice.output.shown(to)];
    if !words.is_empty() {
        let delta = json!({ "type": "content_block_delta", "delta": { "type": "text_delta", "text": words }, "index": 0 });
        event("content_block_delta", &delta, out);
    }
}

/// The last events of a stream.
pub(super) fn closing(answer: &Answer, out: &mut String) {
    let Some(choice) = answer.choices.first() else { return };
    let (reason, sequence) = stop(choice);
    event("content_block_stop", &json!({ "type": "content_block_stop", "index": 0 }), out);
    let delta = json!({
        "type": "message_delta", "delta": { "stop_reason": reason, "stop_sequence": sequence },
        "usage": usage(answer),
    });
    event("message_delta", &delta, out);
    event("message_stop", &json!({ "type": "message_stop" }), out);
}
