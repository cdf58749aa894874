//! Types of arguments in the XML-like formats, where the model writes bare text and the schema determines the type.

use serde_json::Value;

use crate::python;

/// Conversion of a value's text to JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A string, streamed as it arrives.
    String,
    /// A string, or null when the whole text is `null`; streamed once it cannot be null any more.
    NullableString,
    Integer,
    Number,
    Boolean,
    /// An object or a list.
    Structure,
    /// Determined by the text.
    Any,
}

impl Kind {
    /// Returns the kind of a schema. If a schema allows several types the text decides, except that a type and null is that type.
    pub(crate) fn of(schema: &Value) -> Self {
        let mut types = Vec::new();
        collect_types(schema, &mut types, 0);
        let nullable = types.contains(&"null");
        types.retain(|name| *name != "null");
        types.dedup();
        match types.as_slice() {
            ["string"] if nullable => Self::NullableString,
            ["string"] => Self::String,
            ["integer"] => Self::Integer,
            ["number"] => Self::Number,
            ["boolean"] => Self::Boolean,
            ["object"] | ["array"] => Self::Structure,
            _ => Self::Any,
        }
    }

    /// Renders a whole value as JSON. Text that does not fit its type becomes a string, so that no value is lost.
    pub(crate) fn render(self, text: &str) -> String {
        let trimmed = text.trim();
        let json = match self {
            Self::String => None,
            _ if trimmed == "null" || trimmed == "None" => Some("null".to_owned()),
            Self::NullableString => None,
            Self::Integer => integer(trimmed),
            Self::Number => number(trimmed),
            Self::Boolean => boolean(trimmed),
            Self::Structure => structure(trimmed),
            Self::Any => number(trimmed).or_else(|| boolean(trimmed)).or_else(|| structure(trimmed)),
        };
        json.unwrap_or_else(|| Value::from(text).to_string())
    }
}

/// Deepest nesting of `anyOf` that is read; a deeper schema counts as any type.
const SCHEMA_DEPTH_MAX: usize = 4;

fn collect_types<'a>(schema: &'a Value, types: &mut Vec<&'a str>, depth: usize) {
    if depth > SCHEMA_DEPTH_MAX {
        return;
    }
    match schema.get("type") {
        Some(Value::String(name)) => return types.push(name),
        Some(Value::Array(names)) => return types.extend(names.iter().filter_map(Value::as_str)),
        _ => {}
    }
    for choice in ["anyOf", "oneOf", "allOf"] {
        for schema in schema.get(choice).and_then(Value::as_array).into_iter().flatten() {
            collect_types(schema, types, depth + 1);
        }
    }
    let values = schema.get("enum").and_then(Value::as_array);
    if types.is_empty() && values.is_some_and(|values| values.iter().all(Value::is_string)) {
        types.push("string");
    }
}

fn integer(text: &str) -> Option<String> {
    // An integer of any length that is valid JSON stays as the model wrote it.
    let digits = text.strip_prefix('-').unwrap_or(text);
    let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    if plain && (digits == "0" || !digits.starts_with('0')) {
        return Some(text.to_owned());
    }
    text.parse::<i64>().ok().map(|value| value.to_string())
}

fn number(text: &str) -> Option<String> {
    if text.starts_with(|c: char| c == '-' || c.is_ascii_digit())
        && serde_json::from_str::<serde_json::Number>(text).is_ok()
    {
        return Some(text.to_owned());
    }
    integer(text)
}

fn boolean(text: &str) -> Option<String> {
    ["true", "false"].into_iter().find(|word| text.eq_ignore_ascii_case(word)).map(str::to_owned)
}

fn structure(text: &str) -> Option<String> {
    if !text.starts_with(['{', '[', '(', '"']) {
        return None;
    }
    match serde_json::from_str::<serde::de::IgnoredAny>(text) {
        Ok(_) => Some(text.to_owned()),
        Err(_) => python::to_json(text),
    }
}
