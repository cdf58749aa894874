//! The input items of a Responses request as chat messages.
//!
//! A turn of the assistant is several items (reasoning, a message, calls) and becomes one message. Instructions and the
//! system or developer messages at the beginning become one system message: many chat templates take just one, and only
//! there.

use serde_json::{Map, Value, json};

use crate::ApiError;
use crate::nested_fields::NestedFields;

/// The conversation that a request brings.
pub(super) fn messages(fields: &NestedFields<'_>) -> Result<Vec<Value>, ApiError> {
    let mut builder = MessageBuilder::default();
    if let Some(text) = fields.text("instructions")? {
        builder.system(text.to_owned());
    }
    match fields.get("input") {
        None => return Err(fields.missing("input")),
        Some(Value::String(text)) => builder.push(json!({ "role": "user", "content": text })),
        Some(Value::Array(items)) if items.is_empty() => {
            return Err(ApiError::invalid("input", "`input` must not be empty."));
        }
        Some(Value::Array(items)) => {
            for (index, value) in items.iter().enumerate() {
                item(&NestedFields::of(value, format!("input[{index}]"))?, &mut builder)?;
            }
        }
        Some(other) => return Err(fields.wrong("input", "a string or an array of items", other)),
    }
    Ok(builder.finish())
}

/// Messages so far, and the assistant's turn that is still growing.
#[derive(Default)]
struct MessageBuilder {
    messages: Vec<Value>,
    text: Option<String>,
    reasoning: String,
    calls: Vec<Value>,
}

impl MessageBuilder {
    fn push(&mut self, message: Value) {
        self.close();
        self.messages.push(message);
    }

    fn system(&mut self, text: String) {
        self.close();
        match self.messages.as_mut_slice() {
            [first] if first["role"] == "system" => {
                let before = first["content"].as_str().unwrap_or_default();
                first["content"] = format!("{before}\n\n{text}").into();
            }
            _ => self.messages.push(json!({ "role": "system", "content": text })),
        }
    }

    /// Adds the text of an assistant to the open turn; begins a new turn if that one already has text or calls.
    fn assistant(&mut self, text: String) {
        if self.text.is_some() || !self.calls.is_empty() {
            self.close();
        }
        self.text = Some(text);
    }

    /// Adds reasoning; begins a new turn if the open one already has text or calls.
    fn reasoning(&mut self, text: &str) {
        if self.text.is_some() || !self.calls.is_empty() {
            self.close();
        }
        self.reasoning.push_str(text);
    }

    fn close(&mut self) {
        let (text, reasoning) = (self.text.take(), std::mem::take(&mut self.reasoning));
        let calls = std::mem::take(&mut self.calls);
        // A turn with reasoning alone is dropped.
        if text.is_none() && calls.is_empty() {
            return;
        }
        let mut turn = Map::new();
        turn.insert("role".to_owned(), "assistant".into());
        turn.insert("content".to_owned(), text.into());
        if !reasoning.is_empty() {
            // vLLM reads the first name, the other engines and the chat templates the second.
            turn.insert("reasoning".to_owned(), reasoning.as_str().into());
            turn.insert("reasoning_content".to_owned(), reasoning.into());
        }
        if !calls.is_empty() {
            turn.insert("tool_calls".to_owned(), calls.into());
        }
        self.messages.push(Value::Object(turn));
    }

    fn finish(mut self) -> Vec<Value> {
        self.close();
        self.messages
    }
}

fn item(item: &NestedFields<'_>, builder: &mut MessageBuilder) -> Result<(), ApiError> {
    match item.text("type")?.unwrap_or("message") {
        "message" => message(item, builder),
        "function_call" => {
            let (id, name) = (item.required_text("call_id")?, item.required_text("name")?);
            let function = json!({ "name": name, "arguments": item.required_text("arguments")? });
            builder.calls.push(json!({ "id": id, "type": "function", "function": function }));
            Ok(())
        }
        "function_call_output" => {
            let id = item.required_text("call_id")?;
            let text = plain(item, "output")?;
            builder.push(json!({ "role": "tool", "tool_call_id": id, "content": text }));
            Ok(())
        }
        "reasoning" => {
            for text in reasoning(item)? {
                builder.reasoning(text);
            }
            Ok(())
        }
        "item_reference" => {
            let message = "Items are not stored, so they cannot be referred to: send the item itself.";
            Err(ApiError::invalid(&item.at("type"), message))
        }
        other => Err(ApiError::unsupported(&item.at("type"), &format!("An item of type {other:?}"))),
    }
}

fn message(message: &NestedFields<'_>, builder: &mut MessageBuilder) -> Result<(), ApiError> {
    match message.required_text("role")? {
        "user" => {
            let content = content(message)?;
            builder.push(json!({ "role": "user", "content": content }));
        }
        "assistant" => builder.assistant(plain(message, "content")?),
        "system" | "developer" => builder.system(plain(message, "content")?),
        other => {
            let at = message.at("role");
            let wanted = "`user`, `assistant`, `system` or `developer`";
            return Err(ApiError::invalid(&at, format!("`{at}` must be {wanted}, not {other:?}.")));
        }
    }
    Ok(())
}

/// The thoughts of a reasoning item: in full if they are there, else in summary.
fn reasoning<'a>(item: &NestedFields<'a>) -> Result<Vec<&'a str>, ApiError> {
    for name in ["content", "summary"] {
        let parts = item.array(name)?.unwrap_or_default();
        if !parts.is_empty() {
            return Ok(parts.iter().filter_map(|part| part["text"].as_str()).collect());
        }
    }
    Ok(Vec::new())
}

/// Content as chat has it; text alone becomes a string, which every chat template understands.
fn content(message: &NestedFields<'_>) -> Result<Value, ApiError> {
    let parts = parts(message, "content")?;
    let texts: Option<Vec<&str>> = parts.iter().map(|part| part["text"].as_str()).collect();
    Ok(texts.map_or_else(|| Value::from(parts.clone()), |texts| texts.join("\n").into()))
}

/// Content where only text is possible.
fn plain(item: &NestedFields<'_>, name: &str) -> Result<String, ApiError> {
    let parts = parts(item, name)?;
    match parts.iter().position(|part| !part["text"].is_string()) {
        Some(index) => {
            Err(ApiError::unsupported(&format!("{}[{index}].type", item.at(name)), "An image here"))
        }
        None => Ok(parts.iter().filter_map(|part| part["text"].as_str()).collect::<Vec<_>>().join("\n")),
    }
}

fn parts(item: &NestedFields<'_>, name: &str) -> Result<Vec<Value>, ApiError> {
    match item.get(name) {
        None => Err(item.missing(name)),
        Some(Value::String(text)) => Ok(vec![json!({ "type": "text", "text": text })]),
        Some(Value::Array(parts)) => {
            let at = item.at(name);
            let parts = parts.iter().enumerate();
            parts.map(|(index, value)| part(&NestedFields::of(value, format!("{at}[{index}]"))?)).collect()
        }
        Some(other) => Err(item.wrong(name, "a string or an array of parts", other)),
    }
}

fn part(part: &NestedFields<'_>) -> Result<Value, ApiError> {
    match part.required_text("type")? {
        "input_text" | "output_text" | "text" => {
            Ok(json!({ "type": "text", "text": part.required_text("text")? }))
        }
        "refusal" => Ok(json!({ "type": "text", "text": part.required_text("refusal")? })),
        "input_image" => {
            let Some(url) = part.text("image_url")? else {
                return Err(ApiError::unsupported(&part.at("image_url"), "An image without a URL"));
            };
            let mut image = json!({ "url": url });
            if let Some(detail) = part.text("detail")? {
                image["detail"] = detail.into();
            }
            Ok(json!({ "type": "image_url", "image_url": image }))
        }
        other => Err(ApiError::unsupported(&part.at("type"), &format!("Content of type {other:?}"))),
    }
}

#[cfg(test)]
#[path = "input_tests.rs"]
mod tests;
