//! Server-sent events with a name, as both surfaces stream them.

use std::fmt::Write;

use serde_json::Value;

/// Appends one event; its name is the `type` of its data, too.
pub(crate) fn event(out: &mut String, name: &str, fields: &Value) {
    // Writing to a string cannot fail.
    let _ = write!(out, "event: {name}\ndata: {fields}\n\n");
}

/// Appends a text as a JSON string.
pub(crate) fn quoted(out: &mut String, text: &str) {
    let _ = write!(out, "{}", Value::from(text));
}
