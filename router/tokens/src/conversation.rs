//! Conversion of messages to the form that engines pass to a template.
//!
//! vLLM's rules, which determine a chat's tokens: content parts are joined by line feeds, unless the template iterates over
//! the parts itself; a content that is absent or null is empty; the arguments of tool calls are objects; a `developer` is a
//! `system` when the template does not know the former, and then all system messages become one.

use serde_json::{Map, Value};

/// Expectations of a template, as far as its source shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TemplateFeatures {
    /// Whether the template iterates over the parts of a message's content.
    pub(crate) takes_parts: bool,
    /// Whether the template knows the role `developer`.
    pub(crate) knows_developer: bool,
}

impl TemplateFeatures {
    pub(crate) fn of(source: &str) -> Self {
        let loops = |statement: &str| {
            let inner = statement.trim_matches(['-', '+', ' ', '\n']);
            let over = inner.strip_prefix("for ").and_then(|rest| rest.split_once(" in "));
            over.is_some_and(|(_, what)| {
                let what = what.trim();
                let what = what.split_whitespace().next().unwrap_or(what);
                [".content", "['content']", "[\"content\"]"].iter().any(|end| what.ends_with(end))
                    || what == "content"
            })
        };
        let statements = source.split("{%").skip(1).filter_map(|rest| rest.split("%}").next());
        Self {
            takes_parts: statements.into_iter().any(loops),
            knows_developer: source.contains("\"developer\"") || source.contains("'developer'"),
        }
    }
}

/// Converts messages to the form that the template expects; false when a message has parts that are no text, whose tokens
/// only the engine knows.
pub(crate) fn prepare(messages: &mut Value, features: TemplateFeatures) -> bool {
    let Value::Array(messages) = messages else { return true };
    let mut is_text = true;
    for message in messages.iter_mut().filter_map(Value::as_object_mut) {
        is_text &= content(message, features.takes_parts);
        tool_calls(message);
    }
    let is_developer = |message: &Value| message["role"] == "developer";
    if !features.knows_developer && messages.iter().any(is_developer) {
        let developers = messages.iter_mut().filter(|message| is_developer(message));
        for message in developers.filter_map(Value::as_object_mut) {
            message.insert("role".to_owned(), "system".into());
        }
        one_system(messages);
    }
    is_text
}

fn content(message: &mut Map<String, Value>, takes_parts: bool) -> bool {
    let is_text_part = |part: &Value| part.is_string() || part["text"].is_string();
    let text_of =
        |part: &Value| part.as_str().or_else(|| part["text"].as_str()).unwrap_or_default().to_owned();
    match message.get_mut("content") {
        Some(Value::Array(parts)) => {
            let is_text = parts.iter().all(is_text_part);
            if !takes_parts {
                let texts: Vec<String> =
                    parts.iter().filter(|part| is_text_part(part)).map(text_of).collect();
                message.insert("content".to_owned(), texts.join("\n").into());
            }
            is_text
        }
        None | Some(Value::Null) => {
            message.insert("content".to_owned(), "".into());
            true
        }
        Some(Value::String(text)) if takes_parts => {
            let text = std::mem::take(text);
            message.insert("content".to_owned(), serde_json::json!([{ "type": "text", "text": text }]));
            true
        }
        Some(_) => true,
    }
}

fn tool_calls(message: &mut Map<String, Value>) {
    if message.get("role").is_none_or(|role| role != "assistant") {
        return;
    }
    match message.get_mut("tool_calls") {
        Some(Value::Array(calls)) if calls.is_empty() => drop(message.remove("tool_calls")),
        Some(Value::Array(calls)) => {
            // Never fails, whatever a client sends: the engine refuses calls that are invalid.
            for function in calls.iter_mut().filter_map(|call| call.get_mut("function")?.as_object_mut()) {
                let arguments = match function.get("arguments") {
                    Some(Value::String(text)) => serde_json::from_str(text).unwrap_or_default(),
                    other => other.cloned().unwrap_or_default(),
                };
                let arguments = if arguments.is_object() { arguments } else { Value::Object(Map::new()) };
                function.insert("arguments".to_owned(), arguments);
            }
        }
        _ => {}
    }
}

fn one_system(messages: &mut Vec<Value>) {
    let is_system = |message: &Value| message["role"] == "system";
    let text = |message: &Value| match &message["content"] {
        Value::Array(parts) => {
            let texts: Vec<&str> = parts.iter().filter_map(|part| part["text"].as_str()).collect();
            texts.join("\n")
        }
        other => other.as_str().unwrap_or_default().to_owned(),
    };
    let places: Vec<usize> =
        messages.iter().enumerate().filter(|(_, message)| is_system(message)).map(|(at, _)| at).collect();
    if places.iter().all(|&at| at == 0) {
        return;
    }
    let texts: Vec<String> = messages
        .iter()
        .filter(|message| is_system(message))
        .map(text)
        .filter(|text| !text.is_empty())
        .collect();
    messages.retain(|message| !is_system(message));
    messages.insert(0, serde_json::json!({ "role": "system", "content": texts.join("\n\n") }));
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const PLAIN: TemplateFeatures = TemplateFeatures { takes_parts: false, knows_developer: false };

    #[test]
    fn a_template_shows_its_habits() {
        for (source, takes_parts, knows_developer) in [
            ("{% for m in messages %}{{ m.content }}{% endfor %}", false, false),
            ("{%- for part in message['content'] -%}", true, false),
            ("{% for content in message.content %}{% if role == 'developer' %}", true, true),
            ("{% for c in m[\"content\"] if c.x %}", true, false),
        ] {
            assert_eq!(
                TemplateFeatures::of(source),
                TemplateFeatures { takes_parts, knows_developer },
                "{source}"
            );
        }
    }

    #[test]
    fn messages_become_what_templates_expect() {
        let mut messages = json!([
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": null, "tool_calls": [
                {"function": {"name": "f", "arguments": "{\"x\": 1}"}}, {"function": {"name": "g", "arguments": "{"}}]},
            {"role": "assistant", "tool_calls": []},
        ]);
        assert!(prepare(&mut messages, PLAIN));
        assert_eq!(messages[0]["content"], "a\nb");
        assert_eq!(messages[1]["content"], "");
        assert_eq!(messages[1]["tool_calls"][0]["function"]["arguments"], json!({"x": 1}));
        assert_eq!(messages[1]["tool_calls"][1]["function"]["arguments"], json!({}));
        assert!(messages[2].get("tool_calls").is_none());
        let mut image =
            json!([{"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "x"}]}]);
        assert!(!prepare(&mut image, PLAIN));
        assert_eq!(image[0]["content"], "x");
    }

    #[test]
    fn nothing_that_a_client_sends_is_too_odd() {
        let odd = [
            json!(null),
            json!(5),
            json!("x"),
            json!([]),
            json!([[]]),
            json!({}),
            json!([{"function": "x"}]),
        ];
        for value in &odd {
            for field in ["role", "content", "tool_calls"] {
                let mut message = json!({"role": "assistant", "content": "a"});
                message[field] = value.clone();
                let mut developer = json!({"role": "developer", "content": value});
                developer["tool_calls"] = value.clone();
                for features in [PLAIN, TemplateFeatures { takes_parts: true, ..PLAIN }] {
                    prepare(&mut json!([message, value, developer]), features);
                    prepare(&mut value.clone(), features);
                    prepare(
                        &mut json!([{"role": "assistant", "tool_calls": [{"function": value}, value]}]),
                        features,
                    );
                }
            }
        }
    }

    #[test]
    fn developers_are_systems_where_nobody_knows_them() {
        let conversation = json!([{"role": "system", "content": "a"}, {"role": "user", "content": "x"},
            {"role": "developer", "content": "b"}]);
        let mut plain = conversation.clone();
        prepare(&mut plain, PLAIN);
        assert_eq!(plain, json!([{"role": "system", "content": "a\n\nb"}, {"role": "user", "content": "x"}]));
        let mut known = conversation.clone();
        prepare(&mut known, TemplateFeatures { knows_developer: true, ..PLAIN });
        assert_eq!(known, conversation);
    }
}
