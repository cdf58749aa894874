//! The conversation of a Messages request as chat messages.
//!
//! A user's turn may hold tool results: those become messages of role `tool` and come first, as chat wants them right
//! behind the calls; images in them move to the user's message behind. A last turn of the assistant is continued.

use serde_json::{Map, Value, json};

use crate::ApiError;
use crate::nested_fields::NestedFields;

/// A block that Claude Code puts first; it has a hash per request, which would keep every prompt out of every cache.
const BILLING: &str = "x-anthropic-billing-header";

/// The system prompt as a message, if there is one.
pub(super) fn system(fields: &NestedFields<'_>) -> Result<Option<Value>, ApiError> {
    let Some(value) = fields.get("system") else { return Ok(None) };
    let text = instructions(value, &fields.at("system"))?;
    Ok((!text.is_empty()).then(|| json!({ "role": "system", "content": text })))
}

/// Appends the conversation; whether its last message is the start of the answer.
pub(super) fn conversation(fields: &NestedFields<'_>, out: &mut Vec<Value>) -> Result<bool, ApiError> {
    let messages = fields.array("messages")?.ok_or_else(|| fields.missing("messages"))?;
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", "`messages` must not be empty."));
    }
    let mut continues = false;
    for (index, message) in messages.iter().enumerate() {
        let message = NestedFields::of(message, format!("messages[{index}]"))?;
        continues = false;
        match message.required_text("role")? {
            "user" => user(&message, out)?,
            "assistant" => continues = assistant(&message, out)?,
            "system" => {
                let content = message.get("content").ok_or_else(|| message.missing("content"))?;
                let text = instructions(content, &message.at("content"))?;
                out.push(json!({ "role": "system", "content": text }));
            }
            other => {
                let at = message.at("role");
                let wanted = "`user`, `assistant` or `system`";
                return Err(ApiError::invalid(&at, format!("`{at}` must be {wanted}, not {other:?}.")));
            }
        }
    }
    Ok(continues)
}

fn instructions(value: &Value, at: &str) -> Result<String, ApiError> {
    let kept = |text: &&str| !text.starts_with(BILLING);
    match value {
        Value::String(text) => Ok(Some(text.as_str()).filter(kept).unwrap_or_default().to_owned()),
        Value::Array(blocks) => {
            let texts = blocks.iter().enumerate().map(|(index, block)| {
                let block = NestedFields::of(block, format!("{at}[{index}]"))?;
                match block.required_text("type")? {
                    "text" => block.required_text("text"),
                    other => Err(unknown_block(&block, other)),
                }
            });
            let texts = texts.collect::<Result<Vec<_>, _>>()?;
            Ok(texts.into_iter().filter(kept).collect::<Vec<_>>().join("\n"))
        }
        _ => Err(ApiError::invalid(at, format!("`{at}` must be a string or an array of text blocks."))),
    }
}

/// The blocks of a message; a string is one block of text.
fn blocks<'a>(message: &NestedFields<'a>) -> Result<Vec<NestedFields<'a>>, ApiError> {
    match message.array("content") {
        Ok(Some(blocks)) => {
            let at = message.at("content");
            let blocks = blocks.iter().enumerate();
            blocks.map(|(index, block)| NestedFields::of(block, format!("{at}[{index}]"))).collect()
        }
        Ok(None) => Err(message.missing("content")),
        Err(problem) => {
            let at = message.at("content");
            Err(ApiError { message: format!("`{at}` must be a string or an array of blocks."), ..problem })
        }
    }
}

fn user(message: &NestedFields<'_>, out: &mut Vec<Value>) -> Result<(), ApiError> {
    if let Some(Value::String(text)) = message.get("content") {
        out.push(json!({ "role": "user", "content": text }));
        return Ok(());
    }
    let mut parts = Vec::new();
    let mut has_results = false;
    for block in blocks(message)? {
        if block.required_text("type")? == "tool_result" {
            has_results = true;
            tool_result(&block, out, &mut parts)?;
        } else {
            parts.push(part(&block)?);
        }
    }
    if !parts.is_empty() || !has_results {
        out.push(json!({ "role": "user", "content": joined(parts) }));
    }
    Ok(())
}

fn tool_result(
    block: &NestedFields<'_>,
    out: &mut Vec<Value>,
    images: &mut Vec<Value>,
) -> Result<(), ApiError> {
    let id = block.required_text("tool_use_id")?;
    let mut text = match block.get("content") {
        None => String::new(),
        Some(Value::String(text)) => text.clone(),
        Some(_) => {
            let mut texts = Vec::new();
            for inner in blocks(block)? {
                let part = part(&inner)?;
                match part["text"].as_str() {
                    Some(text) => texts.push(text.to_owned()),
                    None => images.push(part),
                }
            }
            texts.join("\n")
        }
    };
    if text.is_empty() && block.flag("is_error")?.unwrap_or(false) {
        text.push_str("Error");
    }
    out.push(json!({ "role": "tool", "tool_call_id": id, "content": text }));
    Ok(())
}

/// A text, image or plain-text document as a part of chat content.
fn part(block: &NestedFields<'_>) -> Result<Value, ApiError> {
    match block.required_text("type")? {
        "text" => Ok(json!({ "type": "text", "text": block.required_text("text")? })),
        "image" => {
            let url = image_url(&source(block)?)?;
            Ok(json!({ "type": "image_url", "image_url": { "url": url } }))
        }
        "document" => {
            let source = source(block)?;
            match source.required_text("type")? {
                "text" => Ok(json!({ "type": "text", "text": source.required_text("data")? })),
                _ => Err(ApiError::unsupported(&source.at("type"), "A document that is not plain text")),
            }
        }
        other => Err(unknown_block(block, other)),
    }
}

fn source<'a>(block: &NestedFields<'a>) -> Result<NestedFields<'a>, ApiError> {
    block.object("source")?.ok_or_else(|| block.missing("source"))
}

fn image_url(source: &NestedFields<'_>) -> Result<String, ApiError> {
    match source.required_text("type")? {
        "url" => Ok(source.required_text("url")?.to_owned()),
        "base64" => {
            let (media, data) = (source.required_text("media_type")?, source.required_text("data")?);
            Ok(format!("data:{media};base64,{data}"))
        }
        _ => Err(ApiError::unsupported(&source.at("type"), "An image that is neither `base64` nor `url`")),
    }
}

/// Text alone becomes a string, which every chat template understands.
fn joined(parts: Vec<Value>) -> Value {
    let texts: Option<Vec<&str>> = parts.iter().map(|part| part["text"].as_str()).collect();
    match texts {
        Some(texts) => Value::from(texts.join("\n")),
        None => Value::Array(parts),
    }
}

/// Appends a turn of the assistant; whether it can be continued, which one that calls tools cannot.
fn assistant(message: &NestedFields<'_>, out: &mut Vec<Value>) -> Result<bool, ApiError> {
    if let Some(Value::String(text)) = message.get("content") {
        out.push(json!({ "role": "assistant", "content": text }));
        return Ok(true);
    }
    let (mut text, mut reasoning, mut calls) = (String::new(), String::new(), Vec::new());
    for block in blocks(message)? {
        match block.required_text("type")? {
            "text" => text.push_str(block.required_text("text")?),
            "thinking" => reasoning.push_str(block.required_text("thinking")?),
            "redacted_thinking" => {}
            "tool_use" => calls.push(tool_use(&block)?),
            other => return Err(unknown_block(&block, other)),
        }
    }
    let can_continue = calls.is_empty() && !text.is_empty();
    let mut turn = Map::new();
    turn.insert("role".to_owned(), "assistant".into());
    let is_only_calls = text.is_empty() && !calls.is_empty();
    turn.insert("content".to_owned(), if is_only_calls { Value::Null } else { text.into() });
    if !reasoning.is_empty() {
        // vLLM reads the first name, the other engines and the chat templates the second.
        turn.insert("reasoning".to_owned(), reasoning.as_str().into());
        turn.insert("reasoning_content".to_owned(), reasoning.into());
    }
    if !calls.is_empty() {
        turn.insert("tool_calls".to_owned(), Value::Array(calls));
    }
    out.push(Value::Object(turn));
    Ok(can_continue)
}

fn tool_use(block: &NestedFields<'_>) -> Result<Value, ApiError> {
    let (id, name) = (block.required_text("id")?, block.required_text("name")?);
    let arguments = match block.get("input") {
        None => "{}".to_owned(),
        Some(input @ Value::Object(_)) => input.to_string(),
        Some(other) => return Err(block.wrong("input", "an object", other)),
    };
    Ok(json!({ "id": id, "type": "function", "function": { "name": name, "arguments": arguments } }))
}

fn unknown_block(block: &NestedFields<'_>, kind: &str) -> ApiError {
    ApiError::unsupported(&block.at("type"), &format!("A block of type {kind:?} here"))
}

#[cfg(test)]
#[path = "messages_tests.rs"]
mod tests;
